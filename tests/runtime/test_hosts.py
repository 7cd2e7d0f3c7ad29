"""The number of ranks per host with every launcher, and the memory share of each rank."""

import socket

import pytest
import torch
from runtime.ranks import run_ranks

from megatron_vshape.runtime import host_memory
from megatron_vshape.runtime.hosts import ranks_in_environment, ranks_of_this_host
from megatron_vshape.runtime.offload import Offload

LAUNCHED = [
    ({"LOCAL_WORLD_SIZE": "8", "SLURM_NTASKS_PER_NODE": "1"}, 8),  # torchrun, by srun on each node
    ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "SLURM_NTASKS_PER_NODE": "1"}, 4),
    ({"MPI_LOCALNRANKS": "4"}, 4),
    ({"PMI_LOCAL_SIZE": "4"}, 4),
    ({"SLURM_NTASKS_PER_NODE": "8"}, 8),
    ({"SLURM_NTASKS_PER_NODE": "8(x2)"}, 8),
    ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_NTASKS_PER_NODE": "1"}, 8),
    ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "2"}, 4),
    ({"SLURM_STEP_TASKS_PER_NODE": "2,4", "SLURM_NODEID": "7"}, 4),
    ({"SLURM_NTASKS_PER_NODE": "8-16"}, None),
    ({"LOCAL_WORLD_SIZE": "", "SLURM_NTASKS_PER_NODE": "0"}, None),
    ({}, None),
]


@pytest.mark.parametrize(("environ", "ranks"), LAUNCHED)
def test_launcher_variables_give_the_ranks_per_host(
    environ: dict[str, str], ranks: int | None
) -> None:
    assert ranks_in_environment(environ) == ranks


COUNTED = [
    ({}, [2, 2, 1]),
    # In an allocation for one task a node, by hand; and for more than there are on one.
    ({"SLURM_NTASKS_PER_NODE": "1"}, [2, 2, 1]),
    ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, [1, 1, 1]),
]


def count_ranks(rank: int) -> list[int]:
    """Return the ranks of a host, of which one has two and the other one, in each environment."""
    counts = []
    for environment, _ in COUNTED:
        with pytest.MonkeyPatch.context() as patch:
            clear_environment(patch)
            for name, value in environment.items():
                patch.setenv(name, value)
            patch.setattr(socket, "gethostname", lambda: f"node{rank // 2}")
            counts.append(ranks_of_this_host())
    return counts


def clear_environment(patch: pytest.MonkeyPatch) -> None:
    for name in {name for environment, _ in LAUNCHED for name in environment}:
        patch.delenv(name, raising=False)


def test_ranks_with_equal_host_names_are_counted_without_a_launcher() -> None:
    counts_by_rank = run_ranks(3, count_ranks)
    assert [list(counts) for counts in zip(*counts_by_rank, strict=True)] == [
        expected for _, expected in COUNTED
    ]


def test_ranks_share_nine_tenths_of_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_environment(monkeypatch)
    monkeypatch.setattr(host_memory, "_free_by_source", lambda: iter((1000, 4000)))
    assert host_memory.free_host_bytes() == 900
    assert host_memory.free_host_bytes(8) == 112
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    assert host_memory.free_host_bytes() == 225
    host = Offload(torch.device("cpu"), ranks=8).host
    assert host.take(112) is not None
    assert Offload(torch.device("cpu"), ranks=16).host.take(112) is None
