"""GPUs by a cluster file: memory, rates and links reach every estimate."""

from dataclasses import asdict
from pathlib import Path

import pytest
from cli.conftest import Output

from megatron_vshape.cli.dry_run import of_cluster
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.gpus import GIB, GPUS, Gpu
from megatron_vshape.rehearsal.step_time import rates_of

pytest.importorskip("pydantic")

FILE = """
name: eight A100-40GB, PCIe
nodes: 1
devices_per_node: 8
device: {name: A100-PCIe, memory_gib: 39.4, peak_tflops: 312, memory_tb_per_s: 1.555,
         processors: 108}
inside_node_gb_per_s: 20
between_nodes_gb_per_s: 12.5
assumptions: {beside_gib: 1.5, wide: 0.61}
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "cluster.yaml"
    file.write_text(text)
    return file


def test_a_cluster_file_sets_memory_rates_and_links(tmp_path: Path) -> None:
    machine = of_cluster(written(tmp_path, FILE))
    number, gpu = machine.num_devices, machine.gpu
    assert (number, gpu.node, gpu.beside_gib) == (8, 8, 1.5)
    assert gpu.memory_bytes == int(39.4 * GIB)
    assert (gpu.near_rate, gpu.far_rate) == (20e9, 12.5e9)
    assert rates_of(gpu).wide == 0.61
    assert rates_of(gpu).memory == rates_of(GPUS["a100"]).memory
    assert Gpu.from_json(asdict(gpu)) == gpu  # as a job has it


@pytest.mark.parametrize(
    ("device", "name"),
    [("GH200-96GB", "gh200"), ("H200-141GB", "h200"), ("RTX 6000", "rtx 6000")],
)
def test_a_device_name_contains_the_name_of_a_gpu(tmp_path: Path, device: str, name: str) -> None:
    gpu = of_cluster(written(tmp_path, FILE.replace("A100-PCIe", device))).gpu
    assert gpu.name == name


def test_software_sets_the_memory_of_cuda_and_libraries(tmp_path: Path) -> None:
    text = FILE.replace("{beside_gib: 1.5, wide: 0.61}", "{}")
    assert of_cluster(written(tmp_path, text)).gpu.beside_gib == 2.3
    gpu = of_cluster(written(tmp_path, f"{text}software: torch\n")).gpu
    assert (gpu.beside_gib, gpu.communicator_bytes) == (0.5, GPUS["a100"].communicator_bytes)
    assert of_cluster(written(tmp_path, f"{FILE}software: torch\n")).gpu.beside_gib == 1.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            FILE.replace("beside_gib: 1.5, ", "").replace("A100-PCIe", "H100") + "software: torch",
            "software torch was not measured on GPUs like H100 .measured there: "
            "transformer-engine.. Remove software, or set the memory",
        ),
        (FILE.replace("wide", "luck"), "there is no assumption 'luck'"),
        (FILE.replace("nodes: 1\n", ""), "nodes"),
    ],
)
def test_invalid_cluster_file_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        of_cluster(written(tmp_path, text))


@pytest.mark.parametrize("options", [[], ["--gpus", "8xA100", "--cluster", "any.yaml"]])
def test_advise_needs_one_description(options: list[str], error_of: Output) -> None:
    sizes = "--num-layers 4 --hidden-size 64 --pipeline-model-parallel-size 2"
    flags = ["pretrain_gpt.py", *sizes.split()]
    assert "--gpus NxGPU, as in 128xH100, or --cluster FILE is required" in error_of(
        "advise", *options, "--", *flags
    )
