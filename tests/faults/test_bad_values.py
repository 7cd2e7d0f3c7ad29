"""NaN, inf and exceptions: reported with stage, microbatch and pass, and no rank hangs."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.conftest import Inject, Tally
from faults.test_killed import V_HALF

SIX = (*V_HALF, "--train-iters", "6", "--save-interval", "100")
REPRODUCED, NOT_REPRODUCED = 16, 17  # Megatron's exit codes of a step that was bad
ALWAYS = 9  # steps, and repeated steps, from the first on


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("NaN in an activation", {"value": "nan", "rank": 2, "pass": "F2.3"}),
        pytest.param(
            "inf in a gradient",
            {"value": "inf", "rank": 1, "pass": "B6.2"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_megatron_repeats_a_bad_step(
    inject: Inject, tally: Tally, tmp_path: Path, what: str, fault: dict[str, object]
) -> None:
    tally(what)
    spoil = {"what": "spoil", "step": 3, "times": ALWAYS} | fault
    run = inject([spoil], *SIX, "--save", str(tmp_path / "saved"))
    assert run.codes == [REPRODUCED] * 4, run.output


@pytest.mark.slow
def test_transient_bad_value_is_reported_as_not_reproducible(inject: Inject, tally: Tally) -> None:
    tally("NaN that does not come again")
    spoil = {"what": "spoil", "step": 3, "value": "nan", "rank": 2, "pass": "F2.3"}
    run = inject([spoil], *V_HALF, "--train-iters", "6")
    assert run.codes == [NOT_REPRODUCED] * 4
    assert "not reproducible" in run.output[2]


@pytest.mark.slow
def test_without_reruns_the_error_names_the_detecting_pass(inject: Inject, tally: Tally) -> None:
    tally("NaN with --rerun-mode disabled")
    spoil = {"what": "spoil", "step": 3, "value": "nan", "rank": 2, "pass": "F2.3"}
    run = inject([spoil], *V_HALF, "--train-iters", "6", "--rerun-mode", "disabled")
    assert run.codes == [1] * 4
    assert "found NaN in the loss of a microbatch" in run.output[0]
    assert (
        "rank 0 (device 0): in F7.3, the forward pass of stage 7 for microbatch 3, in "
        in (run.output[0])
    )


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
        assert (
            "whose connection failed" in run.output[other_rank]
            or "after " in run.output[other_rank]
        )
