"""Checks of losses at the end of a step find the same results as checks within the step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from mcore.farm import Farm
from megatron.core import rerun_state_machine
from megatron.core.rerun_state_machine import RerunMode, RerunState, RerunStateMachine
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.program.instructions import Run
from megatron_vshape.mcore.hooks.session import Session, validate_result
from megatron_vshape.mcore.step.losses import checked_late
from megatron_vshape.runtime.program_runner import Place

ORIGINAL = vars(RerunStateMachine)["validate_result"]
NAN, INF = float("nan"), float("inf")
PLUGIN = "plugins:printed_checks"

Losses = list[float]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    """Return the session of a replaced `validate_result`."""
    pipeline: Any = object()
    session = Session(pipeline)
    original = getattr(ORIGINAL, "__wrapped__", ORIGINAL)  # where another test has registered
    monkeypatch.setattr(RerunStateMachine, "validate_result", validate_result(session, original))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return session


@pytest.fixture
def machine() -> RerunStateMachine:
    """Return one that validates, past its first step."""
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    machine.state = RerunState.INITIAL_RUN
    machine.first_iteration_complete = True
    return machine


def check_loss(machine: RerunStateMachine, loss: Tensor) -> None:
    """Check a loss as Megatron's pretrain_gpt.py does."""
    large = partial(machine.is_unexpectedly_large, threshold=10, context="loss", num_samples=2)
    for rejects, message, fatal in (
        (torch.isnan, "found NaN", True),
        (torch.isinf, "found Inf", True),
        (large, "Spiky loss", False),
    ):
        machine.validate_result(
            result=loss, rejection_func=rejects, message=message, tolerance=0.0, fatal=fatal
        )


def run_checks(machine: RerunStateMachine, session: Session | None, losses: Losses) -> None:
    """Run the F of every microbatch, with the checks late if there is a session for that."""

    def passes() -> None:
        for loss in losses:
            check_loss(machine, torch.tensor(loss))

    if session is None:
        passes()
        return
    with checked_late(session.step, Place()) as checks:
        passes()
    checks.make()


def findings_of(machine: RerunStateMachine) -> dict[str, Any]:
    """Return everything that validating has left in the machine."""
    names = "rerun_requested checkpoint_requested continue_requested failed_validation_call"
    names += " initial_result validation_counts large_value_counts max_values saved_results"
    return {name: repr(getattr(machine, name)) for name in names.split()}


STEPS: dict[str, tuple[Losses, Losses]] = {  # the step, and the step run again
    "good": ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]),
    "NaN, reproduced": ([1.0, NAN, 3.0, INF], [1.0, NAN, 3.0, INF]),
    "NaN, not reproduced": ([1.0, NAN, 3.0], [1.0, 2.0, 3.0]),
    "inf": ([1.0, 2.0, INF], [1.0, 2.0, INF]),
    "spiky": ([1.0, 2.0, 30.0, 3.0], [1.0, 2.0, 30.0, 3.0]),
}


