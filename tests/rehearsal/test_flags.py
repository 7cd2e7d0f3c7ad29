"""Training commands are read from words, files and scripts; errors name the wrong option."""

import re
from pathlib import Path

import pytest
from rehearsal.flags import differing_flags, written

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.command import (
    Command,
    flags_of,
    launched_gpus,
    parse_ranks,
    sizes_of,
)
from megatron_vshape.rehearsal.command_reader import read_command
from megatron_vshape.rehearsal.dry_run_flags import environment_of, without_files
from megatron_vshape.rehearsal.sources import find_script
from megatron_vshape.rehearsal.start_rules import check_model

FLAGS = ("--num-layers", "8", "--pipeline-model-parallel-size", "4", "--bf16")


def test_a_command_line_with_a_launcher_is_read() -> None:
    words = "NVTE_FP8_DPA_BWD=0 torchrun --nproc-per-node 8 train/pretrain_gpt.py".split()
    command = read_command([*words, *FLAGS])
    environment, launched = {"NVTE_FP8_DPA_BWD": "0"}, {"--nproc-per-node": "8"}
    assert command == Command("train/pretrain_gpt.py", FLAGS, environment, launched)
    assert launched_gpus(command) == (8, "")
    assert read_command(FLAGS) == Command("pretrain_gpt.py", FLAGS)


@pytest.mark.parametrize(
    ("script", "gpus", "message"),
    [
        ("torchrun --nproc_per_node=8 --nnodes 4 pretrain_gpt.py --bf16", 32, ""),
        ("N=(--nproc_per_node 8 --nnodes 2)\ntorchrun ${N[@]} pretrain_gpt.py ${A[@]}", 16, ""),
        ('CALL="torchrun $WORDS pretrain_gpt.py --bf16"\n$CALL', 64, ""),
        ("mpirun -np 16 --allow-run-as-root python pretrain_gpt.py --bf16", 16, ""),
        ("msrun --worker_num 16 --local_worker_num=8 pretrain_gpt.py --bf16", 16, ""),
        ("python pretrain_gpt.py --bf16", None, ""),
        ("torchrun ${OTHER[@]} pretrain_gpt.py --bf16", None, ""),
        ("torchrun --nproc-per-node 8 --nnodes $NOT_SET pretrain_gpt.py --bf16", None,
         "not known from --nnodes $NOT_SET --nproc-per-node 8: the minimum .* Set it with --gpus"),
    ],
)  # fmt: skip
def test_the_number_of_gpus_comes_from_torchrun(
    tmp_path: Path, script: str, gpus: int | None, message: str
) -> None:
    assignments = 'A=(--bf16)\nWORDS="--nproc-per-node=64"\n'
    command = read_command([written(tmp_path, "a.sh", f"{assignments}{script}\n")])
    num_gpus, why = launched_gpus(command)
    assert num_gpus == gpus
    assert bool(why) == bool(message)
    assert re.search(message.replace("$", r"\$"), why)
    assert not any("nodes" in flag for flag in command.flags)


@pytest.mark.parametrize(
    ("options", "start", "gpus"),
    [
        ("--nodes=4 --ntasks-per-node=8", "srun python pretrain_gpt.py --bf16", 32),
        ("-N2 --gres=gpu:h200:8  # as any job", "srun python pretrain_gpt.py --bf16", 16),
        ("--nodes 4", "srun --ntasks-per-node=8 -N 2 python pretrain_gpt.py --bf16", 16),
        ("--gpus-per-node 8", "srun python pretrain_gpt.py --bf16", 8),
        # With one task, SLURM starts a launcher on each node.
        ("--nodes=4 --ntasks-per-node=1", "srun train.sh pretrain_gpt.py --bf16", None),
        ("--nodes=4 --ntasks-per-node=1 --gpus-per-node=8", "pretrain_gpt.py --bf16", 32),
        # The options of torchrun come first; SLURM sets these variables.
        ("--nodes=4 --gpus-per-node=8", "torchrun --nproc-per-node 2 pretrain_gpt.py --bf16", 2),
        ("--nodes=4 --gpus-per-node=8",
         "torchrun --nproc-per-node $SLURM_GPUS_ON_NODE --nnodes $SLURM_NNODES pretrain.py --bf16",
         32),
    ],
)  # fmt: skip
def test_the_number_of_gpus_comes_from_slurm_without_torchrun(
    tmp_path: Path, options: str, start: str, gpus: int | None
) -> None:
    first, _, second = options.partition(" --")
    lines = [f"#SBATCH {first}", *([f"#SBATCH --{second}"] if second else []), "A=1", start]
    script = "\n".join(["#!/bin/bash", *lines, "#SBATCH --nodes=99"])
    assert launched_gpus(read_command([written(tmp_path, "a.sh", script)]))[0] == gpus


