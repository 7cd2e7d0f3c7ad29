"""Profiles by Megatron's flags show this package's passes, waits and weight jobs."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

from mcore.farm import Farm
from mcore.parity import UNTIED

from megatron_vshape.core.paper.catalogue import make

LAYER = "decoder.layers.0."
LINEARS = ["mlp.linear_fc2", "mlp.linear_fc1", "self_attention.linear_proj"]
LINEARS += ["self_attention.linear_qkv"]


def test_a_profile_of_megatrons_shows_every_pass(farm: Farm, tmp_path: Path) -> None:
    flags = "--profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end 2".split()
    folder = ("--tensorboard-dir", str(tmp_path / "board"))
    run = ("--pipeline-schedule", "v-half", "--train-iters", "3", UNTIED, "--num-layers", "4")
    farm.run(2, *run, *flags, *folder).check()
    schedule = make("v-half", 2, 8)
    for rank in range(2):
        with gzip.open(tmp_path / "torch_profile" / f"rank-{rank}.json.gz", "rt") as stream:
            events = json.load(stream)["traceEvents"]
        events.sort(key=lambda event: event.get("ts", 0))
        jobs = [event for event in events if event["name"].startswith("job ")]
        passes = [e for e in events if re.fullmatch(r"(F|B|W|BW)\d+\.\d+", e["name"])]
        # Where a B has its W right after it, the two run as one pass.
        apart = [re.sub(r"^BW(.*)", r"B\1 W\1", event["name"]) for event in passes]
        assert " ".join(apart).split() == [str(work) for work in schedule.order[rank]]
        split = [event for event in passes if event["name"].startswith("W")]
        assert split
        for event in passes:
            end = event["ts"] + event["dur"]
            within = [job["name"] for job in jobs if event["ts"] <= job["ts"] < end]
            head = ["job output_layer"] if event["name"].startswith("W3.") else []
            full_jobs = [*head, *(f"job {LAYER}{name}" for name in LINEARS)]
            assert within == (full_jobs if event in split else [])
        assert any(event["name"].startswith("wait ") for event in events)
