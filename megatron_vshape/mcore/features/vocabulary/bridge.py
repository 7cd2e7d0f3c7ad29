"""Megatron-Bridge's conversion of weights, for rows that all pipeline ranks share."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from megatron.core import parallel_state

from megatron_vshape.mcore.setup.features import Patch

_MAPPING = "megatron.bridge.models.conversion.param_mapping"
_ROWS = "embedding.word_embeddings.weight", "output_layer.weight"


def convert_rows(patch: Patch) -> None:
    """Make Megatron-Bridge load and export embedding rows that all pipeline ranks share.

    Megatron-Bridge expects each weight on one stage, sharded over its tensor-parallel ranks. With
    vocabulary parallelism, all ranks of the pipeline have consecutive shards. The patch applies
    only if Megatron-Bridge builds the model.
    """
    mapping: Any = getattr(sys.modules.get(_MAPPING), "MegatronParamMapping", None)
    if mapping is not None:
        patch(mapping, lambda: _over_pipeline(mapping))


def _over_pipeline(mapping: Any) -> Mapping[str, Any]:
    tensor_group, pipeline_size = mapping.tp_group.fget, mapping.pp_size.fget

    def tp_group(self: Any) -> Any:
        is_shared = self.megatron_param.endswith(_ROWS)
        return parallel_state.get_model_parallel_group() if is_shared else tensor_group(self)

    def pp_size(self: Any) -> Any:
        return 1 if self.megatron_param.endswith(_ROWS) else pipeline_size(self)

    return {"tp_group": property(tp_group), "pp_size": property(pp_size)}
