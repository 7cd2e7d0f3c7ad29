"""scripts/bench_training.py: counted rounds, comparisons, and values read from a log."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron_vshape.mcore.observe.profiling import format_comparison, format_costs
from megatron_vshape.mcore.observe.report import Checked, PredictedStep, closing_table

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_training.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """Return the script as a module."""
    spec = importlib.util.spec_from_file_location("bench_training", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_predictions_are_found_in_the_log(bench: ModuleType) -> None:
    v_half_step = PredictedStep("v-half", 4, 1.5e6, 1e5, 0.1, (2.0**30, 2.0**29))
    auto_step = v_half_step._replace(name="auto", makespan_us=1.4e6)
    checked = Checked(auto_step, 1.44e6, 0.09)
    costs_text = f"{format_costs(v_half_step)} -> {format_costs(auto_step)}"
    log = f"W:x:measured costs: {costs_text}, from the next step on\n"
    assert bench.predicted_in(log) is None
    log += f"W:x:{format_comparison(checked)}, in 4 steps\n"
    predicted = bench.predicted_in(log)
    assert predicted == (1500.0, 1400.0, 1440.0)
    row = bench.prediction_table({"auto": [bench.Turn(1.575, 2.0)]}, {"auto": predicted})
    assert "| auto | 1400 | 1440 | 1.029 | 1500 | 1575 | 1.050 |" in row


def test_the_closing_table() -> None:
    prediction = PredictedStep("v-half", 4, 1.5e6, 1e5, 0.1, (2.0**30, 2.0**29))
    text = closing_table(Checked(prediction, 1.53e6, 0.12), 1.632e6, [2.0**30, 2.0**29])
    rows = [line.split() for line in text.splitlines()]
    assert rows[0] == ["v-half", "predicted", "measured", "ratio"]
    assert rows[1][-3:] == ["1600.00", "1632.00", "1.020"]
    assert rows[2][-3:] == ["1500.00", "1530.00", "1.020"]
    assert rows[3][-3:] == ["100.00", "102.00", "1.020"]
    assert rows[4][-3:] == ["10.00", "12.00", "1.200"]
    assert rows[5][-3:] == ["1024.00", "1024.00", "1.000"]
    assert text.splitlines()[-1] == "step time as predicted; activation memory as predicted"


def test_the_verdict_of_the_closing_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    prediction = PredictedStep("v-half", 4, 1.5e6, 1e5, 0.1, (2.0**30, 2.0**29))
    checked = Checked(prediction, 3e6, 0.5, comparable=False)
    lines = closing_table(checked, 3.2e6, [2.0**30, 1.25 * 2.0**29]).splitlines()
    memory, _, timing = lines[-1].partition("; ")
    assert memory == "activation memory +25 % compared with the prediction"
    assert timing.startswith("timing is not comparable: 1000 ranks share ")
    assert not any("ms" in line or "bubble" in line for line in lines[1:])
    alone = closing_table(checked._replace(comparable=True), 3.2e6, [2.0**30, 2.0**29])
    last = "step time +100 % compared with the prediction; activation memory as predicted"
    assert alone.splitlines()[-1] == last
