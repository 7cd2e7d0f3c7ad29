"""Weight jobs: their order, kernels and streams, and the split linear, on one process."""

import logging
import sys
import threading
import weakref
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from runtime.split_linear import SplitLinear
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from megatron_vshape.runtime import weight_jobs
from megatron_vshape.runtime.weight_jobs import (
    WeightGradKernel,
    WeightJobs,
    accumulate_weight_grad,
    defer,
    fused_kernel,
    plain_tensors,
    run_beside,
    weight_grad,
)


def make_linear(bias: bool = True, dtype: torch.dtype = torch.float32) -> SplitLinear:
    torch.manual_seed(0)
    return SplitLinear(5, 3, bias=bias, dtype=dtype)


def data_of(microbatch: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(microbatch)
    return torch.randn(4, 2, 5, generator=generator).to(dtype).requires_grad_()


@pytest.mark.parametrize(("dtype", "wide"), [(torch.float32, False), (torch.bfloat16, True)])
def test_jobs_equal_full_backwards_bitwise(dtype: torch.dtype, wide: bool) -> None:
    def run(split: bool) -> list[Tensor]:
        layer, jobs = make_linear(dtype=dtype), WeightJobs()
        if wide:
            layer.weight.main_grad = torch.zeros(3, 5)
        inputs = [data_of(m, dtype) for m in range(3)]
        outputs = [layer(x) for x in inputs]
        for m, output in enumerate(outputs):
            if split:
                with jobs.collect(m):
                    output.square().sum().backward()
            else:
                output.square().sum().backward()
        if split:
            assert layer.weight.grad is None
            for m in range(3):
                jobs.run(m)
        total = layer.weight.main_grad if wide else layer.weight.grad
        assert (layer.weight.grad is None) == wide
        return [total, layer.bias.grad, *(x.grad for x in inputs)]

    for full, split in zip(run(False), run(True), strict=True):
        assert torch.equal(full, split)


def test_jobs_run_in_order_and_are_freed_one_by_one() -> None:
    jobs, ran, alive = WeightJobs(), [], []

    class Job:
        def __init__(self, name: str) -> None:
            self.name = name
            alive.append(weakref.ref(self))

        def __call__(self) -> None:
            assert not torch.is_grad_enabled()
            ran.append((self.name, sum(reference() is not None for reference in alive)))

    with jobs.collect("key"):
        for name in "abc":
            defer(Job(name))
    jobs.run("key")
    assert ran == [("a", 3), ("b", 2), ("c", 1)]
    assert not any(reference() for reference in alive)


class Noted:
    """A job that notes when it begins and when it runs."""

    def __init__(self, calls: list[str], name: str) -> None:
        self.calls, self.name, self.has_begun = calls, name, False

    def begin(self) -> None:
        assert not torch.is_grad_enabled()
        if not self.has_begun:
            self.calls.append(f"begin {self.name}")
        self.has_begun = True

    def __call__(self) -> None:
        assert self.has_begun
        self.calls.append(self.name)


def left_by(jobs: WeightJobs, key: str, names: str) -> list[str]:
    """Return the log of the jobs of these names, left by a B of the key."""
    calls: list[str] = []
    with jobs.collect(key):
        for name in names:
            job = Noted(calls, name)
            defer(job, job.begin)
    return calls


def test_inputs_of_a_job_start_during_the_previous_job() -> None:
    jobs = WeightJobs()
    calls = left_by(jobs, "key", "abc")
    jobs.run("key")
    assert calls == ["begin a", "begin b", "a", "begin c", "b", "c"]


@pytest.mark.parametrize(
    ("share", "waits", "inside"),
    [
        (1.0, 2, ["begin a", "a", "begin b", "b", "begin c"]),
        (0.75, 4, ["begin a", "a", "begin b", "b", "begin c", "c"]),
        (0.5, 4, ["begin a", "a", "begin b", "b"]),
        (0.2, 4, []),
        (1.0, 0, ["begin a"]),
    ],
)
def test_b_runs_its_share_of_the_overlapped_jobs(
    share: float, waits: int, inside: list[str]
) -> None:
    jobs = WeightJobs()
    calls = left_by(jobs, "old", "abcd")
    with torch.enable_grad(), jobs.collect("new", "old", share):
        defer(lambda: calls.append("new"))
        for _ in range(waits):
            run_beside()
    assert calls == inside
    run_beside()  # no B runs
    assert calls == inside
    jobs.run("old")
    assert [call for call in calls if len(call) == 1] == ["a", "b", "c", "d"]
    jobs.run("new")
    assert calls[-1] == "new"


def test_failed_b_leaves_no_jobs_to_the_next_b() -> None:
    jobs = WeightJobs()
    calls = left_by(jobs, "old", "ab")

    def fail() -> None:
        with jobs.collect("fails", "old"):
            defer(lambda: None)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not weight_jobs.is_open()
    with pytest.raises(RuntimeError, match="its B has not run"):
        jobs.run("fails")
    with jobs.collect("next"):
        run_beside()
    assert calls == ["begin a"]
    rejection = pytest.raises(RuntimeError, match="no weight jobs of gone: its B has not run")
    with rejection, jobs.collect("another", "gone"):
        pass
    assert not weight_jobs.is_open()


def test_job_from_another_thread_is_found() -> None:
    """As with CUDA, where autograd runs the backward on another thread."""
    jobs, ran = WeightJobs(), []
    with jobs.collect(0):
        thread = threading.Thread(target=lambda: defer(lambda: ran.append(1)))
        thread.start()
        thread.join()
    jobs.run(0)
    assert ran == [1]


def test_misuse_raises_an_error() -> None:
    jobs = WeightJobs()
    with pytest.raises(RuntimeError, match="no B collects weight gradients"):
        defer(lambda: None)
    with pytest.raises(RuntimeError, match=r"no weight jobs of \(1, 2\)"):
        jobs.run((1, 2))
    with jobs.collect((1, 2)):
        with pytest.raises(RuntimeError, match="another B is running"), jobs.collect((1, 3)):
            pass
        assert weight_jobs.is_open()
    with pytest.raises(RuntimeError, match="its W has not run yet"), jobs.collect((1, 2)):
        pass
    jobs.clear()
    with pytest.raises(RuntimeError, match="its B has not run"):
        jobs.run((1, 2))


FLOAT, BFLOAT = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _forget() -> None:
    for cached in (fused_kernel, weight_jobs._apex, weight_jobs._te_gemm):
        cached.cache_clear()


def general_gemm(
    x: Tensor,
    dy: Tensor,
    out_dtype: torch.dtype,
    layout: str,
    out: Tensor,
    accumulate: bool,
    grad: bool,
) -> None:
    """Replace Transformer Engine's kernel for these arguments, and check the arguments."""
    assert (layout, accumulate, grad, out_dtype) == ("NT", True, True, out.dtype)
    out.add_(dy.t().to(out.dtype).matmul(x.to(out.dtype)))


def wgrad_gemm_accum_fp32(x: Tensor, dy: Tensor, out: Tensor) -> None:
    out.add_(dy.t().float().matmul(x.float()))


def with_module(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., None]) -> None:
    module = ModuleType(name)
    setattr(module, function.__name__, function)
    for parent in ("transformer_engine", "transformer_engine.pytorch"):
        if name.startswith(parent):
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, module)


