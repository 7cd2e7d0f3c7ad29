"""A rank that is terminated reports its current wait, wherever its main thread is."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.plain_pipeline import SHAPE, stages_for
from runtime.ranks import RanksFailed, run_ranks

from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.runtime.failures import ENDED_BY_SIGTERM, last_words
from megatron_vshape.runtime.p2p import Transport
from megatron_vshape.runtime.program_runner import Place, run_program


def end_while_it_waits(rank: int, folder: Path) -> None:
    """Device 0 sleeps in a pass, and device 1 gets SIGTERM while torch waits for its message."""
    schedule = make("v-half", 2, 4)
    program = lower(schedule)
    transport = Transport([[0, 1]], SHAPE, torch.float32, "cpu", timeout_s=20)
    place = Place()
    assert transport.describe(place) == f"rank {rank} (device {rank}): before its first pass"
    transport.prepare(program)
    stages: Any = stages_for(schedule, rank, 0, torch.float32)
    if rank == 0:
        forward = stages[0].forward
        stages[0].forward = lambda *args: (time.sleep(3), forward(*args))[1]
    else:
        os.dup2(os.open(folder / "said", os.O_WRONLY | os.O_CREAT), 2)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    with last_words(lambda: transport.describe(place)):
        if rank == 0:
            os.dup2(os.open(folder / "said by 0", os.O_WRONLY | os.O_CREAT), 2)
        run_program(program, rank, stages, transport, place=place)


def test_rank_reports_its_wait_on_sigterm(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=f"exit code {ENDED_BY_SIGTERM}"):
        run_ranks(2, end_while_it_waits, tmp_path)
    assert (tmp_path / "said").read_text() == (
        "rank 1 (device 1): F1.0 waits for F0.0 from rank 0 (device 0), when SIGTERM ended it\n"
    )
    assert (tmp_path / "said by 0").read_text() == (
        "rank 0 (device 0): in F0.0, the forward pass of stage 0 for microbatch 0, when SIGTERM "
        "ended it\n"
    )


def test_signal_ends_the_child_but_not_the_parent() -> None:
    original_handler = signal.getsignal(signal.SIGTERM)
    assert original_handler == signal.SIG_DFL
    with last_words(lambda: "the parent"):
        assert signal.getsignal(signal.SIGTERM) != original_handler
        child = os.fork()
        if not child:
            time.sleep(20)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        time.sleep(0.1)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == original_handler


CRASH = """
import os, signal
from megatron_vshape.runtime.failures import last_words
def a_pass():
    os.kill(os.getpid(), signal.SIGSEGV)
with last_words(lambda: ""):
    a_pass()
"""


def test_crash_prints_the_current_pass() -> None:
    command = [sys.executable, "-c", CRASH]
    crash = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    assert crash.returncode == -signal.SIGSEGV
    assert re.search(r"Segmentation fault.*Current thread.* in a_pass\n", crash.stderr, re.DOTALL)


def test_existing_signal_handlers_are_kept() -> None:
    def user_handler(number: int, frame: object) -> None:
        pass

    signal.signal(signal.SIGTERM, user_handler)
    try:
        with last_words(lambda: "never"):
            assert signal.getsignal(signal.SIGTERM) is user_handler
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


EXITS = """
import contextlib
import time
from datetime import timedelta

import torch.distributed as dist

from megatron_vshape.runtime.failures import Watch

class Late:
    def __del__(self, sleep=time.sleep):
        sleep(1.0)

class Event:
    def query(self):
        asked.append(0)
        with contextlib.suppress(dist.DistStoreError):
            store.wait(["never"], timedelta(seconds=0.3))
        return False

asked, store, late = [], dist.HashStore(), Late()
watch = Watch(timeout_s=60.0, under_way=lambda: [], doing=lambda: "")
watch.add(Event(), lambda: "F1.0 waits for F0.0")
while not asked:
    time.sleep(0.01)
{end}
"""
"""Ends during a query of the watchdog, which waits in C++ without the GIL, as CUDA's queries do.

`late` is deleted by the finalization of the interpreter, which then lasts longer than the query.
"""


@pytest.mark.parametrize("end", ["", "watch.close()"])
def test_exit_during_a_watchdog_query_does_not_crash(end: str) -> None:
    command = [sys.executable, "-c", EXITS.format(end=end)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
