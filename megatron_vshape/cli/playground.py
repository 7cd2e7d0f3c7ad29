"""megatron-vshape playground: serve the web UI on this machine."""

import argparse
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_vshape.cli.files import check_installed
from megatron_vshape.core.model.kinds import ScheduleError

if TYPE_CHECKING:
    from megatron_vshape.playground.given import Given

PORT = 8765
COSTS = Path("configs") / "costs"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_EVERY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Wildcard addresses, with an address to open."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="Schedule, costs and trace files to offer; the server reads no other file",
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=PORT,
        metavar="N",
        help=f"Port; 0: any free port (default: {PORT})",
    )
    parser.add_argument(
        "--host",
        default=_LOOPBACK[0],
        metavar="ADDRESS",
        help=f"Address to listen on (default: {_LOOPBACK[0]}, this machine only)",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME[:PORT]",
        help="Further host name that browsers may use, for example through a tunnel",
    )
    parser.add_argument("--open", action="store_true", help="Open the page in the browser")


def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C and return 0."""
    check_installed("the playground", "playground", "starlette", "uvicorn")
    from megatron_vshape.playground.given import read_given, read_presets

    given = [*read_given(options.files), *read_presets(COSTS)]
    listener = _listen(options.host, options.port)
    address, port = listener.getsockname()[:2]
    host = _EVERY.get(address, options.host)
    url = f"http://{_in_url(host)}:{port}/"
    print(f"the playground is at {url}  (Ctrl-C ends it)", flush=True)
    if address in _EVERY and not options.allow_host:
        print("other machines need --allow-host NAME, the name they call this one by", flush=True)
    elif address in _EVERY:
        names = ", ".join(options.allow_host)
        print(f"every machine that reaches this one as {names} can use it", flush=True)
    elif host not in _LOOPBACK:
        print("every machine that reaches this address can use it", flush=True)
    if options.open:
        import webbrowser

        webbrowser.open(url)
    _serve(listener, given, _hosts(host, port), _tunnels(options.allow_host, port))
    return 0


def _serve(
    listener: socket.socket, given: "Sequence[Given]", hosts: Sequence[str], tunnels: Sequence[str]
) -> None:
    import uvicorn

    from megatron_vshape.playground.server import make_app
    from megatron_vshape.rehearsal.gpus import GPUS

    # An estimate uses many cores and gigabytes: for the users of this machine only.
    is_local = listener.getsockname()[0] in _LOOPBACK and not tunnels
    gpus = {name: gpu.memory_bytes for name, gpu in GPUS.items()} if is_local else {}
    config = uvicorn.Config(
        make_app(hosts, given, tunnels, gpus),
        access_log=False,
        log_level="warning",
        server_header=False,
        date_header=False,
        limit_concurrency=64,
        timeout_graceful_shutdown=1,
        ws="none",
    )
    uvicorn.Server(config).run(sockets=[listener])


def _hosts(host: str, port: int) -> Sequence[str]:
    from megatron_vshape.playground.server import hosts_at, loopback_hosts

    return loopback_hosts(port) + hosts_at(port, _in_url(host))


def _tunnels(names: Sequence[str], port: int) -> list[str]:
    """Return the host names of a tunnel to the server, with the server's port and without."""
    found = []
    for name in names:
        found += [name] if ":" in name.rpartition("]")[2] else [name, f"{name}:{port}"]
    return found


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        ScheduleError: the address or port cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except (OSError, UnicodeError, TypeError) as error:  # a name that cannot be asked for
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise ScheduleError(
            f"--host {host} --port {port}: cannot listen there: {reason}; --port 0 uses a free one"
        ) from None
    return listener


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to 65535")
    return int(text)
