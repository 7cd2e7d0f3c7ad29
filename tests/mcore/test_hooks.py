"""The hooks: each attribute is replaced and restored, and a changed Megatron is detected."""

import functools
import inspect
import sys
import types
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import megatron_vshape
from megatron_vshape.mcore.hook import ABSENT
from megatron_vshape.mcore.hooks import registry, training
from megatron_vshape.mcore.hooks.session import Session
from megatron_vshape.mcore.setup.run_config import ScheduleChoice


def targets() -> Iterator[tuple[Any, str]]:
    """Yield the owner and the name of every attribute of this Megatron that is replaced."""
    for hook in registry.HOOKS:
        # An attribute that may be absent and has no parameters is put there where it is.
        if hook.owner() is not None and hook.original() is not ABSENT:
            yield hook.owner(), hook.name


def current_attributes() -> list[Any]:
    return [vars(owner).get(name, ABSENT) for owner, name in targets()]


@pytest.fixture(autouse=True)
def uninstalled() -> Iterator[None]:
    registry.uninstall()
    yield
    registry.uninstall()


def test_every_attribute_is_replaced_and_restored() -> None:
    originals = current_attributes()
    megatron_vshape.register()
    names = [f"{owner}.{name}" for owner, name in targets()]
    schedule_only = {hook.name for hook in registry.HOOKS if hook.only_with_pipeline}
    during = current_attributes()
    for name, old, new in zip(names, originals, during, strict=True):
        assert (new is not old) == (name.rpartition(".")[2] not in schedule_only), name
    megatron_vshape.register()  # twice is once
    assert all(a is b for a, b in zip(during, current_attributes(), strict=True))
    megatron_vshape.unregister()
    for name, old, now in zip(names, originals, current_attributes(), strict=True):
        assert now is old, name


@pytest.fixture
def session() -> Iterator[Session]:
    """Return a session whose hooks that a schedule brings wait to be put in place."""
    new_session = Session()
    for hook in registry.HOOKS:
        if hook.only_with_pipeline:
            registry._install(hook, new_session, {})
    yield new_session
    new_session.choose(None, None)


def test_schedule_hooks_are_installed_and_removed_with_the_schedule(session: Session) -> None:
    originals = current_attributes()
    chosen = [hook for hook in registry.HOOKS if hook.only_with_pipeline]
    for pipeline in (None, SimpleNamespace(choice=ScheduleChoice(2, "v-half"))):
        session.choose(pipeline, "1f1b" if pipeline is None else None)  # type: ignore[arg-type]
        assert (current_attributes() == originals) == (pipeline is None)
        assert all(hook.original() is not ABSENT for hook in chosen)
    session.choose(None, None)
    assert all(a is b for a, b in zip(originals, current_attributes(), strict=True))


# These learn what is asked for, or come before that is known; the tests below say what they do.
LISTENING = {"add_megatron_arguments", "validate_args", "pretrain", "train"}
PASSING = [
    hook
    for hook in registry.HOOKS
    if not hook.only_with_pipeline and hook.name not in LISTENING and hook.original() is not ABSENT
]


def spy_on(original: Any, calls: list[Any], result: object) -> Any:
    """Return a function with the signature of `original` that keeps its calls."""

    @functools.wraps(original)
    def replacement(*args: Any, **options: Any) -> object:
        calls.append((args, options))
        return result

    return replacement


@pytest.mark.parametrize("by_name", [False, True], ids=["in place", "by name"])
def test_hooks_without_a_schedule_pass_arguments_through(by_name: bool) -> None:
    """The same objects, by position or by name, and the same result."""
    assert len(PASSING) >= 30
    for hook in PASSING:
        check_passing(hook, by_name)


def check_passing(hook: registry.Hook, by_name: bool) -> None:
    calls: list[Any] = []
    result = object()
    replacement = hook.replacement(Session(), spy_on(hook.original(), calls, result))
    args, options = [], {}
    for parameter in inspect.signature(hook.original()).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.kind == parameter.KEYWORD_ONLY or (by_name and parameter.name != "self"):
            options[parameter.name] = object()
        else:
            args.append(object())
    returned = replacement(*args, **options)
    assert returned is result or hook.name in ("__init__", "__post_init__"), hook.target
    assert calls == [(tuple(args), options)], hook.target


def test_a_provider_is_called_as_it_was_given() -> None:
    """By Megatron up to 0.18, which calls it once for every chunk."""
    calls: list[Any] = []

    def provider(pre_process: bool = True, post_process: bool = True) -> None: ...

    def upstream(
        forward_step_func: object, model_provider: Any, pg_collection: object = None
    ) -> object:
        return model_provider(False, post_process=True)

    wrapped = training.pretrain(Session(), upstream)
    result = object()
    assert wrapped(object(), model_provider=spy_on(provider, calls, result)) is result
    assert calls == [((False,), {"post_process": True})]


def test_training_without_a_schedule_is_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    result = object()
    monkeypatch.setattr(training, "get_args", lambda: types.SimpleNamespace())
    monkeypatch.setattr(training, "print_rank_0", pytest.fail)
    arguments = [object() for _ in range(3)]
    assert training.train(Session(), spy_on(None, calls, result))(*arguments, a=result) is result
    assert calls == [(tuple(arguments), {"a": result})]


