"""megatron-vshape plan, and names with a plus."""

import csv
import json
import os
import re
import shlex
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cli.conftest import Output

from megatron_vshape import Costs, ScheduleError, load_schedule, make, peak_held, simulate
from megatron_vshape.cli import plan
from megatron_vshape.cli.main import main
from megatron_vshape.core.budget import Budget
from megatron_vshape.core.evaluation import evaluate_schedule
from megatron_vshape.core.model.costs import with_copies
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.pieces import Pieces
from megatron_vshape.core.model.stage_costs import StageCosts
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.planner.vocabulary import is_shared, shared_pieces
from megatron_vshape.core.program.lowering import with_full_backwards
from megatron_vshape.core.program.torch_file import to_torch_csv
from megatron_vshape.core.request import PlanRequest, PlanResult
from megatron_vshape.view import plan_report
from megatron_vshape.view.numbers import GIB

SIZE = ["--devices", "4", "--microbatches", "8"]
SMALL = ["--devices", "3", "--microbatches", "6", "--chunks", "2"]
COST = ["--cost", "1,1.15,.85,.05"]


def number_in(shown: str, name: str) -> float:
    """Return the first number of the line with this name."""
    match = re.search(rf"^{name} +([0-9.]+) ", shown, re.M)
    return float(match[1])


def test_a_plan_is_printed_and_exported(tmp_path: Path, output_of: Output) -> None:
    path = tmp_path / "plan.json"
    arguments = ["plan", *SIZE, *COST, "--memory-limit", "6", "--export", str(path)]
    shown = output_of(*arguments)
    schedule = load_schedule(path)
    assert schedule.num_stages == 16
    assert "placement       4 chunks per rank, looping" in shown
    timeline = simulate(schedule, Costs.uniform(4, 16, 1, 1.15, 0.85, 0.05))
    assert f"makespan        {timeline.makespan:.6g} in --cost units\n" in shown
    assert "peak memory     6 chunks, limit 6 chunks" in shown
    assert "lower bound" in shown
    assert max(peak_held(schedule)) == 6


def test_slices_are_planned_and_exported(tmp_path: Path, output_of: Output) -> None:
    path = tmp_path / "plan.json"
    arguments = ["plan", "--devices", "2", "--microbatches", "2", *COST, "--chunks", "2"]
    within = ["--memory-limit", "2.5", "--slices", "1,4", "--host", ".01"]
    shown = output_of(*arguments, *within, "--export", str(path))
    schedule, costs = load_schedule(path), Costs.uniform(2, 4, 1, 1.15, 0.85, 0.05, host=0.01)
    assert (schedule.slices, schedule.num_microbatches) == (4, 8)
    assert "slices          4 per microbatch" in shown
    assert f"makespan        {simulate(schedule, costs).makespan:.6g} in" in shown
    assert re.search(r"^1f1b in 4 slices ", shown, re.M)
    # At a price of a pass that nothing regains there is one slice.
    assert "slices per microbatch" not in output_of(*arguments, "--slices", "auto", "--host", "2")


@pytest.mark.parametrize(
    "options", ["", "--head 2,2,2 --vocab-parallel", "--layers 4 --layer-split auto"]
)
def test_the_overhead_of_a_pass_counts_in_every_plan(options: str, output_of: Output) -> None:
    busy = []
    for host in ("0", "0.5"):
        sizes = ["--devices", "2", "--microbatches", "4", "--chunks", "2", "--host", host]
        busy.append(number_in(output_of("plan", *sizes, *options.split()), "busy time"))
    assert busy[1] >= busy[0] + 4 * 2 * 0.5  # at least F and BW of one chunk


