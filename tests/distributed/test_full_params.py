"""Weights made whole: full_params for reading and writing, iter_full_params, and verify."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.nn as nn
from interrupts import interrupt
from models import make_gpt
from refusals import rank_of, ready
from scenario import Session, blocks_of, check, language_loss
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from training import AHEAD, FAR_AHEAD, KEPT, KEPT_NO_COPY, NO_COPY, ON_DEMAND, REPLICATED, weights_of

import dmuon

Units = Callable[[nn.Module], Sequence[nn.Module]]
PLAIN = None  # no fully_shard


def edited_weights(s: Session, units: Units | None) -> None:
    """full_params(writeback=True) in the middle of training."""
    s.start(make_gpt(depth=2), units)
    s.train(0)
    with s.full(), torch.no_grad():
        s.model.blocks[0].up.weight.mul_(0.5)
        s.model.head.weight.add_(0.01)
        s.model.blocks[1].norm.bias.fill_(0.25)
    s.train(1)


@pytest.mark.parametrize(
    ("mesh", "schedule", "units"),
    [((2, 2), KEPT, blocks_of), ((4,), ON_DEMAND, blocks_of), ((2, 2), REPLICATED, PLAIN), ((1,), KEPT, PLAIN)],
)
def test_weights_edited_inside_full_params_are_kept(ranks, mesh, schedule, units):
    check(ranks, edited_weights, mesh, schedule=schedule, units=units)


def masters_of(opt: dmuon.Muon) -> list[torch.Tensor]:
    states = opt.state_dict()["state"].values()
    return [state["master"].full_tensor() for state in states if "master" in state]


def read_and_written(mesh: Any, how: str) -> tuple[int, bool]:
    """Whole weights in bf16, as they are or after a load of the optimizer, leave what fp32 masters have more."""
    s = Session(mesh, REPLICATED if how == "load" else AHEAD)
    model = s.start(make_gpt(depth=1).bfloat16(), None if how == "load" else blocks_of)
    s.train(0)
    before = masters_of(s.opt)
    if how == "load":
        state = model.state_dict()
        model.load_state_dict({n: v.full_tensor() if isinstance(v, DTensor) else v.clone() for n, v in state.items()})
    else:
        with dmuon.full_params(model, writeback=True):
            pass
    after = masters_of(s.opt)
    more = sum(int((master != master.bfloat16()).sum()) for master in before)
    return more, all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("how", ["full_params", "load"])
def test_weights_that_are_written_unchanged_leave_masters(ranks, how):
    for more, same in ranks.run(read_and_written, (2, 2), how=how):
        assert more > 100 and same


def loaded_weights(s: Session) -> None:
    s.start(make_gpt(depth=2))
    s.train(0)
    with s.full():
        s.model.load_state_dict(make_gpt(seed=9, depth=2).state_dict())
    s.train(1)


def test_a_state_dict_loads_inside_full_params(ranks):
    check(ranks, loaded_weights, schedule=NO_COPY)


def untouched_by_reading(s: Session, units: Units | None) -> None:
    """full_params without write-back, left by an error or interrupt too, changes nothing, gradients included."""
    s.start(make_gpt(depth=2), units)
    s.train(0)
    s.backward(language_loss(1, s.size), scale=0.5)
    if not s.reference:
        names = [n for n, _ in s.model.named_parameters()]
        kinds = [type(p) for p in s.model.parameters()]
        for writeback, stop in ((False, None), (False, KeyError), (True, KeyError), (True, KeyboardInterrupt)):
            with suppress(stop or ()), dmuon.full_params(s.model, writeback=writeback), torch.no_grad():
                s.notes.append(all(p.shape.numel() for p in s.model.parameters()))
                for p in s.model.parameters():
                    p.zero_()
                if stop is not None:
                    raise stop
        with dmuon.full_params(s.model):
            state = s.model.state_dict()
            s.notes.append(list(state) == names and all(type(v) is torch.Tensor for v in state.values()))
        s.notes.append([type(p) for p in s.model.parameters()] == kinds)
    s.backward(language_loss(2, s.size), scale=0.5)
    s.step()


@pytest.mark.parametrize(
    ("mesh", "schedule", "units"),
    [((2, 2), KEPT_NO_COPY, blocks_of), ((4,), REPLICATED, PLAIN), ((1,), KEPT, blocks_of), ((1,), KEPT, PLAIN)],
)
def test_full_params_without_write_back_leaves_everything(ranks, mesh, schedule, units):
    *notes, _ = check(ranks, untouched_by_reading, mesh, schedule=schedule, units=units)
    assert notes == [[True] * 6] * len(notes)


def left_by_one_rank(mesh: Any) -> str:
    """Rank 1 alone is interrupted where all are about to write back."""
    model, opt = ready(mesh)
    with pytest.raises(BaseException) as left, dmuon.full_params(model, writeback=True), torch.no_grad():
        model.head.weight.zero_()
        if rank_of(mesh) == 1:
            raise KeyboardInterrupt
    opt.step()
    assert weights_of(model)["head.weight"].all()
    return f"{left.type.__name__}: {left.value}"


def test_all_ranks_hear_of_an_interrupt(ranks):
    heard = "ValueError: KeyboardInterrupt:  (on rank 1)"
    assert ranks.run(left_by_one_rank, (2, 2)) == [heard, "KeyboardInterrupt: ", heard, heard]


def interrupted(mesh: Any, on: str, places: int, every: int) -> list[str]:
    """At places on the way into `full_params`, or out of it, or in `iter_full_params`. On exit ranks differ."""
    s = Session(mesh, ON_DEMAND)
    model = s.start(make_gpt(depth=2))
    s.train(0)

    def hooks() -> list[int]:
        return [len(module._load_state_dict_post_hooks) for module in model.modules()]

    kinds, before, known, found, hits = [type(p) for p in model.parameters()], s.weights(), hooks(), [], []
    for number in range(0, places, every):
        whole = dmuon.full_params(model)
        if on == "iteration":
            hits.append(interrupt(lambda: list(dmuon.iter_full_params(model)), number))
        elif on == "entry":
            hits.append(interrupt(whole.__enter__, number))
        if on == "exit":
            whole.__enter__()
        if on == "exit" or (on == "entry" and not hits[-1]):
            place = (number + 20 * rank_of(mesh)) % places if on == "exit" else places
            hits.append(interrupt(lambda: whole.__exit__(None, None, None), place))  # noqa: B023
        if [type(p) for p in model.parameters()] != kinds or hooks() != known:
            found.append(f"parameters or hooks after {number}")
        s.backward(language_loss(1, s.size))
        s.opt.zero_grad()
        model.load_state_dict(model.state_dict())
        after = s.weights()
        found += [f"{name} after {number}" for name, value in before.items() if not torch.equal(value, after[name])]
    s.train(1)
    return [*found, *([] if 20 / every < sum(hits) < len(hits) else [f"{sum(hits)} of {len(hits)} interrupts"])]


# More places than there are.
@pytest.mark.parametrize(
    ("mesh", "on", "places", "every"),
    [((2, 2), "exit", 80, 3), ((1,), "exit", 80, 1), ((1,), "entry", 500, 4), ((1,), "iteration", 300, 3)],
)
def test_an_interrupt_leaves_the_model_as_it_was(ranks, mesh, on, places, every):
    found = ranks.run(interrupted, mesh, on=on, places=places, every=every)
    assert found == [[]] * torch.Size(mesh).numel()


def verified(mesh: Any, steps: int, schedule: dict[str, Any], lr: float | None) -> tuple[float, float, float, bool]:
    """What verify finds after some steps, and whether it left the weights as they were."""
    s = Session(mesh, schedule)
    model = s.start(make_gpt(depth=2))
    s.train(*range(steps))
    if lr is not None:
        s.opt.param_groups[0]["lr"] = lr
    before = s.weights()
    found = dmuon.verify(model, s.opt)
    after = s.weights()
    same = all(torch.equal(before[n], after[n]) for n in before)
    return found.publication, found.routing, found.update, same


@pytest.mark.parametrize(("mesh", "schedule"), [((2, 2), AHEAD), ((4,), KEPT), ((2,), FAR_AHEAD)])
@pytest.mark.parametrize(("steps", "lr"), [(0, None), (2, None), (2, 1e-6)])  # the last: weights' rounding
def test_verify_finds_nothing_but_rounding(ranks, mesh, schedule, steps, lr):
    for publication, routing, update, same in ranks.run(verified, mesh, steps=steps, schedule=schedule, lr=lr):
        assert publication == 0
        assert routing < 1e-6
        assert update < 1e-3
        assert same


def verified_in_no_sync(mesh: Any) -> str:
    model, opt = ready(mesh)
    with dmuon.no_sync(model) if rank_of(mesh) != 1 else nullcontext():
        try:
            return f"{bool(dmuon.verify(model, opt))}"
        except ValueError as error:
            return str(error)


def test_verify_inside_no_sync_is_refused_on_all_ranks_where_gradients_stay_in_nodes(ranks):
    assert ranks.run(verified_in_no_sync, (1, 2)) == ["True"] * 2
    for message in ranks.run(verified_in_no_sync, (2, 2)):
        assert "verify: expected a call outside of no_sync, got one inside" in message


def verify_leaves_training_alone(s: Session) -> None:
    s.start(make_gpt(depth=2))
    for step in range(3):
        if not s.reference:
            dmuon.verify(s.model, s.opt)
        s.train(step)


def test_verify_leaves_training_alone(ranks):
    check(ranks, verify_leaves_training_alone, schedule=ON_DEMAND)


def iterated(s: Session, dtype: torch.dtype) -> None:
    """All weights, one unit after another, between a forward and its backward; then some of them."""
    s.start(make_gpt(depth=2), mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
    s.train(0)
    s.backward(language_loss(1, s.size), scale=0.5)

    def loss(model: torch.nn.Module, rank: int) -> torch.Tensor:
        value = language_loss(2, s.size)(model, rank)
        if not s.reference:
            s.unshards = s.opt.stats()["unshards"]
            s.notes += differences(s, dtype)
            next(dmuon.iter_full_params(model))
        return value

    s.backward(loss, scale=0.5)
    if not s.reference and s.schedule == KEPT and s.opt.stats()["unshards"] > s.unshards:
        s.notes.append("what the backward needed was freed")
    s.step()


def differences(s: Session, dtype: torch.dtype) -> list[str]:
    masters = s.weights()
    found = {name: weight.clone() for name, weight in dmuon.iter_full_params(s.model)}
    of_compute = {name for name, weight in found.items() if weight.dtype == dtype}
    if dtype != torch.float32 and of_compute != {
        row.name for row in dmuon.routing_table(s.model) if row.owner is not None
    }:
        return ["dtypes"]
    if found.keys() != masters.keys():
        return ["names"]
    return [name for name, weight in found.items() if not torch.equal(weight.cpu(), masters[name].to(weight.dtype))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("mesh", "schedule"), [((2, 2), KEPT), ((2, 2), NO_COPY), ((4,), AHEAD), ((1,), ON_DEMAND)])
def test_weights_come_one_unit_after_another_as_compute_would_get_them(ranks, mesh, schedule, dtype):
    bound = {torch.float32: 1e-3, torch.bfloat16: 0.5}[dtype]  # AdamW multiplies rounding
    assert not any(check(ranks, iterated, mesh, schedule=schedule, dtype=dtype, bound=bound))


def sent_for_all(mesh: Any) -> list[dict[str, float]]:
    """What iter_full_params and an evaluation send."""
    s = Session(mesh, ON_DEMAND)
    s.start(make_gpt(depth=2))
    s.train(0, 1)
    sent = [s.opt.stats()]
    for _ in dmuon.iter_full_params(s.model):
        pass
    sent.append(s.opt.stats())
    with torch.no_grad():
        language_loss(0, s.size)(s.model, s.rank)
    sent.append(s.opt.stats())
    keys = ("unshards", "messages_intra", "bytes_sent_intra")
    return [{key: after[key] - before[key] for key in keys} for before, after in itertools.pairwise(sent)]


def test_all_weights_travel_once(ranks):
    for iterated, evaluated in ranks.run(sent_for_all, (4,)):
        assert iterated == evaluated and iterated["bytes_sent_intra"] > 0


def changed_between_turns(mesh: Any, how: str) -> dict[str, str]:
    s = Session(mesh, KEPT)
    s.start(make_gpt(depth=2))
    s.train(0)
    found = {}
    for num_turns in (0, 1, 3, len(s.weights()) - 1):
        turns = dmuon.iter_full_params(s.model)
        for _ in range(num_turns):
            next(turns)
        with CHANGES[how](s):
            try:
                found[str(num_turns)] = f"no error, {next(turns)[0]}"
            except ValueError as error:
                found[str(num_turns)] = str(error)
        del turns
    s.train(1)
    return found


@contextmanager
def offloaded(s: Session) -> Iterator[None]:
    dmuon.offload(s.model)
    yield
    dmuon.load(s.model)


CHANGES: dict[str, Callable[[Session], Any]] = {
    "step": lambda s: nullcontext(s.train(5)),
    "load_state_dict": lambda s: nullcontext(s.model.load_state_dict(s.model.state_dict())),
    "full_params": lambda s: dmuon.full_params(s.model),
    "applied": lambda s: dmuon.Ema(s.model, 0.5).applied(),
    "offload": offloaded,
}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("step", "changed between two turns"),
        ("load_state_dict", "changed between two turns"),
        ("full_params", "dmuon.full_params: a turn of iter_full_params() inside it"),
        ("applied", "changed between two turns"),
        ("offload", "dmuon.offload: a turn of iter_full_params() after it"),
    ],
)
def test_a_turn_after_a_change_is_refused_by_name(ranks, how, words):
    for found in ranks.run(changed_between_turns, (2,), how=how):
        assert [n for n, message in found.items() if words not in message] == [], found


def reads_between_turns(mesh: Any) -> list[str]:
    """A forward, a state dict or a second iterator between two turns leaves the next weights right."""
    s = Session(mesh, ON_DEMAND)
    s.start(make_gpt(depth=2))
    s.train(0)
    masters = s.weights()
    found = []
    for step, (name, weight) in enumerate(dmuon.iter_full_params(s.model)):
        if not torch.equal(weight.cpu(), masters[name]):
            found.append(name)
        if step % 3 == 0:
            with torch.no_grad():
                language_loss(0, s.size)(s.model, s.rank)
        elif step % 3 == 1:
            s.model.state_dict()
        else:
            next(dmuon.iter_full_params(s.model))
    return found


def test_reads_between_turns_leave_the_next_weights_right(ranks):
    assert ranks.run(reads_between_turns, (2,)) == [[], []]
