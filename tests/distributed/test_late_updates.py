"""A step that returns before its update has ended changes no bit, whoever reads or writes weights in between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Gpt, batch, loss_of, make_gpt, part
from profiled import record, spans_of
from scenario import Session, check, language_loss
from training import AHEAD, NO_COPY, dedicate, place_of, shard

import dmuon

IN_STEP = {**AHEAD, "late_updates": False}


class Run:
    """A model in training. Its matrices take longer to update than a reader takes to come."""

    def __init__(self, mesh: Any, schedule: dict[str, Any]) -> None:
        torch.manual_seed(1)
        self.model: Gpt = make_gpt(width=96, hidden=160)
        dedicate(self.model, mesh, schedule)
        shard(self.model, mesh)
        self.optimizer = dmuon.Muon(self.model, ns_dtype=torch.float32)
        self.mean = dmuon.Ema(self.model, 0.5)
        self.place, self.count = place_of(mesh), 0
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def backward(self) -> None:
        loss_of(self.model, part(batch(self.count), *self.place)).backward()
        self.count += 1

    def owned(self) -> list[torch.Tensor]:
        states = [self.optimizer.state[leaf] for leaf in self.optimizer._runtime.placeholders]
        return [tensor.clone() for state in states for tensor in state.values() if type(tensor) is torch.Tensor]


def popped(state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    name, tensor = state.popitem()
    state[name] = tensor
    return [tensor]


WAYS: list[Callable[[dict[str, torch.Tensor]], list[Any]]] = [
    lambda state: [state[name] for name in state],
    lambda state: [state.get(name) for name in list(state)],
    lambda state: [tensor for _, tensor in state.items()],
    lambda state: list(dict(state).values()),
    lambda state: list({**state}.values()),
    lambda state: list(state.copy().values()),
    lambda state: list((state | {}).values()),
    lambda state: list(({} | state).values()),
    lambda state: list(copy.copy(state).values()),
    lambda state: [state.setdefault(name) for name in state],
    lambda state: [repr(state)],
    popped,
    lambda state: [state.pop(next(iter(state)))],
]


def owned_elsewhere(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and type(value) is not torch.Tensor


def states_by(way: int) -> Callable[[Run], Any]:
    """Reads a state by one of WAYS, before all others."""

    def read(run: Run) -> Any:
        states = [run.optimizer.state[leaf] for leaf in reversed(run.optimizer._runtime.placeholders)]
        found = [value for state in states if state for value in WAYS[way](state)]
        here = [value for value in found if not owned_elsewhere(value)]
        return [value.clone() if isinstance(value, torch.Tensor) else value for value in here]

    return read


def state_dicts(run: Run) -> Any:
    return copy.deepcopy([run.model.state_dict(), run.optimizer.state_dict()])


def full_params(run: Run) -> Any:
    with dmuon.full_params(run.model):
        return [p.detach().clone() for p in run.model.parameters()]


def written_back(run: Run) -> Any:
    with dmuon.full_params(run.model, writeback=True), torch.no_grad():
        run.model.blocks[0].up.weight.mul_(2)
    return full_params(run)


def loaded(run: Run) -> Any:
    run.model.load_state_dict({name: torch.zeros_like(value) for name, value in run.model.state_dict().items()})
    return full_params(run)


def averaged(run: Run) -> Any:
    run.mean.update()
    with run.mean.applied():
        return full_params(run)


def verified(run: Run) -> Any:
    run.optimizer.zero_grad()
    dmuon.verify(run.model, run.optimizer)
    return full_params(run)


def stepped_again(run: Run) -> Any:
    run.optimizer.step()
    return full_params(run)


def scaled(run: Run) -> Any:
    loss_of(run.model, part(batch(run.count), *run.place)).mul(run.scaler.get_scale()).backward()
    run.scaler.scale(torch.ones(()))  # which begins a step of the scaler
    run.scaler.unscale_(run.optimizer)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    return full_params(run)


READERS: dict[str, Callable[[Run], Any]] = {
    "opt.state": Run.owned,
    **{f"opt.state, way {way}": states_by(way) for way in range(len(WAYS))},
    "state dicts": state_dicts,
    "full_params": full_params,
    "a write-back": written_back,
    "a load": loaded,
    "Ema": averaged,
    "norms of weights": lambda run: dmuon.weight_norms(run.model),
    "verify": verified,
    "a second step": stepped_again,
    "a scaler": scaled,
    "a cast": lambda run: run.model.to(torch.float32).float() and full_params(run),
    "memory on the host": lambda run: [dmuon.offload(run.model), dmuon.load(run.model), full_params(run)],
    "zeroed gradients": lambda run: run.optimizer.zero_grad(set_to_none=False) or stepped_again(run),
    "clipping again": lambda run: [dmuon.clip_grad_norm_(run.model, 1e-3), stepped_again(run)],
}


def read_after_steps(mesh: Any, schedule: dict[str, Any], reader: str) -> Any:
    run = Run(mesh, schedule)
    found = []
    for step in range(3):
        run.backward()
        if step == 1:
            dmuon.clip_grad_norm_(run.model, 0.1)
        run.optimizer.step()
        found.append(READERS[reader](run))
        run.optimizer.zero_grad()
    return [found, full_params(run)]


def flat(values: Any) -> list[torch.Tensor]:
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in flat(value)]
    if hasattr(values, "full_tensor"):
        values = values.to_local()
    return [values] if isinstance(values, torch.Tensor) else []


@pytest.mark.parametrize("mesh", [(2, 2), (1, 4), (4, 1)])
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_waits_for_the_update(ranks, mesh, reader):
    late, in_step = (ranks.run(read_after_steps, mesh, schedule=one, reader=reader) for one in (AHEAD, IN_STEP))
    for one, other in zip(late, in_step, strict=True):
        pairs = list(zip(flat(one), flat(other), strict=True))
        assert pairs
        assert all(torch.equal(first, second) for first, second in pairs)
        assert str(one) == str(other)


def without_a_mean(mesh: Any, schedule: dict[str, Any]) -> Any:
    """A mean that is collected right after a step: bytes before and after that and after a wait, its own, weights."""
    run = Run(mesh, schedule)
    own = sum(mean.nbytes for mean, _ in run.mean._owned())
    run.backward()
    run.optimizer.step()
    counts = [run.optimizer.stats()["current_bytes"]]
    del run.mean
    counts.append(run.optimizer.stats()["current_bytes"])
    run.owned()
    counts.append(run.optimizer.stats()["current_bytes"])
    run.optimizer.zero_grad()
    run.backward()
    run.optimizer.step()
    return counts, own, full_params(run)


def test_a_mean_that_is_collected_beside_an_update_stays_until_that_ends(ranks):
    late, in_step = (ranks.run(without_a_mean, (2, 2), schedule=one) for one in (AHEAD, IN_STEP))
    for ((with_it, beside, after), own, weights), (counts, _, expected) in zip(late, in_step, strict=True):
        assert own > 0
        assert with_it == beside == after + own
        assert counts[0] - own == counts[1] == counts[2]
        assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))


def changed_after_the_call(s: Session) -> None:
    s.start(make_gpt(), muon={} if s.reference else {"lr": torch.tensor(2e-2)})
    for step in range(3):
        s.backward(language_loss(step, s.size))
        s.opt.step()
        if not s.reference:
            (muon, *_) = s.opt.param_groups
            kept = {name: muon[name] for name in ("weight_decay", "momentum", "nesterov")}
            muon["lr"].fill_(5)
            muon.update(weight_decay=0.9, momentum=0.0, nesterov=False)
        s.opt.zero_grad()
        if not s.reference:
            muon["lr"].fill_(2e-2)
            muon.update(kept)


@pytest.mark.parametrize(("mesh", "schedule"), [((2, 2), AHEAD), ((1, 3), {**NO_COPY, "late_updates": True})])
def test_hyperparameters_are_those_of_the_call(ranks, mesh, schedule):
    check(ranks, changed_after_the_call, mesh, schedule=schedule)


@pytest.mark.parametrize(("schedule", "waits_in_step"), [(AHEAD, False), (IN_STEP, True)])
def test_step_waits_for_updates_unless_they_are_late(ranks, schedule, waits_in_step):
    result = ranks.run(record, (2, 2), schedule=schedule, steps=2)[0]
    for rank in range(4):
        steps = [(begin, end) for of, name, begin, end in result["phases"] if (of, name) == (rank, "step")]
        waits = [span for span in spans_of(result, rank) if span[2] == "finish update"]
        inside = [span for span in waits if any(begin <= span[5] and span[6] <= end for begin, end in steps)]
        assert waits
        assert len(inside) == (len(waits) if waits_in_step else 0)
