"""Every rule of update ends with the weights of one process, which computes its formulas by itself."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dsd
import torch.nn as nn
from checkpoints import assert_near, dicts_of, full_state, group_of, unlike
from cut import Cut
from mixture import make_mixture, matrices_of, select
from models import batch, is_matrix_of_a_block, loss_of, make_gpt, part, weights_of_plain
from refusals import REFUSED, Refusals, dedicated, expect_refusal
from scenario import Session, assert_equal_to_reference, check
from torch.distributed.fsdp import MixedPrecisionPolicy
from training import AHEAD, KEPT, LR, NO_COPY, ON_DEMAND, WEIGHT_DECAY, dedicate, place_of, shard, weights_of

import dmuon

STEPS = 4
MOST = 0.5  # of the gradients' norm: less than any here, so that each step is clipped
MOMENT = "second_momentum_buffer"
CAUTIOUS = {"cautious_weight_decay": True}
RULES: list[dict[str, Any]] = [
    {"rule": "normuon"},
    {"rule": "adamuon", "beta2": 0.8},
    {"rule": "muon", **CAUTIOUS},
    {"rule": "normuon", "beta2": 0.5, **CAUTIOUS},
    {"rule": "adamuon", "adjust_lr_fn": "match_rms_adamw", "adamw_lr": 3e-4, **CAUTIOUS},
]
WITH_MOMENT = [{"rule": "normuon"}, {"rule": "adamuon"}]
MESHES = [((1, 4), AHEAD), ((2, 2), NO_COPY), ((4, 1), ON_DEMAND)]


def ids(options: Any) -> str:
    return "-".join(str(value) for value in options.values()) if "rule" in options else ""


# ---- whole matrices ----


def trained(s: Session, **muon: Any) -> None:
    s.start(make_gpt(depth=2), muon=muon)
    s.train(0, 1)
    s.opt.zero_grad(set_to_none=False)  # a step on along momenta
    s.opt.step()
    s.train(2)


@pytest.mark.parametrize("options", RULES, ids=ids)
@pytest.mark.parametrize(("mesh", "schedule"), [*MESHES, ((1,), KEPT)])
def test_weights_equal_a_single_process(ranks, mesh, schedule, options):
    check(ranks, trained, mesh, schedule=schedule, **options)


# ---- several matrices in one parameter, stored as [out, in] and as [in, out] ----


def mixture_loss(model: nn.Module, step: int, rank: int, size: int) -> torch.Tensor:
    """Returns the loss of this rank's part of 12 rows."""
    x = torch.randn(12, 12, generator=torch.Generator().manual_seed(step))
    return model(x.chunk(size)[rank]).square().mean()


def started(mesh: Any, schedule: dict[str, Any], dtype: torch.dtype, **muon: Any) -> tuple[nn.Module, dmuon.Muon]:
    policy = {} if dtype == torch.float32 else {"mp_policy": MixedPrecisionPolicy(dtype, torch.float32)}
    model = make_mixture().to(dtype)
    dedicate(model, mesh, {"strategy": "round_robin", **schedule}, select=select, **policy)
    shard(model, mesh, **policy)
    return model, dmuon.Muon(model, lr=LR, weight_decay=WEIGHT_DECAY, ns_dtype=torch.float32, **muon)


def step_mixture(mesh: Any, model: nn.Module, opt: dmuon.Muon, step: int) -> None:
    """Makes a step of two micro-steps. The first one's gradients stay inside the node."""
    rank, size = place_of(mesh)
    for context in (dmuon.no_sync(model), contextlib.nullcontext()):
        with context:
            (mixture_loss(model, step, rank, size) / 2).backward()
    dmuon.clip_grad_norm_(model, MOST)
    opt.step()
    opt.zero_grad()


def states_of(model: nn.Module, opt: dmuon.Muon) -> dict[str, torch.Tensor]:
    """Owned tensors and weights, whole."""
    runtime = opt._runtime
    names = (*runtime.shards.states, "master")
    held = {
        f"{name} of {leaf.name}": runtime.transfers.gather(index, name).clone()
        for index, leaf in enumerate(runtime.leaves)
        for name in names
    }
    return held | weights_of(model)


