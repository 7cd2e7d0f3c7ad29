"""Fixtures: the application, a server on a free port, and a browser if one is installed."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from megatron_vshape.rehearsal.gpus import GPUS

BASE = "http://127.0.0.1:8765"

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


def _require(*modules: str) -> None:
    for module in modules:
        pytest.importorskip(module, reason="the extras `playground` and `dev` are not installed")


@pytest.fixture(scope="session")
def client() -> Iterator[Any]:
    """A client of the application without a socket."""
    _require("starlette", "httpx")
    from starlette.testclient import TestClient

    from megatron_vshape.playground.server import loopback_hosts, make_app

    gpus = {name: gpu.memory_bytes for name, gpu in GPUS.items()}
    app = make_app(loopback_hosts(8765), gpus=gpus)
    with TestClient(app, base_url=BASE, raise_server_exceptions=True) as client:
        yield client


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of a server in a separate process."""
    with _serving() as (_, url):
        yield url


@pytest.fixture
def mortal_server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a new process group, which the test may end, and its address."""
    with _serving(start_new_session=True, stderr=subprocess.PIPE) as server:
        yield server


@contextmanager
def _serving(**popen_options: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    _require("starlette", "uvicorn")
    code = "import sys; from megatron_vshape.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "playground", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **popen_options)
    try:
        match = re.search(r"http://\S+", process.stdout.readline())
        assert match, "the server printed no address"
        yield process, match[0]
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium, driven by Playwright."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is not installed: scripts/test.sh --browser does"
    )
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("there is no Chromium: scripts/test.sh --browser installs it")
    with playwright.sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            str(tmp_path_factory.mktemp("profile")),
            executable_path=path,
            headless=True,
            args=FLAGS,
            viewport={"width": 1280, "height": 900},
            accept_downloads=True,
        )
        context.set_default_timeout(120_000)
        yield context
        context.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A new page; an error in its scripts fails the test."""
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.close()
    assert not errors
