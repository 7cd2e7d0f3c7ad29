"""The count of live bytes that other tests compare with."""

import pytest
import torch
from live_bytes import LivePeak


def test_live_bytes_peak_inside_an_expression() -> None:
    with LivePeak() as live:
        kept = torch.ones(100)
        live.reset_peak_memory_stats()
        assert live.max_memory_allocated() == live.memory_allocated() == 400
        result = (kept + 1).sum()
        assert live.memory_allocated() == 400 + result.nbytes
        assert live.max_memory_allocated() == pytest.approx(800, abs=8)
