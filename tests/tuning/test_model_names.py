"""Models by name or config.json: flags, parameter counts, proposed sizes."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.mcore.layout.sizes import parameters_of, symbols_of
from megatron_vshape.rehearsal.command import Command
from megatron_vshape.rehearsal.gpus import GPUS
from megatron_vshape.rehearsal.hf_config import flags_of_hf_config
from megatron_vshape.rehearsal.megatron_layers import layers_of_command
from megatron_vshape.tuning.configurations import Subject, faults
from megatron_vshape.tuning.files import load_model, load_sweep
from megatron_vshape.tuning.machine import Machine
from megatron_vshape.tuning.model_names import find_model
from megatron_vshape.tuning.predictor import key_of_count
from megatron_vshape.tuning.proposals import propose, proposed_command

MODELS = Path(__file__).parents[2] / "configs" / "models"

PUBLISHED = {
    "deepseek_llm_7b": (6.9, 6.9, 2),
    "deepseek_r1_distill_qwen_1_5b": (1.78, 1.78, 2),
    "llama_2_7b": (6.74, 6.74, 2),
    "llama_2_13b": (13.02, 13.02, 2),
    "llama_2_70b": (68.98, 68.98, 2),
    "deepseek_v2_lite": (15.7, 2.4, 1),
    "deepseek_v3": (671, 37, 1),
    "glm_4_5": (355, 32, 0),  # its report excludes both embeddings from active parameters
    "glm_4_5_air": (106, 12, 0),
    "glm_4_7_flash": (30, 3, 0),
    "glm_4_9b": (9.4, 9.4, 2),
    "gpt_oss_120b": (116.8, 5.1, 1),  # its card counts the output layer only
    "gpt_oss_20b": (20.9, 3.6, 1),
    "kimi_k2": (1026, 32.6, 2),  # its card has 1T
    "llama_3_1_405b": (405.9, 405.9, 2),
    "llama_3_1_70b": (70.6, 70.6, 2),
    "llama_3_1_8b": (8.03, 8.03, 2),
    "llama_3_2_1b": (1.23, 1.23, 2),
    "llama_3_2_3b": (3.21, 3.21, 2),
    "llama_4_maverick": (400.7, 17, 2),  # both without the encoder of 0.9B
    "llama_4_scout": (108, 17, 2),
    "minimax_m2": (228.7, 10, 0),
    "mixtral_8x22b": (141, 39, 2),
    "mixtral_8x7b": (46.7, 12.9, 2),
    "moonlight_16b_a3b": (16, 2.24, 0),  # its report excludes both embeddings, as that of GLM-4.5
    "nemotron_3_nano": (31.6, 3.6, 2),
    "nemotron_3_super": (120.6, 12.7, 2),
    "nemotron_3_ultra": (550, 55, 1),
    "nemotron_h_47b": (46.8, 46.8, 2),
    "nemotron_h_56b": (56.3, 56.3, 2),
    "nemotron_h_8b": (8.1, 8.1, 2),
    "nemotron_nano_12b_v2": (12.3, 12.3, 2),
    "nemotron_nano_9b_v2": (8.89, 8.89, 2),
    "qwen1_5_moe_a2_7b": (14.3, 2.7, 2),
    "qwen2_5_0_5b": (0.49, 0.49, 2),
    "qwen2_5_14b": (14.7, 14.7, 2),
    "qwen2_5_1_5b": (1.54, 1.54, 2),
    "qwen2_5_32b": (32.8, 32.8, 2),
    "qwen2_5_3b": (3.09, 3.09, 2),
    "qwen2_5_72b": (72.7, 72.7, 2),
    "qwen2_5_7b": (7.62, 7.62, 2),
    "qwen2_5_vl_32b": (32.8, 32.8, 2),
    "qwen2_5_vl_3b": (3.09, 3.09, 2),  # multimodal models: as the language model that they extend
    "qwen2_5_vl_72b": (72.7, 72.7, 2),
    "qwen2_5_vl_7b": (7.62, 7.62, 2),
    "qwen3_0_6b": (0.6, 0.6, 2),
    "qwen3_14b": (14.8, 14.8, 2),
    "qwen3_1_7b": (1.72, 1.72, 2),  # its card has 1.7
    "qwen3_235b_a22b": (235, 22, 2),
    "qwen3_30b_a3b": (30.5, 3.3, 2),
    "qwen3_32b": (32.8, 32.8, 2),
    "qwen3_4b": (4.0, 4.0, 2),
    "qwen3_5_0_8b": (0.752, 0.752, 2),  # Qwen3.5: as llama.cpp counts, without the encoder
    "qwen3_5_122b_a10b": (122, 10, 2),
    "qwen3_5_27b": (26.9, 26.9, 2),
    "qwen3_5_2b": (1.88, 1.88, 2),
    "qwen3_5_35b_a3b": (34.66, 3, 2),
    "qwen3_5_397b_a17b": (397, 17, 2),
    "qwen3_5_4b": (4.21, 4.21, 2),
    "qwen3_5_9b": (8.95, 8.95, 2),
    "qwen3_8b": (8.2, 8.2, 2),
    "qwen3_next_80b_a3b": (80, 3, 0),
    "qwen3_omni_30b_a3b": (30.5, 3.3, 2),
    "qwen3_vl_235b_a22b": (235, 22, 2),
    "qwen3_vl_2b": (1.72, 1.72, 2),
    "qwen3_vl_30b_a3b": (30.5, 3.3, 2),
    "qwen3_vl_32b": (32.8, 32.8, 2),
    "qwen3_vl_4b": (4.0, 4.0, 2),
    "qwen3_vl_8b": (8.2, 8.2, 2),
}
"""Billions of parameters, of active ones, and the number of embeddings counted as active."""

PAPER = {"gpt_9_6b", "gpt_21b", "gpt_38_5b", "gpt_98_5b", "tiny"}
"""Models of the paper, and of a laptop."""

VALUES = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "vocab_size": 32000,
}


def command_of(**values: Any) -> Command:
    return Command("", tuple(flags_of_hf_config({**VALUES, **values})[0]))


def with_workload(subject: Subject, gpus: int, *flags: str) -> Subject:
    command = subject.command.having(seq_length=4096, global_batch_size=4 * gpus)
    command = Command(command.script, (*command.flags, *flags))
    return Subject(subject.name, command, None)


def test_every_preset_of_a_public_model_has_published_sizes() -> None:
    public = {file.stem for file in MODELS.glob("*.yaml")} - PAPER
    assert public == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    total, active, tables = PUBLISHED[name]
    subject = load_model(find_model(name))
    counted = parameters_of(subject.command.option, subject.vocabulary)
    assert counted.total / 1e9 == pytest.approx(total, rel=0.01)
    counted_active = counted.active - counted.embeddings * (2 - tables) / 2
    rounding = 0.5 if active == int(active) else 0.05
    assert counted_active / 1e9 == pytest.approx(active, rel=0.01, abs=rounding)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("qwen3_235b_a22b", "qwen3_235b_a22b"),
        ("Qwen3-235B-A22B", "qwen3_235b_a22b"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "qwen3_235b_a22b"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "llama_3_1_70b"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16", "nemotron_3_nano"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama_3_1_70b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2_5_7b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "qwen2_5_32b"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2_5_7b"),
        ("Qwen/Qwen2.5-Math-1.5B", "qwen2_5_1_5b"),
        ("Qwen/Qwen2.5-Omni-7B", "qwen2_5_vl_7b"),
        ("meta-llama/Llama-2-70b-hf", "llama_2_70b"),
        ("output/Qwen3-8B/v0-20260701/checkpoint-100-merged", "qwen3_8b"),
        (str(MODELS / "qwen3_8b.yaml"), "qwen3_8b"),
    ],
)
def test_names_of_presets(name: str, preset: str) -> None:
    assert find_model(name) == MODELS / f"{preset}.yaml"


@pytest.mark.parametrize("name", ["qwen9", "Qwen3-8B-Reranker-Q4", "/data/tiny/run"])
def test_an_unknown_name_lists_the_presets(name: str) -> None:
    with pytest.raises(ScheduleError, match=rf"{name} is no config\.json.*deepseek_v3, "):
        find_model(name)


def test_a_model_of_hugging_faces_cache() -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    repository = Path(constants.HF_HUB_CACHE, "models--example--Model-1B")
    snapshot = repository / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    (snapshot / "config.json").write_text(json.dumps(VALUES))
    subject = load_model(find_model("example/Model-1B"))
    assert (subject.name, subject.layers) == ("Model-1B", 4)
    with pytest.raises(ScheduleError, match=r"example/Model-2B is no preset, .* not downloaded"):
        find_model("example/Model-2B")  # offline


def test_a_folder_with_a_config_json(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    # transformers 5 has the base among the rope's parameters; JSON's 1e-05 is no number in YAML.
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    values = {**VALUES, "rms_norm_eps": 1e-05, "rope_parameters": rope}
    (folder / "config.json").write_text(json.dumps(values))
    subject = load_model(find_model(str(folder)))
    assert (subject.name, subject.layers, subject.vocabulary) == ("my-model", 4, 32000)
    assert subject.command.value("--norm-epsilon") == "1e-05"
    assert subject.command.value("--rotary-base") == "500000"


def test_dense_layers_among_experts() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    command = command_of(model_type="qwen3_moe", **experts, decoder_sparse_step=2)
    assert command.value("--moe-layer-freq") == "([0]*1+[1]*1+[0]*1+[1]*1)"
    command = command_of(model_type="glm4_moe", **experts, first_k_dense_replace=1)
    assert command.value("--moe-layer-freq") == "([0]*1+[1]*3)"
    assert not command_of(model_type="qwen3_moe", **experts).has("--moe-layer-freq")


def test_widths_of_llama_4() -> None:
    """Its intermediate_size is the width of the experts, and of the one that is shared."""
    layers = {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 4096}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 1}
    command = command_of(model_type="llama4", **layers, **experts)
    widths = ("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
    assert [command.option(name) for name in widths] == [4096, 1408, 1408]
    assert command.value("--moe-layer-freq") == "([0]*1+[1]*1+[0]*1+[1]*1)"


def test_mimo_is_qwen2() -> None:
    assert command_of(model_type="mimo").flags == command_of(model_type="qwen2").flags


def test_a_vision_language_model_is_its_language_model(tmp_path: Path) -> None:
    text = {**VALUES, "model_type": "qwen3_vl_text"}
    flags, note = flags_of_hf_config({"model_type": "qwen3_vl", "text_config": text})
    assert note == "The language model of qwen3_vl, without its vision encoder."
    assert (flags, "") == flags_of_hf_config({**VALUES, "model_type": "qwen3"})


@pytest.mark.parametrize(("name", "parameters"), [("qwen2_5_vl_7b", 0.7), ("qwen3_vl_8b", 0.6)])
def test_the_size_of_a_vision_encoder(name: str, parameters: float) -> None:
    """Published: 0.67B of 8.29B, and 0.58B of 8.77B parameters."""
    _, note = flags_of_hf_config(yaml.safe_load((MODELS / f"{name}.yaml").read_text()))
    assert f"without its vision encoder of {parameters}B parameters: " in note


@pytest.mark.parametrize("part", ["text_config", "thinker_config"])
def test_the_language_part_of_a_multimodal_model(part: str) -> None:
    """A thinker has a text_config; tied embeddings may be a field of the whole model."""
    text: dict[str, Any] = {"text_config": {**VALUES, "model_type": "qwen3_omni_moe_text"}}
    config = text if part == "text_config" else {part: text}
    for is_tied in (True, False):
        flags, _ = flags_of_hf_config({**config, "tie_word_embeddings": is_tied})
        assert ("--untie-embeddings-and-output-weights" in flags) is not is_tied


@pytest.mark.parametrize(
    ("fields", "freq", "symbols"),
    [
        ({"full_attention_interval": 2}, "2", "G-*-G-*-"),
        (
            {
                "layer_types": [
                    f"{kind}_attention" for kind in ("linear", "linear", "full", "linear")
                ]
            },
            "([1]*2+[0]*1+[1]*1)",
            "G-G-*-G-",
        ),
        ({}, "4", "G-G-G-*-"),
        (
            {"model_type": "qwen3_5_moe_text", "num_experts": 8, "moe_intermediate_size": 64},
            "4",
            "GEGEGE*E",
        ),
    ],
)
def test_layers_with_linear_attention(fields: dict[str, Any], freq: str, symbols: str) -> None:
    rope = {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25}
    config = {"model_type": "qwen3_5_text", "linear_num_value_heads": 8, "rope_parameters": rope}
    command = command_of(**{**config, **fields})
    assert command.value("--linear-attention-freq") == freq
    assert command.value("--experimental-attention-variant") == "gated_delta_net"
    assert command.value("--linear-num-value-heads") == "8"
    assert command.value("--rotary-percent") == "0.25"
    assert command.has("--moe-shared-expert-gate") == ("num_experts" in fields)
    assert symbols_of(command.option) == symbols


def test_a_list_of_layer_types_without_linear_attention_is_ignored() -> None:
    types = ["full_attention"] * 4
    assert not command_of(layer_types=types, model_type="qwen3").has("--linear-attention-freq")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({**VALUES, "model_type": "mamba9"}, r"config\.json: its model_type mamba9 is not"),
        ({"model_type": "llama"}, "it lacks num_hidden_layers, hidden_size, num_attention_heads,"),
    ],
)
def test_configs_that_are_rejected(tmp_path: Path, values: dict[str, Any], text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    with pytest.raises(ScheduleError, match=text):
        load_model(file)


def test_a_sweep_reads_a_preset() -> None:
    loaded = load_sweep(MODELS.parent / "sweeps" / "every_key.yaml")
    assert loaded.subject.command.flags == load_model(find_model("llama_3_1_70b")).command.flags


@pytest.mark.parametrize("flags", [(), ("--tensor-model-parallel-size", "2")])
@pytest.mark.parametrize(
    ("name", "number", "gpu"), [("llama_3_1_8b", 8, "h100"), ("mixtral_8x7b", 16, "h100")]
)
def test_proposed_sizes_are_possible_and_few(
    name: str, number: int, gpu: str, flags: tuple[str, ...]
) -> None:
    subject = with_workload(load_model(find_model(name)), number, *flags)
    proposals = propose(subject, Machine(GPUS[gpu], number))
    assert 1 < len(set(proposals)) == len(proposals) <= 8
    assert len(set(map(key_of_count, proposals))) <= 3
    for config in proposals:
        assert not [*faults(config, subject, number, GPUS[gpu].node)]
        assert config.tensor_parallel == 2 or not flags


def test_a_proposed_command_starts() -> None:
    """94 layers do not divide among 8 ranks, but do with embedding and loss."""
    subject = with_workload(load_model(find_model("qwen3_235b_a22b")), 64)
    proposals = propose(subject, Machine(GPUS["h200"], 64))
    proposal = next(config for config in proposals if config.pipeline_parallel == 8)
    assert layers_of_command(proposal.command(subject), 94, 8).layers is None
    command = proposed_command(proposal, subject)
    assert command.has("--account-for-loss-in-pipeline-split")
    assert layers_of_command(command, 94, 8).layers == (11, *[12] * 6, 11)


@pytest.mark.parametrize(
    ("name", "number", "gpu", "sizes"),
    [
        # With 1,024 tokens per rank (TP 4), the host starts kernels more slowly than they run.
        ("qwen3_235b_a22b", 64, "h200", (2, 8, 8)),
        # Experts on all ranks need no all-to-all.
        ("qwen3_30b_a3b", 16, "h100", (1, 8, 1)),
        # Fewer ranks with several layers each are balanced better than many with few.
        ("llama_3_1_70b", 64, "h100", (4, 4, 1)),
    ],
)
def test_the_first_proposal_is_near_the_best(
    name: str, number: int, gpu: str, sizes: tuple[int, ...]
) -> None:
    """The best sizes by dry runs: `python benchmarks/proposals.py`."""
    subject = with_workload(load_model(find_model(name)), number, "--micro-batch-size", "1")
    proposals = propose(subject, Machine(GPUS[gpu], number))
    assert sizes in [
        (config.tensor_parallel, config.pipeline_parallel, config.expert_parallel)
        for config in proposals[:3]
    ]


def test_larger_models_are_split_further() -> None:
    """The shards of weights grow with the model, and long sequences are split as well."""
    shards = []
    for name in ("qwen3_8b", "llama_3_1_70b", "llama_3_1_405b"):
        subject = with_workload(load_model(find_model(name)), 512)
        best, *_ = propose(subject, Machine(GPUS["h100"], 512))
        shards.append(best.tensor_parallel * best.pipeline_parallel)
    assert shards[0] < shards[1] < shards[2]
    subject = load_model(find_model("llama_3_1_70b"))
    long = subject.command.having(seq_length=131072, global_batch_size=64)
    best, *_ = propose(Subject("", long, None), Machine(GPUS["h100"], 64))
    assert best.context_parallel > 1


def test_a_number_of_gpus_without_a_pipeline_is_rejected() -> None:
    subject = with_workload(load_model(find_model("qwen3_8b")), 1)
    with pytest.raises(ScheduleError, match="no sizes with a pipeline can be proposed for 1 GPUs"):
        propose(subject, Machine(GPUS["h100"], 1))