@pytest.mark.parametrize("option", ["--head", "--embedding"])
def test_embedding_and_head_times_count_in_the_plan(option: str, output_of: Output) -> None:
    """As three times, or as a number of layers, of which each of the 8 stages has one."""
    shown = []
    for value in ("2,2.3,1.7", "2"):
        arguments = ["plan", *SIZE, *COST, "--layers", "8", "--chunks", "2", option, value]
        shown.append(output_of(*arguments, "--memory-limit", "6"))
    assert shown[0] == shown[1]
    # two stages of a chunk each, and the head: 8 microbatches of 2 x 3 + 6
    assert "busy time       96 (busiest rank)\n" in shown[0]
    ends = ["--embedding", "0,.25,0", "--head", "2,2.3,1.7"]
    assert "work of the busiest rank 96\n" in output_of("schedule", "1f1b", *SIZE, *COST, *ends)


@pytest.mark.parametrize(
    ("lower_bound", "text"),
    [(0.99, "may find a better plan"), (1.0, "may find a better plan with another placement")],
)
def test_a_stopped_search_claims_no_better_plan_than_the_bound(
    lower_bound: float, text: str
) -> None:
    result = plan_request(PlanRequest("auto", 2, 2, seconds=0.1))
    searched_plan = replace(result.plan, lower_bound=result.plan.value * lower_bound)
    assert plan_report.format_best_so_far(replace(result, searched=searched_plan)).endswith(text)


@pytest.mark.parametrize(("gap", "idle"), [(1e-13, 0.0), (1.0, 1.0)])
def test_a_rounding_error_is_no_idle_time(gap: float, idle: float) -> None:
    evaluated = evaluate_schedule(make("1f1b", 1, 1), Costs.uniform(1, 1))
    rows = zip(evaluated.timeline.starts, evaluated.timeline.ends, strict=True)
    (starts, ends) = ((*times[:-1], times[-1] + gap) for (row,) in [list(rows)] for times in row)
    timeline = replace(evaluated.timeline, starts=(starts,), ends=(ends,))
    assert replace(evaluated, timeline=timeline).overhead == idle


@pytest.mark.parametrize(
    ("flags", "chunks", "makespan"),
    [
        ("--chunks 4", 4, 99.5),
        ("", 12, 98.5),
        ("--layers 20", 5, 99.2),
    ],
)
def test_plan_uses_the_chunks_that_options_allow(
    flags: str, chunks: int, makespan: float, output_of: Output
) -> None:
    """Every plan is proved optimal for its placement, and the bound decreases with the chunks."""
    sizes = ["--devices", "4", "--microbatches", "16", "--memory-limit", "6"]
    shown = output_of("plan", *sizes, *flags.split())
    assert f"recommended: the plan, with {chunks} chunks per rank" in shown
    assert f"makespan        {makespan:g} in --cost units" in shown


def test_launch_overhead_limits_the_chunks(output_of: Output) -> None:
    """Each of 3 x 8 passes of a chunk costs 0.2: four chunks save less idle time than that."""
    arguments = ["plan", *SIZE, "--memory-limit", "8"]
    chunks = []
    for host in ("0", "0.2"):
        chunks.append(number_in(output_of(*arguments, "--host", host), "placement"))
    assert chunks[0] > 2 >= chunks[1]


def test_export_for_torch_has_a_placement_with_a_schedule_name(
    tmp_path: Path, output_of: Output
) -> None:
    """Without it, the plan within this memory is a zigzag of four or more chunks."""
    sizes = ["plan", "--devices", "3", "--microbatches", "9", "--memory-limit", "3"]
    assert "chunks per rank, zigzag" in output_of(*sizes)
    shown = output_of(*sizes, "--format", "torch", "--export", str(tmp_path / "plan.csv"))
    assert "chunks per rank, zigzag" not in shown
    assert "no schedule name has this placement" not in shown


def test_more_chunks_never_exclude_a_v(output_of: Output) -> None:
    """An odd number of chunks has no V; --chunks is a maximum, and even numbers come first."""
    sizes = ["plan", "--devices", "4", "--microbatches", "8", "--cost", "1,1.15,.85,.05"]
    sizes += ["--memory-limit", "5", "--seconds", "2"]
    for chunks in ("2", "3"):
        assert "recommended: the plan, with 2 chunks per rank" in output_of(
            *sizes, "--chunks", chunks
        )


