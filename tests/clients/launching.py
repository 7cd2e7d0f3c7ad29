"""Launches the training of a library in the environment that `--clients` created for it."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".cache" / "clients"
RANKS = 4

SHARED = "v-half, shared"
SCHEDULES = {
    "v-half": "schedule=v-half",
    "v-zb": "schedule=v-zb",
    "auto": "schedule=auto,profile_steps=2:2",
    SHARED: "schedule=v-half,vocab_parallel=true",
}
ONE_CHUNK = {"zb-h1": "schedule=zb-h1", "zb-h2": "schedule=zb-h2"}
VARIABLES = SCHEDULES | ONE_CHUNK
"""Values of MEGATRON_VSHAPE that a user of the library sets; stock runs have none."""

COUNTS = ("chunks", "groups", "left", "held")
"""Entries of a record that are not compared."""

CHECKOUTS = {"slime": "SLIME", "nemo_rl": "NEMO_RL", "roll": "ROLL"}
"""By library that no index has, the variable that names a checkout of it."""


def matrix(shapes: Iterable[str]) -> list[tuple[str, str]]:
    """Return all schedules for the first of a library's shapes, and V-Half for each other."""
    first, *other_shapes = shapes
    return [
        *((first, schedule) for schedule in SCHEDULES),
        *((shape, "v-half") for shape in other_shapes),
    ]


def cases_of(
    shapes: Mapping[str, Mapping[str, Any]], pairs: Iterable[tuple[str, str]], **common: Any
) -> dict[str, dict[str, Any]]:
    """Return the stock runs of all shapes, and the runs of the pairs of shape and schedule."""
    return {
        f"{shape}: {schedule}": {"schedule": schedule, **common, **shapes[shape]}
        for shape, schedule in (*((shape, "stock") for shape in shapes), *pairs)
    }


def tolerance_of(schedule: str) -> float:
    """Return the tolerance for differences of results in three steps.

    The order of sums differs with vocabulary parallelism, and if `auto` reorders variable-length
    microbatches; with `keep_order=true` its results are as close as those of other schedules.
    """
    return 1e-5 if schedule in (SHARED, "auto") else 2e-6


Case = Mapping[str, Any]
RankRecords = list[dict[str, Any]]


def python_of(library: str) -> Path:
    """Return the Python of the library's environment; skips the tests where there is none."""
    folder = Path(os.environ.get("CLIENTS_FOLDER", ENVIRONMENTS)) / library
    python, why = folder / "bin" / "python", folder / "missing"
    if why.exists():
        pytest.skip(why.read_text().strip(), allow_module_level=True)
    if not python.exists():
        message = f"{library} is not installed: bash scripts/test.sh --nightly"
        pytest.skip(message, allow_module_level=True)
    return python


def checkout_of(library: str) -> str:
    """Return the checkout of a library that no index has; skips the tests where there is none."""
    variable = CHECKOUTS[library]
    checkout = os.environ.get(variable, str(ENVIRONMENTS / f"{library}-checkout"))
    if not Path(checkout, library).is_dir():
        message = f"{library} is not installed: {variable}=CHECKOUT bash scripts/test.sh --nightly"
        pytest.skip(message, allow_module_level=True)
    return checkout


class Runs:
    """The records and outputs of a library's cases, by name."""

    def __init__(self, library: str, folder: Path, output: str) -> None:
        self.library, self.folder, self.output = library, folder, output

    def records_of(self, case: str) -> RankRecords:
        """Return the records of all ranks of a case; raise with its output if it failed."""
        files = [self.folder / case / f"{rank}.pt" for rank in range(RANKS)]
        if not all(file.exists() for file in files):
            output_file = self.folder / case / "said"
            raise AssertionError(
                output_file.read_text()[-6000:] if output_file.exists() else self.output[-6000:]
            )
        return [torch.load(file, weights_only=False) for file in files]

    def output_of(self, case: str) -> str:
        """Return the output of all ranks of a case."""
        return (self.folder / case / "said").read_text()

    def compare(
        self, case: str, plain: str, tolerance: float = 2e-6, chunks: int | None = None
    ) -> None:
        """Print how far a case is from another, and raise where that is too far on any rank.

        Each rank of the case has this number of chunks.
        """
        records, baseline_records = self.records_of(case), self.records_of(plain)
        assert chunks is None or [record["chunks"] for record in records] == [chunks] * RANKS
        deviations: dict[str, float] = {}
        for record, baseline_record in zip(records, baseline_records, strict=True):
            for key in record:
                if key not in COUNTS:
                    deviation = difference(record[key], baseline_record[key], key)
                    deviations[key] = max(deviations.get(key, 0.0), deviation)
        text = ", ".join(f"{key} {value:.1e}" for key, value in deviations.items())
        print(f"\n| {self.library} | {case} | {text} |")
        # A step of Adam, of 1e-3, has the sign of a gradient that may be next to 0.
        weight_tolerance = 1e-3 if tolerance > 2e-6 else tolerance
        for key, deviation in deviations.items():
            assert deviation <= (
                weight_tolerance if key in ("weights", "exported") else tolerance
            ), (case, deviations)


def run(
    library: str, script: str, folder: Path, cases: Mapping[str, Case], **variables: str
) -> Runs:
    """Run a script of this folder on all ranks: each case with its schedule and its options."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = [
        {"name": name, "variable": VARIABLES.get(case.get("schedule", "")), **case}
        for name, case in cases.items()
    ]
    (folder / "cases.json").write_text(json.dumps(listed))
    for name in cases:
        (folder / name).mkdir()
    port = str(random.SystemRandom().randrange(10_000, 32_000))
    command = ["-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--master-port", port]
    environment = {key: value for key, value in os.environ.items() if key != "MEGATRON_VSHAPE"}
    process = subprocess.run(
        [str(python_of(library)), *command, str(HERE / script), str(folder)],
        env=environment
        | {
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE, ROOT / "examples", HERE.parent))),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
        }
        | variables,
        capture_output=True,
        text=True,
        timeout=3000,
    )
    name = script.partition("_on_cpu")[0]  # slime, for one, runs in the environment of verl
    return Runs(name, folder, process.stdout + process.stderr)


def difference(actual: Any, expected: Any, where: str) -> float:
    """Return the largest difference of numbers in two nests of one shape; raises where not."""
    if isinstance(actual, dict):
        assert actual.keys() == expected.keys(), where
        differences = [difference(actual[key], expected[key], f"{where}.{key}") for key in actual]
        return max(differences, default=0.0)
    if isinstance(actual, list | tuple):
        assert len(actual) == len(expected), where
        pairs = enumerate(zip(actual, expected, strict=True))
        return max((difference(*pair, f"{where}.{index}") for index, pair in pairs), default=0.0)
    if isinstance(actual, torch.Tensor):
        assert actual.shape == expected.shape, where
        return float((actual.double() - expected.double()).abs().max()) if actual.numel() else 0.0
    if isinstance(actual, int | float) and not isinstance(actual, bool):
        return abs(actual - expected) / max(1.0, abs(expected))
    assert actual == expected, where
    return 0.0
