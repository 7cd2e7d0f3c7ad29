"""One plan: rank 0 plans for all ranks, all callers get the same, and ranks compare theirs."""

import json
import os
import random
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mcore.farm import Farm
from mcore.ranks import run_ranks
from torch import nn

from megatron_vshape.cli.main import main
from megatron_vshape.core.model.amounts import GIB
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import VOCABULARY, Kind, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Objective, load_schedule
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.planner import search
from megatron_vshape.core.program.lowering import DeferredWgradOverlap, lower
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.core.schedule_names import AUTO, PLUS_NAMES
from megatron_vshape.mcore.features.post_validation.optimizer import Backup
from megatron_vshape.mcore.observe.profiling import Profiler
from megatron_vshape.mcore.observe.report import (
    RunReport,
    StaticMemory,
    max_of_replicas,
    static_memory,
)
from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.setup import one_planner, plans
from megatron_vshape.mcore.setup.one_planner import RankZeroPlanner
from megatron_vshape.mcore.setup.plans import Agreement, Planner
from megatron_vshape.mcore.setup.run_config import ScheduleChoice
from megatron_vshape.mcore.step_state import StepState
from megatron_vshape.runtime.activation_tracker import ActivationTracker
from megatron_vshape.tuning.configurations import NONE, Configuration, Layout, SweepError
from megatron_vshape.tuning.predictor import plan_adaptive


def compare(
    rank: int,
    names: tuple[str, ...],
    counts: tuple[int, ...] = (),
    pairs: tuple[tuple[int, int], ...] = (),
    shares: tuple[float, ...] = (),
) -> str:
    """Return the error of a rank after comparing rank 0's schedule and then its own."""
    groups = [(pair, dist.new_group(pair)) for pair in pairs]
    local_groups = [group for pair, group in groups if rank in pair] or [None]
    agreement = Agreement()
    try:
        for index in (0, 0, rank, rank):
            program = lower(make(names[index], 2, counts[index] if counts else 4))
            overlaps = {
                Pass.parse("B0.0"): DeferredWgradOverlap(Pass.parse("W3.1"), share)
                for share in shares[index : index + 1]
            }
            agreement.check(program, overlaps, groups=local_groups)
    except ScheduleError as error:
        return str(error)
    return ""


HALF, ZERO = "v-half", "v-zb"
ROWS, COLUMNS = ((0, 1), (2, 3)), ((0, 2), (1, 3))
PLANNED = "has planned another order than rank 0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((HALF, HALF),), ""),
        (((HALF, HALF, ZERO),), f"rank 2 {PLANNED} for 4 microbatches: "),
        # Only dependent ranks need the same number of microbatches.
        (((HALF,) * 4, (4, 4, 3, 3), ROWS), ""),
        (((HALF,) * 4, (4, 4, 3, 3)), "rank 2 runs 3 microbatches in this step, rank 0 runs 4: "),
        (((HALF,) * 2, (4, 3)), "rank 1 runs 3 microbatches"),
        # Ranks of several groups compare through common ranks.
        (((HALF, HALF, HALF, ZERO), (), ROWS + COLUMNS), f"rank 3 {PLANNED}"),
        pytest.param(((ZERO,) * 2, (), (), (0.5, 0.5)), "", marks=pytest.mark.slow),
        pytest.param(
            ((ZERO,) * 2, (), (), (0.5, 0.25)), f"rank 1 {PLANNED}", marks=pytest.mark.slow
        ),
    ],
)
def test_different_plans_fail_on_all_ranks(
    farm: Farm, arguments: tuple[Any, ...], message: str
) -> None:
    texts = run_ranks(farm, len(arguments[0]), compare, *arguments)
    assert len(set(texts)) == 1
    assert texts[0].startswith(message)
    assert bool(texts[0]) == bool(message)


