#!/usr/bin/env python3
"""Take the pictures of the playground, one of which docs/planning.md shows.

    python benchmarks/screenshots.py [--out docs/figures] [NAME ...]

Needs the extras `playground`, `browser` and `draw` and Chromium; scripts/test.sh --browser installs
them.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
REAL = "c=1,1.15,0.85,0.05"
LLAMA_3_8B = """torchrun --nproc-per-node 8 --nnodes 4 pretrain_gpt.py \\
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \\
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm \\
    --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights \\
    --vocab-size 128256 --seq-length 8192 --max-position-embeddings 8192 --bf16 \\
    --micro-batch-size 1 --global-batch-size 128 --pipeline-model-parallel-size 4 \\
    --use-distributed-optimizer"""


@dataclass(frozen=True, slots=True)
class Shot:
    """One state of the page; `hover` is a place on the picture, in shares of it."""

    name: str
    state: str
    width: int = 1280
    height: int = 940
    hover: tuple[float, float] | None = None
    whole: bool = False
    command: str = ""  # to estimate


SHOTS = (
    Shot("playground", f"d=8&m=24&s=v-half&{REAL}&t=light", hover=(0.46, 0.22)),
    Shot("playground-dark", f"d=8&m=24&s=plan:10:&{REAL}&f=9&t=dark"),
    Shot("playground-steps", "tab=steps&d=6&m=10&s=v-half&t=light", height=1250),
    Shot("playground-compare", f"tab=compare&d=8&m=24&s=1f1b~v-min~v-half~v-zb&{REAL}&t=light"),
    Shot("playground-large", "d=64&m=1024&s=v-half&w=300,420&t=light", height=1000),
    Shot("playground-estimate", "tab=estimate&t=light", command=LLAMA_3_8B),
    Shot("playground-narrow", f"d=8&m=24&s=v-half&{REAL}&t=light", width=390, height=1100),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these; default all")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), metavar="DIR")
    options = parser.parse_args()
    unknown = set(options.names) - {shot.name for shot in SHOTS}
    if unknown:
        parser.error(f"there is no picture {', '.join(sorted(unknown))}")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        parser.error("there is no Chromium; scripts/test.sh --browser installs it")
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = [shot for shot in SHOTS if not options.names or shot.name in options.names]
    with (
        tempfile.TemporaryDirectory() as folder,
        served() as url,
        browser(path, folder) as page,
    ):
        for shot in wanted:
            take(page, url, shot, options.out / f"{shot.name}.png")
            print(options.out / f"{shot.name}.png")


@contextmanager
def served() -> Iterator[str]:
    """Serve the playground; yields its address."""
    command = [sys.executable, "-m", "megatron_vshape.cli.main", "playground", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        found = re.search(r"http://\S+", process.stdout.readline() if process.stdout else "")
        if found is None:
            raise RuntimeError("the playground did not start; its message is above")
        yield found[0]
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def browser(path: str, folder: str) -> Iterator[Any]:
    with sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            f"{folder}/profile",
            executable_path=path,
            headless=True,
            args=FLAGS,
            device_scale_factor=1.5,
        )
        yield context.new_page()
        context.close()


def take(page: Any, url: str, shot: Shot, path: Path) -> None:
    page.set_viewport_size({"width": shot.width, "height": shot.height})
    page.goto("about:blank")
    page.goto(f"{url}#{shot.state}")
    page.wait_for_selector('#stage[aria-busy="false"]', timeout=300_000)
    page.wait_for_timeout(400)
    if shot.command:
        page.fill("#estimate-command", shot.command)
        page.fill("#estimate-number", "32")
        page.click("#estimate-run")
        page.wait_for_selector("#verdict", timeout=900_000)
    if shot.hover is not None:
        box = page.locator("canvas.track").first.bounding_box()
        across, down = shot.hover
        page.mouse.move(box["x"] + across * box["width"], box["y"] + down * box["height"])
        page.wait_for_timeout(200)
    page.screenshot(path=str(path), full_page=shot.whole)
    with Image.open(path) as picture:  # 256 colours are enough, and a third of the size
        picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    page.mouse.move(0, 0)


if __name__ == "__main__":
    main()
