"""Reads a training command from a shell script without running the script.

Variables, arrays and the line that starts the training are read, as bash expands them, also in
files that the script sources and in functions that it calls. Of `case` and `if`, only the branch
that bash takes is read. Where that depends on something else than values of variables, such as
files, all branches are read in order. Options of sbatch and srun have the number of GPUs.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

from megatron_vshape.core.model.kinds import ScheduleError

_BEGINS = re.compile(
    r"(?m)^[ \t]*(?:(?P<condition>case|if)\b(?P<rest>.*)|(?:source|\.)[ \t]+(?P<file>\S.*)$|"
    r"(?:(?:export|local|readonly|declare(?:[ \t]+-\w+)*)[ \t]+)?(?=\w+\+?=))"
)
_OF_IF = re.compile(r"(?m)^[ \t]*(if|elif|else|fi)\b(.*)$")
_OF_CASE = re.compile(r"(?m)^[ \t]*\(?([^\s()]+)\)(.*?);;", re.S)
_TEST = re.compile(r"\s*\[\[?\s+(.*?)\s+\]\]?[\s;]*(?:then)?\s*")
_COMPARED = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_ASSIGNED = re.compile(
    r"""(?P<name>\w+)(?P<adds>\+?)=(?:(?P<array>\()|"""
    r"""(?P<value>(?:\$\(\(.*?\)\)|"(?:\\.|[^"\\])*"|'[^']*'|\$\([^)]*\)|\$\{[^}]*\}|[^\s;"'])*)"""
    r"""[ \t]*(?:;[ \t]*)?(?:export[ \t]+)?)""",
    re.S,
)
_ALL_OF = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_DEFAULT = re.compile(r"\$\{(\w+):?[-=]([^}]*)\}")
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)")
_PRINTS = re.compile(r"\s*(?:echo|printf|if|elif|test|\[|\[\[|cat|cp|ls)\s")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_PATH = re.compile(
    r"\$\((dirname|basename|realpath|readlink -f|cd)\s+(?:--\s+)?[\"']?([^\"'()\s$`]+)[\"']?"
    r"([^()]*)\)"
)
_FUNCTION = re.compile(
    r"(?ms)^([ \t]*)(?:function[ \t]+(\w+)[ \t]*(?:\(\))?|(\w+)[ \t]*\(\))\s*\{(.*?)^\1\}[ \t]*$"
)
_PARAMETER = re.compile(r"\$(?:\{(\d+)(?::?-([^}]*))?\}|(\d)|[@*])")
_WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""")
_PART = re.compile(r"""(?P<quoted>"(?:\\.|[^"\\])*"|'[^']*')|(?P<end>(?<=\s)\d?[<>|&]|;)|.""", re.S)
_STARTS = re.compile(r"([^\s=\"'*]+\.py)[\"']?(?:[ \t]+(.*))?$", re.M)


_SIZES_OF_SLURM = {
    "--nodes": "nodes",
    "--gpus-per-node": "gpus",
    "--gres": "gpus",
    "--ntasks-per-node": "tasks",
}
_COMPUTED = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def sbatch_words(text: str) -> list[str]:
    """Split the #SBATCH lines of a script into words; SLURM reads them up to the first command."""
    words: list[str] = []
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            words += line.removeprefix("#SBATCH").partition(" #")[0].split()
    return words


@dataclass(frozen=True, slots=True)
class SlurmSizes:
    """Numbers of nodes, GPUs per node and tasks per node; empty if not given."""

    nodes: str = ""
    gpus: str = ""
    tasks: str = ""

    @classmethod
    def of(cls, words: Sequence[str]) -> SlurmSizes:
        """Read the options of sbatch and srun, of which the last of a name applies."""
        found: dict[str, str] = {}
        for word, after in pairwise((*words, "")):
            short = re.fullmatch(r"-N(\d*)", word)
            name, equals, value = word.partition("=")
            value = (short[1] or after) if short else value if equals else after
            field = "nodes" if short else _SIZES_OF_SLURM.get(name)
            if name == "--gres" and not value.startswith("gpu"):
                continue
            if field is not None:
                found[field] = value.strip("\"'").rpartition(":")[2]  # gpu:h100:8
        return cls(**found)

    @property
    def processes(self) -> str:
        """Processes per node: one for each GPU, or the tasks if there are several."""
        return self.gpus or (self.tasks if self.tasks != "1" else "")

    def variables(self) -> dict[str, str]:
        """Name the variables that SLURM sets from these numbers."""
        values = {
            "SLURM_NNODES": self.nodes,
            "SLURM_JOB_NUM_NODES": self.nodes,
            "SLURM_GPUS_PER_NODE": self.gpus,
            "SLURM_GPUS_ON_NODE": self.gpus,
            "SLURM_NTASKS_PER_NODE": self.tasks,
        }
        return {name: value for name, value in values.items() if value}


