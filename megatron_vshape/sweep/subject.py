"""Trained model: Megatron's arguments, from a model file or a training command."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_vshape.core.model.layers import Widths
from megatron_vshape.mcore.layout.sizes import ModelSizes, sizes_of, widths_of
from megatron_vshape.rehearsal.flags import VOCABULARIES, Command, flags_of, read_command

if TYPE_CHECKING:
    from megatron_vshape.sweep.files import ModelFile

logger = logging.getLogger(__name__)

_CPU = """
    --distributed-backend gloo --transformer-impl local --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion
""".split()


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and its training settings; `identity` distinguishes its runs from those of others."""

    name: str
    command: Command
    identity: Any
    translated: bool = False  # from a model file, which says nothing of data

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.command.layers

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.command.number("--num-attention-heads", 1)

    @property
    def groups(self) -> int:
        """Number of key and value heads."""
        return self.command.number("--num-query-groups", self.heads)

    @property
    def experts(self) -> int:
        """Number of experts per layer; 0 for a dense model."""
        return self.command.number("--num-experts", 0)

    @property
    def mtp_layers(self) -> int:
        """Number of multi-token-prediction layers."""
        return self.command.mtp_layers

    @property
    def is_tied(self) -> bool:
        """Whether the embedding and the output layer share one matrix."""
        return not self.command.has("--untie-embeddings-and-output-weights")

    @property
    def vocabulary(self) -> int:
        """Number of rows of the output layer, without Megatron's padding."""
        given = self.command.number("--padded-vocab-size", 0)
        kind = self.command.value("--tokenizer-type", "GPT2BPETokenizer") or ""
        more = self.command.number("--vocab-size", VOCABULARIES.get(kind, 0) - 1) + 1
        return given or more

    @property
    def dtype_bytes(self) -> int:
        """Bytes per activation value."""
        return 2 if self.command.has("--bf16") or self.command.has("--fp16") else 4

    def widths(self, sequence: int) -> Widths:
        """Return the sizes that determine the GEMMs of a layer and of the output layer."""
        return widths_of(self.command.option, self.vocabulary, sequence)

    def sizes(self, sequence: int) -> ModelSizes:
        """Compute the sizes of the layers, the output layer and multi-token prediction."""
        return sizes_of(self.command.option, self.vocabulary, sequence)

    def flops(self, sequence: int, batch: int) -> float:
        """Return the model FLOPs of a step for MFU: no recomputation, attention without its mask.

        Megatron's and PaLM's convention; a backward pass counts as two forward passes.
        """
        widths, further = self.widths(sequence), self.mtp_layers
        scores = 4.0 * sequence * widths.attention
        layer = 2.0 * (widths.hidden * self.vocabulary / widths.head_in_layers)
        layer += scores - 2.0 * sequence * widths.attention  # which the widths count masked
        head = 2.0 * widths.hidden * self.vocabulary
        sizes = self.sizes(sequence)
        depth = 1.0 if sizes.predicted is None else sizes.predicted.time
        per_token = (sizes.blocks + further * depth) * layer + (1 + further) * head
        return 3.0 * (per_token + 4.0 * further * widths.hidden**2) * sequence * batch


def of_command(words: Sequence[str], name: str) -> Subject:
    """Return the subject of a training command, or of a file with one.

    Raises:
        ScheduleError: there is no command, or the file has none.
    """
    command = read_command(words)
    return Subject(name, command, [command.script, *command.flags])


def of_model_file(model: ModelFile, on_cpu: bool, path: Path) -> Subject:
    """Convert a model file to Megatron's arguments, and log them."""
    flags = [*model_flags(model), *_of_device(model, on_cpu)]
    logger.info("%s as Megatron's arguments: %s", path, " ".join(flags))
    command = Command("pretrain_gpt.py", tuple(flags))
    return Subject(model.name, command, model.model_dump(mode="json"), translated=True)


def model_flags(model: ModelFile) -> list[str]:
    """Return the trainer's flags for this GPT model, for any tokenizer."""
    given: dict[str, Any] = {
        "num-layers": model.layers,
        "hidden-size": model.hidden_size,
        "num-attention-heads": model.attention_heads,
        "ffn-hidden-size": model.ffn,
        # The tokenizer that makes up numbers adds one, and Megatron pads to the divisor.
        "vocab-size": model.vocabulary_size - 1,
        "make-vocab-size-divisible-by": 1,
        "position-embedding-type": "rope",
        "group-query-attention": model.groups != model.attention_heads,
        "num-query-groups": model.groups if model.groups != model.attention_heads else None,
        "swiglu": model.gated,
        "mtp-num-layers": model.mtp_layers or None,
        "untie-embeddings-and-output-weights": not model.tied_embeddings,
        "attention-dropout": None if model.dropout else 0,
        "hidden-dropout": None if model.dropout else 0,
    }
    if model.experts is not None:
        given |= {
            "num-experts": model.experts.count,
            "moe-router-topk": model.experts.per_token,
            "moe-ffn-hidden-size": model.experts.ffn_hidden_size,
            "moe-shared-expert-intermediate-size": model.experts.shared_ffn_hidden_size,
            "moe-token-dispatcher-type": "alltoall",
            "expert-tensor-parallel-size": 1,
            "disable-bias-linear": True,
        }
    return flags_of(given)


def _of_device(model: ModelFile, on_cpu: bool) -> list[str]:
    if on_cpu:
        return _CPU
    given = {
        "distributed-backend": "nccl",
        "use-distributed-optimizer": True,
        "bf16": model.parameter_bytes == 2,
        "grad-reduce-in-bf16": model.parameter_bytes == model.gradient_bytes == 2,
        "attention-backend": None if model.flash_attention else "unfused",
        "moe-grouped-gemm": model.experts is not None and model.parameter_bytes == 2,
    }
    return flags_of(given)
