"""Megatron-Bridge's `pretrain` of tiny vision-language models: losses and gradients of ranks.

    TRANSFORMER_ENGINE_PYTHON=DIRECTORY python vlm_on_cpu.py FOLDER

Imports need most of a minute, so one process imports all, and forks four ranks for each case of
`FOLDER/cases.json`. Layers of Transformer Engine run its Python with torch kernels.
"""

from __future__ import annotations

import faulthandler
import functools
import hashlib
import importlib
import importlib.machinery
import json
import os
import sys
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "clients"), os.environ["TRANSFORMER_ENGINE_PYTHON"]]

import on_cpu  # noqa: E402

on_cpu.install()

import bridge_on_cpu  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402

RANKS, LIMIT_S = 4, 600
IMAGE, VIDEO, START, END = 250, 251, 248, 249
LENGTH, VOCABULARY, GRID, MERGED = 48, 256, (1, 4, 4), 4
"""Each image has a grid of patches, four of which become a token."""

MODELS = {
    "qwen25": ("qwen_vl", "qwen25_vl_provider", "Qwen25VLModelProvider"),
    "qwen3": ("qwen_vl", "qwen3_vl_provider", "Qwen3VLModelProvider"),
    "qwen3-moe": ("qwen_vl", "qwen3_vl_provider", "Qwen3VLMoEModelProvider"),
    "glm45v": ("glm_vl", "glm_45v_provider", "GLM45VModelProvider"),
}


def import_bridge() -> None:
    """Import what all cases need, without Bridge's lists of all models and recipes."""
    bridge_on_cpu.ABSENT = tuple(
        name for name in bridge_on_cpu.ABSENT if name != "transformer_engine"
    )
    bridge_on_cpu.stand_in()
    bridge_on_cpu.without_all_models()
    for name in ("qwen_vl", "qwen_vl.modelling_qwen3_vl", "glm_vl"):
        name = f"megatron.bridge.models.{name}"
        parent = sys.modules[name.rpartition(".")[0]]
        spec = importlib.machinery.PathFinder.find_spec(name, parent.__path__)
        package = types.ModuleType(name)
        package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec
        sys.modules[name] = package
        setattr(parent, name.rpartition(".")[2], package)
    for folder, module, _ in MODELS.values():
        importlib.import_module(f"megatron.bridge.models.{folder}.{module}")
    for name in ("training.pretrain", "training.vlm_step", "models.qwen_vl.qwen3_vl_step"):
        importlib.import_module(f"megatron.bridge.{name}")


def replace_attention() -> None:
    """Replace attention of Transformer Engine's layers by torch's, also packed and not causal."""
    import megatron.core.extensions.transformer_engine as engine
    from megatron.core.extensions import transformer_engine_spec_provider as provider
    from megatron.core.models.vision import vit_layer_specs
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    causal_types = AttnMaskType.causal, AttnMaskType.padding_causal
    known = DotProductAttention.__init__.__code__.co_varnames

    class Attention(DotProductAttention):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{name: options[name] for name in options if name in known})

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Any,
            attn_mask_type: Any = None,
            packed_seq_params: Any = None,
            **options: Any,
        ) -> Tensor:
            causal = (attn_mask_type or self.attn_mask_type) in causal_types
            tokens, packed = query.shape[0], packed_seq_params is not None
            if packed:
                query, key, value = (
                    tensor.reshape(tokens, 1, *tensor.shape[-2:]) for tensor in (query, key, value)
                )
            repeats = query.shape[2] // key.shape[2]
            key, value = key.repeat_interleave(repeats, 2), value.repeat_interleave(repeats, 2)
            bounds = packed_seq_params.cu_seqlens_q.tolist() if packed else [0]
            bounds += [tokens] if bounds[-1] < tokens else []
            attended = []
            for begin, end in zip(bounds, bounds[1:], strict=False):
                parts = (tensor[begin:end].permute(1, 2, 0, 3) for tensor in (query, key, value))
                output = functional.scaled_dot_product_attention(*parts, is_causal=causal)
                attended.append(output.permute(2, 0, 1, 3))
            return torch.cat(attended).reshape(tokens, query.shape[1], -1)

    provider.TESpecProvider.core_attention = lambda self: Attention
    engine.TEDotProductAttention = vit_layer_specs.TEDotProductAttention = Attention