def test_a_yaml_of_functional_tests_is_read(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = written(
        tmp_path,
        "model_config.yaml",
        """
        ENV_VARS:
          CUBLAS_WORKSPACE_CONFIG: :4096:8
        MODEL_ARGS:
          --num-layers: 8
          --pipeline-model-parallel-size: 4
          --bf16: true
          --recompute-modules: "[core_attn moe_act]"
          --sequence-parallel: false
        """,
    )
    command = read_command([file])
    assert command.flags == (*FLAGS, "--recompute-modules", "core_attn", "moe_act")
    assert command.environment == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def test_a_pattern_in_a_file_makes_a_hybrid_model(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    text = "MODEL_ARGS:\n  --hybrid-layer-pattern: M*|M-/M/M\n  --num-layers: 99\n"
    command = read_command([written(tmp_path, "model_config.yaml", text)])
    assert command.script == "pretrain_hybrid.py"
    assert (command.pattern, command.layers, command.mtp_layers) == ("M*|M-/M/M", 4, 2)
    assert command.without_chunks().pattern == "M*M-/M/M"
    alone = command.without_predicting()
    assert (alone.pattern, alone.mtp_layers) == ("M*|M-", 0)
    assert find_script(command.script, None).name == "pretrain_gpt.py"  # which builds both


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("import os, sys\nfrom megatron.training import pretrain\nimport transformer_engine\n", ""),
        ("from parts.data import batches\nfrom .parts import data\nimport json\n", ""),
        ("try:\n    import megatron_patch\nexcept ImportError:\n    pass\n", ""),
        ("def main():\n    import megatron_patch\n", ""),
        ("import sys\nsys.path.append('../patch')\nimport megatron_patch\n", ""),
        ("import megatron_patch.data\nimport another_patch\n", "megatron_patch"),
        ("import torch\nfrom megatron_patch.data import batches\n", "megatron_patch"),
        ("from parts.loop import train\n", "megatron_patch"),
        ("print(\n", ""),  # not Python: the dry run names the line
    ],
)
def test_a_script_that_imports_a_missing_package_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, source: str, missing: str
) -> None:
    pytest.importorskip("torch")
    script = Path(written(tmp_path, "pretrain_gpt.py", source))
    written(tmp_path, "parts/__init__.py", "")
    written(tmp_path, "parts/loop.py", "import megatron_patch\n")
    is_own = find_script(str(script), None) == script.resolve()
    assert is_own == (not missing)
    text = (
        f"{script} needs {missing}, which is not here: its flags are estimated with Megatron-LM's"
    )
    assert (text in caplog.text) == bool(missing)


@pytest.mark.parametrize(
    ("settings", "backend"),
    [
        ("NVTE_FLASH_ATTN=1 NVTE_FUSED_ATTN=0", "flash"),
        ("NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=1", "fused"),
        ("NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=0", "unfused"),
        ("NVTE_UNFUSED_ATTN=0", "auto"),
        ("NVTE_FLASH_ATTN=1 NVTE_FUSED_ATTN=1", None),
        ("NVTE_FUSED_ATTN=0 NVTE_FWD_LAYERNORM_SM_MARGIN=16", "flash"),
    ],
)
def test_variables_for_attention_are_its_backend(
    tmp_path: Path, settings: str, backend: str | None
) -> None:
    """Megatron rejects them without --attention-backend, which older scripts do not have."""
    start = "torchrun pretrain_gpt.py --num-layers 4"
    script = written(tmp_path, "old.sh", f"export {settings}\n{start}\n")
    command = read_command([script])
    assert command.value("--attention-backend") == backend
    kept = {name for name in command.environment if name.endswith("_ATTN")}
    assert bool(kept) == (backend is None)
    assert ("NVTE_FWD_LAYERNORM_SM_MARGIN" in command.environment) == ("SM_MARGIN" in settings)
    assert len(command.notes) == (backend is not None)
    script = written(tmp_path, "new.sh", f"export {settings}\n{start} --attention-backend flash\n")
    command = read_command([script])
    assert command.value("--attention-backend") == "flash"
    assert command.notes == ()


