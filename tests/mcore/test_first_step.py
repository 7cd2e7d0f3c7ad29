"""Mistakes that only the first step's passes show are logged once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mcore.farm import Farm
from mcore.parity import RECOMPUTE, TWO, UNTIED
from mcore.ranks import run_ranks
from torch import Tensor, nn

from megatron_vshape.mcore.refusals import RefusedError, UnsupportedError
from megatron_vshape.mcore.step import first_step
from megatron_vshape.mcore.step.first_step import FirstStepWarnings, _StageFindings, check_packed

FULL = f"{RECOMPUTE} {TWO}"


class Chunk(nn.Module):
    """A chunk that is called as Megatron's models are."""

    def __init__(self) -> None:
        super().__init__()
        self.core_attention = nn.Identity()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, packed_seq_params: Any = None) -> Tensor:
        return self.weight * x


class MambaMixer(nn.Module):
    """A layer that is found by its name, as Megatron's, whose kernels are not installed."""


class GatedDeltaNet(nn.Module):
    """Likewise."""


class RecurrentChunk(Chunk):
    """A chunk without attention."""

    def __init__(self, mixer: type[nn.Module]) -> None:
        super().__init__()
        self.core_attention = None  # type: ignore[assignment]
        self.mixer = mixer()


def packed_params(**fields: Any) -> Any:
    return SimpleNamespace(cu_seqlens_q=torch.tensor([0, 3, 8]), **fields)


def warnings_of_cases(rank: int) -> list[list[str]]:
    """Return the warnings of one of two ranks, each of which has a stage, in every case."""
    return [two_steps(rank, *case) for *case, _ in CASES]


def two_steps(
    rank: int, passes_on: tuple[Any, Any], by_place: bool, mixer: type[nn.Module] | None
) -> list[str]:
    """Return the warnings of two steps."""
    texts: list[str] = []
    first_step.logger.warning = texts.append  # type: ignore[assignment,method-assign]
    chunk = Chunk() if mixer is None or rank == 0 else RecurrentChunk(mixer)
    capability = FirstStepWarnings()
    beginning: Any = SimpleNamespace(
        forward_only=False,
        groups=SimpleNamespace(pp=dist.group.WORLD),
        chunks=[chunk],
        stages=(rank,),
    )
    for _ in range(2):
        part = capability.begin(beginning)
        ends = passes_on[rank] or None
        y = chunk(torch.ones(2), ends) if by_place else chunk(torch.ones(2), packed_seq_params=ends)
        if part is not None:
            part.ends_forward(rank, False, 0, y)
        try:
            capability.end(beginning)
        except RefusedError as error:
            return [*texts, error.why]
        assert not chunk._forward_pre_hooks
    return texts


PACKED = packed_params(seq_idx=torch.zeros(1, 8))
UNNUMBERED = packed_params(seq_idx=None)
ONE_SEQUENCE = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 8]), seq_idx=None)
UNPACKED = "stages 1 were called without packed_seq_params for microbatches"


CASES: list[tuple[tuple[Any, Any], bool, type[nn.Module] | None, str]] = [
    ((True, False), False, None, UNPACKED),
    ((True, False), True, None, UNPACKED),
    ((True, True), False, None, ""),
    ((False, False), False, None, ""),
    *(((PACKED, None), False, mixer, UNPACKED) for mixer in (MambaMixer, GatedDeltaNet)),
    *(((PACKED, PACKED), False, mixer, "") for mixer in (MambaMixer, GatedDeltaNet)),
    (
        (UNNUMBERED, UNNUMBERED),
        False,
        MambaMixer,
        "stages 1 have Mamba layers and were called with packed_seq_params",
    ),
    # Other layers do not read it, and one sequence has no borders.
    ((UNNUMBERED, UNNUMBERED), False, GatedDeltaNet, ""),
    ((ONE_SEQUENCE, ONE_SEQUENCE), False, MambaMixer, ""),
]
"""Packed sequences by rank, passed by position or by name; a layer of rank 1; and the warning."""


def test_stages_with_and_without_sequence_borders(farm: Farm) -> None:
    pairs = zip(*run_ranks(farm, 2, warnings_of_cases), strict=True)
    for (first, second), (*case, start) in zip(pairs, CASES, strict=True):
        assert first == second  # so that all ranks end
        assert len(first) == bool(start), case
        assert not start or first[0].startswith(start)


def test_microbatches_of_one_sequence_may_be_unpacked_on_all_stages() -> None:
    def check(*packed: set[bool]) -> None:
        check_packed([_StageFindings(stage, 0, frozenset(s)) for stage, s in enumerate(packed)])

    check({True, False}, {True, False}, {True, False})
    check({True, False}, set())  # no attention
    with pytest.raises(UnsupportedError, match="^stages 0, 1 were called without"):
        check({True, False}, {False})
    with pytest.raises(UnsupportedError, match="^stages 0 were called without"):
        check({True, False}, {True})


def test_frozen_embedding_under_full_recompute_is_logged(farm: Farm) -> None:
    flags = ("--pipeline-schedule", "v-half", *FULL.split(), UNTIED)
    run = farm.run(2, *flags, plugin="plugins:frozen_embedding").check()
    lines = [line for line in run.output[0].splitlines() if "get no gradient" in line]
    assert len(lines) == 1
    assert "stage 0: " in lines[0]
    assert not any("get no gradient" in text for text in run.output[1:])
    first = run.records[0]["gradients"]
    assert any(not gradient.any() for gradient in first.values())


@pytest.mark.slow
def test_other_runs_log_no_warning(farm: Farm) -> None:
    for flags, plugin in ((FULL, ""), (TWO, "plugins:frozen_embedding")):
        flags = ("--pipeline-schedule", "v-half", *flags.split(), UNTIED)
        run = farm.run(2, *flags, plugin=plugin).check()
        assert not any("get no gradient" in text for text in run.output)
