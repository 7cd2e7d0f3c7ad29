"""The documentation is short, current and complete, and its links are valid."""

import doctest
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_vshape.core.model.files import _ALONE, _FIELDS, _MORE, _UNLIKE
from megatron_vshape.core.model.kinds import KINDS, amounts_of
from megatron_vshape.rehearsal.fitted import LEFT_OUT

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "AGENTS", "CHANGELOG")),
    *DOCS,
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((ROOT / "configs").glob("**/*.md")),
    *sorted((ROOT / "patches").glob("*.md")),
]
MAX_WORDS, MAX_PAGES = 14_200, 10

_FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]+))?\)")
_FILE = re.compile(r"`?\b((?:\w+/)+[\w-]+\.(?:py|sh|md|yaml|yml|sbatch|json|svg))\b")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and mkdocs make of a page's headings."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def test_documentation_size() -> None:
    pages = [ROOT / "README.md", *DOCS]
    assert len(DOCS) <= MAX_PAGES
    words = (page.read_text(encoding="utf-8").replace("|", " ").split() for page in pages)
    assert sum(map(len, words)) <= MAX_WORDS  # the bars of tables are not words


@pytest.mark.parametrize("page", DOCS, ids=name)
def test_page_starts_with_a_command(page: Path) -> None:
    first = page.read_text(encoding="utf-8").split("\n## ")[0]
    assert re.search(r"^```(console|bash)$", first, re.MULTILINE)


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=name)
def test_output_and_tables_are_current(page: Path) -> None:
    if sys.version_info[:2] != (3, 12):
        pytest.skip("other versions of Python format --help differently")
    import docs

    text = page.read_text(encoding="utf-8")
    assert docs.current(text) == text, "run: python scripts/docs.py"


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1300
    introduction, command, _ = text.partition("```bash\n")
    assert command
    assert len(introduction.split()) <= 130


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "benchmarks/README.md"], ids=name)
def test_programs_in_commands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    programs = re.findall(r"\b(?:python|bash) ((?:scripts|benchmarks)/[\w/.-]+)", text)
    assert programs
    assert [program for program in programs if not (ROOT / program).is_file()] == []


def test_readme_has_current_step_time_error() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"step time {LEFT_OUT['all'].median_percent:g}%" in text


def test_the_python_example_runs() -> None:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    example = "".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert ">>>" in example
    test = doctest.DocTestParser().get_doctest(example, {}, "reference.md", None, 0)
    assert doctest.DocTestRunner().run(test).failed == 0


def test_reference_has_every_field_of_a_costs_file() -> None:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    fields = {*_FIELDS, *_ALONE, _UNLIKE, _MORE, *map(str, amounts_of(KINDS))}
    assert {field for field in fields if f"`{field}`" not in text} == set()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_are_valid(page: Path) -> None:
    broken = []
    for path, anchor in _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{path}#{anchor}")
    assert broken == []


def files_named_in(page: Path) -> Iterator[str]:
    """Yield the files of the repository that a page names, in its text and in its commands."""
    for path in _FILE.findall(page.read_text(encoding="utf-8")):
        if path.split("/")[0] in {"scripts", "benchmarks", "configs", "tests", "docs"}:
            yield path
        elif path.split("/")[0] in {
            "core",
            "runtime",
            "mcore",
            "rehearsal",
            "sweep",
            "view",
            "cli",
        }:
            yield f"megatron_vshape/{path}"


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "CHANGELOG.md" and page.parent.name != "evidence"],
    ids=name,
)
def test_files_named_in_the_documentation_exist(page: Path) -> None:
    assert [path for path in files_named_in(page) if not (ROOT / path).exists()] == []


def test_pages_named_in_the_code_exist() -> None:
    missing = []
    for folder in ("megatron_vshape", "scripts", "benchmarks", "configs", "tests", ".github"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".sh", ".yaml", ".yml", ".sbatch"}:
                pages = re.findall(r"\bdocs/[\w-]+\.md\b", path.read_text(encoding="utf-8"))
                missing += [(name(path), page) for page in pages if not (ROOT / page).exists()]
    assert missing == []
