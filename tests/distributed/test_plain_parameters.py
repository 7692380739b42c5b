"""Parameters of AdamW that no fully_shard manages, and that are frozen, trained again or added between steps."""

from __future__ import annotations

import copy
import gc
import time
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.nn as nn
from models import make_gpt
from pool import RankFailed
from refusals import REFUSED, Refusals, expect_refusal, rank_of
from scenario import Session, check, language_loss
from training import AHEAD, NO_COPY, REPLICATED

import dmuon

refused = Refusals()
MESHES = [((2, 2), REPLICATED), ((1, 4), AHEAD), ((3,), NO_COPY)]
SOME = ("norm.weight", "head.weight")  # the head is a message of its own: see pool.py


def froze(s: Session, when: str) -> None:
    """Parameters are frozen in the second step, maybe while a rank has gradients of its own, and not in the last."""
    s.start(make_gpt(depth=2), units=None)
    some = [s.model.get_parameter(name) for name in SOME]
    for step in range(4):
        if step == 1 and when == "before":
            _freeze(some, True)
        if when == "between" and not s.reference:
            with dmuon.no_sync(s.model):
                s.backward(language_loss(10 * step, s.size))
        elif when == "between":
            s.backward(language_loss(10 * step, s.size))
        if step == 1 and when == "between":
            _freeze(some, True)
        s.backward(language_loss(10 * step + 1, s.size))
        if step == 1 and when == "after":
            _freeze(some, True)
        if step == 3:
            s.notes.append(float(nn.utils.clip_grad_norm_(s.model.parameters(), 0.1)))
        s.step()
        if step == 2:
            _freeze(some, False)


def _freeze(parameters: list[nn.Parameter], freeze: bool) -> None:
    for parameter in parameters:
        parameter.requires_grad_(not freeze)


@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.parametrize(("mesh", "schedule"), MESHES)
def test_parameters_may_be_frozen_and_trained_again(ranks, mesh, schedule, when):
    *notes, expected = check(ranks, froze, mesh, schedule=schedule, when=when)
    for norms in notes:
        assert norms == pytest.approx(expected, rel=1e-4)


def froze_apart(s: Session, when: str) -> None:
    """Rank 1 alone freezes the parameters for a step, or alone has no gradients of them when all ranks freeze them."""
    s.start(make_gpt(depth=2), units=None)
    some = [s.model.get_parameter(name) for name in SOME]
    s.train(0)
    value, apart = language_loss(1, s.size), language_loss(11, s.size)
    if when == "between":
        for rank in s.each_rank():
            with nullcontext() if s.reference else dmuon.no_sync(s.model):
                _freeze(some, rank == 1)
                (apart(s.model, rank) / (s.size if s.reference else 1)).backward()
        _freeze(some, True)
        s.backward(value)
    else:
        if when == "unused":  # no rank has gradients of them
            for rank in s.each_rank():
                _freeze(some, rank == 1)
                (s.model.embedding.weight.square().sum() / (s.size if s.reference else 1)).backward()
            s.step()
        for rank in s.each_rank():
            _freeze(some, rank == 1)
            (value(s.model, rank) / (s.size if s.reference else 1)).backward()
    s.step()
    _freeze(some, False)
    s.train(2)


@pytest.mark.parametrize("when", ["alone", "between", "unused"])
@pytest.mark.parametrize(("mesh", "schedule"), MESHES)
def test_gradients_of_a_rank_that_freezes_alone_count_as_zeros(ranks, mesh, schedule, when):
    check(ranks, froze_apart, mesh, schedule=schedule, when=when)


def with_gaps(s: Session) -> None:
    """Norms with gaps in memory between their elements, and a head whose columns come first."""
    model = make_gpt(depth=2)
    for block in model.blocks:
        block.norm.weight = nn.Parameter(torch.linspace(1, 2, 2 * len(block.norm.weight))[::2])
    model.head.weight = nn.Parameter(model.head.weight.detach().t().contiguous().t())
    s.start(model, units=None)
    s.train(0, 1, 2)


