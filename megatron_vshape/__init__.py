"""Pipeline schedules with controllable activation memory (arXiv 2405.15362) for Megatron-Core.

`register` puts them into Megatron. All else works without Megatron and without a GPU:

* `make` a published schedule by its name, `load_schedule` from a file, or `plan` the best order
  for your own `Costs` within a memory limit;
* `verify` proves that it can run, `simulate` says when every pass runs, `peak_held` what devices
  hold;
* `Timeline.draw` is a picture in text, `schedule_figure` one of paper quality, `write_trace` one
  for Perfetto; `Schedule.to_json` is what `--pipeline-schedule FILE` trains with;
* `lower` adds the messages between the devices, and `run_program` runs the outcome over
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
    """Return what is public, imported when it is asked for: torch and matplotlib take seconds."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names, so that help() tells of them, too."""
    return [*globals(), *_HOME_OF]


def register(**options: Any) -> None:
    """Add the schedules to Megatron, by flags of Megatron-LM or by `options` for any library.

    Without options it adds `--pipeline-schedule` and its companions to Megatron's parser; call it
    before Megatron parses its arguments and builds its model. With options, it is enough before
    the model's config is made, whatever library makes it and trains:

        megatron_vshape.register(schedule="v-half")

    `schedule` is a name, "auto" or the path of a schedule file. The others are optional:
    `memory_limit_gib` of a device, or the schedule whose memory it is, as in "interleaved-1f1b:4",
    and `costs_file` (both for "auto"), `host_memory_limit_gib` of what waits in host memory,
    `layer_split` ("auto" or "N,N,..."), `vocab_parallel` (True or False), `slices` of every
    microbatch along its sequence, `profile_steps` (first, last),
    `keep_order` of unlike microbatches (True or False), `lengths`, a function of a microbatch that
    returns those of its sequences, `split_graphs` ("off": CUDA graphs keep weight gradients in B),
    `trace_folder` and `timeout_seconds`. Where a program's main is not yours to edit, the
    environment variable MEGATRON_VSHAPE holds the same:
    "schedule=v-half,timeout_seconds=120".

    Raises:
        HookError: this Megatron-Core is not one the hooks were written for.
        UnsupportedError: there is no such option.
    """
    from megatron_vshape.mcore.hooks import registry

    registry.install(options)


def unregister() -> None:
    """Restore every attribute of Megatron that `register` replaced."""
    from megatron_vshape.mcore.hooks import registry

    registry.uninstall()
