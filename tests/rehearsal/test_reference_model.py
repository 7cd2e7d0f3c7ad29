"""The reference model of preference training in a dry run: its weights and its forward."""

import json
from pathlib import Path
from typing import Any

import pytest
from rehearsal.test_lora import gemm_flops
from rehearsal.warm import Warm

pytest.importorskip("megatron.core")

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 128,
}
FLAGS = "--max_length 128 --global_batch_size 8 --packing true --pipeline_model_parallel_size 2"
ADAPTERS = "--tuner_type lora --lora_rank 8"


@pytest.mark.usefixtures("te_python")
@pytest.mark.parametrize(
    ("program", "plain", "weights", "forwards"),
    [
        ("rlhf --rlhf_type dpo", "sft", 2, 2),
        ("rlhf --rlhf_type grpo", "sft", 2, 1),
        (f"rlhf --rlhf_type dpo {ADAPTERS}", f"sft {ADAPTERS}", 1, 2),
        (f"rlhf --rlhf_type grpo {ADAPTERS}", f"sft {ADAPTERS}", 1, 1),
    ],
    ids=["dpo", "grpo", "dpo-lora", "grpo-lora"],
)
def test_weights_and_forward_of_the_reference(
    warm: Warm, tmp_path: Path, program: str, plain: str, weights: int, forwards: int
) -> None:
    def estimate(words: str) -> list[dict[str, Any]]:
        """Return the estimated ranks of a command of ms-swift."""
        model, file = tmp_path / "config.json", tmp_path / "report.json"
        model.write_text(json.dumps(CONFIG))
        command = ["megatron", *words.split(), "--model", str(model), *FLAGS.split()]
        ran = warm(tmp_path, "rehearse", "--alone", "--json", str(file), "--", *command)
        assert ran.returncode == 0, ran.stderr
        ranks: list[dict[str, Any]] = json.loads(file.read_text())["ranks"]
        return ranks

    for rank, plain_rank in zip(estimate(program), estimate(plain), strict=True):
        parts, plain_parts = rank["held_parts"], plain_rank["held_parts"]
        assert parts["weights"] == pytest.approx(weights * plain_parts["weights"], rel=0.01)
        assert parts["optimizer"] == plain_parts["optimizer"]
        for kind, times in (("F", forwards), ("B", 1)):
            flops = gemm_flops(plain_rank, kind)
            assert gemm_flops(rank, kind) == pytest.approx(times * flops)
        assert rank["parameters"] == plain_rank["parameters"]
        assert rank["message_bytes"] == forwards * plain_rank["message_bytes"]
