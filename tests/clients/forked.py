"""Runs the cases of a library's script, each in a process forked after all imports.

Imports need most of a minute. In each case the environment has the variable that a user would set,
and process groups are new.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LIMIT_S = int(os.environ.get("CLIENTS_LIMIT_S", "300"))


def run_cases(main: Callable[[SimpleNamespace], dict[str, Any]], **defaults: Any) -> None:
    """Run `main` for each case of the folder on the command line; save its results."""
    folder = Path(sys.argv[1])
    for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        case_folder = folder / case["name"]
        output_file = os.open(case_folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output_file, 1)
        os.dup2(output_file, 2)
        # Each case meets elsewhere: the launcher's store has the names of the case before.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1 + number)
        code = 1
        # A hanging case prints its traceback and ends.
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        try:
            _register(case["variable"])
            record = main(SimpleNamespace(**(defaults | case | {"folder": str(case_folder)})))
            import torch

            torch.save(record, case_folder / f"{os.environ['RANK']}.pt")
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # ms-swift saves in child processes, which would outlive `os._exit`.
        for process in multiprocessing.active_children():
            process.kill()
        os._exit(code)


def _register(variable: str | None) -> None:
    if variable is not None:
        os.environ["MEGATRON_VSHAPE"] = variable
        import megatron_vshape.from_environment  # noqa: F401  as the package's start-up file does
