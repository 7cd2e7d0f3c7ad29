"""What stages compute again in their backward, where a schedule says it, as a step's capability."""

from __future__ import annotations

from megatron_vshape.mcore.refusals import refusing
from megatron_vshape.mcore.setup.recompute import Recompute, set_recompute
from megatron_vshape.mcore.step.parts import Beginning, Capability


class Recomputing(Capability):
    """Sets the chunks of this rank as the schedule of a training step has them."""

    def __init__(self) -> None:
        """Begin with chunks as they were built."""
        self._chunks: list[Recompute] = []  # once a schedule has settings
        self._settings: tuple[str, ...] = ()  # of all stages, as the chunks have them now

    def begin(self, beginning: Beginning) -> None:
        """Have every chunk's backward compute again what the schedule says, or as it was built."""
        settings = beginning.program.schedule.recompute
        if settings == self._settings or beginning.step.forward_only:
            return
        self._chunks = self._chunks or [Recompute(chunk) for chunk in beginning.chunks]
        with refusing():
            set_recompute(self._chunks, beginning.stages, settings)
        self._settings = settings
