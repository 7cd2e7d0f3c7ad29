"""Losses, gradients and the lowered program of every rank, in 12 small training runs.

`record.py NEW.json --runs [--against OLD.json]` records these runs instead of its questions.
Losses are kept in full; gradients by a digest of their bits, so compare two trees on one machine.
As a plugin of the farm, this file prints the program of every rank.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

MARK = "program of this rank: "

EXPERTS = (
    "--pipeline-model-parallel-size 2 --num-experts 4 --expert-model-parallel-size 2 "
    "--moe-router-topk 2 --moe-token-dispatcher-type alltoall --disable-bias-linear "
    "--untie-embeddings-and-output-weights --bf16 --overlap-moe-expert-parallel-comm"
)

RUNS = {
    "v-half": ("v-half", ""),
    "v-min": ("v-min", ""),
    "v-zb": ("v-zb", ""),
    "zb-h1": ("zb-h1", ""),
    "interleaved": ("grouped-interleaved-1f1b", ""),
    "1f1b-v": ("1f1b-v", ""),
    "dualpipev": ("dualpipev", EXPERTS),
    "vocabulary": ("v-half", "--pipeline-vocab-parallel"),
    "slices": ("v-zb", "--pipeline-slices 4"),
    "offload": ("v-half", "--untie-embeddings-and-output-weights"),
    "recompute": (
        "v-half",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "hybrid": ("v-half", "--hybrid-layer-pattern *-*-*-*-"),
}
"""A schedule and Megatron's flags; `offload` runs a file in which every microbatch is offloaded."""


def record_runs(folder: Path) -> dict[str, str]:
    """Train every run on four ranks for two steps."""
    from mcore.farm import Farm
    from offloaded import offloaded

    from megatron_vshape.core.paper.catalogue import make

    schedule = folder / "offload.json"
    schedule.write_text(offloaded(make("v-half", 4, 8)).to_json())
    farm, found = Farm(folder), dict[str, str]()
    for name, (chosen, flags) in RUNS.items():
        chosen = str(schedule) if name == "offload" else chosen
        arguments = ["--pipeline-schedule", chosen, *flags.split(), "--train-iters", "2"]
        ended = farm.run(4, *arguments, plugin=Path(__file__)).check()
        for rank, (record, text) in enumerate(zip(ended.records, ended.output, strict=True)):
            place = f"run/{name}/rank {rank}"
            found[f"{place}/losses"] = repr((record["losses"], record["grad_norms"]))
            found[f"{place}/gradients"] = "\n".join(
                f"{parameter} {digest(gradient)}"
                for parameter, gradient in sorted(record["gradients"].items())
            )
            programs = [line for line in text.splitlines() if line.startswith(MARK)]
            assert programs, text
            found[f"{place}/program"] = "\n".join(programs)
    farm.close()
    return found


def digest(gradient: Any) -> str:
    """Identify the bits of a gradient."""
    return hashlib.sha256(gradient.float().numpy().tobytes()).hexdigest()[:16]


def start(rank: int, given: object) -> None:
    """Have this rank print each program that it runs, once."""
    from megatron_vshape.mcore.step import forward_backward

    printed: set[str] = set()

    class Printed(forward_backward.ProgramRun):
        def __init__(self, *, program: Any, device: int, **others: Any) -> None:
            text = program.text().splitlines()[device]
            if text not in printed:
                printed.add(text)
                print(MARK + json.dumps(text), flush=True)
            super().__init__(program=program, device=device, **others)

    forward_backward.ProgramRun = Printed  # type: ignore[misc]
