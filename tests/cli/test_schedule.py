"""`megatron-vshape schedule`, end to end."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from megatron_vshape import Costs, load_schedule, make, simulate
from megatron_vshape.cli import schedule
from megatron_vshape.cli.main import main
from megatron_vshape.core.program.lowering import with_full_backwards
from megatron_vshape.core.program.torch_file import to_torch_csv

SIZES = "--devices 4 --microbatches 8"
SIZE = SIZES.split()
FIGURE_NEEDS = "figures need the extra [draw]"


@pytest.fixture(autouse=True)
def _in_tmp_path(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def costs_file(tmp_path):
    """Costs of eight stages in us and bytes; the last one has the output layer's."""
    costs = Costs.of(
        (1000.0,) * 7 + (1300.0,),
        (1100.0,) * 8,
        (900.0,) * 8,
        50.0,
        (2.0**30,) * 8,
        (2.0**29,) * 8,
    )
    path = tmp_path / "costs.json"
    path.write_text(costs.to_json())
    return str(path)


def printed(capsys, *arguments):
    assert main(["schedule", *arguments]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def refused(capsys, *arguments):
    """Return the one sentence on stderr; nothing else may be printed."""
    assert main(["schedule", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("megatron-vshape: ")
    assert "Traceback" not in output.err
    return output.err.removeprefix("megatron-vshape: ").rstrip("\n")


def test_prints_the_picture_and_the_numbers(capsys):
    assert printed(capsys, "v-half", *SIZE) == (
        "v-half, 4 ranks, 8 microbatches, times in --cost units\n\n"
        + simulate(make("v-half", 4, 8)).draw()
        + """

F B W  chunk 0   f b w  chunk 1   (forward, input gradient, weight gradient)

makespan      53; work of the busiest rank 48
bubble        9.4 %
span bubble   9.4 % (no barrier between steps)
peak memory   6 chunks of 1/8 model: 75.0 % of 1F1B
per rank      6 on every rank
communication 12 P2P messages per microbatch, 2x 1F1B
"""
    )


def test_json_export_is_the_schedule_and_reads_back(capsys, tmp_path):
    output = printed(capsys, "v-min", *SIZE, "--export", "plan.json")
    assert output.endswith("\nwrote plan.json\n")
    output = output.removesuffix("wrote plan.json\n")
    assert load_schedule(tmp_path / "plan.json") == make("v-min", 4, 8)
    assert printed(capsys, "plan.json") == output
    assert printed(capsys, "plan.json", *SIZE) == output


def test_csv_export_reads_back_with_its_placement(capsys, tmp_path):
    output = printed(capsys, "v-zb", *SIZE, "--export", "plan.csv")
    assert (tmp_path / "plan.csv").read_text() == make("v-zb", 4, 8).to_csv()
    copy = printed(capsys, "plan.csv", "--export", "again.json")
    assert copy.split("\n")[1:-2] == output.split("\n")[1:-2]  # but for the names of the files
    read, meant = load_schedule(tmp_path / "again.json"), make("v-zb", 4, 8)
    assert (read.placement, read.order) == (meant.placement, meant.order)


def test_torch_export_prints_its_settings(capsys, tmp_path):
    output = printed(capsys, "v-half", *SIZE, "--export", "v.csv", "--format", "torch")
    assert (tmp_path / "v.csv").read_text() == to_torch_csv(make("v-half", 4, 8))
    settings = output.split("wrote v.csv\n\n")[1].replace(" \\\n   ", "")
    assert (
        settings
        == """\
settings for this file (microbatch size 1; for size N, N times the batch size)
  torchtitan: --training.local_batch_size 8 --parallelism.pipeline_parallel_microbatch_size 1 \
--parallelism.pipeline_parallel_degree 4 --parallelism.pipeline_parallel_schedule ZBVZeroBubble \
--parallelism.pipeline_parallel_schedule_csv v.csv
  NeMo Automodel: --step_scheduler.local_batch_size 8 \
--distributed.pipeline.pp_microbatch_size 1 --distributed.pp_size 4 \
--distributed.pipeline.pp_schedule ZBVZeroBubble --distributed.pipeline.pp_schedule_csv v.csv
  torch: n_microbatches=8; stages of rank 0: 0, 7; rank 1: 1, 6; rank 2: 2, 5; rank 3: 3, 4
"""
    )
    copy = printed(capsys, "v.csv")
    assert copy.split("\n")[1:-1] == output.split("wrote v.csv")[0].split("\n")[1:-1]


def test_torch_export_with_full_backwards(capsys, tmp_path):
    arguments = ["--export", "v.csv", "--format", "torch", "--full-backward"]
    output = printed(capsys, "v-half", *SIZE, *arguments)
    schedule = load_schedule(tmp_path / "v.csv")
    assert schedule.order == with_full_backwards(make("v-half", 4, 8)).order
    assert f"full backwards {simulate(schedule).makespan:g}, simulated (as pr" in output


def test_torch_export_without_a_schedule_name(capsys, tmp_path):
    (tmp_path / "w.json").write_text(make("1f1b", 4, 8).renumbered((3, 2, 1, 0)).to_json())
    output = printed(capsys, "w.json", "--export", "w.csv", "--format", "torch")
    assert "  torchtitan: not supported, because no schedule name has this placement\n" in output
    arguments = ["--export", "w.csv", "--format", "torch"]
    output = printed(capsys, "interleaved-1f1b:3", *SIZE, *arguments)
    assert "--parallelism.pipeline_parallel_layers_per_stage LAYERS\n" in output
    assert "  LAYERS: layers per stage, so that the model has 12 stages\n" in output


def test_figure_is_written(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason=FIGURE_NEEDS)
    printed(capsys, "v-half", *SIZE, "--figure", "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]


def test_compare_prints_one_table(capsys):
    out = printed(capsys, "1f1b", *SIZE, "--compare", "v-min", "v-half", "v-zb")
    assert out == (
        "schedule      peak  of 1F1B  bubble  span bubble  makespan  messages\n"
        "1f1b      8 chunks  100.0 %  27.3 %       27.3 %        66   6 (1 x)\n"
        "v-min     4 chunks   50.0 %  18.6 %       18.6 %        59  12 (2 x)\n"
        "v-half    6 chunks   75.0 %   9.4 %        9.4 %        53  12 (2 x)\n"
        "v-zb      8 chunks  100.0 %   5.9 %        0.0 %        51  12 (2 x)\n"
    )
    assert printed(capsys, "--compare", "1f1b", "v-min", "v-half", "v-zb", *SIZE) == out


def test_schedule_file_sets_the_sizes_of_a_comparison(capsys):
    printed(capsys, "v-half", *SIZE, "--export", "half.json")
    table = printed(capsys, "v-half", *SIZE, "--compare", "1f1b")
    assert printed(capsys, "half.json", "--compare", "1f1b") == table
    assert printed(capsys, "--compare", "1f1b", "half.json").splitlines()[2] in table
    printed(capsys, "v-half", "--devices", "2", "--microbatches", "8", "--export", "two.json")
    error = refused(capsys, "half.json", "--compare", "two.json")
    assert error == "two.json is for --devices 2, not 4"


def test_compare_draws_one_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason=FIGURE_NEEDS)
    printed(capsys, "--compare", "1f1b", "v-min", *SIZE, "--figure", "both.svg")
    text = (tmp_path / "both.svg").read_text()
    assert text.count(">1F1B<") == text.count(">V-Min<") == 1
    assert "bubble 18.6 %" in text


def test_measured_costs_are_shown_in_their_units(capsys, costs_file):
    out = printed(capsys, "v-half", *SIZE, "--costs", costs_file)
    assert " ms; work of the busiest rank " in out
    assert " GiB, 6 chunks of 1/8 model: " in out
    output = printed(capsys, "1f1b", *SIZE, "--costs", costs_file)
    assert "per rank      8 6 4 2\n" in output
    assert "peak memory   8 GiB, 8 chunks of 1/8 model: 100.0 % of 1F1B" in output
    table = printed(capsys, "--compare", "1f1b", "v-half", *SIZE, "--costs", costs_file)
    assert "  8 GiB  100.0 % " in table
    assert " ms " in table


def test_layers_that_are_distributed_again_are_printed(capsys, tmp_path):
    """8 stages become 16: the costs of the file, for 8 x 2 layers, are for another split."""
    costs = Costs.of((1.0,) * 8, (1.0,) * 8, (1.0,) * 8, 0.0, (1.0,) * 8, (0.0,) * 8)
    (tmp_path / "even.json").write_text(replace(costs, layers=(2,) * 8).to_json())
    uneven = replace(costs, layers=(1, *(2,) * 6, 1))
    (tmp_path / "uneven.json").write_text(uneven.to_json())
    size = ["--devices", "8", "--microbatches", "8"]
    out = printed(capsys, "v-half", *size, "--costs", "uneven.json")
    assert "\nlayers        --pipeline-layer-split 0,1,1,1,1,1,1,1,1,1,1,1,1,1,1,0\n" in out
    assert "\nlayers" not in printed(capsys, "v-half", *size, "--costs", "even.json")


def test_long_times_have_one_form(capsys, tmp_path):
    slow = Costs.of((1e6,) * 8, (1e6,) * 8, (1e6,) * 8, 0.0, (2.0**44,) * 8, (0.0,) * 8)
    (tmp_path / "slow.json").write_text(slow.to_json())
    out = printed(capsys, "v-half", *SIZE, "--costs", "slow.json")
    assert out.startswith("v-half, 4 ranks, 8 microbatches\n")
    assert "makespan      53,000 ms; work of the busiest rank 48,000 ms\n" in out
    assert "peak memory   98,304 GiB, 6 chunks" in out
    assert "e+0" not in out + printed(capsys, "--compare", "1f1b", *SIZE, "--costs", "slow.json")


def test_a_picture_in_a_pipe_is_no_wider_than_a_page(capsys, monkeypatch):
    long = ["v-half", "--devices", "2", "--microbatches", "99"]
    monkeypatch.delenv("COLUMNS", raising=False)
    assert max(map(len, printed(capsys, *long).split("\n"))) == 132
    monkeypatch.setenv("COLUMNS", "2000")
    assert simulate(make("v-half", 2, 99)).draw() in printed(capsys, *long)


def test_measured_costs_reach_figure_and_trace(capsys, tmp_path, costs_file):
    pytest.importorskip("matplotlib", reason=FIGURE_NEEDS)
    files = ["--figure", "a.svg", "--trace", "a.json"]
    printed(capsys, "v-half", *SIZE, "--costs", costs_file, *files)
    assert "GiB; dashed line: 8, peak of 1F1B" in (tmp_path / "a.svg").read_text()
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert any(event["ph"] == "C" and event["args"] == {"bytes": 2.0**30} for event in events)


BAD = {
    "": "no schedule given: name one of ",
    f"v-haf {SIZES}": "there is no schedule 'v-haf'; did you mean v-half? The names are ",
    "v-half": "v-half needs --devices, as in --devices 4 --microbatches 8",
    "v-half --devices 4": "v-half needs --microbatches, as in",
    "v-half --devices 0": "argument --devices: '0' is not a whole number of at least 1",
    f"interleaved-1f1b:0 {SIZES}": "'interleaved-1f1b:0' is not a schedule: a number of chunks",
    f"v-half {SIZES} --cost 1,1,1": (
        "has 3 values; it needs four, F,B,W,COMM, as in 1,1.15,0.85,0.05, which BW="
    ),
    f"1f1b {SIZES} --cost 1,1,1,0,BW=0": "BW is '0'; it must be a finite number above 0",
    f"v-half {SIZES} --cost 1,1,1,-1": "COMM is '-1'; it must be a finite number of at lea",
    f"v-half {SIZES} --costs bad.json": "the costs file bad.json is not valid JSON: ",
    f"v-half {SIZES} --cost 1,1,1,0 --costs bad.json": (
        "argument --costs: not allowed with argument --cost"
    ),
    f"v-half {SIZES} --costs three.json": (
        "the costs are for 3 stages, v-half has 8; the costs need 8 or a multiple of it"
    ),
    "absent.json": "the schedule file absent.json cannot be read",
    "bad.json": "the schedule file bad.json is not valid JSON: ",
    "bad.csv": "the schedule file bad.csv is not valid: 'F0' is not a pass",
    "half.csv": "the schedule file half.csv cannot run: W0.0 ",
    "good.json --devices 3": "good.json is for --devices 1, not 3",
    "good.json --slices 2": "good.json is for --slices 1, not 2",
    f"v-half {SIZES} --figure a.bmp": "--figure a.bmp: the file's name must end in .svg, ",
    f"v-half {SIZES} --export a.svg": "--export a.svg: the file's name must end in .json or",
    f"v-half {SIZES} --format torch": "--format torch writes a CSV file: add --export FILE.csv",
    f"v-half {SIZES} --format torch --export a.json": (
        "--format torch writes a CSV file: add --export FILE.csv, not --export a.json"
    ),
    f"v-half {SIZES} --full-backward --export a.csv": (
        "--full-backward needs --format torch: add it, with --export FILE.csv"
    ),
    f"1f1b {SIZES} --slices 2 --format torch --export a.csv": (
        "--format torch does not support --slices, because torch.distributed.pipelining has no"
    ),
    "sliced.json --format torch --export a.csv": (
        "--format torch does not support 2 slices per microbatch"
    ),
    f"v-half {SIZES} --export no/a.json": " does not exist: create it first",
    f"v-half {SIZES} --export folder.json": "folder.json is a directory: name a file",
    f"v-half {SIZES} --export a.json --trace ./a.json": (
        "--export and --trace both name a.json: use two files"
    ),
    f"--compare v-min {SIZES} --export a.json": "--export needs a NAME before --compare",
    f"v-half {SIZES} --compare": "argument --compare: expected at least one argument",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_sentence_and_no_file(capsys, tmp_path, words):
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bad.csv").write_text("F0\n")
    (tmp_path / "half.csv").write_text("F0.0,B0.0\n")
    (tmp_path / "good.json").write_text(make("1f1b", 1, 1).to_json())
    (tmp_path / "sliced.json").write_text(make("1f1b", 2, 4, slices=2).to_json())
    three = (1.0,) * 3
    (tmp_path / "three.json").write_text(Costs.of(three, three, three, 0.0, three, three).to_json())
    (tmp_path / "folder.json").mkdir()
    files = sorted(tmp_path.iterdir())
    assert BAD[words] in refused(capsys, *words.split())
    assert sorted(tmp_path.iterdir()) == files


def test_figure_without_matplotlib_names_the_extra(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refused(capsys, "v-half", *SIZE, "--figure", "a.svg") == (
        "--figure needs matplotlib, which is not installed: pip install 'megatron-vshape[draw]'"
    )


def test_failing_disk_leaves_every_file_as_it_was(capsys, monkeypatch, tmp_path):
    (tmp_path / "a.json").write_text("old")

    def fail(path, result):
        path.write_text("half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(schedule, "_write_trace", fail)
    assert refused(capsys, "v-half", *SIZE, "--export", "a.json", "--trace", "b.json") == (
        "--trace b.json cannot be written: No space left on device"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "old"


def test_interrupted_write_leaves_nothing(monkeypatch, tmp_path):
    def stop(path, result):
        path.write_text("half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(schedule, "_write_trace", stop)
    assert main(["schedule", "v-half", *SIZE, "--trace", "b.json"]) == 130
    assert list(tmp_path.iterdir()) == []


def test_link_stays_a_link(capsys, tmp_path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    printed(capsys, "v-half", *SIZE, "--export", "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert load_schedule(tmp_path / "real.json") == make("v-half", 4, 8)


def test_files_follow_the_users_mask(capsys, tmp_path):
    old = os.umask(0o027)
    try:
        printed(capsys, "v-half", *SIZE, "--export", "a.json")
    finally:
        os.umask(old)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o640


def test_hostile_name_does_not_reach_the_terminal(capsys, tmp_path):
    name = "\x1b]0;owned\x07\n.csv"
    (tmp_path / name).write_text(make("1f1b", 1, 1).to_csv())
    assert printed(capsys, name).startswith("?]0;owned??, 1 rank, 1 microbatch, ")
    assert "\x1b" not in printed(capsys, "--compare", name)


def test_process_survives_a_reader_that_leaves():
    command = [sys.executable, "-m", "megatron_vshape.cli.main", "schedule", "v-min"]
    size = ["--devices", "8", "--microbatches", "2000"]
    with subprocess.Popen(
        [*command, *size], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_full_disk_in_a_process():
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full here")
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "megatron_vshape.cli.main", "schedule", "v-min", *SIZE]
        completed = subprocess.run(command, stdout=full, stderr=subprocess.PIPE)
    assert completed.returncode == 2
    assert completed.stderr == (
        b"megatron-vshape: the output cannot be written: [Errno 28] No space left on device\n"
    )


def test_schedule_name_may_contain_the_number_of_chunks(capsys):
    sizes = SIZE
    two = printed(capsys, "interleaved-1f1b", *sizes)
    explicit = printed(capsys, "interleaved-1f1b:2", *sizes)
    assert explicit.startswith("interleaved-1f1b:2, 4 ranks, 8 microbatches")
    assert explicit.splitlines()[1:] == two.splitlines()[1:]
    assert printed(capsys, "interleaved-1f1b", *sizes, "--chunks", "2") == explicit  # as in 0.2.0
    assert "14 P2P messages" in two
    assert "22 P2P messages" in printed(capsys, "interleaved-1f1b:3", *sizes)
    compared = ["interleaved-1f1b:2", "interleaved-1f1b:4"]
    rows = printed(capsys, "v-half", *sizes, "--compare", *compared).splitlines()
    assert [row.split()[0] for row in rows[1:]] == ["v-half", *compared]


def test_slices_are_drawn_and_kept_in_the_file(tmp_path, capsys):
    file, figure = tmp_path / "mine.json", tmp_path / "mine.svg"
    sizes = ["--devices", "4", "--microbatches", "2", "--slices", "4"]
    first = printed(capsys, "v-half", *sizes, "--export", str(file), "--figure", str(figure))
    assert "v-half, 4 ranks, 2 microbatches of 4 slices" in first
    assert "peak memory   3 chunks of 1/8 model: 37.5 % of 1F1B" in first
    assert "messages per microbatch, 8x 1F1B" in first
    assert printed(capsys, str(file)) == first.partition("wrote ")[0]
    assert "1f1b" in printed(capsys, str(file), "--compare", "1f1b")


@pytest.mark.parametrize(
    ("cost", "makespan"),
    [
        # 8 microbatches and a warm-up of 3, through stages twice as long as those of --cost
        ("1,2", 2 * (8 + 3) * (1 + 2)),
        ("1,2,2,0,BW=3", 2 * (8 + 3) * (1 + 3)),
    ],
)
def test_time_of_full_backward_on_the_command_line(capsys, cost, makespan):
    assert f"makespan      {makespan}; work" in printed(capsys, "1f1b", *SIZE, "--cost", cost)
