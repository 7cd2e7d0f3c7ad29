"""Megatron-Bridge's `pretrain` on a CPU: a tiny GPT on gloo ranks, and its results.

This needs few of Bridge's declared dependencies, some of which exist for GPUs only. The modules of
Bridge get fakes of those packages, and no other module does: Megatron-Core must continue to treat
them as missing.
"""

from __future__ import annotations

import argparse
import builtins
import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

warnings.simplefilter("ignore")

ABSENT = ("transformer_engine", "nvidia_resiliency_ext", "megatron.energon", "modelopt", "datasets")


class AbsentClass(type):
    """A class of a package that is not here: may be subclassed and compared, never made."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AbsentClass(name, (), {})


class AbsentModule(types.ModuleType):
    """A module of a package that is not here."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        attribute = AbsentModule(name) if name.islower() else AbsentClass(name, (), {})
        setattr(self, name, attribute)
        return attribute


def stand_in() -> None:
    """Resolve Bridge's imports of missing packages."""
    real, modules = builtins.__import__, {}

    def module(name: str) -> Any:
        if name not in modules:
            modules[name] = AbsentModule(name)
            parent, _, leaf = name.rpartition(".")
            if parent:
                setattr(module(parent), leaf, modules[name])
        return modules[name]

    def import_(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        importer = (globals or {}).get("__name__") or ""
        if level == 0 and importer.startswith("megatron.bridge") and name.startswith(ABSENT):
            imported = module(name)
            return imported if fromlist else module(name.partition(".")[0])
        return real(name, globals, locals, fromlist, level)

    # The results of these functions for a model that modelopt has not changed.
    distill = module("modelopt.torch.distill.plugins.megatron")
    distill.get_tensor_shapes_adjust_fn_for_distillation = lambda *_, **__: None
    module("modelopt.torch.quantization.utils").is_quantized = lambda *_: False
    states = module("modelopt.torch.opt.plugins")
    for name in ("restore_modelopt_state", "save_modelopt_state", "save_sharded_modelopt_state"):
        setattr(states, name, lambda *_, **__: None)
    builtins.__import__ = import_


def without_all_models() -> None:
    """Make Bridge's packages import no submodules: importing all models needs half a minute."""
    for name in ("megatron.bridge", "megatron.bridge.models"):
        parent = sys.modules.get(name.rpartition(".")[0])
        paths = None if parent is None else parent.__path__
        spec = importlib.machinery.PathFinder.find_spec(name, paths)
        spec = spec or importlib.util.find_spec(name)
        package = types.ModuleType(name)
        package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec
        sys.modules[name] = package
    importlib.import_module("megatron.bridge.models.conversion")  # first: a circle of imports
    models = sys.modules["megatron.bridge.models"]
    for module, name in (("gpt_provider", "GPTModelProvider"), ("t5_provider", "T5ModelProvider")):
        setattr(models, name, getattr(importlib.import_module(f"{models.__name__}.{module}"), name))


def named_parameters(chunk: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of a chunk by their names in the full model."""
    for name, parameter in chunk.named_parameters():
        parts = name.split(".")
        if "layers" in parts:
            position = parts.index("layers") + 1
            parts[position] = str(chunk.decoder.layers[int(parts[position])].layer_number)
        if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
            parts = ["embedding", "word_embeddings", "weight"]
        yield ".".join(parts), parameter


def fill(chunks: list[Any], part: str = "") -> list[Any]:
    """Give weights values that follow from their names: Bridge seeds by pipeline rank.

    Those whose names have this part.
    """
    import torch

    for chunk in chunks:
        for name, parameter in named_parameters(chunk):
            if parameter.dim() > 1 and part in name:
                seed = int(hashlib.sha256(name.encode()).hexdigest()[:12], 16)
                generator = torch.Generator().manual_seed(seed)
                values = torch.empty(parameter.shape).normal_(0, 0.05, generator=generator)
                parameter.data.copy_(values)
    return chunks


def lora() -> Any:
    """Return adapters for the linear layers of every layer, none of them zero."""
    from megatron.bridge.peft import utils
    from megatron.bridge.peft.lora import LoRA

    utils.HAVE_TE = False  # it imports Megatron-Core's names for TE, which are None

    class FilledLoRA(LoRA):
        def __call__(self, model: Any, training: bool = True) -> Any:
            return fill(super().__call__(model, training), part="adapter")

    return FilledLoRA(dim=4, alpha=8)


def configuration(options: argparse.Namespace) -> Any:
    """Return Bridge's configuration of the run."""
    import torch
    from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
    from megatron.bridge.training import config as c

    fusions = "gradient_accumulation masked_softmax bias_activation bias_dropout apply_rope"
    model = GPTModelProvider(
        num_layers=8,
        hidden_size=32,
        num_attention_heads=4,
        seq_length=32,
        vocab_size=128,
        pipeline_model_parallel_size=options.pipeline,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        transformer_layer_spec=local_layer_spec,
        transformer_impl="local",
        position_embedding_type="rope",
        share_embeddings_and_output_weights=options.tied,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        persist_layer_norm=False,
        cross_entropy_loss_fusion=False,
        account_for_embedding_in_pipeline_split=options.counts_ends,
        account_for_loss_in_pipeline_split=options.counts_ends,
        **{f"{fusion}_fusion": False for fusion in fusions.split()},
    )
    model.register_pre_wrap_hook(fill)
    return c.ConfigContainer(
        model=model,
        train=c.TrainingConfig(train_iters=options.steps, global_batch_size=8, micro_batch_size=1),
        validation=c.ValidationConfig(eval_interval=options.steps, eval_iters=1),
        optimizer=c.OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            min_lr=1e-3,
            weight_decay=0.0,
            clip_grad=1.0,
            use_distributed_optimizer=options.distributed_optimizer,
        ),
        scheduler=c.SchedulerConfig(
            lr_decay_style="constant",
            lr_warmup_iters=0,
            lr_decay_iters=options.steps,
            start_weight_decay=0.0,
            end_weight_decay=0.0,
            weight_decay_incr_style="constant",
        ),
        ddp=c.DistributedDataParallelConfig(
            use_distributed_optimizer=options.distributed_optimizer,
            overlap_grad_reduce=False,
            overlap_param_gather=False,
        ),
        dist=c.DistributedInitConfig(distributed_backend="gloo"),
        dataset=c.MockGPTDatasetConfig(
            seq_length=32,
            random_seed=1234,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            num_workers=0,
            persistent_workers=False,
            pin_memory=False,
            dataloader_type="single",
        ),
        tokenizer=c.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=127),
        logger=c.LoggerConfig(log_interval=1, tensorboard_dir=None),
        peft=lora() if options.adapts else None,
        checkpoint=c.CheckpointConfig(
            save=options.saves_in,
            save_interval=2,
            load=options.resumes,
            ckpt_step=2 if options.resumes else None,
            pretrained_checkpoint=options.adapts,
        ),
        rng=c.RNGConfig(seed=1234),
    )


