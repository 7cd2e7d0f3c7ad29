"""Train with and without `--pipeline-replan drift:N%`: how often it plans anew, and its price.

    python scripts/drift_table.py [--steps 2000] [--drift 5] [--folder runs/drift] [--disturb]

Both runs are `auto` in Megatron's trainer on two pipeline ranks over gloo, on the same text and
with the same weights at first (as in scripts/loss_parity.py), a model of four small layers.
Printed for each: how often steps were found to have drifted, how many steps have the very loss of
the run without, and the processor time of all its processes. With --disturb
another process works on the same processors for 20 of every 40 seconds, so that steps do drift.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from loss_parity import ROOT, Settings, logged, train

ANEW = "measured anew"
MEASURED = "measured costs: "  # once at first, and once for every time it is measured anew
SMALL = (
    "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 32 --seq-length 32 "
    "--max-position-embeddings 32 --clip-grad 0"
).split()
DISTURBING = """
import time
while True:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        pass
    time.sleep(20)
"""


@contextmanager
def disturbed(is_asked: bool) -> Iterator[None]:
    """Have another process work now and then, if that is asked for."""
    if not is_asked:
        yield
        return
    other = subprocess.Popen([sys.executable, "-c", DISTURBING])
    try:
        yield
    finally:
        other.kill()
        other.wait()


def processor_s() -> float:
    """Return the processor time of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Train twice and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--drift", type=int, default=5, help="per cent")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "drift")
    parser.add_argument("--disturb", action="store_true")
    options = parser.parse_args()
    auto = "--pipeline-schedule auto --pipeline-profile-iterations 10:13"
    runs = {"auto": auto, "drift": f"{auto} --pipeline-replan drift:{options.drift}%"}
    settings = Settings("drift", tuple(SMALL), options.steps, runs, ranks=2)
    folder = options.folder.resolve()
    flags = ("--train-iters", str(options.steps))
    losses: dict[str, np.ndarray] = {}
    head = "run", "steps", "drifted", "measured", "losses equal", "processor s"
    print("".join(f"{each:>14}" for each in head))
    for name in runs:
        before_s = processor_s()
        with disturbed(options.disturb):
            train(settings, name, folder / name, *flags)
        used_s = processor_s() - before_s
        losses[name] = logged(folder / name).loss
        log = (folder / name / "log").read_text(errors="replace")
        same = int(np.sum(losses[name] == losses["auto"]))
        figures = len(losses[name]), log.count(ANEW), log.count(MEASURED), same, round(used_s)
        print("".join(f"{each:>14}" for each in (name, *figures)), flush=True)


if __name__ == "__main__":
    main()
