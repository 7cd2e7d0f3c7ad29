"""The Transformer Engine adapter: its rules on fake layers, and gradients of TE's own layers.

torch replaces the extension of TE's Python code (te_on_cpu).
"""

import json
import logging
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mcore import fake_te
from mcore.fake_te import NUM_EXPERTS, SIZE
from mcore.farm import Ended, Farm
from torch import Tensor, nn

from megatron_vshape.mcore.split import te_layers
from megatron_vshape.mcore.step_state import StepState

TOKENS = 8
LAYERS: dict[str, Callable[..., fake_te.TeLayer]] = {
    "linear": fake_te.Linear,
    "mlp": fake_te.LayerNormMLP,
    "grouped": fake_te.GroupedLinear,
}


def split_state() -> StepState:
    """Return the state in which a schedule of this package runs."""
    return StepState(has_own_schedule=True)


def track(state: StepState) -> list[Tensor]:
    """Return a list that will contain the tensors that jobs retain."""
    retained: list[Tensor] = []
    state.tracker = SimpleNamespace(add=retained.append)  # type: ignore[assignment]
    return retained


def product(x: Tensor, dy: Tensor) -> tuple[Tensor, None]:
    return dy.t().matmul(x), None


def test_job_retains_tensors_without_a_copy() -> None:
    state, layer = split_state(), fake_te.Linear()
    te_layers.use_job_stores(state, [layer])
    retained = track(state)
    with state.jobs.collect(0):
        layer.wgrad_store.put([torch.ones(TOKENS, SIZE), torch.ones(TOKENS, SIZE)], product)
    references = [weakref.ref(tensor) for tensor in retained]
    assert len(references) == 2
    retained.clear()
    assert all(reference() is not None for reference in references)
    state.jobs.run(0)
    assert [reference for reference in references if reference() is not None] == []
    assert layer.weight_0.grad is not None


@pytest.mark.parametrize("splits", [False, True])
def test_only_a_schedule_puts_weight_gradients_off(splits: bool) -> None:
    state, layer = StepState(has_own_schedule=splits), fake_te.Linear()
    te_layers.use_job_stores(state, [layer])
    assert layer.wgrad_store.delay_wgrad_compute() is splits


@pytest.mark.parametrize("by_name", [True, False])
def test_only_the_forward_receives_is_first_microbatch(by_name: bool) -> None:
    """TE casts FP8 weights in the forward, and would overwrite main_grad in the backward."""
    heard: list[bool | None] = []

    class Layer(fake_te.Linear):
        def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> tuple[Any, Any]:
            heard.append(None if is_first_microbatch is None else bool(is_first_microbatch))
            return x, is_first_microbatch

    layer = Layer()
    te_layers.use_job_stores(split_state(), [layer])
    saved = []
    for first in (True, False, None):
        options = {"is_first_microbatch": first} if by_name else {}
        saved.append(layer(torch.ones(2), *([] if by_name else [first]), **options)[1])
    assert heard == [True, False, None]
    assert not saved[0]  # read by the backward
    assert saved[1:] == [False, None]


class Renamed(fake_te.WeightGradStore):
    def put(self, tensors: list[Any], gemm: Any) -> None:
        """Store nothing; the parameters differ from TE's."""


class Without(fake_te.WeightGradStore):
    pop = None


@pytest.mark.parametrize(
    ("store", "text"),
    [
        (Renamed(), r"Renamed.put takes \(tensors, gemm\) instead of \(tensor_list, func\)"),
        (Without(), r"Without has no pop\(\)"),
    ],
)
def test_unknown_store_protocol_is_rejected(store: Any, text: str) -> None:
    with pytest.raises(te_layers.StoreError, match=text):
        te_layers.use_job_stores(split_state(), [fake_te.Linear(wgrad_store=store)])


def test_repeated_install_works_and_backward_dw_is_rejected() -> None:
    layer = fake_te.Linear()
    for _ in range(2):
        assert te_layers.use_job_stores(split_state(), [layer]) == 1
    assert layer.wgrad_store.context is None
    with pytest.raises(te_layers.StoreError, match="Remove --delay-wgrad-compute"):
        layer.wgrad_store.pop()


def test_unknown_layers_are_not_split() -> None:
    strange = nn.Module()
    strange.wgrad_store = fake_te.WeightGradStore()
    nameless = fake_te.Linear(bias=True)
    nameless.register_parameter("bias_0", None)
    assert te_layers.use_job_stores(split_state(), [strange, nameless, nn.Linear(2, 2)]) == 0
    for layer in (strange, nameless):
        assert "not those of any TE layer" in (te_layers.why_unsplit(layer) or "")