HEAVY = ["--layers", "16", "--chunks", "2", "--head", "4"]


def test_plan_with_vocabulary_parallelism(tmp_path: Path, output_of: Output) -> None:
    path = tmp_path / "plan.json"
    arguments = ["plan", *SIZE, *COST, *HEAVY, "--memory-limit", "7", "--vocab-parallel"]
    shown = output_of(*arguments, "--export", str(path))
    assert is_shared(load_schedule(path))
    # of 16 layers every device has 4, and a fourth of the head's 4
    assert number_in(shown, "busy time") < 8 * (2 * 3 + 6)


def test_vocabulary_parallelism_from_a_costs_file(tmp_path: Path, output_of: Output) -> None:
    layer, embedding = (
        StageCosts.of(100.0, 115.0, 85.0, 2.0**26, 2.0**26),
        StageCosts.of(5.0, 5, 5, 2.0**20, 0),
    )
    pieces = Pieces(layer, embedding, layer.times(3), 5.0)
    path, shared = tmp_path / "costs.json", tmp_path / "shared.json"
    path.write_text(pieces.costs((2,) * 8).to_json())
    shared.write_text(shared_pieces(pieces, 4, 20.0, 2.0**24).costs((2,) * 8).to_json())
    values = []
    for options in ([str(path), "--vocab-parallel", "20"], [str(shared)]):
        limit = ["--memory-limit", "2GiB", "--chunks", "2"]
        shown = output_of("plan", *SIZE, *limit, "--costs", *options)
        assert re.search(r"^makespan +[0-9.]+ ms$", shown, re.M)
        values.append(number_in(shown, "makespan"))
    assert values[0] == pytest.approx(values[1], rel=0.02)  # but for what the logits hold


def test_plan_with_offloading(tmp_path: Path, output_of: Output) -> None:
    """Offloading is printed and drawn, and compared with the plan without offloading."""
    path, page = tmp_path / "plan.json", tmp_path / "plan.html"
    sizes = ["--devices", "2", "--microbatches", "6", "--chunks", "2", *COST]
    files = ["--export", str(path), "--html", str(page)]
    shown = output_of("plan", *sizes, "--offload", "1", "--memory-limit", "2", *files)
    copied = sum(str(work).startswith("D") for row in load_schedule(path).order for work in row)
    assert 0 < copied <= 24
    assert f"offloading      {100 * copied / 24:.1f} % of the activations (" in shown
    assert re.search(r"^plan: schedule only .* slower", shown, re.M)
    assert page.stat().st_size > 10_000
    with pytest.raises(ScheduleError, match=r"torch does not support the passes D \(copy to the"):
        to_torch_csv(load_schedule(path))


def test_plan_for_torch(tmp_path: Path, output_of: Output, error_of: Output) -> None:
    path = tmp_path / "plan.csv"
    arguments = ["plan", *SMALL, *COST, "--export", str(path), "--format", "torch"]
    shown = output_of(*arguments, "--full-backward")
    schedule = load_schedule(path)
    assert schedule.kinds == {Kind.F, Kind.BW}
    timeline = simulate(schedule, Costs.uniform(3, schedule.num_stages, 1, 1.15, 0.85, 0.05))
    assert f"\nmakespan with full backwards {timeline.makespan:.6g}, simulated" in shown
    assert f"--parallelism.pipeline_parallel_schedule_csv {path}" in shown
    assert "--format torch does not support the passes D" in error_of(*arguments, "--offload", "1")


