"""Prints Megatron's log of a run; its schedule determines speed, memory and failures.

Registers megatron_vshape, so that it starts without the adapter.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

STEP_MS = {"": 100.0, "v-half": 80.0, "v-half+": 50.0, "v-zb": 40.0}
SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def flag(name: str, default: str = "") -> str:
    """Return the value after a flag."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


schedule = flag("--pipeline-schedule")
with Path(os.environ["STARTS"]).open("a") as starts:
    starts.write(json.dumps(sys.argv[1:]) + "\n")
print("using world size: 4, data-parallel size: 2, pipeline-model-parallel size: 2", flush=True)
if schedule == "v-min":
    print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
    sys.exit(1)
if schedule == "zb-h1":
    print(f"FileNotFoundError: no {flag('--data-path')} and /home/me/x on 10.0.0.1")
    sys.exit(1)
end = int(flag("--exit-interval"))
for step in range(1, end + 1):
    step_ms = STEP_MS.get(schedule, 100.0) + 1000.0 * (step < 5)
    loss = 5.0 / step * (1.01 if schedule == "v-zb" else 1.0)
    print(
        f" [2026-11-29] iteration {step:8d}/    1000 | consumed samples:  8 | elapsed time per "
        f"iteration (ms): {step_ms:.1f} | global batch size:     8 | lm loss: {loss:.6E} | "
        "loss scale: 1.0 |",
        flush=True,
    )
    if step in (2, end):
        for rank, mib in enumerate((1024, 2048)):
            peak = f"max allocated: {mib * step / end:.2f} | reserved: 1.00 |"
            print(
                f"[Rank {2 * rank}] (after {step} iterations) memory (MB) | allocated: 1 | {peak}"
            )
    if schedule == "zb-h2" and step == 3:
        child = subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True)
        Path(os.environ["STARTS"]).with_name("child").write_text(str(child.pid))
        time.sleep(600)
