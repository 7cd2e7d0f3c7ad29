"""Says what Megatron's trainer says, as fast or as badly as its flags say."""

import json
import os
import sys
import time
from pathlib import Path


def flag(name: str, default: str) -> str:
    """Return the value after a flag."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


if "--log-starts" in sys.argv:
    with Path(flag("--log-starts", "")).open("a") as log:
        log.write(f"{flag('--pipeline-schedule', '?')} {flag('--micro-batch-size', '?')}\n")
if "--out-of-memory" in sys.argv:
    print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
    print("RuntimeError: Connection closed by peer")
    sys.exit(1)
if "--broken" in sys.argv or not Path(flag("--broken-unless", ".")).exists():
    print("usage: pretrain_gpt.py [-h]")
    print("pretrain_gpt.py: error: unrecognized arguments: --broken")
    print("RuntimeError: Connection closed by peer")
    sys.exit(2)
for step in range(int(flag("--train-iters", "1"))):
    time.sleep(float(flag("--sleep", "0")))
    took_ms = 100.0 * int(flag("--micro-batch-size", "1")) + (1000.0 if step == 0 else 0.0)
    print(f" iteration {step + 1} | elapsed time per iteration (ms): {took_ms:.1f} |", flush=True)
    with Path(os.environ.get("MEGATRON_VSHAPE_FIGURES", os.devnull)).open("a") as figures:
        figures.write(json.dumps({"step_s": took_ms * 1e-3, "bubble": None}) + "\n")
