"""Says options as the user has given them: as flags, as keywords of `register`, or in the variable.

Messages are written with flags, Megatron's own ones among them, and pass through `in_words` where
they leave the package. In a library's run Megatron's options are fields of its config, by the same
name with underscores.
"""

from __future__ import annotations

import re
from enum import StrEnum

from megatron_vshape.mcore.options import OPTIONS, VARIABLE


class WayIn(StrEnum):
    """How a run has asked for its schedule."""

    FLAGS = "flags of Megatron's parser"
    KEYWORDS = "register"
    VARIABLE = f"the variable {VARIABLE}"


_KEYWORDS = {option.flag[2:]: name for name, option in OPTIONS.items() if option.flag}

_FLAG = re.compile(r"--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")
_VALUE = re.compile(r" (?=[A-Z]+\b|A:B|N,N|-?[.\d]|auto\b|v-|zb-|[\w-]*1f1b|gpipe\b|dualpipev\b)")

_way = [WayIn.FLAGS]
"""Of this process, in which one registration is in force: `registry.install` sets it."""


def speak(way: WayIn) -> None:
    """Have messages name options in this way from now on."""
    _way[0] = way


def in_words(text: object) -> str:
    """Return a message with its options as the user knows them.

    >>> speak(WayIn.VARIABLE)
    >>> in_words("auto needs costs: give --pipeline-costs FILE, or leave --pipeline-trace out")
    'auto needs costs: give costs_file=FILE, or leave trace_folder out'
    >>> speak(WayIn.FLAGS)
    """
    if _way[0] is WayIn.FLAGS:
        return str(text)
    parts, at, plain = [], 0, str(text)
    for found in _FLAG.finditer(plain):
        name = _KEYWORDS.get(found[1])
        parts += [plain[at : found.start()], name or found[1].replace("-", "_")]
        at = found.end()
        value = _VALUE.match(plain, at) if name else None
        if value is not None:
            parts.append("=")
            at = value.end()
            if _way[0] is WayIn.KEYWORDS and plain.startswith("A:B", at):
                parts.append("(A, B)")
                at += len("A:B")
    return "".join((*parts, plain[at:]))
