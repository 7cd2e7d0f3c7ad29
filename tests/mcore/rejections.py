"""Why a command does not train: this package's checks around Megatron's, in this process."""

from __future__ import annotations

from argparse import ArgumentParser
from functools import cache

from mcore.farm import MODEL
from megatron.training.arguments import add_megatron_arguments

from megatron_vshape.core.model.files import UnreadableError
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.mcore.options import add_arguments
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.setup import configure
from megatron_vshape.mcore.setup.plans import Planner


@cache
def _parser() -> ArgumentParser:
    return add_arguments(add_megatron_arguments(ArgumentParser(allow_abbrev=False)))


def rejection(*flags: str, ranks: int = 4) -> str:
    """Return the reason that rank 0 would print; fail if nothing is rejected.

    A run of the farm needs a hundred times as long; `test_bad_input` has one of each kind.
    """
    size = ("--pipeline-model-parallel-size", str(ranks))
    args = _parser().parse_args([*MODEL, *size, *flags])
    args.data_parallel_size = 1
    try:
        pipeline = configure.pipeline_from_args(args)
        configure.check_and_plan_run(pipeline, pipeline and Planner(pipeline.choice), args)
    except (ScheduleError, UnreadableError, UnsupportedError) as error:
        return str(error)
    raise AssertionError(f"nothing is rejected: {flags}")


def megatron_choices(flag: str) -> list[str]:
    """Return the values that Megatron's parser accepts for an option."""
    (action,) = (action for action in _parser()._actions if flag in action.option_strings)
    return list(action.choices or ())
