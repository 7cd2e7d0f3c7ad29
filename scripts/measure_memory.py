"""Print the activation memory that every rank really holds at its peak, beside the predicted one.

    python scripts/measure_memory.py [--ranks 4] [--microbatches 16] [SCHEDULE ...]

Trains the same small GPT for two steps under every schedule, 1F1B by Megatron's own function, and
reads the run's closing line: storages that saved tensors and weight jobs keep, counted pass by
pass (see megatron_vshape.runtime.held_bytes).

The second step is counted once more in another way: every storage that any operation makes, until
it is freed (see live_bytes.py). Those live bytes stand beside the model's: the predicted
activations, the receives posted ahead and one result.

Ends with 1 where a ratio to 1F1B misses the predicted one by more than a tenth, or live bytes the
model by more than a twentieth.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_vshape.core.check.simulate import peak_held
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.instructions import Program

ROOT = Path(__file__).parents[1]
BASELINE = "1f1b"
TOLERANCE = 0.1
LIVE_TOLERANCE = 0.05
AS_RANK = "--as-rank"  # first argument of this script where it is one rank of a run
MODEL = (
    "--transformer-impl local --mock-data --tokenizer-type NullTokenizer --vocab-size 127 "
    "--make-vocab-size-divisible-by 64 --hidden-size 64 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --position-embedding-type rope --no-rope-fusion "
    "--attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm "
    "--micro-batch-size 1 --train-iters 2 --lr 1e-3 --lr-decay-style constant --eval-iters 0 "
    "--eval-interval 1000 --num-workers 0"
).split()


class Peaks(NamedTuple):
    """The peak of every rank in MiB."""

    measured: list[float]
    predicted: list[float]
    live: list[float]  # all storages; empty where Megatron's own schedule runs
    messages: list[float]  # receives posted ahead, and a result

    @property
    def off(self) -> float:
        """Return by how much the live bytes miss the model at most, as a part of it."""
        models = [a + b for a, b in zip(self.predicted, self.messages, strict=False)]
        pairs = zip(self.live, models, strict=False)
        return max((abs(live / model - 1) for live, model in pairs), default=0.0)


def measure(schedule: str, ranks: int, microbatches: int) -> Peaks:
    """Train under `schedule` and return what its closing line says.

    Raises:
        SystemExit: the run failed.
    """
    enough_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    if not enough_gpus:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [
        *torchrun,
        f"--nproc-per-node={ranks}",
        __file__,
        AS_RANK,
        f"--pipeline-model-parallel-size={ranks}",
        f"--pipeline-schedule={schedule}",
        f"--num-layers={2 * ranks}",
        f"--global-batch-size={microbatches}",
        f"--distributed-backend={'nccl' if enough_gpus else 'gloo'}",
        *MODEL,
    ]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    found = re.search(r"per rank in MiB: measured \[(.*?)\], predicted \[(.*?)\]", run.stdout)
    if run.returncode or found is None:
        raise SystemExit(f"{schedule} did not train:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}")
    counted = sorted(re.findall(r"live bytes of rank (\d+): (\d+), messages (\d+)", run.stdout))
    live, messages = ([int(each[at]) / 2**20 for each in counted] for at in (1, 2))
    own = ([float(value) for value in each.split(", ")] for each in found.groups())
    return Peaks(*own, live, messages)


def run_rank(arguments: list[str]) -> None:
    """Train as one rank, as the training script does, with the second step's bytes counted."""
    script = str(ROOT / "scripts" / "pretrain_gpt.py")
    sys.argv = [script, *arguments]
    source = compile(Path(script).read_text(), script, "exec")
    # Under another name the script imports and defines, and does not start.
    exec(source, {"__name__": "imports", "__file__": script})
    from live_bytes import LiveAfterPasses, LiveBytes

    from megatron_vshape.mcore.step import forward_backward

    steps: list[Program] = []

    class Counted(forward_backward.ProgramRun):
        def __init__(self, program: Program, device: int, *rest: Any) -> None:
            steps.append(program)
            self._counts = len(steps) == 2
            self._live = LiveBytes()
            self._after = LiveAfterPasses(self._live)
            watching = [self._after] if self._counts else list(rest[2:3])
            super().__init__(program, device, *rest[:2], *watching)

        def finish(self) -> None:
            if not self._counts:
                super().finish()
                return
            with self._live:
                super().finish()
            program, device, blank = steps[1], self._device, self._transport.blank()
            messages = (program.most_posted(device) + 1) * blank.nbytes
            peak = self._after.peak_bytes
            print(f"live bytes of rank {device}: {peak}, messages {messages}", flush=True)

    forward_backward.ProgramRun = Counted
    exec(source, {"__name__": "__main__", "__file__": script})


def chunk_ratio(schedule: str, ranks: int, microbatches: int) -> float:
    """Return the schedule's peak relative to 1F1B's, counted in chunks."""
    ours, theirs = (make(name, ranks, microbatches) for name in (schedule, BASELINE))
    return max(peak_held(ours)) / max(peak_held(theirs))


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("schedules", nargs="*", metavar="SCHEDULE", default=["v-half", "v-min"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    options = parser.parse_args()
    ranks, microbatches = options.ranks, options.microbatches
    baseline = measure(BASELINE, ranks, microbatches)
    missed = False
    print(
        f"{'schedule':10} {'measured MiB per rank':34} {'predicted MiB per rank':34} "
        f"{'of 1F1B':>8} {'in bytes':>9} {'in chunks':>10}  live MiB per rank, off the model by"
    )
    for schedule in [BASELINE, *options.schedules]:
        peaks = baseline
        if schedule != BASELINE:
            peaks = measure(schedule, ranks, microbatches)
        ratio = max(peaks.measured) / max(baseline.measured)
        in_bytes = max(peaks.predicted) / max(baseline.predicted)
        in_chunks = chunk_ratio(schedule, ranks, microbatches)
        missed |= peaks.off > LIVE_TOLERANCE
        missed |= any(abs(ratio / each - 1) > TOLERANCE for each in (in_bytes, in_chunks))
        print(
            f"{schedule:10} {peaks.measured!s:34} {peaks.predicted!s:34} "
            f"{ratio:8.3f} {in_bytes:9.3f} {in_chunks:10.3f}"
            + (f"  {[round(each, 2) for each in peaks.live]}, {peaks.off:.1%}" * bool(peaks.live))
        )
    if missed:
        raise SystemExit(
            f"a ratio is more than {TOLERANCE:.0%} off its prediction, or live bytes are more than "
            f"{LIVE_TOLERANCE:.0%} off"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == [AS_RANK]:
        run_rank(sys.argv[2:])
    else:
        main()
