"""Checkpoints load bitwise under another schedule: parameters and the optimizer state."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from mcore.conftest import needs_hybrid
from mcore.farm import Ended, Farm
from mcore.parity import UNTIED, assert_same_tensors

Save = Callable[[str], tuple[Path, Ended]]

STEPS = "--ckpt-format torch_dist --train-iters 2".split()


class Run(NamedTuple):
    """A run that saves or loads."""

    ranks: int
    flags: str
    stock: bool = False  # without any of our hooks
    plugin: str = ""

    def train(self, farm: Farm, *flags: str) -> Ended:
        flags = (*self.flags.split(), *STEPS, *flags)
        return farm.run(self.ranks, *flags, stock=self.stock, plugin=self.plugin).check()


def sharded(ranks: int, flags: str, stock: bool = False) -> Run:
    """Return a run with the distributed optimizer's state, which does not depend on the ranks."""
    flags = f"{flags} --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
    return Run(ranks, flags, stock, "fused_adam")


SPLIT = "--pipeline-layer-split"
TWO = "--pipeline-model-parallel-size 2"
SHARES = "--pipeline-vocab-parallel"
PREDICTS = "--mtp-num-layers 2"
RUNS = {
    "one rank": Run(1, ""),
    "v-half": Run(4, "--pipeline-schedule v-half"),
    "v-half, 2": Run(2, "--pipeline-schedule v-half"),
    # two side by side, which each write half (--ckpt-fully-parallel-save)
    "v-half, uneven": Run(
        4, f"--pipeline-schedule v-half --pipeline-model-parallel-size 2 {SPLIT} 0,4,3,1"
    ),
    "v-zb, TP 2": Run(
        4,
        "--pipeline-schedule v-zb --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2",
    ),
    "v-zb in slices": Run(2, "--pipeline-schedule v-zb --pipeline-slices 4"),
    "v-min, DP 2": Run(4, "--pipeline-schedule v-min --pipeline-model-parallel-size 2"),
    "zb-h1": Run(4, "--pipeline-schedule zb-h1"),
    "1f1b": Run(4, "--pipeline-schedule 1f1b"),
    "1f1b, uneven": Run(2, f"--pipeline-schedule 1f1b {SPLIT} 5,3"),
    "interleaved-1f1b": Run(4, "--pipeline-schedule interleaved-1f1b"),
    "stock": Run(2, "", stock=True),
    "stock, interleaved": Run(4, "--num-virtual-stages-per-pipeline-rank 2", stock=True),
    "hybrid, v-half": Run(4, "--pipeline-schedule v-half --hybrid-layer-pattern *|-*|-|*|-|*|-|*"),
    "hybrid, stock": Run(2, "--hybrid-layer-pattern *-*|-*-*-*", stock=True),
    "stock, TP 2": Run(2, "--pipeline-model-parallel-size 1 --tensor-model-parallel-size 2", True),
    "v-half, tied, MTP": Run(2, f"--pipeline-schedule v-half {PREDICTS}"),
    "zb-h1, tied, MTP": Run(2, f"--pipeline-schedule zb-h1 {PREDICTS}"),
    "v-zb, MTP": Run(4, f"--pipeline-schedule v-zb {PREDICTS} {UNTIED}"),
    "stock, MTP": Run(2, f"{PREDICTS} {UNTIED}", stock=True),
    "one rank, tied, MTP": Run(1, PREDICTS, stock=True),
    "v-half, shared, tied": Run(4, f"--pipeline-schedule v-half {SHARES}"),
    "v-zb, shared, TP 2": Run(
        4,
        f"--pipeline-schedule v-zb {SHARES} {UNTIED} --pipeline-model-parallel-size 2 "
        "--tensor-model-parallel-size 2",
    ),
    "zb-h1, shared": Run(2, f"--pipeline-schedule zb-h1 {SHARES} {UNTIED}"),
    "stock, untied": Run(2, UNTIED, stock=True),
    "v-half, shared, tied, MTP": Run(2, f"--pipeline-schedule v-half {SHARES} {PREDICTS}"),
    "zb-h1, shared, MTP": Run(2, f"--pipeline-schedule zb-h1 {SHARES} {PREDICTS} {UNTIED}"),
    "sharded v-half": sharded(4, f"--pipeline-schedule v-half {TWO}"),
    "sharded v-zb, one replica": sharded(4, "--pipeline-schedule v-zb"),
    "sharded 1f1b": sharded(4, f"--pipeline-schedule 1f1b {TWO}"),
    "sharded v-half, shared": sharded(4, f"--pipeline-schedule v-half {SHARES} {TWO}"),
    "sharded stock": sharded(4, TWO, stock=True),
}


