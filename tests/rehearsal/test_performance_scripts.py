"""Commands of Megatron-Bridge's scripts/performance, estimated with the preset of their model."""

from __future__ import annotations

from pathlib import Path

import pytest
from rehearsal.flags import differing_flags, written

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.command import Command, launched_gpus
from megatron_vshape.rehearsal.command_reader import read_command

pytest.importorskip("megatron.training.arguments")
pytest.importorskip("yaml")

RECIPE = "--model_recipe_name qwen3_32b"
SIZES = "-tp 2 -pp 4 -gb 64 -mb 1 --seq_length 4096 --num_gpus 64 -gn 4"


def command_of(options: str, recipe: str = RECIPE) -> Command:
    return read_command(f"python scripts/run_script.py {recipe} {SIZES} {options}".split())


def test_options_become_flags_and_gpus() -> None:
    command = command_of("--gpu gb200 --compute_dtype bf16 -vp 2 --expert_model_parallel_size None")
    assert command.model_name == "qwen3_32b"
    assert launched_gpus(command)[0] == 64
    flags = """
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --sequence-parallel
        --num-virtual-stages-per-pipeline-rank 2 --seq-length 4096 --global-batch-size 64
        --micro-batch-size 1 --bf16
    """
    assert differing_flags(command, " ".join(flags.split())) == {}
    assert not command.has("--expert-model-parallel-size")
    assert command_of("-c bf16 --num_gpus --gpu h100").launched == {}


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ("-c fp8_mx", "--fp8-recipe mxfp8"),
        ("-c fp8_cs", "--fp8-recipe tensorwise"),
        ("-c bf16 -rl 3", "--recompute-method block --recompute-num-layers 3"),
        ("-c bf16 --recompute_modules mla_up_proj,mlp", "--recompute-modules mla_up_proj mlp"),
        ("-c bf16 --moe_a2a_overlap true", "--overlap-moe-expert-parallel-comm"),
        ("-c bf16 --cuda_graph_impl local", "--cuda-graph-impl local"),
        ("-c bf16 --moe_flex_dispatcher_backend deepep", "--moe-token-dispatcher-type flex"),
        ("-c bf16 --use_megatron_fsdp true", "--ckpt-format fsdp_dtensor"),
        ("-c bf16 -mb None", "--micro-batch-size 1"),
    ],
)
def test_settings_of_performance(options: str, flags: str) -> None:
    command = command_of(options)
    assert flags in " ".join(command.flags)
    assert not command.has("--first-last-layers-bf16")


def test_layers_of_recipes_that_ranks_do_not_divide() -> None:
    """DeepSeek-V3 has 61 layers and Qwen3 235B 94: their recipes divide them."""
    command = command_of("-c bf16", "--model_recipe_name deepseek_v3")
    layout = f"E{'t' * 16}|{'t' * 16}|{'t' * 16}|{'t' * 13}L"
    assert command.value("--pipeline-model-parallel-layout") == layout
    layout = "Et*16|t*16|t*16|t*13mL"
    options = f"-c bf16 --pipeline_model_parallel_layout {layout}"
    command = command_of(options, "--model_recipe_name deepseek_v3")
    assert command.value("--pipeline-model-parallel-layout") == layout
    assert command.number("--mtp-num-layers", 0) == 1
    command = command_of("-c bf16", "--model_name qwen3 --model_size 235b_a22b")
    assert command.model_name == "qwen3_235b_a22b"
    assert command.has("--account-for-embedding-in-pipeline-split")
    assert command.has("--account-for-loss-in-pipeline-split")


def test_sizes_of_the_recipe_are_unknown() -> None:
    words = "run_script.py --model_recipe_name qwen3_32b -c bf16 -tp 2 -gb 64".split()
    with pytest.raises(ScheduleError, match="qwen3_32b has sizes that only Megatron-Bridge"):
        read_command(words)


LAUNCHER = """
worker_command=$(cat <<- EOM
  if [ "\\$RANK" -eq "0" ]; then
    sleep 3 ;
  fi ;
  numactl --cpunodebind=\\$((LOCAL_RANK/2)) python run_script.py {options}
EOM
)
echo "$worker_command" > {file}
torchrun --nproc-per-node=8 --no-python bash {file}
"""


@pytest.mark.parametrize("file", ["worker_command.sh", '"$PWD/run.sh"'])
def test_the_command_is_in_a_script_that_a_script_writes(tmp_path: Path, file: str) -> None:
    text = LAUNCHER.format(file=file, options=f"{RECIPE} {SIZES} -c bf16")
    command = read_command([written(tmp_path, "launcher.sh", text)])
    assert command.model_name == "qwen3_32b"
    assert launched_gpus(command)[0] == 64
    assert not (tmp_path / "worker_command.sh").exists()


WRITER = """
#!/bin/bash
#SBATCH --nodes=2 --gpus-per-node=8
cat > run_$1.sh <<EOF
python pretrain_gpt.py --num-layers $1 \\
    --hidden-size \\$WIDTH
EOF
cat <<'EOF' >> run_$1.sh
echo $LAYERS
EOF
WIDTH=64 srun bash run_$1.sh
"""


def test_a_script_is_written_from_a_heredoc(tmp_path: Path) -> None:
    command = read_command([written(tmp_path, "job.sh", WRITER), "8"])
    assert command.flags == ("--num-layers", "8", "--hidden-size", "64")
    assert launched_gpus(command)[0] == 16
    assert [path.name for path in tmp_path.iterdir()] == ["job.sh"]
