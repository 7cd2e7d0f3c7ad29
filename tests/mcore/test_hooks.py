"""The hooks: each attribute is replaced and put back, and a changed Megatron is told apart."""

import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("megatron.training")

import megatron_vshape
from megatron_vshape.mcore import hooks

_ABSENT = object()


def current() -> list[Any]:
    return [vars(owner).get(name, _ABSENT) for owner, name in hooks.targets()]


@pytest.fixture(autouse=True)
def uninstalled() -> Iterator[None]:
    hooks.uninstall()
    yield
    hooks.uninstall()


def test_every_attribute_is_replaced_and_restored() -> None:
    before = current()
    megatron_vshape.register()
    names = [f"{owner}.{name}" for owner, name in hooks.targets()]
    during = current()
    # Where apex is installed its kernels stay, and so does Megatron's note of them.
    kept = {"fused_weight_gradient_mlp_cuda", "_grad_accum_fusion_available"}
    for name, old, new in zip(names, before, during, strict=True):
        assert new is not old or name.rpartition(".")[2] in kept, name
    megatron_vshape.unregister()
    for name, old, now in zip(names, before, current(), strict=True):
        assert now is old, name


def test_installing_twice_is_installing_once() -> None:
    before = current()
    megatron_vshape.register()
    during = current()
    megatron_vshape.register()
    assert all(a is b for a, b in zip(during, current(), strict=True))
    megatron_vshape.unregister()
    assert all(a is b for a, b in zip(before, current(), strict=True))


def test_every_hook_says_why() -> None:
    assert all(hook.reason for hook in hooks.HOOKS)
    targets = [hook.target for hook in hooks.HOOKS]
    assert len(targets) == len(set(targets))


@pytest.fixture
def moved_upstream() -> Iterator[types.ModuleType]:
    """Return a module that has one function, of another signature than a hook expects."""
    module = types.ModuleType("moved_upstream")
    module.train = lambda everything: None  # type: ignore[attr-defined]
    sys.modules["moved_upstream"] = module
    yield module
    del sys.modules["moved_upstream"]


def test_a_changed_signature_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, moved_upstream: types.ModuleType
) -> None:
    (hook,) = [each for each in hooks.HOOKS if each.attribute == "train"]
    moved = replace(hook, module="moved_upstream")
    monkeypatch.setattr(hooks, "HOOKS", (*hooks.HOOKS, moved))
    before = current()
    with pytest.raises(
        hooks.HookError, match=r"megatron-core 0\.\d+.* moved_upstream\.train takes"
    ):
        hooks.install()
    assert all(a is b for a, b in zip(before, current(), strict=True))


def test_a_missing_target_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, moved_upstream: types.ModuleType
) -> None:
    (hook,) = [each for each in hooks.HOOKS if each.attribute == "train"]
    gone = replace(hook, module="moved_upstream", attribute="train_all")
    monkeypatch.setattr(hooks, "HOOKS", (gone,))
    with pytest.raises(hooks.HookError, match=r"has no moved_upstream\.train_all, which"):
        hooks.install()
