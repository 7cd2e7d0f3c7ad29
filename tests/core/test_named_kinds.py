"""Only the table of kinds, a planner module and a handler may name the kinds of a capability.

Other code reads the table. The exceptions are listed below; the list must not grow.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import megatron_vshape
from megatron_vshape.core.model import kinds
from megatron_vshape.core.model.kinds import ALL_OR_NONE, Kind

PACKAGE = Path(megatron_vshape.__file__).parent

CORE = "megatron_vshape.core."

HOMES = {
    "core/model/kinds.py",
    "core/planner/offloading.py",
    "core/planner/vocabulary.py",
    "runtime/offload.py",
    "mcore/features/vocabulary/__init__.py",
    "mcore/features/vocabulary/step.py",
    "mcore/features/offload/step.py",
}

EXCEPTIONS = {
    "mcore/observe/report.py",
}


def capability_names() -> set[str]:
    """Return the names of optional kinds and of their groups in the module of the table."""
    capability_kinds = {kind for group in ALL_OR_NONE for kind in group}
    return {
        name
        for name, value in vars(kinds).items()
        if (isinstance(value, Kind) and value in capability_kinds)
        or any(value is group for group in ALL_OR_NONE)
    }


def imported_names(path: Path) -> Iterator[str]:
    """Yield the imported names of the core; a Megatron layout also has a word for the loss."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(CORE):
            yield from (alias.name for alias in node.names)


def test_only_home_files_name_capability_kinds() -> None:
    names = capability_names()
    assert {"COPY_OUT", "OFFLOAD", "LOGITS", "VOCABULARY"} <= names
    files = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if not names.isdisjoint(imported_names(path))
    }
    assert files - HOMES <= EXCEPTIONS, "read the table of kinds in place of naming them"
    assert files >= EXCEPTIONS, "these name them no longer: take them out of the list"


def test_class_names_are_unique() -> None:
    class_counts = Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert len(class_counts) > 300
    assert [name for name, count in class_counts.items() if count > 1] == []