def trained_mixture(
    mesh: Any, schedule: dict[str, Any], dtype: torch.dtype = torch.float32, **muon: Any
) -> dict[str, Any]:
    """Clips, accumulates, has a gradient that is not finite on one rank, saves and loads."""
    model, opt = started(mesh, schedule, dtype, **muon)
    initial = weights_of(model)
    rank, size = place_of(mesh)
    for step in range(STEPS):
        step_mixture(mesh, model, opt, step)
        if step == 1:
            before = states_of(model, opt)
            loss = mixture_loss(model, 100, rank, size)
            (loss * float("nan") if rank == size - 1 else loss).backward()
            opt.step()
            opt.zero_grad()
            skipped = unlike(states_of(model, opt), before)
            saved = copy.deepcopy((dict(model.state_dict()), opt.state_dict()))
            step_mixture(mesh, model, opt, 101)  # which the load undoes
            changed = unlike(states_of(model, opt), before)
            model.load_state_dict(saved[0])
            opt.load_state_dict(saved[1])
            loaded = unlike(states_of(model, opt), before)
    runtime, plan = opt._runtime, opt.plan.native
    names = ("master", "gradient", *runtime.shards.states)
    owned = (runtime.transfers.owned_parts(i, name) for i in range(len(runtime.leaves)) for name in names)
    return {
        "weights": (initial, weights_of(model)),
        "skipped": (skipped, opt.skipped_steps),
        "loaded": (bool(changed), loaded),
        "verified": str(dmuon.verify(model, opt)) if not dmuon.verify(model, opt) else "",
        "bytes": (plan.memory[rank].state, sum(part.tensor.nbytes for parts in owned for part in parts)),
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in opt.param_groups if g["algorithm"] == "muon"],
    }


def reference_of(muon: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = make_mixture()
    initial = weights_of_plain(model)
    own = {name: value for name, value in muon.items() if name != "adamw_lr"}
    cut = Cut(model, matrices_of, **own)
    for step in range(STEPS):
        mixture_loss(model, step, 0, 1).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MOST)
        cut.step()
    return initial, weights_of_plain(model)


def assert_skipped_and_loaded(got: dict[str, Any]) -> None:
    assert got["skipped"] == ([], 1)
    assert got["loaded"] == (True, [])
    assert got["verified"] == ""
    assert got["bytes"][0] == got["bytes"][1]


@pytest.mark.parametrize("options", RULES, ids=ids)
@pytest.mark.parametrize(("mesh", "schedule"), MESHES)
def test_each_matrix_of_a_parameter_has_its_rule(ranks, mesh, schedule, options):
    reference = reference_of(options)
    for got in ranks.run(trained_mixture, mesh, schedule=schedule, **options):
        assert_equal_to_reference(*reference, got["weights"][1])
        assert_skipped_and_loaded(got)
        own = {name: value for name, value in options.items() if name != "adamw_lr" and value != "muon"}
        assert all(own.items() <= group.items() for group in got["groups"])


# A gradient in bf16 is off by 2^-9 of its norm, and weights are rounded. So some elements near 0 have another sign, and
# AdaMuon moves by signs.
@pytest.mark.parametrize(
    ("options", "bound"),
    [({"rule": "normuon"}, 0.2), ({"rule": "normuon", **CAUTIOUS}, 0.2), ({"rule": "adamuon"}, 0.5)],
    ids=str,
)
@pytest.mark.parametrize(("mesh", "schedule"), MESHES)
def test_in_bf16_each_matrix_has_its_rule(ranks, mesh, schedule, options, bound):
    initial, expected = reference_of(options)
    for got in ranks.run(trained_mixture, mesh, schedule=schedule, dtype=torch.bfloat16, **options):
        begin, end = (
            {name: w.float() for name, w in weights.items() if matrices_of(name)} for weights in got["weights"]
        )
        moved = {name: initial[name] + end[name] - begin[name] for name in end}
        assert_equal_to_reference(initial, {name: expected[name] for name in moved}, moved, bound)
        assert_skipped_and_loaded(got)


# ---- another mesh ----


