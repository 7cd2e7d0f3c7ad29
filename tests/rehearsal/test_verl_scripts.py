"""Scripts of verl: sizes of its microbatches, settings of its engine, and clear rejections."""

from __future__ import annotations

from pathlib import Path

import pytest
from rehearsal.flags import differing_flags

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.command import Command, launched_gpus
from megatron_vshape.rehearsal.command_reader import read_command
from megatron_vshape.rehearsal.rank_job import DEFAULT_TARGETS, LoraConfig

pytest.importorskip("megatron.training.arguments")
pytest.importorskip("yaml")

PPO = "python3 -m verl.trainer.main_ppo --config-path=config --config-name=ppo_megatron_trainer"
ACTOR, MEGATRON = "actor_rollout_ref.actor", "actor_rollout_ref.actor.megatron"
TRANSFORMER = f"+{MEGATRON}.override_transformer_config"
DDP = f"+{MEGATRON}.override_ddp_config"
LORA = "actor_rollout_ref.model.lora"
BATCH = f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"
"""The only setting without a default."""


def verl(*overrides: str, trainer: str = PPO) -> Command:
    return read_command([*trainer.split(), BATCH, *overrides])


def numbers(command: Command, *flags: str) -> tuple[int, ...]:
    return tuple(command.number(flag, 0) for flag in flags)


def batch(command: Command) -> tuple[int, ...]:
    return numbers(command, "--seq-length", "--micro-batch-size", "--global-batch-size")


SCRIPT = rf"""
export NVTE_FUSED_ATTN=0
TP=${{TP:-2}}
options=({ACTOR}.megatron.pipeline_model_parallel_size=4 {MEGATRON}.context_parallel_size=2)
python3 -m verl.trainer.main_ppo --config-path=./config --config-name='ppo_megatron_trainer.yaml' \
    data.max_prompt_length=$((1024 * 2)) data.max_response_length=6144 \
    actor_rollout_ref.model.path="${{HOME}}/absent/Model-8B" actor_rollout_ref.rollout.n=8 \
    {ACTOR}.ppo_mini_batch_size=32 {BATCH} {MEGATRON}.tensor_model_parallel_size=${{TP}} \
    {MEGATRON}.virtual_pipeline_model_parallel_size=2 {MEGATRON}.param_offload=True \
    {TRANSFORMER}.recompute_granularity=full {TRANSFORMER}.recompute_method=uniform \
    {TRANSFORMER}.recompute_num_layers=1 {TRANSFORMER}.num_layers_in_last_pipeline_stage=6 \
    +{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True \
    rollout.n=64 trainer.nnodes=4 "${{options[@]}}" $@
"""


