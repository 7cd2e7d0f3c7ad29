"""The Transformer Engine adapter, on layers that implement TE's protocol (see fake_te)."""

import functools
import itertools
import logging
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mcore import fake_te
from mcore.farm import Farm
from mcore.ranks import run_ranks
from mcore.test_split_local import record_calls
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_vshape.mcore.split import te_layers
from megatron_vshape.mcore.step_state import StepState
from megatron_vshape.runtime.weight_jobs import plain_tensors

SIZE, TOKENS = 6, 8
SPLITS = [3, 0, 5]
ORDERS = {
    "in order": "F0 F1 B0 F2 B1 W0 B2 W1 W2",
    "out of order": "F0 F1 F2 B0 B1 B2 W2 W0 W1",
    "whole and split": "F0 F1 B0 F2 BW1 W0 B2 W2",
    "whole first": "F0 F1 BW0 F2 B1 B2 W2 W1",
    "slices": "F0 F1 F2 BW2 BW1 BW0",
    "slices, split": "F0 F1 F2 B2 BW1 W2 BW0",
}
WHOLE = "F0 F1 BW0 F2 BW1 BW2"

LAYERS: dict[str, Callable[..., fake_te.TeLayer]] = {
    "linear": functools.partial(fake_te.Linear, SIZE, SIZE),
    "linear of two parts": functools.partial(fake_te.Linear, SIZE, SIZE, parts=2),
    "mlp": functools.partial(fake_te.LayerNormMLP, SIZE, 2 * SIZE),
    "grouped": functools.partial(fake_te.GroupedLinear, len(SPLITS), SIZE, SIZE),
    "grouped, packed": functools.partial(
        fake_te.GroupedLinear, len(SPLITS), SIZE, SIZE, packed=True
    ),
}


def make_split_state() -> StepState:
    """Return the state in which a schedule of this package runs."""
    return StepState(splits_backward=True)


def call_layer(layer: fake_te.TeLayer, x: Tensor) -> Tensor:
    """Call a layer as Megatron's subclass does; add the bias if the layer returns it."""
    splits = [SPLITS] if isinstance(layer, fake_te.GroupedLinear) else []
    y = layer(x, *splits, is_first_microbatch=layer.now_first())
    if not isinstance(y, tuple):
        return y
    y, bias = y
    if not isinstance(layer, fake_te.GroupedLinear):
        return y if bias is None else y + bias
    parts = zip(y.split(SPLITS), bias or [0] * len(SPLITS), strict=True)
    return torch.cat([part + shift for part, shift in parts])


class FakeDdp:
    """Adds .grad to main_grad in hooks, like Megatron's DDP."""

    def __init__(self, layer: nn.Module) -> None:
        self._keep = []
        for parameter in layer.parameters():
            parameter.main_grad = torch.zeros(parameter.shape)  # type: ignore[attr-defined]
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(functools.partial(self._hook, parameter))
            self._keep.append(node)

    def _hook(self, parameter: Any, *unused: Any) -> None:
        if parameter.grad is not None and not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None


def run_layer(
    layer: fake_te.TeLayer,
    order: str,
    ddp: bool = False,
    forward: Callable[..., Tensor] = call_layer,
    install: bool = True,
) -> dict[str, Tensor]:
    """Run the passes and return the gradients of the parameters and the inputs by name."""
    state = make_split_state()
    if install:
        assert te_layers.install(state, [layer]) == 1
    keep = FakeDdp(layer) if ddp else None
    inputs, outputs = {}, {}
    for text in order.split():
        kind, microbatch = text.rstrip("0123456789"), text[-1]
        if kind == "F":
            generator = torch.Generator().manual_seed(int(microbatch))
            x = torch.randn(TOKENS, SIZE, generator=generator).to(layer.dtype).requires_grad_()
            inputs[microbatch], outputs[microbatch] = x, forward(layer, x)
        elif kind == "B":
            with state.jobs.collect(microbatch):
                outputs.pop(microbatch).float().square().sum().backward()
        elif kind == "W":
            state.jobs.run(microbatch)
        else:
            outputs.pop(microbatch).float().square().sum().backward()
    assert not state.jobs._buckets
    del keep
    gradients = {f"input{m}": x.grad for m, x in inputs.items()}
    for name, parameter in layer.named_parameters():
        assert not ddp or parameter.grad is None
        gradients[name] = parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad
    return gradients


