"""Pipeline schedules with controllable activation memory (arXiv 2405.15362) for Megatron-Core.

`register` adds them to Megatron. All other functions work without Megatron and without a GPU:

* `make` returns a published schedule by name, `load_schedule` one from a file, and `plan` the best
  schedule for your `Costs` within a memory limit.
* `verify` proves that a schedule can run, `simulate` computes the time of every pass, and
  `peak_held` the peak activation memory of every device.
* `Timeline.draw` draws a schedule as text, `schedule_figure` as a figure, and `write_trace` as a
  trace for Perfetto. `Schedule.to_json` writes the file for `--pipeline-schedule FILE`.
* `lower` adds the P2P messages, and `run_program` runs the resulting program over
  torch.distributed with stages of any model.

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
    from megatron_vshape.core.evaluated_schedule import EvaluatedSchedule
    from megatron_vshape.core.model.costs import Costs
    from megatron_vshape.core.model.kinds import ScheduleError
    from megatron_vshape.core.model.schedule import Schedule, Timeline, load_schedule
    from megatron_vshape.core.paper.catalogue import make
    from megatron_vshape.core.planner.search import plan
    from megatron_vshape.core.program.lowering import lower
    from megatron_vshape.runtime.p2p import Transport
    from megatron_vshape.runtime.program_runner import run_program
    from megatron_vshape.view.chrome_trace import write_trace
    from megatron_vshape.view.figure import save, schedule_figure

__version__ = "0.3.0"

_HOMES = {
    "core.check.simulate": "peak_held simulate",
    "core.check.verify": "verify",
    "core.evaluated_schedule": "EvaluatedSchedule",
    "core.model.costs": "Costs",
    "core.model.kinds": "ScheduleError",
    "core.model.schedule": "Schedule Timeline load_schedule",
    "core.paper.catalogue": "make",
    "core.planner.search": "plan",  # without the baselines of plan_request
    "core.program.lowering": "lower",
    "runtime.p2p": "Transport",
    "runtime.program_runner": "run_program",
    "view.chrome_trace": "write_trace",
    "view.figure": "save schedule_figure",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "Costs",
    "EvaluatedSchedule",
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
    """Import a public name at its first use: torch and matplotlib take seconds to import."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    """Return all names including public ones that are not imported yet, for help()."""
    return [*globals(), *_HOME_OF]


def register(**options: Any) -> None:
    """Add the schedules to Megatron, by flags of Megatron-LM or by `options` for any library.

    Without options, this adds `--pipeline-schedule` and related flags to Megatron's parser. Call it
    before Megatron parses its arguments and builds its model. With options, call it before the
    model's config is created, with any library and trainer:

        megatron_vshape.register(schedule="v-half")

    `schedule` is a name, "auto" or the path of a schedule file. All other options are optional:

    * `memory_limit_gib`: memory limit of a device for "auto", or a schedule whose memory is the
      limit,
      as in "interleaved-1f1b:4"
    * `host_memory_limit_gib`: limit of host memory per rank for offloading
    * `costs_file`: costs of every stage, for "auto"
    * `layer_split`: "auto" or "N,N,..."
    * `encoder_layers`: forward time of the image encoder in layers, or "N:frozen"
    * `vocab_parallel`: vocabulary parallelism (True or False)
    * `slices`: sequence slices per microbatch
    * `profile_steps`: first and last step to measure, as in `(10, 14)`
    * `keep_order`: keep the order of variable-length microbatches (True or False)
    * `lengths`: function that returns the sequence lengths of a microbatch
    * `split_graphs`: "off" makes CUDA graphs compute weight gradients in B
    * `warmup`: run one microbatch on all ranks at the same time before the first step
    * `trace_folder`: directory for traces
    * `timeout_seconds`: time limit of a P2P message

    If you cannot edit the program, set the environment variable MEGATRON_VSHAPE to the same
    options: "schedule=v-half,timeout_seconds=120".

    Raises:
        HookError: This Megatron-Core does not match the hooks.
        UnsupportedError: An option does not exist.
    """
    from megatron_vshape.mcore.hooks import registry

    registry.install(options)


def unregister() -> None:
    """Restore every attribute of Megatron that `register` replaced."""
    from megatron_vshape.mcore.hooks import registry

    registry.uninstall()
