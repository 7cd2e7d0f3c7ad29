"""Train a GPT with Megatron's trainer, with this package's schedules added to Megatron's flags.

Start it with torchrun, as Megatron-LM's pretrain_gpt.py; every flag is Megatron's, and
`--pipeline-schedule` comes from this package. It needs no Megatron-LM checkout: the megatron-core
wheel includes the trainer. If torch sees no GPU it trains on the CPU, over gloo.
"""

from __future__ import annotations

import importlib.util
import inspect
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import megatron_vshape
from megatron_vshape.mcore import cpu

# Both are outside the guarded main: writing a checkpoint starts processes that import this file
# again, and they need the same torch. They precede Megatron's imports, which copy from torch.
cpu.install()
megatron_vshape.register()

import megatron.core.datasets.utils as dataset_utils  # noqa: E402
import megatron.training  # noqa: E402
from megatron.core import mpu  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import (  # noqa: E402
    BlendedMegatronDatasetBuilder,
)
from megatron.core.datasets.gpt_dataset import (  # noqa: E402
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
)
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.rerun_state_machine import get_rerun_state_machine  # noqa: E402
from megatron.core.tensor_parallel import broadcast_data  # noqa: E402
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer  # noqa: E402
from megatron.core.transformer.spec_utils import import_module  # noqa: E402
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank  # noqa: E402
from megatron.training import arguments, get_args, get_timers  # noqa: E402
from megatron.training.utils import get_blend_and_blend_per_split  # noqa: E402

Batch = dict[str, torch.Tensor]
LossReport = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]

_INTEGER_KEYS = ["tokens", "labels", "position_ids"]
_FLOAT_KEYS = ["loss_mask"]
# These need inputs on the inner stages, which this script does not provide.
_UNSUPPORTED_FLAGS = {
    "sft": "--sft",
    "reset_attention_mask": "--reset-attention-mask",
    "hybrid_context_parallel": "--hybrid-context-parallel",
}


_NEEDS_0_19 = {
    "experimental_attention_variant": "--experimental-attention-variant",
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path",
    "mla_down_proj_fusion": "--mla-down-proj-fusion",
    "kitchen_config_file": "--kitchen-config-file",
    "kitchen_recipe_number": "--kitchen-recipe-number",
}


def forward_step(
    data_iterator: Iterator[Batch] | None, model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[[torch.Tensor], LossReport]]:
    """Return the output of this rank's chunk `model` and the function that computes its loss.

    With `return_schedule_plan`, return Megatron's layer plan instead of the output.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = _next_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    call = model.build_schedule_plan if return_schedule_plan else model
    output = call(
        batch.get("tokens"),
        batch.get("position_ids"),
        None,  # the causal mask, which attention creates
        labels=batch.get("labels"),
        loss_mask=batch.get("loss_mask"),  # for multi-token prediction
    )
    return output, partial(_loss, batch.get("loss_mask"))


def _next_batch(data_iterator: Iterator[Batch] | None, chunk: int | None) -> Batch:
    """Return this rank's part of the next microbatch, or {} if the chunk is in the middle."""
    if not _reads_data(chunk):
        return {}
    batch: Batch = {}
    if data_iterator is not None:
        batch = {key: value.cuda(non_blocking=True) for key, value in next(data_iterator).items()}
    if mpu.get_tensor_model_parallel_world_size() > 1:
        batch = broadcast_data(_INTEGER_KEYS, batch, torch.int64) | broadcast_data(
            _FLOAT_KEYS, batch, torch.float32
        )
    batch = {key: batch[key] for key in _INTEGER_KEYS + _FLOAT_KEYS}
    return _sequence_part(batch) if mpu.get_context_parallel_world_size() > 1 else batch


def _reads_data(chunk: int | None) -> bool:
    """Return whether this rank's chunk has the model's first or its last stage."""
    return bool(
        mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk)
        or mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk)
    )


def _sequence_part(batch: Batch) -> Batch:
    """Return the part of each sequence that belongs to this context-parallel rank."""
    options: dict[str, Any] = {"cp_group": mpu.get_context_parallel_group()}
    if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters:  # from 0.18 on
        options["is_hybrid_cp"] = False
    part: Batch = get_batch_on_this_cp_rank(batch, **options)
    return part


