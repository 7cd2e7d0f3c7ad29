"""The CPU mode: redirected functions, undoing it, and training Megatron under it."""

import math
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from megatron_vshape.mcore import cpu

ROOT = Path(__file__).parents[2]
GLOO = dist.ProcessGroupGloo
OWNERS = [torch, torch.Tensor, torch.cuda, torch.cuda.random, torch.cuda.nvtx, dist, c10d, GLOO]
MEGATRON_RANDOM = "megatron.core.tensor_parallel.random"


def is_on() -> bool:
    return bool(cpu.replaced)


pytestmark = pytest.mark.skipif(
    not is_on() and torch.cuda.is_available(), reason="the CPU mode is for no GPU"
)


@pytest.fixture
def mode_off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start without the mode, whatever other tests have installed or imported; restore that."""
    monkeypatch.delitem(sys.modules, MEGATRON_RANDOM, raising=False)
    was_installed = is_on()
    cpu.replaced.undo()
    yield
    cpu.replaced.undo()
    if was_installed:
        cpu.install()


@pytest.fixture
def mode_on(mode_off: None) -> None:
    assert cpu.install()


def in_megatron(expression: str) -> object:
    """Evaluate `expression` in a module of Megatron."""
    return eval(expression, {"__name__": "megatron.core.some_module", "torch": torch})


@pytest.mark.usefixtures("mode_off")
class TestInstalling:
    def test_undoing_restores_every_attribute(self) -> None:
        originals = [dict(vars(owner)) for owner in OWNERS]
        cpu.install()
        during = [dict(vars(owner)) for owner in OWNERS]
        cpu.replaced.undo()
        for owner, original, replacement in zip(OWNERS, originals, during, strict=True):
            now = vars(owner)
            assert [name for name in replacement if replacement[name] is not original.get(name)], (
                owner
            )
            assert now.keys() == original.keys(), owner
            assert [name for name in original if now[name] is not original[name]] == [], owner

    def test_install_twice(self) -> None:
        assert not is_on()
        assert cpu.install()
        assert cpu.install()
        assert is_on()
        cpu.replaced.undo()
        assert not is_on()

    def test_does_nothing_where_there_is_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        empty = torch.empty
        assert not cpu.install()
        assert not is_on()
        assert torch.empty is empty

    def test_install_after_megatron_is_rejected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        imported = ModuleType(MEGATRON_RANDOM)
        imported._lazy_call = torch.cuda._lazy_call  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, MEGATRON_RANDOM, imported)
        with pytest.raises(RuntimeError, match="before the first import of megatron"):
            cpu.install()
        assert not is_on()


@pytest.mark.usefixtures("mode_on")
class TestRedirecting:
    @pytest.mark.parametrize("device", ["cuda", "cuda:3", 0, torch.device("cuda"), "cpu", None])
    def test_tensors_are_made_on_the_cpu(self, device: object) -> None:
        tensors = [
            torch.empty(2, device=device),
            torch.zeros(2, device=device, pin_memory=True),
            torch.tensor([1.0, 2.0], device=device),
            torch.ones_like(torch.ones(2), device=device),
            torch.ones(2).new_zeros(2, device=device),
            torch.ones(2).to(device=device),
            torch.nn.Linear(2, 2).cuda().weight,
        ]
        assert {tensor.device.type for tensor in tensors} == {"cpu"}

    def test_other_conversions_are_unchanged(self) -> None:
        ones = torch.ones(2)
        assert ones.to(torch.bfloat16).dtype is torch.bfloat16
        assert ones.to("cuda", torch.float64).dtype is torch.float64
        assert ones.to("meta").device.type == "meta"
        assert torch.empty(2, device="meta").device.type == "meta"

    def test_a_backward_may_ask_for_the_gpu(self) -> None:
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
                return torch.full((2,), 2.0, device="cuda") * gradient

        x = torch.ones(2, requires_grad=True)
        Double.apply(x).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2.0, 2.0]

    def test_only_megatron_hears_of_a_gpu(self) -> None:
        assert in_megatron("torch.cuda.is_available()") is True
        assert torch.cuda.is_available() is False
        assert in_megatron("torch.ones(1).type()") == "torch.cuda.FloatTensor"
        assert torch.ones(1).type() == "torch.FloatTensor"

    def test_one_device_for_each_local_rank(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert torch.cuda.device_count() == 4
        monkeypatch.delenv("LOCAL_WORLD_SIZE")
        assert torch.cuda.device_count() == 1

    def test_the_device_generator_is_the_cpus(self) -> None:
        torch.cuda.manual_seed(7)
        state = torch.cuda.get_rng_state()
        first = torch.rand(3, device="cuda")
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)
        torch.manual_seed(7)
        assert torch.equal(torch.rand(3), first)

    def test_streams_and_events(self) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        end.record()
        torch.cuda.synchronize()
        assert end.query()
        assert start.elapsed_time(end) > 0

    def test_compile_is_eager(self) -> None:
        assert torch.compile(math.sqrt) is math.sqrt
        assert torch.compile(dynamic=True)(math.sqrt) is math.sqrt


def test_isend_keeps_the_storage_that_the_sender_frees(mode_off: None) -> None:
    sent_tensors: list[torch.Tensor] = []
    send = cpu._isend_of_an_alias(lambda tensor, dst: sent_tensors.append(tensor))
    output = torch.arange(3)
    send(output, 1)
    output.data = torch.empty(1, dtype=torch.int64)  # what Megatron does right after
    assert sent_tensors[0].tolist() == [0, 1, 2]


@pytest.mark.usefixtures("mode_on")
class TestGlooGroups:
    @pytest.mark.parametrize("interface", [None, "lo", "lo,lo"])
    def test_have_one_worker(self, interface: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        if interface is not None:
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
        group = GLOO(dist.HashStore(), 0, 1, timeout=timedelta(seconds=77))
        assert group.options._threads == 1
        assert group.options._timeout == timedelta(seconds=77)
        assert len(group.options._devices) == (2 if interface == "lo,lo" else 1)
        number = torch.tensor([3.0])
        group.allreduce([number]).wait()
        assert number.item() == 3.0
        new_group = GLOO(dist.HashStore(), 0, 1, timeout=timedelta(seconds=7))
        assert (
            new_group.options._devices == group.options._devices
        )  # whose threads wake all the time

    def test_options_are_passed_on(self) -> None:
        options = GLOO._Options()
        options._devices = [GLOO.create_default_device()]
        options._threads = 3
        assert GLOO(dist.HashStore(), 0, 1, options).options._threads == 3
