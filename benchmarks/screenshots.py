#!/usr/bin/env python3
"""Take the picture of the playground in docs/planning.md.

    python benchmarks/screenshots.py [--out docs/figures]

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
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
STATE = "d=8&m=24&s=v-half&c=1,1.15,0.85,0.05&t=light"
HOVER = (0.46, 0.22)  # of the timeline's width and height


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), metavar="DIR")
    options = parser.parse_args()
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        parser.error("there is no Chromium; scripts/test.sh --browser installs it")
    options.out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        served() as url,
        browser(path, folder) as page,
    ):
        take(page, url, options.out / "playground.png")


@contextmanager
def served() -> Iterator[str]:
    """Serve the playground; yields its address."""
    command = [sys.executable, "-m", "megatron_vshape.cli.main", "playground", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        match = re.search(r"http://\S+", process.stdout.readline() if process.stdout else "")
        if match is None:
            raise RuntimeError("the playground did not start; its message is above")
        yield match[0]
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


def take(page: Any, url: str, path: Path) -> None:
    page.set_viewport_size({"width": 1280, "height": 940})
    page.goto(f"{url}#{STATE}")
    page.wait_for_selector('#stage[aria-busy="false"]', timeout=300_000)
    page.wait_for_timeout(400)
    box = page.locator("canvas.track").first.bounding_box()
    page.mouse.move(box["x"] + HOVER[0] * box["width"], box["y"] + HOVER[1] * box["height"])
    page.wait_for_timeout(200)
    page.screenshot(path=str(path))
    with Image.open(path) as picture:  # 256 colours are enough, and a third of the size
        picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
