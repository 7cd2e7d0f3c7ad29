"""Replacements that let a library of `--clients` run on a CPU: torch kernels and a tiny model.

Transformer Engine's Python runs as in tests/mcore/te_on_cpu.py, with Megatron's attention in place
of its attention kernels. The libraries detect GPUs, but allocate nothing there.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
TOLD = ("transformer_engine", "megatron", "swift", "mcore_bridge", "verl", "slime", "mbridge")
"""Packages to which there are GPUs."""

VOCABULARY = 384


def install() -> None:
    """Replace functions that need a GPU. Call it before any of the libraries is imported."""
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(ROOT / "tests" / "mcore"))
    import te_on_cpu

    spec = importlib.util.find_spec("transformer_engine")
    te_on_cpu.import_te(str(Path(str(spec and spec.origin)).parents[1]))
    answers = torch.cuda.is_available
    torch.cuda.is_available = lambda: (
        str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0] in TOLD or answers()
    )
    torch.jit.script = lambda function=None, **options: function or (lambda compiled: compiled)
    from megatron_vshape.mcore.cpu import is_gpu

    move = nn.Module.to

    def stay(module: nn.Module, *to: Any, **options: Any) -> nn.Module:
        to = tuple("cpu" if is_gpu(argument) else argument for argument in to)
        options = {
            key: "cpu" if is_gpu(argument) else argument for key, argument in options.items()
        }
        return move(module, *to, **options)

    nn.Module.to = stay
    nn.Module.cuda = lambda module, *device: module
    for name in ("FLASH", "FUSED", "UNFUSED"):  # Megatron sets them, and te_on_cpu did
        os.environ.pop(f"NVTE_{name}_ATTN", None)


def replace_attention() -> None:
    """Replace the attention of Transformer Engine's layers by Megatron's, also if packed."""
    from megatron.core.extensions import transformer_engine_spec_provider as provider
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Attention(DotProductAttention):
        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any
        ):
            packed = options.pop("packed_seq_params", None)
            if packed is None:
                options.pop("num_splits", None)
                if arguments and arguments[0] is not None and arguments[0].dim() == 2:
                    arguments = (None, *arguments[1:])  # padding, which TE's causal mask ignores
                return super().forward(query, key, value, *arguments, **options)
            num_tokens, is_batched = query.shape[0], query.dim() == 4
            parts = [tensor.squeeze(1) if is_batched else tensor for tensor in (query, key, value)]
            repeats = parts[0].shape[1] // parts[1].shape[1]
            heads = [tensor.repeat_interleave(repeats, 1) for tensor in parts[1:]]
            bounds = packed.cu_seqlens_q.tolist()
            bounds += [num_tokens] if bounds[-1] < num_tokens else []
            attended = []
            for begin, end in zip(bounds, bounds[1:], strict=False):
                if begin == end:
                    continue
                sequence_parts = [
                    tensor[begin:end].transpose(0, 1) for tensor in (parts[0], *heads)
                ]
                output = functional.scaled_dot_product_attention(*sequence_parts, is_causal=True)
                attended.append(output.transpose(0, 1))
            attention = torch.cat(attended).reshape(num_tokens, -1)
            return attention.unsqueeze(1) if is_batched else attention

    provider.TESpecProvider.core_attention = lambda self: Attention


def make_model(folder: Path) -> str:
    """Write a tiny Qwen3 of Hugging Face with weights and a tokenizer; return where."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    text = (ROOT / "README.md").read_text()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bytes_first = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = bytes_first, decoders.ByteLevel()
    every = pre_tokenizers.ByteLevel.alphabet()
    learn = trainers.BpeTrainer(vocab_size=320, special_tokens=marks, initial_alphabet=every)
    bpe.train_from_iterator([text], learn)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=marks[2],
        pad_token=marks[0],
        additional_special_tokens=marks,
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=2,
            pad_token_id=0,
            dtype="float32",
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.05)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def make_data(folder: Path) -> tuple[str, str]:
    """Write dialogues, and such with a rejected answer as well; return both files."""
    random.seed(0)
    words = (ROOT / "README.md").read_text().split()
    plain, paired = folder / "dialogues.jsonl", folder / "preferences.jsonl"
    with plain.open("w") as plain_file, paired.open("w") as paired_file:
        for _ in range(256):
            start, length = random.randrange(len(words) - 80), random.randrange(3, 40)
            question, answer, rejected = (
                " ".join(words[begin:end])
                for begin, end in (
                    (start, start + 5),
                    (start + 5, start + 5 + length),
                    (start + 20, start + 20 + length // 2 + 1),
                )
            )
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            plain_file.write(json.dumps({"messages": messages}) + "\n")
            paired_file.write(
                json.dumps({"messages": messages, "rejected_response": rejected}) + "\n"
            )
    return str(plain), str(paired)


def mock_packages(names: str) -> None:
    """Have a library import, which names packages that are not here and that nothing calls."""
    for name in names.split():
        absent = MagicMock()
        absent.__spec__, absent.__path__ = importlib.machinery.ModuleSpec(name, None), []
        sys.modules.setdefault(name, absent)


def stand_in_for(*absent: str) -> None:
    """Answer imports by Megatron-Bridge of packages that are not here and not needed."""
    sys.path.insert(0, str(ROOT / "tests" / "bridge"))
    import bridge_on_cpu

    bridge_on_cpu.ABSENT = absent
    bridge_on_cpu.stand_in()
