"""Hooks of mkdocs: the README is the home page, and benchmarks/ is a part of the site.

mkdocs reads docs/ only. Links between README.md, docs/ and benchmarks/ are rewritten, because the
site has another folder structure than the repository. Links to other files become their paths.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")
_IMAGE = re.compile(r"(!\[[^\]]*\]\()(?!https?:)([^)]+)\)")
ADDED = ("README.md", *(f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.md")))
"""Pages outside docs/, by their path in the repository."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/, and the figures of benchmarks/."""
    figures = (path.relative_to(ROOT).as_posix() for path in ROOT.glob("benchmarks/figures/*.svg"))
    for path in (*ADDED, *figures):
        files.append(File.generated(config, _on_site(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """Rewrite the links of a page for the site."""
    here = _in_repository(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        text, path, anchor = match[1], _from(here, match[2]), match[3] or ""
        if files.get_file_from_path(_on_site(path)) is None:
            return text if path in text else f"{text} (`{path}` in the repository)"
        return f"[{text}]({_relative(page.file.src_uri, path)}{anchor})"

    def image(match: re.Match[str]) -> str:
        return f"{match[1]}{_relative(page.file.src_uri, _from(here, match[2]))})"

    return _IMAGE.sub(image, _LINK.sub(link, markdown))


def on_post_page(output: str, **_: Any) -> str:
    """Give the theme's search dialog an accessible name."""
    nameless = 'data-md-component="search" role="dialog"'
    return output.replace(nameless, f'{nameless} aria-label="Search"')


def on_post_template(output_content: str, **_: Any) -> str:
    """Do the same for pages that are no documents, such as 404.html."""
    return on_post_page(output_content)


def _from(here: str, path: str) -> str:
    """Resolve a link of the file `here`, both as paths in the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(here), path))


def _on_site(path: str) -> str:
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def _in_repository(uri: str) -> str:
    if uri == "index.md":
        return "README.md"
    return uri if uri in ADDED else f"docs/{uri}"


def _relative(uri: str, path: str) -> str:
    return posixpath.relpath(_on_site(path), posixpath.dirname(uri) or ".")
