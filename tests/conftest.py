"""Markers (declared in pyproject.toml), and an empty home directory for every test."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from rehearsal.warm import Warm

pytest_plugins = ["skips"]

# As in scripts/lib.sh: packages may come uncompiled, and a process that compiles Megatron's imports
# for itself needs 16 seconds instead of 6.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A busy machine makes any example slow, and the deadline of 200 ms would fail a correct one.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

with contextlib.suppress(ImportError):
    # Imported after Megatron, whose dependencies log by absl, it has absl close what stands for
    # stderr, which is pytest's.
    import submitit  # noqa: F401


TE_VARIABLE = "TRANSFORMER_ENGINE_PYTHON"
DOWNLOADS = Path(__file__).parents[1] / ".cache" / "megatron_vshape"
"""Downloads of scripts/test.sh."""


def pytest_configure(config: pytest.Config) -> None:
    """Replace the home and cache directories by empty ones, for processes of the tests as well.

    A test that passes only because of an earlier download of the user then fails. Transformer
    Engine's Python is that of scripts/test.sh, unless its variable is set.
    """
    if hasattr(config, "workerinput"):
        return  # pytest-xdist's workers inherit the environment
    home = Path.home()
    pip_cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache", "pip")
    os.environ.setdefault("PIP_CACHE_DIR", str(pip_cache))
    if (home / ".pyenv").is_dir():
        os.environ.setdefault("PYENV_ROOT", str(home / ".pyenv"))
    directory = tempfile.TemporaryDirectory(prefix="home-", ignore_cleanup_errors=True)
    config.add_cleanup(directory.cleanup)
    os.environ["HOME"] = directory.name
    os.environ["XDG_CACHE_HOME"] = str(Path(directory.name, ".cache"))
    downloads = sorted(DOWNLOADS.glob("transformer_engine-*"))
    if downloads:
        os.environ.setdefault(TE_VARIABLE, str(downloads[-1]))


SLOW = {
    "faults/test_saving.py": {
        "test_previous_checkpoint_still_loads": [
            "full disk-2-iter_0000004/__2_0",
            "full disk-0-latest_checkpointed",
            "killed writer-0-iter_0000004/.metadata",
            "killed writer-0-latest_checkpointed",
        ],
    },
    "mcore/test_auto.py": {
        "test_planned_from_costs_trains_like_1f1b": ["v-half+"],
    },
    "mcore/test_checkpoints.py": {
        "test_checkpoints_load_under_another_schedule": [
            "v-half -> v-half, uneven",
            "stock -> v-half, shared, tied",
            "v-half, shared, tied, MTP -> one rank, tied, MTP",
            "stock, MTP -> v-zb, MTP",
            "v-zb, MTP -> stock, MTP",
            "v-zb in slices -> stock",
            "v-half, uneven -> v-zb, TP 2",
        ],
    },
    "mcore/test_gradients.py": {
        "test_gradients_equal_one_rank_bitwise": [
            "v-min-bf16",
            "v-half-fp32",
            "v-zb-fp32",
            "v-zb-bf16",
        ],
    },
    "mcore/test_graphs.py": {
        "test_graph_replays_equal_passes": [
            "v-zb-attention",
            "zb-h1-mlp",
        ],
    },
    "mcore/test_hiding.py": {
        "test_parameters_are_the_same_bits": ["TP, tied-v-half"],
    },
    "mcore/test_layer_split.py": {
        "test_training_equals_one_rank": ["v-half+", "zb-h1, last without layers"],
    },
    "mcore/test_library.py": {
        "test_a_library_with_megatrons_parser": ["flags"],
        "test_a_hybrid_model": ["zb-h1"],
        "test_losses_equal_megatron_with_unequal_microbatches_of_replicas": [
            "v-half-False",
            "zb-h1-True",
        ],
        "test_an_embedding_that_the_library_replaces_stays_tied": ["zb-h1"],
        "test_results_are_on_the_ranks_that_libraries_read": ["zb-h1"],
        "test_the_first_chunk_is_stepped_first_where_there_are_several": ["zb-h1-False"],
        "test_overlapped_all_to_all_of_experts": ["dualpipev", "v-half"],
        "test_training_equals_the_library_with_1f1b": [
            "bridge-v-zb",
            "bridge-zb-h1",
            "verl-v-half",
            "verl-zb-h1",
            "areal-v-half",
            "areal-v-zb",
        ],
    },
    "mcore/test_multi_token.py": {
        "test_training_equals_one_rank": [
            "v-zb, tied, depth 2",
            "grouped-interleaved-1f1b, untied, depth 2",
            "v-min, a last stage without other layers",
            "v-half, balanced",
            "zb-h1, tied",
        ],
        "test_training_with_vocabulary_parallelism_equals_one_rank": [
            "v-half, untied",
            "zb-h1, untied, depth 2",
        ],
        "test_with_other_parallelism": ["EP, overlap-v-half", "TP, SP-v-half"],
        "test_vocabulary_parallelism_with_other_parallelism": ["TP, SP, untied"],
        "test_a_library": ["zb-h1", "v-half"],
    },
    "mcore/test_offload.py": {
        "test_losses_equal_for_every_named_schedule_with_offloading": ["gpipe", "v-zb"],
        "test_offloading_with_other_megatron_features": [
            "TP + SP",
            "bf16, recompute",
            "experts",
        ],
        "test_measured_peaks_equal_predicted_peaks": ["v-half"],
    },
    "mcore/test_outer_models.py": {
        "test_frozen_parts_equal_1f1b": ["encoder-v-zb", "language-v-half"],
        "test_gradients_equal_1f1b": ["mbridge-zb-h1", "bridge-1f1b-v"],
    },
    "mcore/test_paged_stash.py": {
        "test_overflowed_step_is_rerun_with_equal_results": ["zb-h1-False"],
    },
    "mcore/test_reductions.py": {
        "test_bucket_is_reduced_in_the_w_that_completes_it": [
            "tied-v-min",
            "tied-v-zb",
            "untied-v-min",
            "untied-v-half",
            "tied-v-half",
        ],
        "test_recomputed_layers_have_equal_gradients": ["selective", "full"],
    },
    "mcore/test_reordering.py": {
        "test_ranks_of_a_stage_use_the_same_order": ["TP", "EP"],
    },
    "mcore/test_restart.py": {
        "test_failed_step_leaves_no_state_and_the_retry_is_equal": ["v-half"],
    },
    "mcore/test_split_local.py": {
        "test_split_gradients_equal_megatron": ["True"],
        "test_all_reduce_overlaps_with_deferred_wgrad": ["False"],
        "test_wgrad_uses_autocast_of_the_forward": ["dtype0"],
    },
    "mcore/test_split_models.py": {
        "test_gradients_equal_1f1b": ["shared experts"],
    },
    "mcore/test_training.py": {
        "test_six_steps_equal_1f1b": [
            "v-min-untied",
            "v-half-tied",
            "v-zb-untied",
            "v-min-tied",
            "v-zb-tied",
        ],
        "test_training_equals_1f1b_with_megatron_options": [
            "tied, data-parallel, overlap",
            "recompute",
        ],
        "test_schedule_file_with_any_placement_equals_1f1b": [
            "loss on an inner rank",
            "linear, tied",
            "ends on one rank",
            "looping, tied",
        ],
        "test_every_named_schedule_equals_1f1b": [
            "gpipe",
            "eager-1f1b",
            "zb-h2",
            "v-two-thirds",
        ],
    },
    "mcore/test_translated_training.py": {
        "test_training_equals_one_rank": ["counted ends"],
        "test_early_optimizer_step_of_the_first_chunk": ["v-half"],
    },
    "mcore/test_unsplit.py": {
        "test_schedules_with_full_backwards_are_valid": ["v-min", "v-zb"],
    },
    "mcore/test_vocabulary.py": {
        "test_training_equals_1f1b": [
            "v-zb, tied",
            "v-half, per-token loss, learned positions",
            "zb-h1, tied",
        ],
        "test_library_training_equals_its_1f1b": ["bridge"],
        "test_variable_length_microbatches_equal_megatron": [
            "lengths-zb-h1",
            "lengths, tied-zb-h1",
            "numbers of sequences-zb-h1",
        ],
        "test_training_in_16_bits": ["--bf16"],
        "test_vocabulary_parallelism_with_other_parallelism": [
            "DP, distributed optimizer, overlaps"
        ],
    },
    "rehearsal/test_saved_config.py": {
        "test_a_saved_run_takes_the_bytes_of_the_same_flags": ["transformer_engine"],
    },
}
"""Cases that take some ten seconds each and run the code of others beside them: slow, too."""


OF_OTHER_THINGS = {"cli", "playground", "rehearsal", "tuning"}
"""Folders of tests that are not of how good a plan is."""


@pytest.fixture(scope="session")
def common(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of the session that all workers of pytest-xdist share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory, common: Path) -> Iterator[Warm]:
    """Return a runner of the command line whose dry runs import Megatron once."""
    warm = Warm(tmp_path_factory.mktemp("warm"), common)
    yield warm
    warm.close()


@pytest.fixture(autouse=True)
def small_budget(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan with a tenth of the default budget or less in the tests of those folders.

    A server that a browser asks is a process of its own, which plans as ever.
    """
    in_browser = request.node.get_closest_marker("browser")
    if request.path.parent.name in OF_OTHER_THINGS and not in_browser:
        default = "megatron_vshape.core.planner.search.default_steps"
        monkeypatch.setattr(default, lambda _problem: 10_000)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of `SLOW`; skip the tests marked `gpu` where torch sees no GPU."""
    for item in items:
        name, _, case = item.name.partition("[")
        tests = SLOW.get("/".join(item.path.parts[-2:]), {})
        if case.removesuffix("]") in tests.get(name, ()):
            item.add_marker(pytest.mark.slow)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return  # the core's tests must run without torch
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))
