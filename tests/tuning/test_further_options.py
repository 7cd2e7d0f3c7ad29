"""Options that advise lists if no configuration fits, by the memory of their dry runs."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from rehearsal.reports import report_of

from megatron_vshape.rehearsal.gpus import GIB, GPUS
from megatron_vshape.rehearsal.rank_job import RankJob
from megatron_vshape.rehearsal.rank_report import RankReport
from megatron_vshape.rehearsal.ranks import DryRunConfig, Programs
from megatron_vshape.tuning import further_options
from megatron_vshape.tuning.configurations import Subject, configuration_of_command

FLAGS = """--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 32 --bf16
    --pipeline-model-parallel-size 4 --vocab-size 100 --transformer-impl local"""
PROGRAMS = DryRunConfig(
    Programs(None, None, 1), Path("pretrain_gpt.py"), GPUS["h100"], 100, 1.0, False, None
)


def name_of(job: RankJob) -> str:
    """Name the options of a job."""
    if job.lora is not None:
        return "lora"
    if "--exp-avg-dtype" in job.flags:
        return "bf16 states"
    if "--optimizer-cpu-offload" in job.flags:
        return "cpu"
    return f"{job.world} GPUs"


def options_that_fit(monkeypatch: pytest.MonkeyPatch, *fitting: str) -> list[str]:
    """Return the listed options if the dry runs of these names fit."""

    def rehearse_all(_: Programs, jobs: Iterable[RankJob]) -> Iterator[RankReport]:
        for job in jobs:
            peak_bytes = (10 if name_of(job) in fitting else 100) * GIB
            yield report_of(name=job.name, peak_bytes=peak_bytes)

    monkeypatch.setattr(further_options, "rehearse_all", rehearse_all)
    subject = Subject.of_command(["pretrain_gpt.py", *FLAGS.split()], "")
    config = configuration_of_command(subject, 4)
    return further_options.find_fitting_options(subject, config, 0, PROGRAMS, 0.0)


def test_options_that_fit_are_listed_with_their_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    bf16, lora = options_that_fit(monkeypatch, "bf16 states", "lora")
    assert "--exp-avg-dtype bf16" in bf16
    assert "--recompute-granularity full" in bf16
    assert lora.startswith("LoRA adapters of rank 16 instead of full training (--lora-rank)")
    (cpu,) = options_that_fit(monkeypatch, "cpu")
    assert "--optimizer-cpu-offload" in cpu
    assert options_that_fit(monkeypatch) == []


def test_only_the_smallest_number_of_gpus_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = options_that_fit(monkeypatch, "16 GPUs", "32 GPUs")
    assert text.startswith("16 GPUs")
