"""A rule in Python of the user's ends with the weights of one process, whose formulas are written by themselves."""

from __future__ import annotations

import functools
import gc
import itertools
import re
import time
from typing import Any

import pytest
import test_rules
import torch
import torch.nn as nn
import users_rules
from checkpoints import assert_near, tensors_of, unlike
from dmuon._setup import user_rules
from models import batch, loss_of, make_gpt, part, weights_of_plain
from pool import RankPool
from refusals import REFUSED, Refusals, dedicated, expect_refusal
from scenario import Session, assert_equal_to_reference, check
from test_faults import THEIRS
from test_rules import MESHES, assert_skipped_and_loaded, ids, reference_of
from torch.distributed.fsdp import fully_shard
from training import AHEAD, KEPT, REPLICATED, dedicate, place_of, shard, weights_of

import dmuon

RULES: list[dict[str, Any]] = [
    {"rule": "hyperball"},
    {"rule": "uneven", "beta2": 0.7},
    {"rule": "uneven", "cautious_weight_decay": True},
]


def trained(s: Session, **muon: Any) -> None:
    test_rules.trained(s, **muon)


def trained_mixture(mesh: Any, **options: Any) -> dict[str, Any]:
    return test_rules.trained_mixture(mesh, **options)


def save(mesh: Any, **options: Any) -> Any:
    return test_rules.save(mesh, **options)


def resume(mesh: Any, **options: Any) -> Any:
    return test_rules.resume(mesh, **options)


@pytest.mark.parametrize(("mesh", "schedule"), [*MESHES, ((1,), KEPT)])
def test_weights_equal_a_single_process(ranks, mesh, schedule):
    check(ranks, trained, mesh, schedule=schedule, rule="hyperball")


# Clipping, accumulation, a gradient that is not finite, save and load, dmuon.verify.
@pytest.mark.parametrize("options", RULES, ids=ids)
@pytest.mark.parametrize(("mesh", "schedule"), MESHES)
def test_each_matrix_of_a_parameter_has_its_rule(ranks, mesh, schedule, options):
    reference = reference_of(options)
    for got in ranks.run(trained_mixture, mesh, schedule=schedule, **options):
        assert_equal_to_reference(*reference, got["weights"][1])
        assert_skipped_and_loaded(got)


@pytest.mark.parametrize("options", RULES[:2], ids=ids)
@pytest.mark.parametrize(("mesh", "schedule"), MESHES)
def test_in_bf16_each_matrix_has_its_rule(ranks, mesh, schedule, options):
    initial, expected = reference_of(options)
    for got in ranks.run(trained_mixture, mesh, schedule=schedule, dtype=torch.bfloat16, **options):
        begin, end = (
            {name: w.float() for name, w in weights.items() if test_rules.matrices_of(name)}
            for weights in got["weights"]
        )
        moved = {name: initial[name] + end[name] - begin[name] for name in end}
        assert_equal_to_reference(initial, {name: expected[name] for name in moved}, moved, 0.3)
        assert_skipped_and_loaded(got)


@pytest.mark.parametrize(
    ("saved_on", "mesh", "options"), [((1, 4), (2, 2), RULES[1]), ((2, 2), (3,), RULES[0]), ((1,), (4, 1), RULES[1])]
)
def test_training_goes_on_from_a_checkpoint_of_another_mesh(ranks, saved_on, mesh, options, tmp_path):
    saved, expected, _ = ranks.run(save, saved_on, directory=str(tmp_path), **options)[0]
    names = tensors_of(saved["optimizer"])
    assert any(name.endswith((".radius", ".largest")) for name in names)
    for at_begin, at_end in ranks.run(resume, mesh, directory=str(tmp_path), **options):
        assert unlike(at_begin, saved) == []
        assert_near(at_end, expected, saved)


