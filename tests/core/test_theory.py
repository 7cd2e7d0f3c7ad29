"""The theory table is computed, and its rows equal those of the papers."""

import pytest
from theory import analyse

from megatron_vshape.core.model.kinds import ScheduleError


def test_memory_of_earlier_methods() -> None:
    """GEMS: one microbatch, Chimera: d / 2 + 1, BPipe: (d + 2) / 2; 1F1B: d."""
    for d in (4, 8, 16):
        assert analyse("gems", d, 2 * d).peak == 2
        assert analyse("chimera", d, 2 * d).peak == 2 * (d // 2 + 1)
        assert analyse("bpipe", d, 2 * d).peak == d + 2


def test_bubbles_of_earlier_methods() -> None:
    d, m = 8, 64
    assert analyse("chimera", d, m).overhead == 3 * (d - 2)
    assert analyse("bpipe", d, m).overhead == analyse("1f1b", d, m).overhead
    gems = analyse("gems", d, m)
    assert gems.span_overhead / (gems.span_overhead + 6 * m) == (d - 1) / (d + 1 / 2)


def test_odd_number_of_devices_is_rejected() -> None:
    with pytest.raises(ScheduleError) as error:
        analyse("chimera", 5, 8)
    assert str(error.value) == (
        "chimera is analysed for an even number of devices and at least 1 microbatch, not for 5 "
        "devices and 8"
    )
