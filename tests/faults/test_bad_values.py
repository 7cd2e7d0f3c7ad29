"""NaN, inf and exceptions: reported with stage, microbatch and pass, and no rank hangs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from faults.conftest import Inject, Tally
from faults.test_killed import V_HALF

SAVES = "--save-interval 100"
REPRODUCED, NOT_REPRODUCED = 16, 17  # Megatron's exit codes of a step that was bad
ALWAYS = 9  # steps, and repeated steps, from the first on


NAN = {"what": "spoil", "step": 3, "value": "nan", "rank": 2, "pass": "F2.3"}
INF = NAN | {"value": "inf", "rank": 1, "pass": "B6.2"}
IN_PASS = "rank 0 (device 0): in F7.3, the forward pass of stage 7 for microbatch 3, in "
BAD_VALUES: dict[str, tuple[dict[str, object], str, int, list[tuple[int, str]]]] = {
    # fault, further flags, exit code, and parts of the output with their ranks
    "NaN in an activation": (NAN | {"times": ALWAYS}, SAVES, REPRODUCED, []),
    "inf in a gradient": (INF | {"times": ALWAYS}, SAVES, REPRODUCED, []),
    "NaN that does not come again": (NAN, "", NOT_REPRODUCED, [(2, "not reproducible")]),
    "NaN with --rerun-mode disabled": (
        NAN,
        "--rerun-mode disabled",
        1,
        [(0, "found NaN in the loss of a microbatch"), (0, IN_PASS)],
    ),
}


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "NaN in an activation"))
        for name in BAD_VALUES
    ],
)
def test_a_bad_value_ends_the_run(inject: Inject, tally: Tally, tmp_path: Path, what: str) -> None:
    """Megatron repeats a bad step; without that, the error names the pass that detects it."""
    tally(what)
    fault, flags, code, texts = BAD_VALUES[what]
    saves = ("--save", str(tmp_path / "saved")) if flags == SAVES else ()
    run = inject([fault], *V_HALF, "--train-iters", "6", *flags.split(), *saves)
    assert run.codes == [code] * 4, run.output
    assert all(text in run.output[rank] for rank, text in texts)


@pytest.mark.parametrize(
    ("what", "rank", "work", "words"),
    [
        ("raise", 2, "F2.3", "the forward pass of stage 2 for microbatch 3"),
        pytest.param(
            "raise in the loss",
            0,
            "F7.5",
            "the forward pass of stage 7 for microbatch 5",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "raise",
            3,
            "W4.1",
            "the backward pass for the weights of stage 4 for microbatch 1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_exceptions_name_their_pass(
    inject: Inject, tally: Tally, what: str, rank: int, work: str, words: str
) -> None:
    tally(f"an exception: {what} in {work}")
    fault = {"what": what, "rank": rank, "step": 3, "pass": work}
    run = inject([fault], *V_HALF, "--train-iters", "6")
    assert run.codes == [1] * 4
    text = run.output[rank]
    assert "InjectedError: the fault of this test\n" in text
    assert f"device {rank} raised this in {work}, {words}\n" in text
    assert f"rank {rank} (device {rank}): in {work}, {words}, in iteration 3" in text
    for other_rank in {0, 1, 2, 3} - {rank}:
        assert f"rank {other_rank} (device {other_rank}): " in run.output[other_rank]
        assert re.search("whose connection failed|after ", run.output[other_rank])
