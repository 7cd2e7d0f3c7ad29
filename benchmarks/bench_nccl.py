"""Train on several ranks that share one GPU, over NCCL, with and without waits for the GPU.

    python benchmarks/bench_nccl.py --ranks 2

A posted receive is a kernel: it occupies its GPU until the message arrives. Many operations of a
pass wait for the whole GPU and therefore for that kernel: loading a kernel, freeing memory,
reading a number. One waiting rank is safe. Two ranks that wait for each other's results wait
forever. The same small GPT is trained with v-half:

    gloo            on the CPU, for reference losses
    as-is           over NCCL
    waiting         every pass starts with a wait for the GPU
    waiting-early   the same, and every receive is posted one pass before the pass that reads it

The last variant must hang; otherwise the waits have no effect. The deadlock proof of every program
predicts which variants hang. Exits with 1 if a variant does not behave as predicted.

Two contexts on one GPU take turns: this tests the protocol, not times or overlap. With `--device
cpu`, all runs use gloo, and every rank waits for its posted receives instead of the GPU.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import runpy
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import torch
import torch.distributed as dist
from bench_gpu import (  # finds the package where it is not installed
    print_values,
    provenance,
    stop_process,
)
from bench_posting import reposted
from chunks import choose_device
from torch import Tensor

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.program.instructions import Program
from megatron_vshape.core.program.kernels import deadlocks_under_device_sync

ROOT = Path(__file__).parents[1]
LIMIT_S = 110.0  # of one run; all of them together need less than nine minutes
STILL_S = 40  # seconds without a message after which a run reports that it has stalled
LOSS_TOLERANCE = 1e-4  # a GPU sums fp32 in another order than a CPU
TRAINED = (
    "--transformer-impl local --mock-data --tokenizer-type NullTokenizer --vocab-size 127 "
    "--make-vocab-size-divisible-by 64 --num-layers 8 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 64 --max-position-embeddings 64 --position-embedding-type rope --no-rope-fusion "
    "--attention-dropout 0 --hidden-dropout 0 --no-gradient-accumulation-fusion "
    "--untie-embeddings-and-output-weights --no-masked-softmax-fusion --no-persist-layer-norm "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 4 --lr 1e-3 --min-lr 1e-3 "
    "--lr-decay-style constant --eval-iters 0 --eval-interval 1000 --log-interval 1 "
    f"--num-workers 0 --pipeline-schedule v-half --pipeline-timeout {STILL_S}"
).split()
NCCL_SAYS = re.compile(r".*(?:NCCL WARN|NCCL error|ncclInvalid|ncclUnhandled|ncclSystem).*")
WAITS = "begins to wait for the device"
STANDS = "nothing has moved for"  # text of runtime/p2p.py
HANGS = "the model says that these instructions hang"


class Trial(StrEnum):
    """How the ranks are run."""

    AS_IS = "as-is"
    WAITING = "waiting"
    EARLY = "waiting-early"


# --- a rank -------------------------------------------------------------------------------------


class HostDevice:
    """Replaces a device on a CPU: a wait for it is a wait for every posted receive."""

    def __init__(self, irecv: Callable[..., Any]) -> None:
        self._irecv = irecv
        self._posted: list[_Received] = []

    def irecv(self, *args: Any, **options: Any) -> _Received:
        """Post a receive."""
        self._posted.append(_Received(self._irecv(*args, **options)))
        return self._posted[-1]

    def synchronize(self) -> None:
        """Wait until all that is posted has been received.

        Raises:
            SystemExit: something has not come for too long.
        """
        while self._posted:
            try:
                self._posted.pop().wait(timedelta(seconds=STILL_S))
            except RuntimeError:
                raise SystemExit(f"{STANDS} {STILL_S} s") from None


class _Received:
    """A receive that may be waited for twice, which gloo's may not."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, *timeout: Any) -> None:
        """Wait until it has ended."""
        if self._work is not None:
            self._work.wait(*timeout)
            self._work = None


