"""Compare the estimate of FSDP2 in `advise` with published steps, and print a table.

    TRANSFORMER_ENGINE_PYTHON=DIR python benchmarks/fsdp_rows.py [NAME ...]

Published: fyh2001/megatron-sft-recipes, its report of FSDP2 and Megatron (torch.compile; Megatron
with TP 2: 0.567 s); mlc-ai/pith-train issue 79 (TorchTitan, compiled; selective
recomputation, the configuration of the estimate is the first that fits); pytorch/torchtitan pull
request 1690 (compiled, full recomputation).
"""

import sys
from pathlib import Path

from megatron_vshape.rehearsal.gpus import GIB, GPUS
from megatron_vshape.tuning import fsdp
from megatron_vshape.tuning.configurations import Subject, configuration_of_command
from megatron_vshape.tuning.machine import Machine
from megatron_vshape.tuning.predictor import Counts, Predictor

SCRIPT = Path(__file__).parents[1] / "scripts" / "pretrain_gpt.py"
COMMON = """--bf16 --swiglu --normalization RMSNorm --position-embedding-type rope
    --disable-bias-linear --group-query-attention --untie-embeddings-and-output-weights
    --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 1 --use-distributed-optimizer
    --attention-dropout 0 --hidden-dropout 0 --cross-entropy-loss-fusion
    --cross-entropy-fusion-impl native --pipeline-model-parallel-size 2"""
ROWS = {
    "Qwen2.5-7B, 8 H100": (
        "h100",
        """--num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28
        --num-query-groups 4 --add-qkv-bias --vocab-size 152063 --seq-length 4096
        --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 8""",
        (0.3458, 38.6e9 / GIB),
    ),
    "Qwen3-30B-A3B, 8 B200": (
        "b200",
        """--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --moe-ffn-hidden-size 768
        --num-experts 128 --moe-router-topk 8 --moe-grouped-gemm --num-attention-heads 32
        --moe-token-dispatcher-type alltoall --kv-channels 128 --qk-layernorm
        --num-query-groups 4 --vocab-size 151935 --seq-length 8192 --max-position-embeddings 8192
        --micro-batch-size 8 --global-batch-size 64 --recompute-granularity selective
        --recompute-modules moe_act layernorm core_attn""",
        (8 * 8192 / 19.5e3, 141.79),
    ),
    "Qwen3-32B, 8 H100": (
        "h100",
        """--num-layers 64 --hidden-size 5120 --ffn-hidden-size 25600 --num-attention-heads 64
        --kv-channels 128 --qk-layernorm --num-query-groups 8 --vocab-size 151935
        --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 2
        --global-batch-size 16 --recompute-granularity full --recompute-method uniform
        --recompute-num-layers 1""",
        (2 * 4096 / 1874, 81.85),
    ),
}
"""By name: GPU, flags, published seconds of a step and peak GiB."""


def main(names: list[str]) -> None:
    """Print a row per model."""
    print(
        "| model | configuration | step s | published | GiB | published |\n|---|---|" + "---:|" * 4
    )
    for name in names or ROWS:
        gpu, flags, (step_s, gib) = ROWS[name]
        subject = Subject.of_command([str(SCRIPT), *COMMON.split(), *flags.split()], name)
        machine = Machine(GPUS[gpu], 8)
        predictor = Predictor(subject, machine, Counts(subject, machine))
        row = fsdp.best(predictor, configuration_of_command(subject, 8))
        assert row is not None
        figures = (
            f"{row.step_s:.3f} | {step_s:.3f} | {row.ranks[0].allocated / GIB:.1f} | {gib:.1f}"
        )
        print(f"| {name} | {row.configuration} | {figures} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