ACCUMULATIONS = ["grad", "ddp", "fused", "fused, ddp"]
CASES = [
    (kind, accumulation)
    for kind, accumulation in itertools.product(LAYERS, ACCUMULATIONS)
    # TE fuses the accumulation of layers with one weight only.
    if kind != "linear of two parts" or "fused" not in accumulation
]


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("bias", ["", "bias", "returned bias"])
@pytest.mark.parametrize(("kind", "accumulation"), CASES)
def test_split_gradients_equal_full_backward(
    kind: str, bias: str, accumulation: str, order: str
) -> None:
    options = {
        "bias": bool(bias),
        "return_bias": bias == "returned bias",
        "fused": "fused" in accumulation,
    }
    results = []
    for passes, install in ((WHOLE, False), (order, True)):
        layer = LAYERS[kind](**options)
        ddp = accumulation != "grad"
        if accumulation == "fused":
            for parameter in layer.parameters():
                parameter.main_grad = torch.zeros(parameter.shape)  # type: ignore[attr-defined]
            ddp = False
        results.append(run_layer(layer, passes, ddp, install=install))
    full_gradients, split_gradients = results
    assert full_gradients.keys() == split_gradients.keys()
    for name in full_gradients:
        if accumulation == "fused" and "bias" in name:
            continue  # without DDP, TE's bias gradients stay in .grad
        torch.testing.assert_close(
            split_gradients[name], full_gradients[name], rtol=1e-5, atol=1e-5
        )
        in_order = order in (ORDERS["in order"], ORDERS["whole first"])
        assert (
            not in_order
            or order == ORDERS["whole first"]
            or torch.equal(split_gradients[name], full_gradients[name])
        )


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["linear", "mlp", "grouped"])
def test_recompute(kind: str, fused: bool, reentrant: bool) -> None:
    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(call_layer, layer, x, use_reentrant=reentrant)

    full_gradients = run_layer(LAYERS[kind](fused=fused), WHOLE, ddp=True, install=False)
    for order in ORDERS.values():
        split = run_layer(LAYERS[kind](fused=fused), order, ddp=True, forward=forward)
        for name in full_gradients:
            torch.testing.assert_close(split[name], full_gradients[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["linear", "mlp", "grouped"])
def test_bf16_gradients_accumulate_in_main_grad(kind: str, fused: bool) -> None:
    full_gradients, split_gradients = (
        run_layer(
            LAYERS[kind](bias=True, dtype=torch.bfloat16, fused=fused), order, True, install=install
        )
        for order, install in ((WHOLE, False), (ORDERS["in order"], True))
    )
    assert all(torch.equal(split_gradients[name], full_gradients[name]) for name in full_gradients)
    weights = [name for name in split_gradients if "weight" in name]
    assert weights
    assert all(split_gradients[name].dtype == torch.float32 for name in weights)


@pytest.mark.parametrize("kind", LAYERS)
def test_job_retains_tensors_without_a_copy(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state, layer = make_split_state(), LAYERS[kind]()
    te_layers.install(state, [layer])
    handed, tracked = [], []
    store_job = layer.wgrad_store.put
    monkeypatch.setattr(
        layer.wgrad_store,
        "put",
        lambda tensors, func: (handed.extend(tensors[:2]), store_job(tensors, func)),
    )
    monkeypatch.setattr(state, "tracker", SimpleNamespace(add=tracked.append), raising=False)
    with state.jobs.collect(0):
        call_layer(layer, torch.randn(TOKENS, SIZE)).sum().backward()
    storages = [tensor.untyped_storage().data_ptr() for tensor in plain_tensors(handed)]
    assert [tensor.untyped_storage().data_ptr() for tensor in tracked] == storages
    references = [weakref.ref(tensor) for tensor in tracked]
    handed.clear()
    tracked.clear()
    assert all(
        reference() is not None for reference in references
    )  # the job retains them without a copy
    state.jobs.run(0)
    assert [reference for reference in references if reference() is not None] == []


def test_unfused_grouped_layers_return_no_gradient_from_b() -> None:
    state, layer = make_split_state(), LAYERS["grouped"]()
    te_layers.install(state, [layer])
    with state.jobs.collect(0):
        call_layer(layer, torch.randn(TOKENS, SIZE)).sum().backward()
    assert all(parameter.grad is None for parameter in layer.parameters())
    state.jobs.run(0)
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_te_is_unchanged_without_a_schedule() -> None:
    state, layer = StepState(), LAYERS["linear"]()
    te_layers.install(state, [layer])
    call_layer(layer, torch.randn(TOKENS, SIZE)).sum().backward()
    assert layer.weight_0.grad is not None


@pytest.mark.parametrize("by_name", [True, False])
def test_only_the_forward_receives_is_first_microbatch(by_name: bool) -> None:
    """TE casts FP8 weights in the forward, and would overwrite main_grad in the backward."""
    heard: list[bool | None] = []

    class Layer(fake_te.Linear):
        def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> tuple[Any, Any]:
            heard.append(None if is_first_microbatch is None else bool(is_first_microbatch))
            return x, is_first_microbatch

    layer = Layer(SIZE, SIZE)
    te_layers.install(make_split_state(), [layer])
    saved = []
    for first in (True, False, None):
        options = {"is_first_microbatch": first} if by_name else {}
        saved.append(layer(torch.ones(2), *([] if by_name else [first]), **options)[1])
    assert heard == [True, False, None]
    assert not saved[0]  # read by the backward
    assert saved[1:] == [False, None]


@pytest.mark.parametrize("kind", ["linear", "mlp", "grouped"])
def test_unsplit_layer_accumulates_in_any_order(kind: str) -> None:
    """The layer has no store of this package, as with userbuffers or CUDA graphs."""
    results = []
    for order in (WHOLE, ORDERS["slices"]):
        layer = LAYERS[kind](bias=False, fused=True)
        layer.ub_bulk_wgrad = True
        assert te_layers.install(make_split_state(), [layer]) == 0
        results.append(run_layer(layer, order, ddp=True, install=False))
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, rtol=1e-5, atol=1e-5)


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
    layer = LAYERS["linear"]()
    layer.wgrad_store = store
    with pytest.raises(te_layers.StoreError, match=text):
        te_layers.install(make_split_state(), [layer])


def test_repeated_install_works_and_backward_dw_is_rejected() -> None:
    layer = LAYERS["linear"]()
    for _ in range(2):
        assert te_layers.install(make_split_state(), [layer]) == 1
    assert layer.wgrad_store.context is None
    with pytest.raises(te_layers.StoreError, match="Remove --delay-wgrad-compute"):
        layer.wgrad_store.pop()


def test_unknown_layers_are_not_split() -> None:
    strange = nn.Module()
    strange.wgrad_store = fake_te.WeightGradStore()
    nameless = LAYERS["linear"]()
    nameless.register_parameter("bias_0", None)
    assert te_layers.install(make_split_state(), [strange, nameless, nn.Linear(2, 2)]) == 0
    for layer in (strange, nameless):
        assert "not those of any TE layer" in (te_layers.why_unsplit(layer) or "")


@pytest.mark.parametrize("packed", ["weight", "bias"])
def test_experts_with_one_grouped_parameter_are_not_split(packed: str) -> None:
    """TE registers the other parameter names as None."""
    layer = LAYERS["grouped"](bias=True)
    for number in range(len(SPLITS)):
        layer.register_parameter(f"{packed}{number}", None)
    assert te_layers.install(make_split_state(), [layer]) == 0
    assert "one grouped tensor" in (te_layers.why_unsplit(layer) or "")


def test_mlp_with_unknown_functions_is_rejected() -> None:
    layer = LAYERS["mlp"]()
    te_layers.install(make_split_state(), [layer])
    with pytest.raises(te_layers.StoreError, match="neither its fc1_wgrad_gemm"):
        layer.wgrad_store.put([], len)


def test_retained_quantized_gathered_tensor_logs_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layer = LAYERS["linear"](bias=False)
    layer.parallel_mode, layer.sequence_parallel, layer.tp_size = "column", True, 2
    state = make_split_state()
    te_layers.install(state, [layer])
    quantized = SimpleNamespace(get_data_tensors=lambda: (torch.ones(2), None))
    with caplog.at_level(logging.WARNING), state.jobs.collect(0):
        for _ in range(2):
            layer.wgrad_store.put(
                [quantized, torch.ones(2)], lambda x, dy: (torch.ones(6, 6), None)
            )
    assert len(caplog.records) == 1
    assert "stores more than predicted" in caplog.text
    state.jobs.run(0)


class Quantized:
    """A storage of TE without autograd: row-wise and column-wise copies; a GEMM reads one."""

    def __init__(self, values: Tensor) -> None:
        self.rowwise: Tensor | None = values
        self.columnwise: Tensor | None = values.t().contiguous()

    def get_data_tensors(self) -> tuple[Tensor | None, Tensor | None]:
        return self.rowwise, self.columnwise

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        if rowwise_usage is False:
            self.rowwise = None
        if columnwise_usage is False:
            self.columnwise = None


class QuantizedGroup:
    """A grouped storage of TE, which has no `update_usage`."""

    def __init__(self, values: Tensor) -> None:
        self.rowwise_data: Tensor | None = values
        self.scale_inv: Tensor | None = torch.ones(1)
        self.columnwise_data, self.columnwise_scale_inv = values.clone(), torch.ones(1)

    def get_data_tensors(self) -> tuple[Tensor | None, ...]:
        return self.rowwise_data, self.columnwise_data, self.scale_inv, self.columnwise_scale_inv


def test_job_retains_only_columnwise_data_of_a_group() -> None:
    state, layer = make_split_state(), LAYERS["grouped"](bias=False, fused=True)
    te_layers.install(state, [layer])
    x, dy, plain = (QuantizedGroup(torch.randn(TOKENS, SIZE)) for _ in range(3))
    plain.columnwise_data = None  # TE's unquantized group has only row-wise data
    with state.jobs.collect(0):
        layer.wgrad_store.put([x, dy, []], lambda *tensors: (None, [], None))
    with state.jobs.collect(1):
        layer.wgrad_store.put([plain, plain, []], lambda *tensors: (None, [], None))
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


@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_job_retains_only_columnwise_data_of_quantized_tensors(kind: str) -> None:
    state, layer = make_split_state(), LAYERS[kind](bias=False)
    te_layers.install(state, [layer])
    retained: list[Tensor] = []
    state.tracker = SimpleNamespace(add=retained.append)  # type: ignore[assignment]
    x, dy, shared = torch.randn(TOKENS, SIZE), torch.randn(TOKENS, SIZE), torch.randn(TOKENS, SIZE)
    grouped = kind == "grouped"

    def gemm(xs: Any, dys: Any, outs: Any = None) -> Any:
        for a, b in zip(xs, dys, strict=True) if grouped else [(xs, dys)]:
            product = b.columnwise.matmul(a.columnwise.t())  # both are transposed
        for out in outs or ():
            out.copy_(product)
        return (None, [None] * len(SPLITS), None) if grouped else (product, None)

    with state.jobs.collect(0):
        if grouped:
            targets = [torch.empty(SIZE, SIZE) for _ in SPLITS]
            layer.wgrad_store.put([[Quantized(x)], [Quantized(dy)], targets], gemm)
        else:
            layer.wgrad_store.put([Quantized(x), Quantized(dy)], gemm)
    assert sum(tensor.nbytes for tensor in retained) == x.nbytes + dy.nbytes
    state.jobs.run(0)
    weight = layer.weight0 if grouped else layer.weight_0
    torch.testing.assert_close(weight.grad, dy.t().matmul(x))
    quantized = QuantizedTensor(shared)
    with state.jobs.collect(0):
        job = (
            [[quantized], [quantized], [torch.empty(SIZE, SIZE)] * 3]
            if grouped
            else [quantized, quantized]
        )
        layer.wgrad_store.put(job, gemm)
    assert quantized.rowwise is not None
    state.jobs.clear()


def run_sequence_parallel(rank: int, mode: str) -> tuple[list[list[float]], int]:
    """Return the gradients and the retained elements of the jobs of one of two ranks."""
    state = make_split_state()
    layer = fake_te.Linear(SIZE, SIZE, bias=False, parallel_mode=mode, group=dist.group.WORLD)
    split = fake_te.Linear(SIZE, SIZE, bias=False, parallel_mode=mode, group=dist.group.WORLD)
    te_layers.install(state, [split])
    retained: list[Tensor] = []
    state.tracker = SimpleNamespace(add=retained.append)  # type: ignore[assignment]
    gradients = []
    for linear in (layer, split):
        x = torch.randn(TOKENS, SIZE, generator=torch.Generator().manual_seed(rank))
        y = linear(x.requires_grad_())
        if linear is split:
            with state.jobs.collect(0):
                y.square().sum().backward()
            state.jobs.run(0)
        else:
            y.square().sum().backward()
        gradients += [linear.weight_0.grad, x.grad]
    return [gradient.flatten().tolist() for gradient in gradients], sum(
        gradient.numel() for gradient in retained
    )


@pytest.mark.parametrize(
    ("mode", "expected_elements"), [("column", 8 * 6 + 16 * 6), ("row", 8 * 6 + 4 * 6)]
)
def test_sequence_parallel_retains_the_local_part_and_gathers_in_w(
    farm: Farm, mode: str, expected_elements: int
) -> None:
    results = run_ranks(farm, 2, run_sequence_parallel, mode)
    for (whole_weight, whole_x, split_weight, split_x), _ in results:
        assert split_weight == whole_weight
        assert split_x == whole_x
    # The gathered input or dy has twice the retained rows.
    assert {retained_elements for _, retained_elements in results} == {expected_elements}


def gradients_with_userbuffers(rank: int, split: bool) -> list[list[float]]:
    """Return the gradients of three microbatches for layers that gather into one buffer."""
    state, buffer = make_split_state(), torch.empty(4 * TOKENS * SIZE)
    modes = ("column", "row", "column", "row")
    layers = [
        fake_te.Linear(
            SIZE, SIZE, bias=False, parallel_mode=mode, group=dist.group.WORLD, userbuffer=buffer
        )
        for mode in modes
    ]
    assert te_layers.install(state, layers) == len(layers)
    state.splits_backward = split
    inputs, outputs = [], []
    for microbatch in range(3):
        seed = torch.Generator().manual_seed(10 * rank + microbatch)
        x = y = torch.randn(TOKENS, SIZE, generator=seed).requires_grad_()
        for layer in layers:
            y = layer(y).relu()
        inputs.append(x)
        outputs.append(y)
    for microbatch, y in enumerate(outputs):
        if not split:
            y.square().sum().backward()
            continue
        with state.jobs.collect(microbatch):
            y.square().sum().backward()
        buffer.fill_(torch.nan)  # communication of another layer
    for microbatch in range(3 * split):
        state.jobs.run(microbatch)
    grads = [tensor.weight_0.grad for tensor in layers] + [tensor.grad for tensor in inputs]
    return [tensor.flatten().tolist() for tensor in grads]


def test_jobs_do_not_retain_userbuffer_views(farm: Farm) -> None:
    full_gradients, split_gradients = (
        run_ranks(farm, 2, gradients_with_userbuffers, is_split) for is_split in (False, True)
    )
    assert split_gradients == full_gradients


class OneBuffer(torch.autograd.Function):
    """Identity whose gradient is in a buffer shared by all layers, like a dispatcher's."""

    buffer = torch.empty(TOKENS, SIZE)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return OneBuffer.buffer.copy_(gradient)


class FusedExperts(nn.Module):
    """Builds its operations in its first F, like Megatron's, inside a dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = (LAYERS["grouped"](bias=False) for _ in range(2))
        self.config = SimpleNamespace(moe_ncclep_zero_copy=True)
        self._fused_ops: nn.Module | None = None

    def _make_fused_ops(self) -> nn.Module:
        class Operations(nn.Sequential):
            def forward(self, x: Tensor) -> Tensor:
                first, second = self
                return second(first(x, SPLITS).relu(), SPLITS)

        return Operations(self.linear_fc1, self.linear_fc2)

    def forward(self, x: Tensor) -> Tensor:
        self._fused_ops = self._fused_ops or self._make_fused_ops()
        return OneBuffer.apply(self._fused_ops(OneBuffer.apply(x)))


def test_jobs_do_not_retain_dispatcher_buffers() -> None:
    """Zero-copy dispatchers return the gradients of all fused expert layers in one buffer."""
    gradients = []
    for split in (False, True):
        state, layers = make_split_state(), [FusedExperts(), FusedExperts()]
        assert te_layers.install(state, layers) == 4
        outputs = []
        for microbatch in range(2):
            x = torch.randn(TOKENS, SIZE, generator=torch.Generator().manual_seed(microbatch))
            outputs.append(layers[1](layers[0](x.requires_grad_())))
        for microbatch, output in enumerate(outputs):
            with state.jobs.collect(microbatch) if split else nullcontext():
                output.square().sum().backward()
        for microbatch in range(2 * split):
            state.jobs.run(microbatch)
        gradients.append([parameter.grad for layer in layers for parameter in layer.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


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
    layer: Any = LAYERS["linear"]()
    layer.config = SimpleNamespace(fp8=fp8)
    for name, value in switches.items():
        setattr(layer, name, value)
    why = te_layers.why_unsplit(layer)
    assert (why is None) if reason is None else (reason in str(why))
    assert te_layers.install(make_split_state(), [layer]) == (why is None)


def two_gathering_layers(rank: int, split: bool) -> tuple[list[list[float]], list[str]]:
    """Return the gradients of a column- and a row-parallel layer, and the calls of their jobs."""
    state, group = make_split_state(), dist.group.WORLD
    layers = [
        fake_te.Linear(SIZE, SIZE, bias=False, parallel_mode=mode, group=group)
        for mode in ("column", "row")
    ]
    te_layers.install(state, layers if split else [])
    x = torch.randn(TOKENS, SIZE, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    y = layers[1](layers[0](x).relu())
    if not split:
        y.square().sum().backward()
        return [layer.weight_0.grad.flatten().tolist() for layer in layers], []
    with state.jobs.collect(0):
        y.square().sum().backward()
    calls = record_calls(fake_te, "general_gemm")
    state.jobs.run(0)
    return [layer.weight_0.grad.flatten().tolist() for layer in layers], calls


def test_next_gather_of_w_overlaps_with_the_previous_product(farm: Farm) -> None:
    full_results, split_results = (
        run_ranks(farm, 2, two_gathering_layers, is_split) for is_split in (False, True)
    )
    for (expected, _), (gradients, calls) in zip(full_results, split_results, strict=True):
        assert gradients == expected
        assert calls == ["gather", "gather", "product", "product"]
