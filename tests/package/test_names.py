"""Names show the kind of their value, and functions are short: rules of CONTRIBUTING.md."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

NOT_NOUNS = frozenset(
    "each it own ours theirs given made found known kept held left rest least most more fewer at "
    "told whole others same such again begun got taken wanted asked needed live waiting".split()
)
"""Pronouns, participles and adverbs: none is the name of a value."""

MOST_LINES = 80


def trees(folder: str) -> Iterator[tuple[Path, ast.Module]]:
    """Yield the syntax tree of each module in a folder."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield path.relative_to(ROOT), ast.parse(path.read_text())


@pytest.mark.parametrize(("folder", "limit"), [("megatron_vshape", 5), ("tests", 10)])
def test_names_are_nouns(folder: str, limit: float) -> None:
    """At most `limit` of 1,000 names and parameters are no nouns."""
    num_names, exceptions = 0, []
    for path, tree in trees(folder):
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.arg):
                name = node.id if isinstance(node, ast.Name) else node.arg
                num_names += 1
                exceptions += [f"{path}:{node.lineno} {name}"] if name in NOT_NOUNS else []
    assert 1000 * len(exceptions) / num_names <= limit, "\n".join(exceptions)


def test_functions_are_short() -> None:
    assert [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in trees("megatron_vshape")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno >= MOST_LINES
    ] == []
