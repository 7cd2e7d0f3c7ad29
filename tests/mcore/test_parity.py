"""Training with this package equals Megatron's: one table of runs, each compared with another.

A row has the flags of both runs, those of this package, and the run that it has to equal.
"""

import tempfile
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from mcore.conftest import needs_hybrid
from mcore.farm import Ended, Train
from mcore.parity import (
    BF16,
    CONTEXT,
    EVALUATED,
    EXPERT_PARALLEL,
    EXPERTS,
    FP32,
    OVERLAP,
    PIPELINE,
    RECOMPUTE,
    SEQUENCE,
    SHARDED,
    SHARED,
    TENSOR,
    TWO,
    UNTIED,
    WEIGHTS,
    Tolerance,
    View,
    assert_close_gradients,
    assert_same_bits,
    assert_same_metrics,
    assert_same_training,
)

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import Placement, looping, stages_of
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import NAMES, make
from megatron_vshape.mcore.options import MEGATRONS_OWN

MEGATRON = "--pipeline-schedule 1f1b"
ONE_STAGE = "--pipeline-model-parallel-size 1"


@dataclass(frozen=True)
class Case:
    """Two runs and how they are compared."""

    package: str  # flags of this package: a schedule, and flags of its own
    common: str = TWO  # flags of both runs
    ranks: int = 4
    reference: str = MEGATRON  # flags of the other run; without a schedule, stock Megatron
    reference_ranks: int = 0  # 0: the same number
    tolerance: Tolerance = FP32
    gradients: tuple[float, float] | None = None  # relative and absolute tolerance
    exact: tuple[str, ...] = ()  # tensors that are equal bit by bit, as the losses then are
    metrics: int = 0  # depths of multi-token prediction whose logged metrics are equal
    view: View = Ended.merged
    lines: tuple[str, ...] = ()  # that rank 0 logs once, and no other rank
    plugin: str = ""
    schedule: Schedule | None = field(default=None, repr=False)  # in a file, instead of a name


alone = partial(Case, reference="", reference_ranks=1)
"""Compared with one rank."""


def all_forwards_first(placement: Placement, num_devices: int, microbatches: int) -> Schedule:
    """Return a valid schedule for any placement whose stages can run in order."""
    order = []
    for stages in stages_of(placement, num_devices):
        row = [Pass(Kind.F, stage, m) for stage in stages for m in range(microbatches)]
        for stage in reversed(stages):
            row += [Pass(Kind.B, stage, m) for m in range(microbatches)]
        row += [Pass(Kind.W, stage, m) for stage in stages for m in range(microbatches)]
        order.append(tuple(row))
    return Schedule("file", num_devices, microbatches, placement, tuple(order))


SIX = "--train-iters 6 --eval-interval 6 --eval-iters 2"
THREE = "--train-iters 3 --eval-interval 3 --eval-iters 1"
UNCLIPPED = f"{TWO} {UNTIED} --clip-grad 0"
BOTH_OVERLAPS = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"
LOGGED = "--wandb-project project --wandb-exp-name name --wandb-save-dir " + tempfile.gettempdir()
SKIPPED = f"--iterations-to-skip 2 3 --train-iters 4 --log-interval 2 {UNTIED}"
DROPOUT = f"{TWO} {UNTIED} --hidden-dropout 0.1 --attention-dropout 0.1"
SELECTIVE = "--recompute-granularity selective --recompute-modules core_attn"
HYBRID = "--hybrid-layer-pattern"
VALIDATED_LATE = "--rerun-mode disabled --optimizer-post-validation"
LATENT = (
    "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 12 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 6 --normalization RMSNorm --disable-bias-linear"
)
SHARED_EXPERTS = f"{EXPERTS} --moe-shared-expert-intermediate-size 16"


EARLY_STEP_IS_ON = "overlap_param_gather_with_optimizer_step ........ True"


def placed(placement: Placement, flags: str = "") -> Case:
    schedule = all_forwards_first(placement, 4, 8)
    return Case("file", f"{EVALUATED} {flags}", schedule=schedule)