def test_a_script_of_verl_becomes_flags(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "run.sh"
    file.write_text(SCRIPT)
    command = read_command([str(file)])
    flags = """
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --context-parallel-size 2
        --num-virtual-stages-per-pipeline-rank 2 --expert-tensor-parallel-size 2
        --decoder-last-pipeline-num-layers 6 --recompute-granularity full --recompute-num-layers 1
        --seq-length 8192 --micro-batch-size 2 --global-batch-size 256 --attention-backend flash
        --bf16 --sequence-parallel --use-distributed-optimizer --optimizer-cpu-offload
    """
    assert differing_flags(command, flags) == {}
    assert not command.has("--recompute-modules")
    assert launched_gpus(command) == (32, "")
    assert command.model_name == "Model-8B"
    assert command.environment == {
        "NVTE_FUSED_ATTN": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    assert "param_offload, grad_offload, optimizer_offload do not lower its peak" in caplog.text
    assert "not included: no file" not in caplog.text
    assert not command.has("--config-name")
    changed = read_command([str(file), f"{BATCH[:-1]}1", "--pipeline-schedule", "v-half"])
    assert changed.number("--micro-batch-size", 0) == 1
    assert changed.value("--pipeline-schedule") == "v-half"


PACKED = f"{ACTOR}.use_dynamic_bsz=True"
FEW = f"{ACTOR}.ppo_mini_batch_size=8"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("", (1024, 2, 256)),
        ("actor_rollout_ref.rollout.n=5 data.train_batch_size=1024", (1024, 2, 1280)),
        ("data.max_prompt_length=1025", (1537, 2, 256)),
        (f"{MEGATRON}.tensor_model_parallel_size=4 data.max_prompt_length=1", (516, 2, 256)),
        (f"{MEGATRON}.context_parallel_size=2 data.max_prompt_length=1", (516, 2, 256)),
        # 36 sequences on each of 7 ranks
        ("trainer.n_gpus_per_node=7", (1024, 2, 252)),
        # 32 sequences on a rank, in seven microbatches
        (f"{BATCH[:-1]}5", (1024, 5, 280)),
        (FEW, (1024, 1, 8)),
        (f"{ACTOR}.ppo_mini_batch_size=1", (1024, 1, 8)),
        # verl's deprecated name, for all ranks
        (f"{BATCH[:-1]}null {ACTOR}.ppo_micro_batch_size=64", (1024, 8, 256)),
        # 32 sequences of 1024 tokens on a rank are two microbatches of 16384 tokens
        (PACKED, (16384, 1, 16)),
        (f"{PACKED} {ACTOR}.ppo_max_token_len_per_gpu=3000", (3000, 1, 88)),
        (f"{PACKED} {ACTOR}.ppo_max_token_len_per_gpu=100", (100, 1, 256)),
        # 64 sequences of 1024 tokens on a rank, in microbatches of 2 * 3000 tokens
        (
            f"{PACKED} {ACTOR}.ppo_max_token_len_per_gpu=3000 {MEGATRON}.context_parallel_size=2",
            (6000, 1, 44),
        ),
        # one sequence on a rank is shorter than the limit
        (f"{PACKED} {FEW}", (1024, 1, 8)),
        # 64 microbatches of interleaved stages are rounded up to a multiple of three
        (
            f"{PACKED} trainer.n_gpus_per_node=3 {MEGATRON}.pipeline_model_parallel_size=3 "
            f"{MEGATRON}.virtual_pipeline_model_parallel_size=2",
            (16384, 1, 18),
        ),
    ],
)
def test_microbatches_of_verl(overrides: str, expected: tuple[int, ...]) -> None:
    assert batch(verl(*overrides.split())) == expected


TP_2 = f"{MEGATRON}.tensor_model_parallel_size=2"
FUSIONS = ("--no-rope-fusion", "--no-gradient-accumulation-fusion", "--no-bias-swiglu-fusion")
EXPERTS = ("--no-rope-fusion", "--no-gradient-accumulation-fusion", "--moe-grouped-gemm")


