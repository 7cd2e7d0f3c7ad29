"""What the markers mean; declared in pyproject.toml."""

import contextlib

import pytest

with contextlib.suppress(ImportError):
    # Imported after Megatron, whose dependencies log by absl, it has absl close what stands for
    # stderr, which is pytest's.
    import submitit  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where torch sees no GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return  # the core's tests must run without torch
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))
