"""What passes have in use, by an allocator that tests write the figures of."""

import pytest
import torch
from in_use import PassNeeds, StepPeaks
from live_bytes import LivePeak

from megatron_vshape.core.model.passes import Pass


class Figures:
    """An allocator's statistics."""

    def __init__(self) -> None:
        self.now = self.peak = 1000  # what lives for ever

    def change(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    def memory_allocated(self) -> int:
        return self.now

    def max_memory_allocated(self) -> int:
        return self.peak

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.now


def run(figures: Figures, observer: PassNeeds | StepPeaks, work: str, *changes: int) -> None:
    """Run a pass; the first change is its input, the others happen inside."""
    figures.change(changes[0])
    observer.begins(Pass.parse(work))
    for each in changes[1:]:
        figures.change(each)
    observer.ends(Pass.parse(work))


def test_a_pass_needs_its_input_and_what_lives_inside_it() -> None:
    figures = Figures()
    figures.change(500)  # a peak of before
    figures.change(-500)
    needs = PassNeeds(figures)
    run(figures, needs, "F0.0", 10, 60, 30, -30)
    run(figures, needs, "B0.0", 10, 25, -40)
    run(figures, needs, "W0.0", 0, -65)
    assert figures.now == 1000
    run(figures, needs, "F0.1", 10, 60, 20, -20)
    run(figures, needs, "BW0.1", 10, 35, -115)
    kinds = {str(kind): size for kind, size in needs.in_use_bytes.items()}
    assert kinds == {"F": 100, "B": 35, "W": 0, "BW": 45}


def test_a_step_peaks_inside_a_pass_and_holds_less_after_it() -> None:
    figures = Figures()
    peaks = StepPeaks(figures)
    run(figures, peaks, "F0.0", 10, 60, 300, -300)
    run(figures, peaks, "F0.1", 10, 60, 300, -300)
    run(figures, peaks, "BW0.0", 10, -80)
    assert peaks.after_pass_bytes == 140
    assert peaks.peak_bytes == 440


def test_live_bytes_peak_inside_an_expression() -> None:
    with LivePeak() as live:
        kept = torch.ones(100)
        live.reset_peak_memory_stats()
        assert live.max_memory_allocated() == live.memory_allocated() == 400
        result = (kept + 1).sum()
        assert live.memory_allocated() == 400 + result.nbytes
        assert live.max_memory_allocated() == pytest.approx(800, abs=8)