def memory_of_replicas(rank: int) -> list[StaticMemory]:
    group = SimpleNamespace(rank=lambda: rank // 2, size=lambda: 2)
    memory = StaticMemory(10, 10, 100 if rank == 2 else rank, 0, 0)
    return max_of_replicas(memory, group, lambda static_memory: static_memory.total)  # type: ignore[arg-type]


@pytest.mark.slow
def test_memory_of_the_largest_replica_counts(farm: Farm) -> None:
    expected = [StaticMemory(10, 10, 1, 0, 0), StaticMemory(10, 10, 100, 0, 0)]
    assert run_ranks(farm, 4, memory_of_replicas) == [expected] * 4


class Quantized(torch.Tensor):
    """A parameter that stores its bytes in an inner tensor, like Transformer Engine's FP8."""

    data_: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> "Quantized":
        wrapper = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16)
        wrapper.data_ = data
        return wrapper

    def get_data_tensors(self) -> list[torch.Tensor]:
        return [self.data_]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise NotImplementedError(func)


def test_quantized_parameters_count_their_storage() -> None:
    parameter = Quantized(torch.zeros(30, dtype=torch.uint8))
    with pytest.raises(RuntimeError):
        parameter.untyped_storage().data_ptr()
    chunk = SimpleNamespace(parameters=lambda: [parameter])
    optimizer = SimpleNamespace(param_groups=[{"params": [torch.zeros(15)]}])
    memory = static_memory([chunk], optimizer)  # type: ignore[list-item]
    assert (memory.parameters, memory.optimizer) == (30, 15 * 4 + 2 * 15 * 4)


def test_quantized_activations_count_their_storage() -> None:
    saved, weight = (Quantized(torch.zeros(size, dtype=torch.uint8)) for size in (30, 50))
    tracker = ActivationTracker([weight])
    tracker.add(saved)
    tracker.add(weight)
    tracker.ends(Pass(Kind.F, 0, 0))
    assert tracker.peak_bytes == 30


def test_workspace_of_passes_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    report = RunReport(StepState(), "auto", [], lambda _: None)  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5000)
    with report.training_step([], 4, 1):
        pass
    assert report.memory.within_passes == 4000
    planner = Planner(ScheduleChoice(2, "auto", limit_bytes=1e6))
    planner.reserve((10, 20))
    pipeline: Any = SimpleNamespace(options=Options("auto", 1.0))
    module = "megatron_vshape.mcore.observe.profiling"
    monkeypatch.setattr(
        f"{module}.max_of_replicas",
        lambda local_bytes, group, size: [local_bytes, 2 * local_bytes],
    )
    monkeypatch.setattr(f"{module}.dist.get_rank", lambda: 0)
    Profiler(pipeline, planner, report)._reserve_within_passes(None)  # type: ignore[arg-type]
    assert planner.static_bytes == (4010, 8020)


NAMES = (AUTO, AUTO, AUTO, *PLUS_NAMES, "v-min", "v-half", "v-zb")
DEVICES = 2


def draw_costs(draw: random.Random) -> Costs:
    """Draw costs of two stages per rank, in half of the cases with vocabulary parallelism."""

    def draw_per_stage(low: float, high: float) -> list[float]:
        return [round(draw.uniform(low, high), 2) for _ in range(2 * DEVICES)]

    data = {
        "forward_us": draw_per_stage(80, 120),
        "backward_us": draw_per_stage(90, 140),
        "weight_us": draw_per_stage(60, 100),
        "send_us": round(draw.uniform(0, 30), 2),
        "held_after_forward_bytes": draw_per_stage(0.8 * GIB, 1.2 * GIB),
        "held_after_backward_bytes": draw_per_stage(0.3 * GIB, 0.7 * GIB),
    }
    if draw.random() < 0.5:
        data |= {str(kind.time): [round(draw.uniform(2, 60), 2)] * 4 for kind in VOCABULARY}
        data["logits_bytes"] = [draw.choice((0.0, 0.1 * GIB))] * 4
    if draw.random() < 0.3:
        data["whole_backward_us"] = draw_per_stage(140, 170)
    return Costs.from_json(json.dumps(data))


