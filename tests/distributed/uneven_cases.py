"""Ranks that do unlike things, and models wrapped in unlike ways."""

from __future__ import annotations

import torch
import torch.nn as nn
from composition_cases import _Skips
from models import make_gpt
from scenario import LR, WEIGHT_DECAY, Session, language_loss
from torch.distributed.fsdp import fully_shard

import dmuon


def a_rank_without_a_backward(s: Session) -> None:
    """In the third step rank 1 computes a loss and drops it."""
    s.start(make_gpt(depth=2), units=None)
    for step in range(4):
        whole = language_loss(step, s.size)

        def loss(model: nn.Module, rank: int, step: int = step, whole=whole) -> torch.Tensor | None:
            value = whole(model, rank)
            return None if (step, rank) == (2, 1) else value

        s.backward(loss)
        s.step()


def two_models_of_which_a_rank_skips_a_unit(s: Session) -> None:
    """Both forwards run before either backward, and rank 1 skips the last unit of the first model."""
    first, second = (Session(s.mesh, s.size if s.reference else 0) for _ in range(2))
    torch.manual_seed(0)
    first.start(_Skips(), units=lambda model: [])
    second.start(_Skips(), units=lambda model: [])
    for step in range(3):
        pairs = [(rank, *_losses(first.model, second.model, step, rank)) for rank in first.each_rank()]
        for _, loss, _ in pairs:
            (loss / (s.size if s.reference else 1)).backward()
        for _, _, loss in pairs:
            (loss / (s.size if s.reference else 1)).backward()
        first.step()
        second.step()
    s.initial, s.model = second.initial, second.model
    s.notes.append((first.initial, first.weights()))


def _losses(a: nn.Module, b: nn.Module, step: int, rank: int) -> list[torch.Tensor]:
    x = torch.randn(5, 10, generator=torch.Generator().manual_seed(100 * step + rank))
    skip = (3,) if (step, rank) == (1, 1) else ()
    outputs = [a(x, skip), b(x, ())]
    return [(y - x.sum(-1, keepdim=True).sin()).square().mean() for y in outputs]


def only_blocks_sharded(s: Session) -> None:
    """The root stays plain: its AdamW parameters are replicas beside DTensors."""
    model = make_gpt(depth=2)
    if s.reference:
        s.start(model)
    else:
        s.initial = {n: p.detach().clone() for n, p in model.named_parameters()}
        s.model = model
        dmuon.dedicate_params(model, s.mesh)
        for block in model.blocks:
            fully_shard(block, mesh=s.mesh)
        s.opt = dmuon.Muon(model, lr=LR, weight_decay=WEIGHT_DECAY, ns_dtype=torch.float32)
    s.train(0, 1, 2)