def test_host_memory_may_have_a_limit(tmp_path: Path, output_of: Output) -> None:
    """In GiB, less than the limit is usable, because the last block may be partly unused."""
    path = tmp_path / "costs.json"
    costs = Costs.uniform(2, 4, 1.0, 1.15, 0.85, 0.05)
    memory = {"held_after_forward_bytes": (GIB,) * 4, "held_after_backward_bytes": (GIB,) * 4}
    path.write_text(with_copies(costs.having(**memory), 0.5).to_json())
    sizes = ["plan", "--devices", "2", "--microbatches", "8", "--chunks", "2"]
    costs_file = ["--costs", str(path)]
    for limit, options, max_offloaded in (
        ("2", [*COST, "--offload", ".5"], 2.0),
        ("2.2GiB", costs_file, 2.0),
        ("2GiB", costs_file, 1.0),
    ):
        limits = ["--memory-limit", "2.5chunks", "--host-memory-limit", limit]
        match = re.search(r"; at most ([0-9.]+) (chunks|GiB)", output_of(*sizes, *limits, *options))
        assert (0.0 if match is None else float(match[1])) <= max_offloaded
        assert match is not None or max_offloaded < 2


def test_the_frontier_is_a_picture_and_a_table(tmp_path: Path, output_of: Output) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "frontier.svg"
    assert "v-half" in output_of("plan", *SMALL, *COST, "--frontier", str(path))
    rows = list(csv.reader(path.with_suffix(".csv").read_text().splitlines()))
    plans = [row for row in rows if row[0] == "plan"]
    assert [int(row[1]) for row in plans] == [2, 3, 4, 5, 6]
    values = [float(row[3]) for row in plans]
    assert values == sorted(values, reverse=True)
    assert "V-Half" in path.read_text()


def test_frontier_table_names_its_unit(tmp_path: Path, output_of: Output) -> None:
    pytest.importorskip("matplotlib")
    memory = (2.0**30,) * 4
    costs = Costs.of((1e6,) * 4, (1e6,) * 4, (1e6,) * 4, 0.0, memory, memory)
    (tmp_path / "costs.json").write_text(costs.to_json())
    size = ["--devices", "2", "--microbatches", "4", "--chunks", "2"]
    written = ["--costs", str(tmp_path / "costs.json"), "--frontier", str(tmp_path / "f.svg")]
    assert "e+" not in output_of("plan", *size, *written)
    heading, *rows = (tmp_path / "f.csv").read_text().splitlines()
    assert "step time, ms" in heading
    assert "1f1b,,4,30000," in "\n".join(rows)