def parallel(layout: str, package: str = "v-half", option: str = "", **fields: object) -> Case:
    ranks, flags = LAYOUTS[layout]
    common = f"{EVALUATED} {PIPELINE} {flags} {option}"
    return Case(package, common, ranks, view=Ended.by_place, **fields)


LAYOUTS = {
    "everything": (8, f"{SEQUENCE} {CONTEXT} {EXPERT_PARALLEL} {OVERLAP}"),
    "SP": (4, SEQUENCE),
    "CP": (4, CONTEXT),
    "EP": (4, EXPERT_PARALLEL),
    "TP, DP": (8, TENSOR),
    "SP, CP": (8, f"{SEQUENCE} {CONTEXT}"),
    "SP, DP, sharded optimizer, overlap": (8, f"{SEQUENCE} {OVERLAP}"),
    "CP, DP, sharded optimizer": (8, f"{CONTEXT} {SHARDED} {UNTIED}"),
    "CP, EP": (4, f"{CONTEXT} {EXPERT_PARALLEL}"),
    "SP, EP": (4, f"{SEQUENCE} {EXPERT_PARALLEL}"),
    "SP, DP, EP": (8, f"{SEQUENCE} {EXPERT_PARALLEL} {OVERLAP}"),
    "CP, DP, EP": (8, f"{CONTEXT} {EXPERT_PARALLEL} {SHARDED}"),
    "EP, DP": (8, f"{EXPERT_PARALLEL} {OVERLAP}"),
}


def hybrid(package: str, pattern: str, common: str = "", **fields: object) -> Case:
    """Return a case whose own pattern may mark stages."""
    plain = pattern.replace("|", "")
    return Case(
        f"{package} {HYBRID} {pattern}",
        f"{EVALUATED} {common}",
        reference=f"{MEGATRON} {HYBRID} {plain}",
        reference_ranks=2,
        **fields,
    )


def split(schedule: str, layers: str, ranks: int = 4, lines: tuple[str, ...] = ()) -> Case:
    """Return a case with a number of layers for each stage; no line is expected for `auto`."""
    if layers != "auto":
        lines = (f"layers per stage, in model order: {layers}\n", *lines)
    package = f"{schedule} --pipeline-layer-split {layers}"
    return alone(package, f"--num-layers 11 {EVALUATED}", ranks, lines=lines)


def translated(package: str, *lines: str, layers: str = "1,2,2,2,2,2,2,1") -> Case:
    """Return a case with options for Megatron's schedules."""
    lines = (*lines, f"layers per stage, in model order: {layers}\n")
    return alone(package, f"--num-layers 14 {TWO}", lines=lines)


def predicting(
    package: str, depth: int, common: str = "", ranks: int = 4, **fields: object
) -> Case:
    flags = f"{THREE} {LOGGED} --mtp-num-layers {depth} {common}"
    return alone(package, flags, ranks, gradients=(1e-4, 1e-7), metrics=depth, **fields)


def predicting_in_parallel(package: str, ranks: int, flags: str, **fields: object) -> Case:
    """Return a case of two pipeline ranks, compared with one and the same other parallelism."""
    common = f"{EVALUATED} {LOGGED} --mtp-num-layers 2 {PIPELINE} {flags}"
    if OVERLAP not in flags and "--bf16" not in flags:  # else a rank has reduced a part only
        fields = {"gradients": (0.0, 1e-6)} | fields
    return Case(
        f"{package} {SHARED}",
        common,
        ranks,
        ONE_STAGE,
        ranks // 2,
        **{"tolerance": ROWS, "view": Ended.whole, "metrics": 2} | fields,
    )


ROWS = Tolerance(parameters=WEIGHTS)
"""Of a vocabulary whose rows are distributed over pipeline ranks."""


def in_rows(package: str, common: str = "") -> Case:
    flags = f"{THREE} {common}"
    return Case(f"{package} {SHARED}", flags, tolerance=ROWS, gradients=(1e-4, 1e-7))


