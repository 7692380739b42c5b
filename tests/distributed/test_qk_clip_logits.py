"""Forwards count for the largest logits on ranks that run the module, once each; users may hand in the logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn as nn
from attentions import LR, WEIGHT_DECAY, OneProcess, make_model, of_adamw
from checkpoints import unlike
from models import batch, loss_of, part, weights_of_plain
from scenario import assert_equal_to_reference
from test_qk_clip import assert_equal_maxima, started, tau_of
from torch.utils.checkpoint import checkpoint
from training import AHEAD, dedicate, place_of, shard, weights_of

import dmuon


def skipping(mesh: Any, tau: float, everywhere: bool) -> Any:
    """In the second step; in the first one all ranks run both blocks. Without FSDP2, whose messages need all ranks."""
    model = make_model("latent")
    dedicate(model, mesh, AHEAD)
    opt = dmuon.Muon(model, lr=LR, weight_decay=WEIGHT_DECAY, ns_coefficients="quintic", ns_dtype=torch.float32)
    clip = dmuon.QKClip(model, tau)
    rank, size = place_of(mesh)
    history = [weights_of(model)]
    for model.skip in (False, everywhere or rank != 1):
        loss_of(model, part(batch(0), rank, size)).backward()
        opt.step()
        opt.zero_grad()
        history.append(weights_of(model))
    return history, {name: logits.cpu() for name, logits in clip.max_logits.items()}


def test_a_module_that_some_ranks_skip_has_the_others_logits(ranks):
    one = OneProcess("latent", tau_of("latent"))
    for skips in (False, True):
        for rank in range(4):
            one.model.skip = skips and rank != 1
            one.backward(part(batch(0), rank, 4), 1 / 4)
        one.step()
    for (initial, _, weights), logits in ranks.run(skipping, (2, 2), tau=one.tau, everywhere=False):
        assert_equal_to_reference(initial, weights_of_plain(one.model), weights)
        assert_equal_maxima([logits], one.history[1:], rtol=1e-3, atol=1e-4)


def test_a_module_that_all_ranks_skip_has_no_logits_and_stays(ranks):
    for (_, before, after), logits in ranks.run(skipping, (2, 2), tau=tau_of("latent"), everywhere=True):
        assert logits["blocks.1.attention"].eq(-math.inf).all()
        assert logits["blocks.0.attention"].isfinite().all()
        of_second = [name for name in before if name.startswith("blocks.1.")]
        assert unlike({n: after[n] for n in of_second}, {n: before[n] for n in of_second}) == []


def checkpointed(mesh: Any, reentrant: bool | None, compiled: bool = False) -> Any:
    """Returns the logits of a step, and how often logits were computed."""
    from dmuon._attention import observer

    model, opt, clip = started(mesh, "grouped", 1.0)
    counted: list[int] = []
    own = observer._LARGEST[torch.nn.functional.scaled_dot_product_attention]
    observer._LARGEST[torch.nn.functional.scaled_dot_product_attention] = lambda *a, **o: (
        counted.append(1) or own(*a, **o)
    )
    try:
        if compiled:
            for block in model.blocks:
                block.compile(backend="eager")
        elif reentrant is not None:
            for block in model.blocks:
                inner = block.forward
                block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=reentrant)
        loss_of(model, part(batch(0), *place_of(mesh))).backward()
        opt.step()
    finally:
        observer._LARGEST[torch.nn.functional.scaled_dot_product_attention] = own
    return {name: logits.cpu() for name, logits in clip.max_logits.items()}, len(counted), weights_of(model)


@pytest.mark.parametrize("options", [{"reentrant": False}, {"reentrant": True}, {"reentrant": None, "compiled": True}])
def test_a_forward_that_is_repeated_or_compiled_counts_once(ranks, options):
    expected = ranks.run(checkpointed, (2, 2), reentrant=None)
    for got, plain in zip(ranks.run(checkpointed, (2, 2), **options), expected, strict=True):
        assert got[1] == plain[1] == 2
        assert_equal_maxima([got[0]], [plain[0]], rtol=1e-6, atol=1e-6)


def evaluated(mesh: Any) -> list[bool]:
    model, opt, clip = started(mesh, "grouped", 1.0)
    tokens = part(batch(0), *place_of(mesh))
    with torch.no_grad():
        loss_of(model, tokens)
    model.eval()
    loss_of(model, tokens)
    model.train()
    opt.step()
    return [bool(logits.eq(-math.inf).all()) for logits in clip.max_logits.values()]


def test_evaluations_do_not_count(ranks):
    assert ranks.run(evaluated, (2, 2)) == [[True, True]] * 4


def logits_after(mesh: Any, between: str, load: bool = False) -> Any:
    """A step, whose largest logits are returned, after a forward of weights that are eight times as large."""
    model, opt, clip = started(mesh, "grouped", 1.0)
    tokens = part(batch(0), *place_of(mesh))
    own = {name: value.clone() for name, value in model.state_dict().items()}
    large = {name: value * 8 if "attention" in name else value for name, value in own.items()}
    if between == "load":
        model.load_state_dict(large)
        loss_of(model, tokens).backward()
        opt.zero_grad()
        model.load_state_dict(own)
    elif between == "mean":
        model.load_state_dict(large)
        mean = dmuon.Ema(model, decay=0.9)
        model.load_state_dict(own)
        loss_of(model, tokens).backward()
        with mean.applied(), torch.enable_grad():
            loss_of(model, tokens)
    if between != "mean":
        loss_of(model, tokens).backward()
    opt.step()
    return {name: logits.cpu() for name, logits in clip.max_logits.items()}, weights_of(model)


@pytest.mark.parametrize("between", ["load", "mean"])
def test_logits_of_other_weights_do_not_count(ranks, between):
    for got, expected in zip(
        ranks.run(logits_after, (2, 2), between=between), ranks.run(logits_after, (2, 2), between=""), strict=True
    ):
        assert_equal_maxima([got[0]], [expected[0]], rtol=0, atol=0)
        assert unlike(got[1], expected[1]) == []


def test_logits_of_weights_that_an_optimizers_load_replaces_do_not_count():
    model = make_model("grouped").bfloat16()
    dmuon.dedicate_params(model)
    opt, clip = dmuon.Muon(model), dmuon.QKClip(model)
    loss_of(model, batch(0)).backward()
    dmuon.clip_grad_norm_(model, 1.0)
    opt.load_state_dict(opt.state_dict())
    opt.step()
    assert all(logits.eq(-math.inf).all() for logits in clip.max_logits.values())


def frozen(mesh: Any, names: list[str]) -> Any:
    """A step without a rate, with parameters of the first module frozen since QKClip. Returns what it has changed."""
    model, opt, clip = started(mesh, "grouped", 1e-3)
    for name in names:
        model.get_parameter(f"blocks.0.attention.{name}").requires_grad_(False)
    for group in opt.param_groups:
        group["lr"] = 0.0
    before = weights_of(model)
    loss_of(model, part(batch(0), *place_of(mesh))).backward()
    opt.step()
    return unlike(weights_of(model), before), [bool(logits.gt(1e-3).all()) for logits in clip.max_logits.values()]


@pytest.mark.parametrize("names", [["q.weight"], ["k.weight", "q.bias"], ["q.bias"]])
def test_a_module_with_a_frozen_projection_is_not_clipped(ranks, names):
    clipped = {f"blocks.1.attention.{of}.{kind}" for of in "qk" for kind in ("weight", "bias")}
    for changed, exceeds in ranks.run(frozen, (2, 2), names=names):
        assert exceeds == [True, True]
        assert {name.removeprefix(".") for name in changed} == clipped


class Hidden(nn.Module):
    """Shows no logits: an operator of its own."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.q, self.k, self.v = attention.q, attention.k, attention.v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 6)).transpose(1, 2) for p in (self.q, self.k, self.v))
        logits = q @ k.repeat_interleave(2, 1).mT
        return (logits.tanh() @ v.repeat_interleave(2, 1)).transpose(1, 2).flatten(2)


