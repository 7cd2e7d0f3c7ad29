"""megatron-vshape playground: serve the web UI on this machine."""

import argparse
import socket

from megatron_vshape.cli.files import check_installed
from megatron_vshape.core.model.kinds import ScheduleError

_PORT = 8765
_ADDRESS = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--port",
        type=_port,
        default=_PORT,
        metavar="N",
        help=f"Port; 0: any free port (default: {_PORT})",
    )
    parser.add_argument("--open", action="store_true", help="Open the page in the browser")


def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C and return 0."""
    check_installed("the playground", "playground", "starlette", "uvicorn")
    listener = _listen(options.port)
    port = listener.getsockname()[1]
    url = f"http://{_ADDRESS}:{port}/"
    print(f"the playground is at {url}  (Ctrl-C ends it)", flush=True)
    if options.open:
        import webbrowser

        webbrowser.open(url)
    _serve(listener, port)
    return 0


def _serve(listener: socket.socket, port: int) -> None:
    import uvicorn

    from megatron_vshape.playground.server import loopback_hosts, make_app
    from megatron_vshape.rehearsal.gpus import GPUS

    config = uvicorn.Config(
        make_app(loopback_hosts(port), {name: gpu.memory_bytes for name, gpu in GPUS.items()}),
        access_log=False,
        log_level="warning",
        server_header=False,
        date_header=False,
        limit_concurrency=64,
        timeout_graceful_shutdown=1,
        ws="none",
    )
    uvicorn.Server(config).run(sockets=[listener])


def _listen(port: int) -> socket.socket:
    """Return a socket that listens on this machine only.

    Raises:
        ScheduleError: the port cannot be used.
    """
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_ADDRESS, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ScheduleError(
            f"--port {port}: cannot listen there: {error.strerror or error}; --port 0 uses a free "
            "one"
        ) from None
    return listener


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to 65535")
    return int(text)