@pytest.mark.parametrize(("mesh", "schedule"), MESHES)
def test_parameters_train_however_they_lie_in_memory(ranks, mesh, schedule):
    check(ranks, with_gaps, mesh, schedule=schedule)


def test_moments_are_loaded_into_the_order_of_the_parameters_memory():
    ends = []
    for resumes in (False, True):
        model, saved = make_gpt(depth=1), None
        model.head.weight = nn.Parameter(model.head.weight.detach().t().contiguous().t())
        s = Session(None, AHEAD)
        s.start(model, units=None)
        s.train(0, 1)
        if resumes:
            saved = copy.deepcopy((s.model.state_dict(), s.opt.state_dict()))
            s = Session(None, AHEAD)
            s.start(make_gpt(depth=1), units=None)
            s.model.load_state_dict(saved[0])
            s.opt.load_state_dict(saved[1])
            assert s.opt.state[s.model.head.weight]["exp_avg"].stride() == s.model.head.weight.stride()
        s.train(2)
        ends.append(s.weights()["head.weight"])
    torch.testing.assert_close(*ends)


class Scaled(nn.Module):
    """A layer whose output a parameter scales, of whatever dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)
        self.scale = nn.Parameter(torch.linspace(1, 2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) * self.scale.float()


@pytest.mark.parametrize("fused", [True, False])
def test_moments_follow_parameters_that_are_cast_between_steps(fused):
    torch.manual_seed(0)
    model = Scaled()
    dmuon.dedicate_params(model)
    opt = dmuon.Muon(model, adamw_lr=0.1, adamw_groups=[{"params": "scale", "fused": fused}])
    alone = nn.Parameter(model.scale.detach().clone())
    adamw = torch.optim.AdamW([alone], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
    for step, dtype in enumerate((torch.bfloat16, torch.bfloat16, torch.float32)):
        for parameter, state in ((model.scale, opt.state[model.scale]), (alone, adamw.state[alone])):
            parameter.data = parameter.to(dtype)
            for name in ("exp_avg", "exp_avg_sq") if state is adamw.state[alone] else ():
                state.update({name: state[name].to(dtype)} if name in state else {})
        opt.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        alone.grad = model.scale.grad.clone()
        opt.step()
        adamw.step()
        assert opt.state[model.scale]["exp_avg"].dtype == dtype and opt.state[model.scale]["step"] == step + 1
        assert torch.equal(model.scale, alone)


def test_a_frozen_parameter_that_was_added_with_a_gradient_is_updated_as_in_torch():
    model = Scaled()
    dmuon.dedicate_params(model)
    opt = dmuon.Muon(model)
    parameters = [nn.Parameter(torch.ones(3), requires_grad=False) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    opt.add_param_group({"params": parameters[:1]})
    opt.step()
    torch.optim.AdamW(parameters[1:], lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True).step()
    assert torch.equal(*parameters) and not torch.equal(parameters[0], torch.ones(3))


AGREE = "a backward, or a step: ranks differ. Expected: the same parameters of AdamW that train. Rank 0 has: "


@refused(AGREE + "'norm.bias' of shape (24,); rank 1 has: 'norm.weight' of shape", others="head.weight")
def trained_on_one_rank(mesh: Any, others: str | None) -> None:
    """All ranks freeze two parameters. Later rank 1 trains one again, and others another."""
    s = Session(mesh, REPLICATED)
    s.start(make_gpt(depth=1), units=None)
    some = [s.model.get_parameter(name) for name in SOME]
    _freeze(some, True)
    s.train(0)
    chosen = "norm.weight" if rank_of(mesh) == 1 else others
    if chosen is not None:
        s.model.get_parameter(chosen).requires_grad_(True)
    s.train(1)


@refused(AGREE + "'extra.0' of shape (3,), whose values have the checksum ", "rank 2 has: 'extra.0'", what="values")
@refused(AGREE + "'extra.0' of shape (3,), ", "rank 2 has: 'extra.1' of shape (3,), ", what="order")
@refused(AGREE + "'extra.0' of shape (3,), ", "rank 2 has: 'extra.0' of shape (4,), ", what="shape")
def added_differently_on_one_rank(mesh: Any, what: str) -> None:
    s = Session(mesh, REPLICATED)
    s.start(make_gpt(depth=1), units=None)
    differs = rank_of(mesh) == 2
    size, value = 3 + (differs and what == "shape"), 1.0 + (differs and what == "values")
    extra = [nn.Parameter(torch.full((size,), value)) for _ in range(2)]
    s.model.extra = nn.ParameterList(extra)
    if not (differs and what == "number"):
        s.opt.add_param_group({"params": extra[::-1] if differs and what == "order" else extra})
    s.train(0)


@refused(AGREE + "'frozen' of shape (3,), whose values have the checksum ", "; rank 1 has: 'frozen'")
def added_frozen(mesh: Any) -> None:
    """A parameter that is added frozen is compared when it begins to train."""
    s = Session(mesh, REPLICATED)
    s.start(make_gpt(depth=1), units=None)
    s.model.frozen = nn.Parameter(torch.full((3,), float(rank_of(mesh))), requires_grad=False)
    s.model.trains = nn.Parameter(torch.ones(3))
    s.opt.add_param_group({"params": [s.model.frozen, s.model.trains]})
    s.train(0)
    s.model.frozen.requires_grad_(True)
    s.train(1)


@refused(AGREE + "'extra' of shape (3,), whose values have the checksum ", "; rank 1 has: 'extra'")
def came_back_with_other_values(mesh: Any) -> None:
    s = Session(mesh, REPLICATED)
    s.start(make_gpt(depth=1), units=None)
    extra = nn.Parameter(torch.ones(3))
    s.model.extra = extra
    s.opt.add_param_group({"params": [extra]})
    s.train(0)
    group, s.model.extra = s.opt.param_groups.pop(), None
    s.train(1)
    s.model.extra = extra
    extra.data.fill_(float(rank_of(mesh)))
    s.opt.param_groups.append(group)
    s.train(2)


@refused("expected parameters that opt.add_param_group has added and no other group has, got 'extra'")
def put_into_a_group_by_hand(mesh: Any) -> None:
    """Where parameters of a group lay in memory that have been freed since."""
    s = Session(mesh, REPLICATED)
    s.start(make_gpt(depth=1), units=None)
    s.opt.add_param_group({"params": [nn.Parameter(torch.ones(3)) for _ in range(50)]})
    s.train(0)
    former = s.opt.param_groups.pop()
    places = {id(parameter) for parameter in former["params"]}
    for parameter in former.pop("params"):
        s.opt.state.pop(parameter, None)
    del parameter
    s.train(1, 2)
    gc.collect()
    extra = []
    while not extra or id(extra[-1]) not in places:
        extra.append(nn.Parameter(torch.ones(3)))
        assert len(extra) < 100_000
    s.model.extra = extra[-1]
    s.opt.param_groups.append({**former, "params": [s.model.extra]})
    s.train(3)


@refused("Muon: model: 'extra': expected a real dtype, got torch.complex64", later=False)
@refused("add_param_group: params: 'extra': expected a real dtype, got torch.complex64", later=True)
def complex_parameter(mesh: Any, later: bool) -> None:
    model = make_gpt(depth=1)
    extra = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    if not later:
        model.extra = extra
    s = Session(mesh, REPLICATED)
    s.start(model, units=None)
    model.extra = extra
    s.opt.add_param_group({"params": [extra]})


def sparse_gradient(mesh: Any) -> None:
    model = make_gpt(depth=1)
    model.embedding.sparse = True
    s = Session(mesh, REPLICATED)
    s.start(model, units=None)
    s.train(0)


@pytest.mark.parametrize(REFUSED, refused)
def test_ranks_that_differ_are_told_so(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)


@pytest.mark.cpu("the emulated device has no sparse tensors")
def test_a_sparse_gradient_is_refused(ranks):
    words = "the gradient of 'embedding.weight' is sparse. Expected: nn.Embedding(sparse=False)"
    expect_refusal(ranks, sparse_gradient, {}, (words,))


def differed(s: Session, in_step: bool) -> None:
    """All ranks freeze two parameters for a step, and then train different ones again, which raises."""
    s.start(make_gpt(depth=1), units=None)
    some = [s.model.get_parameter(name) for name in SOME]
    s.train(0)
    _freeze(some, True)
    s.train(1)
    if not s.reference:
        some[s.rank == 1].requires_grad_(True)
        with dmuon.no_sync(s.model) if in_step else nullcontext(), suppress(ValueError):
            s.backward(language_loss(2, s.size))
        for _ in range(2):  # the first error does not hide the difference
            with pytest.raises(ValueError, match="ranks differ"):
                s.clip(1.0)
        s.opt.zero_grad()
    _freeze(some, False)
    s.train(3)


def differed_in_a_micro_step(s: Session) -> None:
    """The second backward raises. The step averages its gradients after ranks agree again."""
    s.start(make_gpt(depth=1), units=None)
    some = [s.model.get_parameter(name) for name in SOME]
    s.train(0)
    _freeze(some, True)
    s.backward(language_loss(1, s.size))
    some[s.rank == 1].requires_grad_(not s.reference)
    with nullcontext() if s.reference else pytest.raises(ValueError, match="ranks differ"):
        s.backward(language_loss(2, s.size))
    _freeze(some, True)
    for parameter in some:
        parameter.grad = None
    s.clip(0.1)
    s.step()


def averaged_by_one_rank(mesh: Any) -> None:
    s = Session(mesh, REPLICATED)
    s.start(make_gpt(depth=1), units=None)
    s.train(0)
    if rank_of(mesh) == 1:
        dmuon.Ema(s.model)
    s.train(1)


@pytest.mark.parametrize("in_step", [False, True])
def test_training_goes_on_after_ranks_have_differed(ranks, in_step):
    check(ranks, differed, schedule=REPLICATED, in_step=in_step)


def test_gradients_of_a_backward_in_which_ranks_differed_are_averaged_before_they_are_used(ranks):
    *notes, expected = check(ranks, differed_in_a_micro_step, schedule=REPLICATED)
    for norms in notes:
        assert norms == pytest.approx(expected, rel=1e-4)


@pytest.mark.cpu("on devices the others go on, and wait in the step while the process of the rank that raised lives")
@pytest.mark.parametrize(
    ("program", "options", "words"),
    [
        (trained_on_one_rank, {"others": None}, "has issued the agreement on which parameters of AdamW train"),
        (
            added_differently_on_one_rank,
            {"what": "number"},
            "has issued the agreement on which parameters of AdamW train",
        ),
        (averaged_by_one_rank, {}, "waits for Ema()"),
    ],
)
def test_all_raise_if_a_rank_alone_trains_or_adds_a_parameter_or_makes_a_mean(ranks, program, options, words):
    """Not all ranks come to the agreement, or to the call."""
    begun = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        ranks.run(program, (2, 2), **options)
    told = [part for part in str(failed.value).split("--- rank ") if part.strip()]
    assert len(told) == 4 and time.monotonic() - begun < 60
    assert all(words in part for part in told)


def in_fp64(s: Session) -> None:
    model = make_gpt(depth=1)
    model.norm.double()
    model.norm.register_forward_hook(lambda module, args, x: x.float())
    model.norm.register_forward_pre_hook(lambda module, args: (args[0].double(),))
    s.start(model, units=None)
    s.backward(language_loss(0, s.size))
    s.notes.append(s.model.norm.weight.grad.clone())
    s.step()


def test_gradients_in_fp64_are_averaged_in_fp64(ranks):
    """The mean of four values of fp32, computed in fp64, is mostly none of fp32."""
    *notes, [expected] = check(ranks, in_fp64, schedule=REPLICATED)
    for [gradient] in notes:
        assert gradient.dtype == torch.float64
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-8)
        assert not torch.equal(gradient, gradient.float().double())
