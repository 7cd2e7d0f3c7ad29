"""Megatron-Bridge: its providers of models, its conversion of weights, and its checkpoints."""

from __future__ import annotations

import inspect
import os
import sys
from argparse import Namespace
from typing import Any

from megatron.core import parallel_state

from megatron_vshape.mcore.frameworks import Framework
from megatron_vshape.mcore.hook import Function, Replaced, Session, replaces

_MAPPING = "megatron.bridge.models.conversion.param_mapping"
_ROWS = "embedding.word_embeddings.weight", "output_layer.weight"


class Bridge(Framework):
    """Builds several chunks, and converts embedding rows that all pipeline ranks share."""

    def adapt(self, session: Session, config: Any) -> None:
        """Patch the provider of the config's model, and the mapping of shared rows."""
        replaced = session.process.replaced
        # The config is the provider.
        owner: Any = next((base for base in type(config).__mro__ if "provide" in vars(base)), None)
        if owner is not None and not replaced.has(owner, "provide"):
            if "vp_stage" in inspect.signature(owner.provide).parameters:
                replaced.put(owner, "provide", provide_chunk(session, owner.provide))
        mapping: Any = getattr(sys.modules.get(_MAPPING), "MegatronParamMapping", None)
        if mapping is not None and not replaced.has(mapping, "tp_group"):
            if session.pipeline.choice.shards_output_layer:
                _convert_shared_rows(replaced, mapping)

    def saved_options(self, folder: str) -> Namespace | None:
        """Return the options that a checkpoint has as YAML."""
        import yaml  # type: ignore[import-untyped]

        try:
            with open(os.path.join(folder, "run_config.yaml"), encoding="utf-8") as file:
                model = yaml.safe_load(file)["model"]
        except (OSError, yaml.YAMLError, KeyError, TypeError):
            return None
        # A layout may be that of this package, whose text does not have the placement.
        has_layout = model.get("pipeline_model_parallel_layout") is not None
        return None if has_layout else Namespace(**model)


FRAMEWORK = Bridge()


@replaces
def provide_chunk(
    session: Session,
    original: Function,
    config: Any,
    pre_process: bool | None = None,
    post_process: bool | None = None,
    vp_stage: int | None = None,
) -> Any:
    """Build one of several chunks, with the ends of the model that its stage has.

    Megatron-Bridge derives the ends from the position of the rank, and a model with an encoder
    builds the encoder by them. `model_init` and `block_init` pass the chunk to constructors that
    get no vp_stage (Qwen3-VL, Qwen-Omni, Qwen3-ASR, hybrid models).
    """
    if session.pipeline is None or vp_stage is None:
        return original(config, pre_process, post_process, vp_stage)
    ends = session.pipeline.ends(parallel_state.get_pipeline_model_parallel_rank(), vp_stage)
    with session.build.setting(provided_chunk=vp_stage), Replaced() as replaced:
        if not getattr(config, "is_hybrid_model", False):
            return original(config, *ends, vp_stage)
        # The provider of hybrid models rejects virtual stages, although its model supports them.
        replaced.put(config, "virtual_pipeline_model_parallel_size", None)
        return original(config, *ends)


def _convert_shared_rows(replaced: Replaced, mapping: Any) -> None:
    """Load and export embedding rows that all pipeline ranks share.

    Megatron-Bridge expects each weight on one stage, sharded over its tensor-parallel ranks. With
    vocabulary parallelism, all ranks of the pipeline have consecutive shards.
    """
    tensor_group, pipeline_size = mapping.tp_group.fget, mapping.pp_size.fget

    def tp_group(self: Any) -> Any:
        is_shared = self.megatron_param.endswith(_ROWS)
        return parallel_state.get_model_parallel_group() if is_shared else tensor_group(self)

    def pp_size(self: Any) -> Any:
        return 1 if self.megatron_param.endswith(_ROWS) else pipeline_size(self)

    replaced.put(mapping, "tp_group", property(tp_group))
    replaced.put(mapping, "pp_size", property(pp_size))