def main() -> None:
    """Train, and save the data and the results of this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--schedule")
    parser.add_argument("--costs")
    parser.add_argument("--layer-split")
    parser.add_argument("--late", action="store_true", help="register once Bridge is imported")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--counts-ends", action="store_true")
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--pipeline", type=int, default=4, help="ranks of it")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--saves-in", help="a folder, for a checkpoint every two steps")
    parser.add_argument("--resumes", help="a folder with checkpoints; goes on after two steps")
    parser.add_argument("--adapts", help="the same, whose model LoRA adapts")
    arguments = parser.parse_args()

    from megatron_vshape.mcore import cpu

    cpu.install()
    import megatron.core.datasets.helpers_cpp
    import megatron.core.datasets.utils

    megatron.core.datasets.utils.compile_helpers = lambda: None  # the wheel has them
    import megatron_vshape

    def register() -> None:
        options = {"costs_file": arguments.costs, "layer_split": arguments.layer_split}
        megatron_vshape.register(schedule=arguments.schedule, **options)

    if arguments.schedule and not arguments.late:
        register()
    stand_in()
    without_all_models()
    import torch
    from megatron.bridge.training.callbacks import CallbackManager
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    if arguments.schedule and arguments.late:
        register()
    record: dict[str, Any] = {"steps": [], "evaluations": [], "parameters": {}}

    def step_ended(context: Any) -> None:
        if context.loss_dict:
            loss = context.loss_dict["lm loss"].item()
            record["steps"].append((loss, float(context.grad_norm)))
        for chunk in context.model:
            while hasattr(chunk, "module"):
                chunk = chunk.module
            record["parameters"] |= {
                name: parameter.detach().clone() for name, parameter in named_parameters(chunk)
            }

    def evaluation_ended(context: Any) -> None:
        if context.total_loss_dict:
            record["evaluations"].append(float(context.total_loss_dict["lm loss"]))

    callbacks = CallbackManager()
    callbacks.register("on_train_step_end", step_ended)
    callbacks.register("on_eval_end", evaluation_ended)
    pretrain(configuration(arguments), forward_step, callbacks=callbacks)
    torch.save(record, f"{arguments.folder}/{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
