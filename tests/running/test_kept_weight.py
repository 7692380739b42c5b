"""A weight that a program keeps from a forward, and uses when its memory is freed."""

from __future__ import annotations

from contextlib import nullcontext

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


class Reading(Keeping):
    """Reads its weight by `.data`, of which dmuon keeps a copy until the end of the call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        assert self.weight.data.isfinite().all() and self.kept._copy is not None
        return y * (1 / x[0, 0].item())


@pytest.mark.parametrize("raises", [False, True])
def test_no_copy_is_left_after_a_call(raises):
    layer = Reading(8, 8)
    model = nn.Sequential(nn.Sequential(layer), nn.Linear(8, 4))
    dmuon.dedicate_params(model)
    dmuon.Muon(model, lr=0.02)
    with torch.no_grad(), pytest.raises(ZeroDivisionError) if raises else nullcontext():
        model(torch.zeros(2, 8) if raises else torch.ones(2, 8))
    assert layer.kept._copy is None


X = torch.ones(2, 8)


@pytest.mark.parametrize(
    "use",
    [
        torch.sum,
        torch.clone,
        torch.Tensor.tolist,
        lambda weight: weight.fill_(1),
        lambda weight: nn.functional.linear(X, weight),
        lambda weight: X @ weight.T,
        lambda weight: weight.view(4, 16).T + 1,
        lambda weight: weight[:2] * 2,
        lambda weight: torch.einsum("bi,oi->bo", X, weight),
    ],
)
def test_it_can_be_neither_read_nor_written(kept: torch.Tensor, use) -> None:
    words = r"a weight of '0.*was read or changed after it was freed.*reshard_after_forward=False"
    with torch.no_grad(), pytest.raises(RuntimeError, match=words):
        use(kept)