def test_the_parser_leaves_no_trace_of_flags_that_are_not_given() -> None:
    parser = training.add_megatron_arguments(Session(), lambda parser: parser)(ArgumentParser())
    assert vars(parser.parse_args([])) == {}
    session = Session()
    parser = training.add_megatron_arguments(session, lambda parser: parser)(ArgumentParser())
    assert vars(parser.parse_args(["--pipeline-schedule", "v-min"])) == {
        "pipeline_schedule": "v-min"
    }
    assert session.process.names_schedule


def all_attributes() -> dict[str, Any]:
    """Return every attribute of every module of Megatron that is loaded, and of its classes."""
    attributes: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "megatron" or module is None:
            continue
        for key, value in list(vars(module).items()):
            attributes[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                attributes |= {
                    f"{name}.{key}.{inner}": attribute for inner, attribute in vars(value).items()
                }
    return attributes


def changed_attributes(attributes: dict[str, Any], new_attributes: dict[str, Any]) -> set[str]:
    return {
        name
        for name in attributes.keys() | new_attributes.keys()
        if attributes.get(name, ABSENT) is not new_attributes.get(name, ABSENT)
    }


def test_nothing_else_of_megatron_is_touched() -> None:
    """Not only the attributes that hooks list: all of them, of all modules and classes."""
    megatron_vshape.register()  # imports what there is to import
    megatron_vshape.unregister()
    attributes = all_attributes()
    megatron_vshape.register()
    changed = changed_attributes(attributes, all_attributes())
    listed = {hook.target for hook in registry.HOOKS}
    anywhere = {hook.name for hook in registry.HOOKS if hook.everywhere}
    # Where a target is a class's, or a class itself, its inner attributes have its name in front.
    strangers = {
        name
        for name in changed
        if not any(name.startswith(prefix) for prefix in listed)
        and name.rpartition(".")[2] not in anywhere
    }
    assert len(changed) >= 15
    assert strangers == set()
    megatron_vshape.unregister()
    assert changed_attributes(attributes, all_attributes()) == set()


def test_every_hook_has_a_reason() -> None:
    assert all(hook.reason for hook in registry.HOOKS)
    targets = [hook.target for hook in registry.HOOKS]
    assert len(targets) == len(set(targets))


def is_missed(record: registry.Target) -> bool:
    """Return whether this Megatron must have the target; some have a copy that nothing asks."""
    if not isinstance(record, registry.Hook):
        return True
    return record.since <= registry.release()


PRESENT = [
    finding.record for finding in registry.examine() if finding.is_there and finding.record.expects
]


@pytest.mark.parametrize("record", PRESENT, ids=lambda record: record.target)
def test_every_target_that_moves_is_named_with_the_version(
    record: registry.Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = record.owner(), record.name
    version = f"megatron-core {registry.megatron_version()}"
    originals = current_attributes()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda everything: None)
        with pytest.raises(registry.HookError) as moved:
            registry.install()
    text = f"{version} is not supported: {record.target} takes (everything) and this package needs "
    assert str(moved.value) == text + ", ".join(record.expects)
    with monkeypatch.context() as patch:
        patch.delattr(owner, name)
        if is_missed(record):
            with pytest.raises(registry.HookError) as raised:
                registry.install()
            text = f"{version} has no {record.target}, which this package "
            assert str(raised.value).startswith(text)
        else:
            registry.install()
            registry.uninstall()
    assert all(a is b for a, b in zip(originals, current_attributes(), strict=True))


def test_the_version_has_the_commit_of_a_checkout_of_megatron_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = registry.core
    monkeypatch.setattr(core, "__version__", "0.19.2+ab12cd34")
    for folder, version in (
        ("/home/user/project/.venv/lib/python3.12/site-packages", "0.19.2"),
        ("/opt/Megatron-LM", "0.19.2+ab12cd34"),
    ):
        monkeypatch.setattr(core, "__file__", f"{folder}/megatron/core/__init__.py")
        assert registry.megatron_version() == version


SETTING = [probe for probe in registry.PROBES if probe.sets]


@pytest.mark.parametrize("record", SETTING, ids=lambda record: record.target)
def test_an_attribute_of_ddp_that_moves_is_named_with_the_version(
    record: registry.Dependency, monkeypatch: pytest.MonkeyPatch
) -> None:
    def constructor(self: Any, *arguments: Any) -> None:
        self.ddp_config = self.buckets = self.params = None

    monkeypatch.setattr(record.owner(), record.name, constructor)
    with pytest.raises(registry.HookError) as moved:
        registry.install()
    names = [setting for setting in record.sets if setting not in ("ddp_config", "buckets")]
    assert str(moved.value) == (
        f"megatron-core {registry.megatron_version()} is not supported: {record.target} does not "
        f"set {', '.join(names)}, which this package uses"
    )


def test_a_release_that_never_had_a_target_is_not_missing_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (hook,) = [hook for hook in registry.HOOKS if hook.attribute == "train"]
    missing_hook = replace(hook, attribute="train_all", since=(0, 90))
    monkeypatch.setattr(registry, "HOOKS", (missing_hook,))
    assert [finding.fault for finding in registry.examine() if finding.fault] == []
