"""Run an unmodified Megatron-LM script with this package's schedules.

    torchrun --nproc-per-node 4 -m megatron_vshape.mcore.launch PATH/pretrain_gpt.py FLAGS...

If torch finds no GPU, the script trains on the CPU. The script is executed in this module's
`__main__` instead of by runpy: saving a checkpoint spawns processes that import the main file
again. That file must be this one, which does nothing when imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_vshape.mcore import cpu

USAGE = "usage: python -m megatron_vshape.mcore.launch SCRIPT [ARGUMENTS OF THE SCRIPT]"


def register_and_read(argv: list[str]) -> str:
    """Register with Megatron, set `argv` and the import path for the script, and return its source.

    Raises:
        SystemExit: No script is given, or it cannot be read.
    """
    if len(argv) < 2 or argv[1] in ("-h", "--help"):
        raise SystemExit(USAGE)
    script = Path(argv[1])
    try:
        source = script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"megatron-vshape: the script {script} cannot be read: {error}") from None
    # Before the first import of Megatron, which may be in the checkout of the script.
    sys.path.insert(0, str(script.resolve().parent))
    cpu.install()
    from megatron_vshape.mcore.hooks import registry

    registry.install({})
    del argv[0]
    return source


if __name__ == "__main__":
    _source = register_and_read(sys.argv)
    __file__ = sys.argv[0]
    # Not with this file's `annotations`: the script may read its own as types.
    exec(compile(_source, __file__, "exec", dont_inherit=True), globals())