def named_parameters(chunk: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of a chunk by their names in the full model."""
    for name, parameter in chunk.named_parameters():
        parts = name.split(".")
        if name.startswith("language_model.decoder.layers."):
            layers = chunk.language_model.decoder.layers
            parts[3] = str(layers[int(parts[3])].layer_number)
        if name.endswith("output_layer.weight") and chunk.share_embeddings_and_output_weights:
            parts = ["language_model", "embedding", "word_embeddings", "weight"]
        yield ".".join(parts), parameter


def fill(chunks: list[Any]) -> list[Any]:
    """Give weights and biases values that follow from their names: Bridge seeds by rank."""
    for chunk in chunks:
        for name, parameter in named_parameters(chunk):
            if parameter.dim() > 1 or name.endswith("bias"):
                seed = int(hashlib.sha256(name.encode()).hexdigest()[:12], 16)
                generator = torch.Generator().manual_seed(seed)
                values = torch.empty(parameter.shape).normal_(0, 0.05, generator=generator)
                parameter.data.copy_(values)
    return chunks


class Samples(torch.utils.data.Dataset):
    """Sequences of random tokens, the i-th with `images[i % len(images)]` images."""

    def __init__(self, case: SimpleNamespace) -> None:
        self.case, self.images = case, case.images

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 + index)
        tokens = torch.randint(1, 240, (LENGTH + 1,), generator=generator)
        count = self.images[index % len(self.images)]
        for image in range(count):
            first = 5 + image * (MERGED + 3)
            tokens[first - 1], tokens[first + MERGED] = START, END
            tokens[first : first + MERGED] = IMAGE
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:].clone(),
            "loss_mask": (tokens[1:] < 240).float(),
            "pixels": torch.randn(count * 16, 96, generator=generator),
            "grid": torch.tensor([GRID] * count).reshape(-1, 3),
        }

    def collate_fn(self, rows: list[dict[str, Tensor]]) -> dict[str, Any]:
        """Return a batch as Bridge's collate functions do; without images it has no pixels."""
        from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs

        names = ("tokens", "labels", "loss_mask")
        batch: dict[str, Any] = {name: torch.stack([row[name] for row in rows]) for name in names}
        batch["position_ids"] = torch.arange(LENGTH).expand(len(rows), -1).contiguous()
        mask = torch.ones(len(rows), LENGTH, dtype=torch.bool)
        batch["attention_mask"] = mask if self.case.model.startswith("qwen3") else None
        pixels, grids = (torch.cat([row[name] for row in rows]) for name in ("pixels", "grid"))
        images = {"pixel_values": pixels, "image_grid_thw": grids} if len(grids) else {}
        if self.case.model == "glm45v":
            images["mm_token_type_ids"] = (batch["tokens"] == IMAGE).int()
        batch["visual_inputs"] = GenericVisualInputs(**images) if images else None
        return batch


def vision_config(case: SimpleNamespace) -> Any:
    """Return Hugging Face's config of a tiny encoder."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "in_channels": 3}
    sizes |= {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
    if case.model == "qwen25":
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

        sizes |= {"depth": 2, "window_size": 8, "fullatt_block_indexes": [1]}
        config = Qwen2_5_VLVisionConfig(**sizes, out_hidden_size=64)
    elif case.model == "glm45v":
        from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig

        config = Glm4vVisionConfig(**sizes, depth=2, out_hidden_size=64, image_size=16)
    else:
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

        sizes |= {"depth": 3, "num_position_embeddings": 64}
        levels = case.deepstack
        return Qwen3VLVisionConfig(**sizes, out_hidden_size=64, deepstack_visual_indexes=levels)
    config._attn_implementation = "eager"
    return config


def provider(case: SimpleNamespace) -> Any:
    """Return Bridge's provider of a tiny model."""
    from megatron.bridge.models.gpt_provider import local_layer_spec

    fusions = "gradient_accumulation masked_softmax bias_activation bias_dropout apply_rope"
    settings: dict[str, Any] = {f"{fusion}_fusion": False for fusion in fusions.split()}
    settings |= {
        "num_layers": case.layers,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "seq_length": LENGTH,
        "vocab_size": VOCABULARY,
        "pipeline_model_parallel_size": RANKS,
        "pipeline_dtype": torch.float32,
        "params_dtype": torch.float32,
        "share_embeddings_and_output_weights": case.tied,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "persist_layer_norm": False,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": case.model == "qwen25",
        "activation_func": functional.silu,
        "cross_entropy_loss_fusion": False,
        "mrope_section": [2, 3, 3],
        "rotary_base": 10000.0,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "make_vocab_size_divisible_by": 128,
        "vision_config": vision_config(case),
        "freeze_vision_model": case.frozen == "encoder",
        "freeze_vision_projection": case.frozen == "encoder",
        "freeze_language_model": case.frozen == "language",
        "recompute_granularity": case.recompute,
        "recompute_method": case.recompute and "uniform",
        "recompute_num_layers": case.recompute and 1,
    }
    experts = {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 32,
        "moe_permute_fusion": False,
    }
    if case.model == "glm45v":
        frequency = [0] + [1] * (case.layers - 1)
        settings |= {**experts, "moe_layer_freq": frequency, "moe_grouped_gemm": False}
        settings |= {"mtp_num_layers": None, "moe_shared_expert_intermediate_size": 32}
        settings |= {"bf16": False, "autocast_dtype": torch.float32, "rotary_percent": 1.0}
        settings |= {"moe_shared_expert_overlap": False}
    else:
        settings |= {"vision_start_token_id": START, "vision_end_token_id": END}
        settings |= {"bos_token_id": 0, "eos_token_id": 2}
    if case.model == "qwen25":
        settings |= {"transformer_layer_spec": local_layer_spec, "transformer_impl": "local"}
    elif case.model == "qwen3-moe":
        settings |= experts
    if case.model.startswith("qwen3"):
        settings |= {"language_max_sequence_length": LENGTH, "qk_layernorm": True}
        settings |= {"moe_router_dtype": None}
    folder, module, name = MODELS[case.model]
    kind = getattr(importlib.import_module(f"megatron.bridge.models.{folder}.{module}"), name)
    model = kind(**settings)
    model.register_pre_wrap_hook(fill)
    return model


def configuration(case: SimpleNamespace) -> Any:
    """Return Bridge's configuration of the run."""
    from megatron.bridge.data.base import DatasetProvider
    from megatron.bridge.training import config as c

    @dataclass
    class Data(DatasetProvider):
        seq_length: int = LENGTH
        skip_getting_attention_mask_from_dataset: bool = not case.model.startswith("qwen3")

        def build_datasets(self, context: Any) -> Any:
            return (Samples(case),) * 3

    steps = case.steps
    decay = {"start_weight_decay": 0.0, "end_weight_decay": 0.0}
    return c.ConfigContainer(
        model=provider(case),
        train=c.TrainingConfig(train_iters=steps, global_batch_size=8, micro_batch_size=1),
        validation=c.ValidationConfig(eval_interval=steps, eval_iters=1),
        optimizer=c.OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=1e-3, clip_grad=0.0),
        scheduler=c.SchedulerConfig(
            lr_decay_style="constant",
            lr_warmup_iters=0,
            lr_decay_iters=16,
            override_opt_param_scheduler=True,
            weight_decay_incr_style="constant",
            **decay,
        ),
        ddp=c.DistributedDataParallelConfig(
            use_distributed_optimizer=False, overlap_grad_reduce=False, overlap_param_gather=False
        ),
        dist=c.DistributedInitConfig(distributed_backend="gloo"),
        dataset=Data(
            num_workers=0, persistent_workers=False, pin_memory=False, dataloader_type="single"
        ),
        tokenizer=c.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY - 1),
        logger=c.LoggerConfig(log_interval=1, tensorboard_dir=None),
        checkpoint=c.CheckpointConfig(
            save=case.checkpoint if case.saves else None,
            save_interval=2,
            load=None if case.saves else case.checkpoint,
            ckpt_step=2 if case.checkpoint and not case.saves else None,
        ),
        rng=c.RNGConfig(seed=1234),
    )