def train_rank(trial: Trial, flags: Sequence[str]) -> int:
    """Train as scripts/pretrain_gpt.py does, from weights that follow from their names.

    A GPU draws other random numbers than a CPU, so the initial ones would differ.
    """
    script = str(ROOT / "scripts" / "pretrain_gpt.py")
    sys.argv = [script, *flags]
    pretrain = runpy.run_path(script, run_name="imported")["main"]
    from megatron.training import training

    upstream = training.setup_model_and_optimizer

    def setup(*args: Any, **options: Any) -> Any:
        setup_result = upstream(*args, **options)
        for index, chunk in enumerate(setup_result[0]):
            for name, parameter in chunk.named_parameters():
                if parameter.dim() > 1:
                    fill(parameter.data, f"{os.environ['RANK']} {index} {name}")
        return setup_result

    training.setup_model_and_optimizer = setup
    if trial is Trial.AS_IS:
        pretrain()
        return 0
    choose_posting(trial)
    waits = wait_in_passes()
    pretrain()
    return 0 if waits() else 1  # a run without a wait shows nothing


def choose_posting(trial: Trial) -> None:
    """Make the rank post its receives as over NCCL, or early, and print the predicted result."""
    from megatron_vshape.mcore.setup import plans

    lower = plans.lower

    def lowered(*args: Any, **options: Any) -> Program:
        program = lower(*args, **(options | {"kernels": True}))
        if trial is Trial.EARLY:
            program = reposted(program, 1)
        if deadlocks_under_device_sync(program):
            print(HANGS, flush=True)
        return program

    plans.lower = lowered


def wait_in_passes() -> Callable[[], int]:
    """Make every pass start with a wait for the device; return a function that counts the waits."""
    from megatron_vshape.mcore.step.stage import MegatronStage

    wait = torch.cuda.synchronize
    if not torch.cuda.is_available():
        device = HostDevice(dist.irecv)
        dist.irecv, wait = device.irecv, device.synchronize
    num_waits = 0

    def with_wait(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_after(*args: Any, **options: Any) -> Any:
            nonlocal num_waits
            if not num_waits:
                print(WAITS, flush=True)
            num_waits += 1
            wait()
            return run(*args, **options)

        return run_after

    for name in ("forward", "backward_inputs", "backward_weights", "backward"):
        setattr(MegatronStage, name, with_wait(getattr(MegatronStage, name)))
    return lambda: num_waits


def fill(data: Tensor, name: str) -> None:
    """Fill with random numbers that depend on nothing but the name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    data.copy_(torch.randn(data.shape, generator=generator) * 0.02)


# --- all ranks ----------------------------------------------------------------------------------


class TrainingError(RuntimeError):
    """A run failed; the arguments are the outputs of its ranks."""


def train(
    trial: Trial,
    ranks: int,
    backend: str,
    device: str,
    flags: Sequence[str] = (),
    outputs: list[str] | None = None,
) -> tuple[list[float], bool]:
    """Train on ranks that share one GPU, or on CPUs, and return losses and the model's word.

    There are no losses where it hung; the model's word is whether it would. `outputs` gets the
    output of every rank.

    Raises:
        TrainingError: a rank failed, or they were not done in time for another reason.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, __file__, "train-rank", trial, *TRAINED, *flags]
    command += ["--pipeline-model-parallel-size", str(ranks), "--distributed-backend", backend]
    with TemporaryDirectory() as folder:
        logs = [Path(folder) / str(rank) for rank in range(ranks)]
        processes = []
        try:
            for rank, log in enumerate(logs):
                with log.open("w") as stream:
                    environment = rank_environment(rank, ranks, port, device)
                    out = {"stdout": stream, "stderr": subprocess.STDOUT, "text": True}
                    processes.append(subprocess.Popen(command, env=environment, **out))
            ended = wait_for(processes, time.monotonic() + LIMIT_S)
        finally:
            for process in processes:
                stop_process(process)
        said = [log.read_text(errors="replace") for log in logs]
    if outputs is not None:
        outputs += said
    if any(ended) and not stood(said, ended):
        ends = zip(said, ended, strict=True)
        raise TrainingError(
            *(f"{text}rank {rank} ended: {how}" for rank, (text, how) in enumerate(ends))
        )
    losses = [] if any(ended) else re.findall(r"lm loss: (\S+)", "".join(said))
    return [float(loss) for loss in losses], any(HANGS in text for text in said)


