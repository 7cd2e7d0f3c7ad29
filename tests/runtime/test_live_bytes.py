"""The count of live bytes that other tests compare with."""

import pytest
import torch
from live_bytes import LivePeak


def test_live_bytes_peak_inside_an_expression() -> None:
    with LivePeak() as live_bytes:
        values = torch.ones(100)
        live_bytes.reset_peak_memory_stats()
        assert live_bytes.max_memory_allocated() == live_bytes.memory_allocated() == 400
        result = (values + 1).sum()
        assert live_bytes.memory_allocated() == 400 + result.nbytes
        assert live_bytes.max_memory_allocated() == pytest.approx(800, abs=8)