def norms_of_matrices(mesh: Any) -> list[tuple[float, float]]:
    model = make_gpt(depth=1)
    before = weights_of_plain(model)
    dedicate(model, mesh, AHEAD)
    shard(model, mesh)
    opt = dmuon.Muon(model, lr=0.1, rule="hyperball")
    for step in range(2):
        loss_of(model, part(batch(step), *place_of(mesh))).backward()
        opt.step()
        opt.zero_grad()
    after = weights_of(model)
    names = [leaf.name for leaf in opt._runtime.leaves]
    assert all(not torch.equal(before[name], after[name]) for name in names)
    return [(float(before[name].norm()), float(after[name].norm())) for name in names]


def test_a_step_on_the_sphere_keeps_each_matrixs_norm(ranks):
    for pairs in ranks.run(norms_of_matrices, (2, 2)):
        assert pairs and all(after == pytest.approx(before, rel=1e-5) for before, after in pairs)


# ---- wrong functions ----


def error_of_a_step(mesh: Any, rule: str, schedule: dict[str, Any]) -> str:
    """Returns the error of the step, or of the next one. Ranks stay, so a collective of FSDP2 would wait for them."""
    model = make_gpt(depth=2)
    dedicate(model, mesh, {"strategy": "rank0", **schedule})
    opt = dmuon.Muon(model, rule=rule)
    try:
        for step in range(2):
            loss_of(model, part(batch(step), *place_of(mesh))).backward()
            opt.step()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("no error")


AT_ONCE = {**AHEAD, "late_updates": False}


@pytest.mark.cpu("the pool synchronises the emulated device, which reports groups that a lost update has aborted")
@pytest.mark.parametrize(
    ("rule", "mesh", "schedule"),
    [*((rule, (2,), AHEAD) for rule in users_rules.WRONG), ("raises", (2, 2), AHEAD), ("raises", (2, 2), AT_ONCE)],
    ids=str,
)
def test_a_wrong_function_is_an_error_on_all_ranks_by_name(rule, mesh, schedule):
    pool = RankPool(torch.Size(mesh).numel())  # whose groups are of no more use
    messages = pool.run(error_of_a_step, mesh, rule=rule, schedule=schedule)
    pool.close()
    for message in messages:
        assert "the update of 'blocks.0." in message
        assert f"Muon.step: rule '{rule}': " in message
        assert users_rules.WRONG[rule] in message


def answers_in_an_update(mesh: Any, schedule: dict[str, Any]) -> list[str]:
    """What a rule's function gets that uses the model and the optimizer which the update belongs to."""
    model = make_gpt(depth=2)
    dedicate(model, mesh, schedule)
    opt, tokens = dmuon.Muon(model, rule="that_asks"), part(batch(0), *place_of(mesh))
    users_rules.ANSWERS.clear()
    reads = [lambda: [of.get("momentum_buffer") for of in opt.state.values()], lambda: dmuon.weight_norms(model)]
    users_rules.QUESTIONS[:] = [*reads, opt.zero_grad, lambda: loss_of(model, tokens)]
    for _ in range(2):
        loss_of(model, tokens).backward()
        opt.step()
    opt.state_dict()  # waits for the last update
    users_rules.QUESTIONS.clear()
    return users_rules.ANSWERS


@pytest.mark.parametrize("schedule", [AHEAD, AT_ONCE], ids=str)
def test_a_function_that_asks_what_waits_for_it_gets_an_error(ranks, schedule):
    for answers in ranks.run(answers_in_an_update, (2, 2), schedule=schedule):
        assert len(answers) >= 4
        for answer in answers:
            assert "a rule of update has used a model of dmuon, or the state of its optimizer" in answer


