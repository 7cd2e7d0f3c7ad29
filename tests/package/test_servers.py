"""Processes shared by the workers of pytest-xdist."""

import os
from pathlib import Path
from typing import IO

import servers

SERVER = """
import os, servers

def handle(requests):
    for line in requests:
        print(os.getppid(), line, file=requests, end="", flush=True)

servers.serve(handle)
"""


def ask(requests: IO[str], text: str) -> tuple[int, str]:
    """Return the number of the server's process, and the text that it sends back."""
    print(text, file=requests, flush=True)
    number, _, answer = requests.readline().partition(" ")
    return int(number), answer.strip()


def test_connections_share_a_process_that_ends_after_the_last(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(servers.__file__).parent)}
    command = ["-c", SERVER]
    first, second = (servers.connect(tmp_path, "echo", command, environment) for _ in range(2))
    (process, answer), (same_process, other_answer) = ask(first, "a"), ask(second, "b")
    assert (answer, other_answer) == ("a", "b")
    assert process == same_process
    first.close()
    assert ask(second, "c") == (process, "c")
    second.close()
    os.waitpid(process, 0)
    third = servers.connect(tmp_path, "echo", command, environment)
    assert ask(third, "d")[0] != process
    third.close()