@pytest.mark.parametrize("mode", [RerunMode.VALIDATE_RESULTS, RerunMode.REPORT_DETERMINISM_STATS])
@pytest.mark.parametrize("name", STEPS)
def test_late_checks_find_and_log_the_same_results(
    name: str, mode: RerunMode, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = []
    for late_session in (None, session):
        caplog.clear()
        machine = RerunStateMachine(mode=mode)
        machine.first_iteration_complete = True
        outcomes_of_losses = []
        states = (RerunState.INITIAL_RUN, RerunState.RERUNNING_IN_PLACE)
        with caplog.at_level(logging.INFO, rerun_state_machine.__name__):
            for state, losses in zip(states, STEPS[name], strict=True):
                machine.state = state
                machine.validation_counts.clear()
                run_checks(machine, late_session, losses)
                outcomes_of_losses.append(findings_of(machine))
        outcomes.append((outcomes_of_losses, [record.getMessage() for record in caplog.records]))
    assert outcomes[0] == outcomes[1]
    bad = mode == RerunMode.VALIDATE_RESULTS and name != "good"
    assert any("nexpected result" in line for line in outcomes[0][1]) == bad


def test_where_nothing_is_repeated_the_exception_is_the_same(session: Session) -> None:
    texts = []
    for late_session in (None, session):
        with pytest.raises(RuntimeError) as error:
            run_checks(RerunStateMachine(), late_session, [1.0, INF, NAN])
        texts.append(str(error.value))
    assert texts[0] == texts[1]
    assert "Unexpected result inf (message='found Inf')" in texts[0]


def test_a_check_that_raises_leaves_the_place_where_it_was_asked_for(session: Session) -> None:
    place, machine = Place(), RerunStateMachine()

    def passes(losses: Losses) -> None:
        with checked_late(session.step, place) as checks:
            for microbatch, loss in enumerate(losses):
                place.instruction = Run(Pass(Kind.F, 7, microbatch))
                check_loss(machine, torch.tensor(loss))
            place.instruction = None
        checks.make()

    with pytest.raises(RuntimeError, match="Unexpected result nan"):
        passes([1.0, NAN, 3.0])
    assert place.instruction == Run(Pass(Kind.F, 7, 1))
    passes([1.0, 2.0])
    assert place.instruction is None


def test_checked_loss_is_the_one_before_megatron_divides_it(
    session: Session, machine: RerunStateMachine
) -> None:
    with checked_late(session.step, Place()) as checks:
        loss = torch.tensor(30.0)
        check_loss(machine, loss)
        loss /= 100
    checks.make()
    assert machine.max_values == {"loss": 30.0}


def test_after_a_pass_that_failed_nothing_is_checked(session: Session) -> None:
    def fail() -> None:
        with checked_late(session.step, Place()):
            check_loss(RerunStateMachine(), torch.tensor(NAN))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert session.step.late_checks is None


def record_and_accept(calls: list[str], result: Any) -> bool:
    calls.append(f"{result}")
    return False


STRANGE: list[tuple[str, Callable[[list[str]], dict[str, Any]]]] = [
    (
        "a function that may look elsewhere",
        lambda calls: {"rejection_func": partial(record_and_accept, calls)},
    ),
    ("a number", lambda calls: {"result": 2.0, "rejection_func": lambda x: calls.append("2.0")}),
    (
        "a vector",
        lambda calls: {
            "result": torch.ones(1),
            "rejection_func": partial(record_and_accept, calls),
        },
    ),
]


@pytest.mark.parametrize(("what", "arguments"), STRANGE, ids=[case[0] for case in STRANGE])
def test_checks_that_cannot_be_deferred_run_immediately_in_order(
    what: str,
    arguments: Callable[[list[str]], dict[str, Any]],
    session: Session,
    machine: RerunStateMachine,
) -> None:
    calls: list[str] = []
    with checked_late(session.step, Place()) as checks:
        check_loss(machine, torch.tensor(1.0))
        machine.validate_result(
            **{"result": torch.tensor(2.0), "message": "own"} | arguments(calls)
        )
        assert len(calls) == 1
        assert machine.large_value_counts == {"loss": 1}
        check_loss(machine, torch.tensor(3.0))
        assert machine.large_value_counts == {"loss": 1}
    checks.make()
    assert machine.large_value_counts == {"loss": 2}


class Calls(TorchDispatchMode):
    """Keeps the names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_no_number_is_read_while_passes_run(session: Session, machine: RerunStateMachine) -> None:
    reads = {"_local_scalar_dense", "is_nonzero", "item", "equal"}
    with Calls() as at_once:
        run_checks(machine, None, [1.0, 2.0])
    assert reads & set(at_once.names)
    with Calls() as calls:
        with checked_late(session.step, Place()) as checks:
            for loss in (1.0, 2.0):
                check_loss(machine, torch.tensor(loss))
            assert "stack" not in calls.names
        assert calls.names.count("stack") == 1  # copied, and read by nobody yet
        assert not reads & set(calls.names)
        checks.make()
    assert calls.names.count("stack") == 1
    assert reads & set(calls.names)


@pytest.mark.gpu
def test_no_check_waits_for_the_device(session: Session, machine: RerunStateMachine) -> None:
    losses = [torch.tensor(loss, device="cuda") for loss in (1.0, NAN, 3.0)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with checked_late(session.step, Place()) as checks:
            for loss in losses:
                check_loss(machine, loss)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    checks.make()
    assert machine.rerun_requested
    assert machine.initial_result.device.type == "cpu"


def test_training_checks_every_loss_after_the_passes(farm: Farm) -> None:
    flags = ("--pipeline-schedule", "v-half", "--rerun-mode", "disabled", "--train-iters", "2")
    run_checks = farm.run(2, *flags, plugin=PLUGIN).check()
    passes, outside = "isnan of a loss in a pass", "isnan of a loss after the passes"
    last = "isnan of a loss after the gradients"
    assert [text.count(passes) for text in run_checks.output] == [0, 0]
    assert run_checks.output[0].count(last) >= 2 * 8  # two steps of eight microbatches
    assert run_checks.output[0].count(outside) == 0
    stock = farm.run(2, "--rerun-mode", "disabled", "--train-iters", "2", plugin=PLUGIN).check()
    assert stock.output[1].count(passes) == 2 * 8
