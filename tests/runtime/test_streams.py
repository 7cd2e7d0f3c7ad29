"""Weight jobs left on another stream than the stream of W, with fake streams."""

import weakref

import pytest
import torch
from runtime.split_linear import SplitLinear
from torch import Tensor

from megatron_vshape.runtime.weight_jobs import WeightJobs, defer, plain_tensors, run_beside


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