TE = "transformer_engine.pytorch.cpp_extensions"
APEX = "fused_weight_gradient_mlp_cuda"


def test_kernels_are_chosen_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen_kernel() -> WeightGradKernel:
        fused_kernel.cache_clear()
        return fused_kernel("cuda", FLOAT, BFLOAT)

    assert fused_kernel("cpu", FLOAT, FLOAT) is WeightGradKernel.ADDMM
    assert fused_kernel("cuda", BFLOAT, BFLOAT) is WeightGradKernel.ADDMM
    assert fused_kernel("cpu", FLOAT, BFLOAT) is WeightGradKernel.MATMUL_ADD
    assert chosen_kernel() is WeightGradKernel.ADDMM_WIDE
    monkeypatch.setattr(weight_jobs, "_addmm_has_out_dtype", lambda: False)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert chosen_kernel() is WeightGradKernel.MATMUL_ADD
    with_module(monkeypatch, TE, general_gemm)
    weight_jobs._te_gemm.cache_clear()
    assert chosen_kernel() is WeightGradKernel.TE_GEMM


@pytest.mark.parametrize("total", [FLOAT, BFLOAT])
def test_apex_is_used_wherever_megatron_uses_it(
    monkeypatch: pytest.MonkeyPatch, total: torch.dtype
) -> None:
    """A full backward is Megatron's, which supports no other kernel."""
    with_module(monkeypatch, APEX, wgrad_gemm_accum_fp32)
    weight_jobs._apex.cache_clear()
    for has_out_dtype in (False, True):
        fused_kernel.cache_clear()
        monkeypatch.setattr(
            weight_jobs, "_addmm_has_out_dtype", lambda has_dtype=has_out_dtype: has_dtype
        )
        assert fused_kernel("cuda", total, BFLOAT) is WeightGradKernel.APEX


