"""The examples of all public names run as they are."""

import doctest
import importlib
import inspect
import pydoc

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


def examples_of(name: str) -> list[doctest.DocTest]:
    member = getattr(megatron_vshape, name)
    module = importlib.import_module(member.__module__)
    finder = doctest.DocTestFinder()
    return [test for test in finder.find(member, name, module=module) if test.examples]


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_run_unchanged(name: str) -> None:
    examples = examples_of(name)
    assert examples or name in SUPPORTING_TYPES
    for example in examples:
        outcome = doctest.DocTestRunner(optionflags=FLAGS).run(example, clear_globs=False)
        assert outcome.failed == 0


def test_package_docstring_example_runs() -> None:
    assert doctest.testmod(megatron_vshape, optionflags=FLAGS).failed == 0


def test_help_lists_all_public_names() -> None:
    text = pydoc.plain(pydoc.render_doc(megatron_vshape))
    for name in megatron_vshape.__all__:
        member = getattr(megatron_vshape, name)
        assert (f"class {name}(" if inspect.isclass(member) else f"    {name}(") in text, name
