"""Input files: errors are one sentence with the file, the key and the value."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from tuning.samples import ROOT, SWEEP, load_sample, run_over, write_sweep

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.tuning.configurations import SweepError
from megatron_vshape.tuning.files import Cluster, Sweep, load, load_model, load_sweep
from megatron_vshape.tuning.grid import expand_grid
from megatron_vshape.tuning.machine import Machine


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "sweeps").glob("*.yaml")), ids=str)
def test_shipped_sweeps_load_and_have_something_to_run(path: Path) -> None:
    assert expand_grid(load_sweep(path)).possible


@pytest.mark.parametrize(
    ("name", "billions"), [("9_6b", 9.6), ("21b", 21), ("38_5b", 38.5), ("98_5b", 98.5)]
)
def test_shipped_models_have_the_size_in_their_name(
    tmp_path: Path, name: str, billions: float
) -> None:
    """The paper counts one vocabulary matrix, as with tied embeddings."""
    path = ROOT / "configs" / "models" / f"gpt_{name}.yaml"
    load_sweep(write_sweep(tmp_path, sweep={"model": str(path)}))
    command = load_model(path).command
    assert not command.has("--swiglu")
    assert not command.has("--group-query-attention")
    width, vocabulary = command.number("--hidden-size", 0), command.number("--vocab-size", 0) + 1
    parameters = command.layers * 12 * width**2 + width * vocabulary
    assert parameters / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(("folder", "kind"), [("clusters", Cluster), ("sweeps", Sweep)])
def test_every_key_of_an_example_has_a_comment(folder: str, kind: type[BaseModel]) -> None:
    path = ROOT / "configs" / folder / "every_key.yaml"
    load(path, kind)
    lines = path.read_text().splitlines()
    for key in keys_of(kind):
        (line, *_) = [line for line in lines if re.search(rf"(^|[ {{#]){key}:", line)]
        assert "#" in line, f"{path.name}: {key} has no comment"


def keys_of(kind: type[BaseModel]) -> Iterator[str]:
    """Yield every key that a file of this kind may have."""
    for name, field in kind.model_fields.items():
        yield name
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from keys_of(inner)


def grid(**over: Any) -> dict[str, Any]:
    return {"grid": {**SWEEP["grid"], **over}}


@pytest.mark.parametrize(
    ("over", "text"),
    [
        ({"colour": 1}, r"sweep\.yaml: unknown key colour; known: also, cluster, grid, "),
        (grid(tensor=[1]), r"grid: unknown key tensor; known: context_parallel, data_par"),
        (grid(schedule=[]), r"grid\.schedule is empty; it needs at least one value"),
        (grid(microbatch_size=[0]), r"grid\.microbatch_size\.0 is 0: .*greater than 0"),
        (grid(recompute=["some"]), r"grid\.recompute\.0 is 'some': .*match pattern .*none.full"),
        ({"workloads": []}, r"workloads is missing: sequence_length, global_batch_size"),
        ({"cluster": "gone.yaml"}, r"cluster: there is no file .*gone\.yaml: paths in a sweep"),
        (
            run_over(slurm={"setup": "module load cuda"}),
            r"run: slurm\.setup is 'module load cuda',",
        ),
        (grid(schedule=["v-third"]), r"there is no schedule 'v-third'; did you mean .* The names"),
    ],
)
def test_wrong_sweep(tmp_path: Path, over: dict[str, Any], text: str) -> None:
    with pytest.raises(ScheduleError, match=text):
        expand_grid(load_sample(tmp_path, sweep=over))


def test_removed_keys_of_old_files_are_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = {"costs": "costs.json", "layers_per_stage": 2, "sequence_length": 64}
    old = {"sweep": {"measured_costs": [entry]}, "cluster": {"shared_processors": 1}}
    loaded, plain = load_sample(tmp_path, **old), load_sample(tmp_path)
    assert (loaded.sweep, loaded.cluster) == (plain.sweep, plain.cluster)
    assert "measured_costs is ignored: sweep counts the work" in caplog.text
    assert "shared_processors is ignored: every device" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML"),
        ("- 1", "must have keys with values, not \\[1\\]"),
        ("!!python/object/apply:os.system [true]", "sweep.yaml: line 1 has the tag"),
        ("name: &a x\nmodel: *a", "sweep.yaml: line 2 has the alias \\*a, and aliases are not"),
        ("name: x\nmodel: y\nname: z", "sweep.yaml: the key name occurs twice, in lines 1 and 3"),
        ("name: x", "the key cluster is missing \\(and 1 more\\)"),
        # A missing key may be a misspelled one.
        ("nmae: x\nmodle: y", "unknown keys nmae, modle; known: also, "),
    ],
)
def test_file_that_is_no_sweep(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    with pytest.raises(SweepError, match=message):
        load_sweep(path)


@pytest.mark.parametrize(
    ("cluster", "over", "text"),
    [
        ({"nodes": 2, "devices_per_node": 1}, {}, "executor is local, but the cluster two has 2 n"),
        ({"backend": "nccl"}, {"at_once": 2}, "at_once is 2, but with run.executor local every"),
    ],
)
def test_local_executor_rejects_several_nodes_and_shared_gpus(
    tmp_path: Path, cluster: dict[str, Any], over: dict[str, Any], text: str
) -> None:
    with pytest.raises(SweepError, match=text):
        load_sample(tmp_path, cluster=cluster, sweep=run_over(**over))
    load_sample(tmp_path, cluster=cluster, sweep=run_over(**over, executor="slurm"))


@pytest.mark.parametrize(
    ("over", "text"),
    [
        ({"num_attention_heads": 3}, "hidden_size 256 is not a multiple of num_attention_heads"),
        ({"use_parallel_residual": True}, "parallel residual .*which Megatron does not support"),
    ],
)
def test_models_that_cannot_be_trained(tmp_path: Path, over: dict[str, Any], text: str) -> None:
    with pytest.raises(SweepError, match=text):
        load_sample(tmp_path, model=over)


def test_assumptions_are_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of an old file is ignored with a warning."""

    def machine(**assumptions: float) -> Machine:
        return Machine.of(load_sample(tmp_path, cluster={"assumptions": assumptions}).cluster)

    assert machine(pass_us=16000.0, launch_us=50.0) == machine(launch_us=50.0)
    assert "pass_us is ignored: a virtual stage" in caplog.text
    with pytest.raises(SweepError, match="is no assumption 'luck'; there are beside_gib, wide"):
        machine(luck=1.0)


def test_model_without_a_type_names_the_format(tmp_path: Path) -> None:
    path = write_sweep(tmp_path)
    (tmp_path / "model.yaml").write_text("layers: 8\nhidden_size: 256\n")
    with pytest.raises(SweepError, match="model_type is missing: .* fields of a Hugging Face con"):
        load_sweep(path)
