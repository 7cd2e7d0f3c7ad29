"""The ledger counts storages from allocation to release, like the GPU's allocator.

The cases run in a separate process, because torch reports a GPU there until it ends.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal import ranks, worker
from megatron_vshape.rehearsal.gpus import GPUS
from megatron_vshape.rehearsal.rank_job import RankJob

PROGRAM = """
import json, sys, traceback
from dataclasses import asdict
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from megatron_vshape.rehearsal import adjustments, device, gated_delta, mamba, routing, te_kernels
from megatron_vshape.rehearsal.gpus import GPUS
from megatron_vshape.rehearsal.ledger import Ledger, fused
from megatron_vshape.rehearsal.phases import STEP, Phase
device.report_requested_gpu()
device.Current.gpu = GPUS["h100"]
MIB = 1 << 20
def gpu(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="cuda")
for name, body in json.load(sys.stdin).items():
    device.Current.ledger = ledger = Ledger(cublas_workspace_bytes=MIB, multiprocessors=132)
    given = {key: value for key, value in globals().items() if key != "given"}
    wrong = ""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), ledger:
            exec(body, given)
    except BaseException:
        wrong = traceback.format_exc()
    print(json.dumps([name, wrong]))
"""


CASES = {
    "a storage counts once until it is freed": """
        x = gpu(MIB)
        y = x.view(1024, 1024)[:512]  # the same storage
        assert ledger.allocated_bytes == 4 * MIB, ledger.allocated_bytes
        z = x + 1
        assert ledger.allocated_bytes == 8 * MIB
        del x, z
        assert ledger.allocated_bytes == 4 * MIB  # y is a view of x
        del y
        assert (ledger.allocated_bytes, ledger.peak_bytes) == (0, 8 * MIB)
        small = gpu(1)
        # Rounded as by the allocator.
        assert (ledger.allocated_bytes, ledger.peak_bytes) == (512, 8 * MIB)
        small.untyped_storage().resize_(4 * 1000)
        assert ledger.allocated_bytes == 4096
        small.untyped_storage().resize_(0)
        assert ledger.allocated_bytes == 0
        x = gpu(1024, 1024)
        flat = torch.empty(0, device="cuda").set_(x[:, :512].detach().untyped_storage())
        del x
        assert flat.shape == (MIB,) and ledger.allocated_bytes == 4 * MIB
    """,
    "the allocator gets no tensors from within a fused kernel": """
        x = gpu(MIB)
        torch.cuda.empty_cache()
        y = fused(ledger, lambda x: (x + 1) * 2)(x)
        ledger.add_temporary(MIB, 2 * MIB)  # two temporaries of one kernel
        real = [(each.size // MIB, each.died < 2**60) for each in ledger.records if not each.fused]
        assert real == [(4, False), (4, False), (1, True), (2, True)], real
        assert len(ledger.records) == 5 and ledger.emptied == [1]
        assert ledger.peak_bytes == (4 + 4 + 3) * MIB
        fused(ledger, lambda x: x.add_(1))(x)  # its argument is copied for a moment
        assert (ledger.allocated_bytes, ledger.peak_bytes) == (8 * MIB, 12 * MIB)
    """,
    "captured modules allocate from the pool of graphs": """
        from torch import nn
        from megatron_vshape.rehearsal import graph_pools
        class Layer(nn.Module):  # keeps 4 MiB from F to B, and makes 4 MiB in B
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(gpu(1))
            def forward(self, *, x):
                return (x * x).view_as(x)
        chunk = nn.Sequential(Layer(), Layer(), Layer())
        graph_pools.graphs.covered = lambda chunks: {chunk[0], chunk[1]}
        pool = graph_pools.GraphPool(ledger, [chunk])
        x = gpu(MIB).requires_grad_()
        for _ in range(2):
            y = x
            for layer in chunk:
                y = layer(x=y)
            outside = gpu(2 * MIB)
            del outside
            y.backward(torch.ones_like(y))
            x.grad = None
        found = {name: size // (4 * MIB) for name, size in asdict(pool.peaks()).items()}
        assert (found["inputs"], found["pool"]) == (2, 3), found  # two outputs, and a gradient
        assert ledger.pool == 0 and not ledger.graphed
        assert ledger.pool_peak + ledger.other_peak > ledger.peak_bytes
    """,
    "every point of the curve has the memory by category": """
        from megatron_vshape.rehearsal.memory_parts import memory_over_time
        weights, kept = gpu(MIB), []
        ledger.name(weights, "weights")
        for microbatch in range(2):
            with ledger.during(Phase("F", 0, microbatch)):
                kept.append(gpu(2 * MIB))
                del_me = gpu(MIB)  # while F runs
                del del_me
        with ledger.during(Phase("B", 0, 0)):
            kept[0] = gpu(MIB)  # what W needs, in place of what F kept
        points = memory_over_time(ledger.records, ledger.curve)
        in_mib = [{who: size // (4 * MIB) for who, size in held.items()} for *_, held in points]
        assert all(sum(held.values()) == size for _, size, held in points)
        assert max(size for _, size, _ in points) == ledger.peak_bytes == 24 * MIB
        assert [(held["state"], held["F"], held["B"]) for held in in_mib] == [
            (1, 0, 0), (1, 3, 0), (1, 2, 0), (1, 2, 0), (1, 5, 0), (1, 4, 0),
            (1, 4, 0), (1, 4, 1), (1, 2, 1),
        ]
    """,
    "a model on the meta device has no memory until it is materialized": """
        from torch import nn
        with torch.device("meta"):
            model = nn.Linear(1024, 1024)  # without a device, as Megatron's router
            weight = torch.empty(MIB, device="meta")
            layer = torch.empty(MIB, device="cuda")
        parts = [model.weight, weight, torch.empty_like(weight)]
        assert [each.is_meta for each in parts] == [True] * 3 and not layer.is_meta
        assert ledger.allocated_bytes == 4 * MIB, ledger.allocated_bytes
        model._apply(lambda t: torch.empty_like(t, device="cuda") if t.is_meta else t)
        assert isinstance(model.weight, nn.Parameter) and not model.weight.is_meta
        assert ledger.allocated_bytes == 8 * MIB + 4096, ledger.allocated_bytes
    """,
    "an operation is inferred once, and repeats its results": """
        import torch.utils._pytree as pytree
        inferred, infer = [], ledger._infer
        ledger._infer = lambda func, *rest: inferred.append(str(func)) or infer(func, *rest)
        x, w = gpu(8, 6, 4, dtype=torch.bfloat16), gpu(4, 4, dtype=torch.bfloat16)
        cut = x[1:, ::2]  # with an offset and strides
        calls = [
            lambda x: x @ w, lambda x: x.view(-1, 2), lambda x: x.transpose(0, 1)[1:],
            lambda x: x.split(2, dim=-1), lambda x: x.chunk(2), lambda x: x.add_(1),
            lambda x: x + 1, lambda x: x + 1.0, lambda x: x > 0, lambda x: x.float().sum(0),
            lambda x: torch.cat([x, x], 1), lambda x: torch.empty_like(x), lambda x: x.detach(),
            lambda x: x.expand(2, *x.shape), lambda x: torch.topk(x, 2), lambda x: x.to(torch.int8),
            lambda x: gpu(*x.shape), lambda x: x.t() if x.dim() == 2 else x.mT.contiguous(),
        ]
        def told(made, given):
            for each in pytree.tree_leaves(made):
                same = each.untyped_storage()._cdata == given.untyped_storage()._cdata
                yield type(each), each.shape, each.stride(), each.dtype, each.storage_offset()
                yield each.device, same, each.untyped_storage().nbytes(), each is given
                yield each._version, each._is_view(), ledger.is_on_host(each)
                yield ledger.allocated_bytes
        for call in calls:
            for given in (x.clone(), cut, x.new_empty(3, 8)):
                if given.dim() == 2 and call is calls[0]:
                    continue
                version = given._version
                first = [*told(call(given.clone()), given), given._version]
                del inferred[:]
                assert [*told(call(given.clone()), given), given._version] == first
                assert not inferred, inferred
    """,
    "views at other offsets of a buffer are not inferred again": """
        def views_of(buffer):
            yield from (buffer[:10], buffer[-10:], buffer[5:15], buffer[10:40:3], buffer[95:200])
            yield from (buffer[150:200], torch.narrow(buffer, 0, 7, 10).view(2, 5)[:, 1:3])
            yield from (buffer[20:40].view(4, 5)[1:3].t(), *buffer[30:60].split(10))
            yield buffer[8:28].view(torch.int64)
            yield torch.as_strided(buffer[8:28], (2,), (3,))
            yield torch.as_strided(buffer[8:28], (2,), (3,), 4)
            yield buffer[40:60].detach()
            yield buffer[40:60].normal_()
        def facts(tensor):
            return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
        for offset in (0, 16, 32):
            buffer, real = gpu(200)[offset:offset + 100], torch._C._VariableFunctions.empty(200)
            for view, truth in zip(views_of(buffer), views_of(real[offset:offset + 100])):
                assert facts(view) == facts(truth), (facts(view), facts(truth))
                assert view.untyped_storage()._cdata == buffer.untyped_storage()._cdata
            inferred, ledger._infer = ledger._infer, None  # as_strided depends on the offset
            for start in range(3):
                assert buffer[start:start + 10].view(2, 5).storage_offset() == offset + start
            ledger._infer = inferred
        weight = torch.nn.Parameter(gpu(10))
        with torch.no_grad():
            weight.normal_()
            ledger._infer = None
            assert weight.normal_() is weight
            del ledger._infer
    """,
    "microbatches that differ are all traced": """
        from megatron_vshape.rehearsal.repeats import NotRepeatedError, repeated_microbatch
        def run(sizes):
            losses, before = [], None
            with ledger.during(STEP):
                for at, size in enumerate(sizes):
                    with ledger.during(Phase("F", 0, at)):
                        received, loss = gpu(512), gpu(1)
                        work = gpu(size) + 1
                        del work
                        losses.append(loss)
                    before = received  # replaces that of the microbatch before
            return losses, before
        kept = run([4096, MIB, MIB])
        now = ledger.allocated_bytes
        same = repeated_microbatch(ledger)
        assert [each.size for each in same.retained] == [512] and same.work.kernels == 1
        ledger.repeat(same.retained[0], 3)
        assert ledger.allocated_bytes == now + 3 * 512
        del kept, same
        # Copies are freed together with their original.
        assert ledger.allocated_bytes == 0, ledger.allocated_bytes
        kept = run([4096, MIB, 2 * MIB])
        try:
            repeated_microbatch(ledger)
        except NotRepeatedError as error:
            assert "allocate differently" in str(error)
        else:
            raise AssertionError
    """,
    "host memory does not count until it is copied": """
        x = torch.empty(MIB)  # no device is the host
        pinned = torch.empty(MIB, device="cuda", pin_memory=True)
        half = x * 0.5
        assert ledger.allocated_bytes == 0 and not half.is_cuda
        y = half.cuda()
        assert ledger.allocated_bytes == 4 * MIB and y.is_cuda and y.device.type == "cuda"
        like = torch.zeros(MIB, device=y.device)
        assert ledger.allocated_bytes == 8 * MIB and like.device.type == "cuda"
        assert y.cpu().device.type == "cpu" and ledger.allocated_bytes == 8 * MIB
    """,
    "a backward keeps what autograd saves": """
        w = gpu(1024, 1024).requires_grad_()
        x = gpu(1024, 1024)
        out = (x @ w).relu()
        # x is saved, and a workspace.
        assert ledger.allocated_bytes == (4 * 3 + 1) * MIB, ledger.allocated_bytes / MIB
        out.sum().backward()
        del out
        # w, x, w's gradient and a workspace for each of the two threads
        assert ledger.allocated_bytes == (4 * 3 + 2) * MIB, ledger.allocated_bytes / MIB
        assert ledger.work.products == {("float32", 1024, 1024, 1024, 1): 2}
    """,
    "the peak is reported with its storages and its phase": """
        with ledger.during(Phase("F", 0, 3)):
            kept, weight = gpu(512, 64), gpu(64, 1000)
            ledger.place = "mlp"
            wide = kept @ weight  # as wide as the vocabulary, and no logits
            ledger.place = "output_layer"
            logits = kept @ weight
            ledger.place = ""
            softmax = logits.float().view(-1).exp()
            narrow, back = softmax.view(512, 1000).sum(1), logits @ weight.t()
            del logits
        held = [each for each in ledger.held_at(ledger.peak_at) if each.what != "workspaces"]
        assert sum(each.size for each in held) == ledger.peak_bytes - MIB
        assert [each.what for each in held] == ["", "", "", "logits", "logits", "", ""], held
        assert str(ledger.peak_phase) == "F 0 3"
        (ran,) = ledger.passes
        assert (ran.before_bytes, ran.most_bytes) == (0, ledger.peak_bytes)
        assert ran.after_bytes == ledger.allocated_bytes
    """,
    "checks of all values are true, and single values are zero": """
        x = gpu(4)
        assert torch.all(x == x) and (x == x).all() and not x[0] and not torch.any(x)
        torch.distributions.Uniform(x[0], x[1]).sample()  # checks that x[0] is smaller
    """,
    "reading integers that sizes depend on is an error": """
        def refuses(read):
            try:
                read()
            except device.UnknownValueError as error:
                assert "memory and time depend on them" in str(error)
                return True
            return False
        sizes = gpu(4, dtype=torch.int64)
        for read in (sizes.tolist, sizes.numpy, lambda: list(map(int, torch.stack([sizes] * 2)))):
            assert refuses(read), read
        assert (sizes[0].item(), int(sizes[1])) == (0, 0)  # a flag of the training loop
        with ledger.during(Phase("F", 0, 0)):
            for read in (sizes[0].item, lambda: int(sizes[0]), lambda: range(sizes[0])):
                assert refuses(read), read
            assert gpu(4).tolist() == [0.0] * 4 and (sizes > 1).tolist() == [False] * 4
            with device.ignored():
                assert sizes.tolist() == [0] * 4
            shape = torch.tensor([8, 1, 64], dtype=torch.int64, device="cuda")
            assert shape.detach().tolist() == [8, 1, 64] and int(shape.sum()) == 73
            shape.add_(sizes[:3])  # no longer the list
            assert refuses(shape.tolist)
    """,
    "experts get no more rows than their capacity": """
        import argparse
        from types import SimpleNamespace
        given = argparse.Namespace(moe_router_topk=2, num_experts=8, moe_expert_capacity_factor=0.5)
        def exchanged(pads):
            sizes = SimpleNamespace(
                routing_map=gpu(64, 8), num_local_experts=4, ep_size=2, tp_size=1,
                drop_and_pad=pads, config=SimpleNamespace(moe_permute_fusion=True),
                num_out_tokens=gpu(1).sum(), input_splits=None,
            )
            counts = routing._exchanged(sizes, "").tolist()
            assert pads or sizes.num_global_tokens_per_local_expert.is_cuda  # between steps, too
            return counts, sizes.input_splits
        for factor, padded, rows in ((None, None, 128), (0.5, 64, 64), (1.5, 192, 128)):
            given.moe_expert_capacity_factor = factor
            routing.route_by_counts(given, 1.0)
            assert exchanged(False) == ([rows // 4] * 4, [rows // 2] * 2), factor
            assert padded is None or exchanged(True) == ([padded // 4] * 4, None), factor
            assert routing._routed(gpu(8, 64), gpu(8, 64)).shape == (rows,)
        given.moe_expert_capacity_factor = 1.5
        routing.route_by_counts(given, 4.0)  # more tokens than fit into the experts of this rank
        assert exchanged(False)[0] == [192 // 4] * 4
        given.moe_expert_capacity_factor = None
        routing.route_by_counts(given, 1.0)
    """,
    "padding of each expert to a multiple adds half a multiple on average": """
        import argparse
        given = argparse.Namespace(
            moe_router_topk=2, num_experts=8, moe_router_padding_for_quantization=True,
            expert_model_parallel_size=4, expert_tensor_parallel_size=1, fp8="hybrid",
            fp8_recipe="mxfp8", fp4=None, use_transformer_engine_op_fuser=False,
            moe_token_dispatcher_type="alltoall",
        )
        routing.route_by_counts(given, 1.0)
        routed = routing.Routing
        assert routed.sent(1024) == 2048 + 128  # 8 experts x 15.5 is 124
        assert routed.received(1024) == 2048 + 128
        assert routed.counts(2176, 2).tolist() == [1088, 1088]  # multiples of 32
        assert routed.counts(2208, 2).tolist() == [1088, 1120]
        given.moe_token_dispatcher_type = "flex"  # pads the two experts of this rank
        routing.route_by_counts(given, 1.0)
        assert routed.received(1024) == 2048 + 32
        routed.multiple = 1
        assert routed.received(1024) == 2048
    """,
    "experts get the rows that routing sends to them": """
        routed = routing.Routing
        routed.topk, routed.experts = 2, 8
        tokens, mine = gpu(64, 16), gpu(64, 4, dtype=torch.bool)
        rows = []
        def permute(tokens, routing_map, num_out_tokens):
            rows.append(num_out_tokens)
        routing._permuted(permute, tokens, mine, num_out_tokens=mine.sum().item())
        routing._permuted(permute, tokens, mine, num_out_tokens=24)
        assert rows == [64, 24]
        options = dict(tokens_per_expert=routed.counts(72, 4), num_out_tokens=72, fused=True)
        def padded(tokens, routing_map, num_out_tokens, tokens_per_expert, **fused):
            return num_out_tokens, tokens_per_expert.tolist(), fused
        found = routing._permuted(padded, tokens, mine, **options, align_size=16)
        assert found == (128, [32] * 4, {"fused": True}), found
        assert routing._routed(gpu(4, 64), mine.t()).shape == (64,)
        assert device.KnownNumbers([8, 8]).T.ravel().tolist() == [8, 8]
    """,
    "sorting chunks by their expert costs one kernel forward and one back": """
        from megatron.core.transformer.moe import token_dispatcher
        import argparse
        routing.route_by_counts(argparse.Namespace(moe_router_topk=2, num_experts=64), 1.0)
        tokens = gpu(256, 16).requires_grad_()
        sizes, order = device.KnownNumbers([4] * 64), torch.arange(64, device="cuda")
        sorted_tokens, _ = token_dispatcher.sort_chunks_by_idxs(tokens, sizes, order)
        assert ledger.work.kernels == 2, ledger.work.kernels  # of arange, and of the sort
        sorted_tokens.backward(gpu(256, 16))
        assert tokens.grad.shape == (256, 16)
        assert ledger.work.kernels == 3, ledger.work.kernels
    """,
    "a mamba layer keeps its input and the scans output": """
        batch, tokens, heads, head, groups, state = 2, 512, 8, 64, 2, 16
        inner, convolved = heads * head, heads * head + 2 * groups * state
        bf16 = {"dtype": torch.bfloat16}
        mixed = gpu(batch, tokens, inner + convolved + heads, **bf16).requires_grad_()
        weights = gpu(convolved, 4, **bf16), gpu(convolved, **bf16), gpu(heads), gpu(heads)
        before, moved_before = ledger.allocated_bytes, ledger.work.bytes_moved
        out = mamba.mamba_split_conv1d_scan_combined(
            mixed, *weights, gpu(heads), chunk_size=128, headdim=head, ngroups=groups
        )
        assert out.shape == (batch, tokens, inner) and out.dtype == torch.bfloat16
        kept, tail = 2 * 2 * batch * tokens * inner, 512  # gated: the output before it, too
        assert ledger.allocated_bytes - before == kept + tail, ledger.allocated_bytes - before
        wide = 4 * batch * (tokens // 128) * heads * head * state  # states between chunks, fp32
        assert ledger.peak_bytes - before > kept + wide
        channels, shared = (2 * batch * tokens * width for width in (inner, groups * state))
        steps, squares = 4 * batch * heads * tokens, 4 * batch * tokens * groups * 128
        last = 4 * batch * inner * state
        kernels = [
            2 * (channels + 2 * shared),  # the convolution
            2 * steps,
            channels + shared + 2 * steps + wide,  # the states at the ends of chunks
            wide + wide // 2 + last,  # carried from chunk to chunk
            2 * shared + squares,
            # The output, ungated and gated.
            squares + channels + 2 * steps + shared + wide // 2 + 3 * channels,
        ]
        moved = ledger.work.bytes_moved - moved_before
        assert moved == sum(kernels), (moved, kernels)
        grad = gpu(batch, tokens, inner, **bf16)
        before = ledger.allocated_bytes
        out.backward(grad)
        assert mixed.grad.shape == mixed.shape
        grown = ledger.allocated_bytes - before
        assert grown == mixed.grad.numel() * 2 - kept // 2 - tail, ledger.allocated_bytes
        norm = mamba.GatedNorm(inner, group_size=inner // groups, device="cuda", **bf16)
        normed = norm(out.detach().requires_grad_(), mixed[..., :inner])
        normed.sum().backward()
        assert norm.weight.grad.shape == (inner,)
    """,
    "a gated delta rule keeps its inputs, the gate's sums and the inverse of each chunk": """
        batch, tokens, heads, key, value = 2, 256, 4, 128, 64
        bf16 = {"dtype": torch.bfloat16}
        mixed = gpu(batch, tokens, 3 * heads * key, **bf16).requires_grad_()
        weight = gpu(2 * heads * key, 4, **bf16).requires_grad_()
        before = ledger.allocated_bytes
        x, state = gated_delta.causal_conv1d(mixed[..., : 2 * heads * key], weight)
        assert x.is_contiguous() and state is None
        assert ledger.allocated_bytes - before == 2 * x.numel(), ledger.allocated_bytes - before
        q, k = x.view(batch, tokens, 2, heads, key).unbind(2)
        before = ledger.allocated_bytes
        k = gated_delta.l2norm(k.contiguous())
        statistics = 4 * batch * tokens * heads
        grown = ledger.allocated_bytes - before
        assert grown == 2 * k.numel() + statistics, grown
        q, v = q.contiguous(), gpu(batch, tokens, heads, value, **bf16).requires_grad_()
        g, beta = gpu(batch, tokens, heads).requires_grad_(), gpu(batch, tokens, heads, **bf16)
        before, flops = ledger.allocated_bytes, ledger.work.attention_flops.get("bfloat16", 0)
        out, _ = gated_delta.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=False)
        squares = 2 * batch * tokens * heads * 64
        kept = 4 * g.numel() + squares + 2 * out.numel()
        grown = ledger.allocated_bytes - before
        assert out.shape == v.shape and grown == kept, grown
        states = 2 * batch * (tokens // 64) * heads * key * value
        peak = kept + states + 2 * k.numel() + 2 * 2 * v.numel()  # keys, values, new values
        assert ledger.peak_bytes - before == peak, (ledger.peak_bytes - before, peak)
        per_token = 2 * (64 * (3 * key + 2 * value) + 3 * key * value)
        forward_flops = ledger.work.attention_flops["bfloat16"] - flops
        assert forward_flops == batch * tokens * heads * per_token
        out.sum().backward()
        assert mixed.grad.shape == mixed.shape and weight.grad.shape == weight.shape
        assert v.grad.shape == v.shape and g.grad.dtype == torch.float32
    """,
    "temporary memory of kernels equals that of an H200's allocator": """
        bf16 = {"dtype": torch.bfloat16}
        def meanwhile(call):
            before = ledger.allocated_bytes
            ledger.peak_bytes = 0
            out = call()
            return ledger.peak_bytes - max(ledger.allocated_bytes, before)
        bias = gpu(8192, 1, 16384, **bf16)
        assert meanwhile(lambda: bias.sum([0, 1], keepdim=True)) == 142606336 + 512
        few = gpu(64, 1, 16384, **bf16)  # a block has outputs of its own
        assert meanwhile(lambda: few.sum([0, 1], keepdim=True)) == 0
        gradient, tokens = gpu(1, 4096, 8192, **bf16), gpu(1, 4096, dtype=torch.int64)
        back = torch.ops.aten.embedding_dense_backward
        said = 147619840 + 36352 + 5 * 32768 + 2 * 512
        assert meanwhile(lambda: back(gradient, tokens, 16032, -1, False)) == said
        assert meanwhile(lambda: back(gradient[:, :3072], tokens[:, :3072], 16032, -1, False)) == 0
        attend = te_kernels.functions()["fused_attn_bwd"]
        def attention(tokens, heads, groups):
            q, k, v = (gpu(tokens, 1, n, 128, **bf16) for n in (heads, groups, groups))
            return lambda: attend(tokens, tokens, q, k, v)
        assert meanwhile(attention(8192, 32, 32)) == 135266560 - 256
        assert meanwhile(attention(4096, 8, 1)) == 33685760 - 256
    """,
    "attention returns the largest logits too, if a clip or a log needs them": """
        attend = te_kernels.functions()["fused_attn_fwd"]
        q, k, v = (gpu(128, 2, 4, 64, dtype=torch.bfloat16) for _ in range(3))
        def attention(*flags):
            made = attend(128, 128, True, 1.0, q, k, v, None, 16, *flags)
            return [tuple(each.shape) for each in made]
        plain, clipped = [(128, 2, 4, 64), (2, 4, 128, 1), (2,)], (2, 4, 128, 1)
        assert attention() == attention(False) == attention(False, True) == plain
        assert attention(True) == attention(True, False) == [*plain[:2], clipped, *plain[2:]]
    """,
    "stages after multi-token prediction receive its outputs, too": """
        from types import SimpleNamespace
        from megatron.core.transformer.enums import LayerType
        from megatron.training import global_vars, training
        global_vars._GLOBAL_ARGS = SimpleNamespace(
            tensor_model_parallel_size=2, sequence_parallel=True, context_parallel_size=1,
            seq_length=64, micro_batch_size=3, hidden_size=16,
        )
        training.get_num_microbatches = lambda: 3
        decoder, predicting, loss = [LayerType.decoder], [LayerType.mtp], [LayerType.loss]
        def neighbor(rank, *layers):
            group = SimpleNamespace(rank=lambda: rank, size=lambda: len(layers))
            layout = SimpleNamespace(layout=layers)
            config = SimpleNamespace(
                pipeline_model_parallel_layout=layout, microbatch_group_size_per_vp_stage=3
            )
            return SimpleNamespace(config=config, pp_group=group)
        def lengths(of, *received):
            shapes = adjustments._shapes_of_neighbors(of, None, None, *received)
            assert all(shape[1:] == [3, 16] for shape in shapes)
            return [shape[0] for shape, is_received in zip(shapes, received) if is_received]
        one_chunk = [decoder], [predicting], [loss]
        assert lengths(neighbor(1, *one_chunk), True, True) == [32, 64]
        assert lengths(neighbor(2, *one_chunk), True, False) == [64]
        two_chunks = [decoder, decoder], [decoder, predicting], [decoder, loss]
        last = neighbor(2, *two_chunks)
        assert [lengths(last, True, False) for _ in range(6)] == [[32]] * 3 + [[64]] * 3
        own = neighbor(1, *two_chunks)
        assert [lengths(own, True, True) for _ in range(6)] == [[32, 64]] * 3 + [[32, 32]] * 3
    """,
    "buffers in NCCL's memory pool count as others": """
        from functools import partial
        from megatron.core import nccl_allocator
        adjustments._use_one_memory_pool()
        nccl_allocator.init()
        pool = nccl_allocator.create_nccl_mem_pool(symmetric=True)
        context = partial(nccl_allocator.nccl_mem, pool, group=None, symmetric=True)
        with context():
            buffer = gpu(MIB)
        assert ledger.allocated_bytes == 4 * MIB
    """,
    "a transformer engine product returns its shape": """
        product = te_kernels.functions()["generic_gemm"]
        x, w = gpu(8, 4, 64, dtype=torch.bfloat16), gpu(128, 64, dtype=torch.bfloat16)
        rest = (None, None, False, None, False, None, 0, False)
        out, bias_grad, gelu, more = product(w, True, x, False, None, None, None, None, *rest)
        assert out.shape == (8, 4, 128) and out.dtype == torch.bfloat16
        assert ledger.work.products == {("bfloat16", 32, 64, 128, 1): 1}
        bias, main_grad = gpu(64, dtype=torch.bfloat16), gpu(64, 64)
        rest = (None, False, None, True, None, 0, True)
        out, bias_grad, *_ = product(x, False, x, True, main_grad, None, None, bias, *rest)
        assert bias_grad.dtype == torch.float32  # as the output
    """,
}


WORKER = """
import io, json, os, signal
from megatron_vshape.rehearsal import worker
from megatron_vshape.rehearsal.gpus import GPUS
from megatron_vshape.rehearsal.rank_job import RankJob
def child(line, answer):
    job = RankJob.from_json(line)
    if job.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    json.dump({"traced": 8} if job.traces_all else {worker.AGAIN: "differ"}, answer)
    answer.flush()
    return 0
worker._child = child
out = io.StringIO()
jobs = [RankJob("", [], GPUS["h100"], 3, rank, name="x") for rank in (0, 1, 2)]
worker.serve([job.to_json() for job in jobs], out, 1)
print(out.getvalue())
"""


def test_ranks_are_traced_again_and_killed_ones_named() -> None:
    """A rank without repeating microbatches is traced again."""
    ran = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, check=True)
    lines = [line for line in ran.stdout.splitlines() if line]
    assert len(lines) == 3  # a child that went on would print them again
    reports = {report["rank"]: report for report in map(json.loads, lines)}
    assert [reports[rank].get("traced") for rank in range(3)] == [8, 8, None]
    error = "the process of rank 2 ended by SIGKILL; if the machine is out of memory, set --jobs 1"
    assert reports[2]["error"] == error


def test_a_killed_worker_names_the_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(ScheduleError, match="not be prepared: its process ended by SIGKILL; if"):
        list(ranks.run_jobs(ranks.Programs(None, None, 1), []))


def test_sets_of_jobs_share_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text(
        "#!/bin/sh\n"
        "while read -r line; do\n"
        """    if [ -n "$line" ]; then echo '{"pid": '$$'}'; else echo; fi\n"""
        "done\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    programs = ranks.Programs(None, None, 1)
    jobs = [RankJob("", [], GPUS["h100"], 2, rank) for rank in (0, 1)]
    first, second = ranks.run_jobs(programs, jobs)
    assert first == second
    assert list(ranks.run_jobs(programs, jobs[:1])) == [first]
    stopped = ranks.run_jobs(programs, jobs)
    assert next(stopped) == first
    stopped.close()  # one result is not read, so this worker cannot be used again
    with pytest.raises(ProcessLookupError):
        os.kill(first["pid"], 0)
    outer = ranks.run_jobs(programs, jobs)
    pids = [result["pid"] for result in (next(outer), *ranks.run_jobs(programs, jobs), *outer)]
    assert pids[1] == pids[2] != pids[0] == pids[3] != first["pid"]
    (last,) = ranks.run_jobs(programs, jobs[:1])
    os.kill(last["pid"], signal.SIGKILL)  # as the kernel does if memory is short
    ranks._idle_workers[programs]._process.wait()
    (new,) = ranks.run_jobs(programs, jobs[:1])
    assert new != last
    ranks._kill_idle_workers()
    ranks._idle_workers.clear()
    with pytest.raises(ProcessLookupError):
        os.kill(new["pid"], 0)


def test_a_deferred_module_is_imported_at_its_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deferred.py").write_text("class Reader:\n    size = 3\n")
    (tmp_path / "reading.py").write_text(
        "import deferred\n"
        "from deferred import Reader\n"
        "try:\n"
        "    from deferred.parts import Part\n"
        "except ImportError:\n"
        "    Part = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with worker._deferred_import("deferred"):
        reading = importlib.import_module("reading")
    assert "deferred" not in sys.modules
    assert reading.Part is None
    assert (reading.Reader.size, reading.deferred.Reader.size) == (3, 3)
    assert importlib.import_module("deferred").Reader.size == 3
    for name in ("deferred", "reading"):
        del sys.modules[name]


@pytest.fixture(scope="module")
def wrong() -> dict[str, str]:
    """Return the traceback of every case, empty if it passed; one process runs all of them."""
    cases = json.dumps({name: textwrap.dedent(body) for name, body in CASES.items()})
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=cases,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return dict(map(json.loads, ran.stdout.splitlines()))


@pytest.mark.parametrize("name", CASES)
def test_ledger_counts_allocations(wrong: dict[str, str], name: str) -> None:
    assert wrong[name] == ""