def in_rows_in_parallel(flags: str, ranks: int = 4) -> Case:
    gradients = None if OVERLAP in flags else (0.0, 1e-6)
    common = f"{THREE} {PIPELINE} --num-layers 4 {flags}"
    return Case(
        f"v-half {SHARED}", common, ranks, tolerance=ROWS, gradients=gradients, view=Ended.whole
    )


def sliced_in_64_bits(flags: str) -> Case:
    """In 32 bits, Adam turns the rounding of a gradient near its epsilon into another step."""
    common = f"{TWO} --clip-grad 0 {flags}"  # clipping supports 32 bits only
    tolerance = Tolerance(parameters=1e-12)
    return Case(
        "v-zb --pipeline-slices 4", common, tolerance=tolerance, plugin="plugins:in_64_bits"
    )


def recomputed(
    flags: str, package: str = "v-half", common: str = DROPOUT, **fields: object
) -> Case:
    """Return a case that equals itself without recomputation, bit by bit."""
    reference = f"--pipeline-schedule {package}"
    fields = {"ranks": 2, "exact": ("gradients", "parameters")} | fields
    return Case(f"{package} {flags}", common, reference=reference, **fields)


LAYOUT = "Et|(tt|)*6tL"
EARLY_STEP = f"{UNCLIPPED} {PIPELINE} {BOTH_OVERLAPS} --ckpt-format torch"

DAILY = {
    "six steps": Case("v-half", SIX),
    "one rank": Case("v-half", f"{TWO} {UNTIED}", 1, reference_ranks=4),
    "DP, sharded optimizer, overlap": Case("v-half", f"{TWO} {UNTIED} {PIPELINE} {BOTH_OVERLAPS}"),
    "TP": Case("v-half", f"{TWO} {UNTIED} {PIPELINE} {TENSOR}"),
    "CP, EP": parallel("CP, EP"),
    "interleaved-1f1b": Case(
        "interleaved-1f1b",
        f"{TWO} {UNTIED}",
        lines=("Number of virtual stages per pipeline stage: 2",),
    ),
    **{
        name: Case(name, f"{TWO} {UNTIED}")
        for name in ("grouped-interleaved-1f1b", "zb-h1", "1f1b-v")
    },
    **{
        f"two ranks, few microbatches, {name}": Case(
            name, f"{TWO} {UNTIED} --global-batch-size 2 --no-overlap-p2p-communication", 2
        )
        for name in ("v-min", "v-half", "v-zb")
    },
    "placement, ends anywhere": placed((2, 0, 3, 1, 1, 3, 2, 0), UNTIED),
    "gradients, v-min": alone("v-min", UNCLIPPED, exact=("gradients",)),
    "gradients, v-half, bf16": alone("v-half", f"{UNCLIPPED} --bf16", exact=("gradients",)),
    "shared experts, overlap": Case(
        "v-half",
        f"{UNCLIPPED} {SHARED_EXPERTS} {PIPELINE} --overlap-grad-reduce --ddp-bucket-size 4000",
        gradients=(1e-5, 1e-7),
    ),
    "recompute, dropout": recomputed(RECOMPUTE),
    "recompute, dropout, slices": recomputed(SELECTIVE, "v-half --pipeline-slices 2"),
    "recompute, dropout, rows": recomputed(RECOMPUTE, f"v-half {SHARED}"),
    # Megatron 0.19 hangs in a recomputed MLP with a bias, under Megatron's schedules too.
    "recompute, mlp": recomputed(
        "--recompute-granularity selective --recompute-modules mlp",
        common=f"{UNCLIPPED} --disable-bias-linear",
        ranks=4,
        lines=("recomputes for mlp (--recompute-modules) are stored until W",),
    ),
    "skipped iterations": Case("v-half", SKIPPED, 2),
    "skipped iterations, rows": Case(
        f"v-half {SHARED}", SKIPPED, reference_ranks=2, tolerance=ROWS
    ),
    "skipped iterations, validated late": Case(f"v-zb {VALIDATED_LATE}", SKIPPED, 2),
    "hybrid, tied, split by the flag": hybrid(
        "v-half --pipeline-layer-split 0,2,1,2,2,2,1,0", "*-*-*-*-*-"
    ),
    "split, v-half": split("v-half", "2,1,1,2,1,2,1,1"),
    "split, v-zb, ends without layers": split("v-zb", "0,2,2,2,1,2,2,0"),
    "translated layout": translated(
        f"v-half --pipeline-model-parallel-layout {LAYOUT}",
        f"pipeline_model_parallel_layout {LAYOUT}: its 8 stages as the schedule's 8",
    ),
    "MTP": predicting("v-half", 1, UNTIED),
    "MTP, rows, v-zb, tied": predicting(f"v-zb {SHARED}", 2, tolerance=ROWS),
    "rows": in_rows("v-half", UNTIED),
    "rows, SP": in_rows_in_parallel(SEQUENCE),
    # The distributed optimizer supports at most 32 bits.
    "slices, sharded optimizer": Case(
        "v-zb --pipeline-slices 4",
        f"{EVALUATED} {UNTIED} {PIPELINE} {BOTH_OVERLAPS}",
    ),
    "variable lengths": Case("v-half", EVALUATED, plugin="variable_lengths"),
}