def trained_again(mesh: Any, ends: str, schedule: dict[str, Any], sharded: bool) -> tuple[list[str], bool]:
    """Trains, fails, and trains once more in the same processes. Returns errors, and whether bits were the same."""
    # All ranks' updates fail, or one's.
    strategy = "rank0" if ends == "one update" else "round_robin"

    def started(rule: str) -> tuple[Any, dmuon.Muon]:
        model = make_gpt(depth=2)
        dedicate(model, mesh, {"strategy": strategy, **schedule})
        if sharded:
            shard(model, mesh)
        return model, dmuon.Muon(model, rule=rule)

    def train(rule: str = "muon") -> dict[str, torch.Tensor]:
        model, opt = started(rule)
        for step in range(2):
            loss_of(model, part(batch(step), *place_of(mesh))).backward()
            opt.step()
            opt.zero_grad()
        if ends == "alone" and errors:
            with torch.no_grad():
                for _ in range(2 if mesh.get_rank() == 0 else 1):
                    loss_of(model, batch(0))
        return weights_of(model)

    errors: list[str] = []
    first = train()
    errors.append("none yet")
    try:
        train("muon" if ends == "alone" else "raises")
    except RuntimeError as error:
        errors = [str(error)]
    again = errors.copy()
    errors.clear()
    if sharded:
        time.sleep(4)  # in which a watch could close what the next training needs
    second = train()
    return again, all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.cpu("on a device the mesh's own groups are aborted too")
@pytest.mark.parametrize(
    ("ends", "mesh", "schedule", "sharded"),
    [
        ("updates", (1,), AHEAD, False),
        ("updates", (2,), AHEAD, False),
        ("updates", (2, 2), AHEAD, False),
        ("updates", (2, 2), AHEAD, True),
        ("updates", (2, 2), AT_ONCE, True),
        ("updates", (2, 2), REPLICATED, False),
        ("updates", (4, 1), AT_ONCE, False),
        ("one update", (2,), AHEAD, False),
        ("one update", (2, 2), REPLICATED, False),
        ("alone", (2,), AHEAD, False),
        ("alone", (2, 2), AHEAD, False),
    ],
)
def test_after_a_failure_on_all_ranks_a_new_model_trains_in_the_same_processes(ends, mesh, schedule, sharded):
    pool = RankPool(torch.Size(mesh).numel())
    results = pool.run(trained_again, mesh, ends=ends, schedule=schedule, sharded=sharded)
    pool.close()
    for (error,), same in results:
        assert same
        assert ("wait for each other in vain" if ends == "alone" else "rule 'raises'") in error


def test_a_process_without_ranks_trains_again_after_a_failure(caplog):
    with pytest.raises(RuntimeError, match="rule 'raises'"):
        one_step_alone("raises")
    one_step_alone("muon")
    assert "replaces groups, because a training has failed: " in caplog.text


def one_step_alone(rule: str) -> None:
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model, late_updates=True, costs="modelled")
    opt = dmuon.Muon(model, rule=rule)
    for step in range(2):
        loss_of(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()
    weights_of(model)


WIDTHS = (8, 12, 16, 20, 24, 28, 32, 36, 40, 8)


def failure_beyond_the_first_units(mesh: Any) -> str:
    """Trains with a rule that raises on each rank at another unit, which few units ahead of it are published."""
    fails = 32 * 36 if mesh.get_rank() == 0 else 28 * 32

    def raises(update: Any, weights: Any, state: Any, options: Any) -> Any:
        if weights.numel() == fails:
            raise KeyError(f"of rank {mesh.get_rank()}")
        return update

    dmuon.rules.register("raises_at_one_matrix", after=raises)
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(*sides, bias=False) for sides in itertools.pairwise(WIDTHS))
    model.forward = lambda x: functools.reduce(lambda y, block: torch.tanh(block(y)), model.blocks, x)
    dmuon.dedicate_params(
        model, mesh, strategy="round_robin", costs="modelled", late_updates=True, lookahead=1, sync_from_rank0=True
    )
    opt = dmuon.Muon(model, rule="raises_at_one_matrix")
    try:
        for _ in range(3):
            model(torch.ones(4, 8)).sum().backward()
            opt.step()
            opt.zero_grad()
            time.sleep(1)  # until updates have failed, before their publications are issued
    except RuntimeError as error:
        return str(error)
    raise AssertionError("no error")


@pytest.mark.cpu("leaves aborted groups")
def test_all_ranks_raise_if_updates_fail_before_later_units_are_issued():
    pool = RankPool(2)
    errors = pool.run(failure_beyond_the_first_units, (2,))
    pool.close()
    for rank, error in enumerate(errors):
        assert f"of rank {rank}" in error


