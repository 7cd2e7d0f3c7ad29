"""megatron-vshape doctor: versions, Megatron's hooks, warnings and the support of each option."""

import argparse
import contextlib
import importlib.metadata
import platform
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from megatron_vshape import __version__
from megatron_vshape.cli.files import is_installed
from megatron_vshape.cli.help import OUTPUT, group
from megatron_vshape.rehearsal.saved_config import silence

if TYPE_CHECKING:
    from megatron_vshape.mcore.hooks.registry import Finding
    from megatron_vshape.mcore.refusals import Refusal

_DISTRIBUTION = "megatron-vshape"
_BY_SCHEDULE = ("SCHEDULE", "CHUNKS")
"""Tables of `mcore.refusals` that apply to any schedule."""

_HANGING_NCCL = (2, 30, 7)
NCCL_WARNING = (
    "NCCL 2.30.7: a public report (NVIDIA/jaxpp issue 11) has an 8-GPU pipeline that hangs with it "
    "and finishes with 2.31.2. We have not verified this; if a run hangs, upgrade NCCL."
)
MISSING = "not installed"
_DEVELOPERS_EXTRAS = ("browser", "docs", "dev")
_DOES_NOT_FIT = 1
WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    group(parser, OUTPUT).add_argument(
        "--verbose",
        action="store_true",
        help="Print all hooks, the options that each feature rejects, and all judged arguments",
    )


def run(options: argparse.Namespace) -> int:
    """Print the report; return 0, or 1 if a hook does not fit."""
    print(f"{_DISTRIBUTION} {__version__}")
    print(_section("versions", _two_columns([*versions(), *_extras()])))
    warnings = list(_warnings())
    if warnings:
        lines = [line for warning in warnings for line in _wrapped(warning, WIDTH - 2, "  ")]
        print(_section("warnings", "\n".join(lines)))
    faults = _print_hooks(options.verbose)
    print(_section("Megatron options with a schedule of this package", _options()))
    print(_section("largest hardware on which features of this package have trained", _maturity()))
    if options.verbose:
        for title, refusals in _refusals_by_feature():
            print(_section(f"rejected with {title}", _format_refusals(refusals)))
        print(_section("arguments of Megatron's parser", _judgements()))
        if is_installed("torch"):
            print(_section("weight gradient kernels", _two_columns(list(_kernels()))))
    else:
        print("\nhooks and options of each feature: megatron-vshape doctor --verbose")
    if faults:
        print(f"\ndoes not fit: {faults[0]}")
        return _DOES_NOT_FIT
    training = "ready" if is_installed("megatron.core") else "requires megatron-core"
    drawing = "ready" if is_installed("matplotlib") else "pip install 'megatron-vshape[draw]'"
    print(f"\nplanning: ready\ntraining: {training}\ndrawing: {drawing}")
    return 0


def _section(title: str, text: str) -> str:
    return f"\n{title}\n{textwrap.indent(text, '  ')}"


def _two_columns(rows: Sequence[tuple[str, str]]) -> str:
    """Format names and texts in two columns."""
    wide = max(len(name) for name, _ in rows)
    lines = []
    for name, text in rows:
        first, *other_lines = _wrapped(text, WIDTH - wide - 4)
        lines.append(f"{name.ljust(wide)}  {first}")
        lines += [" " * (wide + 2) + line for line in other_lines]
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
    for distribution in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return MISSING


def versions() -> Iterator[tuple[str, str]]:
    """Yield the libraries of a training run and their versions."""
    yield "python", platform.python_version()
    yield "torch", _version("torch")
    if is_installed("torch"):
        yield from _devices()
    megatron = _version("megatron-core")
    if megatron == MISSING and is_installed("megatron.core"):
        megatron = "from a checkout"
    if megatron == MISSING:
        megatron += ": required for training; pip install 'megatron-vshape[megatron]'"
    yield "megatron-core", megatron
    engine = _version("transformer-engine", "transformer_engine_torch")
    if engine == MISSING:
        engine += ": only --transformer-impl local"
    yield "transformer-engine", engine
    apex = _version("apex")
    if apex == MISSING:
        apex += ": --gradient-accumulation-fusion is turned off"
    yield "apex", apex


def _devices() -> Iterator[tuple[str, str]]:
    import torch

    if torch.version.cuda is None:
        yield "CUDA", "torch was built without CUDA: training on the CPU over gloo"
        return
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        counts = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        yield "CUDA", f"{torch.version.cuda}, {counts}"
    else:
        yield "CUDA", f"{torch.version.cuda}, no GPU: training on the CPU over gloo"
    with contextlib.suppress(RuntimeError, AttributeError):
        yield "NCCL", ".".join(map(str, torch.cuda.nccl.version()))


def _extras() -> Iterator[tuple[str, str]]:
    """Yield the packages of every extra and their versions, by the package metadata."""
    try:
        requirements = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return
    extras: dict[str, list[str]] = {}
    for requirement in requirements:
        extra = re.search(r"""extra == ["']([\w-]+)["']""", requirement)
        name = re.match(r"[\w.-]+", requirement)
        if extra is not None and name is not None:
            extras.setdefault(extra[1], []).append(name[0])
    for title, names in extras.items():
        if title in _DEVELOPERS_EXTRAS:
            continue
        yield f"extra {title}", ", ".join(f"{name} {_version(name)}" for name in names)


def _warnings() -> Iterator[str]:
    """Yield known problems of the installed libraries."""
    if is_installed("torch"):
        import torch

        with contextlib.suppress(RuntimeError, AttributeError):
            if torch.version.cuda is not None and torch.cuda.nccl.version() == _HANGING_NCCL:
                yield NCCL_WARNING


