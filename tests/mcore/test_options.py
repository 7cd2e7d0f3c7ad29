"""Every option of a run is defined once; flag, keyword, variable and messages follow from it."""

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig

import megatron_vshape
from megatron_vshape.mcore.hooks import registry
from megatron_vshape.mcore.options import (
    OPTIONS,
    TRACE_STEPS,
    Options,
    UnsupportedError,
    add_arguments,
    options_from,
    options_in,
    options_of,
    with_keywords,
)
from megatron_vshape.mcore.refusals import RefusedError

GIVEN: dict[str, tuple[str, Any]] = {
    "schedule": ("v-zb", "v-zb"),
    "timeout_seconds": ("90", 90.0),
    "costs_file": ("costs.json", "costs.json"),
    "memory_limit_gib": ("60", 60.0),
    "host_memory_limit_gib": ("100", 100.0),
    "profile_steps": ("10:14", (10, 14)),
    "trace_folder": ("traces", "traces"),
    "layer_split": ("3,4,4,3", "3,4,4,3"),
    "vocab_parallel": ("true", True),
    "post_validates": ("true", True),
    "slices": ("4", 4),
    "keep_order": ("true", True),
    "split_graphs": ("off", "off"),
}
"""Per option: a text and its parsed value."""

NONE: dict[str, list[Any]] = {
    "schedule": [3],
    "timeout_seconds": [0, "120", float("nan")],
    "costs_file": [1],
    "memory_limit_gib": [-1.0, [60]],
    "host_memory_limit_gib": [0.0],
    "profile_steps": [(1, 4), (5, 4), 5, (4.0, 5)],
    "trace_folder": [True],
    "layer_split": [[3, 4]],
    "vocab_parallel": ["yes", 1],
    "post_validates": [1],
    "slices": [0, 2.5, "many"],
    "keep_order": ["yes", 1],
    "lengths": ["long", 5],
    "split_graphs": ["on", True],
    "warmup": ["yes", 1],
}


def test_register_documents_every_keyword() -> None:
    documented = set(re.findall(r"`(\w+)`", str(megatron_vshape.register.__doc__)))
    assert documented >= OPTIONS.keys() - {"post_validates"}


@pytest.mark.parametrize("name", GIVEN)
def test_flag_keyword_and_variable_set_the_same_option(name: str) -> None:
    (text, value), option = GIVEN[name], OPTIONS[name]
    words = [option.flag] if not option.metavar else [option.flag, text]
    parsed = options_of(add_arguments(ArgumentParser()).parse_args(words))
    assert getattr(parsed, name) == value
    assert options_in(f"schedule=v-half,{name}={text}")[name] == value
    if name != "post_validates":
        assert getattr(options_from({"schedule": "v-half", name: value}), name) == value
    parsed.check()


@pytest.mark.parametrize(
    ("name", "value"), [(name, option_value) for name in NONE for option_value in NONE[name]]
)
def test_invalid_values_have_the_same_error(name: str, value: Any) -> None:
    message = f" is not {OPTIONS[name].values.wants}"
    with pytest.raises(
        UnsupportedError, match=f"^{OPTIONS[name].flag or name} .*{re.escape(message)}$"
    ):
        Options(**{"schedule": "v-zb"} | {name: value}).check()
    with pytest.raises(UnsupportedError, match=f"^{name} .*{re.escape(message)}$"):
        options_from({"schedule": "v-zb"} | {name: value})


@pytest.mark.parametrize("name", ["timeout_seconds", "profile_steps", "vocab_parallel", "slices"])
def test_invalid_texts_have_the_same_error(name: str) -> None:
    message = re.escape(f"'x' is not {OPTIONS[name].values.wants}")
    with pytest.raises(ArgumentTypeError, match=message):
        OPTIONS[name].values.of_text("x")
    with pytest.raises(ValueError, match=f"{name} {message}"):
        options_in(f"{name}=x")


def test_trace_option_enables_profiling() -> None:
    options = options_of(Namespace(pipeline_schedule="v-half", pipeline_trace="traces"))
    assert options.profile_steps == TRACE_STEPS
    assert options.flags_for_ours() == ["--pipeline-trace"]


REJECTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "schedule=auto needs costs: give costs_file=FILE, or profile_steps=A:B to measure them": (
        {"schedule": "auto"},
        {},
    ),
    "slices does not work with --context-parallel-size 2: Transformer Engine's attention does not "
    "support it with slices. Remove slices": (
        {"schedule": "v-zb", "slices": 2},
        {"context_parallel_size": 2},
    ),
    "memory_limit_gib requires schedule=auto; the memory of v-half is fixed": (
        {"schedule": "v-half", "memory_limit_gib": 4.0},
        {},
    ),
}


@pytest.mark.parametrize("text", REJECTED)
def test_errors_after_register_name_keywords(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only options of this package; Megatron's options keep their flag names."""
    options, config = REJECTED[text]
    sizes = {"num_layers": 8, "hidden_size": 8, "num_attention_heads": 1}
    sizes |= {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
    monkeypatch.setenv("RANK", "0")
    registry.uninstall()
    megatron_vshape.register(**options)
    try:
        with pytest.raises(RefusedError) as refused:
            TransformerConfig(**sizes, **config)
    finally:
        registry.uninstall()
    assert (refused.value.code, refused.value.why) == (f"megatron-vshape: {text}", text)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("Use --pipeline-slices 4, or remove it", "Use slices=4, or remove it"),
        ("set --pipeline-schedule to a name", "set schedule to a name"),
        ("--pipeline-schedule v-half+ with", "schedule=v-half+ with"),
        ("--pipeline-schedule interleaved-1f1b:4.", "schedule=interleaved-1f1b:4."),
        ("--pipeline-schedule my/plan.json is", "schedule=my/plan.json is"),
        ("--pipeline-layer-split 3,1,1,3, or auto", "layer_split=3,1,1,3, or auto"),
        ("fits --pipeline-memory-limit 1e-09: rank 0", "fits memory_limit_gib=1e-09: rank 0"),
        ("--pipeline-schedule-x", "--pipeline-schedule-x"),
        ("--seq-length 64", "--seq-length 64"),
    ],
)
def test_a_flag_with_its_value_becomes_a_keyword(message: str, text: str) -> None:
    assert with_keywords(message) == text


def test_every_flag_has_a_keyword() -> None:
    flags = {name: option.flag for name, option in OPTIONS.items() if option.flag}
    assert all(with_keywords(f"{flag}:") == f"{name}:" for name, flag in flags.items())