@pytest.mark.parametrize(
    ("override", "present", "absent"),
    [
        ("", (*FUSIONS, "--no-bias-dropout-fusion"), ("--moe-grouped-gemm", "--fp16")),
        (f"{MEGATRON}.expert_model_parallel_size=8", EXPERTS, FUSIONS[2:]),
        ("actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B-Base", EXPERTS, FUSIONS[2:]),
        (f"{TRANSFORMER}.moe_router_dtype=fp32", (*EXPERTS, "--moe-router-dtype"), FUSIONS[2:]),
        (f"{TRANSFORMER}.apply_rope_fusion=True", FUSIONS[1:], FUSIONS[:1]),
        (f"{TRANSFORMER}={{gradient_accumulation_fusion:True}}", FUSIONS[::2], FUSIONS[1:2]),
        (f"{TRANSFORMER}.bias_activation_fusion=True", FUSIONS[:2], FUSIONS[2:]),
        (f"{TRANSFORMER}.recompute_modules=[mlp,moe]", (), ("--recompute-modules",)),
        (f"{MEGATRON}.use_distributed_optimizer=False", (), ("--use-distributed-optimizer",)),
        (f"{MEGATRON}.tensor_model_parallel_size=1", (), ("--sequence-parallel",)),
        (f"{TP_2} {MEGATRON}.sequence_parallel=False", ("--sequence-parallel",), ()),
        (
            f"{TP_2} {MEGATRON}.sequence_parallel=False {MEGATRON}.vanilla_mbridge=False",
            (),
            ("--sequence-parallel",),
        ),
        (f"{MEGATRON}.vanilla_mbridge=False", ("--grad-reduce-in-bf16",), FUSIONS[1:2]),
        (f"{DDP}.grad_reduce_in_fp32=False", ("--grad-reduce-in-bf16",), ()),
        (f"{MEGATRON}.dtype=float16", ("--fp16", "--use-precision-aware-optimizer"), ("--bf16",)),
        ("", ("--mtp-num-layers",), ("--grad-reduce-in-bf16", "--use-precision-aware-optimizer")),
        ("actor_rollout_ref.model.mtp.enable=True", (), ("--mtp-num-layers",)),
        (f"{ACTOR}.optim.optimizer=muon", ("--optimizer",), ()),
    ],
)
def test_settings_of_verls_engine(
    override: str, present: tuple[str, ...], absent: tuple[str, ...]
) -> None:
    command = verl(*override.split())
    assert [flag for flag in present if not command.has(flag)] == []
    assert [flag for flag in absent if command.has(flag)] == []


def test_flags_after_the_overrides_are_added() -> None:
    command = verl("--pipeline-schedule", "v-half", "trainer.nnodes=2")
    assert command.flags[-2:] == ("--pipeline-schedule", "v-half")
    assert launched_gpus(command) == (16, "")


def test_lists_of_hydra_are_flags() -> None:
    command = verl(
        f"{TRANSFORMER}.recompute_granularity=selective",
        f"{TRANSFORMER}.recompute_modules=['core_attn', \"mlp\"]",
    )
    assert " ".join(command.flags).count("--recompute-modules core_attn mlp") == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{ACTOR}.strategy=fsdp2"], "trains without Megatron, with fsdp2"),
        ([f"{LORA}.rank=8", f"{LORA}.type=dora"], "trains dora adapters"),
        ([f"{ACTOR}.ppo_micro_batch_size_per_gpu=null"], "use_dynamic_bsz=True: neither is in"),
        (["trainer.nnodes="], "trainer.nnodes= is not a positive number"),
        ([f"{MEGATRON}.tensor_model_parallel_size=0"], "parallel_size=0 is not a positive"),
    ],
)
def test_commands_of_verl_that_are_not_estimated(overrides: list[str], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        verl(*overrides)


@pytest.mark.parametrize(
    ("overrides", "lora"),
    [
        (["actor_rollout_ref.model.lora_rank=8"], None),  # of other engines
        ([f"{LORA}.rank=32"], LoraConfig(32, DEFAULT_TARGETS)),
        ([f"{LORA}.rank=8", f"{LORA}.target_modules=[linear_qkv]"], LoraConfig(8, ("linear_qkv",))),
    ],
)
def test_adapters_of_verl(overrides: list[str], lora: LoraConfig | None) -> None:
    assert verl(*overrides).lora == lora


def test_a_trained_model_may_have_rl_in_its_name(tmp_path: Path) -> None:
    assert verl("actor_rollout_ref.model.path=Owner/Model-7B-RL").model_name == "Owner/Model-7B-RL"
    folder = tmp_path / "a" / "Model-7B"
    assert verl(f"actor_rollout_ref.model.path={folder}").model_name == "Model-7B"
    folder.mkdir(parents=True)
    assert verl(f"actor_rollout_ref.model.path={folder}").model_name == str(folder)
    assert verl().model_name == "deepseek-llm-7b-chat"


def test_unknown_settings_of_the_engine_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    ignored = ("param_offload=False", "seed=1", "use_mbridge=True", "use_dist_checkpointing=True")
    verl(*(f"{MEGATRON}.{setting}" for setting in ignored))
    assert "left out" not in caplog.text
    assert "offload" not in caplog.text
    verl(f"{MEGATRON}.unknown_setting=3", f"{TRANSFORMER}.other_setting=3")
    assert "left out: unknown_setting, other_setting" in caplog.text


@pytest.mark.parametrize(
    ("override", "note"),
    [
        (f"{ACTOR}.entropy_coeff=0.01", "logits of entropy_coeff are not included"),
        ("actor_rollout_ref.model.use_fused_kernels=True", "use_fused_kernels needs less"),
        (PACKED, "longest responses, packed to 16,384 tokens; the rollout engine"),
        (f"{MEGATRON}.grad_offload=True", "do not lower its peak"),
    ],
)
def test_parts_that_the_estimate_lacks(
    override: str, note: str, caplog: pytest.LogCaptureFixture
) -> None:
    verl()
    assert note not in caplog.text
    verl(override)
    assert note in caplog.text


def test_a_file_of_the_user_has_defaults(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_megatron_trainer, _self_]\n"
        "data: {max_prompt_length: 100, max_response_length: 200}\n"
        "trainer: {nnodes: 2, n_gpus_per_node: '${oc.env:GPUS}'}\n"
    )
    options = f"--config-path {tmp_path} --config-name mine data.max_response_length=300"
    command = verl(trainer=f"python3 recipe/mine/main.py {options}")
    assert batch(command) == (400, 2, 256)
    assert launched_gpus(command) == (16, "")
    assert "not included: no file" not in caplog.text
    trainer = "python3 -m recipe.main --config-name=my_megatron_recipe"
    assert batch(verl(trainer=trainer)) == (1024, 2, 256)
    assert "settings of --config-name my_megatron_recipe are not included" in caplog.text
    (tmp_path / "mine.yaml").write_text("- ppo_megatron_trainer\n")
    with pytest.raises(ScheduleError, match="mine.yaml cannot be read"):
        verl(trainer=f"python3 -m recipe.main {options}")