dmuon.attention.by_class[Hidden] = lambda module: dmuon.attention.Heads(4, 6, 2, query="q", key="k")


def hidden(mesh: Any, tau: float = 1.0) -> tuple[nn.Module, dmuon.Muon, dmuon.QKClip]:
    model = make_model("grouped")
    for block in model.blocks:
        block.attention = Hidden(block.attention)
    dedicate(model, mesh, AHEAD)
    shard(model, mesh)
    opt = dmuon.Muon(model, adamw_groups=of_adamw(model), ns_dtype=torch.float32)
    return model, opt, dmuon.QKClip(model, tau)


def given(mesh: Any) -> Any:
    """Only the last rank has the largest."""
    model, opt, clip = hidden(mesh)
    rank, size = place_of(mesh)
    before = weights_of(model)
    for _ in range(2):
        loss_of(model, part(batch(0), rank, size)).backward()
    for name in clip.max_logits:
        clip.observe(name, torch.tensor([4.0, -3.0, 0.5, float(rank)], device=mesh.device_type))
        clip.observe(name, torch.zeros(4))
    opt.param_groups[0]["lr"] = 0.0
    opt.step()
    return before, weights_of(model), {name: logits.tolist() for name, logits in clip.max_logits.items()}


def not_given(mesh: Any) -> str:
    """In the second step."""
    model, opt, clip = hidden(mesh)
    tokens = part(batch(0), *place_of(mesh))
    for step in range(2):
        loss_of(model, tokens).backward()
        for name in clip.max_logits if step == 0 else ():
            clip.observe(name, torch.zeros(4))
        try:
            opt.step()
        except ValueError as error:
            return f"step {step}: {error}"
        opt.zero_grad()
    return ""


