"""Rollback of a step that started early."""

import torch
from torch import nn

from megatron_vshape.mcore.features.post_validation.optimizer import Backup
from megatron_vshape.mcore.observe.report import static_memory


def test_the_copy_counts_as_memory() -> None:
    model = nn.Linear(30, 20)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(30)).sum().backward()
    optimizer.step()
    backup = Backup()
    backup.save([optimizer])
    memory = static_memory([model], optimizer, post_validates=True)
    steps = sum(state["step"].nbytes for state in optimizer.state.values())
    assert memory.copy == backup.nbytes - steps
    without = static_memory([model], optimizer)
    assert memory.total == without.total + memory.copy
