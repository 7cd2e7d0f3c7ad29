"""megatron-vshape doctor: what is installed, what would be hooked, what is refused, and why."""

import argparse
import contextlib
import importlib.metadata
import platform
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_vshape import __version__
from megatron_vshape.cli import recipe
from megatron_vshape.cli.files import is_installed
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.saved_config import silence

if TYPE_CHECKING:
    from megatron_vshape.mcore.hooks.registry import Finding

DISTRIBUTION = "megatron-vshape"
REFUSED = {
    "a schedule of this package": ("SCHEDULE", "CHUNKS"),
    "--optimizer-post-validation too": ("POST_VALIDATION",),
    "--overlap-moe-expert-parallel-comm too": ("LAYER_PLANS",),
    "--pipeline-vocab-parallel too": ("VOCABULARY",),
    "--pipeline-slices too": ("SLICES",),
}
"""What refuses options of Megatron, and the tables of it in `mcore.refusals`."""
MISSING = "not installed"
DOES_NOT_FIT = 1
WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say which arguments the command takes."""
    parser.add_argument(
        "--megatron",
        type=Path,
        metavar="CHECKOUT",
        help="look at this Megatron-LM checkout instead of the installed megatron-core",
    )
    parser.add_argument(
        "--recipe",
        metavar="NAME|FILE.json",
        help="say what becomes of this configuration's options: a JSON object of them, or in a "
        "checkout of megatron-vshape the name of one of Megatron-Bridge's recipes",
    )
    parser.add_argument(
        "--schedule",
        metavar="NAME|FILE",
        help="the schedule that --recipe is to run with. Default: what its pipeline_schedule says, "
        f"or {recipe.USUAL}",
    )


def run(options: argparse.Namespace) -> int:
    """Print the tables; return 0, or 1 where a hook's target has moved or a recipe is refused.

    Raises:
        ScheduleError: there is no Megatron in the checkout that is named, or no such recipe.
    """
    if options.megatron is not None:
        _take_checkout(options.megatron)
    if options.recipe is not None:
        return recipe.show(options.recipe, options.schedule)
    print(f"{DISTRIBUTION} {__version__}")
    print(_section("versions", _two_columns([*_versions(), *_extras()])))
    faults = _print_hooks()
    print(_section("translated or set aside with a schedule of this package", _translated()))
    for title, by in REFUSED.items():
        print(_section(f"refused with {title}", _refused(*by)))
    if is_installed("torch"):
        print(_section("weight gradients are added up by", _two_columns(list(_kernels()))))
    if faults:
        print(f"\ndoes not fit: {faults[0]}")
        return DOES_NOT_FIT
    fits = (
        "everything fits" if is_installed("megatron.core") else "schedules can be planned and drawn"
    )
    print(f"\n{fits}")
    return 0


def _take_checkout(checkout: Path) -> None:
    if not (checkout / "megatron" / "core").is_dir():
        raise ScheduleError(f"--megatron {checkout} has no folder megatron/core")
    sys.path.insert(0, str(checkout.resolve()))  # as for a script that lies in it


def _section(title: str, text: str) -> str:
    return f"\n{title}\n{textwrap.indent(text, '  ')}"


def _two_columns(rows: Sequence[tuple[str, str]]) -> str:
    """Return names and what is to be said of each, wrapped beside them."""
    wide = max(len(name) for name, _ in rows)
    lines = []
    for name, said in rows:
        first, *rest = _wrapped(said, WIDTH - wide - 4)
        lines.append(f"{name.ljust(wide)}  {first}")
        lines += [" " * (wide + 2) + each for each in rest]
    return "\n".join(lines)


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        width,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,  # names stay whole: they are looked for
    )


def _version(*distributions: str) -> str:
    """Return the version of the first of these that is installed."""
    for each in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(each)
    return MISSING


def _versions() -> Iterator[tuple[str, str]]:
    """Yield what a training run stands on."""
    yield "python", platform.python_version()
    yield "torch", _version("torch")
    if is_installed("torch"):
        yield from _devices()
    megatron = _version("megatron-core")
    if megatron == MISSING and is_installed("megatron.core"):
        megatron = "from a checkout"
    if megatron == MISSING:
        megatron += ": no training here; pip install 'megatron-vshape[megatron]'"
    yield "megatron-core", megatron
    engine = _version("transformer-engine", "transformer_engine_torch")
    if engine == MISSING:
        engine += ": --transformer-impl local only"
    yield "transformer-engine", engine
    apex = _version("apex")
    if apex == MISSING:
        apex += ": --gradient-accumulation-fusion by torch, under a schedule of this package"
    yield "apex", apex


def _devices() -> Iterator[tuple[str, str]]:
    import torch

    if torch.version.cuda is None:
        yield "CUDA", "torch was built without it: training on the CPU, over gloo"
        return
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
        counts = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        yield "CUDA", f"{torch.version.cuda}, {counts}"
    else:
        yield "CUDA", f"{torch.version.cuda}, no GPU: training on the CPU, over gloo"
    with contextlib.suppress(RuntimeError, AttributeError):
        yield "NCCL", ".".join(map(str, torch.cuda.nccl.version()))


def _extras() -> Iterator[tuple[str, str]]:
    """Yield the packages of every extra, as pyproject.toml has them."""
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return
    extras: dict[str, list[str]] = {}
    for each in requirements:
        extra = re.search(r"""extra == ["']([\w-]+)["']""", each)
        name = re.match(r"[\w.-]+", each)
        if extra is not None and name is not None:
            extras.setdefault(extra[1], []).append(name[0])
    for title, names in extras.items():
        yield f"extra {title}", ", ".join(f"{name} {_version(name)}" for name in names)


def _print_hooks() -> list[str]:
    """Print what Megatron is asked for, and return what of it does not fit."""
    if not is_installed("megatron.core"):
        print(_section("hooks", "not checked: megatron-core is not installed"))
        return []
    try:
        release, findings = _examine()
    except ImportError as error:
        fault = f"megatron-core {_version('megatron-core')} cannot be imported: {error}"
        print(_section("hooks", f"not checked: {fault}"))
        return [fault]
    rows = "\n".join(_lines_of(finding) for finding in findings)
    print(_section(f"hooks: what register() calls and replaces in megatron-core {release}", rows))
    return [each.fault for each in findings if each.fault is not None]


def _examine() -> tuple[str, list["Finding"]]:
    """Return Megatron's version and what its targets are like; importing it is noisy."""
    with silence():
        from megatron_vshape.mcore import cpu

        cpu.install()
        import megatron.core

        from megatron_vshape.mcore.hooks import registry

        # Without the commit of whatever checkout this is run in, which Megatron adds.
        return str(megatron.core.__version__).partition("+")[0], registry.examine()


def _lines_of(finding: "Finding") -> str:
    record = finding.record
    state, said = "found", finding.fault or record.reason
    if finding.fault is not None:
        state = "moved"
    elif not finding.is_there:
        state = "none"
        said += " (not there, and not missed)"
    parameters = f"({', '.join(record.expects)})" if record.expects else ""
    lines = _wrapped(f"{record.target}{parameters}", WIDTH - 9, "    ")
    lines += [f"  {line}" for line in _wrapped(said, WIDTH - 11)]
    return f"{state:5}  " + "\n       ".join(lines)


def _translated() -> str:
    """Return the options of which a schedule makes something else, by what it makes of them."""
    from megatron_vshape.mcore.setup.translate import TRANSLATIONS

    options: dict[str, list[str]] = {}
    for each in TRANSLATIONS:
        options.setdefault(each.becomes, []).extend(each.names)
    return _told(options)


def _refused(*by: str) -> str:
    """Return what is refused by these of `refusals.By`, by what is to be done about it."""
    from megatron_vshape.mcore.refusals import REFUSALS, By, has_transformer_engine

    options: dict[str, list[str]] = {}
    for each in (each for name in by for each in REFUSALS[By[name]]):
        name = f"{each.option} (others)" if each.shows_value else each.option
        names = options.setdefault(each.why, [])
        if name not in names:  # of which releases of Megatron make attributes of unlike names
            names.append(name)
    if "SCHEDULE" in by and not has_transformer_engine():
        options["it is not installed here"] = ["--transformer-impl transformer_engine"]
    return _told(options)


def _told(options: Mapping[str, Iterable[str]]) -> str:
    lines = []
    for why, names in options.items():
        lines.append(why)
        lines += [f"  {line}" for line in _wrapped(", ".join(names), WIDTH - 4)]
    return "\n".join(lines)


def _kernels() -> Iterator[tuple[str, str]]:
    import torch

    from megatron_vshape.runtime.weight_jobs import WeightGradKernel, fused_kernel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    precisions = {"--bf16": torch.bfloat16, "--fp16": torch.float16, "fp32": torch.float32}
    for name, dtype in precisions.items():
        kernel = fused_kernel(device, torch.float32, dtype)
        yield f"{name}, sums in fp32, on this {device}", str(kernel)
    yield "--no-gradient-accumulation-fusion", str(WeightGradKernel.MATMUL_ADD)
