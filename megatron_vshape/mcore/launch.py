"""Run an unmodified Megatron-LM script with this package's schedules.

    torchrun --nproc-per-node 4 -m megatron_vshape.mcore.launch PATH/pretrain_gpt.py FLAGS...

Where torch sees no GPU the script trains on the CPU. The script is executed in this module's own
`__main__`, not by runpy: writing a checkpoint spawns processes that import the main file again,
and that must be this one, which does nothing when imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

import megatron_vshape
from megatron_vshape.mcore import cpu

USAGE = "usage: python -m megatron_vshape.mcore.launch SCRIPT [ARGUMENTS OF THE SCRIPT]"


def prepare(argv: list[str]) -> str:
    """Hook into Megatron, make `argv` and the import path the script's, and return its source.

    Raises:
        SystemExit: no script is named, or it cannot be read.
    """
    if len(argv) < 2 or argv[1] in ("-h", "--help"):
        raise SystemExit(USAGE)
    script = Path(argv[1])
    try:
        source = script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"megatron-vshape: the script {script} cannot be read: {error}") from None
    # Before Megatron is imported, from here or from the checkout that the script belongs to.
    sys.path.insert(0, str(script.resolve().parent))
    cpu.install()
    megatron_vshape.register()
    del argv[0]
    return source


if __name__ == "__main__":
    _source = prepare(sys.argv)
    __file__ = sys.argv[0]
    exec(compile(_source, __file__, "exec"), globals())
