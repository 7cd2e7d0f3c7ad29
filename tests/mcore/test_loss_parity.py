"""scripts/loss_parity.py: its table of two runs."""

import numpy as np
import pytest

loss_parity = pytest.importorskip("loss_parity", reason="it needs tensorboard and matplotlib")


def test_table_distinguishes_equal_from_nearly_equal() -> None:
    def logged(*loss: float, norm: float = 1.0) -> object:
        return loss_parity.Logged(np.float32(loss), np.full(len(loss), norm, np.float32))

    runs = {
        loss_parity.BASELINE: logged(4, 3, 2),
        "same": logged(4, 3, 2),
        "another norm": logged(4, 3, 2, norm=1.5),
        "apart": logged(4, 3.25, 2.125),
    }
    settings = loss_parity.Settings("fp32", (), 3)
    lines = {line[1]: line[5:] for line in loss_parity.rows(settings, runs)}
    assert lines["same"] == ["0", "-", "+0.0e+00", "3", "3"]
    assert lines["another norm"] == ["0", "-", "+0.0e+00", "3", "0"]
    assert lines["apart"] == ["2.5e-01", "2", "+1.2e-01", "1", "1"]


@pytest.mark.slow
def test_slices_train_real_text_as_1f1b_does(tmp_path) -> None:
    """300 steps in bf16: as close as two runs are whose sums are added up in another order."""
    (sliced,) = [
        setting for setting in loss_parity.settings(300) if setting.schedules == loss_parity.SLICED
    ]
    runs = loss_parity.compare(sliced, tmp_path, keep=False)
    baseline_run, sliced_run = runs[loss_parity.BASELINE], runs["V-ZB in slices"]
    assert len(sliced_run.loss) == 300
    assert baseline_run.loss[-15:].mean() < 0.8 * baseline_run.loss[0]  # it has learned something
    assert abs(sliced_run.loss[-15:].mean() - baseline_run.loss[-15:].mean()) < 0.02
    assert np.abs(sliced_run.loss - baseline_run.loss).max() < 0.1
