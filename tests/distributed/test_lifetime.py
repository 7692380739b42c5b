"""One process: what is freed, what is refused, what verify sees."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import weakref
from typing import Any

import pytest
import torch
import torch.nn as nn
from dmuon._inspecting.verified_update import relative
from dmuon._planning import costs
from models import batch, loss_of, make_gpt

import dmuon


def trained(depth=1):
    model = make_gpt(depth=depth)
    dmuon.dedicate_params(model)
    optimizer = dmuon.Muon(model, lr=2e-2, ns_dtype=torch.float32)
    loss_of(model, batch(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def test_a_model_and_its_optimizer_are_freed():
    model, optimizer = trained()
    alive = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(optimizer._runtime)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in alive] == [None, None, None]


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_model_that_keeps_an_output_is_freed():
    model, optimizer = trained(depth=2)
    model.kept = model.blocks[1](model.blocks[0](torch.randn(2, 5, model.blocks[0].up.in_features))).mean()
    alive = [weakref.ref(model), weakref.ref(optimizer)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


@pytest.mark.parametrize("place", ["norm", "blocks.1", "blocks.1.down"])
def test_a_model_whose_forward_was_interrupted_is_freed(place):
    num_threads = []
    for _ in range(3):
        model, optimizer = trained(depth=2)
        model.get_submodule(place).register_forward_pre_hook(interrupt, prepend=True)
        with pytest.raises(KeyboardInterrupt):
            model(batch(0))
        del model, optimizer
        gc.collect()
        num_threads.append(len(os.listdir("/proc/self/task")))
    assert num_threads[1] == num_threads[2]


def test_the_end_of_a_call_ends_the_use_though_another_was_interrupted():
    model, optimizer = trained()
    block, engine = model.blocks[0], optimizer._runtime.engine
    handle = block.up.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        block(torch.randn(2, 5, block.up.in_features))
    handle.remove()
    ready = []
    x = torch.randn(2, 5, block.up.in_features, requires_grad=True)
    x.register_hook(lambda _: ready.append(engine.ready(0)))
    block(x).sum().backward()
    assert ready == [False]


class Skipping(nn.Module):
    """Its call may leave out the block."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.block = nn.Parameter(torch.ones(())), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_a_graph_without_matrices_outlives_its_model():
    model = Skipping()
    dmuon.dedicate_params(model)
    optimizer, x = dmuon.Muon(model), torch.ones(2, requires_grad=True)
    loss = model(x).sum()
    del model, optimizer
    gc.collect()
    others = [trained() for _ in range(2)]  # in its memory
    loss.backward()
    assert len(others) == 2 and torch.equal(x.grad, torch.ones(2))


@pytest.mark.parametrize(("tensor", "words"), [("master", "weights"), ("momentum_buffer", "momentum")])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_verify_says_that_a_model_is_broken_already(tensor, words, value):
    model, optimizer = trained()
    index = [leaf.name for leaf in optimizer._runtime.leaves].index("blocks.0.out.weight")
    optimizer._runtime.engine.drain()  # the update may be in flight
    for part in optimizer._runtime.transfers.owned_parts(index, tensor):
        part.tensor[-1, -1] = value
    expected = f"verify: model: expected finite {words}, got a NaN or an infinity in 'blocks.0.out.weight'"
    with pytest.raises(ValueError, match=expected):
        dmuon.verify(model, optimizer)


def test_a_result_that_is_no_number_is_infinitely_wrong():
    found, expected = torch.tensor([1.0, math.nan]), torch.ones(2)
    assert relative([(found, expected)]) == math.inf
    assert relative([(expected, expected)]) == 0


def test_verify_ends_in_a_verdict():
    model, optimizer = trained()
    found = dmuon.verify(model, optimizer)
    assert found and found.ok
    assert str(found).splitlines()[-1] == "verdict: dmuon's results agree with the plain computation"
    assert len(str(found).splitlines()) == 5
    wrong = dataclasses.replace(found, routing=2e-6)
    assert not wrong and "differ from the plain computation in routing" in str(wrong)
    wrong = dataclasses.replace(found, publication=1e-9, update=math.inf)
    assert not wrong.ok and str(wrong).endswith("in publication and update")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float16, 0.03), (torch.bfloat16, 0.2)])
