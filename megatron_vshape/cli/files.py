"""Output files: written completely or not at all."""

import importlib.util
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.schedule import Schedule

FIGURE_SUFFIXES = (".svg", ".png", ".pdf")


@dataclass(frozen=True, slots=True)
class Output:
    """An output file of an option; `write` creates it at a given path."""

    option: str
    path: Path
    write: Callable[[Path], object]


def check_target(option: str, path: Path, suffixes: Sequence[str]) -> None:
    """Raise ScheduleError unless a file with one of these suffixes can be written to `path`."""
    if path.suffix not in suffixes:
        allowed = " or ".join([", ".join(suffixes[:-1])] * (len(suffixes) > 1) + [suffixes[-1]])
        raise ScheduleError(f"{option} {path}: the file's name must end in {allowed}")
    if path.is_dir():
        raise ScheduleError(f"{option} {path} is a directory: name a file")
    folder = _target(path).parent
    if not folder.is_dir():
        raise ScheduleError(f"{option} {path}: directory {folder} does not exist: create it first")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ScheduleError(f"{option} {path} is not writable: choose another path")


def check_installed(feature: str, extra: str, *modules: str) -> None:
    """Raise ScheduleError unless these modules are installed; the error names the extra."""
    for module in modules:
        if not is_installed(module):
            raise ScheduleError(
                f"{feature} needs {module}, which is not installed: "
                f"pip install 'megatron-vshape[{extra}]'"
            )


def check_can_draw(option: str) -> None:
    """Raise ScheduleError unless matplotlib is installed."""
    check_installed(option, "draw", "matplotlib")


def is_installed(module: str) -> bool:
    """Return whether a module can be found; does not import it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def check_targets(options: Namespace, suffixes: Mapping[str, tuple[str, ...]]) -> None:
    """Raise ScheduleError for an output that cannot be written.

    Args:
        options: parsed options.
        suffixes: allowed suffixes by option name.
    """
    paths = [(f"--{name}", getattr(options, name), suffixes[name]) for name in suffixes]
    targets = [(option, path, endings) for option, path, endings in paths if path is not None]
    for option, path, endings in targets:
        check_target(option, path, endings)
    _check_distinct([(option, path) for option, path, _ in targets])


def _check_distinct(targets: Sequence[tuple[str, Path]]) -> None:
    """Raise ScheduleError if two options name one file."""
    option_of_path: dict[Path, str] = {}
    for option, path in targets:
        first_option = option_of_path.setdefault(_target(path), option)
        if first_option != option:
            raise ScheduleError(f"{first_option} and {option} both name {path}: use two files")


def schedule_output(option: str, path: Path, schedule: Schedule) -> Output:
    """Return the output of a schedule as CSV or JSON, by the suffix of the path."""

    def write(draft: Path) -> None:
        text = schedule.to_csv() if path.suffix == ".csv" else schedule.to_json() + "\n"
        draft.write_text(text, encoding="utf-8", newline="")

    return Output(option, path, write)


def write_all(outputs: Sequence[Output]) -> None:
    """Write all files or none: temporary files are moved to their targets when all are complete.

    Raises:
        ScheduleError: a file cannot be written; contains its name and the reason.
    """
    drafts: list[Path] = []
    try:
        for output in outputs:
            target = _target(output.path)
            drafts.append(target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}"))
            with _blaming(output):
                output.write(drafts[-1])
        for output, draft in zip(outputs, drafts, strict=True):
            with _blaming(output):
                os.replace(draft, _target(output.path))
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)


def report_written(outputs: Sequence[Output]) -> None:
    """Print the name of every written file."""
    for output in outputs:
        print(f"wrote {output.path}")


def _target(path: Path) -> Path:
    """Return the real path of the file, so that a symbolic link is kept."""
    return Path(os.path.realpath(path))


@contextmanager
def _blaming(output: Output) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ScheduleError(f"{output.option} {output.path} cannot be written: {reason}") from error
