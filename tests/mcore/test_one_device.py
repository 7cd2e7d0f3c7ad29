"""Chunks of a Megatron GPT on one device."""

import pytest

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.mcore import cpu
from megatron_vshape.mcore.one_device import choose


class TestChoose:
    def test_a_gpu_that_torch_has_seen_stays_in_use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        monkeypatch.setattr(cpu, "install", lambda: False)
        with pytest.raises(ScheduleError, match="start it with CUDA_VISIBLE_DEVICES= in its env"):
            choose("cpu")

    def test_no_gpu_is_one_sentence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        with pytest.raises(ScheduleError, match="torch sees no GPU: run this where there is one"):
            choose("cuda")