def train(case: SimpleNamespace) -> dict[str, Any]:
    """Train a case on this rank; return losses, evaluations and the gradients of all steps."""
    from megatron.bridge.training.callbacks import CallbackManager
    from megatron.bridge.training.pretrain import pretrain

    if case.schedule is not None:
        import megatron_vshape

        megatron_vshape.register(schedule=case.schedule, **case.options)
    is_qwen3 = case.model.startswith("qwen3")
    step = "models.qwen_vl.qwen3_vl_step" if is_qwen3 else "training.vlm_step"
    record: dict[str, Any] = {"losses": [], "evaluations": [], "gradients": [], "parameters": {}}

    def end_step(context: Any) -> None:
        if context.loss_dict:
            record["losses"].append(context.loss_dict["lm loss"].item())
        gradients = {}
        for chunk in context.model:
            while hasattr(chunk, "module"):
                chunk = chunk.module
            for name, parameter in named_parameters(chunk):
                record["parameters"][name] = parameter.detach().clone()
                if parameter.requires_grad:
                    gradients[name] = parameter.main_grad.detach().clone()
        record["gradients"].append(gradients)

    def end_evaluation(context: Any) -> None:
        if context.total_loss_dict:
            record["evaluations"].append(float(context.total_loss_dict["lm loss"]))

    callbacks = CallbackManager()
    callbacks.register("on_train_step_end", end_step)
    callbacks.register("on_eval_end", end_evaluation)
    forward_step = importlib.import_module(f"megatron.bridge.{step}").forward_step
    pretrain(configuration(case), forward_step, callbacks=callbacks)
    return record


