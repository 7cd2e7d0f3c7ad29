"""Write the generated parts of README.md and docs/: output of commands, and reference tables.

    python scripts/docs.py           write them (seconds; the first time a minute, to compile)
    python scripts/docs.py --check   write nothing; exit with 1 if a file is not current

A fence ```console contains commands (`$ megatron-vshape ...`), each followed by its output. A table
between `<!-- generated: NAME -->` and `<!-- end -->` is made from the code. A fence ```text is
written by hand: output of a training run, or of a command that needs more than this package.
tests/package/test_docs.py checks that all of them are current. Run this script with the Python of
.venv (scripts/test.sh creates it), because other versions of Python format --help differently.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # works without installation

import megatron_vshape  # noqa: E402
from megatron_vshape.cli.main import main as run  # noqa: E402
from megatron_vshape.environment import ALLOCATOR, required_settings  # noqa: E402
from megatron_vshape.mcore.options import OPTIONS  # noqa: E402
from megatron_vshape.mcore.setup.features import maturities  # noqa: E402
from megatron_vshape.rehearsal import fitted  # noqa: E402

sys.path.insert(0, str(ROOT / "benchmarks"))
import rehearsed_table  # noqa: E402
import trials_table  # noqa: E402

PROMPT = "$ megatron-vshape "
WIDTH = 100
ERROR_CASES = (
    *("all", "with a pipeline", "no pipeline", "dense"),
    *("experts, within a node", "experts, between nodes"),
)
_CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TABLE = re.compile(r"(<!-- generated: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> Iterator[Path]:
    """Yield the README and the pages of docs/."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").glob("*.md"))


def current(text: str) -> str:
    """Update the generated parts of a page's text."""
    text = _TABLE.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[3]}", text)
    return _CONSOLE.sub(lambda match: _console(match[1]), text)


def _console(block: str) -> str:
    """Run the commands of a block, and append to each its output."""
    first, *parts = re.split(rf"^(?={re.escape(PROMPT)})", block, flags=re.MULTILINE)
    shown = [first]  # commands of other programs
    for part in parts:
        line = part.partition("\n")[0]
        shown.append(f"{line}\n{output_of(line.removeprefix(PROMPT))}\n")
    return "```console\n" + "".join(shown) + "```"


def output_of(command: str) -> str:
    """Run a command line of this package and return its output, errors included."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS=str(WIDTH)),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            failed = run(shlex.split(command))
        except SystemExit as end:  # of --help
            failed = int(end.code or 0)
    printed = stderr.getvalue() if failed else stdout.getvalue()
    return "\n".join(line.rstrip() for line in printed.splitlines()).strip("\n")


def _rows(head: str, rows: list[tuple[str, ...]]) -> str:
    """Format a Markdown table."""
    columns = [column.strip() for column in head.split("|")]
    lines = [columns, ["---"] * len(columns), *map(list, rows)]
    return "".join(f"|{'|'.join(line)}|\n" for line in lines)


def _training_options() -> str:
    rows = []
    for name, option in OPTIONS.items():
        flag = f"{option.flag} {option.metavar}".strip().replace("|", r"\|")
        rows.append((f"`{flag}`" if option.flag else "none", f"`{name}`", option.help))
    return _rows("flag | keyword | meaning", rows)


def _environment() -> str:
    variables = required_settings(kernels=True, ordered=True, graphs=True)
    names = [name for name in variables if name != ALLOCATOR[1]]
    rows = [(f"`{name}={variables[name].value}`", variables[name].why) for name in names]
    return _rows("variable | reason", rows)


def _maturity() -> str:
    rows = [(title, f"`{option}`", str(maturity)) for title, option, maturity in maturities()]
    return _rows("feature|option|largest hardware that has trained with it", rows)


def _python() -> str:
    rows = []
    for name in megatron_vshape.__all__:
        member = getattr(megatron_vshape, name)
        call = "()" if inspect.isfunction(member) else ""
        rows.append((f"`{name}{call}`", (inspect.getdoc(member) or "").partition("\n")[0]))
    return _rows("name | purpose", rows)


def _prediction_error() -> str:
    rows: list[tuple[str, ...]] = []
    for gib in (1, 20):
        number, median, ninth = rehearsed_table.errors_of_peaks(gib * rehearsed_table.GIB)
        runs = f"{number} NVIDIA CI runs with a peak of at least {gib} GiB"
        rows.append(("peak memory", runs, f"{median:.1%}", f"{ninth:.1%}", ""))
    for case in ERROR_CASES:
        case_error = fitted.LEFT_OUT[case]
        runs = f"{case_error.runs} published runs" + (f": {case}" if case != "all" else "")
        numbers = (f"{case_error.median_percent:g}%", f"{case_error.ninth_percent:g}%")
        rows.append(("step time", runs, *numbers, f"{case_error.worst_factor:g}x"))
    pairs = fitted.PAIRS
    description = (
        f"{pairs.pairs} pairs of configurations; {pairs.right_percent:g}% in the right order"
    )
    rows.append(("ratio of step times", description, f"{pairs.median_percent:g}%", "", ""))
    return _rows("estimate | data | median error | 90% within | worst", rows)


TABLES: dict[str, Callable[[], str]] = {
    "training options": _training_options,
    "environment": _environment,
    "maturity": _maturity,
    "python": _python,
    "prediction error": _prediction_error,
    "trials": trials_table.table,
}
"""Tables by the name in their comment."""


def main() -> int:
    """Update or check the pages; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="Write nothing; report stale files")
    options = parser.parse_args()
    stale = False
    for page in pages():
        old = page.read_text(encoding="utf-8")
        new = current(old)
        if new == old:
            continue
        stale = True
        print(f"{'not current' if options.check else 'wrote'}: {page.relative_to(ROOT)}")
        if not options.check:
            page.write_text(new, encoding="utf-8")
    return int(stale and options.check)


if __name__ == "__main__":
    sys.exit(main())
