"""Weight jobs and the split linear, on one process."""

import threading
import weakref

import pytest
import torch
from runtime.split_linear import SplitLinear
from torch import Tensor, nn

from megatron_vshape.runtime import weight_jobs
from megatron_vshape.runtime.weight_jobs import (
    WeightGradKernel,
    WeightJobs,
    accumulate_weight_grad,
    fused_kernel,
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
            weight_jobs.defer(Job(name))
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
            weight_jobs.defer(job, job.begin)
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
        weight_jobs.defer(lambda: calls.append("new"))
        for _ in range(waits):
            weight_jobs.run_beside()
    assert calls == inside
    weight_jobs.run_beside()  # no B runs
    assert calls == inside
    jobs.run("old")
    assert [call for call in calls if len(call) == 1] == ["a", "b", "c", "d"]
    jobs.run("new")
    assert calls[-1] == "new"


def test_failed_b_leaves_no_jobs_to_the_next_b() -> None:
    jobs = WeightJobs()
    calls = left_by(jobs, "old", "ab")
    with pytest.raises(ZeroDivisionError), jobs.collect("fails", "old"):
        raise ZeroDivisionError
    with jobs.collect("next"):
        weight_jobs.run_beside()
    assert calls == ["begin a"]
    rejection = pytest.raises(RuntimeError, match="no weight jobs of gone: its B has not run")
    with rejection, jobs.collect("another", "gone"):
        pass
    assert not weight_jobs.is_open()


def test_job_from_another_thread_is_found() -> None:
    """As with CUDA, where autograd runs the backward on another thread."""
    jobs, ran = WeightJobs(), []
    with jobs.collect(0):
        thread = threading.Thread(target=lambda: weight_jobs.defer(lambda: ran.append(1)))
        thread.start()
        thread.join()
    jobs.run(0)
    assert ran == [1]


def test_misuse_raises_an_error() -> None:
    jobs = WeightJobs()
    with pytest.raises(RuntimeError, match="no B collects weight gradients"):
        weight_jobs.defer(lambda: None)
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


def test_failed_b_closes_its_context() -> None:
    jobs = WeightJobs()

    def fail() -> None:
        with jobs.collect(0):
            weight_jobs.defer(lambda: None)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not weight_jobs.is_open()
    with pytest.raises(RuntimeError, match="its B has not run"):
        jobs.run(0)


def test_default_kernel_equals_megatrons_unfused_arithmetic() -> None:
    dy, x = torch.randn(4, 2, 3).bfloat16(), torch.randn(4, 2, 5).bfloat16()
    weight = nn.Parameter(torch.zeros(3, 5, dtype=torch.bfloat16))
    weight.main_grad = torch.rand(3, 5)
    expected = weight.main_grad + dy.view(8, 3).t().matmul(x.view(8, 5))
    accumulate_weight_grad(weight, dy, x)
    assert torch.equal(weight.main_grad, expected)
    assert weight_grad(dy, x).dtype == torch.bfloat16


def test_fused_kernel_accumulates_in_place() -> None:
    dy, x = torch.randn(4, 2, 3), torch.randn(4, 2, 5)
    weight = nn.Parameter(torch.zeros(3, 5))
    weight.main_grad = start = torch.rand(3, 5)
    expected = start + weight_grad(dy, x)
    accumulate_weight_grad(weight, dy, x, fused_kernel("cpu", torch.float32, torch.float32))
    assert weight.main_grad is start
    torch.testing.assert_close(start, expected)


def test_kernel_choice_depends_on_device_and_dtype() -> None:
    f32, bf16 = torch.float32, torch.bfloat16
    assert fused_kernel("cpu", f32, f32) is WeightGradKernel.ADDMM
    assert fused_kernel("cuda", bf16, bf16) is WeightGradKernel.ADDMM
    assert fused_kernel("cpu", f32, bf16) is WeightGradKernel.MATMUL_ADD


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