@pytest.mark.parametrize("override", ["model_engine=megatron", f"{ACTOR}.strategy=megatron"])
def test_an_override_selects_megatron(override: str) -> None:
    trainer = "python3 -m verl.trainer.main_ppo"
    assert verl(override, trainer=trainer).number("--micro-batch-size", 0) == 2
    with pytest.raises(ScheduleError, match="without Megatron, with fsdp: only runs with"):
        verl(trainer=trainer)


SFT = "torchrun --standalone --nnodes=2 --nproc_per_node 4 -m verl.trainer.sft_trainer"


def test_a_command_of_supervised_fine_tuning() -> None:
    words = [
        *SFT.split(),
        *"engine=megatron optim=megatron engine.tensor_model_parallel_size=2".split(),
        *"data.train_batch_size=96 data.max_length=2048 model.path=Owner/Model-2B".split(),
    ]
    command = read_command(words)
    assert batch(command) == (8192, 1, 24)
    assert numbers(command, "--tensor-model-parallel-size") == (2,)
    assert launched_gpus(command) == (8, "")
    assert command.model_name == "Owner/Model-2B"
    assert command.environment == {}
    assert batch(read_command([*words, "data.use_dynamic_bsz=False"])) == (2048, 4, 96)
    with pytest.raises(ScheduleError, match="trains without Megatron, with fsdp"):
        read_command(SFT.split())


def test_runtime_variables_of_ray_are_read() -> None:
    name = "+ray_kwargs.ray_init.runtime_env.env_vars.NVTE_FLASH_ATTN"
    command = verl(f"{name}='1'", trainer=f"CUDA_DEVICE_MAX_CONNECTIONS=8 {PPO}")
    assert command.environment["NVTE_FLASH_ATTN"] == "1"
    assert command.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
