"""Estimate a pasted training command: python -m megatron_vshape.cli.pasted OPTIONS < COMMAND.

OPTIONS are those of `rehearse`: --gpu, --gpus and --vocabulary.

The playground runs this. Other users of the machine can reach its server, so nothing that a command
names is executed or read: the script is replaced by this package's own, and paths are rejected.
"""

import re
import sys
from pathlib import Path

from megatron_vshape.cli.main import main
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.mcore.layout import hybrid
from megatron_vshape.rehearsal.command import Command, split_words
from megatron_vshape.rehearsal.command_reader import read_command
from megatron_vshape.rehearsal.dry_run_flags import FILES, variables_of_step
from megatron_vshape.rehearsal.sources import OWN

_IN_TERMINAL = "in a terminal: megatron-vshape rehearse -- COMMAND"

_PATTERNS = (hybrid.FLAG, "--hybrid-override-pattern", "--mtp-hybrid-override-pattern")
_PATH = re.compile(r"[/\\]|\.(json|csv|ya?ml|py)$")


def safe_words(text: str) -> list[str]:
    """Return the words of a pasted command, with a script of Megatron-LM's name.

    Raises:
        ScheduleError: The command names another script, a file or a module.
    """
    command = _command_of(text)
    name = Path(command.script).name
    if name not in OWN:
        raise ScheduleError(
            f"the page runs no script but {', '.join(OWN)}, and the command names "
            f"{command.script}. Estimate it {_IN_TERMINAL}"
        )
    # Flags in FILES are removed before a dry run; a pattern separates its parts by slashes.
    checked_command = command.without(lambda flag: flag in FILES or flag in _PATTERNS)
    variables = variables_of_step(command.environment)
    for word in (*checked_command.flags, *variables.values()):
        if _PATH.search(word):
            raise ScheduleError(
                f"the page reads no files, and the command names {word!r:.80}. Estimate it "
                f"{_IN_TERMINAL}"
            )
    if not (checked_command.value("--spec") or "megatron.").startswith("megatron."):
        raise ScheduleError(
            "the page imports no modules but Megatron's, and --spec is "
            f"{checked_command.value('--spec')!r}. Estimate it {_IN_TERMINAL}"
        )
    set_before = [f"{name}={value}" for name, value in variables.items()]
    launched = [word for pair in command.launched.items() for word in pair]
    return [*set_before, *launched, name, *command.flags]


def _command_of(text: str) -> Command:
    lines = [line.strip() for line in re.sub(r"\\\r?\n", " ", text).splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines:
        raise ScheduleError("the command is empty: paste a training command with its flags")
    if not all(line.startswith("-") for line in lines[1:]):
        raise ScheduleError(
            "the page reads no shell scripts, because bash would expand them. Paste the training "
            f"command with its flags, or estimate the script {_IN_TERMINAL.removesuffix('COMMAND')}"
            "SCRIPT.sh"
        )
    words = split_words(" ".join(lines), "the command")
    script_indices = [index for index, word in enumerate(words) if word.endswith(".py")]
    script_indices += [words.index("-m") + 1] if not script_indices and "-m" in words[:-1] else []
    flags = words[script_indices[0] + 1 :] if script_indices else words
    if flags and not flags[0].startswith("-"):
        raise ScheduleError(
            f"the page reads no files, and the command starts with {flags[0]!r:.80}: paste the "
            "content of the file"
        )
    return read_command(words)


def run(options: list[str], text: str) -> int:
    """Write the estimate to estimate.json in the working directory; return the exit status."""
    try:
        words = safe_words(text)
    except ScheduleError as error:
        print(f"megatron-vshape: {error}", file=sys.stderr)
        return 2
    return main(["rehearse", *options, "--json", "estimate.json", "--", *words])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], sys.stdin.read()))
