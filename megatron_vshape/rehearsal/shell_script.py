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
        sizes: dict[str, str] = {}
        for word, next_word in pairwise((*words, "")):
            short = re.fullmatch(r"-N(\d*)", word)
            name, equals, value = word.partition("=")
            value = (short[1] or next_word) if short else value if equals else next_word
            field = "nodes" if short else _SIZES_OF_SLURM.get(name)
            if name == "--gres" and not value.startswith("gpu"):
                continue
            if field is not None:
                sizes[field] = value.strip("\"'").rpartition(":")[2]  # gpu:h100:8
        return cls(**sizes)

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
        environment: Mapping[str, str],
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
        self.variables = dict(environment)
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
        script, flag_groups, launcher, uses_arrays = None, list[list[str]](), list[str](), False
        for line in self._lines():
            script = self._fill(line[1])
            prefix = line.string[: line.start()]
            arrays = [array for array in _ALL_OF.findall(prefix) if array in self._arrays]
            launcher += chain.from_iterable(map(self._arrays.__getitem__, arrays))
            launcher += self._words(_ALL_OF.sub("", prefix))
            flags = self._words(line[2] or "", ends=True)
            flag_groups += (
                [flags] if flags not in flag_groups else []
            )  # a variable, and the line that uses it
            uses_arrays |= bool(_ALL_OF.search(line[2] or ""))
        if not uses_arrays:
            flag_groups = [*self._arrays.values(), *flag_groups]
        return script, [*chain.from_iterable(flag_groups)], launcher

    def _lines(self) -> list[re.Match[str]]:
        """Find the command lines: with a script of Megatron, else with any Python file."""
        lines = [
            line[0]
            for line in re.finditer(r"(?m)^.+$", self._text)
            if self._taken(line.start()) and not _PRINTS.match(line[0])
        ]
        matches = [match for match in map(_STARTS.search, lines) if match]
        if not any(
            match[2] for match in matches
        ):  # a variable holds the script or the whole command
            filled = (self._fill(line).replace("\n", " ") for line in lines if "$" in line)
            matches += [match for match in map(_STARTS.search, filled) if match]
        return [match for match in matches if "pretrain" in match[1]] or matches

    def _taken(self, position: int) -> bool:
        return not any(start <= position < end for start, end in self._not_taken)

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
        value = self._value(_unquoted(line["rest"].partition(" in")[0].strip()))
        return [
            (
                None
                if value is None
                else any(
                    fnmatchcase(value, _unquoted(pattern)) for pattern in branch[1].split("|")
                ),
                branch.start(2),
                branch.end(2),
            )
            for branch in _OF_CASE.finditer(self._text, line.end(), max(end, line.end()))
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
        comparison = _TEST.fullmatch(condition)
        try:
            words = shlex.split(comparison[1]) if comparison else []
        except ValueError:
            return None
        filled = [self._value(word) for word in words]
        values = [value for value in filled if value is not None]
        match values:
            case _ if len(values) < len(filled):
                return None
            case ["-n" | "-z" as test, value]:
                return bool(value) == (test == "-n")
            case [lhs, "=" | "==", rhs]:
                return fnmatchcase(lhs, rhs)
            case [lhs, "!=", rhs]:
                return not fnmatchcase(lhs, rhs)
            case [lhs, test, rhs] if test in _COMPARED:
                if lhs.isdecimal() and rhs.isdecimal():
                    return bool(_COMPARED[test](int(lhs), int(rhs)))
                return None if lhs and rhs else False  # an unset variable is an error in bash
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
        path_variables = {name: self.variables.get(name, "") for name in ("0", "BASH_SOURCE")}
        environment = self.variables | {"BASH_SOURCE": str(file)}
        script = ShellScript(text, environment, self._arrays, (*self._sourced, file))
        self.variables, self._arrays = script.variables | path_variables, script._arrays

    def _assign(self, position: int) -> None:
        """Make the assignments that begin here: NAME=VALUE NAME="VALUE" COMMAND."""
        while assignment := _ASSIGNED.match(self._text, position):
            name, position = assignment["name"], assignment.end()
            if assignment["array"]:
                previous = self._arrays.get(name, []) if assignment["adds"] else []
                words = self._words(_until_closed(self._text[position:]))
                self._arrays[name] = [*previous, *chain.from_iterable(map(_apart, words))]
                return
            if assignment["value"]:
                prefix = self.variables.get(name, "") if assignment["adds"] else ""
                self.variables[name] = prefix + self._fill(_unquoted(assignment["value"]))

    def _words(self, text: str, ends: bool = False) -> list[str]:
        """Split into words; unquoted variables are several. `ends`: at a pipe or redirection."""
        text = "".join(self._parts(text, ends))
        try:
            words = shlex.split(text)
        except ValueError:  # part of a quoted command line
            words = re.sub("[\"']", " ", text).split()
        filled_words: list[str] = []
        for word in words:
            array = _ALL_OF.fullmatch(word)
            if array:
                if array[1] not in self._arrays and self._unreadable:
                    raise ScheduleError(
                        f"{word} is unknown: a file that the script sources cannot be read: "
                        f"{self._unreadable}"
                    )
                filled_words += self._arrays.get(array[1], [])
            elif word not in ("\\", "$@", "$*"):
                filled_words.append(self._fill(word))
        return filled_words

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

    def _computed(self, match: re.Match[str]) -> str:
        """Compute $((a * b)) of integers; leave it as it is if a variable is unknown."""
        terms = re.sub(r"\$?\{?([A-Za-z_]\w*|(?<=[${])\d+)\}?", self._known, match[1])
        try:
            return str(_integer(ast.parse(terms.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return match[0]

    def _known(self, match: re.Match[str]) -> str:
        """Return the value of a variable, or the text as it is."""
        name = match[match.lastindex or 0]
        return self.variables.get(name, os.environ.get(name, match[0]))

    def _fill(self, text: str) -> str:
        """Replace variables; unknown ones stay."""
        variables = self.variables
        text = _ARITHMETIC.sub(self._computed, text)
        text = _DEFAULT.sub(lambda match: variables.get(match[1], match[2]), text)
        text = _VARIABLE.sub(self._known, text)
        while (filled := _PATH.sub(_path, text)) != text:  # from the inside out
            text = filled
        return text


def _path(match: re.Match[str]) -> str:
    """Compute $(dirname FILE) and similar commands; leave others as they are."""
    command, path, suffix = match[1], Path(match[2]), match[3].strip()
    if command == "cd":
        return str(path) if suffix.endswith(("pwd", "pwd -P")) else match[0]
    if suffix:
        return match[0]
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
    arguments = [_unquoted(word) for word in _WORD.findall(words)]
    if "$@" in arguments:  # the script's own parameters
        return body

    def parameter(match: re.Match[str]) -> str:
        number = int(match[1] or match[3] or 0)
        if not number:
            return " ".join(arguments)
        return arguments[number - 1] if number <= len(arguments) else match[2] or ""

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
        case ast.BinOp(lhs, kind, rhs) if type(kind) in _COMPUTED:
            return int(_COMPUTED[type(kind)](_integer(lhs), _integer(rhs)))
    raise ValueError(ast.dump(term))


def _unquoted(value: str) -> str:
    """Remove quotes around a value or parts of it."""
    quoted = re.compile(r"\"((?:\\.|[^\"\\])*)\"|'([^']*)'", re.S)
    return quoted.sub(lambda match: match[1] if match[2] is None else match[2], value)


def _until_closed(text: str) -> str:
    """Return the body of an array up to its closing parenthesis outside of quotes."""
    quote = ""
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character == ")":
            return text[:position]
    return text
