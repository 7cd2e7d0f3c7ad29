"""The examples in docstrings run as they are."""

import doctest
import importlib
import inspect
import pydoc
from pathlib import Path

import pytest

import megatron_vshape

pytest.importorskip("matplotlib", reason="figures need the extra [draw]")
pytest.importorskip("torch", reason="programs need torch to run")

WITHOUT_EXAMPLES = {"register", "unregister"}
"""These put hooks into Megatron; tests/mcore has them."""

SUPPORTING_TYPES = {"EvaluatedSchedule", "Timeline", "Transport", "ScheduleError"}
"""Types of arguments, results and errors of other public names; they need no example."""

PUBLIC = sorted(set(megatron_vshape.__all__) - WITHOUT_EXAMPLES)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


PACKAGE = Path(megatron_vshape.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run_unchanged(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name), optionflags=FLAGS).failed == 0


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_has_example(name: str) -> None:
    member = getattr(megatron_vshape, name)
    module = importlib.import_module(member.__module__)
    tests = doctest.DocTestFinder().find(member, name, module=module)
    assert any(test.examples for test in tests) or name in SUPPORTING_TYPES


def test_help_lists_all_public_names() -> None:
    text = pydoc.plain(pydoc.render_doc(megatron_vshape))
    for name in megatron_vshape.__all__:
        member = getattr(megatron_vshape, name)
        assert (f"class {name}(" if inspect.isclass(member) else f"    {name}(") in text, name