DEFAULTS = {
    "options": {},
    "frozen": None,
    "images": [1, 0, 2, 1],
    "tied": False,
    "layers": 8,
    "steps": 2,
    "deepstack": [0],
    "recompute": None,
    "checkpoint": None,
    "saves": False,
}


def run_rank(case: dict[str, Any], folder: Path, rank: int, port: int) -> None:
    """Run a case as one rank, and end the process."""
    output = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    code = 1
    try:
        torch.save(train(SimpleNamespace(**(DEFAULTS | case))), folder / f"{rank}.pt")
        code = 0
    except SystemExit as error:
        print(error, flush=True)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Run all cases, one after the other."""
    from megatron_vshape.mcore import cpu

    cpu.install()
    import megatron.core.datasets.helpers_cpp
    import megatron.core.datasets.utils

    megatron.core.datasets.utils.compile_helpers = lambda: None  # the wheel has them
    import_bridge()
    replace_attention()
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    first_port = int(os.environ.get("MASTER_PORT", "29400"))
    for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
        case_folder = folder / case.pop("name")
        case_folder.mkdir()
        start = functools.partial(run_rank, case, case_folder, port=first_port + number)
        children = {}
        for rank in range(RANKS):
            child = os.fork()
            if not child:
                start(rank=rank)
            children[child] = rank
        while children:
            child, status = os.waitpid(-1, 0)
            children.pop(child, None)
            if status:  # the other ranks wait for a rank that has failed
                (case_folder / "failed").touch()


if __name__ == "__main__":
    main()