def _loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> LossReport:
    """Return the summed loss of the tokens that count, their number, and both for the log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    if get_args().check_for_nan_in_loss_and_grad:
        for rejects, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=rejects,
                message=f"found {what} in the loss of a microbatch",
                tolerance=0.0,  # a forward pass repeats exactly
                fatal=True,
            )
    num_tokens = mask.sum().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens])}


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, ...]:
    """Return the training, validation and test sets; each is None on ranks that read no data."""
    args = get_args()

    def is_built_here() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and _reads_data(vp_stage)

    kind = MockGPTDataset if args.mock_data else GPTDataset
    datasets: tuple[Any, ...] = BlendedMegatronDatasetBuilder(
        kind, num_samples, is_built_here, _dataset_config(args)
    ).build()
    return datasets


# Megatron's mark for functions that every rank calls.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def _dataset_config(args: Namespace) -> GPTDatasetConfig:
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
    )


def _model_provider(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **options: Any
) -> torch.nn.Module:
    """Return one chunk of the model, for the trainers before 0.19, which require a function."""
    args = get_args()
    for name, flag in _NEEDS_0_19.items():
        value = getattr(args, name, None)
        if value is not None and value is not False:
            raise SystemExit(f"{flag} needs megatron-core 0.19 or later in this script")
    _refuse_unsupported(args)  # 0.17 reads the flags where this script has no access
    config = options.get("config") or arguments.core_transformer_config_from_args(args)
    chunk: dict[str, Any] = {
        "config": config,
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "pre_process": pre_process,
        "post_process": post_process,
        "fp16_lm_cross_entropy": args.fp16_lm_cross_entropy,
        "parallel_output": True,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "position_embedding_type": args.position_embedding_type,
        "rotary_percent": args.rotary_percent,
        "rotary_base": args.rotary_base,
        "vp_stage": vp_stage,
    }
    if args.hybrid_layer_pattern is not None:
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        pattern = args.hybrid_layer_pattern
        return HybridModel(
            **chunk, hybrid_layer_pattern=pattern, hybrid_stack_spec=_hybrid_spec(args)
        )
    spec = _gpt_spec(args, config, vp_stage)
    return GPTModel(
        **chunk,
        transformer_layer_spec=spec,
        mtp_block_spec=_multi_token_spec(args, config, vp_stage),
        rope_scaling=args.use_rope_scaling,
    )


def _gpt_spec(args: Namespace, config: Any, vp_stage: int | None) -> Any:
    """Return the spec of Megatron's `gpt_builders.py` before 0.19, which no wheel includes."""
    if args.spec is not None:
        return import_module(args.spec)
    from megatron.core.models.gpt import gpt_layer_specs as specs

    on_transformer_engine = args.transformer_impl == "transformer_engine"
    norms = {"normalization": args.normalization, "qk_l2_norm": args.qk_l2_norm}
    if args.num_experts:
        return specs.get_gpt_decoder_block_spec(
            config, on_transformer_engine, vp_stage=vp_stage, **norms
        )
    attention = {
        "qk_layernorm": args.qk_layernorm,
        "multi_latent_attention": args.multi_latent_attention,
    }
    if on_transformer_engine:
        return specs.get_gpt_layer_with_transformer_engine_spec(
            **attention,
            qk_l2_norm=args.qk_l2_norm,
            use_te_activation_func=config.use_te_activation_func,
        )
    return specs.get_gpt_layer_local_spec(**attention, **norms)


def _multi_token_spec(args: Namespace, config: Any, vp_stage: int | None) -> Any:
    """Return layers like the last of the decoder, for multi-token prediction; None without it."""
    if args.mtp_num_layers is None:
        return None
    from megatron.core.models.gpt import gpt_layer_specs as specs

    on_transformer_engine = args.transformer_impl == "transformer_engine"
    options = {"use_transformer_engine": on_transformer_engine, "vp_stage": vp_stage}
    norms = {"normalization": args.normalization, "qk_l2_norm": args.qk_l2_norm}
    layers = specs.get_gpt_decoder_layer_specs(config, **options, **norms)  # of all stages
    return specs.get_gpt_mtp_block_spec(config, layers[-1], **options)


def _hybrid_spec(args: Namespace) -> Any:
    """Return `--spec`, or else the layers of the selected implementation."""
    if args.spec is not None:
        return import_module(args.spec)
    if args.transformer_impl == "local":
        from hybrid_local import local_stack_spec

        return local_stack_spec
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    return hybrid_stack_spec


def _model_config(args: Namespace) -> Any:
    """Return the configuration of the model: a hybrid one if a pattern of layers is given."""
    from megatron.training import argument_utils

    if args.hybrid_layer_pattern is None:
        return argument_utils.gpt_config_from_args(args)
    config = argument_utils.hybrid_config_from_args(args)
    if args.transformer_impl == "local":
        config.hybrid_stack_spec = _hybrid_spec(args)
    return config


def _refuse_unsupported(args: Namespace) -> None:
    for name, flag in _UNSUPPORTED_FLAGS.items():
        if getattr(args, name, None):
            raise SystemExit(f"{flag} is not supported by this script: leave it out")
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if isinstance(layout, str) and "m" in layout.rpartition("|")[0]:
        raise SystemExit(
            f"--pipeline-model-parallel-layout {layout} has multi-token prediction in a stage that "
            "this script feeds nothing: put it into the last, as in ...|tmL"
        )
    without_hybrid = importlib.util.find_spec("megatron.core.models.hybrid") is None
    if without_hybrid and args.hybrid_layer_pattern is not None:
        raise SystemExit("--hybrid-layer-pattern needs megatron-core 0.18 or later in this script")


def _keep_compiled_helpers() -> None:
    """Use the wheel's compiled dataset helpers; Megatron would run `make`, without a Makefile."""
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        dataset_utils.compile_helpers = lambda: None


def main() -> None:
    """Call Megatron's trainer in the form of the installed version."""
    _keep_compiled_helpers()
    # Looked up here, not imported by name, because the schedules replace this attribute.
    pretrain = megatron.training.pretrain
    steps = (ModelType.encoder_or_decoder, forward_step)
    if not hasattr(arguments, "parse_and_validate_args"):  # 0.17: the trainer reads the flags
        pretrain(datasets_provider, _model_provider, *steps)
        return
    from megatron.training import argument_utils

    args = arguments.parse_and_validate_args()
    _refuse_unsupported(args)
    if hasattr(argument_utils, "gpt_config_from_args"):  # from 0.19 on: the model is configuration
        config = argument_utils.pretrain_cfg_container_from_args(args, _model_config(args))
        pretrain(config, datasets_provider, *steps)
    else:
        config = argument_utils.pretrain_cfg_container_from_args(args)
        pretrain(config, datasets_provider, _model_provider, *steps)


if __name__ == "__main__":
    main()
