"""Runs Megatron's trainer many times and imports it once.

A farm is a process that has imported torch and Megatron, and forks a set of ranks for every
requested run: imports cost ten seconds, a fork almost nothing. As a script, this file is that
process; `Farm` starts it, unless another one with the same folder `common` has, and sends requests.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import random
import signal
import socket
import stat
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from multiprocessing import managers
from pathlib import Path
from typing import IO, Any

import servers
import torch

import megatron_vshape
from megatron_vshape.core.planner import search

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "pretrain_gpt.py"

MODEL = (
    "--transformer-impl local --distributed-backend gloo --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 64 "
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 "
    "--seq-length 32 --max-position-embeddings 32 "
    "--position-embedding-type rope --no-rope-fusion --attention-dropout 0 --hidden-dropout 0 "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 1 --lr 1e-3 --min-lr 1e-3 "
    "--lr-decay-style constant --eval-iters 0 --eval-interval 1000 --log-interval 1 --num-workers 0"
).split()
"""A GPT of eight small layers; later flags of a command line override it."""

LATE_IMPORTS = (
    "megatron.core.tokenizers.text",
    "megatron.core.models.mimo",
    "megatron.core.datasets.helpers",
    "torch._dynamo",
    "torch.utils.serialization",
    "pytest",
)
"""Imports of every run, which would otherwise need more than half of the time of each rank."""


def _left(flags: Sequence[str], without: Sequence[str]) -> list[str]:
    """Return the flags that are not in `without`, each with its values."""
    remaining, keeps = [], True
    for part in flags:
        if part.startswith("--"):
            keeps = part not in without
        if keeps:
            remaining.append(part)
    return remaining


@dataclass(frozen=True, slots=True)
class Ended:
    """Outcome of a run: exit codes, the ranks' output, and the record of each rank."""

    codes: list[int | None]  # None: still running when time was up
    output: list[str]
    records: list[dict[str, Any]]
    ended_s: list[float]  # when each rank did, on the clock of time.monotonic

    @property
    def record(self) -> dict[str, Any]:
        """Return the record of the last pipeline rank, which has the losses."""
        return self.records[-1]

    def merged(self, key: str) -> dict[str, torch.Tensor]:
        """Return the named tensors of all ranks together, rows that these share joined."""
        values: dict[str, torch.Tensor] = {}
        shared: dict[str, dict[int, torch.Tensor]] = {}
        for record in self.records:
            for name, value in record[key].items():
                first = record["rows"].get(name.split()[0])
                if first is None or not value.dim():
                    values[name] = value
                else:
                    shared.setdefault(name, {})[first] = value
        joined_values = {
            name: torch.cat([parts[first] for first in sorted(parts)])
            for name, parts in shared.items()
        }
        return values | joined_values

    def by_place(self, key: str) -> dict[tuple[Any, ...], torch.Tensor]:
        """Return the named tensors of every rank's place in the groups that share a stage."""
        return {
            (name, *record["place"]): value
            for record in self.records
            for name, value in record[key].items()
        }

    def whole(self, key: str) -> dict[str, torch.Tensor]:
        """Return the named tensors with the parts of tensor-parallel ranks joined."""
        parts_by_name: dict[str, dict[int, torch.Tensor]] = {}
        dimensions: dict[str, int] = {}
        for record in self.records:
            for name, value in record[key].items():
                parameter = name.split()[0]
                if parameter in record["parts"] and value.dim():
                    dimensions[name] = record["parts"][parameter]
                place = record["rows"].get(parameter, record["tensor_rank"])
                parts_by_name.setdefault(name, {})[place] = value
        return {
            name: torch.cat([parts[rank] for rank in sorted(parts)], dimensions[name])
            if name in dimensions
            else parts[0]
            for name, parts in parts_by_name.items()
        }

    def check(self) -> Ended:
        """Return this if all ranks ended well, else fail with their output."""
        assert self.codes == [0] * len(self.codes), "\n".join(
            f"--- rank {rank}: exit code {code}\n{text[-6000:]}"
            for rank, (code, text) in enumerate(zip(self.codes, self.output, strict=True))
        )
        return self