def test_variables_with_flags_are_split_into_words(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        "train.sh",
        """
        #!/bin/bash
        export CUDA_DEVICE_MAX_CONNECTIONS=1 NVTE_FUSED_ATTN=1; cd /workspace
        export PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"
        NODES=2
        PP=$(($NODES * 4 / 2))
        GPT_ARGS=" \\
            --num-layers 8 \\
            --pipeline-model-parallel-size $PP \\
        "
        GPT_ARGS+=" --bf16"
        SCRIPT=examples/pretrain_gpt.py
        if [ ! -f $SCRIPT ]; then
            echo "pretrain_gpt.py is missing: --get it"
        fi
        find $FOLDER -name "*.py" -print0 | xargs -0 cp -t copies
        RUN="python -u ${SCRIPT} ${GPT_ARGS} --seq-length ${LENGTH:-4096}"
        srun -l sh -c "${RUN}"
        """,
    )
    command = read_command([file])
    assert command.script == "examples/pretrain_gpt.py"
    assert command.flags == (*FLAGS, "--seq-length", "4096")
    assert command.environment == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NVTE_FUSED_ATTN": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }


SOURCED = """
#!/bin/bash
set -e
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${HERE}/models/dense.sh" $1
FOLDER=`pwd`
sizes() {
    local pipeline=$1
    PARALLEL="--pipeline-model-parallel-size $pipeline --seq-length ${2:-4096}"
}
launch() {
    torchrun pretrain_gpt.py ${MODEL[@]} $PARALLEL "$@" || exit 1
}
if [ $MISSING -ge 1 ]; then
    sizes 8
else
    sizes 4
fi
launch --bf16
"""


def test_sourced_files_and_called_functions_are_read(tmp_path: Path) -> None:
    written(tmp_path, "models/dense.sh", "LAYERS=8\nMODEL=(--num-layers $LAYERS)\n")
    file = written(tmp_path, "train.sh", SOURCED)
    assert " ".join(read_command([file]).flags) == (
        "--num-layers 8 --pipeline-model-parallel-size 4 --seq-length 4096 --bf16"
    )
    assert read_command(["pretrain_mamba.py", file]).script == "pretrain_mamba.py"
    (tmp_path / "models" / "dense.sh").unlink()
    command = read_command([file])
    assert any("models/dense.sh, which cannot be read" in note for note in command.notes)
    with pytest.raises(ScheduleError, match="no --num-layers"):
        check_model(command)


def test_a_file_of_flags_is_read(tmp_path: Path) -> None:
    file = written(tmp_path, "flags.txt", f"# a model\n{' '.join(FLAGS)}\n")
    assert read_command(["pretrain_gpt.py", file]).flags == FLAGS


def test_flags_of_files_are_removed() -> None:
    command = (
        "--data-path 1 a 2 b --num-layers 8 --tokenizer-type X --vocab-size 99 --load c --bf16 "
        "--fim-data --fim-rate 0.5 --reset-attention-mask"
    )
    flags = without_files(Command("pretrain_gpt.py", tuple(command.split())))
    assert flags[:3] == ["--num-layers", "8", "--bf16"]
    assert flags[flags.index("--vocab-size") + 1] == "99"
    assert not {"--data-path", "--load", "a", "b", "c", "--reset-attention-mask"} & set(flags)
    assert not any("fim" in flag for flag in flags)