@pytest.mark.parametrize("packed", ["weight", "bias"])
def test_experts_with_one_grouped_parameter_are_not_split(packed: str) -> None:
    """TE registers the other parameter names as None."""
    layer = fake_te.GroupedLinear(bias=True)
    for number in range(NUM_EXPERTS):
        layer.register_parameter(f"{packed}{number}", None)
    assert te_layers.use_job_stores(split_state(), [layer]) == 0
    assert "one grouped tensor" in (te_layers.why_unsplit(layer) or "")


def test_mlp_with_unknown_functions_is_rejected() -> None:
    layer = fake_te.LayerNormMLP()
    te_layers.use_job_stores(split_state(), [layer])
    with pytest.raises(te_layers.StoreError, match="neither its fc1_wgrad_gemm"):
        layer.wgrad_store.put([], len)


GATHERS = {"sequence_parallel": True, "tp_size": 2}


@pytest.mark.parametrize(("mode", "index"), [("column", 0), ("row", 1)])
def test_jobs_do_not_retain_gathered_tensors(mode: str, index: int) -> None:
    """They may be in a userbuffer, which the next communication overwrites."""
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    state, layer = split_state(), fake_te.Linear(parallel_mode=mode, tp_group=group, **GATHERS)
    te_layers.use_job_stores(state, [layer])
    retained, userbuffer = track(state), torch.arange(2.0 * TOKENS * SIZE).view(2 * TOKENS, SIZE)
    local_part = userbuffer[TOKENS:].clone()
    tensors = [torch.zeros(2 * TOKENS, SIZE), torch.zeros(2 * TOKENS, SIZE)]
    tensors[index] = userbuffer
    with state.jobs.collect(0):
        layer.wgrad_store.put(tensors, product)
    userbuffer.fill_(torch.nan)
    assert torch.equal(retained[index], local_part)
    assert len(retained[1 - index]) == 2 * TOKENS
    state.jobs.clear()


def test_retained_quantized_gathered_tensor_logs_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layer, state = fake_te.Linear(parallel_mode="column", **GATHERS), split_state()
    te_layers.use_job_stores(state, [layer])
    quantized = SimpleNamespace(get_data_tensors=lambda: (torch.ones(2), None))
    with caplog.at_level(logging.WARNING), state.jobs.collect(0):
        for _ in range(2):
            layer.wgrad_store.put([quantized, torch.ones(2)], product)
    assert len(caplog.records) == 1
    assert "stores more than predicted" in caplog.text
    state.jobs.clear()


class Quantized:
    """A storage of TE without autograd: row-wise and column-wise copies; a GEMM reads one."""

    def __init__(self, values: Tensor) -> None:
        self.rowwise: Tensor | None = values
        self.columnwise: Tensor | None = values.t().contiguous()

    def get_data_tensors(self) -> tuple[Tensor | None, Tensor | None]:
        return self.rowwise, self.columnwise

    def update_usage(self, rowwise_usage: bool, columnwise_usage: bool) -> None:
        self.rowwise = self.rowwise if rowwise_usage else None
        self.columnwise = self.columnwise if columnwise_usage else None


class QuantizedGroup:
    """A grouped storage of TE, which has no `update_usage`."""

    def __init__(self, values: Tensor) -> None:
        self.rowwise_data: Tensor | None = values
        self.scale_inv: Tensor | None = torch.ones(1)
        self.columnwise_data, self.columnwise_scale_inv = values.clone(), torch.ones(1)

    def get_data_tensors(self) -> tuple[Tensor | None, ...]:
        return self.rowwise_data, self.columnwise_data, self.scale_inv, self.columnwise_scale_inv


def test_job_retains_only_columnwise_data_of_a_group() -> None:
    state, layer = split_state(), fake_te.GroupedLinear(fuse_wgrad_accumulation=True)
    te_layers.use_job_stores(state, [layer])
    x, dy, plain = (QuantizedGroup(torch.randn(TOKENS, SIZE)) for _ in range(3))
    plain.columnwise_data = None  # TE's unquantized group has only row-wise data
    for number, tensors in enumerate(([x, dy, []], [plain, plain, []])):
        with state.jobs.collect(number):
            layer.wgrad_store.put(tensors, lambda *tensors: (None, [], None))
    for tensor in (x, dy):
        assert tensor.rowwise_data is tensor.scale_inv is None
        assert tensor.columnwise_data is not None
    assert plain.rowwise_data is not None
    state.jobs.clear()


