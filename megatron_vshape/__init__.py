"""Pipeline schedules with controllable activation memory (arXiv 2405.15362) for Megatron-Core.

`register` adds them to Megatron. All other functions work without Megatron and without a GPU:

* `make` a published schedule by its name, `load_schedule` from a file, or `plan` the best schedule
  for your `Costs` within a memory limit;
* `verify` a schedule, `simulate` its timeline, and compute its peak memory with `peak_held`;
* draw it as text (`Timeline.draw`), as a figure (`schedule_figure`) or as a trace for Perfetto
  (`write_trace`), and save it with `Schedule.to_json` to train with `--pipeline-schedule FILE`;
* `lower` it to a program with P2P messages, and run that with `run_program` over
  torch.distributed, with stages of any model.

>>> import megatron_vshape
>>> schedule = megatron_vshape.make("v-min", num_devices=3, num_microbatches=4)
>>> megatron_vshape.verify(schedule)
>>> print(megatron_vshape.simulate(schedule).draw())
FFF  fbwfbwBWF fbBwW fbBwW BW
 FF f fbwFBbWwfFBbWwf BbWwBW
  FfFf  bBwFWfbBwFWfbBwWbBwW
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_vshape.core.check.simulate import peak_held, simulate
    from megatron_vshape.core.check.verify import verify
    from megatron_vshape.core.model.costs import Costs
    from megatron_vshape.core.model.kinds import ScheduleError
    from megatron_vshape.core.model.schedule import Plan, Schedule, Timeline, load_schedule
    from megatron_vshape.core.paper.catalogue import make
    from megatron_vshape.core.planner.search import plan
    from megatron_vshape.core.program.lowering import lower
    from megatron_vshape.runtime.p2p import Transport
    from megatron_vshape.runtime.program_runner import run_program
    from megatron_vshape.view.chrome_trace import write_trace
    from megatron_vshape.view.figure import save, schedule_figure

__version__ = "0.2.0"

_HOMES = {
    "core.check.simulate": "peak_held simulate",
    "core.check.verify": "verify",
    "core.model.costs": "Costs",
    "core.model.kinds": "ScheduleError",
    "core.model.schedule": "Plan Schedule Timeline load_schedule",
    "core.paper.catalogue": "make",
    "core.planner.search": "plan",
    "core.program.lowering": "lower",
    "runtime.p2p": "Transport",
    "runtime.program_runner": "run_program",
    "view.chrome_trace": "write_trace",
    "view.figure": "save schedule_figure",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "Costs",
    "Plan",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "Transport",
    "load_schedule",
    "lower",
    "make",
    "peak_held",
    "plan",
    "register",
    "run_program",
    "save",
    "schedule_figure",
    "simulate",
    "unregister",
    "verify",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    """Import public names at their first use, because torch and matplotlib need seconds."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names, so that help() includes them."""
    return [*globals(), *_HOME_OF]


def register(**options: Any) -> None:
    """Add the schedules to Megatron, by flags of Megatron-LM or by `options` for any library.

    Without options it adds `--pipeline-schedule` and its companions to Megatron's parser; call it
    before Megatron parses its arguments and builds its model. With options, it is enough before
    the model's config is made, whatever library makes it and trains:

        megatron_vshape.register(schedule="v-half")

    To set the same options without editing a program, use the environment variable
    MEGATRON_VSHAPE, as in "schedule=v-half,timeout_seconds=120".

    Args:
        options: The options; all except `schedule` are optional.

            * `schedule`: a schedule's name, "auto", or the path of a schedule file.
            * `memory_limit_gib`: memory limit per GPU, or a schedule with that memory, as
              "interleaved-1f1b:4" (for "auto").
            * `costs_file`: path of a costs file (for "auto").
            * `host_memory_limit_gib`: host memory for offloaded activations.
            * `layer_split`: "auto" or "N,N,...".
            * `vocab_parallel`: vocabulary parallelism (True or False).
            * `slices`: slices of every microbatch along its sequence.
            * `profile_steps`: first and last step to profile.
            * `keep_order`: keep the order of variable-length microbatches (True or False).
            * `lengths`: function that returns the sequence lengths of a microbatch.
            * `split_graphs`: "off" keeps weight gradients in B within CUDA graphs.
            * `trace_folder`: folder for traces.
            * `timeout_seconds`: time limit of a P2P message.

    Raises:
        HookError: this version of Megatron-Core is not supported.
        UnsupportedError: an option does not exist.
    """
    from megatron_vshape.mcore.hooks import registry

    registry.install(options)


def unregister() -> None:
    """Restore every attribute of Megatron that `register` replaced."""
    from megatron_vshape.mcore.hooks import registry

    registry.uninstall()
