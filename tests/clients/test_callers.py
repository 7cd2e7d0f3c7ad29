"""The table of callers that query the pipeline stage covers every file of installed libraries."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from clients.launching import CHECKOUTS, ENVIRONMENTS
from mcore.callers import CALLERS

ASKS = re.compile(
    r"\b(is_pipeline_(first|last)_stage|get_pipeline_model_parallel_((first|last)_)?rank"
    r"|is_[pv]p_(first|last)_stage|get_pp_(first|last)_rank"
    r"|[gs]et_virtual_pipeline_model_parallel_(rank|world_size))\("
)

INSTALLED = {"swift": "swift", "mcore_bridge": "swift", "verl": "verl", "bridge": "verl"}
"""By library, the environment that has it."""

ADAPTER = "mcore_adapter"
"""It is in the checkout of ROLL, which calls it."""


def folder_of(library: str) -> Path:
    if library in INSTALLED:
        within = "megatron/bridge" if library == "bridge" else library
        environment = Path(os.environ.get("CLIENTS_FOLDER", ENVIRONMENTS)) / INSTALLED[library]
        return next(environment.glob(f"lib/python3*/site-packages/{within}"), environment / "no")
    repository = "roll" if library == ADAPTER else library
    checkout = os.environ.get(CHECKOUTS[repository], str(ENVIRONMENTS / f"{repository}-checkout"))
    return Path(checkout) / (f"{ADAPTER}/src/{ADAPTER}" if library == ADAPTER else library)


@pytest.mark.parametrize("library", [*INSTALLED, *CHECKOUTS, ADAPTER])
def test_table_lists_every_caller(library: str) -> None:
    folder = folder_of(library)
    if not folder.is_dir():
        pytest.skip(f"{library} is not installed: bash scripts/test.sh --nightly, or a checkout")
    files = {
        str(file.relative_to(folder))
        for file in folder.rglob("*.py")
        if ASKS.search(file.read_text(errors="ignore"))
    }
    assert files == {caller.file for caller in CALLERS if caller.library == library}
