"""Compare the losses and the first step of training with and without --pipeline-warmup.

    python benchmarks/check_warmup.py

Two ranks share one GPU, over NCCL, with the small GPT of bench_nccl.py; with `--device cpu`, they
use gloo. The losses must be equal digit by digit. Exits with 1 if they are not, or if a run fails.
Ranks that share a GPU take turns: the seconds show that the warm-up ran, not the time saved.
"""

from __future__ import annotations

import argparse
import re
import sys

from bench_nccl import (  # finds the scripts
    TrainingError,
    Trial,
    choose_device,
    print_values,
    provenance,
    train,
)

FLAG = "--pipeline-warmup"
RANKS = 2


def run_both(device: str) -> bool:
    """Print losses and milliseconds per step of both runs; return whether the losses are equal."""
    backend = "nccl" if device == "cuda" else "gloo"
    losses = {}
    for flags in ((), (FLAG,)):
        outputs: list[str] = []
        name = FLAG if flags else "without"
        losses[name], _ = train(Trial.AS_IS, RANKS, backend, device, flags, outputs)
        text = "".join(outputs)
        steps_ms = re.findall(r"elapsed time per iteration \(ms\): (\S+)", text)
        print(f"{name}: losses {losses[name]}, ms per step {' '.join(steps_ms)}", flush=True)
        warmups = re.findall(r"pipeline warm-up: .*", text)
        print(*warmups, sep="\n", flush=True)
        if len(warmups) != len(flags):
            return False
    return bool(losses[FLAG]) and losses[FLAG] == losses["without"]


def main() -> int:
    """Run both trainings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    choose_device(args.device)
    print_values(provenance(args))
    try:
        is_equal = run_both(args.device)
    except TrainingError as error:
        texts = "\n".join(text[-3000:] for text in error.args)
        raise SystemExit(f"check_warmup: the ranks did not train\n{texts}") from None
    print(f"losses {'equal' if is_equal else 'different'}")
    return int(not is_equal)


if __name__ == "__main__":
    sys.exit(main())
