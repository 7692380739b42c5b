"""Whatever is wrong up to dmuon.Muon raises ValueError on every rank, says what to do, and leaves processes usable."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from models import batch, loss_of, make_gpt
from pool import make_mesh
from refusals import REFUSED, Refusals, dedicated, expect_refusal, messages_of, ready
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from training import AHEAD, dedicate, shard

import dmuon

refused = Refusals()


@refused("strategy: expected one of", "'load_balance'", "got 'fastest'", strategy="fastest")
@refused("reshard_after_forward: expected True, False or None", "got 2", reshard_after_forward=2)
@refused("node_copy: expected True or False", "got 1", node_copy=1)
@refused("dedicate_params: lookahead: expected 0 to 1048576 units, got -1", lookahead=-1)
@refused("dedicate_params: lookahead: expected an int within its range, got 1.5", lookahead=1.5)
@refused("dedicate_params: lookahead: expected an int within its range, got True", lookahead=True)
@refused("dedicate_params: lookahead: expected an int within its range, got 1099511627776", lookahead=2**40)
@refused("max_units_in_flight: expected 2 to 1048576 units, or none for lookahead + 2, got 1", max_units_in_flight=1)
@refused("max_units_in_flight: expected an int within its range, not 0, or None, got 0", max_units_in_flight=0)
@refused("dedicate_params: layout_slack: expected a number, got True", layout_slack=True)
@refused("dedicate_params: layout_slack: expected a number, got '0'", layout_slack="0")
@refused("dedicate_params: max_memory_bytes must be positive, or none; got -1", max_memory_bytes=-1)
@refused("timeout: expected a positive datetime.timedelta or None, got 5", timeout=5)
@refused("mp_policy: expected torch.distributed.fsdp.MixedPrecisionPolicy or None, got 'bf16'", mp_policy="bf16")
def dedicate_on_this_mesh(mesh: Any, **options: Any) -> None:
    dmuon.dedicate_params(make_gpt(depth=1), mesh, **options)


@refused("dedicate_params: model: '(root)' is dedicated already", "one call a model")
def twice(mesh: Any) -> None:
    model = dedicated(mesh)
    dmuon.dedicate_params(model, mesh)


@refused("dedicate_params: model: '(root)' is dedicated already", "one call a model")
def twice_after_muon(mesh: Any) -> None:
    dmuon.dedicate_params(ready(mesh)[0], mesh)


@refused("dedicate_params: model: 'qkv.weight' is dedicated already", "one call a model")
def inside_a_dedicated_model(mesh: Any) -> None:
    dmuon.dedicate_params(ready(mesh, fsdp=False)[0].blocks[0], mesh)


@refused("select: selected 'blocks.0.norm.weight'", "2-D", ": 1-D.")
def select_a_vector(mesh: Any) -> None:
    dedicated(mesh, select=lambda name, module, parameter: "norm" in name or None)


SEVERAL = "several of them or None for 'embedding.weight', got "
OF_ANOTHER = "as its shape (29, 24) has them; got "


@refused("select: expected True, False, a dmuon.View, several of them or None", "got 'muon'", kind="string")
@refused(SEVERAL + "a Tensor of shape (50, 50)", kind="tensor")
@refused(SEVERAL + "a Linear", kind="module")
@refused(OF_ANOTHER + "[a Tensor of shape (9,), 1, 2 and 1 more]", kind="list")
def select_returns_something_else(mesh: Any, kind: str) -> None:
    answers = {
        "string": "muon",
        "tensor": torch.ones(50, 50),
        "module": nn.Linear(2, 2),
        "list": [torch.ones(9), 1, 2, 3],
    }
    try:
        dedicated(mesh, select=lambda *_: answers[kind])
    except ValueError as error:
        assert len(str(error)) < 400
        raise


@refused("dedicate_params: select", "KeyError", "embedding.weight")
def select_raises(mesh: Any) -> None:
    try:
        dmuon.dedicate_params(make_gpt(depth=1), mesh, select=lambda name, *_: {}[name])
    except ValueError as error:
        assert isinstance(error.__cause__, KeyError)
        raise


@refused("'blocks.0.up.weight' has gradient hooks", "select()")
def hook_before(mesh: Any) -> None:
    model = make_gpt(depth=1)
    model.blocks[0].up.weight.register_hook(lambda grad: grad * 0)
    dmuon.dedicate_params(model, mesh)


@refused("Muon: model: expected the module that dmuon.dedicate_params(", "got a Gpt that was not given")
def muon_without_dedicate(mesh: Any) -> None:
    dmuon.Muon(make_gpt(depth=1))


@refused("Muon: model: expected the model itself, dmuon.Muon(model), got generator", kind="named_parameters")
@refused("Muon: model: expected the model itself, dmuon.Muon(model), got list", kind="parameters")
@refused("Muon: model: expected one model, got 2 parts", "[dmuon.Muon(part) for part in parts]", kind="parts")
def muon_of_what_other_optimizers_take(mesh: Any, kind: str) -> None:
    model = dedicated(mesh)
    given: dict[str, Any] = {"named_parameters": model.named_parameters(), "parameters": [*model.parameters()]}
    dmuon.Muon(given.get(kind, [model, model.norm]))


@refused("one Muon a model", "To begin anew with the first one: opt.state.clear()")
def muon_twice(mesh: Any) -> None:
    dmuon.Muon(ready(mesh)[0])


INTERRUPTED = "Muon: model: an earlier Muon(model) was interrupted or has failed"


@refused(INTERRUPTED, "a new model", at="start.add_hooks", matrices=True)
@refused(INTERRUPTED, "a new model", at="muon.InnerAdamW", matrices=True)
@refused(INTERRUPTED, "a new model", at="muon.InnerAdamW", matrices=False)
def after_an_interrupted_one(mesh: Any, at: str, matrices: bool) -> None:
    model = dedicated(mesh) if matrices else nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4))
    if not matrices:
        dedicate(model, mesh, AHEAD)
    interrupt = mock.patch(f"dmuon._running.{at}", side_effect=KeyboardInterrupt)
    with interrupt, pytest.raises(KeyboardInterrupt):
        dmuon.Muon(model)
    dmuon.Muon(model)


@refused("no_sync: model: expected a model with dmuon.Muon", "got one without")
def no_sync_without_muon(mesh: Any) -> None:
    model = dedicated(mesh)
    with dmuon.no_sync(model):
        pass


@refused("dedicate_params: plan: cannot read '/nowhere/plan.json'", "No such file", plan="/nowhere/plan.json")
@refused("dedicate_params: costs: expected 'measured', 'modelled' or a table, cannot read 'measurd'", costs="measurd")
def file_missing(mesh: Any, **options: Any) -> None:
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model, mesh, **options)
    dmuon.Muon(model)


@refused("'embedding.weight' is sharded over ranks ((0, 1, 2, 3),)", "((0, 1), (2, 3))", "same mesh")
def other_mesh(mesh: Any) -> None:
    model = dedicated(mesh)
    shard(model, make_mesh((4,), mesh.device_type))
    dmuon.Muon(model)


@refused(
    "mp_policy.param_dtype: 'blocks.0' is called outside of autocast", "to torch.bfloat16", "inside torch.autocast"
)
@refused("mp_policy.param_dtype: 'blocks.0' is called outside of autocast", sharded="norm")
@refused("mp_policy: output_dtype: expected None", "fully_shard is around 'blocks.0.", output_dtype=torch.float32)
def cast_without_fsdp(mesh: Any, sharded: str = "", **policy: Any) -> None:
    model = make_gpt(depth=1)
    policy = {"param_dtype": torch.bfloat16, **policy}
    dmuon.dedicate_params(model, mesh, mp_policy=MixedPrecisionPolicy(**policy))
    if sharded:
        fully_shard(model.get_submodule(sharded), mesh=mesh)
    dmuon.Muon(model)
    loss_of(model, batch(0))


BF16 = {"param_dtype": torch.bfloat16}


@refused("'blocks.0.qkv.weight'", "'blocks.0'", "float32", "bfloat16", ours={}, theirs=BF16)
@refused("'blocks.0'", "same mp_policy for both", ours=BF16, theirs={})
@refused("'(root)'", "same mp_policy for both", ours={}, theirs=BF16, of_block=False)
@refused(
    "'blocks.0'",
    "in torch.bfloat16 and torch.float32 by fully_shard",
    ours=BF16,
    theirs={**BF16, "reduce_dtype": torch.float32},
)
def policies_differ(mesh: Any, ours: dict[str, Any], theirs: dict[str, Any], of_block: bool = True) -> None:
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model, mesh, mp_policy=MixedPrecisionPolicy(**ours))
    if of_block:
        fully_shard(model.blocks[0], mesh=mesh, mp_policy=MixedPrecisionPolicy(**theirs))
        theirs = ours
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**theirs))
    dmuon.Muon(model)


@pytest.mark.parametrize(REFUSED, refused)
def test_raises_on_every_rank_and_says_what_to_do(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)


def test_a_mesh_of_three_dimensions(ranks):
    for message in messages_of(ranks, dedicate_on_this_mesh, (2, 2, 1)):
        assert "1 dimension (shard) or 2 (replicate, shard)" in message
