"""Without a schedule, environment and arguments are as without this package.

Ranks with a schedule get their variables before Megatron's checks can start CUDA, with one line in
the log.
"""

import json
import logging
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_vshape.environment import format_settings, missing_settings, required_settings

ROOT = Path(__file__).parents[2]
SEGMENTS = "expandable_segments:True"
# Never in a rank's environment: processes that it starts would inherit them.
OF_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
EVERYTHING = {
    "NCCL_GRAPH_REGISTER": "0",
    "CUDA_MODULE_LOADING": "EAGER",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
OF_THE_USER = {
    "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
    "CUDA_MODULE_LOADING": "LAZY",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
# Megatron's arguments for some runs, and the environment after all of them. Megatron rejects the
# last one if the allocator has expandable segments, as torch before 2.11 does.
PROGRAM = """
import json, os, sys

if "register" in sys.argv:
    import megatron_vshape
    megatron_vshape.register()
import megatron.core.distributed.distributed_data_parallel_config as data_parallel
from megatron.training import arguments

arguments.get_device_arch_version = lambda: 9  # Hopper's

def validated(flags):
    sys.argv[1:] = flags.split()
    args = arguments.parse_args()
    arguments.validate_args(args)
    return {name: repr(value) for name, value in vars(args).items()}

found = [validated(flags) for flags in RUNS]
data_parallel.is_torch_min_version = lambda *version: False
data_parallel.DistributedDataParallelConfig(nccl_ub=True)
print(json.dumps([dict(os.environ), found]))
"""
MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 16 --lr 1e-3 "
    "--train-iters 1 --tokenizer-type NullTokenizer --vocab-size 100 --transformer-impl local "
    "--no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion "
)
UNFUSED = "--no-gradient-accumulation-fusion "
RUNS = [
    f"{MODEL}{UNFUSED}--use-torch-fsdp2 --ckpt-format torch_dist "
    "--untie-embeddings-and-output-weights",
    f"{MODEL}{UNFUSED}--use-megatron-fsdp --ckpt-format fsdp_dtensor "
    "--data-parallel-sharding-strategy optim_grads_params",
    f"{MODEL}--num-experts 4 --expert-model-parallel-size 4 --bf16",
    f"{MODEL}--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1",
]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the arguments of Megatron alone for `RUNS`, and the environment afterwards."""
    pytest.importorskip("megatron.training")
    return megatron(tmp_path_factory.mktemp("without"))


def megatron(folder: Path, *arguments: str) -> Any:
    """Run `PROGRAM` as one of four ranks, with the package's start-up file, and return its answer.

    Where the first argument is no script's, it is that of Python.
    """
    program = folder / "program.py"
    program.write_text(PROGRAM.replace("RUNS", repr(RUNS)))
    (folder / "sitecustomize.py").write_text((ROOT / "megatron_vshape.pth").read_text())
    told_here = (*EVERYTHING, *OF_ALLOCATOR, "PYTEST_CURRENT_TEST")
    inherited = {k: v for k, v in os.environ.items() if k not in told_here}
    rank_variables = {
        "WORLD_SIZE": "4",
        "RANK": "0",
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
    }
    command = [sys.executable, "-W", "ignore", *arguments[:-1], str(program), *arguments[-1:]]
    process = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env=inherited | rank_variables,
        cwd=folder,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    environment, findings = json.loads(process.stdout.splitlines()[-1])
    assert environment.pop("PYTHONPATH").startswith(str(folder))
    return environment, findings


@pytest.mark.parametrize(
    "start", [("register",), ("-m", "megatron_vshape.mcore.launch", "")], ids=["register", "launch"]
)
def test_without_a_schedule_environment_and_arguments_are_unchanged(
    start: tuple[str, ...], without: Any, tmp_path: Path
) -> None:
    """FSDP, MoE alone and Megatron's schedule; every variable, and every argument."""
    environment, runs = megatron(tmp_path, *start)
    assert environment == without[0]
    assert runs == without[1]


def options(**values: Any) -> Namespace:
    return Namespace(**({"tensor_model_parallel_size": 1, "context_parallel_size": 1} | values))


QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
LOADING, REGISTERS = "CUDA_MODULE_LOADING", "NCCL_GRAPH_REGISTER"
GRAPHS = {"cuda_graph_impl": "transformer_engine"}
CASES: dict[str, tuple[dict[str, Any], bool, set[str], bool]] = {
    "experts alone": ({"expert_model_parallel_size": 8}, True, {LOADING}, True),
    "tensor": ({"tensor_model_parallel_size": 2}, True, {LOADING, QUEUES}, True),
    "context": ({"context_parallel_size": 2}, True, {LOADING, QUEUES}, True),
    "on the CPU": ({"tensor_model_parallel_size": 2}, False, {QUEUES}, False),
    "graphs": (GRAPHS, True, {LOADING, REGISTERS}, True),
    "registered": ({"nccl_ub": True, **GRAPHS}, True, {LOADING}, False),
    "passes side by side": (
        {"tensor_model_parallel_size": 2, "overlap_moe_expert_parallel_comm": True},
        True,
        {LOADING},
        True,
    ),
}
"""By case: options, whether messages are kernels, the variables, and whether segments expand."""


class Process:
    """The settings of a schedule in this process: variables, and the allocator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.environ: dict[str, str] = {}
        self.allocator: list[str] = []
        monkeypatch.setattr("torch._C._accelerator_setAllocatorSettings", self.allocator.append)

    def complete(
        self, arguments: Namespace, kernels: bool = True, **environ: str
    ) -> dict[str, str]:
        """Complete this environment for a schedule, and return it."""
        from megatron_vshape.mcore.setup import environment

        self._patch.setattr(os, "environ", environ)
        self.environ = environ
        pipeline: Any = Namespace(choice=Namespace(name="v-half", kernels=kernels))
        self.settings = environment.Environment()
        self.settings.set_variables(arguments, pipeline)
        return environ

    def again(self, arguments: Namespace, kernels: bool = True) -> None:
        """Do so for a run that is tried again in this process."""
        pipeline: Any = Namespace(choice=Namespace(name="v-half", kernels=kernels))
        names = self.settings.set_names
        self.settings.set_variables(arguments, pipeline)
        assert self.settings.set_names == names


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    pytest.importorskip("megatron.core")
    return Process(monkeypatch)


@pytest.mark.parametrize(("config", "kernels", "names", "expands"), CASES.values(), ids=CASES)
def test_schedule_sets_exactly_its_required_variables(
    config: dict[str, Any],
    kernels: bool,
    names: set[str],
    expands: bool,
    process: Process,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        variables = process.complete(options(**config), kernels)
    assert variables == {name: EVERYTHING[name] for name in names}
    assert process.allocator == [SEGMENTS] * expands
    (line,) = caplog.messages
    assert line.startswith("set in this process for schedule v-half: ")
    assert all(f"{name}={EVERYTHING[name]} (" in line for name in names)
    assert (f"torch's allocator={SEGMENTS} (" in line) == expands
    process.again(options(**config), kernels)
    assert caplog.messages == [line]
    assert process.allocator == [SEGMENTS] * expands


def test_allocator_is_unchanged_with_buffers_registered_by_nccl(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their config comes before the model's, or after it."""
    from megatron_vshape.mcore.hooks import core_hooks
    from megatron_vshape.mcore.hooks.session import Session

    chosen: Any = Namespace(choice=Namespace(name="v-half", kernels=True))
    monkeypatch.setattr(
        core_hooks.configure, "pipeline_from_config", lambda config, options: chosen
    )
    monkeypatch.setattr(Session, "choose", lambda self, *pipeline: None)
    config = options(pipeline_model_parallel_layout=None)
    library_options: Any = Namespace(schedule="v-half", timeout_seconds=1.0)
    for comes_first in (True, False):
        environ: dict[str, str] = {}
        monkeypatch.setattr(os, "environ", environ)
        process.allocator.clear()
        session: Any = Session()
        post_init = core_hooks.data_parallel_config_post_init(session, lambda self: None)
        post_init(Namespace(nccl_ub=False))
        if comes_first:
            post_init(Namespace(nccl_ub=True))
        core_hooks._set_stages(session, library_options, config)
        post_init(Namespace(nccl_ub=True))
        post_init(Namespace(nccl_ub=True))
        assert environ == {LOADING: "EAGER"}
        expected = [] if comes_first else [SEGMENTS, "expandable_segments:False"]
        assert process.allocator == expected


def test_inference_engine_does_not_inherit_the_loading_mode(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA has read it by the time that the optimizer is made, of whatever library."""
    from megatron_vshape.mcore.hooks import core_hooks
    from megatron_vshape.mcore.hooks.session import ProcessState, Session

    environ = process.complete(options())
    process_state = ProcessState(environment=process.settings)
    session: Any = Session(megatrons_own="interleaved-1f1b", process=process_state)
    make = core_hooks.get_megatron_optimizer(session, lambda *_: "an optimizer")
    assert make() == "an optimizer"
    assert environ == {LOADING: "EAGER"}  # CUDA has not started
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    assert make() == "an optimizer"
    assert environ == {}
    environ[LOADING] = "LAZY"  # of the user
    session.process.environment.set_names = frozenset()
    make()
    assert environ == {LOADING: "LAZY"}


def test_variables_of_the_user_are_unchanged(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = options(tensor_model_parallel_size=2, cuda_graph_impl="transformer_engine")
    assert process.complete(arguments, **OF_THE_USER) == OF_THE_USER
    assert process.allocator == []
    assert process.complete(arguments, RANK="3") == EVERYTHING | {"RANK": "3"}
    assert caplog.messages == []


def test_variables_are_logged_but_not_set_after_cuda_started(
    process: Process, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    assert process.complete(options(context_parallel_size=2), False) == {}
    (line,) = caplog.messages
    assert line == (
        "CUDA had started when schedule v-half was chosen, too late to set here what it needs; "
        "start the ranks with CUDA_DEVICE_MAX_CONNECTIONS=1 "
        "(required by tensor and context parallelism)"
    )


@pytest.mark.parametrize("graphs", [False, True])
def test_allocator_is_set_after_cuda_started_unless_graphs_are_captured(
    graphs: bool,
    process: Process,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL may have read by then whether it registers the buffers of graphs."""
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    arguments = options(cuda_graph_impl="transformer_engine" if graphs else "none")
    assert process.complete(arguments, CUDA_MODULE_LOADING="EAGER") == {LOADING: "EAGER"}
    assert process.allocator == ([] if graphs else [SEGMENTS])
    assert any("start the ranks with" in message for message in caplog.messages) == graphs


CHOSEN = """
import os, sys
from megatron_vshape.mcore import cpu
cpu.install()
import megatron_vshape
megatron_vshape.register()
from megatron.training.arguments import parse_args, validate_args
for name in ("1f1b", "v-half"):
    sys.argv[-1] = name
    try:
        validate_args(parse_args())
    except AssertionError as error:
        print(name, error)
print("ENVIRONMENT", __import__("json").dumps(dict(os.environ)))
"""


def test_flags_set_the_environment_before_megatron_checks_it() -> None:
    """Megatron requires the launch order of tensor parallelism, and queries CUDA for it."""
    pytest.importorskip("megatron.training")
    flags = f"{MODEL}--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"
    package_names = {*EVERYTHING, *OF_ALLOCATOR}
    environment = {name: value for name, value in os.environ.items() if name not in package_names}
    environment |= {"WORLD_SIZE": "4", "RANK": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", CHOSEN, *flags.split()]
    process = subprocess.run(
        [*command, "--pipeline-schedule", ""],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        env=environment,
    )
    lines = process.stdout.splitlines()
    (found,) = [line.partition(" ")[2] for line in lines if line.startswith("ENVIRONMENT")]
    variables = {name: value for name, value in json.loads(found).items() if name in package_names}
    assert variables == {QUEUES: "1", LOADING: "EAGER"}
    (refused,) = [line for line in lines if "require setting the environment" in line]
    assert refused.startswith("1f1b ")
    assert "require setting the environment variable CUDA_DEVICE_MAX_CONNECTIONS to 1" in refused


@pytest.mark.parametrize("spelling", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["backend:cudaMallocAsync", ""])
def test_either_spelling_of_the_allocator_variable_counts(spelling: str, value: str) -> None:
    lacking = missing_settings(
        required_settings(kernels=True, ordered=True, graphs=True), {spelling: value}
    )
    assert lacking.keys() == {"CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS"}
    assert format_settings(lacking).count("=") == 2