def test_a_mapping_becomes_flags() -> None:
    values = {"num_layers": 8, "--bf16": True, "--fp16": False, "--b": [1, 2]}
    values |= {"--hierarchical-context-parallel-sizes": "2 4", "--data-path": "a b"}
    assert flags_of(values) == (
        ["--num-layers", "8", "--bf16", "--b", "1", "2"]
        + ["--hierarchical-context-parallel-sizes", "2", "4", "--data-path", "a b"]
    )


@pytest.mark.parametrize(
    ("flags", "gpus", "world", "last_ranks", "stride"),
    [
        # The minimum number of GPUs divides among the experts.
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 "
         "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1",
         None, 32, [7, 15, 23, 31], 8),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping",
         8, 8, [5, 7], 2),
    ],
)  # fmt: skip
def test_stages_have_ranks(
    flags: str, gpus: int | None, world: int, last_ranks: list[int], stride: int
) -> None:
    sizes = sizes_of(Command("pretrain_gpt.py", tuple(flags.split())), gpus)
    stages = range(len(last_ranks))
    assert (sizes.world, sizes.stage_stride) == (world, stride)
    assert [sizes.last_rank(stage) for stage in stages] == last_ranks


def test_ranks_are_named() -> None:
    assert parse_ranks("all", 4) == [0, 1, 2, 3]
    assert parse_ranks("last,first,2", 4) == [0, 2, 3]
    with pytest.raises(ScheduleError, match="--ranks 4: all, first, last or numbers from 0 to 3"):
        parse_ranks("4", 4)


def test_paths_of_files_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run has a working directory of its own."""
    (tmp_path / "plan.json").touch()
    monkeypatch.chdir(tmp_path)
    command = "--pipeline-schedule plan.json --pipeline-costs=plan.json --spec no.py"
    flags = without_files(Command("pretrain_gpt.py", tuple(command.split())), 99)
    file = tmp_path.resolve() / "plan.json"
    assert " ".join(flags[:5]) == f"--pipeline-schedule {file} --pipeline-costs={file} --spec no.py"


def test_deterministic_mode_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """With it, unpermuting saves the rows of experts: torch's index_add instead of scatter_add."""
    monkeypatch.setenv("NCCL_ALGO", "Ring")  # some versions of Megatron require it
    command = Command("pretrain_gpt.py", ("--deterministic-mode", "--data-path", "a"))
    assert without_files(command, 99)[0] == "--deterministic-mode"
    assert environment_of(command)["NCCL_ALGO"] == "Ring"


def test_variables_that_megatron_checks_stay() -> None:
    """Two test cases of Megatron-LM failed its check of NCCL_GRAPH_REGISTER, which they set."""
    variables = {"NCCL_GRAPH_REGISTER": "0", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    command = Command("pretrain_gpt.py", (), {**variables, "NCCL_NVLS_ENABLE": "0"})
    assert environment_of(command).items() >= variables.items()
    assert "NCCL_NVLS_ENABLE" not in environment_of(command)


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ([], "the training command is missing: add it after --"),
        (["nowhere.txt"], "nowhere.txt cannot be read"),
        (["pretrain_bert.py", "--bf16"], "trains a BERT model: rehearsed are GPT and hybrid"),
        (["pretrain_vision_dino.py", "--img-h", "224"], "trains a vision model: rehearsed are GPT"),
        (
            ["examples/multimodal/train.py", "--language-model-type=mistral_7b", "--bf16"],
            "trains a vision-language model: rehearsed are GPT",
        ),
        ("python3 -m verl.trainer.main_ppo trainer.nnodes=4".split(), "main_ppo is no training"),
        (["pretrain_retro.py", "--bf16"], "trains a RETRO model"),
        (["train_esm2.py", "--num-layers", "33"], "trains a protein .ESM. model"),
        (["mimo/train.py", "--model-provider", "llava_vlm"], "trains a vision-language model"),
        (["train.py", "--train-backend", "fsdp", "--wandb-key", "$KEY"], "without Megatron"),
    ],
)
def test_invalid_commands_are_rejected(words: list[str], wrong: str) -> None:
    with pytest.raises(ScheduleError, match=wrong):
        read_command(words)