def failure_on_one_rank(mesh: Any, options: dict[str, Any], in_blocks: bool) -> tuple[str, float]:
    """Trains with a rule that raises on rank 1, whose process lives on. Returns the error, and the seconds until it.

    If parameters of AdamW are not in blocks, the others' next wait is for the weights of fully_shard's root group.
    """

    def raises(update: Any, weights: Any, state: Any, options: Any) -> Any:
        if mesh.get_rank() == 1:
            raise KeyError("of rank 1")
        return update

    dmuon.rules.register("raises_on_rank_1", after=raises)
    linears = [nn.Linear(16, 16) for _ in range(3)]
    model = make_gpt(depth=2) if in_blocks else nn.Sequential(nn.Embedding(50, 16), *linears, nn.Linear(16, 50))
    dedicate(model, mesh, options)
    if in_blocks:
        shard(model, mesh)
    else:
        fully_shard(model, mesh=mesh)
    opt = dmuon.Muon(model, rule="raises_on_rank_1")
    begun = time.monotonic()
    try:
        for step in range(2):
            local = part(batch(step), *place_of(mesh))
            (loss_of(model, local) if in_blocks else model(local).square().mean()).backward()
            opt.step()
            opt.zero_grad()
    except RuntimeError as error:
        return str(error), time.monotonic() - begun
    raise AssertionError("no error")


@pytest.mark.cpu("leaves aborted groups")
@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize(
    ("mesh", "options"),
    [((2,), {**AT_ONCE, "strategy": "round_robin"}), ((2, 2), {**AT_ONCE, "strategy": "round_robin"}), ((2,), {})],
)
def test_the_others_raise_beside_fully_shard_though_the_rank_that_failed_lives_on(mesh, options, in_blocks):
    pool = RankPool(torch.Size(mesh).numel())
    answers = pool.run(failure_on_one_rank, mesh, options=options, in_blocks=in_blocks)
    pool.close()
    assert "of rank 1" in answers[1][0]
    for error, seconds in answers:
        assert re.search(f"of rank 1|in vain|{THEIRS}", error), error
        assert seconds < 60, "gloo's timeout is 300 s"


def verified(mesh: Any) -> str:
    model = dedicated(mesh)
    opt = dmuon.Muon(model, rule="raises")
    with pytest.raises(ValueError) as caught:
        dmuon.verify(model, opt)
    return str(caught.value)


def test_verify_raises_on_all_ranks_if_the_function_does(ranks):
    assert all("no such thing" in message for message in ranks.run(verified, (2, 2)))


# ---- threads ----


def freed_during_a_late_update(mesh: Any, rule: str = "slow", collects: bool = True) -> bool:
    model = make_gpt(depth=2)
    dedicate(model, mesh, AHEAD)
    shard(model, mesh)
    opt = dmuon.Muon(model, rule=rule)
    loss_of(model, part(batch(0), *place_of(mesh))).backward()
    opt.step()
    del opt, model
    if collects:
        gc.collect()
    return True


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("of the test")


