"""Offloading of layers that compute on several streams: no memory is reused too early."""

from mcore.farm import Farm
from mcore.ranks import run_ranks


def find_stream_faults(rank: int) -> list[list[str]]:
    from megatron_vshape.mcore import cpu

    cpu.install()
    from mcore.offload_beside import wrong_beside_shared_experts

    return [
        wrong_beside_shared_experts(rank, skips_other_streams)
        for skips_other_streams in (True, False)
    ]


def test_tensors_read_by_another_stream_in_b_are_not_reused(farm: Farm) -> None:
    """Shared experts are computed on a separate stream, concurrent with the routed experts.

    If their saved tensors are reloaded on the compute stream, the allocator can reuse the memory
    while the shared experts still read it.
    """
    for package_faults, faults_without_skip in run_ranks(
        farm, 2, find_stream_faults, timeout_s=120
    ):
        assert package_faults == []
        assert set(faults_without_skip) == {"memory of main goes while stream 1 may use it"}
