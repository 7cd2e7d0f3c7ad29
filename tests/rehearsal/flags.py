"""Files with training commands, and a comparison of the flags that are read from them."""

import textwrap
from pathlib import Path

from megatron_vshape.rehearsal.command import Command


def written(folder: Path, name: str, text: str) -> str:
    """Write the text without its indentation, and return the path of the file."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(text))
    return str(file)


def differing_flags(command: Command, text: str) -> dict[str, object]:
    """Return the flags of the text that the command lacks or has with other values, with these."""
    expected = Command("", tuple(text.split()))
    names = [word[2:].replace("-", "_") for word in text.split() if word.startswith("--")]
    options = {name: command.option(name) for name in names}
    return {name: value for name, value in options.items() if value != expected.option(name)}