def plan_by_trainer(name: str, microbatches: int, costs: Costs, limit: float | None) -> object:
    choice = ScheduleChoice(
        DEVICES,
        name,
        costs=costs,
        limit_bytes=limit,
        shards_output_layer=len(costs.extra_amounts) > 0,
    )
    return Planner(choice).plan_step(microbatches).schedule.order


def plan_by_command(file: Path, name: str, microbatches: int, limit: float | None) -> object:
    """Return the pass order from the `plan` or `export` command."""
    exported = file.with_name("made.json")
    sizes = ["--devices", str(DEVICES), "--microbatches", str(microbatches), "--costs", str(file)]
    if name == AUTO:
        costs = Costs.load(file)
        placement = ScheduleChoice(DEVICES, AUTO, costs=costs).placement
        question = PlanRequest(
            AUTO, DEVICES, microbatches, costs, limit=limit, placements=(placement,)
        )
        return plan_request(question).schedule.order
    assert main(["schedule", name, *sizes, "--export", str(exported)]) == 0
    return load_schedule(exported).order


def plan_by_sweep(microbatches: int, costs: Costs, limit: float) -> object:
    sizes = {"sequence_length": 8, "global_batch_size": microbatches, "pipeline_parallel": DEVICES}
    alone = dict.fromkeys(
        ("data_parallel", "tensor_parallel", "context_parallel", "microbatch_size"), 1
    )
    config = Configuration(AUTO, recompute=NONE, layout=Layout.EVEN, **sizes, **alone)
    placement = ScheduleChoice(DEVICES, AUTO, costs=costs).placement
    limits = [limit] * DEVICES
    return plan_adaptive(config, placement, costs, limits, Objective.MAKESPAN).schedule.order


