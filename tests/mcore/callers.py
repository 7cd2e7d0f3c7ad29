"""Callers that query the pipeline stage of Megatron-Core, in libraries on top of it, and their use.

Read at these versions: ms-swift 4.6.0, mcore-bridge 1.6.5, verl 0.9.1, slime 624b824, NeMo-RL
7ea279a, ROLL 8eb27cc, Megatron-Bridge 0.6.2. `bash scripts/test.sh --clients` searches the
installed versions for callers that are missing here.

The correct answer for all of them is Megatron's, with the loss where Megatron's schedules compute
it: on the last pipeline rank. For a library, the V placement is therefore counted from its other
side (`setup.configure.build_pipeline`), code outside a pass gets Megatron's answers, and results
are found on the rank that Megatron would use. Inside a pass, and for a chunk with `vp_stage`, the
answer is for that stage.
"""

from __future__ import annotations

from typing import NamedTuple


class Caller(NamedTuple):
    """A file that queries the stage."""

    library: str
    file: str
    does: str
    reader: str = ""  # which of `other_trainer.READERS` does the same, where it reads results


_BUILDS = "gives a chunk its ends by vp_stage, or an only chunk its rank's"
_BATCH = "within a pass: what of the batch this stage is given"
_RANK = "numbers, names, seeds or gathers by pipeline rank; reads no results"
_NUMBERS = "counts or numbers chunks"
_OTHERS = "models of several stacks, or of pictures, which are refused or have no schedule of ours"
_WRITES = "looks up the ends of a chunk by vp_stage, to convert its weights"

