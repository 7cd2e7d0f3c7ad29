"""Planned peaks of a 70B and a 235B model are within 2% of the peaks of dry runs.

A rank of real size runs for one or two minutes. tests/rehearsal/test_rehearse.py compares a V
schedule of a tiny model in seconds.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from rehearsal.planned import off_the_plan, with_copies
from rehearsal.warm import alone, rehearse
from shared_costs import shared_costs

import megatron_vshape
from megatron_vshape import Costs, Schedule, make
from megatron_vshape.core.model.stage_costs import StageCosts
from megatron_vshape.core.planner.vocabulary import share_vocabulary

pytest.importorskip("megatron.core")

RANKS, MICROBATCHES = 8, 16
COMMON = f"""
    --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1
    --global-batch-size {MICROBATCHES} --pipeline-model-parallel-size {RANKS} --sequence-parallel
    --bf16 --swiglu --normalization RMSNorm --disable-bias-linear --hidden-dropout 0
    --untie-embeddings-and-output-weights --position-embedding-type rope --attention-dropout 0
    --transformer-impl transformer_engine --use-distributed-optimizer --group-query-attention
    --no-create-attention-mask-in-dataloader
""".split()
MODELS = {
    "70B": """--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
        --num-query-groups 8 --vocab-size 128256 --tensor-model-parallel-size 8""",
    # 96 instead of 94 layers, which do not divide among 16 stages
    "235B": """--num-layers 96 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64
        --num-query-groups 4 --kv-channels 128 --vocab-size 151936 --tensor-model-parallel-size 4
        --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 1536 --moe-grouped-gemm
        --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --moe-permute-fusion
        --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss
        --moe-aux-loss-coeff 1e-3 --qk-layernorm""",
}


def shared() -> Schedule:
    """Return V-Half with vocabulary parallelism."""
    uniform = Costs.uniform(RANKS, 2 * RANKS)
    costs = shared_costs(uniform, StageCosts.of(0, 0, 0), StageCosts.of(2, 2, 2, 0, 0), RANKS, 0.1)
    return share_vocabulary(make("v-half", RANKS, MICROBATCHES), costs)


SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "v-half": lambda: make("v-half", RANKS, MICROBATCHES),
    "v-zb": lambda: make("v-zb", RANKS, MICROBATCHES),
    "v-min": lambda: make("v-min", RANKS, MICROBATCHES),
    "copies": lambda: with_copies(make("v-half", RANKS, MICROBATCHES)),
    "vocabulary": shared,
}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_peak_memory_is_as_planned(te_python: Path, tmp_path: Path, name: str, model: str) -> None:
    schedule = SCHEDULES[name]()
    megatron_vshape.verify(schedule)
    plan_file = tmp_path / "schedule.json"
    plan_file.write_text(schedule.to_json())
    options = ["--alone", "--te", str(te_python)]
    options += ["--ranks", os.environ.get("REAL_SIZE_RANKS", "all")]
    flags = [*COMMON, *MODELS[model].split(), "--pipeline-schedule", str(plan_file)]
    _, report = rehearse(alone, tmp_path, flags, *options)
    off = off_the_plan(schedule, report["ranks"])
    assert max(map(abs, off.values())) < 0.02, off