@pytest.mark.parametrize(("version", "has"), [("2.9.1+cu130", False), ("2.10.0", True)])
def test_addmm_accumulates_in_wider_dtypes_since_torch_2_10(
    monkeypatch: pytest.MonkeyPatch, version: str, has: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    assert weight_jobs._addmm_has_out_dtype.__wrapped__() is has


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            fused_kernel("cpu", FLOAT, BFLOAT)
    assert [record.getMessage() for record in caplog.records] == [
        "weight gradients of torch.bfloat16 activations are added to torch.float32 sums by "
        "matmul_add"
    ]


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT])
def test_all_kernels_give_equal_gradients(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_module(monkeypatch, TE, general_gemm)
    with_module(monkeypatch, APEX, wgrad_gemm_accum_fp32)
    generator = torch.Generator().manual_seed(0)
    dy = torch.randn(6, 2, 3, generator=generator).to(dtype)
    x = torch.randn(6, 2, 5, generator=generator).to(dtype)
    kernels = set(WeightGradKernel) - {WeightGradKernel.ADDMM_WIDE}  # only a GPU has it
    if dtype is not FLOAT:
        kernels -= {WeightGradKernel.ADDMM}  # for equal dtypes
    expected = 1 + dy.flatten(0, 1).float().t().matmul(x.flatten(0, 1).float())
    for kernel in kernels:
        weight = nn.Parameter(torch.zeros(3, 5, dtype=dtype))
        weight.main_grad = total = torch.ones(3, 5)  # type: ignore[attr-defined]
        accumulate_weight_grad(weight, dy, x, kernel)
        assert weight.main_grad is total
        if kernel is WeightGradKernel.MATMUL_ADD:  # Megatron's arithmetic without fusion
            assert weight_grad(dy, x).dtype == dtype
            product = dy.flatten(0, 1).t().matmul(x.flatten(0, 1))
            assert torch.equal(total, torch.ones(3, 5) + product)
        else:
            torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6, msg=str(kernel))


def test_error_names_a_missing_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    weight = nn.Parameter(torch.zeros(3, 5))
    weight.main_grad = torch.ones(3, 5)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="'te_gemm' needs Transformer Engine"):
        accumulate_weight_grad(weight, torch.ones(2, 3), torch.ones(2, 5), WeightGradKernel.TE_GEMM)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_kernel_accumulates_in_fp32(dtype: torch.dtype) -> None:
    dy = torch.randn(64, 2, 48, device="cuda").to(dtype)
    x = torch.randn(64, 2, 32, device="cuda").to(dtype)
    weight = nn.Parameter(torch.zeros(48, 32, dtype=dtype, device="cuda"))
    weight.main_grad = torch.rand(48, 32, device="cuda")
    expected = weight.main_grad + dy.float().view(128, 48).t() @ x.float().view(128, 32)
    kernel = fused_kernel("cuda", torch.float32, dtype)
    assert kernel is WeightGradKernel.ADDMM_WIDE
    accumulate_weight_grad(weight, dy, x, kernel)
    torch.testing.assert_close(weight.main_grad, expected, rtol=1e-4, atol=1e-3)