@pytest.fixture(scope="module")
def save(farm: Farm, tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Return a function that trains and saves under a name of RUNS, once for the module."""
    finished: dict[str, tuple[Path, Ended]] = {}

    def run(name: str, *flags: str) -> tuple[Path, Ended]:
        key = " ".join([name, *flags])
        if key not in finished:
            folder = tmp_path_factory.mktemp("saved")
            saves = ("--save", str(folder), "--save-interval", "2")
            finished[key] = folder, RUNS[name].train(farm, *flags, *saves)
        return finished[key]

    return run


def load(farm: Farm, name: str, folder: Path, *flags: str) -> Ended:
    """Return a run that loads and trains no step."""
    return RUNS[name].train(farm, "--load", str(folder), *flags)


def assert_same_state(loaded: Ended, saved: Ended) -> None:
    assert loaded.record["losses"] == []  # so that this is what was loaded
    for key in ("parameters", "moments"):
        assert_same_tensors(loaded.whole(key), saved.whole(key))


OTHERS = ("hybrid", "MTP", "shared", "untied", "sharded")
GPTS = [name for name in RUNS if all(option not in name for option in OTHERS)]
PAIRS = [
    ("v-half", "stock"),
    ("stock", "v-half"),
    ("v-zb, shared, TP 2", "stock, untied"),
    ("v-half", "v-half, uneven"),
    ("v-zb in slices", "stock"),
    ("stock", "v-half, shared, tied"),
    ("v-half, shared, tied, MTP", "one rank, tied, MTP"),
    ("v-half, uneven", "v-zb, TP 2"),
    ("v-zb, MTP", "stock, MTP"),
    ("stock, MTP", "v-zb, MTP"),
    ("v-half, tied, MTP", "one rank, tied, MTP"),
    ("one rank, tied, MTP", "zb-h1, tied, MTP"),
    ("zb-h1, tied, MTP", "v-half, tied, MTP"),
    *((first, "v-half") for first in GPTS if first not in ("v-half", "stock")),
    *(("v-half", second) for second in GPTS if second not in ("v-half", "stock", "v-half, uneven")),
    ("hybrid, v-half", "hybrid, stock"),
    ("hybrid, stock", "hybrid, v-half"),
    *((first, "1f1b") for first in ("v-half, uneven", "v-zb, TP 2", "interleaved-1f1b")),
    ("1f1b, uneven", "interleaved-1f1b"),
    ("stock", "v-zb in slices"),
    ("v-zb, TP 2", "stock, TP 2"),
    ("stock, TP 2", "v-zb, TP 2"),
    ("v-half, shared, tied", "stock"),
    ("v-half, shared, tied", "v-zb, TP 2"),
    ("stock, untied", "zb-h1, shared"),
    ("zb-h1, shared", "v-zb, shared, TP 2"),
    ("one rank, tied, MTP", "v-half, shared, tied, MTP"),
    ("zb-h1, shared, MTP", "stock, MTP"),
    ("stock, MTP", "zb-h1, shared, MTP"),
]
FAST = 3


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(
            *pair,
            id=" -> ".join(pair),
            marks=[pytest.mark.slow] * (number >= FAST) + [needs_hybrid] * ("hybrid" in pair[0]),
        )
        for number, pair in enumerate(PAIRS)
    ],
)
def test_checkpoints_load_under_another_schedule(
    farm: Farm, save: Save, first: str, second: str
) -> None:
    folder, saved = save(first)
    assert_same_state(load(farm, second, folder), saved)


def of_hybrid(name: str) -> str:
    """Return the name that a GPT's parameter has in the model of attention and MLP layers."""
    match = re.match(r"(.*decoder\.layers\.)(\d+)\.(input_layernorm|self_attention)?", name)
    if match is None:
        return name.replace("final_layernorm", "final_norm")
    layer = 2 * int(match[2]) + (match[3] is None)
    return f"{match[1]}{layer}{name[match.end(2) :]}"


@needs_hybrid
@pytest.mark.parametrize("split", [None, "3,1,2,2,2,1,3,2"], ids=["blocks", "half blocks"])
def test_a_hybrid_model_loads_a_gpt(farm: Farm, save: Save, split: str | None) -> None:
    """With the weights and the optimizer state of Megatron's 1F1B, bitwise."""
    folder, saved = save("1f1b", UNTIED)
    cuts = () if split is None else (SPLIT, split)
    flags = ("--hybrid-layer-pattern", "*-" * 8, UNTIED, *cuts)
    loaded = load(farm, "v-half", folder, *flags)
    assert loaded.record["losses"] == []
    for key in ("parameters", "moments"):
        saved_tensors = {of_hybrid(name): value for name, value in saved.whole(key).items()}
        assert_same_tensors(loaded.whole(key), saved_tensors)


@needs_hybrid
@pytest.mark.slow
def test_a_hybrid_model_goes_on_where_a_gpt_ended(farm: Farm, save: Save) -> None:
    folder, _ = save("1f1b", UNTIED)
    flags = ("--train-iters", "4", UNTIED, "--override-opt_param-scheduler")
    gpt = load(farm, "1f1b", folder, *flags)
    hybrid = load(farm, "v-half", folder, *flags, "--hybrid-layer-pattern", "*-" * 8)
    losses = [[losses["lm loss"] for losses in run.record["losses"]] for run in (gpt, hybrid)]
    assert len(losses[0]) == 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def sharded_state(run: Ended) -> dict[str, torch.Tensor]:
    """Return the optimizer's state with the parts that replicas have put together."""
    tensor_parts: dict[str, dict[int, torch.Tensor]] = {}
    for record in run.records:
        for name, part in record["moments"].items():
            parts, first = tensor_parts.setdefault(name, {}), record["rows"].get(name.split()[0], 0)
            existing = parts.setdefault(first, part)
            parts[first] = torch.where(existing.isnan(), part, existing)
    return {
        name: torch.cat([parts[row] for row in sorted(parts)])
        for name, parts in tensor_parts.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("v-half", "v-half"),
        ("v-half", "v-zb, one replica"),
        ("v-zb, one replica", "stock"),
        ("stock", "v-half"),
        ("1f1b", "v-half"),
        ("v-half, shared", "stock"),
        ("stock", "v-half, shared"),
    ],
)
def test_the_distributed_optimizers_state_goes_along(
    farm: Farm, save: Save, first: str, second: str
) -> None:
    folder, saved = save(f"sharded {first}")
    loaded = load(farm, f"sharded {second}", folder)
    assert loaded.record["losses"] == []
    loaded_state, saved_state = sharded_state(loaded), sharded_state(saved)
    assert loaded_state.keys() == saved_state.keys()
    assert {name.split()[-1] for name in saved_state} == {"main", "exp_avg", "exp_avg_sq"}
    for name, expected in saved_state.items():
        assert not expected.isnan().any()
        assert torch.equal(loaded_state[name], expected), name
