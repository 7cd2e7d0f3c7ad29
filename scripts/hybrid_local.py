"""HybridModel's layers without Transformer Engine, for Megatron's spec.

Use `--spec hybrid_local local_stack_spec` if this folder is in PYTHONPATH;
`--transformer-impl local` in pretrain_gpt.py selects it. Attention, MLP and expert layers run
anywhere, also on a CPU; Mamba layers require mamba-ssm and a GPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)


class LocalHybridStack(HybridStack):  # type: ignore[misc]
    """Megatron's stack with torch's last norm."""

    def __init__(
        self,
        config: Any,
        *args: Any,
        post_layer_norm: bool = True,
        post_process: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(config, *args, post_layer_norm=False, post_process=post_process, **options)
        self.post_layer_norm = post_layer_norm
        if post_layer_norm and post_process:
            self.final_norm = WrappedTorchNorm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )


_attention_layer = ModuleSpec(
    module=TransformerLayer,
    submodules=TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=ModuleSpec(
            module=SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=ColumnParallelLinear,
                core_attention=DotProductAttention,
                linear_proj=RowParallelLinear,
            ),
        ),
        self_attn_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
    ),
)

# Norms have the keys of the GPT's local layers, so that checkpoints of a GPT can be loaded.
_mlp_keys = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_mlp_layer = ModuleSpec(
    module=MLPLayer,
    submodules=TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=partial(
            MLP.as_mlp_submodule,
            submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        ),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=_mlp_keys,
    ),
)

_moe_layer = ModuleSpec(
    module=MoETransformerLayer,
    submodules=TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm,
        # placeholder: the number of experts comes from the config
        mlp=get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=_mlp_keys,
    ),
)

_mamba_layer = ModuleSpec(
    module=MambaLayer,
    submodules=MambaLayerSubmodules(
        norm=WrappedTorchNorm,
        mixer=ModuleSpec(
            module=MambaMixer,
            submodules=MambaMixerSubmodules(
                in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
            ),
        ),
        mamba_bda=get_bias_dropout_add,
    ),
)

_multi_token_layer = ModuleSpec(
    module=MultiTokenPredictionLayer,
    submodules=MultiTokenPredictionLayerSubmodules(
        enorm=WrappedTorchNorm,
        hnorm=WrappedTorchNorm,
        eh_proj=ColumnParallelLinear,
        mtp_model_layer=None,  # set by the pattern
        layer_norm=WrappedTorchNorm,
    ),
)

local_stack_spec = ModuleSpec(
    module=LocalHybridStack,
    submodules=HybridStackSubmodules(
        mamba_layer=_mamba_layer,
        attention_layer=_attention_layer,
        mlp_layer=_mlp_layer,
        moe_layer=_moe_layer,
        mtp_block_spec=ModuleSpec(
            module=MultiTokenPredictionBlock,
            submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[_multi_token_layer]),
        ),
    ),
)
"""The spec of a stack of attention (*), MLP (-), expert (E) and Mamba (M) layers."""
