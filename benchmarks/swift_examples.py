"""Compare estimates with the memory and step time that ms-swift states for its Megatron examples.

    python benchmarks/swift_examples.py [NAME...]

The examples are in modelscope/ms-swift, examples/megatron; each states its figures in its first
lines. Most do not name the GPU; ms-swift's documentation names the A800 for two of them. Examples
without packing train on the tokens of their samples only, so that their number is assumed here (~).
The attention of packed samples ends at their borders: a window of half their assumed length, after
the slash, has the same work.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_vshape.rehearsal.command import Command, sizes_of
from megatron_vshape.rehearsal.command_reader import read_command
from megatron_vshape.rehearsal.gpus import GPUS
from megatron_vshape.rehearsal.rank_job import LoraConfig
from megatron_vshape.rehearsal.rank_report import FailedRank, RankReport
from megatron_vshape.rehearsal.ranks import DryRunConfig, rehearse_all
from megatron_vshape.rehearsal.simulated import estimate_step

COMMON = """--bf16 --swiglu --normalization RMSNorm --disable-bias-linear --hidden-dropout 0
    --position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0
    --use-distributed-optimizer --attention-backend flash --no-create-attention-mask-in-dataloader
    --cross-entropy-loss-fusion --no-rope-fusion --micro-batch-size 1"""
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
OFFLOAD = "--optimizer-cpu-offload --use-precision-aware-optimizer --optimizer-offload-fraction 1"
EXPERTS = """--moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall
    --moe-router-dtype fp32 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3"""
QWEN3_30B = f"""--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32
    --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm
    --vocab-size 151936 --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 {EXPERTS}"""
QWEN3_235B = f"""--num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288
    --num-attention-heads 64 --group-query-attention --num-query-groups 4 --kv-channels 128
    --qk-layernorm --vocab-size 151936 --num-experts 128 --moe-router-topk 8
    --moe-ffn-hidden-size 1536 {EXPERTS}"""
QWEN25_7B = """--num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28
    --group-query-attention --num-query-groups 4 --add-qkv-bias --vocab-size 152064"""
QWEN25_14B = """--num-layers 48 --hidden-size 5120 --ffn-hidden-size 13824 --num-attention-heads 40
    --group-query-attention --num-query-groups 8 --add-qkv-bias --vocab-size 152064"""
QWEN25_72B = """--num-layers 80 --hidden-size 8192 --ffn-hidden-size 29568 --num-attention-heads 64
    --group-query-attention --num-query-groups 8 --add-qkv-bias --vocab-size 152064"""
QWEN3_14B = """--num-layers 40 --hidden-size 5120 --ffn-hidden-size 17408 --num-attention-heads 40
    --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm
    --vocab-size 151936"""
QWEN15_MOE = f"""--num-layers 24 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16
    --add-qkv-bias --vocab-size 151936 --num-experts 60 --moe-router-topk 4
    --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 5632
    --moe-shared-expert-overlap {EXPERTS}"""
MOONLIGHT = f"""--num-layers 27 --hidden-size 2048 --ffn-hidden-size 11264 --num-attention-heads 16
    --multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
    --v-head-dim 128 --qk-layernorm --rope-type rope --vocab-size 163840 --num-experts 64
    --moe-layer-freq ([0]+[1]*26) --moe-router-topk 6 --moe-ffn-hidden-size 1408
    --moe-shared-expert-intermediate-size 2816 --moe-shared-expert-overlap
    --moe-router-score-function sigmoid {EXPERTS}"""
GLM45_AIR = f"""--num-layers 46 --hidden-size 4096 --ffn-hidden-size 10944 --num-attention-heads 96
    --group-query-attention --num-query-groups 8 --kv-channels 128 --add-qkv-bias
    --vocab-size 151552 --num-experts 128 --moe-layer-freq ([0]+[1]*45) --moe-router-topk 8
    --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 1408 --mtp-num-layers 1
    --moe-shared-expert-overlap --moe-router-score-function sigmoid {EXPERTS}"""


@dataclass(frozen=True)
class Example:
    """An example: its flags, and the memory and time in its first lines."""

    name: str  # path in examples/megatron
    model: str
    flags: str
    tokens: int  # of a microbatch
    samples: int  # microbatches of a step, on all data-parallel ranks
    gpus: int
    stated_gib: float
    stated_s: float | None = None
    lora: LoraConfig | None = None
    gpu: str = "a800"
    assumes_tokens: bool = False
    packed_tokens: int | None = None  # assumed mean of packed samples; None: not packed

    def command(self) -> Command:
        """Return the example as a Megatron command."""
        tokens = str(self.tokens)
        sizes = ["--seq-length", tokens, "--max-position-embeddings", tokens]
        words = f"{COMMON} {self.model} {self.flags} --global-batch-size {self.samples}".split()
        if self.packed_tokens is not None:
            # Attention within samples: a token sees half of its sample on average.
            sizes += ["--window-size", f"{self.packed_tokens // 2},0"]
        allocator = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        return read_command([allocator, "pretrain_gpt.py", *words, *sizes])


TP = "--sequence-parallel --tensor-model-parallel-size"
EP, PP = "--expert-model-parallel-size", "--pipeline-model-parallel-size"
LORA8 = LoraConfig(8, per_expert=True)
EXAMPLES = (
    Example("lora/dense (full)", QWEN25_7B, f"{TP} 2 {FULL}", 2720, 1, 2, 70, 0.61,
            assumes_tokens=True),
    Example("lora/dense", QWEN25_7B, f"{TP} 2 {FULL}", 2720, 1, 2, 14, 0.45, LORA8,
            assumes_tokens=True),
    Example("long_text", QWEN25_7B, f"{TP} 4 {FULL}", 32768, 8, 4, 50 / 1.0737, 23, gpu="a100",
            packed_tokens=8000),
    Example("base_to_chat", QWEN25_14B, f"{TP} 4 --recompute-granularity selective", 8192, 16, 8,
            65, 9.04, packed_tokens=1000),
    Example("dense/72b_offload", QWEN25_72B, f"{TP} 8 {FULL} {OFFLOAD}", 8192, 16, 8, 65, 80,
            packed_tokens=1000),
    Example("fp8/benchmark (BF16)", QWEN3_14B,
            f"{TP} 4 --recompute-granularity selective --use-precision-aware-optimizer "
            "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", 8192, 16, 8, 52, 13, gpu="h20",
            packed_tokens=4000),
    Example("moe/moe", QWEN15_MOE, f"{PP} 2 --decoder-last-pipeline-num-layers 11 {EP} 4 {FULL} "
            "--overlap-grad-reduce --overlap-param-gather", 8192, 16, 8, 57, 2.95,
            packed_tokens=1000),
    Example("moe/deepseek_v3", MOONLIGHT, f"{PP} 2 --decoder-last-pipeline-num-layers 13 {EP} 4 "
            f"{FULL}", 8192, 16, 8, 60, 9, packed_tokens=1000),
    Example("moe/qwen3_moe", QWEN3_30B, f"{PP} 2 {EP} 8 {FULL}", 8192, 16, 16, 60, 9.6,
            packed_tokens=1000),
    Example("mcore_bridge/full/moe", QWEN3_30B, f"{TP} 4 {PP} 2 {EP} 4 {FULL} "
            "--expert-tensor-parallel-size 1 --decoder-first-pipeline-num-layers 25 "
            "--moe-expert-capacity-factor 2", 8192, 4, 8,
            76, 3, packed_tokens=4000),
    Example("lora/mtp", GLM45_AIR, f"{TP} 4 {EP} 4 --expert-tensor-parallel-size 1 {FULL}", 8192,
            16, 4, 70, 40, LoraConfig(32, ("linear_qkv", "linear_proj")),
            packed_tokens=4000),
    Example("lora/moe", QWEN3_30B, f"{EP} 2 {FULL}", 8 * 1000, 2, 2, 62, 5.1, LORA8,
            assumes_tokens=True),
    Example("mcore_bridge/lora/moe", QWEN3_30B, f"{EP} 2 {FULL} --moe-expert-capacity-factor 2",
            8 * 1000, 2, 2, 50, None, LORA8, assumes_tokens=True),
    Example("lora/qwen3_235b", QWEN3_235B, f"{TP} 4 {EP} 8 --expert-tensor-parallel-size 1 {FULL}",
            8 * 1000, 2, 8, 80, 3.2, LORA8, assumes_tokens=True),
)  # fmt: skip


def main(names: Sequence[str]) -> None:
    """Estimate the examples, all or these, and print a line for each."""
    print(f"{'example':23s} GPUs       tokens   GiB: stated, estimated   s/it: stated, estimated")
    examples = {example.name: example for example in EXAMPLES if not names or example.name in names}
    jobs: list[Mapping[str, Any]] = []
    for example in examples.values():
        command = example.command()
        config = DryRunConfig.of(command, GPUS[example.gpu], jobs=1, lora=example.lora)
        sizes = sizes_of(command, example.gpus)
        jobs += [config.job(command, sizes, stage, example.name) for stage in range(sizes.pipeline)]
    waiting = Counter(job.name for job in jobs)
    reports: dict[str, list[RankReport]] = {}
    for result in rehearse_all(config.programs, jobs):  # one process for all imports
        if isinstance(result, FailedRank):
            print(f"{result.name}: {result.error}", flush=True)
            continue
        ranks = reports.setdefault(result.name, [])
        ranks.append(result)
        if len(ranks) == waiting[result.name]:
            print(" ".join(_cells(examples[result.name], ranks)), flush=True)


def _cells(example: Example, reports: list[RankReport]) -> Iterator[str]:
    command, gpu = example.command(), GPUS[example.gpu]
    reports.sort(key=lambda report: report.stage)
    gib = max(report.memory.reserved_bytes for report in reports) / 2**30
    stride = sizes_of(command, example.gpus).stage_stride
    seconds = estimate_step(reports, command, gpu, stride).seconds
    yield f"{example.name:23s} {example.gpus}x{gpu.name}"
    packed = "" if example.packed_tokens is None else f"/{example.packed_tokens}"
    yield f"{'~' if example.assumes_tokens else ''}{example.tokens}{packed}".rjust(10)
    yield f"{example.stated_gib:14.0f} {gib:10.1f} {gib / example.stated_gib - 1:+5.0%}"
    if example.stated_s is None:
        yield f"{'-':>9} {seconds:10.2f}"
    else:
        off = seconds / example.stated_s - 1
        yield f"{example.stated_s:9.2f} {seconds:10.2f} {off:+5.0%}"


if __name__ == "__main__":
    main(sys.argv[1:])
