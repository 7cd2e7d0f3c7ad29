"""The page's application, a real server on a free port, and a browser where there is one."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.playground.given import read_given

BASE = "http://127.0.0.1:8765"

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


def _need(*modules: str) -> None:
    for module in modules:
        pytest.importorskip(module, reason="the extras `playground` and `dev` are not installed")


@pytest.fixture(scope="session")
def given_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A schedule and costs, as the command line would be given them."""
    folder = tmp_path_factory.mktemp("given")
    schedule = make("v-min", 4, 8)
    costs = Costs((900.0,) * 8, (1000.0,) * 8, (800.0,) * 8, 40.0, (2.0**30,) * 8, (2.0**29,) * 8)
    (folder / "mine.json").write_text(schedule.to_json())
    (folder / "measured_costs.json").write_text(costs.to_json())
    return sorted(folder.iterdir())


@pytest.fixture(scope="session")
def client(given_files: list[Path]) -> Iterator[Any]:
    """The application, asked without a socket."""
    _need("starlette", "httpx")
    from starlette.testclient import TestClient

    from megatron_vshape.playground.server import loopback_hosts, make_app

    app = make_app(loopback_hosts(8765), read_given(given_files))
    with TestClient(app, base_url=BASE, raise_server_exceptions=True) as client:
        yield client


@pytest.fixture(scope="session")
def server(given_files: list[Path]) -> Iterator[str]:
    """The address of a server of its own process."""
    with _serving(given_files) as (_, url):
        yield url


@pytest.fixture
def mortal_server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that the test may end, in a process group of its own, and its address."""
    with _serving([], start_new_session=True, stderr=subprocess.PIPE) as served:
        yield served


@contextmanager
def _serving(files: list[Path], **how: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    _need("starlette", "uvicorn")
    code = "import sys; from megatron_vshape.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "playground", "--port", "0", *map(str, files)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **how)
    assert process.stdout is not None
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found, "the server did not say where it is"
        yield process, found[0]
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