def rank_environment(rank: int, ranks: int, port: str, device: str) -> dict[str, str]:
    """Return the environment of one of several ranks, each of which appears as a host.

    NCCL rejects two ranks of one host on one device; NCCL_HOSTID makes them different hosts.
    """
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_DEBUG": "WARN",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_COMPILE_DISABLE": "1",  # compilation needs longer than all steps
        "OMP_NUM_THREADS": "1",
    }
    return os.environ | variables | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})


def wait_for(processes: Sequence[subprocess.Popen[str]], deadline_s: float) -> list[str]:
    """Wait until all have ended, one has failed, or the deadline; return the failures."""
    failure = "not in time"
    while time.monotonic() < deadline_s:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            failure = "not before another failed"
            break
        time.sleep(0.2)
    codes = [process.poll() for process in processes]
    return [failure if code is None else f"status {code}" if code else "" for code in codes]


def stood(said: Sequence[str], ended: Sequence[str]) -> bool:
    """Return whether all ranks had begun to wait when a message was missed, or time was up."""
    all_waited = all(WAITS in text for text in said)
    return all_waited and ("not in time" in ended or any(STANDS in text for text in said))


def run_all(args: argparse.Namespace) -> int:
    """Print the outcome of every run; return 1 if one differs from its prediction.

    A rejection by NCCL is a result as well, and is printed.

    Raises:
        SystemExit: a run failed for another reason.
    """
    print_values(provenance(args))
    backend = "nccl" if args.device == "cuda" else "gloo"
    try:
        right, _ = train(Trial.AS_IS, args.ranks, "gloo", "cpu")
        print(f"gloo: {right}", flush=True)
        good = True
        for trial in Trial:
            losses, would_hang = train(trial, args.ranks, backend, args.device)
            print(f"{trial}: {verdict(trial, losses, right, would_hang)}", flush=True)
            good &= not losses if trial is Trial.EARLY else are_close(losses, right)
    except TrainingError as error:
        sentence = NCCL_SAYS.search("\n".join(error.args))
        if sentence is None:
            said = "\n".join(text[-3000:] for text in error.args)
            raise SystemExit(f"bench_nccl: the ranks did not train\n{said}") from None
        print(f"NCCL refuses {args.ranks} ranks on one GPU: {sentence[0].strip()}")
        return 0
    return int(not good)


def verdict(trial: Trial, losses: Sequence[float], right: Sequence[float], would_hang: bool) -> str:
    """Return the outcome of a run, and whether it agrees with the deadlock proof."""
    comparison = "equal" if are_close(losses, right) else "different"
    outcome = f"{losses}, {comparison}" if losses else "hung"
    if trial is Trial.AS_IS:
        return outcome
    agrees = would_hang is not bool(losses)
    return f"{outcome}, {'as' if agrees else 'which is not what'} the model says"


def are_close(losses: Sequence[float], right: Sequence[float]) -> bool:
    """Return whether there are losses, and pairs of them differ by rounding only."""
    pairs = zip(losses, right, strict=False)
    close = all(math.isclose(*pair, rel_tol=LOSS_TOLERANCE) for pair in pairs)
    return len(losses) == len(right) > 0 and close


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all, or a rank of one of the runs, and return the exit status."""
    command = list(sys.argv[1:] if arguments is None else arguments)
    if command[:1] == ["train-rank"]:
        return train_rank(Trial(command[1]), command[2:])
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args(command)
    try:
        choose_device(args.device)
    except ScheduleError as error:
        raise SystemExit(f"bench_nccl: {error}") from None
    return run_all(args)


if __name__ == "__main__":
    raise SystemExit(main())
