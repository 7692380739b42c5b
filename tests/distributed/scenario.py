"""One training program run twice: on ranks by dmuon, and on one process by the reference optimizer."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn as nn
from models import batch, loss_of, part, weights_of_plain
from reference import ReferenceMuon
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from training import LR, WEIGHT_DECAY, dedicate, place_of, weights_of

import dmuon

LossOf = Callable[[nn.Module, int], "torch.Tensor | None"]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return list(model.blocks)


class Session:
    """What a scenario drives; the reference sees every rank's part of the batch, a rank its own."""

    def __init__(self, mesh: Any, schedule: dict[str, Any], reference_size: int = 0) -> None:
        self.mesh, self.schedule = mesh, schedule
        self.reference = reference_size > 0
        rank, size = place_of(mesh)
        self.rank = None if self.reference else rank
        self.size = reference_size or size
        self.notes: list[Any] = []

    def start(
        self,
        model: nn.Module,
        units: Callable[[nn.Module], Sequence[nn.Module]] | None = blocks_of,
        names: Callable[[str], bool] = lambda name: "embedding" not in name and "head" not in name,
        options: dict[str, Any] | None = None,
        muon: dict[str, Any] | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        offload_policy: OffloadPolicy | None = None,
        prepare: Callable[[nn.Module], None] = lambda model: None,
        adamw_groups: Callable[[nn.Module], list[dict[str, Any]]] = lambda model: [],
        muon_groups: Callable[[nn.Module], list[dict[str, Any]]] = lambda model: [],
    ) -> nn.Module:
        """Makes the optimizer.

        Args:
            model: the model.
            units: what fully_shard gets, besides the root. None: plain replicas.
            names: the matrices, for the reference.
            options: more options of dedicate_params, beside the schedule.
            muon: options of dmuon.Muon, or of the reference.
            mp_policy: of dmuon and FSDP2.
            offload_policy: of FSDP2.
            prepare: is called with the model before either optimizer.
            adamw_groups: those of dmuon.Muon, made of the sharded model.
            muon_groups: likewise, of matrices.
        """
        self.initial = weights_of_plain(model)
        self.model = model
        prepare(model)
        if self.reference:
            chosen = [n for n, p in model.named_parameters() if p.ndim == 2 and p.requires_grad and names(n)]
            self.opt: Any = ReferenceMuon(model, chosen, LR, WEIGHT_DECAY, **(muon or {}))
            return model
        policy = {"mp_policy": mp_policy} if mp_policy else {}
        dedicate(model, self.mesh, self.schedule, **(options or {}), **policy)
        if units is not None:
            offload = {"offload_policy": offload_policy} if offload_policy else {}
            for module in [*units(model), model]:
                fully_shard(module, mesh=self.mesh, **policy, **offload)
        settings = {"lr": LR, "weight_decay": WEIGHT_DECAY, "ns_dtype": torch.float32, **(muon or {})}
        groups = {"adamw_groups": adamw_groups(model), "muon_groups": muon_groups(model)}
        self.opt = dmuon.Muon(model, **groups, **settings)
        return model

    def another(self) -> Session:
        """A session of a second model on the same mesh."""
        return Session(self.mesh, self.schedule, self.size if self.reference else 0)

    def each_rank(self) -> range | list[int]:
        return range(self.size) if self.reference else [self.rank]

    def backward(self, loss: LossOf, scale: float = 1.0, **kwargs: Any) -> None:
        """Backward of the mean over ranks of `loss(model, rank)`; a rank without a loss returns None."""
        for rank in self.each_rank():
            value = loss(self.model, rank)
            if value is not None:
                (value * scale / (self.size if self.reference else 1)).backward(**kwargs)

    def train(self, *steps: int) -> None:
        for step in steps:
            self.backward(language_loss(step, self.size))
            self.step()

    def step(self) -> None:
        self.opt.step()
        self.opt.zero_grad()

    def clip(self, max_norm: float) -> None:
        if self.reference:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        else:
            norm = dmuon.clip_grad_norm_(self.model, max_norm)
        self.notes.append(float(norm))

    def weights(self) -> dict[str, torch.Tensor]:
        if self.reference:
            return weights_of_plain(self.model)
        return weights_of(self.model)

    def full(self) -> Any:
        """For editing weights in place: full_params(writeback=True), or nothing on one process."""
        return nullcontext() if self.reference else dmuon.full_params(self.model, writeback=True)


def language_loss(step: int, size: int) -> LossOf:
    tokens = batch(step)
    return lambda model, rank: loss_of(model, part(tokens, rank, size))


Scenario = Callable[..., None]  # of a Session, and what else the test passes on


def run_scenario(
    mesh: Any, scenario: Scenario, schedule: dict[str, Any], reference_size: int = 0, **kwargs: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[Any]]:
    """(initial weights, final weights, notes)."""
    session = Session(mesh, schedule, reference_size)
    scenario(session, **kwargs)
    return session.initial, session.weights(), copy.deepcopy(session.notes)


def assert_equal_to_reference(
    initial: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    got: dict[str, torch.Tensor],
    bound: float = 1e-3,
    among: str = "",
) -> None:
    """|W - W_ref| <= bound |W_ref - W_0| for every parameter, so one that stays must stay exactly.

    `among`: a regular expression; only parameters that match count.
    """
    assert expected.keys() == got.keys()
    names = [name for name in expected if re.search(among, name)]
    assert names
    for name in names:
        moved = float((expected[name] - initial[name]).norm())
        error = float((got[name].cpu().float() - expected[name]).norm())
        assert error <= bound * moved, f"{name}: |W - W_ref| = {error:.2e}, |W_ref - W_0| = {moved:.2e}"


def check(
    pool: Any,
    scenario: Scenario,
    mesh: tuple[int, ...] = (2, 2),
    *,
    schedule: dict[str, Any],
    bound: float = 1e-3,
    among: str = "",
    **kwargs: Any,
) -> list[Any]:
    """Asserts that every rank ends with the reference's weights; returns the ranks' notes, then the reference's."""
    size = torch.Size(mesh).numel()
    initial, expected, reference_notes = run_scenario(None, scenario, schedule, size, **kwargs)
    notes = []
    for _, got, note in pool.run(run_scenario, mesh, scenario=scenario, schedule=schedule, **kwargs):
        assert_equal_to_reference(initial, expected, got, bound, among)
        notes.append(note)
    return [*notes, reference_notes]