def test_maxima_are_handed_in_for_each_step(ranks):
    for message in ranks.run(not_given, (2, 2)):
        assert message.startswith("step 1: QKClip: 'blocks.0.attention': expected a forward that calls")


def test_maxima_that_the_user_hands_in_clip(ranks):
    for before, weights, logits in ranks.run(given, (2, 2)):
        assert logits == {f"blocks.{i}.attention": [4.0, 0.0, 0.5, 3.0] for i in range(2)}
        k, q = (f"blocks.0.attention.{name}.weight" for name in "kq")
        g, h = 1 / 2, (1 / 3) ** 0.5  # the roots of gamma of the two groups
        factors = torch.tensor([g, h]).repeat_interleave(6)[:, None]
        torch.testing.assert_close(weights[k], before[k] * factors.to(weights[k]))
        factors = torch.tensor([g, 1 / g, 1 / h, h]).repeat_interleave(6)[:, None]
        torch.testing.assert_close(weights[q], before[q] * factors.to(weights[q]))


class HeadByHead(nn.Module):
    """Runs its four heads one after the other, on [batch, L, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = (projection(x).unflatten(-1, (4, 4)).unbind(-2) for projection in (self.q, self.k))
        return torch.cat([nn.functional.scaled_dot_product_attention(*of, of[1]) for of in zip(q, k, strict=True)], -1)


dmuon.attention.by_class[HeadByHead] = lambda module: dmuon.attention.Heads(4, 4, query="q", key="k")


def test_a_batch_is_not_taken_for_heads():
    model = nn.Sequential(nn.Linear(16, 16), HeadByHead())
    dmuon.dedicate_params(model)
    opt = dmuon.Muon(model)
    dmuon.QKClip(model)
    model(torch.ones(4, 3, 16)).sum().backward()
    with pytest.raises(ValueError, match=r"QKClip: '1': expected a forward that calls"):
        opt.step()