def call_or_error(answer: object, *arguments: object) -> object:
    assert callable(answer)
    try:
        return answer(*arguments)
    except (ScheduleError, SweepError):
        return "refused"


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_trainer_command_and_sweep_return_equal_plans(
    count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(search, "default_steps", lambda problem: 200)
    draw, file, refused = random.Random(38), tmp_path / "costs.json", 0
    for _ in range(count):
        name, microbatches, costs = draw.choice(NAMES), draw.randrange(2, 5), draw_costs(draw)
        limit = draw.choice((None, draw.uniform(1.8, 5) * GIB)) if name == AUTO else None
        file.write_text(costs.to_json())
        one = call_or_error(plan_by_trainer, name, microbatches, costs, limit)
        assert one == call_or_error(plan_by_command, file, name, microbatches, limit)
        if limit is not None:
            assert one == call_or_error(plan_by_sweep, microbatches, costs, limit)
        refused += one == "refused"
    assert refused < count // 3


NOTHING = "rank 0, which plans for all ranks, has sent no plan within 0.1 s: see its log"


class Simulated(RankZeroPlanner):
    """A rank simulated by a thread, with a store in this process."""

    def __init__(self, rank: int, size: int, store: Any, timeout_s: float = 300.0) -> None:
        super().__init__("a run", timeout_s)
        self._here = rank, size
        self._store = store

    def _place(self) -> tuple[int, int]:
        return self._here


def run_on_ranks(count: int, run: Callable[[int], Any]) -> list[Any]:
    """Call `run` for every rank in a separate thread and return the results."""
    results: list[Any] = [None] * count

    def keep(rank: int) -> None:
        results[rank] = run(rank)

    threads = [threading.Thread(target=keep, args=(rank,)) for rank in range(count)]
    for thread in reversed(threads):  # the planning rank starts last
        thread.start()
    for thread in threads:
        thread.join()
    return results


RANKS = 128
"""Number of ranks simulated by threads; they verify, lower and print the plan one by one."""


def test_one_process_plans_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of the first step and of a larger step after a batch size ramp-up."""
    planning_threads: list[str] = []
    ask = plans.plan_request

    def counted(question: Any) -> Any:
        planning_threads.append(threading.current_thread().name)
        return ask(question)

    monkeypatch.setattr(plans, "plan_request", counted)
    store = dist.HashStore()
    choice = ScheduleChoice(2, "auto", costs=Costs.uniform(2, 4))

    def run(rank: int) -> tuple[str, ...]:
        planner = Planner(choice, Simulated(rank, RANKS, store))
        return tuple(planner.plan_step(number).program.text() for number in (2, 3))

    planned = run_on_ranks(RANKS, run)
    assert len(planning_threads) == 2
    assert len(set(planning_threads)) == 1
    assert len(set(planned)) == 1
    assert None not in planned


def planning_errors(plan: Callable[[], Any], timeout_s: float = 300.0) -> list[str]:
    """Return the errors of three ranks if planning fails."""
    store = dist.HashStore()

    def run(rank: int) -> str:
        try:
            Simulated(rank, 3, store, timeout_s)(plan)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return run_on_ranks(3, run)


@pytest.mark.parametrize("kind", [ScheduleError, UnsupportedError])
def test_all_ranks_report_a_rejected_plan(kind: type[Exception]) -> None:
    def plan() -> None:
        raise kind("nothing fits 1 GiB")

    planner_error, *other_errors = planning_errors(plan)
    assert planner_error == f"{kind.__name__}: nothing fits 1 GiB"
    assert other_errors == ["ScheduleError: nothing fits 1 GiB"] * 2


def test_all_ranks_report_a_planner_failure() -> None:
    def plan() -> None:
        raise ValueError("no such pass\nand more")

    planner_error, *other_errors = planning_errors(plan)
    assert planner_error.startswith("ValueError: no such pass")
    message = "rank 0, which plans for all ranks, failed at it: ValueError: no such pass"
    assert other_errors == [f"ScheduleError: {message}"] * 2


def test_waiting_for_a_plan_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_planner, "_packed", lambda outcome: os.abort())
    store = dist.HashStore()
    with pytest.raises(ScheduleError, match=NOTHING):
        Simulated(1, 2, store, timeout_s=0.1)(lambda: 1)


def test_rank_zero_stops_waiting_for_acknowledgements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_planner, "LISTENING_S", 0.1)
    with pytest.raises(ZeroDivisionError):
        Simulated(0, 2, dist.HashStore())(lambda: 1 // 0)


def find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def plan_around_init(rank: int, port: int, fails: bool) -> list[str]:
    """Plan before and after `init_process_group`; return the plans and the planning ranks."""
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    planner, reports = RankZeroPlanner("a run", 100.0), []

    def ask(text: str) -> None:
        def plan() -> str:
            reports.append("plans")
            if fails:
                raise ScheduleError(f"no {text}")
            return text

        try:
            reports.append(planner(plan))
        except ScheduleError as error:
            reports.append(str(error))

    ask("layers")
    ask("order")
    # Megatron's rendezvous is complete.
    dist.init_process_group("gloo")
    ask("ramp-up")
    dist.barrier()
    return reports


@pytest.mark.parametrize("fails", [False, True], ids=["planned", "failed"])
def test_ranks_use_the_rendezvous_of_megatron(farm: Farm, fails: bool) -> None:
    planner_log, *other_logs = run_ranks(
        farm, 3, plan_around_init, find_free_port(), fails, timeout_s=120
    )
    heard = [f"{'no ' if fails else ''}{text}" for text in ("layers", "order", "ramp-up")]
    assert planner_log == [event for text in heard for event in ("plans", text)]
    assert other_logs == [heard] * 2


def test_the_copy_counts_as_memory() -> None:
    model = nn.Linear(30, 20)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(30)).sum().backward()
    optimizer.step()
    backup = Backup()
    backup.save([optimizer])
    memory = static_memory([model], optimizer, post_validates=True)
    steps = sum(state["step"].nbytes for state in optimizer.state.values())
    assert memory.copy == backup.nbytes - steps
    without = static_memory([model], optimizer)
    assert memory.total == without.total + memory.copy