NIGHTLY = {
    "six steps, untied": Case("v-half", f"{SIX} {UNTIED}"),
    **{f"six steps, {name}": Case(name, f"{SIX} {UNTIED}") for name in ("v-min", "v-zb")},
    **{f"six steps, {name}, tied": Case(name, SIX) for name in ("v-min", "v-zb")},
    "tied, DP, overlap": Case("v-half", f"{TWO} {PIPELINE} --overlap-grad-reduce"),
    "per-token loss": Case("v-half", f"{TWO} {UNTIED} --calculate-per-token-loss"),
    "recompute": Case("v-half", f"{TWO} {UNTIED} {RECOMPUTE}"),
    "learned positions, swiglu": Case(
        "v-half", f"{TWO} --position-embedding-type learned_absolute --swiglu"
    ),
    "other evaluation batch": Case(
        "v-half", f"{EVALUATED} {UNTIED} --eval-global-batch-size 6 --eval-micro-batch-size 2"
    ),
    "fp16": Case(
        "v-half",
        f"{TWO} {UNTIED} --fp16 --initial-loss-scale 1024",
        tolerance=Tolerance(1e-5, 1e-3, 1e-3),
    ),
    "experts": Case(
        "v-half", f"{TWO} {UNTIED} {EXPERTS.removesuffix(' --moe-token-dispatcher-type alltoall')}"
    ),
    "placement, linear, tied": placed((0, 1, 2, 3)),
    "placement, looping, tied": placed(looping(4, 2)),
    "placement, ends on one rank": placed((0, 2, 1, 3, 1, 3, 2, 0)),
    "placement, loss on an inner rank": placed((0, 3, 1, 2), UNTIED),
    "exported 1f1b": Case(
        "file", f"{TWO} {UNTIED}", exact=("gradients",), schedule=make("1f1b", 4, 8)
    ),
    **{
        name: Case(name, f"{TWO} {UNTIED}")
        for name in NAMES
        if name not in (*MEGATRONS_OWN, *DAILY, "v-min", "v-half", "v-zb")
    },
    **{
        f"{layout}, {name}": parallel(layout, name)
        for layout in LAYOUTS
        for name in ("v-half", "v-zb")
        if (layout, name) != ("CP, EP", "v-half")
    },
    **{
        f"{layout}, {option}": parallel(layout, option=option)
        for layout in ("everything", "SP, CP")
        for option in (
            "--calculate-per-token-loss",
            "--position-embedding-type learned_absolute",
            "--clip-grad 0",
        )
    },
    **{
        f"{layout}, bf16": parallel(layout, option="--bf16", tolerance=BF16)
        for layout in ("everything", "SP, CP")
    },
    **{
        f"gradients, {name}": alone(name, UNCLIPPED, exact=("gradients",))
        for name in ("v-half", "v-zb")
    },
    **{
        f"gradients, {name}, bf16": alone(name, f"{UNCLIPPED} --bf16", exact=("gradients",))
        for name in ("v-min", "v-zb")
    },
    "shared experts": Case("v-half", f"{UNCLIPPED} {SHARED_EXPERTS}", gradients=(1e-5, 1e-7)),
    "overlapped shared experts": Case(
        "v-half",
        f"{TWO} {UNTIED} {PIPELINE} {SHARED_EXPERTS} --moe-shared-expert-overlap",
        2,
        lines=("moe_shared_expert_overlap ....................... True",),
    ),
    **{
        f"latent attention, {rope}, {package}": Case(
            package,
            f"{UNCLIPPED} {LATENT} --rope-type {rope}",
            gradients=(1e-5, 1e-7),
            plugin="plugins:latent_attention",
        )
        for rope in ("rope", "yarn")
        for package in ("v-half", "v-zb --pipeline-slices 4")
    },
    "recompute, dropout, selective": recomputed(SELECTIVE),
    "recompute, dropout, zb-h1": recomputed(RECOMPUTE, "zb-h1"),
    "recompute all, dropout, slices": recomputed(RECOMPUTE, "v-half --pipeline-slices 2"),
    "recompute, dropout, rows, selective": recomputed(SELECTIVE, f"v-half {SHARED}"),
    "recompute, not split": recomputed(
        RECOMPUTE, common=UNCLIPPED, ranks=4, lines=("backward passes are not split (BW)",)
    ),
    "early step, v-half": recomputed(
        "--overlap-param-gather-with-optimizer-step",
        common=EARLY_STEP,
        ranks=4,
        exact=("parameters",),
        view=Ended.by_place,
        lines=(EARLY_STEP_IS_ON,),
    ),
    "early step, grouped-interleaved-1f1b": recomputed(
        "--overlap-param-gather-with-optimizer-step",
        "grouped-interleaved-1f1b",
        EARLY_STEP,
        ranks=4,
        exact=("parameters",),
        view=Ended.by_place,
        lines=(EARLY_STEP_IS_ON,),
    ),
    "skipped iterations, slices": Case("v-zb --pipeline-slices 2", SKIPPED, 2),
    "skipped iterations, interleaved-1f1b": Case("interleaved-1f1b", SKIPPED, 2),
    "skipped iterations, zb-h1": Case("zb-h1", SKIPPED, reference_ranks=2),
    "hybrid, untied, split by the pattern": hybrid("v-zb", "*|-|*-|*|-*|-*|-", UNTIED),
    "hybrid, evenly": hybrid("v-min", "*-*-*-*-"),
    "hybrid, stock's pattern": hybrid("v-half", "*-*-|*-*-|*-*-|*-*-"),
    "hybrid, balanced": hybrid("v-half --pipeline-layer-split auto", "*-*-*-*-*-*-"),
    "hybrid, one chunk": hybrid("zb-h1", "*-|*-*|-*-|*-"),
    "hybrid, interleaved": hybrid("interleaved-1f1b", "*-*-*-*-"),
    "hybrid, experts": hybrid("v-half", "*|E|*-|*|E*|-|*|E", f"{EXPERTS} {UNTIED}"),
    "hybrid, Mamba": hybrid(
        "v-half",
        "M*-MM*-M",
        "--mamba-head-dim 16 --mamba-state-dim 8 --mamba-num-groups 2",
        plugin="mamba_on_cpu",
    ),
    **{
        f"hybrid, slices, {pattern}": Case(
            "v-zb --pipeline-slices 4", f"{TWO} {UNTIED} {HYBRID} {pattern} {flags}", 2
        )
        for pattern, flags in (
            ("*-*E*-*E", "--num-experts 4 --moe-router-topk 2 --disable-bias-linear"),
            ("*-*-*-*-/*-", ""),
        )
    },
    "hybrid, pattern by its old name": Case(
        "v-half --hybrid-override-pattern *-*-*-*-",
        ranks=2,
        reference=f"{HYBRID} *-*-*-*-",
        reference_ranks=1,
        lines=("renamed to hybrid_layer_pattern",),
    ),
    "split, zb-h1, last without layers": split("zb-h1", "3,4,4,0"),
    "split, 1f1b": split("1f1b", "3,4,2,2"),
    "split, interleaved-1f1b": split("interleaved-1f1b", "0,1,1,2,1,3,2,1"),
    "split, grouped-interleaved-1f1b": split("grouped-interleaved-1f1b", "2,1,1,2,1,2,1,1"),
    "split, 1f1b, 2 ranks": split("1f1b", "7,4", 2),
    "split, v-zb, 2 ranks": split("v-zb", "0,6,5,0", 2),
    "split, v-min, auto": split("v-min", "auto"),
    "split, v-half+": split("v-half+", "3,2,4,2", 2),
    "translated counted ends": translated(
        "v-zb --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
        "--num-layers-per-virtual-pipeline-stage 1 --defer-embedding-wgrad-compute "
        "--microbatch-group-size-per-virtual-pipeline-stage 5 "
        "--overlap-p2p-communication-warmup-flush",
        "account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split: 16",
        "num_layers_per_virtual_pipeline_stage 1: ignored",
        "defer_embedding_wgrad_compute: turned off",
        "microbatch_group_size_per_vp_stage 5: ignored",
        "overlap_p2p_comm_warmup_flush: ignored",
    ),
    "translated layout of four stages": translated(
        "v-min --pipeline-model-parallel-layout Et*2|t*4|t*4|t*4L",
        "pipeline_model_parallel_layout Et*2|t*4|t*4|t*4L: its 4 stages",
        layers="1,1,2,2,2,2,2,2",
    ),
    "translated first and last": translated(
        "zb-h1 --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 4",
        "decoder_first_pipeline_num_layers 2, decoder_last_pipeline_num_layers 4: the first",
        layers="2,4,4,4",
    ),
    "translated, a split wins": translated(
        "v-half --pipeline-layer-split 1,2,2,2,2,2,2,1 --decoder-last-pipeline-num-layers 5",
        "decoder_last_pipeline_num_layers 5: ignored, --pipeline-layer-split defines",
    ),
    "MTP, v-zb, tied": predicting("v-zb", 2),
    "MTP, zb-h1, tied": predicting("zb-h1", 1),
    "MTP, zb-h1, untied": predicting("zb-h1", 2, UNTIED),
    "MTP, grouped-interleaved-1f1b": predicting("grouped-interleaved-1f1b", 2, UNTIED),
    "MTP, a last stage without other layers": predicting(
        "v-min --pipeline-layer-split 1,2,1,1,1,1,1,0", 1, UNTIED
    ),
    "MTP, balanced": predicting("v-half --pipeline-layer-split auto", 1),
    "MTP, stages of a layout": predicting(
        "v-half --pipeline-model-parallel-layout Et*2|t|t|t|t|t|t|mL", 1, UNTIED
    ),
    "MTP, per-token loss": predicting("v-half", 2, f"{UNTIED} --calculate-per-token-loss"),
    "MTP, recompute": predicting("v-half", 1, RECOMPUTE),
    "MTP, validated late": predicting(
        "v-zb --optimizer-post-validation", 1, "--rerun-mode disabled"
    ),
    "MTP, one layer for all depths": predicting("v-half", 2, f"{UNTIED} --mtp-use-repeated-layer"),
    **{
        f"MTP, hybrid, {package}": predicting(
            package, 2, f"{UNTIED} {HYBRID} *-*-*-*-/*-/*-", tolerance=ROWS
        )
        for package in ("v-half", "zb-h1", f"v-half {SHARED}", f"zb-h1 {SHARED}")
    },
    "MTP, rows, v-half": predicting(f"v-half {SHARED}", 1, UNTIED, tolerance=ROWS),
    "MTP, rows, zb-h1": predicting(f"zb-h1 {SHARED}", 2, UNTIED, 2, tolerance=ROWS),
    "MTP, rows, zb-h1, tied": predicting(f"zb-h1 {SHARED}", 1, tolerance=ROWS),
    "MTP, rows, grouped-interleaved-1f1b, tied": predicting(
        f"grouped-interleaved-1f1b {SHARED}", 1, ranks=2, tolerance=ROWS
    ),
    "MTP, rows, a last stage without other layers": predicting(
        f"v-min {SHARED} --pipeline-layer-split 1,2,1,1,1,1,1,0", 1, tolerance=ROWS
    ),
    "MTP, rows, per-token loss": predicting(
        f"v-half {SHARED}", 2, f"{UNTIED} --calculate-per-token-loss", 2, tolerance=ROWS
    ),
    "MTP, rows, recompute, balanced": predicting(
        f"v-half {SHARED} --pipeline-layer-split auto", 1, RECOMPUTE, 2, tolerance=ROWS
    ),
    "MTP, rows, one layer for all depths": predicting(
        f"v-half {SHARED}", 2, f"{UNTIED} --mtp-use-repeated-layer", 2, tolerance=ROWS
    ),
    **{
        f"MTP, {layout}, {schedule}": Case(
            schedule,
            f"{EVALUATED} {PIPELINE} --mtp-num-layers 1 {flags}",
            ranks,
            tolerance=BF16 if layout == "bf16" else FP32,
            view=Ended.by_place,
        )
        for layout, (ranks, flags) in {
            "SP": (4, f"{SEQUENCE} {UNTIED}"),
            "EP, overlap": (4, f"{EXPERT_PARALLEL} {OVERLAP}"),
            "CP": (4, f"{CONTEXT} {UNTIED}"),
            "everything": LAYOUTS["everything"],
            "bf16": (2, f"--bf16 {UNTIED}"),
        }.items()
        for schedule in ("v-half", "zb-h1")
    },
    **{
        # Megatron's own would keep an output layer that nobody reads.
        f"MTP, tied, DP, overlap, {schedule}": Case(
            schedule,
            f"{EVALUATED} {PIPELINE} --mtp-num-layers 1 {OVERLAP}",
            reference=ONE_STAGE,
            reference_ranks=2,
        )
        for schedule in ("v-half", "zb-h1")
    },
    "MTP, rows, SP": predicting_in_parallel("v-half", 4, f"{SEQUENCE} {UNTIED}"),
    "MTP, rows, TP, tied": predicting_in_parallel("zb-h1", 4, TENSOR),
    "MTP, rows, EP": predicting_in_parallel("v-half", 4, f"{EXPERT_PARALLEL} {OVERLAP}"),
    "MTP, rows, CP": predicting_in_parallel("v-half", 4, f"{CONTEXT} {UNTIED}"),
    "MTP, rows, SP, tied": predicting_in_parallel("zb-h1", 4, SEQUENCE),
    "MTP, rows, everything": predicting_in_parallel("v-zb", *LAYOUTS["everything"]),
    "MTP, rows, bf16": predicting_in_parallel(
        "v-half", 2, f"--bf16 {UNTIED}", tolerance=Tolerance(1e-4, 1e-2, 4e-3), metrics=0
    ),
    "rows, v-zb, tied": in_rows("v-zb"),
    "rows, zb-h1, tied": in_rows("zb-h1"),
    "rows, per-token loss, learned positions": in_rows(
        "v-half", f"{UNTIED} --calculate-per-token-loss --position-embedding-type learned_absolute"
    ),
    "rows, v-min": in_rows("v-min", UNTIED),
    "rows, grouped-interleaved-1f1b": in_rows("grouped-interleaved-1f1b", UNTIED),
    "rows, gpipe, tied": in_rows("gpipe"),
    "rows, recompute": in_rows("v-half", RECOMPUTE),
    "rows, balanced": in_rows("v-half --pipeline-layer-split auto", UNTIED),
    "rows, unclipped, swiglu": in_rows("v-half", f"{UNTIED} --clip-grad 0 --swiglu"),
    "rows, eager-1f1b, tied": in_rows("eager-1f1b"),
    "rows, zb-h2": in_rows("zb-h2", UNTIED),
    "rows, sharded optimizer, overlaps": in_rows_in_parallel(f"{UNTIED} {OVERLAP}"),
    "rows, TP": in_rows_in_parallel(f"{TENSOR} {UNTIED}"),
    "rows, CP, tied": in_rows_in_parallel(CONTEXT),
    "rows, SP, learned positions": in_rows_in_parallel(
        f"{SEQUENCE} --position-embedding-type learned_absolute"
    ),
    "rows, tied, DP, overlap": in_rows_in_parallel("--overlap-grad-reduce"),
    "rows, everything": in_rows_in_parallel(LAYOUTS["everything"][1], 8),
    **{
        # As close as tensor parallelism is to one rank, since GEMMs and sums round differently.
        f"rows, {precision}": replace(
            in_rows("v-half", f"{UNTIED} {precision}"),
            ranks=2,
            tolerance=Tolerance(1e-4, 1e-2, 4e-3),
            gradients=None,
        )
        for precision in ("--bf16", "--fp16 --initial-loss-scale 1024")
    },
    "slices in 64 bits, SP, recompute": sliced_in_64_bits(
        f"{UNTIED} {PIPELINE} {SEQUENCE} {RECOMPUTE}"
    ),
    "slices in 64 bits, per-token loss": sliced_in_64_bits("--calculate-per-token-loss"),
    "slices in 64 bits, experts": sliced_in_64_bits(
        f"{UNTIED} {PIPELINE} --num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 "
        "--moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 "
        "--moe-token-dispatcher-type alltoall --disable-bias-linear"
    ),
    "slices in 64 bits, MTP": sliced_in_64_bits(f"{UNTIED} --mtp-num-layers 2"),
    "slices in 64 bits, MTP, tied": sliced_in_64_bits("--mtp-num-layers 2"),
    "slices in 64 bits, learned positions, swiglu": sliced_in_64_bits(
        f"{UNTIED} --position-embedding-type learned_absolute --swiglu"
    ),
    **{
        f"variable lengths, {name}": Case(name, EVALUATED, plugin="variable_lengths")
        for name in ("v-zb", "zb-h1")
    },
}


