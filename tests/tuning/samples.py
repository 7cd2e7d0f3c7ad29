"""Sweeps for the tests: small files in the folder of a test."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from megatron_vshape.tuning.files import Loaded, load_sweep

ROOT = Path(__file__).parents[2]
FAKE = Path(__file__).parent / "fake"

MODEL = {
    "model_type": "gpt_neox",
    "use_parallel_residual": False,
    "num_hidden_layers": 8,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "vocab_size": 1024,
}
CLUSTER = {
    "name": "two",
    "nodes": 1,
    "devices_per_node": 2,
    "device": {
        "name": "thing",
        "memory_gib": 8,
        "peak_tflops": 1,
        "memory_tb_per_s": 0.1,
        "processors": 1,
    },
    "inside_node_gb_per_s": 10,
    "between_nodes_gb_per_s": 10,
    "backend": "gloo",
}
SWEEP = {
    "name": "test",
    "model": "model.yaml",
    "cluster": "cluster.yaml",
    "workloads": [{"sequence_length": 64, "global_batch_size": 8}],
    "grid": {
        "schedule": ["1f1b", "v-half"],
        "pipeline_parallel": [2],
        "microbatch_size": [1, 2],
        "layout": ["even"],
    },
    "pruning": {"margin": 0.99},
    "run": {
        "executor": "local",
        "warmup_steps": 1,
        "measured_steps": 2,
        "script": str(FAKE / "trainer.py"),
        "environment": {"PYTHONPATH": str(FAKE)},
    },
}


def run_over(**over: Any) -> dict[str, Any]:
    """Return the settings of the sample's runs, the given keys over them."""
    return {"run": {**SWEEP["run"], **over}}


def write_sweep(
    folder: Path,
    sweep: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    cluster: dict[str, Any] | None = None,
) -> Path:
    """Write the three files, the given keys over the samples', and return the sweep's path."""
    for name, base, over in (
        ("sweep", SWEEP, sweep),
        ("model", MODEL, model),
        ("cluster", CLUSTER, cluster),
    ):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(base | (over or {})))
    return folder / "sweep.yaml"


def load_sample(folder: Path, grid: dict[str, Any] | None = None, **over: Any) -> Loaded:
    """Return the sample sweep, the given keys over it, and over its grid."""
    if grid is not None:
        over["sweep"] = {"grid": {**SWEEP["grid"], **grid}, **over.get("sweep", {})}
    return load_sweep(write_sweep(folder, **over))


def sweep_command(*arguments: object) -> list[str]:
    """Return the command line of `megatron-vshape sweep`."""
    return [sys.executable, "-c", _MAIN, "sweep", *map(str, arguments)]


_MAIN = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from tuning.counts import install
install()
from megatron_vshape.cli.main import COMMANDS, main
COMMANDS.setdefault("sweep", "")
sys.exit(main())
"""