@pytest.mark.parametrize(
    ("name", "text", "wrong"),
    [
        ("a.sh", "echo hello\n", "has no flags of Megatron-LM, neither"),
        ("a.sh", "uv run train.py --config x train.global_batch_size=8\n",
         "'train.global_batch_size=8' and similar overrides"),
        ("a.txt", "--bf16 --fp8-format 'hybrid", "a.txt cannot be split .*: No closing quotation"),
    ],
)  # fmt: skip
def test_invalid_files_are_rejected(tmp_path: Path, name: str, text: str, wrong: str) -> None:
    with pytest.raises(ScheduleError, match=wrong):
        read_command([written(tmp_path, name, text)])


def test_variables_without_a_value_are_named(tmp_path: Path) -> None:
    tensor, sequence = "--tensor-model-parallel-size", "--seq-length"
    script = written(
        tmp_path,
        "a.sh",
        f'TP=$1\nS=$SEQ\ntorchrun pretrain_gpt.py {tensor} $TP {sequence} "$S" '
        '--num-layers "$(jq .layers config.json)"\n',
    )
    message = (
        "variables without a value: $1, $SEQ, $(jq .layers config.json). Neither the script nor "
        "the environment sets them: add the word $1 after the script's name, which may set the "
        "others; replace $(...) by its output"
    )
    with pytest.raises(ScheduleError, match=re.escape(message)):
        read_command([script])
    plain = written(tmp_path, "b.sh", f"TP=$1\ntorchrun pretrain_gpt.py {tensor} $TP\n")
    assert read_command([plain, "2"]).number(tensor, 1) == 2
    with pytest.raises(
        ScheduleError, match=r"without a value: \$TP\. .* set them, as in TP=\.\.\. mega"
    ):
        read_command(["pretrain_gpt.py", tensor, "$TP"])


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("s/-Instruct//g; s/Qwen3-VL-/qwen3-/; s/-2B/-1.7B/g", "qwen3-8B-1.7B"),
        ("s/B-/./g;s/-//", "Qwen3VL-8.2.Instruct"),
        ("s/-Instruct//g; 1e touch new", None),
        ("s/-Ins.*//", None),
    ],
)
def test_only_substitutions_of_plain_text_of_sed_are_executed(
    tmp_path: Path, program: str, name: str | None
) -> None:
    text = f"NAME=$(echo Qwen3-VL-8B-2B-Instruct | sed '{program}')\n"
    script = written(tmp_path, "a.sh", f"{text}torchrun pretrain_gpt.py --seq-length $NAME\n")
    if name:
        assert read_command([script]).value("--seq-length") == name
    else:
        with pytest.raises(ScheduleError, match=r"without a value: \$\(sed"):
            read_command([script])
    assert not (tmp_path / "new").exists()


def test_unknown_values_without_effect_are_ignored_with_one_note(tmp_path: Path) -> None:
    """With the flags that they belong to: Megatron rejects half of a learning rate's schedule."""
    script = written(
        tmp_path,
        "a.sh",
        "torchrun pretrain_gpt.py --num-layers 8 --train-samples $SAMPLES --lr-decay-samples 9 "
        "--lr 1e-4 --use-z-loss $Z --data-path $DATA --save $(mktemp -d) --bf16\n",
    )
    command = read_command([script])
    assert [word for word in command.flags if word.startswith("--")] == (
        ["--num-layers", "--data-path", "--save", "--bf16"]
    )
    assert command.notes == (
        "Ignored, with unknown values and no effect on a step: --train-samples, --use-z-loss.",
    )


