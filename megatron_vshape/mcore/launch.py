"""Run an unmodified Megatron-LM script with this package's schedules.

    torchrun --nproc-per-node 4 -m megatron_vshape.mcore.launch PATH/pretrain_gpt.py FLAGS...

If torch finds no GPU, the script trains on the CPU. The script runs in a `__main__` module of its
own, as under `python SCRIPT`: processes that it spawns import it again, and find its classes.
"""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from types import ModuleType

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


def run_script(source: str, path: str) -> None:
    """Run a script in a new `__main__` module, without the names of this one."""
    # Its `__spec__` is None, so that multiprocessing imports the script by its path.
    module = ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=builtins)
    sys.modules["__main__"] = module
    # Not with this file's `annotations`: the script may read its own as types.
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)


if __name__ == "__main__":
    run_script(register_and_read(sys.argv), sys.argv[0])
