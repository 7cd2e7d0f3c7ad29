"""ROLL: the converter of its mcore_adapter, which loads the weights of a rank.

It numbers stages by chunk, then rank, and treats a tied output layer as a separate weight.
"""

from __future__ import annotations

import sys
from bisect import bisect
from itertools import accumulate
from typing import Any

from megatron_vshape.mcore.frameworks import Framework
from megatron_vshape.mcore.hook import Session

CONVERTER = "mcore_adapter.models.converter.dist_converter"
_ROWS = "embedding.word_embeddings.weight"


class Roll(Framework):
    """Loads the weights of the stages of this rank."""

    def adapt(self, session: Session, config: Any) -> None:
        """Replace the converter's lookups of the stage of a weight."""
        converter: Any = getattr(sys.modules.get(CONVERTER), "DistConverter", None)
        replaced, pipeline = session.process.replaced, session.pipeline
        if converter is None or replaced.has(converter, "_get_layer_info"):
            return
        stage_map, is_here = pipeline.stage_map, converter.is_on_this_rank
        starts = [0, *accumulate(stage_map.layers)]

        def layer_info(self: Any, layer: int) -> tuple[int, int, int]:
            stage = bisect(starts, layer) - 1
            return layer - starts[stage], stage_map.placement[stage], stage_map.chunk(stage)

        def is_first(self: Any, vp_stage: int) -> bool:
            return bool(pipeline.ends(self.pipeline_model_parallel_rank, vp_stage)[0])

        def is_last(self: Any, vp_stage: int) -> bool:
            return bool(pipeline.ends(self.pipeline_model_parallel_rank, vp_stage)[1])

        def is_on_this_rank(self: Any, weight_name: str, vp_stage: int | None = None) -> bool:
            # A tied output layer is the embedding itself, so only the chunk of the first stage
            # loads it.
            is_twice = stage_map.ends_meet and weight_name == _ROWS and not self.revert
            elsewhere = is_twice and not is_first(self, vp_stage or 0)
            return not elsewhere and bool(is_here(self, weight_name, vp_stage))

        replaced.put(converter, "_get_layer_info", layer_info)
        replaced.put(converter, "is_pipeline_first_stage", is_first)
        replaced.put(converter, "is_pipeline_last_stage", is_last)
        replaced.put(converter, "is_on_this_rank", is_on_this_rank)


FRAMEWORK = Roll()