class ShellScript:
    """The variables, the arrays and the command lines of a script."""

    def __init__(
        self,
        text: str,
        given: Mapping[str, str],
        arrays: Mapping[str, list[str]] | None = None,
        sourced: tuple[Path, ...] | None = (),
    ) -> None:
        """Read the assignments of a script.

        Args:
            text: the script.
            given: variables of its environment; `0` and BASH_SOURCE are its path.
            arrays: arrays of the script that sources it.
            sourced: files that are being read; None: read no other file.

        Raises:
            ScheduleError: An array is unknown, and a sourced file cannot be read.
        """
        text = re.sub(r"(?m)(^|\s)#.*$", r"\1", text).replace("\\\n", " ")
        self._text = _with_bodies(text.replace("{BASH_SOURCE[0]}", "{BASH_SOURCE}"))
        self.variables = dict(given)
        self._arrays = dict(arrays or {})
        self._sourced, self._unreadable = sourced, ""
        self._not_taken: list[tuple[int, int]] = []  # from and to where in the text
        for line in _BEGINS.finditer(self._text):
            if not self._taken(line.start()):
                continue
            if line["file"] is not None:
                self._source(line["file"])
            elif line["condition"] is None:
                self._assign(line.end())
            elif line["condition"] == "case":
                self._skip(self._of_case(line))
            else:
                self._skip(self._of_if(line))

    def command(self) -> tuple[str | None, list[str], list[str]]:
        """Return the training script, None if the script has none, its flags, and the launcher's.

        If the line that starts the training names no array, the flags of all arrays are added, for
        scripts that pass them on in other ways.
        """
        script, found, launcher, uses_arrays = None, list[list[str]](), list[str](), False
        for line in self._lines():
            script = self._fill(line[1])
            before = line.string[: line.start()]
            known = [each for each in _ALL_OF.findall(before) if each in self._arrays]
            launcher += chain.from_iterable(map(self._arrays.__getitem__, known))
            launcher += self._words(_ALL_OF.sub("", before))
            flags = self._words(line[2] or "", ends=True)
            found += [flags] if flags not in found else []  # a variable, and the line that uses it
            uses_arrays |= bool(_ALL_OF.search(line[2] or ""))
        if not uses_arrays:
            found = [*self._arrays.values(), *found]
        return script, [*chain.from_iterable(found)], launcher

    def _lines(self) -> list[re.Match[str]]:
        """Find the command lines: with a script of Megatron, else with any Python file."""
        lines = [
            line[0]
            for line in re.finditer(r"(?m)^.+$", self._text)
            if self._taken(line.start()) and not _PRINTS.match(line[0])
        ]
        found = [each for each in map(_STARTS.search, lines) if each]
        if not any(each[2] for each in found):  # a variable holds the script or the whole command
            filled = (self._fill(line).replace("\n", " ") for line in lines if "$" in line)
            found += [each for each in map(_STARTS.search, filled) if each]
        return [each for each in found if "pretrain" in each[1]] or found

    def _taken(self, at: int) -> bool:
        return not any(start <= at < end for start, end in self._not_taken)

    def _skip(self, branches: list[tuple[bool | None, int, int]]) -> None:
        """Skip the branches that bash does not take: whether one holds, and where it is."""
        for number, (holds, *_) in enumerate(branches):
            if holds is None:
                return
            if holds:
                branches = branches[:number] + branches[number + 1 :]
                break
        self._not_taken += [(start, end) for _, start, end in branches]

    def _of_case(self, line: re.Match[str]) -> list[tuple[bool | None, int, int]]:
        """List the branches of a `case`."""
        end = self._text.find("esac", line.end())
        known = self._value(_unquoted(line["rest"].partition(" in")[0].strip()))
        return [
            (
                None
                if known is None
                else any(fnmatchcase(known, _unquoted(pattern)) for pattern in each[1].split("|")),
                each.start(2),
                each.end(2),
            )
            for each in _OF_CASE.finditer(self._text, line.end(), max(end, line.end()))
        ]

    def _of_if(self, line: re.Match[str]) -> list[tuple[bool | None, int, int]]:
        """List the branches of an `if` of several lines."""
        branches: list[tuple[bool | None, int, int]] = []
        depth, condition, start = 0, line["rest"], line.end()
        if re.search(r"\bfi\b", condition):
            return []
        for word in _OF_IF.finditer(self._text, line.end()):
            opens = word[1] == "if" and not re.search(r"\bfi\b", word[2])
            depth += opens - (word[1] == "fi")
            if depth < 0 or (depth == 0 and word[1] in ("elif", "else")):
                holds = True if condition is None else self._holds(condition)
                branches.append((holds, start, word.start()))
                condition = word[2] if word[1] == "elif" else None
                start = word.end()
            if depth < 0:
                break
        return branches

    def _holds(self, condition: str) -> bool | None:
        """Evaluate a comparison of values; None if the result is unknown."""
        found = _TEST.fullmatch(condition)
        try:
            words = shlex.split(found[1]) if found else []
        except ValueError:
            return None
        filled = [self._value(word) for word in words]
        values = [value for value in filled if value is not None]
        match values:
            case _ if len(values) < len(filled):
                return None
            case ["-n" | "-z" as test, value]:
                return bool(value) == (test == "-n")
            case [left, "=" | "==", right]:
                return fnmatchcase(left, right)
            case [left, "!=", right]:
                return not fnmatchcase(left, right)
            case [left, test, right] if test in _COMPARED:
                if left.isdecimal() and right.isdecimal():
                    return bool(_COMPARED[test](int(left), int(right)))
                return None if left and right else False  # an unset variable is an error in bash
        return None

    def _source(self, words: str) -> None:
        """Read the variables and arrays of another script."""
        file = Path(self._fill(_unquoted(words)).partition(" ")[0])
        if self._sourced is None or file in self._sourced:
            return
        try:
            text = file.read_text()
        except (OSError, ValueError):
            self._unreadable = str(file)
            return
        own = {name: self.variables.get(name, "") for name in ("0", "BASH_SOURCE")}
        given = self.variables | {"BASH_SOURCE": str(file)}
        read = ShellScript(text, given, self._arrays, (*self._sourced, file))
        self.variables, self._arrays = read.variables | own, read._arrays

    def _assign(self, at: int) -> None:
        """Make the assignments that begin here: NAME=VALUE NAME="VALUE" COMMAND."""
        while found := _ASSIGNED.match(self._text, at):
            name, at = found["name"], found.end()
            if found["array"]:
                kept = self._arrays.get(name, []) if found["adds"] else []
                words = self._words(_until_closed(self._text[at:]))
                self._arrays[name] = [*kept, *chain.from_iterable(map(_apart, words))]
                return
            if found["value"]:
                before = self.variables.get(name, "") if found["adds"] else ""
                self.variables[name] = before + self._fill(_unquoted(found["value"]))

    def _words(self, text: str, ends: bool = False) -> list[str]:
        """Split into words; unquoted variables are several. `ends`: at a pipe or redirection."""
        text = "".join(self._parts(text, ends))
        try:
            words = shlex.split(text)
        except ValueError:  # part of a quoted command line
            words = re.sub("[\"']", " ", text).split()
        found: list[str] = []
        for word in words:
            array = _ALL_OF.fullmatch(word)
            if array:
                if array[1] not in self._arrays and self._unreadable:
                    raise ScheduleError(
                        f"{word} is unknown: a file that the script sources cannot be read: "
                        f"{self._unreadable}"
                    )
                found += self._arrays.get(array[1], [])
            elif word not in ("\\", "$@", "$*"):
                found.append(self._fill(word))
        return found

    def _parts(self, text: str, ends: bool) -> Iterator[str]:
        """Yield quoted parts as they are, and the others with their variables filled in."""
        plain = ""
        for part in _PART.finditer(text):
            if part["end"] and ends:
                break
            if part["quoted"]:
                yield self._fill(plain)
                yield part[0]
                plain = ""
            else:
                plain += part[0]
        yield self._fill(plain)

    def _value(self, word: str) -> str | None:
        """Fill in a word of a condition; unset variables are empty. None: a command's output."""
        filled = _VARIABLE.sub("", self._fill(word))
        return None if "$" in filled or "`" in filled else filled

    def _computed(self, found: re.Match[str]) -> str:
        """Compute $((a * b)) of integers; leave it as it is if a variable is unknown."""
        terms = re.sub(r"\$?\{?([A-Za-z_]\w*|(?<=[${])\d+)\}?", self._known, found[1])
        try:
            return str(_integer(ast.parse(terms.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return found[0]

    def _known(self, found: re.Match[str]) -> str:
        """Return the value of a variable, or the text as it is."""
        name = found[found.lastindex or 0]
        return self.variables.get(name, os.environ.get(name, found[0]))

    def _fill(self, text: str) -> str:
        """Replace variables; unknown ones stay."""
        known = self.variables
        text = _ARITHMETIC.sub(self._computed, text)
        text = _DEFAULT.sub(lambda found: known.get(found[1], found[2]), text)
        text = _VARIABLE.sub(self._known, text)
        while (filled := _PATH.sub(_path, text)) != text:  # from the inside out
            text = filled
        return text


def _path(found: re.Match[str]) -> str:
    """Compute $(dirname FILE) and similar commands; leave others as they are."""
    command, path, more = found[1], Path(found[2]), found[3].strip()
    if command == "cd":
        return str(path) if more.endswith(("pwd", "pwd -P")) else found[0]
    if more:
        return found[0]
    parts = {"dirname": str(path.parent), "basename": path.name}
    return parts.get(command, str(path.absolute()))


def _with_bodies(text: str) -> str:
    """Replace calls of functions by the functions' bodies; functions without a call stay."""
    for function in _FUNCTION.finditer(text):
        name, body = function[2] or function[3], function[4]
        without = text.replace(function[0], "")
        called = re.compile(rf"(?m)^[ \t]*{name}(?:[ \t]+(.*))?$")
        if called.search(without):
            text = called.sub(partial(_called, body), without)
    return text


def _called(body: str, call: re.Match[str]) -> str:
    """Replace $1, $2 and so on in the body of a function by the words of a call."""
    words = re.split(r"[;|&>]", call[1] or "")[0]
    given = [_unquoted(word) for word in _WORD.findall(words)]
    if "$@" in given:  # the script's own parameters
        return body

    def parameter(found: re.Match[str]) -> str:
        number = int(found[1] or found[3] or 0)
        if not number:
            return " ".join(given)
        return given[number - 1] if number <= len(given) else found[2] or ""

    return _PARAMETER.sub(parameter, body)


def _apart(word: str) -> list[str]:
    """Split an array's word that holds a flag and its value; bash does so in unquoted arrays."""
    return word.split() if word.startswith("--") else [word]


def _integer(term: ast.expr) -> int:
    """Compute integers with + - * / and %.

    Raises:
        ValueError: it has something else.
    """
    match term:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left, kind, right) if type(kind) in _COMPUTED:
            return int(_COMPUTED[type(kind)](_integer(left), _integer(right)))
    raise ValueError(ast.dump(term))


def _unquoted(value: str) -> str:
    """Remove quotes around a value or parts of it."""
    quoted = re.compile(r"\"((?:\\.|[^\"\\])*)\"|'([^']*)'", re.S)
    return quoted.sub(lambda found: found[1] if found[2] is None else found[2], value)


def _until_closed(text: str) -> str:
    """Return the body of an array up to its closing parenthesis outside of quotes."""
    quote = ""
    for at, each in enumerate(text):
        if quote:
            quote = "" if each == quote else quote
        elif each in "\"'":
            quote = each
        elif each == ")":
            return text[:at]
    return text
