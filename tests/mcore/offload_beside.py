"""Microbatches that wait in host memory, of layers that compute on several streams.

Imported once the CPU mode is on.
"""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import torch
from mcore.chunks_by_layers import Chunks, form_groups, passes_of
from mcore.fake_streams import Streams, streams_without_a_gpu
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from megatron_vshape.core.model.kinds import COPY_BACK, COPY_OUT, Kind
from megatron_vshape.mcore.features.offload.step import OffloadHook
from megatron_vshape.runtime import offload
from megatron_vshape.runtime.graph_memory import Segments
from megatron_vshape.runtime.host_memory import Moment
from megatron_vshape.runtime.offload import Offload

LEARNED = "F0.0 BW0.0 F0.1 BW0.1"
WAITED = "F0.2 D0.2 L0.2 R0.2 H0.2 B0.2 W0.2 F0.3 D0.3 L0.3 R0.3 H0.3 BW0.3"


def run(chunks: Chunks, streams: Streams, text: str) -> None:
    """Run passes, copies on separate streams, and a backward's nodes on the streams of the F."""
    for (work,) in passes_of(text):
        stage = chunks.stages[work.stage]
        handler = stage.step.handlers().get(work.kind)
        if handler is not None and work.kind in (COPY_OUT, COPY_BACK):
            with torch.cuda.stream(torch.cuda.Stream(name=work.kind.resource)):
                handler.run(work)
        elif handler is not None:
            handler.run(work)
        elif work.kind in (Kind.B, Kind.BW):
            root = stage._outputs[work.microbatch].grad_fn
            with streams.backward_of(root):
                del root
                chunks.run(work)
        else:
            chunks.run(work)
        chunks.made.clear()


def moment_of(device: torch.device) -> Moment:
    """Return where the stream is that is not there."""
    return Moment(torch.cuda.current_stream().record_event())


def wrong_beside_shared_experts(rank: int, leaves_alone: bool) -> list[str]:
    """Return the errors in the use of streams if shared experts have a separate stream."""
    form_groups()
    options = {
        "overlap_moe_expert_parallel_comm": False,
        "moe_shared_expert_overlap": True,
        "moe_shared_expert_intermediate_size": 16,
    }
    chunks = Chunks(rank, ("<DMM>", ""), by_layers=False, **options)
    expert_offload = Offload(torch.device("cpu"))
    expert_offload.keep(
        parameter for stage in chunks.stages for parameter in stage.model.parameters()
    )
    chunks.stages[0].step.hooks.append(OffloadHook(chunks.state, expert_offload))
    careless = patch.object(offload, "_memory_of_other_streams", Segments)
    with (
        streams_without_a_gpu(at_once=False) as streams,
        patch.object(Moment, "of", moment_of),
        nullcontext() if leaves_alone else careless,
    ):
        expert_stream = torch.cuda.Stream()
        for module in chunks.stages[0].model.modules():
            if isinstance(module, SharedExpertMLP):
                module.stream = expert_stream
        run(chunks, streams, LEARNED)
        run(chunks, streams, WAITED)
        expert_stream.wait_stream(torch.cuda.current_stream())  # as in the next F
    if not expert_offload.bytes_by_stage[0]:
        return ["nothing has waited"]
    return streams.wrong