@pytest.mark.parametrize(
    "start",
    [
        "python -m torch.distributed.run --nproc-per-node 8 train/pretrain_gpt.py $FLAGS",
        "srun --mpi=pmix -n 8 singularity exec --nv a.sif python -u pretrain_gpt.py $FLAGS",
        "mpirun -np 8 -x A=1 python pretrain_gpt.py $FLAGS > log_$(date +%F).txt 2>&1",
        """ray job submit --address=x --runtime-env-json='{"a": 1}' -- python3 train.py $FLAGS""",
        'srun bash -lc "export A=1; torchrun --nproc-per-node 8 pretrain_gpt.py $FLAGS 2>&1"',
        "pdsh -w a,b \"cd x; python pretrain_gpt.py $FLAGS\"",
        "{ (A=1 /opt/bin/torchrun --nproc-per-node 8 /x/pretrain_gpt.py $FLAGS) 2>&1; } | tee log",
        "run() { \"$@\" > log; }; run torchrun pretrain_gpt.py $FLAGS",
        'CMD="torchrun pretrain_gpt.py $FLAGS"; echo $CMD; eval $CMD',
        "set -eu; cat > conf <<EOF\na\nEOF\nbash inner.sh $FLAGS",
        "while ! test -f done; do sleep 5; done; timeout 9 torchrun pretrain_gpt.py $FLAGS &\nwait",
        "ALL=($FLAGS); while [ $# -gt 0 ]; do shift; done",
        "D=logs; if :; then /opt/python pretrain_gpt.py $FLAGS >> $D/'a b' 2>&1 ; fi",
    ],
)  # fmt: skip
def test_the_command_behind_a_launcher_is_found(tmp_path: Path, start: str) -> None:
    written(tmp_path, "inner.sh", 'torchrun pretrain_gpt.py "$@"\n')
    layers = "for i in $(seq 1 2); do L=$((L + 4)); done"
    flags = "--num-layers $L --pipeline-model-parallel-size $(expr 2 \\* 2) --bf16"
    start = start.replace("$FLAGS", "$FLAGS --seq-length 64")
    script = written(tmp_path, "a.sh", f'#!/bin/bash\n{layers}\nFLAGS="{flags}"\n{start}\n')
    assert read_command([script]).flags == (*FLAGS, "--seq-length", "64")


@pytest.mark.parametrize(
    ("flags", "gpus", "wrong"),
    [
        ("--pipeline-model-parallel-size 4", 6, "6 GPUs do not divide .* to a multiple of 4"),
        ("--tensor-model-parallel-size two", None, "'two' is no whole number"),
        ("--context-parallel-size= --bf16", None, "--context-parallel-size has no value: add one"),
        ("--pipeline-model-parallel-size 0", 8, "parallel-size 0 is not a positive number"),
        ("--expert-tensor-parallel-size -1", 8, "parallel-size -1 is not a positive number"),
    ],
)
def test_invalid_parallel_sizes_are_rejected(flags: str, gpus: int | None, wrong: str) -> None:
    with pytest.raises(ScheduleError, match=wrong):
        sizes_of(Command("pretrain_gpt.py", tuple(flags.split())), gpus)


def test_eval_reads_quotes_next_to_the_output_of_a_program(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        "eval.sh",
        """
        GPUS=$(python -c "import torch; print(torch.cuda.device_count() or 'none' > 8 & 1)")
        MODEL=(--num-layers 48 --moe-layer-freq "'([1]*48)'")
        cmd="torchrun --nproc_per_node $GPUS pretrain_gpt.py ${MODEL[@]}"
        eval $cmd 2>&1 | tee train.log ; exit ${PIPESTATUS[0]}
        """,
    )
    command = read_command([script])
    assert command.flags == ("--num-layers", "48", "--moe-layer-freq", "([1]*48)")
    assert command.script == "pretrain_gpt.py"


def test_a_switch_needs_no_value() -> None:
    command = Command("pretrain_gpt.py", ("--swiglu", "--bf16"))
    assert command.option("swiglu") is command.option("bf16") is True
    with pytest.raises(ScheduleError, match="--pipeline-schedule has no value"):
        command.having(pipeline_schedule=True).value("--pipeline-schedule")


def test_a_tokenizer_of_unknown_size_is_rejected() -> None:
    command = Command("pretrain_gpt.py", ("--tokenizer-type", "HuggingFaceTokenizer"))
    with pytest.raises(ScheduleError, match="add --vocabulary N"):
        without_files(command)
    assert "32000" in without_files(command, 32000)