class Stream:
    """A stream that records its calls."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self._calls = name, calls

    def wait_stream(self, awaited: "Stream") -> None:
        self._calls.append(f"{self.name} waits for {awaited.name}")


class Gpu:
    """The streams of a GPU that is not there."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.main, self.side = Stream("main", self.calls), Stream("side", self.calls)
        self.current = self.main


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()

    def record(tensor: Tensor, stream: Stream) -> None:
        gpu.calls.append(f"{tuple(tensor.shape)} used on {stream.name}")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: gpu.current)
    monkeypatch.setattr(Tensor, "record_stream", record)
    return gpu


def leave(gpu: Gpu, jobs: WeightJobs, stream: Stream) -> None:
    """Leave a job of two tensors on `stream`."""
    with jobs.collect("B"):
        gpu.current = stream
        defer(
            lambda: gpu.calls.append(f"job on {gpu.current.name}"),
            lambda: gpu.calls.append("gather"),
            tensors=[torch.empty(2), torch.empty(3, 4)],
        )
        gpu.current = gpu.main


def test_w_waits_for_the_stream_of_the_job_and_keeps_its_memory(gpu: Gpu) -> None:
    jobs = WeightJobs()
    leave(gpu, jobs, gpu.side)
    assert gpu.calls == []
    jobs.run("B")
    follows = ["main waits for side", "(2,) used on main", "(3, 4) used on main"]
    assert gpu.calls == [*follows, "gather", "job on main"]


def test_one_stream_needs_no_wait(gpu: Gpu) -> None:
    jobs = WeightJobs()
    leave(gpu, jobs, gpu.main)
    jobs.run("B")  # whose tensors may be another stream's memory all the same
    assert gpu.calls == ["(2,) used on main", "(3, 4) used on main", "gather", "job on main"]


def test_job_that_overlaps_a_b_waits(gpu: Gpu) -> None:
    jobs = WeightJobs()
    leave(gpu, jobs, gpu.side)
    with jobs.collect("next", beside="B"):
        assert gpu.calls[0] == "main waits for side"  # before the input of the job is started
        run_beside()
    assert gpu.calls[-1] == "job on main"
    jobs.run("B")
    jobs.run("next")


def test_linear_lists_the_tensors_of_its_job(gpu: Gpu) -> None:
    jobs, layer = WeightJobs(), SplitLinear(4, 3, bias=False)
    with jobs.collect("B"):
        output = layer(torch.randn(5, 4))
        gpu.current = gpu.side
        output.sum().backward()
        gpu.current = gpu.main
    jobs.run("B")
    assert gpu.calls == ["main waits for side", "(5, 3) used on main", "(5, 4) used on main"]
    assert layer.weight.grad is not None


class Quantized:
    """Numbers and their scales as in Transformer Engine's storages; returns the numbers."""

    def __init__(self, **parts: object) -> None:
        self.__dict__ |= parts

    def get_data_tensors(self) -> tuple[object, object]:
        return self._rowwise_data, self._columnwise_data  # type: ignore[attr-defined]


def test_scales_are_read_on_the_stream_of_the_numbers(gpu: Gpu) -> None:
    one = Quantized(
        _rowwise_data=torch.empty(2, 8),
        _rowwise_scale_inv=torch.empty(2, 1),
        _columnwise_data=None,
        _columnwise_scale_inv=None,
        _quantizer=object(),
    )
    quantized = Quantized(_rowwise_data=None, _columnwise_data=None, _rowwise_storage=one)
    jobs = WeightJobs()
    for number, value in enumerate((one, [quantized])):
        with jobs.collect(number):
            defer(lambda: None, tensors=list(plain_tensors(value)))
        gpu.calls.clear()
        jobs.run(number)
        assert gpu.calls == ["(2, 8) used on main", "(2, 1) used on main"]


def test_tensors_are_freed_with_their_job(gpu: Gpu) -> None:
    jobs, results = WeightJobs(), []
    tensor = torch.empty(2)
    reference = weakref.ref(tensor)
    with jobs.collect("B"):
        defer(lambda: results.append(reference()), tensors=[tensor])
    del tensor
    jobs.run("B")
    assert results == [None]
