"""Reads a training command from a shell script: bash expands the script without running it.

`reader.sh` explains how commands are kept from being executed. Here, files are prepared for it,
its records are received, and the training command is found among them. Options of sbatch, srun and
other launchers have the number of GPUs.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, takewhile
from pathlib import Path
from threading import Timer
from typing import IO

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.model_files import PROGRAM, flags_of_model

SECONDS = 8.0
"""Time limit of a script."""

_MAX_BYTES = 16 << 20
_MAX_FILES = 200
_MAX_DEPTH = 3

_HARMLESS = """
    seq basename dirname nproc expr bc wc tr cut head tail cat grep realpath readlink rev paste fold
    nl uname id whoami numfmt
""".split()
"""Programs that neither write files nor start others, with any arguments."""

_SOURCE_FILE = """\
__source "$1"
shift
[[ -z $__copy || $# -gt 0 ]] || command . "$__copy" "${__parameters[@]}"
[[ -z $__copy || $# -eq 0 ]] || command . "$__copy" "$@"
"""

_HIDDEN = re.compile(
    r"BASH\w*|BASH_FUNC_.*|ENV|SHELLOPTS|PS4|IFS|LD_\w+|GCONV_PATH|LOCPATH|BC_ENV_ARGS|POSIXLY_CORRECT"
)
"""Variables of the environment that change bash or its programs."""

_REWRITTEN = (
    # A guard that ends the script; a missing value is reported if it matters.
    (re.compile(r"\$\{(\w+):?\?[^{}]*\}"), r"${\1}"),
    (re.compile(r"=<[A-Za-z][^<>\n]*>"), "=@{placeholder}"),  # as in CHECKPOINT=<path>
    # A script that is written to a file is sent by a function.
    (
        re.compile(
            r"""(?m)^((?!.*(?:\(\(|\[\[)).*[ \t)])>>?[ \t]*"""
            r"""("[^"\n]*\.(?:sh|bash|slurm|sbatch)"|[^\s&|;<>()"'`]+\.(?:sh|bash|slurm|sbatch))"""
            r"""(?=[ \t]*(?:$|[&;]|<<|\#))"""
        ),
        r"\1| __script \2",
    ),
    # Output to other files is discarded: a restricted shell would skip the command.
    (re.compile(r"&>>?[ \t]*/dev/null\b|>&[ \t]*/dev/null\b"), ">&9 2>&9"),
    (re.compile(r">>?[ \t]*/dev/null\b"), ">&9"),
    (
        re.compile(
            r"""(?m)^((?!.*(?:\(\(|\[\[)).*[ \t)])[&\d]?>>?\|?[ \t]*"""
            r"""(?:"[^"\n]*"|\$\([^()\n]*\)|[^\s&|;<>()"'`])+"""
            r"""(?=[ \t]*(?:\d?>&\d[ \t]*)?(?:$|[&|;]|<<|\#))"""
        ),
        r"\1>&9",
    ),
    # Variables that a restricted shell does not set, and folders of launchers.
    (re.compile(r"(?<![\w$/])(PATH|LD_\w+|BASH_ENV|ENV|SHELL|LOCPATH)(?=\+?=)"), r"\1_"),
    (re.compile(r"(?<![\w=])[\w./-]*/(?=(?:python3?|torchrun|srun|deepspeed)[ \t])"), ""),
)
_OWN_PATH = re.compile(r"\bBASH_SOURCE(?:\[0\])?(?!\[)")
_FIRST_PATH = re.compile(r"(?<=\$)0\b|(?<=\$\{)0(?=\W)")


_SIZES_OF_SLURM = {
    "--nodes": "nodes",
    "--gpus-per-node": "gpus",
    "--gres": "gpus",
    "--ntasks-per-node": "tasks",
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


@dataclass(frozen=True, slots=True)
class RecordedCommand:
    """The words of a command that was not executed, its environment, and the commands around it."""

    words: Sequence[str]
    environment: Mapping[str, str]
    launcher: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Expansion:
    """The commands of a script, its variables with flags, and the files that it reads."""

    records: list[RecordedCommand] = field(default_factory=list)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)  # scripts by the names of their files


def expand_script(
    text: str,
    path: Path,
    parameters: Sequence[str],
    environment: Mapping[str, str],
    launcher: Sequence[str] = (),
    depth: int = 0,
) -> Expansion:
    """Let bash expand a script, and the scripts and command lines that its commands contain.

    Args:
        text: the script.
        path: its file, for the folders of the files that it sources.
        parameters: its parameters, `$1` and so on.
        environment: variables in addition to those of this process.
        launcher: words of the command that starts the script.
        depth: the number of scripts around this one.

    Raises:
        ScheduleError: bash is not installed.
    """
    run = _BashRun(path, environment, launcher)
    with tempfile.TemporaryDirectory(prefix="vshape-") as folder:
        run.execute(Path(folder), text, parameters)
    expansion = run.expansion
    for record in list(expansion.records) if depth < _MAX_DEPTH else ():
        for inner in _inner_scripts(record, path, expansion.written):
            inner_expansion = expand_script(*inner, depth=depth + 1)
            expansion.records.extend(inner_expansion.records)
            expansion.texts.extend(inner_expansion.texts)
            expansion.unreadable.extend(inner_expansion.unreadable)
    return expansion


_Inner = tuple[str, Path, Sequence[str], Mapping[str, str], Sequence[str]]


def _inner_scripts(
    record: RecordedCommand, path: Path, written: Mapping[str, str]
) -> Iterator[_Inner]:
    """Yield the command lines in quotes and the scripts among the words of a command."""
    for index, word in enumerate(record.words):
        launcher = (*record.launcher, *record.words[:index])
        if re.search(r"\s", word) and re.search(r"\.py\b|\s-m\s|\.sh\b", word):
            text = word.partition("=")[2] if re.match(r"--\w[\w-]*=", word) else word
            yield text, path, record.words[index + 1 :], record.environment, launcher
        elif re.search(r"\.(sh|bash|slurm|sbatch)$", word) and not word.startswith("-"):
            parameters = record.words[index + 1 :]
            if (name := os.path.normpath(word)) in written:
                yield written[name], path, parameters, record.environment, launcher
                return
            file = _find_file(word, os.getcwd(), path)
            with suppress(OSError, ValueError):
                if file is not None and file != path:
                    yield file.read_text(), file, parameters, record.environment, launcher
            return
        elif word.endswith(".py"):
            return


def _find_file(name: str, folder: str, script: Path) -> Path | None:
    """Find a file from the working directory or from the folders around the script.

    A path of another machine that ends in scripts/models/a.sh is found by these last folders.
    """
    bases = (Path(folder), *script.resolve().parents[:6])
    parts = Path(os.path.normpath(name)).parts
    names = [Path(name), *(Path(*parts[start:]) for start in range(1, len(parts) - 1))]
    files = (base / file for file in names for base in bases)
    return next((file for file in files if file.is_file()), None)


class _BashRun:
    """A process of bash that expands a script, and the files and records that it exchanges."""

    def __init__(self, path: Path, environment: Mapping[str, str], launcher: Sequence[str]) -> None:
        self.expansion = Expansion()
        self._path, self._launcher = path, launcher
        variables = {**os.environ, **environment}
        self._environment = {
            name: value
            for name, value in variables.items()
            if name.isidentifier() and not _HIDDEN.fullmatch(name)
        }

    def execute(self, folder: Path, text: str, parameters: Sequence[str]) -> None:
        """Run bash until the script ends or the time limit, and collect its records."""
        bash = shutil.which("bash")
        if bash is None:
            raise ScheduleError(
                f"{self._path} is a shell script, and bash is not installed. Install bash, or pass "
                "the training command itself"
            )
        for name in _HARMLESS:
            program = shutil.which(name)
            if program is not None:
                (folder / name).symlink_to(program)
        (folder / "__source_file").write_text(_SOURCE_FILE)
        self._folder = folder
        reader = Path(__file__).with_name("reader.sh").read_text()
        main = folder / "__main"
        main.write_text(f"{reader}\n{self._rewrite(text, self._path)}\n")
        process = subprocess.Popen(
            [bash, "--noprofile", "--norc", str(main), *parameters],
            env={**self._environment, "PATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        end = Timer(SECONDS, _kill, [process.pid])
        end.start()
        try:
            self._receive(process.stdout, process.stdin)
        finally:
            end.cancel()
            _kill(process.pid)
            process.wait()
            process.stdout.close()
            with suppress(OSError):
                process.stdin.close()

    def _rewrite(self, text: str, path: Path) -> str:
        """Return a script with its paths set and without output to files."""
        variable = f"__path_{len(self.expansion.texts)}"
        self.expansion.texts.append(text)
        text = _FIRST_PATH.sub("__path_0", _OWN_PATH.sub(variable, text))
        for pattern, replacement in _REWRITTEN:
            text = pattern.sub(replacement, text)
        return f"{variable}={shlex.quote(str(path))}\n{text}"

    def _receive(self, records: IO[bytes], replies: IO[bytes]) -> None:
        """Sort the pieces of records by process, and reply to requests for files."""
        pieces: dict[str, list[str]] = {}
        for frame in _frames(records):
            process, _, piece = frame.decode(errors="replace").partition(" ")
            if piece == "Z":
                first, *words = pieces.pop(process, [""])
                if first[:1] in ("S", "O"):
                    parts = [word[1:] for word in words]
                    reply = self._output(parts) if first == "O" else self._source(first[1:], parts)
                    with suppress(OSError):
                        replies.write(reply.encode() + b"\n")
                        replies.flush()
                else:
                    self._add(first, words)
            elif piece[:1] in ("B", "A", "S", "O", "F"):
                pieces[process] = [piece]
            else:
                pieces.setdefault(process, [""]).append(piece)

    def _source(self, folder: str, words: Sequence[str]) -> str:
        """Prepare a copy of a file that the script sources; return its name, "" without one."""
        name = words[0] if words else ""
        if len(self.expansion.texts) > _MAX_FILES or _IRRELEVANT.search(name):
            return ""
        file = _find_file(name, folder, self._path)
        try:
            text = "" if file is None else file.read_text()
        except (OSError, ValueError):
            file = None
        if file is None:
            self.expansion.unreadable.append(name)
            return ""
        copy = f"__file_{len(self.expansion.texts)}"
        (self._folder / copy).write_text(self._rewrite(text, file))
        return copy

    def _output(self, words: Sequence[str]) -> str:
        """Return the output of a program that prints the flags of a model, "" if it is unknown."""
        programs = [index for index, word in enumerate(words) if word.endswith(PROGRAM)]
        file = _find_file(words[programs[0]], os.getcwd(), self._path) if programs else None
        return flags_of_model(file, words[-1]) if file is not None else ""

    def _add(self, first: str, pieces: Sequence[str]) -> None:
        words = [piece[1:] for piece in pieces if piece.startswith("W")]
        if first.startswith("A"):
            self.expansion.arrays[first[1:]] = words
            return
        if first.startswith("F"):
            name = os.path.normpath(first[1:])
            text = self.expansion.written.get(name, "")
            self.expansion.written[name] = "".join([text, *(f"{line}\n" for line in words)])
            return
        pairs = [piece[1:].partition("=") for piece in pieces if piece.startswith("E")]
        environment = {name: value for name, _, value in pairs if name != "PATH"}
        self.expansion.records.append(RecordedCommand(words, environment, self._launcher))


@dataclass(frozen=True, slots=True)
class StartedTraining:
    """A training command of a script; without a command, `script` is None."""

    script: str | None
    flags: list[str]
    launcher: list[str]
    environment: Mapping[str, str]
    num_further: int = 0  # trainings of the script that have a model, too


def training_command(expansion: Expansion, flag_names: Collection[str]) -> StartedTraining:
    """Return the command with the most flags of Megatron-LM, or the variables with such flags.

    If the command has no layers, the flags of the variables are added, for scripts that pass them
    on in other ways.

    Args:
        expansion: the commands of the script.
        flag_names: names of Megatron-LM's flags.
    """
    best, best_score, models = StartedTraining(None, [], [], {}), (0, False, 0), set[str]()
    for record in expansion.records:
        started = _started(record, flag_names)
        score = (
            _count_flags(started.flags, flag_names),
            "train" in (started.script or ""),
            len(started.flags),
        )
        if started.script is not None and _has_layers(started.flags):
            models.add(shlex.join(started.flags))
        if started.script is not None and score > best_score:
            best, best_score = started, score
    if not _has_layers(best.flags):
        words = (_split(array) for array in expansion.arrays.values())
        arrays = [array for array in words if _count_flags(array, flag_names)]
        longest = max(arrays, key=lambda array: _count_flags(array, flag_names), default=[])
        other_arrays = [array for array in arrays if not set(array) <= set(longest)]
        flags = [*chain.from_iterable(other_arrays), *longest, *best.flags]
        best = replace(best, flags=flags)
    return replace(
        best,
        flags=_restore_variables(_split(best.flags), expansion.texts),
        launcher=_restore_variables(best.launcher, expansion.texts),
        num_further=max(0, len(models) - 1),
    )


_LAYERS = {"--num-layers", "--hybrid-layer-pattern", "--hybrid-override-pattern"}


def _has_layers(words: Iterable[str]) -> bool:
    return not _LAYERS.isdisjoint(word.partition("=")[0] for word in words)


def _count_flags(words: Sequence[str], flag_names: Collection[str]) -> int:
    return len({word.partition("=")[0] for word in words}.intersection(flag_names))


def _split(words: Iterable[str]) -> list[str]:
    """Split words that hold several flags, as a shell does with a variable without quotes."""
    flags = [word.split() if re.match(r"\s*--\w\S*\s", word) else [word] for word in words]
    return [word for word in chain.from_iterable(flags) if word not in ("\\", "")]


def _started(record: RecordedCommand, flag_names: Collection[str]) -> StartedTraining:
    """Find the training script among the words of a command: the last one before its flags."""
    words = list(record.words)
    names = [word.partition("=")[0] for word in words]
    first = next((index for index, name in enumerate(names) if name in flag_names), len(words))
    ends = [index for index, word in enumerate(words) if re.fullmatch(r"[^-\s]\S*\.py", word)]
    modules = [index + 1 for index, word in enumerate(words[:-1]) if word == "-m"]
    candidates = [index for index in ends or modules if index <= first] or (ends or modules)[:1]
    if not candidates:
        return StartedTraining(None, [], [], {})
    index = candidates[-1]
    script = words[index] if ends else words[index].rpartition(".")[2] + ".py"
    outer = [*record.launcher, *words[:index]]
    assignments = (word.partition("=") for word in outer)
    variables = {**record.environment, **{name: value for name, _, value in assignments}}
    flags = list(
        takewhile(lambda word: word not in ("|", "&&", "||", ";", "&"), words[index + 1 :])
    )
    return StartedTraining(script, flags, outer, variables)


def _restore_variables(flags: Sequence[str], texts: Sequence[str]) -> list[str]:
    """Add the names of variables to flags whose values bash found empty, as in `--lr $LR`."""
    text = "\n".join(texts)
    restored: list[str] = []
    for flag, next_word in pairwise((*flags, "--")):
        restored.append(flag)
        name, equals, value = flag.partition("=")
        if name.startswith("--") and (next_word.startswith("--") or equals) and not value:
            match = re.search(
                rf"(?<![\w-]){re.escape(name)}[ \t=]+[\"']?(?:\$\{{?(\w+)|(\$\([^)]*\)|`[^`]*`))",
                text,
            )
            if match is not None:
                unknown = match[2] or f"${_source_of(match[1], text)}"
                restored[-1:] = [flag + unknown] if equals else [flag, unknown]
    return restored


def _source_of(name: str, text: str) -> str:
    """Follow assignments of a variable to the one that the environment sets."""
    for _ in range(5):
        match = re.search(rf"(?m)^[ \t]*(?:export[ \t]+)?{name}=[\"']?\$\{{?(\w+)", text)
        if match is None or match[1] == name:
            break
        name = match[1]
    return name


_IRRELEVANT = re.compile(r"^/(etc|usr|opt)/|(^|/)(activate|conda\.sh|\.bash\w*|\.profile)$")
"""Files that set up programs, which no flag of a training depends on."""


def _frames(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield texts that end with NUL, up to a limit."""
    remainder, size = b"", 0
    while size < _MAX_BYTES and (chunk := os.read(stream.fileno(), 1 << 16)):
        *frames, remainder = (remainder + chunk).split(b"\0")
        size += len(chunk)
        yield from frames


def _kill(group: int) -> None:
    with suppress(OSError):
        os.killpg(group, signal.SIGKILL)