def test_a_module_of_megatron_is_its_script() -> None:
    command = read_command("python3 -m pretrain_gpt --bf16".split())
    assert command == Command("pretrain_gpt.py", ("--bf16",))
    started = read_command("python -m torch.distributed.run --nnodes 2 pretrain_gpt.py".split())
    assert started.script == "pretrain_gpt.py"


MODEL_FILE = """
from model_args_utils import moe_layer_freq
DENSE = 1
def model_args(layers: int | None = None, base: str = "5") -> str:
    layers = layers if layers is not None else int(os.environ.get("NOT_SET") or 8)
    return (
        f"--num-layers {layers} --rotary-base {base} "
        f"--moe-layer-freq {moe_layer_freq(nlayers=layers - 5, dense=DENSE)} "
    )
"""
MODEL_PROGRAM = """
def moe_layer_freq(*, nlayers: int, dense: int) -> str:
    return "[" + ",".join(["0"] * dense + ["1"] * (nlayers - dense)) + "]"
"""
SLIME = (
    "--num-layers 4 --hidden-size 64 --actor-num-nodes 2 --actor-num-gpus-per-node 8 "
    "--tensor-model-parallel-size 2 --context-parallel-size 2 --rollout-batch-size 32 "
    "--rollout-max-response-len 3000 --global-batch-size 256 --attention-dropout 0.0 "
)


def test_commands_of_slime_have_sizes_of_their_packed_microbatches(tmp_path: Path) -> None:
    packed = f"{SLIME}--use-dynamic-batch-size --max-tokens-per-gpu"
    script = written(
        tmp_path,
        "run.sh",
        f'LIMIT=5000\nray job submit --address=x -- python3 train.py {packed} "${{LIMIT}}"\n',
    )
    command = read_command([script])
    assert command.script == "pretrain_gpt.py"
    # 5000 tokens on both context-parallel ranks; 256 responses of 3000 tokens are 77 sequences, and
    # 4 replicas have the same number.
    sizes = f"--seq-length {2 * 5000} --global-batch-size {4 * 20} --micro-batch-size 1"
    assert differing_flags(command, f"{sizes} --bf16 --use-distributed-optimizer") == {}
    assert any("responses with 3,000 tokens" in note for note in command.notes)
    with pytest.raises(ScheduleError, match=r"without a value: \$LIMIT"):
        read_command(["train.py", *packed.split(), "$LIMIT"])
    fixed = read_command(f"train.py {SLIME}--fp16 --seq-length 512 --micro-batch-size 4".split())
    sizes = "--seq-length 512 --global-batch-size 256 --micro-batch-size 4"
    assert differing_flags(fixed, sizes) == {}
    assert not fixed.has("--bf16")


@pytest.mark.parametrize(
    ("spec", "checkpoint", "name"),
    [
        ("slime_plugins.models.qwen3_5 get_qwen3_5_spec", "models/Qwen3.5-27B", "Qwen3.5-27B"),
        ("miles_plugins.models.qwen3_next get_spec", "Qwen/Qwen3-Next", "Qwen3-Next"),
        ("slime_plugins.models.minimax_m2 get_minimax_m2_layer_spec", "models/MiniMax-M2", ""),
    ],
)
def test_layers_of_a_plugin_are_replaced(spec: str, checkpoint: str, name: str) -> None:
    """The layers of slime's Qwen3.5 need another Megatron, and every dry run ended in an error."""
    words = f"train.py {SLIME} --num-layers 8 --spec {spec} --hf-checkpoint {checkpoint}".split()
    command = read_command(words)
    assert command.model_name == name
    assert not command.has("--spec")
    assert "estimated as Megatron's" in command.notes[0]
    assert command.layers == (0 if name else 8)  # without them, the model's flags are added


def test_position_embeddings_of_forks_are_estimated_without_one() -> None:
    command = read_command(["pretrain_gpt.py", "--position-embedding-type", "alibi"])
    assert command.value("--position-embedding-type") == "none"
    (note,) = command.notes
    assert "no --position-embedding-type alibi: estimated as none" in note
    command = read_command(["pretrain_gpt.py", "--position-embedding-type", "rope"])
    assert command.notes == ()


