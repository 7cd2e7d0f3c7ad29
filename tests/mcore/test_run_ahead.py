"""Rollback of a step that started early."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("megatron.training")

from megatron_vshape.mcore.features.post_validation.rollback import Backup
from megatron_vshape.mcore.observe.report import static_memory
from megatron_vshape.mcore.step import rewind
from megatron_vshape.mcore.step.rewind import RandomState


class Tracker:
    """A tracker like Transformer Engine's, whose states are random generators."""

    def __init__(self) -> None:
        self.states: dict[str, Any] = {"model": torch.Generator(), "old": torch.zeros(1)}

    def get_states(self) -> dict[str, Any]:
        return dict(self.states)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states = states


def test_rollback_restores_random_states(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker()
    monkeypatch.setattr(
        rewind, "tensor_parallel", SimpleNamespace(get_cuda_rng_tracker=lambda: tracker)
    )
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", torch.set_rng_state)
    generator = tracker.states["model"]
    state = RandomState.now()
    first = torch.rand(3, generator=generator), torch.rand(3)
    tracker.states["old"] = torch.ones(1)
    state.restore()
    assert tracker.states["model"] is generator
    assert tracker.states["old"] == 0
    second = torch.rand(3, generator=generator), torch.rand(3)
    assert all(map(torch.equal, first, second))


def test_the_copy_counts_as_memory() -> None:
    model = nn.Linear(30, 20)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(30)).sum().backward()
    optimizer.step()
    backup = Backup()
    backup.save([optimizer])
    memory = static_memory([model], optimizer, post_validates=True)
    steps = sum(state["step"].nbytes for state in optimizer.state.values())
    assert memory.copy == backup.nbytes - steps
    without = static_memory([model], optimizer)
    assert memory.total == without.total + memory.copy


def test_tensors_of_one_kind_are_copied_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch copies mixed lists tensor by tensor, and Adam's step counts are on the host."""
    calls: list[set[Any]] = []
    copy = torch._foreach_copy_

    def counted(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Any:
        calls.append({(tensor.device, tensor.dtype) for tensor in (*targets, *sources)})
        return copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)
    parameters = [nn.Parameter(torch.rand(3, 2).to(dtype)) for dtype in dtypes]
    optimizer = torch.optim.Adam(parameters, lr=0.1)  # otherwise 16-bit rounding removes the update

    def step() -> None:
        sum(parameter.float().square().sum() for parameter in parameters).backward()
        optimizer.step()

    def everything() -> list[torch.Tensor]:
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [tensor.detach().clone() for tensor in (*parameters, *states)]

    step()
    originals, backup = everything(), Backup()
    backup.save([optimizer])
    step()
    assert not any(map(torch.equal, originals, everything()))
    backup.restore()
    assert all(map(torch.equal, originals, everything()))
    assert [len(kinds) for kinds in calls] == [1, 1, 1, 1]
    assert calls[0] | calls[1] == calls[2] | calls[3]
