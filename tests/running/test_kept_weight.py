"""A weight that a program keeps from a forward, and uses when its memory is freed."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn

import dmuon


class Keeping(nn.Linear):
    """Keeps the weight with which it computes."""

    kept: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.__dict__["kept"] = self.weight
        return super().forward(x)


@pytest.fixture
def kept() -> torch.Tensor:
    layer = Keeping(8, 8)
    model = nn.Sequential(nn.Sequential(layer), nn.Linear(8, 4))
    dmuon.dedicate_params(model)
    dmuon.Muon(model, lr=0.02)
    with torch.no_grad():
        model(torch.ones(2, 8))
    return layer.kept


@pytest.mark.parametrize(
    "use",
    [lambda weight: weight.sum(), lambda weight: weight.fill_(1), lambda weight: weight.clone(), torch.Tensor.tolist],
    ids=["sum", "fill_", "clone", "tolist"],
)
def test_it_can_be_neither_read_nor_written(kept: torch.Tensor, use) -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"this weight is resharded.*dmuon\.full_params"):
        use(kept)