CALLERS = (
    Caller("swift", "megatron/trainers/trainer.py", "sums the loss over DP to log it", "logged"),
    Caller("swift", "megatron/trainers/base.py", "makes evaluation's metrics to log", "logged"),
    Caller("swift", "megatron/trainers/grpo_trainer.py", "within a pass: logits to log-probs"),
    Caller("swift", "megatron/trainers/kto_trainer.py", "within a pass, by vp_stage: which axis"),
    Caller("swift", "megatron/trainers/utils.py", _BATCH),
    Caller("swift", "megatron/utils/utils.py", "a pass of its own, of a model with one chunk"),
    Caller("swift", "megatron/utils/megatron_fsdp_checkpoint.py", _RANK),
    Caller("swift", "megatron/utils/megatron_lm_utils.py", _RANK),
    Caller("swift", "ray/megatron/megatron_worker.py", "takes results by number", "by_rank"),
    Caller("mcore_bridge", "bridge/gpt_bridge.py", _WRITES),
    Caller("mcore_bridge", "model/mm_gpts/deepseek_v41.py", _WRITES),
    Caller("mcore_bridge", "model/register.py", _BUILDS),
    Caller("mcore_bridge", "utils/megatron_utils.py", _RANK),
    Caller(
        "verl",
        "workers/engine/megatron/transformer_impl.py",
        "makes output where the last stage is said to be, collected from the last number",
        "by_rank",
    ),
    Caller("verl", "utils/megatron_utils.py", _BUILDS),
    Caller("verl", "models/mcore/bridge.py", "which chunk has the value head, by vp_stage"),
    Caller("verl", "models/mcore/config_converter.py", _NUMBERS),
    Caller("verl", "models/mcore/loader.py", _NUMBERS),
    Caller("verl", "models/mcore/saver.py", _NUMBERS),
    Caller("verl", "model_merger/megatron_model_merger.py", _NUMBERS),
    Caller("verl", "utils/checkpoint/megatron_checkpoint_manager.py", _NUMBERS),
    Caller("verl", "utils/megatron/router_replay_utils.py", "which layers Megatron's order has"),
    Caller("verl", "utils/modelopt/qat_weight_exporter.py", _RANK),
    Caller("verl", "utils/profiler/torch_profile.py", _RANK),
    Caller(
        "slime",
        "backends/megatron_utils/model.py",
        "keeps what forward_only has collected, and logs the losses of train",
        "where_said",
    ),
    Caller("slime", "backends/megatron_utils/actor.py", "goes on with values", "where_said"),
    Caller("slime", "backends/megatron_utils/loss.py", "makes advantages", "where_said"),
    Caller("slime", "backends/megatron_utils/server/logprob_utils.py", "answers", "where_said"),
    Caller("slime", "observability/train_data_utils.py", "saves what was trained", "where_said"),
    Caller("slime", "observability/train_metric_utils.py", "logs rollouts over DP", "where_said"),
    Caller("slime", "backends/megatron_utils/data.py", _NUMBERS),
    Caller("slime", "backends/megatron_utils/initialize.py", _RANK),
    Caller(
        "slime", "backends/megatron_utils/update_weight/update_weight_from_distributed.py", _RANK
    ),
    Caller("slime", "backends/megatron_utils/update_weight/update_weight_from_tensor.py", _RANK),
    Caller(
        "nemo_rl",
        "models/megatron/pipeline_parallel.py",
        "broadcasts losses and tensors from get_pipeline_model_parallel_last_rank",
        "broadcast",
    ),
    Caller("nemo_rl", "models/policy/workers/megatron_policy_worker.py", "the same", "broadcast"),
    Caller("nemo_rl", "models/value/workers/megatron_value_worker.py", "the same", "broadcast"),
    Caller("nemo_rl", "models/megatron/draft/hidden_capture.py", "whose hidden states a draft has"),
    Caller(
        "roll", "distributed/executor/worker.py", "takes results from the last number", "by_rank"
    ),
    Caller("roll", "distributed/strategy/megatron_strategy.py", _RANK),
    Caller("roll", "third_party/megatron/compile_warmup.py", _NUMBERS),
    Caller("roll", "third_party/megatron/model_update.py", _RANK),
    Caller("roll", "third_party/megatron/router_replay_utils.py", _NUMBERS),
    Caller(
        "mcore_adapter",
        "trainer/trainer.py",
        "means the loss over DP and adds it up over the pipeline; broadcasts MTP's",
        "summed_up",
    ),
    Caller("mcore_adapter", "trainer/dpo_trainer.py", "keeps reference log-probs", "where_said"),
    Caller("mcore_adapter", "checkpointing.py", _RANK),
    Caller("mcore_adapter", "initialize.py", _RANK),
    Caller("mcore_adapter", "models/model_factory.py", _BUILDS),
    Caller("mcore_adapter", "models/converter/dist_converter.py", _WRITES),
    Caller("mcore_adapter", "models/converter/model_converter.py", _NUMBERS),
    Caller("mcore_adapter", "models/converter/post_converter.py", _NUMBERS),
    Caller("mcore_adapter", "models/deepseek_v3/__init__.py", "whether MTP's weights are here"),
    Caller("mcore_adapter", "models/glm4_moe/__init__.py", "whether MTP's weights are here"),
    Caller("mcore_adapter", "models/qwen3_omni/modeling_qwen3_omni.py", _OTHERS),
    Caller("mcore_adapter", "models/qwen3_vl/modeling_qwen3_vl.py", _OTHERS),
    Caller("bridge", "training/train.py", "reduces and logs the losses", "physically_last"),
    Caller("bridge", "training/eval.py", "reduces evaluation's losses", "physically_last"),
    Caller("bridge", "training/gpt_step.py", _BATCH),
    Caller("bridge", "training/utils/batch_utils.py", _BATCH),
    Caller("bridge", "data/utils.py", "builds data sets on the first and the last rank"),
    Caller("bridge", "training/utils/train_utils.py", "which chunk has the end, by vp_stage"),
    Caller("bridge", "training/mlm_compat/model.py", _BUILDS),
    Caller("bridge", "models/gpt_provider.py", _BUILDS),
    Caller("bridge", "models/model_provider.py", _BUILDS),
    Caller("bridge", "models/hybrid/hybrid_provider.py", _BUILDS),
    Caller("bridge", "models/falcon_h1/falconh1_provider.py", _BUILDS),
    Caller("bridge", "models/gemma/gemma_provider.py", "scales the embedding of a built chunk"),
    Caller("bridge", "models/gemma/gemma2_provider.py", "scales the ends of a built chunk"),
    Caller("bridge", "models/conversion/model_bridge.py", "who tells tied embeddings"),
    Caller("bridge", "models/conversion/peft_bridge.py", _RANK),
    Caller("bridge", "models/deepseek/deepseek_v4_step.py", _BATCH),
    *(
        Caller("bridge", file, _OTHERS)
        for file in (
            "diffusion/models/common/dgpt_step.py",
            "diffusion/models/flux/flux_model.py",
            "diffusion/models/flux/flux_step.py",
            "diffusion/models/wan/flow_matching/flow_inference_pipeline.py",
            "diffusion/models/wan/wan_model.py",
            "diffusion/models/wan/wan_provider.py",
            "models/megatron_mimo/megatron_mimo_builder.py",
            "models/megatron_mimo/megatron_mimo_provider.py",
            "models/nemotron_omni/nemotron_omni_provider.py",
            "models/qwen_omni/qwen3_omni_provider.py",
            "models/qwen_omni/qwen3_omni_step.py",
            "models/qwen_vl/modelling_qwen3_vl/model.py",
            "models/qwen_vl/qwen3_vl_step.py",
            "models/stepfun/data/flickr8k/preprocess.py",
            "models/stepfun/step37_flickr8k_step.py",
            "models/t5_provider.py",
            "training/audio_lm_step.py",
            "training/llava_step.py",
            "training/nemotron_omni_step.py",
            "training/vlm_step.py",
        )
    ),
)
