"""Compare the sizes that `advise --model` proposes with the best ones that its predictor finds.

    python benchmarks/proposals.py [--te DIRECTORY] [MODEL NxGPU SEQUENCE ...]

For each case, configurations that the rough estimate of the proposals does not exclude are counted
by dry runs and predicted with the best stock schedule: at most 36 sets of sizes, those within three
times the best rough step. "pairs" are pairs of them that differ by more than 5%, and of these the
share in the right order by the rough estimate.
"""

from __future__ import annotations

import argparse
from itertools import combinations
from pathlib import Path

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.gpus import GPUS, HEADROOM
from megatron_vshape.rehearsal.ranks import DryRunConfig
from megatron_vshape.tuning.advice import Advice
from megatron_vshape.tuning.configurations import Configuration, Subject
from megatron_vshape.tuning.files import load_model
from megatron_vshape.tuning.machine import Machine
from megatron_vshape.tuning.model_names import find_model
from megatron_vshape.tuning.predictor import Counts, Predictor, key_of_count, step_seconds
from megatron_vshape.tuning.proposals import candidates, propose

CASES = """
    llama-3.1-8b 8xh100 4096    qwen2.5-32b 32xa100 4096    llama-3.1-70b 64xh100 4096
    qwen2.5-72b 64xh100 32768   qwen3-30b-a3b 16xh100 4096  gpt-oss-120b 64xb200 4096
    mixtral-8x22b 64xh100 4096  glm-4.5-air 64xh100 4096    qwen3-235b-a22b 64xh200 4096
""".split()
MAX_KEYS, MAX_CONFIGS_PER_KEY, FACTOR = 36, 4, 3.0


def predict(subject: Subject, machine: Machine, te: Path | None) -> dict[Configuration, float]:
    """Return the step of the best stock schedule of each configuration that fits, in seconds."""
    rough = candidates(subject, machine)
    keys: dict[object, list[Configuration]] = {}
    for candidate in rough:
        configs = keys.get(key_of_count(candidate.config), [])
        is_near = candidate.step_s < FACTOR * rough[0].step_s
        if is_near and len(configs) < MAX_CONFIGS_PER_KEY and (configs or len(keys) < MAX_KEYS):
            keys.setdefault(key_of_count(candidate.config), []).append(candidate.config)
    chosen = [config for configs in keys.values() for config in configs]
    make_dry_run_config = lambda: DryRunConfig.of(subject.command, machine.gpu, None, te, 2)  # noqa: E731
    counts = Counts(subject, machine, make_dry_run_config)
    counts.count(chosen, lambda *_: None)
    predictor = Predictor(subject, machine, counts, False, HEADROOM * machine.gpu.memory_bytes)
    steps: dict[Configuration, float] = {}
    for config in chosen:
        try:
            predictions = [*Advice(predictor, config, "", 5.0, make_dry_run_config).stock(config)]
        except ScheduleError:  # it cannot be estimated, as with the command of a user
            continue
        fitting = [step_seconds(prediction) for prediction in predictions if prediction.fits]
        if fitting:
            steps[config] = min(fitting)
    return steps


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--te", type=Path)
    parser.add_argument("cases", nargs="*", default=CASES)
    options = parser.parse_args()
    print(f"{'case':32s} {'best':>8s} {'proposals':>10s} {'first':>8s} {'pairs':>6s}")
    words = options.cases
    for model, gpus, length in zip(words[::3], words[1::3], words[2::3], strict=True):
        number, _, gpu = gpus.partition("x")
        model_command = load_model(find_model(model)).command
        samples = int(number) * (4 if int(length) <= 8192 else 1)
        positions = max(int(length), model_command.number("--max-position-embeddings", 0))
        command = model_command.having(
            seq_length=length,
            max_position_embeddings=positions,
            global_batch_size=samples,
        )
        subject = Subject("", command, [command.script, *command.flags])
        machine = Machine(GPUS[gpu], int(number))
        steps = predict(subject, machine, options.te)
        best = min(steps.values())
        proposed = [steps.get(config, float("inf")) for config in propose(subject, machine)]
        rough = {candidate.config: candidate.step_s for candidate in candidates(subject, machine)}
        pairs = [
            (lhs, rhs) if steps[lhs] < steps[rhs] else (rhs, lhs)
            for lhs, rhs in combinations(steps, 2)
            if not 1 / 1.05 < steps[lhs] / steps[rhs] < 1.05
        ]
        right = sum(rough[faster] < rough[slower] for faster, slower in pairs)
        losses = f"{min(proposed) / best - 1:+10.0%} {proposed[0] / best - 1:+8.0%}"
        share = right / max(1, len(pairs))
        print(f"{f'{model} {gpus} {length}':32s} {best:7.2f}s {losses} {share:6.0%}", flush=True)


if __name__ == "__main__":
    main()