class QuantizedTensor(Quantized, Tensor):
    """A quantized tensor for autograd."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: Tensor) -> "QuantizedTensor":
        return Tensor._make_subclass(cls, values)


@pytest.mark.parametrize("is_grouped", [False, True])
def test_job_retains_only_columnwise_data_of_quantized_tensors(is_grouped: bool) -> None:
    state, layer = split_state(), LAYERS["grouped" if is_grouped else "linear"]()
    te_layers.use_job_stores(state, [layer])
    retained = track(state)
    x, dy, shared = (torch.randn(TOKENS, SIZE) for _ in range(3))

    def gemm(xs: Any, dys: Any, outs: Any = None) -> Any:
        for a, b in zip(xs, dys, strict=True) if is_grouped else [(xs, dys)]:
            result = b.columnwise.matmul(a.columnwise.t())  # both are transposed
        for out in outs or ():
            out.copy_(result)
        return (None, [None] * NUM_EXPERTS, None) if is_grouped else (result, None)

    def put(a: Any, b: Any) -> None:
        targets = [torch.empty(SIZE, SIZE) for _ in range(NUM_EXPERTS)]
        with state.jobs.collect(0):
            layer.wgrad_store.put([[a], [b], targets] if is_grouped else [a, b], gemm)

    put(Quantized(x), Quantized(dy))
    assert sum(tensor.nbytes for tensor in retained) == x.nbytes + dy.nbytes
    state.jobs.run(0)
    weight = layer.weight0 if is_grouped else layer.weight_0
    torch.testing.assert_close(weight.grad, dy.t().matmul(x))
    quantized = QuantizedTensor(shared)
    put(quantized, quantized)
    assert quantized.rowwise is not None
    state.jobs.clear()


class FusedExperts(nn.Module):
    """Experts that make their operations in the first F, like Megatron's, in a dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = fake_te.GroupedLinear(), fake_te.GroupedLinear()
        self.config = SimpleNamespace(moe_ncclep_zero_copy=True)

    def _make_fused_ops(self) -> nn.Module:
        return nn.Sequential(nn.Identity())


@pytest.mark.parametrize("splits", [False, True])
def test_jobs_do_not_retain_dispatcher_buffers(splits: bool) -> None:
    """Zero-copy dispatchers return the gradients of all fused expert layers in one buffer."""
    state, experts, buffer = split_state(), FusedExperts(), torch.ones(TOKENS)
    assert te_layers.use_job_stores(state, [experts]) == 2
    output = experts._make_fused_ops()(torch.ones(TOKENS, requires_grad=True).clone())
    received: list[Tensor] = []
    output.register_hook(received.append)  # after the hook of the adapter
    with state.jobs.collect(0) if splits else nullcontext():
        output.backward(buffer)
    assert (received[0].data_ptr() == buffer.data_ptr()) != splits


@pytest.mark.parametrize(
    ("switches", "fp8", "reason"),
    [
        ({"ub_bulk_dgrad": True}, None, None),
        ({"ub_overlap_ag_dgrad": True}, None, None),
        ({"ub_bulk_wgrad": True}, None, "its userbuffers overlap communication with it"),
        ({"ub_bulk_dgrad": True}, "e4m3", "userbuffers overwrite its quantized"),
        ({"ub_overlap_ag_dgrad": True}, "hybrid", "userbuffers overwrite its quantized"),
        ({"ub_overlap_rs_dgrad": True}, "hybrid", None),
    ],
)
def test_userbuffer_options_that_prevent_the_split(
    switches: dict[str, bool], fp8: str | None, reason: str | None
) -> None:
    layer = fake_te.Linear(config=SimpleNamespace(fp8=fp8), **switches)
    why = te_layers.why_unsplit(layer)
    assert (why is None) if reason is None else (reason in str(why))
    assert te_layers.use_job_stores(split_state(), [layer]) == (why is None)


def results_of(run: Ended, rank: int) -> list[dict[str, object]]:
    return [json.loads(line) for line in run.output[rank].splitlines() if line.startswith("{")]


def test_split_gradients_equal_full_backward(te_farm: Farm) -> None:
    results = results_of(te_farm.run(1, plugin="te_on_cpu", argument=False).check(), 0)
    assert [result for result in results if result.get("wrong")] == []
    # 4 layers, and from 2.16 on fused experts, x 3 kinds of bias x fused x first, and not split;
    # a layer of two parts, which is never fused; and the version
    assert len(results) in (4 * 13 + 6 + 1, 5 * 13 + 6 + 1)


def test_b_does_not_gather_inputs_of_w(te_farm: Farm) -> None:
    """With sequence parallelism, B gathers only output gradients; W gathers inputs as well.

    The second gather of a W overlaps with its first product.
    """
    run = te_farm.run(2, plugin="te_on_cpu", argument=True).check()
    gathers = {"F": 1, "BW": 2, "B": 1, "W": 2}
    expected = [
        {"case": case, "gathers": gathers, "wrong": [], "W": ["gather"] * 2 + ["product"] * 2}
        for case in ("LayerNormLinear", "Linear")
    ]
    for rank in range(2):
        assert results_of(run, rank) == expected, run.output[rank][-4000:]