def parameters() -> list[object]:
    """Return all cases, those of the night marked as slow."""
    assert not DAILY.keys() & NIGHTLY.keys()
    return [
        pytest.param(
            case,
            id=name,
            marks=[needs_hybrid] * ("--hybrid" in f"{case.package} {case.common}")
            + [pytest.mark.slow] * (name in NIGHTLY),
        )
        for name, case in (DAILY | NIGHTLY).items()
    ]


@pytest.mark.parametrize("case", parameters())
def test_training_equals_its_reference(
    train: Train, tmp_path_factory: pytest.TempPathFactory, case: Case
) -> None:
    common, (name, *flags) = case.common.split(), case.package.split()
    if case.schedule is not None:
        file = tmp_path_factory.mktemp("schedule") / "schedule.json"
        file.write_text(case.schedule.to_json())
        name = str(file)
    reference_ranks = case.reference_ranks or case.ranks
    expected = train(reference_ranks, *common, *case.reference.split(), plugin=case.plugin)
    run = train(case.ranks, *common, "--pipeline-schedule", name, *flags, plugin=case.plugin)
    if case.exact:
        assert_same_bits(run, expected, case.exact, case.view)
    else:
        assert_same_training(run, expected, case.tolerance, case.view)
    if case.gradients is not None:
        assert_close_gradients(run, expected, *case.gradients, case.view)
    if case.metrics:
        assert_same_metrics(run, expected, case.metrics)
        assert "stay in B, because" not in run.output[0]  # all weight gradients are deferred
    for line in case.lines:
        counts = [text.count(line) for text in run.output]
        assert counts == [1] + [0] * (case.ranks - 1), line