def leaves_sync_beside_an_update(mesh: Any) -> float:
    """A model's backward has failed. Its messages lie behind a late update of another's, which calls Python."""
    fails, other = make_gpt(), make_gpt()
    dedicate(fails, mesh, KEPT)
    dedicate(other, mesh, {**KEPT, "late_updates": True})
    optimizers = [dmuon.Muon(fails), dmuon.Muon(other, rule="slow")]
    for model, optimizer in zip((fails, other), optimizers, strict=True):
        for step in range(2):
            loss_of(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    loss_of(other, batch(2)).backward()
    fails.blocks[0].register_forward_hook(lambda module, args, output: _Fails.apply(output))
    with pytest.raises(RuntimeError, match="of the test"):
        loss_of(fails, batch(2)).backward()
    optimizers[1].step()
    with dmuon.no_sync(fails):
        return float(loss_of(other, batch(3)))


def test_no_sync_lets_a_function_run(ranks):
    assert len(set(ranks.run(leaves_sync_beside_an_update, (4,)))) == 1


class _Unnamed:
    """An object whose words differ from process to process."""


def test_ranks_take_a_partial_rule_with_an_object_for_equal():
    rule = functools.partial(users_rules.slow, _Unnamed(), scale=_Unnamed())
    dmuon.rules.register("partial_rule", after=rule)
    first = user_rules.fact("partial_rule")
    dmuon.rules.register("another_partial", after=functools.partial(users_rules.slow, _Unnamed(), scale=_Unnamed()))
    assert user_rules.fact("another_partial").removeprefix("rule another_partial") == first.removeprefix(
        "rule partial_rule"
    )


def test_an_engine_is_freed_while_a_function_runs(ranks):
    assert ranks.run(freed_during_a_late_update, (2, 2)) == [True] * 4


def freed_by_the_function(mesh: Any) -> bool:
    freed_during_a_late_update(mesh, rule="collecting", collects=False)
    time.sleep(1)
    return freed_during_a_late_update(mesh, rule="slow")  # which the lane would not come to


def test_a_function_that_frees_its_own_engine_does_not_wait_for_itself(ranks):
    assert ranks.run(freed_by_the_function, (2, 2)) == [True] * 4


# ---- what is refused ----

refused = Refusals()


def another(update, weights, state, options):
    return update


@refused("dmuon.rules.register: name: expected an identifier", name="not one")
@refused("dmuon.rules.register: name: expected an identifier other than ('adam', 'adamw')", name="adamw")
@refused("dmuon.rules.register: name: expected another name than dmuon's own", name="normuon")
@refused(
    "expected one that no other rule has, got 'hyperball' again, which moves weights by users_rules.hyperball, with "
    "states {'radius': (1, 1)}",
    name="hyperball",
)
@refused("got 'slow' again, which changes updates by users_rules.slow", name="slow", state={"v": (1, 1)})
@refused("state: expected identifiers other than", state={"momentum_buffer": (1, 1)})
@refused("state: 'v': expected ('rows' or a number, 'cols' or a number)", state={"v": ("cols", 1)})
@refused("state: 'v': expected ('rows' or a number, 'cols' or a number)", state={"v": (0, 1)})
@refused("state: 'v': expected ('rows' or a number, 'cols' or a number)", state={"v": (1,)})
@refused("dmuon.rules.register: state: expected a dict of names and sizes, got int", state=0)
@refused("expected one function, as after or as move; got after=function, move=int", move=1)
@refused("expected one function, as after or as move; got after=int, move=None", after=1)
def a_registration(mesh: Any, name: str = "another", **options: Any) -> None:
    dmuon.rules.register(name, **{"after": another, **options})


@refused(
    "Muon: cautious_weight_decay: expected False with the rule 'hyperball', which moves the weights itself, got True"
)
def cautious_weight_decay_with_a_move(mesh: Any) -> None:
    dmuon.Muon(dedicated(mesh), rule="hyperball", cautious_weight_decay=True)


@refused("Muon: rule: expected one of ['muon', 'normuon', 'adamuon', ", "got 'of_nobody'")
def a_rule_of_nobody(mesh: Any) -> None:
    dmuon.Muon(dedicated(mesh), rule="of_nobody")


@refused("ranks differ", "'rule': 'of_rank_")
@refused("ranks differ", "with states", name="of_ranks")
def registrations_of_ranks(mesh: Any, name: str = "") -> None:
    rank, _ = place_of(mesh)
    name = name or f"of_rank_{min(rank, 1)}"
    dmuon.rules.register(name, after=another, state={"radius": (1, 1 + min(rank, 1))})
    dmuon.Muon(dedicated(mesh), rule=name)


@refused("expected a group of algorithm 'hyperball', got 'uneven'", of="uneven", to="hyperball")
@refused("expected a group of algorithm 'muon', got 'hyperball'", of="hyperball", to="muon")
@refused("expected a group of algorithm 'uneven', got 'normuon'", of="normuon", to="uneven")
def a_checkpoint_of_another_rule(mesh: Any, of: str, to: str) -> None:
    test_rules.a_checkpoint_of_another_rule(mesh, of, to)


@pytest.mark.parametrize(REFUSED, refused)
def test_what_does_not_fit_is_refused_by_name_on_every_rank(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)