Train = Callable[..., Ended]
"""The fixture `train`: trains on a number of ranks with flags."""


class Farm:
    """The process that forks the ranks.

    Where `transformer_engine` is the directory of TE's Python, Megatron finds it (te_on_cpu).
    """

    def __init__(
        self, directory: Path, transformer_engine: str = "", common: Path | None = None
    ) -> None:
        self._directory = directory
        self._runs = 0
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTHONWARNINGS": "ignore",
            "PYTHONPATH": os.pathsep.join(
                [
                    str(ROOT),
                    str(ROOT / "scripts"),
                    str(ROOT / "tests"),
                    str(Path(__file__).parent),
                    os.environ.get("PYTHONPATH", ""),
                ]
            ),
            "FARM_TRANSFORMER_ENGINE": transformer_engine,
        }
        name = f"farm{zlib.crc32(transformer_engine.encode())}" if transformer_engine else "farm"
        self._log = (common or directory) / f"{name}.log"
        self._requests = servers.connect(self._log.parent, name, [__file__], environment)

    def run(
        self,
        ranks: int,
        *arguments: str,
        without: Sequence[str] = (),
        timeout_s: float = 300.0,
        live: bool = False,
        plugin: str = "",
        argument: Any = None,
        stock: bool = False,
    ) -> Ended:
        """Train on `ranks` ranks, all one pipeline unless the arguments specify otherwise.

        The flags in `without`, and their values, are removed from `MODEL`. With `live` the second
        training step is counted byte by byte. Every rank first calls the function `plugin`, which
        is named "module:function" or by the module of a `start`, with its number and `argument`. A
        `stock` run has none of our hooks.
        """
        self._runs += 1
        directory = self._directory / f"run{self._runs}"
        directory.mkdir()
        model = _left(MODEL, without)
        order = {
            "ranks": ranks,
            "arguments": [*model, "--pipeline-model-parallel-size", str(ranks), *arguments],
            "directory": str(directory),
            "timeout_s": timeout_s,
            "live": live,
            "plugin": plugin,
            "argument": argument,
            "stock": stock,
        }
        self._requests.write(json.dumps(order) + "\n")
        self._requests.flush()
        answer = self._requests.readline()
        if not answer:
            raise RuntimeError(f"the farm died: {self._log.read_text()}")
        outputs, records = [], []
        for rank in range(ranks):
            outputs.append((directory / f"rank{rank}.log").read_text(errors="replace"))
            saved = directory / f"rank{rank}.pt"
            records.append(torch.load(saved, weights_only=False) if saved.exists() else {})
        codes, ended_s = json.loads(answer)
        return Ended(codes, outputs, records, ended_s)

    def close(self) -> None:
        """End the connection, and with the last one the process."""
        self._requests.close()


def _serve() -> None:
    """Import the modules of every run, then handle connections."""
    sys.argv = [str(SCRIPT)]
    if os.environ["FARM_TRANSFORMER_ENGINE"]:
        import te_on_cpu

        te_on_cpu.import_te(os.environ["FARM_TRANSFORMER_ENGINE"])
    source = compile(SCRIPT.read_text(), str(SCRIPT), "exec")
    # Under another name the script imports and defines, and does not start.
    exec(source, {"__name__": "farm_script", "__file__": str(SCRIPT)})
    import recorder  # after the script, which must be the first to import Megatron
    from without_te import let_predict

    from megatron_vshape.rehearsal.worker import parse_docstrings_once

    let_predict()

    for name in LATE_IMPORTS:
        with contextlib.suppress(ModuleNotFoundError):  # not in every version
            importlib.import_module(name)
    parse_docstrings_once()
    _leave_out_what_tells_nothing()
    _fork_what_saving_spawns()
    search.default_steps = lambda _problem: 40_000  # every rank plans, on the same processors
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = 2000  # documents of 2000 tokens; a run uses a few
    gc.collect()
    gc.freeze()  # the garbage collector need not visit, and so copy, the imported objects
    servers.serve(functools.partial(_handle, source, recorder))