def save(mesh: Any, directory: str, **muon: Any) -> tuple[dict[str, Any], dict[str, Any], list[tuple[str, bool]]]:
    """Returns the whole state, the state some steps later, and names, shapes and cuts of moments."""
    model, opt = started(mesh, AHEAD, torch.float32, **muon)
    for step in range(2):
        step_mixture(mesh, model, opt, step)
    saved = full_state(model, opt)
    dicts = dicts_of(model, opt)
    dcp.save(dicts, checkpoint_id=directory, **group_of(mesh))
    moments = {name: state[MOMENT] for name, state in dicts["optimizer"]["state"].items() if MOMENT in state}
    cuts = [(name, tuple(m.shape), [str(p) for p in m.placements][-1:]) for name, m in moments.items()]
    for step in range(2, 4):
        step_mixture(mesh, model, opt, step)
    return saved, full_state(model, opt), cuts


def resume(mesh: Any, directory: str, **muon: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    model, opt = started(mesh, KEPT, torch.float32, **muon)
    step_mixture(mesh, model, opt, 50)  # of other values
    saved = dicts_of(model, opt)
    dcp.load(saved, checkpoint_id=directory, **group_of(mesh))
    dsd.set_state_dict(model, opt, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    at_begin = full_state(model, opt)
    for step in range(2, 4):
        step_mixture(mesh, model, opt, step)
    return at_begin, full_state(model, opt)


SHAPES = {  # of a value a neuron
    "heads.weight": (12, 1),
    "qkv.weight": (18,),  # its matrices have several shapes
    "stored.qkv": (1, 18),
    "stored.back": (1, 12),
    "experts.gate_up": (3, 20),
    "stored.gate_up": (3, 1, 12),
}


@pytest.mark.parametrize("options", WITH_MOMENT, ids=ids)
@pytest.mark.parametrize(("saved_on", "mesh"), [((1, 4), (2, 2)), ((2, 2), (4, 1)), ((4, 1), (3,)), ((1,), (1, 4))])
def test_training_goes_on_from_a_checkpoint_of_another_mesh(ranks, saved_on, mesh, options, tmp_path):
    saved, expected, cuts = ranks.run(save, saved_on, directory=str(tmp_path), **options)[0]
    shapes = {name.removeprefix("blocks.0."): (shape, cut) for name, shape, cut in cuts}
    if options["rule"] == "normuon":
        assert {name: shapes[name][0] for name in SHAPES} == SHAPES
    assert all(cut in (["S(0)"], ["Shard(dim=0)"]) for _, cut in shapes.values())
    for at_begin, at_end in ranks.run(resume, mesh, directory=str(tmp_path), **options):
        assert unlike(at_begin, saved) == []
        assert_near(at_end, expected, saved)


# ---- what a rule costs ----


def messages(mesh: Any, **muon: Any) -> dict[str, float]:
    """Counters of messages over some steps."""
    model = make_gpt(depth=2)
    dedicate(model, mesh, ON_DEMAND)  # whose step() ends when all is sent
    shard(model, mesh)
    opt = dmuon.Muon(model, lr=LR, ns_dtype=torch.float32, **muon)
    for step in range(3):
        loss_of(model, part(batch(step), *place_of(mesh))).backward()
        opt.step()
        opt.zero_grad()
    return {name: value for name, value in opt.stats().items() if "messages" in name or "bytes_sent" in name}


def test_a_step_by_any_rule_sends_what_muons_sends(ranks):
    expected = ranks.run(messages, (2, 2))
    assert all(sum(counters.values()) > 0 for counters in expected)
    for options in RULES:
        own = {name: value for name, value in options.items() if name not in ("adjust_lr_fn", "adamw_lr")}
        assert ranks.run(messages, (2, 2), **own) == expected


# ---- what is refused ----

refused = Refusals()


@refused(
    "Muon: rule: expected one of ['muon', 'normuon', 'adamuon'] or a rule of dmuon.rules.register, got 'another'",
    rule="another",
)
@refused("Muon: beta2: expected a number in [0, 1), got 1", rule="normuon", beta2=1.0)
@refused("Muon: beta2: expected a number in [0, 1), got -0.1", rule="adamuon", beta2=-0.1)
@refused("Muon: cautious_weight_decay: expected True or False, got 1", cautious_weight_decay=1)
@refused(
    "Muon: muon_groups[0]: rule: expected 'muon', the optimizer's, got 'normuon'",
    muon_groups=[{"params": "blocks.0.up", "rule": "normuon", "beta2": 0.9}],
)
@refused(
    "Muon: muon_groups[0]: beta2: expected a number in [0, 1), got 2",
    rule="normuon",
    muon_groups=[{"params": "blocks.0.up", "beta2": 2.0}],
)
def an_option(mesh: Any, **options: Any) -> None:
    dmuon.Muon(dedicated(mesh), **options)


@refused("ranks differ", "'rule': 'normuon'")
def a_rule_of_one_rank(mesh: Any) -> None:
    dmuon.Muon(dedicated(mesh), **({"rule": "normuon"} if place_of(mesh)[0] == 1 else {}))


@refused("Muon: param_groups[0]: rule: expected 'normuon', the optimizer's, got 'muon'", gone=True)
@refused("Muon: param_groups[0]: rule: expected 'normuon', the optimizer's, got 'adamuon'", gone=False)
def a_rule_that_changes(mesh: Any, gone: bool) -> None:
    model = dedicated(mesh)
    opt = dmuon.Muon(model, rule="normuon")
    if gone:
        del opt.param_groups[0]["rule"]
    else:
        opt.param_groups[0]["rule"] = "adamuon"
    loss_of(model, part(batch(0), *place_of(mesh))).backward()
    opt.step()


@refused("Muon.load_state_dict: param_groups[0]: expected a group of algorithm 'normuon', got 'muon'", to="normuon")
@refused("expected a group of algorithm 'muon', got 'normuon'", of="normuon")
@refused("expected a group of algorithm 'normuon', got 'adamuon'", of="adamuon", to="normuon")
def a_checkpoint_of_another_rule(mesh: Any, of: str = "muon", to: str = "muon") -> None:
    model, other = (dedicated(mesh) for _ in range(2))
    opt = dmuon.Muon(model, rule=of)
    loss_of(model, part(batch(0), *place_of(mesh))).backward()
    opt.step()
    dmuon.Muon(other, rule=to).load_state_dict(opt.state_dict())


@refused("param_groups[0]: expected a group of algorithm 'normuon', got 'muon'")
def a_checkpoint_of_torchs_muon(mesh: Any) -> None:
    model = make_gpt(depth=1)
    loss_of(model, batch(0)).backward()
    matrices = [p for name, p in model.named_parameters() if is_matrix_of_a_block(name, p)]
    by_torch = torch.optim.Muon(matrices, lr=LR)
    by_torch.step()
    opt = dmuon.Muon(dedicated(mesh), rule="normuon")
    state = opt.state_dict()
    (theirs,), ours = by_torch.state_dict()["param_groups"], state["param_groups"][0]
    state["param_groups"][0] = {**theirs, "params": ours["params"]}
    opt.load_state_dict(state)


@pytest.mark.parametrize(REFUSED, refused)
def test_what_does_not_fit_a_rule_is_refused_by_name_on_every_rank(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)


# ---- cautious weight decay in checkpoints ----


def decays(mesh: Any, saved_so: bool, made_so: bool) -> Any:
    """Returns the group's switch after a load."""
    saved, opt = (dmuon.Muon(dedicated(mesh), cautious_weight_decay=value) for value in (saved_so, made_so))
    opt.load_state_dict(saved.state_dict())
    return opt.param_groups[0].get("cautious_weight_decay", False)


@pytest.mark.parametrize(("saved_so", "made_so"), [(True, False), (False, True), (True, True), (False, False)])
def test_cautious_weight_decay_is_loaded(ranks, saved_so, made_so):
    assert ranks.run(decays, (2,), saved_so=saved_so, made_so=made_so) == [saved_so] * 2


def keys_of_muons_group(mesh: Any) -> list[str]:
    return sorted(dmuon.Muon(dedicated(mesh)).state_dict()["param_groups"][0].keys() - {"params"})


def test_groups_of_muon_have_the_keys_of_older_checkpoints(ranks):
    keys = ["adjust_lr_fn", "algorithm", "eps", "lr", "momentum", "nesterov", "ns_coefficients", "ns_dtype", "ns_steps"]
    assert ranks.run(keys_of_muons_group, (2,)) == [[*keys, "skipped_steps", "weight_decay"]] * 2