def test_verify_allows_for_the_rounding_of_the_iteration(dtype, tolerance):
    """And for no more: a momentum that is a tenth too large is beyond fp32's tolerance."""
    model, optimizer = trained()
    optimizer.param_groups[0]["ns_dtype"] = dtype
    found = dmuon.verify(model, optimizer)
    assert found.update_tolerance == tolerance
    assert tolerance / 1000 < found.update < tolerance
    assert found.ok


def test_one_process_measures_nothing(monkeypatch):
    def refused(*_, **__):
        raise AssertionError("costs were measured")

    monkeypatch.setattr(costs, "measure", refused)
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model)
    assert json.loads(dmuon.Muon(model).plan.to_json())["costs"]["source"] == "model of cpu"


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_takes_torchs_arguments(foreach):
    model, _ = trained()
    loss_of(model, batch(1)).backward()
    norm = dmuon.clip_grad_norm_(model, 1.0, norm_type=2, error_if_nonfinite=True, foreach=foreach)
    assert norm.isfinite() and norm > 0


def test_a_norm_that_is_not_finite_is_an_error_where_asked_for():
    model, optimizer = trained()
    (loss_of(model, batch(1)) * math.nan).backward()
    with pytest.raises(RuntimeError, match="expected a finite norm"):
        dmuon.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert dmuon.clip_grad_norm_(model, 1.0).isnan()
    optimizer.step()
    assert optimizer.skipped_steps == 1


def test_verify_refuses_while_gradients_wait():
    model, optimizer = trained()
    loss_of(model, batch(1)).backward()
    with pytest.raises(ValueError, match="gradients that wait"):
        dmuon.verify(model, optimizer)


@pytest.mark.parametrize(("what", "writeback"), [("step", True), ("step", False), ("clip", False), ("load", False)])
def test_what_would_be_lost_inside_full_params_is_refused(what, writeback):
    model, optimizer = trained()
    calls = {
        "step": optimizer.step,
        "clip": lambda: dmuon.clip_grad_norm_(model, 1.0),
        "load": lambda: model.load_state_dict(model.state_dict()),
    }
    with pytest.raises(ValueError, match="full_params"), dmuon.full_params(model, writeback=writeback):
        calls[what]()


@pytest.mark.parametrize(("key", "value"), [("lr", float("nan")), ("lr", -1.0), ("momentum", 2.0), ("ns_steps", 2.5)])
def test_a_bad_hyperparameter_is_refused_at_the_step(key, value):
    model, optimizer = trained()
    (part,) = optimizer._runtime.transfers.owned_parts(0, "master")
    master, before = part.tensor, part.tensor.clone()
    optimizer.param_groups[0][key] = value
    loss_of(model, batch(1)).backward()
    with pytest.raises(ValueError, match=key):
        optimizer.step()
    assert torch.equal(before, master)


def test_a_replaced_weight_is_refused():
    model, _ = trained()
    model.blocks[0].out.weight = torch.nn.Parameter(torch.zeros(24, 24))
    with pytest.raises(ValueError, match=r"replaced after dmuon\.Muon.*full_params"):
        loss_of(model, batch(1))


def test_a_move_to_where_it_is_and_a_cast_to_what_it_is_change_nothing():
    model, opt = trained()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.to(torch.device(torch.get_default_device().type, 0)).float().to(torch.float32)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match=r"would change 'blocks\.0\.qkv\.weight', which is torch\.float32") as raised:
        model.double()
    assert "_to_copy" in str(raised.value.__cause__)
    with pytest.raises(ValueError, match=r"assigning \.data.*on 'blocks\.0\.qkv\.weight'"):
        model.blocks[0].qkv.weight.data = torch.zeros(72, 24)
    opt.step()


def test_a_compiled_model_is_known_by_its_wrapper():
    compiled = torch.compile(make_gpt(depth=1), backend="eager")
    dmuon.dedicate_params(compiled)
    assert dmuon.Muon(compiled).plan.owner == [0, 0, 0, 0]


@pytest.mark.parametrize("write", [torch.nn.init.zeros_, torch.nn.init.normal_, torch.Tensor.zero_])
def test_writing_to_a_placeholder_is_refused(write):
    model, _ = trained()
    with pytest.raises(ValueError, match="full_params"), torch.no_grad():
        write(model.blocks[0].out.weight)
