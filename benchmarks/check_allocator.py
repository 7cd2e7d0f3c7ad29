#!/usr/bin/env python3
"""Record on one GPU all calls of torch's allocator in training steps of single ranks.

    python benchmarks/check_allocator.py record FOLDER [--only NAME ...]
    python benchmarks/check_allocator.py replay FOLDER

`record` runs ranks of `scripts/measure_ranks.py` as `megatron-vshape rehearse --measure` does, with
expandable segments and without. It writes per rank the calls of the allocator in order, the
segments that it reserved and released, and the memory that the process uses outside of it.

`replay` needs no GPU: it passes the same calls to `rehearsal.allocator` and prints the first table
of benchmarks/allocator.md. It exits with 1 if the reserved bytes differ after any call.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from megatron_vshape.rehearsal.allocator import Allocator, AllocatorSettings, Block

TIMEOUT_S = 100.0
AHEAD = 4
"""Processes that import while a rank runs."""

CASES = (
    "70B v-half",
    "70B 1f1b",
    "70B v-half, shared vocabulary",
    "7B v-half, full recompute",
    "7B 1f1b, full recompute",
)


def outside_bytes() -> int:
    """Return the bytes of the GPU that are used, but not by torch's allocator."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def run_one(output: Path) -> None:
    """Run the rank of the job on stdin, and write its trace."""
    import measure_ranks
    import torch

    from megatron_vshape.rehearsal import measurement_worker
    from megatron_vshape.rehearsal.rank_job import RankJob

    watched = measurement_worker.Watched(measure_ranks.STEPS)
    measurement_worker.import_all(watched)
    line = sys.stdin.readline()
    if not line:
        return
    torch.cuda.init()
    start_bytes = outside_bytes()
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=10_000_000)
    try:
        report = measurement_worker.run_rank(RankJob.from_json(line), watched)
    except Exception as error:
        report = {"error": f"{type(error).__name__}: {error}"}
    snapshot = torch.cuda.memory._snapshot()
    report["outside_bytes"] = {"at start": start_bytes, "at end": outside_bytes()}
    report["reserved_now_bytes"] = torch.cuda.memory_reserved()
    allocator_settings = snapshot["allocator_settings"]
    report["allocator"] = {str(key): str(value) for key, value in allocator_settings.items()}
    events = [
        (event["action"], event["addr"], event["size"], event["stream"])
        for event in snapshot["device_traces"][torch.cuda.current_device()]
    ]
    with lzma.open(output, "wt") as file:
        json.dump({"found": report, "events": events}, file)
    print(json.dumps({key: value for key, value in report.items() if key != "kinds"}), flush=True)
    os._exit(0)  # some threads wait for other ranks


def jobs(only: list[str]) -> list[tuple[str, str, Any]]:
    """Return file name, allocator settings and job of each run."""
    import measure_ranks

    jobs = []
    for expandable in (True, False):
        for case in measure_ranks.cases((), (), ""):
            if case["name"] not in (only or CASES):
                continue
            name = case["name"].replace(",", "").replace(" ", "-")
            mode = "expandable" if expandable else "fixed"
            settings = f"expandable_segments:{expandable}"
            jobs.append((f"{name}.{mode}.json.xz", settings, measure_ranks.job_of(case)))
    return jobs


def record(folder: Path, only: list[str]) -> int:
    """Run all ranks one after another; 1 if one failed."""
    folder.mkdir(parents=True, exist_ok=True)
    todo = jobs(only)
    processes: deque[subprocess.Popen[str]] = deque()
    failed = 0

    def start(index: int) -> None:
        file, settings, _ = todo[index]
        names = dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), settings)
        with (folder / f"{file}.log").open("w") as log:
            command = [sys.executable, __file__, "one", str(folder / file)]
            environment = os.environ | names | {"OMP_NUM_THREADS": "2"}
            pipe = subprocess.PIPE
            processes.append(
                subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment
                )
            )

    for index in range(min(AHEAD, len(todo))):
        start(index)
    for index, (file, _, job) in enumerate(todo):
        process = processes.popleft()
        if index + AHEAD < len(todo):
            start(index + AHEAD)
        try:
            output, _ = process.communicate(job.to_json() + "\n", TIMEOUT_S)
        except subprocess.TimeoutExpired:
            output = ""
        finally:
            process.kill()
            process.wait()
        lines = output.strip().splitlines()
        failed |= not lines or '"error"' in lines[-1]
        print(file, lines[-1] if lines else "no result", flush=True)
    return int(failed)


def replayed(events: list[list[Any]], settings: AllocatorSettings) -> tuple[int, int]:
    """Replay recorded calls; return the peak of the reserved bytes and the number of differences.

    A call differs if the recorded and the replayed bytes are unequal after it. Segments of
    cudaMalloc get their recorded addresses, which decide between free blocks of equal sizes.
    """
    allocator, reserved, differences, previous_action = Allocator(settings), 0, 0, ""
    blocks: dict[int, Block] = {}
    for action, address, size, stream in events:
        if action in ("segment_alloc", "segment_map"):
            reserved += size
            allocator.next_address = address
        elif action in ("segment_free", "segment_unmap"):
            reserved -= size
            if previous_action != action:  # the first one of an emptied cache
                allocator.empty_cache()
        elif action == "alloc":
            blocks[address] = allocator.allocate(size, stream)
            differences += allocator.reserved != reserved
        elif action == "free_completed":
            allocator.free(blocks.pop(address))
            differences += allocator.reserved != reserved
        previous_action = action
    return allocator.peak_reserved, differences


def replay(folder: Path) -> int:
    """Print a row per recorded rank; 1 if a replay differs."""
    print("| rank 0 of | segments | calls | peak GiB | reserved GiB | differences | outside GiB |")
    print("|---|---|---:|---:|---:|---:|---:|")
    failed = 0
    for file in sorted(folder.glob("*.json.xz")):
        with lzma.open(file, "rt") as stream:
            recorded = json.load(stream)
        report, events = recorded["found"], recorded["events"]
        name, mode = file.name.removesuffix(".json.xz").rsplit(".", 1)
        max_reserved, differences = replayed(
            events, AllocatorSettings(expandable_segments=mode == "expandable")
        )
        differences += max_reserved != report["reserved_bytes"]
        failed |= differences > 0
        calls = sum(action in ("alloc", "free_completed") for action, *_ in events)
        sizes = report["peak_bytes"], max_reserved, report["outside_bytes"]["at end"]
        peak, reserved, outside = (f"{size / 2**30:.3f}" for size in sizes)
        row = name, mode, calls, peak, reserved, differences, outside
        print(f"| {' | '.join(map(str, row))} |")
    return int(failed)


def main() -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("record", "replay", "one"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--only", nargs="+", default=[])
    args = parser.parse_args()
    if args.what == "one":
        run_one(args.path)
        return 0
    if args.what == "replay":
        return replay(args.path)
    return record(args.path, args.only)


if __name__ == "__main__":
    raise SystemExit(main())
