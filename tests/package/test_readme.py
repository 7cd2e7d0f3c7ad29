"""The README stays short, and the files that it and benchmarks/README.md name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BENCHMARKS = ROOT / "benchmarks" / "README.md"
MAX_LINES, MAX_WORDS, MAX_WORDS_TO_COMMAND = 150, 1300, 130


def words(text: str) -> int:
    return len(text.split())


def test_readme_is_short():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    assert words(text) <= MAX_WORDS
    introduction, command, _ = text.partition("```bash\n")
    assert command
    assert words(introduction) <= MAX_WORDS_TO_COMMAND


@pytest.mark.parametrize("page", [README, BENCHMARKS], ids=["README", "benchmarks"])
def test_links_and_scripts_exist(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", text)
    scripts = re.findall(r"\b(?:python|bash) ((?:scripts|benchmarks)/[\w/.-]+)", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [script for script in scripts if not (ROOT / script).is_file()]
    assert links
    assert scripts
    assert not missing