def test_ctrl_c_writes_the_finished_part_of_a_frontier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search of the second limit ends with its best plan; no further limit is searched."""
    pytest.importorskip("matplotlib")
    searched_limits = []

    def interrupted(request: PlanRequest, budget: Budget | None = None) -> PlanResult:
        if budget is None:  # a published schedule, for comparison
            return plan_request(request)
        searched_limits.append(request.limit)
        if len(searched_limits) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            while not budget.interrupted:
                time.sleep(0.01)
        return plan_request(request, budget)

    monkeypatch.setattr("megatron_vshape.core.plan.plan_request", interrupted)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup has it ignored
    path = tmp_path / "frontier.svg"
    assert main(["plan", *SMALL, *COST, "--frontier", str(path)]) == 0
    rows = path.with_suffix(".csv").read_text().splitlines()
    assert sum(row.startswith("plan,") for row in rows) == len(searched_limits) == 2
    lines = capsys.readouterr().err.splitlines()
    # on a busy machine also how long it has been at work
    lines = [line for line in lines if not line.startswith("running (")]
    assert [line.partition(": ")[0] for line in lines] == [
        "limit 2 of 6 chunks",
        "limit 3 of 6 chunks",
        "interrupted",
    ]
    assert signal.signal(signal.SIGINT, handler) is signal.default_int_handler


def test_reported_minimum_limit_is_sufficient(
    tmp_path: Path, output_of: Output, error_of: Output
) -> None:
    memory = (2_345_678_901.0, *(1e9,) * 7)
    costs = Costs.of((1000.0,) * 8, (1150.0,) * 8, (850.0,) * 8, 50.0, memory, memory)
    path = tmp_path / "costs.json"
    path.write_text(costs.to_json())
    arguments = ["plan", *SIZE, "--costs", str(path), "--memory-limit"]
    error = error_of(*arguments, "3GiB")
    assert "rank 0 is 3 GiB (2.75741 chunks), and one microbatch needs 3.1" in error
    min_limit = re.search(r"the minimum limit for all ranks is (\S+) GiB", error)
    output_of(*arguments, f"{min_limit[1]}GiB")


REJECTIONS = {
    "--slices 0": "--slices",
    "--slices 2,x": "--slices",
    "--slices 2 --vocab-parallel --head 1,1,1": "remove --slices",
    "--host -1": "--host -1",
    "--vocab-parallel": "--vocab-parallel needs --head",
    "--vocab-parallel -1 --head 2,2,2": "--vocab-parallel",
    "--head 4 --layers 16 --chunks 2 --vocab-parallel --offload 1": "remove --offload",
    "--host-memory-limit 4": "--host-memory-limit 4 needs --offload",
    "--offload 1 --host-memory-limit v-half": "--host-memory-limit 'v-half'",
    "--offload 1 --host-memory-limit 4GiB": "needs --costs",
    "--offload 0": "--offload",
    "--offload 1,half": "--offload",
    "--offload 1 --costs costs.json": "--offload and --costs",
    "--memory-limit 1": "the minimum limit for all ranks is 2",
    "--memory-limit six": "--memory-limit 'six'",
    "--memory-limit 4GiB": "--memory-limit 4GiB needs --costs",
    "--memory-limit interleaved-1f1b:999": "num_chunks of interleaved-1f1b is 999",
    "--headroom 5": "use 5%",
    "--layer-split auto": "--layer-split auto needs --layers N",
    "--layer-split auto --layers 1": "1 layer is too few for 4 stages",
    "--head 3": "needs --layers N",
    "--embedding 1,-1,1": "--embedding",
    "--embedding 1": "--embedding 1",
    "--chunks 99999": "at most 128 chunks",
    "--seconds 0": "--seconds",
    "--export plan.txt": "--export plan.txt",
    "--frontier f.svg --memory-limit 4": "remove --memory-limit",
    "--frontier f.svg --headroom 5%": "remove --headroom",
    "--frontier f.svg --html page.html": "remove --html",
}


@pytest.mark.parametrize("words", REJECTIONS)
def test_bad_input_is_one_sentence(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SIZE, *COST * ("--costs" not in words), *words.split()]) == 2
    output = capsys.readouterr()
    assert REJECTIONS[words] in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""


def test_a_name_with_a_plus_has_the_memory_and_less_time(tmp_path: Path, output_of: Output) -> None:
    path = tmp_path / "plus.json"
    assert "v-half+, 4 ranks, 8 microbatches" in output_of(
        "schedule", "v-half+", *SIZE, *COST, "--export", str(path)
    )
    assert json.loads(path.read_text())["name"] == "v-half+"
    assert max(peak_held(load_schedule(path))) == 6


@pytest.mark.parametrize("name", ["p.json.csv", "p.csv.json"])
def test_last_suffix_selects_the_format(tmp_path: Path, name: str, output_of: Output) -> None:
    path = tmp_path / name
    size = ["--devices", "2", "--microbatches", "4"]
    output_of("schedule", "v-half", *size, "--export", str(path))
    assert load_schedule(path).num_microbatches == 4
    assert path.read_text().startswith("{") == (path.suffix == ".json")


@pytest.mark.parametrize("cost", ["1.2345678,1,0.1,1e-07", "1234567,3,2,0"])
def test_the_recipe_has_every_digit(cost: str) -> None:
    words = ["plan", *SIZE, "--cost", cost, "--head", "2,2,2", "--vocab-parallel"]
    outputs = ["--export", "plan.json", "--all", "--html=plan.html"]
    assert plan._command_without_outputs([*words[:3], *outputs, *words[3:]]) == shlex.join(words)


def test_layers_that_a_costs_file_contradicts(
    tmp_path: Path, output_of: Output, error_of: Output
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(Pieces.estimated(1, 4).costs((2,) * 8).to_json())
    arguments = ["plan", "--devices", "4", "--microbatches", "8", "--costs", str(path)]
    wrong = f"--layers 32 contradicts --costs {path}, which is for 16 layers"
    assert wrong in error_of(*arguments, "--layers", "32")
    output_of(*arguments, "--layers", "16", "--chunks", "2")


def test_table_omits_irrelevant_rows_without_all(output_of: Output) -> None:
    sizes = ["plan", "--devices", "4", "--microbatches", "16", "--cost", "1,1.15,.85,.05"]
    sizes += ["--memory-limit", "6", "--layers", "32"]
    tables = {}
    for every in ((), ("--all",)):
        shown = output_of(*sizes, *every)
        tables[every] = shown[shown.index("\nschedule ") :].strip().splitlines()
    few, many = tables[()], tables[("--all",)]
    assert len(few) < 14 < len(many)
    flat = {" ".join(row.split()) for row in many}  # columns are as wide as their widest
    assert all(" ".join(row.split()) in flat for row in few[:5])
    assert re.fullmatch(r"\d+ more rows with --all: .*", next(row for row in few if "--all" in row))
    assert not any("--all" in row for row in many)
    within = [row for row in few if row.endswith(" slower")]
    assert 1 <= len(within) <= 3
    above = [row for row in few if row.endswith(" chunks above the limit")]
    families = [row.split()[0].partition(":")[0] for row in above]
    assert "1f1b" in families  # Megatron's own, whatever it takes
    assert len(families) == len(set(families))


def test_headroom_is_a_share_however_it_is_written(output_of: Output) -> None:
    outputs = []
    for share in ("5%", "0.05"):
        outputs.append(output_of("plan", *SIZE, "--memory-limit", "8", "--headroom", share))
    assert "limit 7.6 chunks" in outputs[0]
    assert outputs[0] == outputs[1]


REJECTED = ["--devices", "6", "--microbatches", "3", "--layers", "12"]


def test_rows_that_stock_megatron_rejects_are_marked(output_of: Output) -> None:
    rows = output_of("plan", *REJECTED, "--all").splitlines()
    (row,) = [row for row in rows if row.startswith("interleaved-1f1b:2 ")]
    assert row.endswith("; not supported by stock Megatron")
    assert not any("not supported" in row for row in rows if row.startswith("1f1b "))


def test_a_plan_is_no_worse_than_published_schedules_whatever_the_time(
    monkeypatch: pytest.MonkeyPatch, output_of: Output
) -> None:
    """As if planning were too slow: nothing is found in the time, or only a bad plan."""
    is_read = threading.Event()
    monkeypatch.setattr(plan, "_searched", lambda question, *_: is_read.wait(30))
    words = "--devices 4 --microbatches 6 --cost 1,1,1,0.02,BW=1.3 --layers 48 --memory-limit 40"
    out = output_of("plan", *words.split(), "--seconds", "0.2")
    is_read.set()  # ends the search, for which a later test would wait
    assert "makespan        35.98 " in out  # interleaved-1f1b:6
    assert "no published schedule that fits is faster" in out


def test_the_share_of_split_backwards() -> None:
    schedule = make("v-half", 2, 8)
    assert plan_report._split_text(schedule) == "all stages"
    assert plan_report._split_text(with_full_backwards(schedule)) == "none"
    order = (schedule.order[0], with_full_backwards(schedule).order[1])
    assert plan_report._split_text(replace(schedule, order=order)) == "50 % of the backward passes"
