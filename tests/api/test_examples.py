"""What the package offers from Python: the examples of everything public run as they stand."""

import doctest
import importlib
import inspect
import pydoc

import pytest

import megatron_vshape

pytest.importorskip("matplotlib", reason="figures need the extra [draw]")
pytest.importorskip("torch", reason="programs need torch to run")

NOT_SHOWN = {"register", "unregister"}
"""These put hooks into Megatron; tests/mcore has them."""

PARTS_OF_OTHERS = {"Plan", "Timeline", "Transport", "ScheduleError"}
"""What other public names return, take or raise; they have no example of their own."""

PUBLIC = sorted(set(megatron_vshape.__all__) - NOT_SHOWN)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples_of(name: str) -> list[doctest.DocTest]:
    found = getattr(megatron_vshape, name)
    module = importlib.import_module(found.__module__)
    finder = doctest.DocTestFinder()
    return [test for test in finder.find(found, name, module=module) if test.examples]


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_run_as_they_stand(name: str) -> None:
    examples = examples_of(name)
    assert examples or name in PARTS_OF_OTHERS
    for each in examples:
        outcome = doctest.DocTestRunner(optionflags=FLAGS).run(each, clear_globs=False)
        assert outcome.failed == 0


def test_the_package_shows_a_schedule() -> None:
    assert doctest.testmod(megatron_vshape, optionflags=FLAGS).failed == 0


def test_help_tells_of_all_that_is_public() -> None:
    text = pydoc.plain(pydoc.render_doc(megatron_vshape))
    for name in megatron_vshape.__all__:
        found = getattr(megatron_vshape, name)
        assert (f"class {name}(" if inspect.isclass(found) else f"    {name}(") in text, name