def _handle(source: Any, recorder: Any, requests: IO[str]) -> None:
    """Run the request of each line."""
    for line in requests:
        order = json.loads(line)
        port = _free_port()
        children = []
        for rank in range(order["ranks"]):
            child = os.fork()
            if child == 0:
                _become_rank(rank, port, order, source, recorder)
            children.append(child)
        requests.write(json.dumps(_wait(children, order["timeout_s"])) + "\n")
        requests.flush()


def _leave_out_what_tells_nothing() -> None:
    """Skip work in every rank that needs a tenth of a short run outside its steps."""
    for stream in (sys.stdout, sys.stderr):
        vars(stream).pop("write", None)  # wandb looks at every line that is printed
    # torch looks for plug-ins among all installed packages, group by group.
    metadata.entry_points = functools.cache(metadata.entry_points)
    metadata.entry_points(group="torch.distributed.backends")
    with contextlib.suppress(ModuleNotFoundError):  # not in every version
        from megatron.training import ft_integration

        ft_integration.setup = lambda: None  # reads all arguments, and is disabled


def _fork_what_saving_spawns() -> None:
    """Make the first save of a rank fork its queue server, which would import torch again."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    spawning = getattr(filesystem_async, "get_write_results_queue", None)
    if spawning is None:
        return
    managers.SyncManager.start = functools.partialmethod(
        managers.SyncManager.start, _close_connections
    )
    filesystem_async.get_write_results_queue = functools.partial(spawning, "fork")


def _close_connections() -> None:
    """Leave a rank's connections to the rank: a server that outlives it would keep them open."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode):
                os.close(int(descriptor))


def _free_port() -> int:
    """Return a free port that stays free until it is used.

    Ports that the system assigns, also to connections of other ranks, start at 32768.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def _become_rank(rank: int, port: int, order: dict[str, Any], source: Any, recorder: Any) -> None:
    os.setpgid(0, 0)
    log = os.open(f"{order['directory']}/rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(order["ranks"]),
        LOCAL_WORLD_SIZE=str(order["ranks"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    sys.argv = [str(SCRIPT), *order["arguments"]]
    code = 0
    if order["stock"]:
        megatron_vshape.unregister()
        megatron_vshape.register = lambda: None
    if {"--sequence-parallel", "--context-parallel-size"} & set(order["arguments"]):
        import sharded_sequence

        sharded_sequence.install()
    os.environ["FARM_RECORD"] = f"{order['directory']}/rank{rank}.pt"
    records = recorder.start(os.environ["FARM_RECORD"])
    if order["live"]:
        records.count_live_bytes()
    if order["plugin"]:
        module, _, function = order["plugin"].partition(":")
        getattr(importlib.import_module(module), function or "start")(rank, order["argument"])
    try:
        exec(source, {"__name__": "__main__", "__file__": str(SCRIPT)})
    except SystemExit as exit_:
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    if not code:
        records.save()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(children: list[int], timeout_s: float) -> tuple[list[int | None], list[float]]:
    """Return the children's exit codes and end times; kill the remaining ones at the timeout."""
    codes: dict[int, int | None] = {}
    ended_s: dict[int, float] = {}
    deadline = time.monotonic() + timeout_s
    while len(codes) < len(children) and time.monotonic() < deadline:
        for child in children:
            if child not in codes:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    codes[child] = os.waitstatus_to_exitcode(status)
                    ended_s[child] = time.monotonic()
        time.sleep(0.02)
    for child in children:
        if child not in codes:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            codes[child], ended_s[child] = None, time.monotonic()
        # Megatron's writers of checkpoints outlive a rank that was killed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    return [codes[child] for child in children], [ended_s[child] for child in children]


if __name__ == "__main__":
    _serve()