def test_old_flag_of_full_recomputation_is_translated() -> None:
    words = ["--num-layers", "8", "--checkpoint-activations", "--checkpoint-num-layers", "2"]
    command = read_command(["pretrain_gpt.py", *words])
    flags = "--num-layers 8 --recompute-granularity full --recompute-method uniform"
    assert " ".join(command.flags) == f"{flags} --recompute-num-layers 2"
    assert len(command.notes) == 1


def test_optimizers_and_attention_of_forks_are_estimated_as_those_of_megatron() -> None:
    """Legacy models use FlashAttention, in Megatron-Core only Transformer Engine does."""
    words = "--optimizer fusedadamw --use-legacy-models --use-flash-attn --transformer-impl local"
    command = read_command(["pretrain_gpt.py", *words.split()])
    assert command.value("--optimizer") == "adam"
    assert not command.has("--transformer-impl")
    assert len(command.notes) == 2
    words = "--optimizer muon --use-flash-attn --transformer-impl local"
    command = read_command(["pretrain_gpt.py", *words.split()])
    assert [*command.flags] == words.split()
    assert not command.notes


@pytest.mark.parametrize("ratios", [(0.08, 0.5), (0.1, 0.0), (0.0, 0.4), (0.5, 0.5)])
def test_ratios_of_layers_become_the_pattern_of_megatron(ratios: tuple[float, float]) -> None:
    allocation = pytest.importorskip("megatron.core.models.hybrid.hybrid_layer_allocation")
    for num_layers in (7, 24, 56):
        words = f"--num-layers {num_layers} --hybrid-attention-ratio {ratios[0]}"
        words += f" --hybrid-mlp-ratio {ratios[1]} --spec megatron.core mamba_stack_spec"
        command = read_command(["pretrain_mamba.py", *words.split()])
        assert command.pattern == allocation.pattern_from_ratios(num_layers, *ratios)
        assert [*command.flags] == ["--hybrid-layer-pattern", command.pattern]
    command = read_command(["pretrain_mamba.py", *words.split(), "--hybrid-override-pattern", "M*"])
    assert command.pattern == "M*"


@pytest.mark.parametrize("ratio", ["1.5", "-0.1", "half"])
def test_invalid_ratios_of_layers_are_rejected(ratio: str) -> None:
    words = ["--num-layers", "8", "--hybrid-mlp-ratio", ratio]
    with pytest.raises(ScheduleError, match="no ratios with a sum of at most 1"):
        read_command(["pretrain_mamba.py", *words])


SMALLER_MODEL = (
    'def model_args() -> str:\n    return load_sibling_model_args(__file__, "moe", layers=7)\n'
)
EXECUTED_MODEL = 'def model_args() -> str:\n    return open("executed", "w") or "--num-layers 1"\n'


def test_model_files_of_miles_are_evaluated(tmp_path: Path) -> None:
    program = "miles/utils/external/model_args_utils.py"
    written(tmp_path, program, MODEL_PROGRAM)
    for name, text in {"moe": MODEL_FILE, "small": SMALLER_MODEL, "bad": EXECUTED_MODEL}.items():
        written(tmp_path, f"scripts/models/{name}.py", text)
    script = written(
        tmp_path,
        "run.sh",
        f'HERE=$(cd "$(dirname "$0")" &> /dev/null && pwd)\nLINE="$(python3 $HERE/{program} $1)"\n'
        'read -ra MODEL <<< "$LINE"\nray job submit -- python3 train.py ${MODEL[@]} --bf16\n',
    )
    flags = "--num-layers 7 --rotary-base 5 --moe-layer-freq [0,1] --bf16"
    assert " ".join(read_command([script, "small"]).flags) == flags
    assert read_command([script, "moe"]).value("--moe-layer-freq") == "[0,1,1]"
    with pytest.raises(ScheduleError, match=r"without a value: \$\(python3 .*utils.py bad\)"):
        read_command([script, "bad"])
    assert not list(tmp_path.rglob("executed"))
