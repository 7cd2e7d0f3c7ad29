"""Programs outside the package use names that the package has."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(
    program
    for folder in ("benchmarks", "scripts", "examples")
    for program in (ROOT / folder).rglob("*.py")
)


def defined_names(module: Path) -> set[str]:
    """Return the names that a file or a package folder defines at module level."""
    is_package = module.is_dir()
    source = module / "__init__.py" if is_package else module.with_suffix(".py")
    names = {child.stem for child in module.iterdir()} if is_package else set[str]()
    for node in ast.walk(ast.parse(source.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.alias(asname=str(name)):
                names.add(name)
            case ast.alias(name=name):
                names.add(name.split(".")[0])
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Constant(value=str(name)):
                names.add(name)  # in __all__, where names are imported on first use
    return names


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_imported_names_exist(program: Path) -> None:
    """No test runs most of these programs, so a renamed function would break them in silence."""
    missing = []
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_vshape"):
            module = ROOT / str(node.module).replace(".", "/")
            names = defined_names(module)
            missing += [
                f"{node.module}.{alias.name}" for alias in node.names if alias.name not in names
            ]
    assert missing == []


def test_only_its_module_names_a_framework() -> None:
    name = re.compile(r"\bverl\b|\bROLL\b|NeMo|nemo_rl|Megatron-Bridge|megatron\.bridge|mbridge")
    mcore = ROOT / "megatron_vshape" / "mcore"
    files = {path for path in mcore.rglob("*.py") if name.search(path.read_text())}
    modules = set((mcore / "frameworks").glob("*.py")) - {mcore / "frameworks" / "__init__.py"}
    assert files == modules
