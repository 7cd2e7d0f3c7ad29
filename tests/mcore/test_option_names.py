"""Errors name options as the user gave them: by flags, or by the keywords of `register`."""

import json
import subprocess
import sys

import pytest

from megatron_vshape.mcore.options import OPTIONS, with_keywords

PROGRAM = """
import json, sys
import torch
import megatron_vshape
from megatron.core.transformer import TransformerConfig

for options, config in json.loads(sys.argv[1]):
    megatron_vshape.register(**options)
    try:
        TransformerConfig(
            num_layers=8, hidden_size=8, num_attention_heads=1, pipeline_model_parallel_size=2,
            pipeline_dtype=torch.float32, **config,
        )
    except SystemExit as error:
        print(error.code, error.why, sep="\\n")
    megatron_vshape.unregister()
"""

CASES = {
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


def test_errors_after_register_name_keywords() -> None:
    """Only options of this package; Megatron's options keep their flag names."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(list(CASES.values()))]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    lines = [line for line in result.stdout.splitlines() if line]
    assert lines == [line for text in CASES for line in (f"megatron-vshape: {text}", text)], (
        result.stderr
    )


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
