"""What mkdocs asks while it builds the site: the README as its home, and output made by the code.

A block that is marked `console run` shows the output of its commands (those of `megatron-vshape`)
below them, so that no page can tell what the code no longer does; `console fails` does with what is
refused, and `training flags` shows the flags that a training run has from here. Links that lead out
of docs/ have nowhere to lead to on the site, and become the path's name.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import io
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import griffe

from megatron_vshape.cli.main import main

ROOT = Path(__file__).parents[1]
_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
_RUN = re.compile(r"^```console (run|fails)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FLAGS = "```training flags\n```"
_OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\((?:\.\./)+([^)#]*)(#[^)]*)?\)")
_NO_PAGE = re.compile(r"(?<!!)\[([^\]]+)\]\((?!http|#|docs/)([^)]+)\)")
_OF_THE_README = re.compile(r"\]\(docs/")
_PROMPT = "$ megatron-vshape "


class FencedExamples(griffe.Extension):
    """Has the examples of docstrings shown as code: `[...][:4]` would be a link in Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the examples of a docstring."""
        if obj.docstring:
            text = obj.docstring.value
            obj.docstring.value = _EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page's text as the site has it."""
    if page.file.src_uri == "index.md":
        text = _OF_THE_README.sub("](", (ROOT / "README.md").read_text(encoding="utf-8"))
        # Files of the repository beside docs/ are named, not linked.
        return re.sub(r"(?<!!)\[([^\]]+)\]\((?!http|#|docs/)([^)]+)\)", _named, text)
    markdown = markdown.replace("](../README.md", "](index.md")
    if _FLAGS in markdown:
        markdown = markdown.replace(_FLAGS, f"```text\n{_training_flags()}```")
    return _RUN.sub(_ran, _OUTSIDE.sub(_named, markdown))


def on_post_page(output: str, **_: Any) -> str:
    """Return the page with a name for the theme's search, which is a dialog without one."""
    nameless = 'data-md-component="search" role="dialog"'
    return output.replace(nameless, f'{nameless} aria-label="Search"')


def on_post_template(output_content: str, **_: Any) -> str:
    """Return what is no page of the documents, such as 404.html, with the same name."""
    return on_post_page(output_content)


def _training_flags() -> str:
    """Return the help of the flags that Megatron's parser gets; its package would need Megatron."""
    path = ROOT / "megatron_vshape" / "mcore" / "setup" / "arguments.py"
    spec = importlib.util.spec_from_file_location("arguments_of_training", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for it
    spec.loader.exec_module(module)
    parser = argparse.ArgumentParser(add_help=False, formatter_class=_Wide)
    text = module.add_arguments(parser).format_help()
    return text[text.index("  --pipeline-schedule NAME|FILE\n") :]


class _Wide(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=100)


def _named(link: re.Match[str]) -> str:
    text, path = link[1], link[2]
    return text if path.rstrip("/") in text else f"{text} (`{path}` in the repository)"


def _ran(block: re.Match[str]) -> str:
    """Return the block with what its commands print."""
    shown = []
    for line in block[2].splitlines():
        if not line.startswith(_PROMPT):
            raise ValueError(f"a block to run begins its lines with {_PROMPT!r}, not {line!r}")
        shown += [line, _output(line[len(_PROMPT) :], fails=block[1] == "fails")]
    return "\n".join(["```text", *shown, "```"])


@functools.cache
def _output(command: str, fails: bool) -> str:
    """Return what the command line prints; raises if it fails, or does not where it should."""
    arguments = shlex.split(command)
    stream = io.StringIO()
    os.environ["COLUMNS"] = "100"
    said = stream if fails else sys.stderr  # what else is said there is none of the answer
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(said):
        try:
            status = main(arguments)
        except SystemExit as end:  # of --help
            status = end.code
    if bool(status) != fails:
        raise ValueError(f"megatron-vshape {command} ended with {status}: {stream.getvalue()}")
    return stream.getvalue().rstrip() + "\n"
