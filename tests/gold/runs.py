"""Losses, gradients and the lowered program of every rank, in 12 small training runs.

`record.py NEW.json --runs [--against OLD.json]` records these runs instead of its requests.
Losses are recorded in full, gradients by a digest of their bits; compare on the same machine.
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
"""Schedule and flags of Megatron; `offload` runs a file in which every microbatch is offloaded."""


def record_runs(folder: Path) -> dict[str, str]:
    """Train every run on four ranks for two steps."""
    from mcore.farm import Farm
    from offloaded import with_offloads

    from megatron_vshape.core.paper.catalogue import make

    schedule = folder / "offload.json"
    schedule.write_text(with_offloads(make("v-half", 4, 8)).to_json())
    farm, record_texts = Farm(folder), dict[str, str]()
    for name, (schedule_name, flags) in RUNS.items():
        schedule_name = str(schedule) if name == "offload" else schedule_name
        arguments = ["--pipeline-schedule", schedule_name, *flags.split(), "--train-iters", "2"]
        run = farm.run(4, *arguments, plugin="gold.runs").check()
        for rank, (record, text) in enumerate(zip(run.records, run.output, strict=True)):
            prefix = f"run/{name}/rank {rank}"
            record_texts[f"{prefix}/losses"] = repr((record["losses"], record["grad_norms"]))
            record_texts[f"{prefix}/gradients"] = "\n".join(
                f"{parameter} {digest(gradient)}"
                for parameter, gradient in sorted(record["gradients"].items())
            )
            programs = [line for line in text.splitlines() if line.startswith(MARK)]
            assert programs, text
            record_texts[f"{prefix}/program"] = "\n".join(programs)
    farm.close()
    return record_texts


def digest(gradient: Any) -> str:
    """Return a digest of the bits of a gradient."""
    return hashlib.sha256(gradient.float().numpy().tobytes()).hexdigest()[:16]


def start(rank: int, argument: object) -> None:
    """Print each program of this rank once."""
    from megatron_vshape.mcore.step import forward_backward

    printed: set[str] = set()

    class Printed(forward_backward.ProgramRun):
        def __init__(self, *, program: Any, device: int, **kwargs: Any) -> None:
            text = program.text().splitlines()[device]
            if text not in printed:
                printed.add(text)
                print(MARK + json.dumps(text), flush=True)
            super().__init__(program=program, device=device, **kwargs)

    forward_backward.ProgramRun = Printed  # type: ignore[misc]
