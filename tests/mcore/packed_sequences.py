"""A plugin of the farm: packed sequences, with boundaries that the trainer gives every stage.

Megatron's local attention rejects them, so a replacement computes attention per sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import other_trainer
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

PACKS = ((9, 3, 8), (20,), (5, 5, 6), (2, 14, 4), (7, 9))
"""Lengths of the sequences of each microbatch."""


def attend(self: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
    """Attend to each sequence of [t, heads, d]; without ends to all tokens [t, b, heads, d]."""
    packed = options.get("packed_seq_params")
    if packed is None:
        query, key, value = (tensor[:, 0] for tensor in (query, key, value))
    ends = [0, len(query)] if packed is None else packed.cu_seqlens_q.tolist()
    outputs = [
        scaled_dot_product_attention(
            *(tensor[begin:end].transpose(0, 1) for tensor in (query, key, value)), is_causal=True
        ).transpose(0, 1)
        for begin, end in pairwise(ends)
    ]
    output = torch.cat(outputs).flatten(1)
    return output if packed is not None else output.unsqueeze(1)


def batches(merges: bool) -> Iterator[dict[str, Any]]:
    """Yield the microbatches; with `merges` each has its tokens as one sequence."""
    for index, lengths in enumerate(PACKS):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, other_trainer.VOCABULARY, (1, sum(lengths)), generator=generator)
        ends = [0, *accumulate([sum(lengths)] if merges else lengths)]
        yield {"tokens": tokens, "ends": torch.tensor(ends, dtype=torch.int32)}


def forward_step(without: int | None, data: Any, model: Any) -> tuple[Any, Any]:
    """Run a microbatch; on the rank `without` the model does not get the boundaries."""
    batch = next(data)
    tokens, ends = batch["tokens"], batch["ends"]
    longest = int(ends.diff().max())
    packed: Any = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    if without == dist.get_rank():
        packed = None
    positions = torch.cat([torch.arange(length) for length in ends.diff().tolist()]).unsqueeze(0)
    labels = tokens.roll(-1, 1) if mpu.is_pipeline_last_stage() else None
    output = model(tokens, positions, None, labels=labels, packed_seq_params=packed)
    return output, other_trainer.mean_loss


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Return the losses of a step, and the gradients of this rank."""
    _, model = other_trainer.set_up("verl", options, options["tensor"])
    DotProductAttention.forward = attend
    for chunk in model:
        chunk.zero_grad_buffer()
    data = [batches(options.get("merges", False)) for _ in model]
    run = partial(forward_step, options.get("without"))
    returned = other_trainer.run_step(run, data, model, len(PACKS))
    return {
        "losses": other_trainer.by_rank(returned, []) or [],
        "gradients": other_trainer.gradients_of(model),
        "tensor_rank": mpu.get_tensor_model_parallel_rank(),
    }


start = other_trainer.starts(train)