def _print_hooks(verbose: bool) -> list[str]:
    """Print the state of Megatron's hooks, and return the faults."""
    if not is_installed("megatron.core"):
        print(_section("hooks", "not checked: megatron-core is not installed"))
        return []
    try:
        release, findings = _examine()
    except ImportError as error:
        fault = f"megatron-core {_version('megatron-core')} cannot be imported: {error}"
        print(_section("hooks", f"not checked: {fault}"))
        return [fault]
    faults = [finding.fault for finding in findings if finding.fault is not None]
    num_found = len(findings) - len(faults)
    state = (
        f"all {num_found} hooks found"
        if not faults
        else f"{num_found} of {len(findings)} hooks found"
    )
    shown = findings if verbose else [finding for finding in findings if finding.fault is not None]
    rows = [f"{state} in megatron-core {release}", *map(_lines_of, shown)]
    print(_section("hooks", "\n".join(rows)))
    return faults


def _examine() -> tuple[str, list["Finding"]]:
    """Return Megatron's version and the state of its hooks, with import messages suppressed."""
    with silence():
        from megatron_vshape.mcore import cpu

        cpu.install()
        from megatron_vshape.mcore.hooks import registry

        return registry.megatron_version(), registry.examine()


def _lines_of(finding: "Finding") -> str:
    record = finding.record
    state, text = "found", finding.fault or record.reason
    if finding.fault is not None:
        state = "moved"
    elif not finding.is_there:
        state = "none"
        text += " (optional)"
    parameters = f"({', '.join(record.expects)})" if record.expects else ""
    lines = _wrapped(f"{record.target}{parameters}", WIDTH - 9, "    ")
    lines += [f"  {line}" for line in _wrapped(text, WIDTH - 11)]
    return f"{state:5}  " + "\n       ".join(lines)


def _options() -> str:
    """Format the options that a schedule translates, ignores or rejects, by name."""
    from megatron_vshape.mcore.refusals import REFUSALS, By, has_transformer_engine
    from megatron_vshape.mcore.setup.translate import TRANSLATIONS

    rows: dict[str, str] = {}
    for rule in TRANSLATIONS:
        for name in rule.names:
            rows["--" + name.replace("_", "-")] = rule.becomes
    for refusal in (refusal for name in _BY_SCHEDULE for refusal in REFUSALS[By[name]]):
        name = f"{refusal.option} (some values)" if refusal.shows_value else refusal.option
        fix = f". {refusal.fix}" if refusal.fix else ""
        rows.setdefault(name, f"rejected: {refusal.why}{fix}")
    if not has_transformer_engine():
        rows["--transformer-impl transformer_engine"] = "rejected: not installed"
    lines = []
    for name in sorted(rows, key=lambda option: option.lstrip("-")):
        lines.append(name)
        lines += [f"    {line}" for line in _wrapped(rows[name], WIDTH - 6)]
    return "\n".join(lines)


def _maturity() -> str:
    """Format the features by maturity."""
    from megatron_vshape.mcore.setup.features import Maturity, maturities

    names = {
        maturity: [title for title, _, level in maturities() if level == maturity]
        for maturity in Maturity
    }
    rows = [(str(maturity), ", ".join(titles)) for maturity, titles in names.items()]
    return _two_columns([(name, titles or "none") for name, titles in rows])


def _judgements() -> str:
    """Format the number of arguments by judgement, and all arguments by topic."""
    from megatron_vshape.mcore.setup.judged_arguments import TOPICS
    from megatron_vshape.mcore.setup.judgements import judgements, words

    table = judgements()
    counts = Counter(judged.judgement for judged in table.values())
    listed = dict.fromkeys(topic.judgement for topic in TOPICS)
    above = [judgement for judgement in counts if judgement not in listed]
    numbers = ", ".join(f"{counts[judgement]} {judgement}" for judgement in above)
    lines = [f"{numbers}: see above", "*: some features reject it or some of its values, see above"]
    for judgement in listed:
        lines.append(f"{counts[judgement]} {judgement}")
        for topic in (topic for topic in TOPICS if topic.judgement == judgement):
            names = (
                f"{word.name}{'*' if table[word.name].rejected_with else ''}"
                for word in words(topic.names)
            )
            title = _wrapped(f"{topic.title}: {topic.reason}", WIDTH - 4, "  ")
            lines += [f"  {line}" for line in title]
            lines += [f"      {line}" for line in _wrapped(", ".join(names), WIDTH - 8)]
    return "\n".join(lines)


def _refusals_by_feature() -> "Iterator[tuple[str, tuple[Refusal, ...]]]":
    """Yield the rejected options of each feature, with a title."""
    from megatron_vshape.mcore.refusals import REFUSALS, By
    from megatron_vshape.mcore.setup.features import features

    for feature in features():
        if feature.refusals:
            yield feature.support.flag, feature.refusals
    yield "CUDA graphs of weight gradients (otherwise in B)", REFUSALS[By.SPLIT_GRAPHS]


def _format_refusals(refusals: "Iterable[Refusal]") -> str:
    """Format rejected options by reason."""
    options: dict[str, list[str]] = {}
    for refusal in refusals:
        name = f"{refusal.option} (some values)" if refusal.shows_value else refusal.option
        names = options.setdefault(refusal.why, [])
        if name not in names:  # releases of Megatron have several attributes for one option
            names.append(name)
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
        yield f"{name}, fp32 accumulation, on this {device}", str(kernel)
    yield "--no-gradient-accumulation-fusion", str(WeightGradKernel.MATMUL_ADD)
