"""Training goes on from a checkpoint: of another mesh, of another optimizer."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dsd
import torch.nn as nn
from checkpoints import (
    MODELS,
    assert_near,
    dicts_of,
    full_state,
    group_of,
    sharded,
    started,
    train,
    trained_by_torch,
    unlike,
)
from logged import logged
from models import make_gpt
from plans import every_matrix_of
from scenario import LossOf, Session, check, language_loss
from training import AHEAD, KEPT, KEPT_NO_COPY, NO_COPY, place_of, weights_of

import dmuon
from dmuon import _plan

SAVED, MORE = 2, 3  # steps before and after a checkpoint


def save(mesh: Any, directory: str, model: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Saves after some steps and goes on. Returns the whole state then, and at the end."""
    module, opt = started(mesh, MODELS[model](), tied=model == "tied")
    train(mesh, module, opt, range(SAVED))
    saved = full_state(module, opt)
    dcp.save(dicts_of(module, opt), checkpoint_id=directory, **group_of(mesh))
    train(mesh, module, opt, range(SAVED, SAVED + MORE))
    return saved, full_state(module, opt)


def resume(
    mesh: Any, directory: str, model: str, schedule: dict[str, Any], **options: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    module, opt = started(mesh, MODELS[model](), schedule, tied=model == "tied", **options)
    saved = dicts_of(module, opt)
    dcp.load(saved, checkpoint_id=directory, **group_of(mesh))
    dsd.set_state_dict(module, opt, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    at_begin = full_state(module, opt)
    train(mesh, module, opt, range(SAVED, SAVED + MORE))
    return at_begin, full_state(module, opt)


# Each mesh once as the one that saves and once as another that loads: a checkpoint knows no mesh.
@pytest.mark.parametrize(
    ("saved_on", "other"),
    [((1, 4), (2, 2)), ((2, 2), (1, 3)), ((1, 3), (4, 1)), ((4, 1), (1,)), ((1,), (1, 4))],
)
def test_training_goes_on_from_a_checkpoint_of_any_mesh(ranks, saved_on, other, tmp_path):
    saved, expected = ranks.run(save, saved_on, directory=str(tmp_path), model="gpt")[0]
    for mesh in (saved_on, other):
        for at_begin, at_end in ranks.run(resume, mesh, directory=str(tmp_path), model="gpt", schedule=AHEAD):
            assert unlike(at_begin, saved) == []
            if mesh == saved_on:
                assert unlike(at_end, expected) == []
            assert_near(at_end, expected, saved)


@pytest.mark.parametrize(("saved_on", "mesh"), [((2, 2), (1, 3)), ((1, 3), (4,)), ((4,), (1,)), ((1,), (2, 2))])
def test_parameters_that_several_ranks_own_go_on_with_other_owners(ranks, saved_on, mesh, tmp_path):
    """One rank owns them whole; three owners divide them otherwise than four."""
    saved, expected = ranks.run(save, saved_on, directory=str(tmp_path), model="experts")[0]
    for at_begin, at_end in ranks.run(resume, mesh, directory=str(tmp_path), model="experts", schedule=AHEAD):
        assert unlike(at_begin, saved) == []
        assert_near(at_end, expected, saved)


def save_plan_of_single_matrices(mesh: Any, path: str) -> None:
    """A plan in which every matrix has an owner of its own."""
    module, _ = started(mesh, MODELS["experts"]())
    made = dmuon.plan(module).native
    items = [one for item in made.inventory for one in every_matrix_of(item)]
    assert len(items) > len(made.inventory) and any(item.continues for item in made.inventory)
    costs = _plan.modelled_costs(items, "cpu")
    if place_of(mesh)[0] == 0:
        dmuon.Plan(_plan.make_plan(items, made.mesh, "round_robin", costs, _plan.PlanOptions())).save(path)


def test_training_goes_on_bit_by_bit_with_a_plan_that_divides_parameters_otherwise(ranks, tmp_path):
    mesh = (2, 2)
    directory, plan = str(tmp_path / "saved"), str(tmp_path / "plan.json")
    saved, expected = ranks.run(save, mesh, directory=directory, model="experts")[0]
    ranks.run(save_plan_of_single_matrices, mesh, path=plan)
    schedule = {**AHEAD, "plan": plan}
    for at_begin, at_end in ranks.run(resume, mesh, directory=directory, model="experts", schedule=schedule):
        assert unlike(at_begin, saved) == []
        assert unlike(at_end, expected) == []


@pytest.mark.parametrize(
    ("mesh", "model"),
    [
        *(((2, 2), model) for model in ("tied", "bf16", "experts")),
        *(((4,), model) for model in ("frozen", "thin", "bf16 experts")),
    ],
)
def test_what_is_saved_of_any_model_goes_on_bit_by_bit(ranks, mesh, model, tmp_path):
    saved, expected = ranks.run(save, mesh, directory=str(tmp_path), model=model)[0]
    other = {**NO_COPY, "strategy": "xor_layout"}  # owners are others, and add up in the same order
    for at_begin, at_end in ranks.run(resume, mesh, directory=str(tmp_path), model=model, schedule=other):
        assert unlike(at_begin, saved) == []
        assert unlike(at_end, expected) == []


def moved_by_full_dict(mesh: Any, name: str, source: str, target: str, from_rank_0: bool) -> list[str]:
    """Between dmuon, stock FSDP2 and one process, as `torch.save` of the full dict moves it."""

    def made(kind: str, steps: int) -> tuple[nn.Module, Any]:
        if kind != "dmuon":
            return trained_by_torch(mesh if kind == "fsdp2" else None, steps, name)
        model, opt = started(mesh, MODELS[name](), NO_COPY)
        train(mesh, model, opt, range(steps))
        return model, opt

    model, opt = made(source, 3)
    saved = full_state(model, opt)
    model, opt = made(target, 1)
    given = copy.deepcopy(saved) if not from_rank_0 or place_of(mesh)[0] == 0 else {"model": {}, "optimizer": {}}
    # One process needs no options; FSDP2's full_state_dict=True alone takes no hyperparameter that its optimizer lacks.
    options = dsd.StateDictOptions(full_state_dict=target != "one", broadcast_from_rank0=from_rank_0)
    # Not set_state_dict, which takes an empty dict of the other ranks for "optimizer only".
    dsd.set_model_state_dict(model, given["model"], options=options)
    dsd.set_optimizer_state_dict(model, opt, given["optimizer"], options=options)
    return unlike(full_state(model, opt), saved)


# All ways between them; heads, which torch knows nothing of, and a mesh without replicas, in some.
@pytest.mark.parametrize(
    ("mesh", "name", "source", "target", "from_rank_0"),
    [
        ((2, 2), "gpt", "dmuon", "dmuon", False),
        ((2, 2), "gpt", "dmuon", "fsdp2", True),
        ((4,), "gpt", "fsdp2", "dmuon", False),
        ((2, 2), "gpt", "fsdp2", "dmuon", True),
        ((2, 2), "gpt", "one", "dmuon", True),
        ((4,), "heads", "dmuon", "dmuon", True),
        ((2, 2), "heads", "dmuon", "one", False),
        ((2, 2), "heads", "one", "dmuon", False),
    ],
)
def test_a_full_dict_moves_between_dmuon_and_torch(ranks, mesh, name, source, target, from_rank_0):
    found = ranks.run(moved_by_full_dict, mesh, name=name, source=source, target=target, from_rank_0=from_rank_0)
    assert found == [[]] * torch.Size(mesh).numel()


def save_as_hugging_face(mesh: Any, directory: str) -> dict[str, torch.Tensor]:
    model, opt = started(mesh, make_gpt(depth=2))
    train(mesh, model, opt, range(1))
    writer = dcp.HuggingFaceStorageWriter(directory, save_distributed=True)
    dcp.save(dsd.get_model_state_dict(model), storage_writer=writer, **group_of(mesh))
    return weights_of(model)


def load_from_hugging_face(mesh: Any, directory: str) -> dict[str, torch.Tensor]:
    model, _ = started(mesh, make_gpt(seed=5, depth=2))
    weights = dsd.get_model_state_dict(model)
    dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(directory), **group_of(mesh))
    dsd.set_model_state_dict(model, weights)
    return weights_of(model)


def test_weights_are_written_and_read_as_safetensors(ranks, tmp_path):
    saved = ranks.run(save_as_hugging_face, (2, 2), directory=str(tmp_path))[0]
    for loaded in ranks.run(load_from_hugging_face, (4,), directory=str(tmp_path)):
        assert unlike(loaded, saved) == []


def save_in_the_background(mesh: Any, directory: str) -> dict[str, Any]:
    """The saved state is that of the call, whatever training does while it is written."""
    model, opt = started(mesh, make_gpt(depth=2))
    train(mesh, model, opt, range(SAVED))
    saved = full_state(model, opt)
    writing = dcp.async_save(dicts_of(model, opt), checkpoint_id=directory, **group_of(mesh))
    train(mesh, model, opt, range(SAVED, SAVED + 2))
    writing.result()
    return saved


def test_a_save_in_the_background_is_of_the_moment_of_its_call(ranks, tmp_path):
    saved = ranks.run(save_in_the_background, (2, 2), directory=str(tmp_path))[0]
    for at_begin, _ in ranks.run(resume, (4,), directory=str(tmp_path), model="gpt", schedule=AHEAD):
        assert unlike(at_begin, saved) == []


def flattened(mesh: Any, directory: str) -> list[str]:
    """As torchtitan has it: keys of the optimizer's state are one level."""
    options = dsd.StateDictOptions(flatten_optimizer_state_dict=True)
    model, opt = started(mesh, make_gpt(depth=2))
    opt.param_groups[0]["momentum"] = 0.9
    opt.param_groups[0]["skipped_steps"] = 4
    train(mesh, model, opt, range(SAVED))
    saved = full_state(model, opt)
    state = dsd.get_optimizer_state_dict(model, opt, options=options)
    dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=directory, **group_of(mesh))
    model, opt = started(mesh, make_gpt(seed=5, depth=2))
    state = dsd.get_optimizer_state_dict(model, opt, options=options)
    weights = model.state_dict()
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=directory, **group_of(mesh))
    dsd.set_optimizer_state_dict(model, opt, state, options=options)
    model.load_state_dict(weights)
    assert opt.skipped_steps == 4 and opt.param_groups[0]["momentum"] == 0.9
    fresh, made_no_dict = started(mesh, make_gpt(seed=5, depth=2))
    dsd.set_optimizer_state_dict(fresh, made_no_dict, state, options=options)
    fresh.load_state_dict(weights)
    return unlike(full_state(model, opt), saved) + unlike(full_state(fresh, made_no_dict), saved)


def test_a_flattened_state_brings_hyperparameters_and_skipped_steps(ranks, tmp_path):
    assert ranks.run(flattened, (2, 2), directory=str(tmp_path)) == [[]] * 4


def loaded_without_a_block(mesh: Any, frozen: bool) -> tuple[list[str], list[str]]:
    """Loads a state in which a block has none. Returns the matrices without momentum, and what dmuon logs."""
    model, opt = started(mesh, make_gpt(depth=2))
    train(mesh, model, opt, range(SAVED))
    state = dsd.get_optimizer_state_dict(model, opt)
    model, opt = started(mesh, make_gpt(depth=2))
    train(mesh, model, opt, range(1))
    if frozen:
        model.blocks[1].requires_grad_(False)
    else:
        state["state"] = {name: of for name, of in state["state"].items() if not name.startswith("blocks.1")}
    with logged() as messages:
        dsd.set_optimizer_state_dict(model, opt, state, options=dsd.StateDictOptions(strict=frozen))
    model.blocks[1].requires_grad_(True)
    states = full_state(model, opt)["optimizer"]["state"]
    momenta = {name: of["momentum_buffer"] for name, of in states.items() if "momentum_buffer" in of}
    return [name for name, momentum in momenta.items() if not momentum.any()], messages


@pytest.mark.parametrize("frozen", [True, False])
def test_a_matrix_without_a_saved_state_has_no_momentum_of_before(ranks, frozen):
    """torch loads no state of what is frozen."""
    (anew, (message,)), *others = ranks.run(loaded_without_a_block, (2, 2), frozen=frozen)
    assert anew == [f"blocks.1.{name}.weight" for name in ("qkv", "out", "up", "down")]
    assert "no state of 'blocks.1." in message and "begins anew" in message
    assert others == [(anew, [])] * 3


def from_adamw(mesh: Any, directory: str, model: str) -> tuple[list[str], list[str]]:
    """Loads a checkpoint of AdamW. Names what of it is another value now, and the matrices without momentum."""
    stock: Any = sharded(mesh, MODELS[model](), tied=False)
    adamw = torch.optim.AdamW(stock.parameters(), lr=1e-2)
    train(mesh, stock, adamw, range(SAVED))
    dcp.save(dicts_of(stock, adamw), checkpoint_id=directory)
    module, opt = started(mesh, MODELS[model]())
    saved = dicts_of(module, opt)
    state = saved["optimizer"]["state"]
    kept = {name: of for name, of in state.items() if "momentum_buffer" not in of}
    saved["optimizer"]["state"] = kept
    dcp.load({"model": saved["model"], "optimizer": {"state": kept}}, checkpoint_id=directory)
    options = dsd.StateDictOptions(strict=False)
    dsd.set_state_dict(
        module, opt, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"], options=options
    )
    got, theirs = full_state(module, opt), full_state(stock, adamw)
    momenta = {name: of["momentum_buffer"] for name, of in got["optimizer"]["state"].items() if name not in kept}
    for whole in (got, theirs):
        whole["optimizer"] = {name: whole["optimizer"]["state"][name] for name in kept}
    return unlike(got, theirs), [name for name, momentum in momenta.items() if not momentum.any()]


@pytest.mark.parametrize("model", ["gpt", "bf16"])
def test_a_run_of_adamw_goes_on_with_muon(ranks, model, tmp_path):
    for unlike_theirs, anew in ranks.run(from_adamw, (2, 2), directory=str(tmp_path), model=model):
        assert unlike_theirs == [] and len(anew) == 8


def test_a_scheduler_goes_on_where_it_was():
    def made() -> tuple[nn.Module, Any, Any]:
        model, opt = started(None, make_gpt(depth=1))
        return model, opt, torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.5)

    model, opt, scheduler = made()
    for step in range(3):
        train(None, model, opt, range(step, step + 1))
        scheduler.step()
    saved = copy.deepcopy([part.state_dict() for part in (model, opt, scheduler)])
    expected = [group["lr"] for group in opt.param_groups]
    others = made()
    for part, state in zip(others, saved, strict=True):
        part.load_state_dict(state)
    assert [group["lr"] for group in others[1].param_groups] == expected == scheduler.get_last_lr()
    for either in ((model, opt, scheduler), others):
        train(None, *either[:2], range(3, 5))
        either[2].step()
    assert unlike(others[0].state_dict(), model.state_dict()) == []
    assert [group["lr"] for group in others[1].param_groups] == scheduler.get_last_lr()


def saved_in_the_middle(s: Session) -> None:
    """State dicts change nothing, wherever in a step they are taken: weights kept after the forward are freed alone."""
    s.start(make_gpt(depth=2))

    def save() -> None:
        if not s.reference:
            dicts_of(s.model, s.opt)

    def loss_of_rank(step: int) -> LossOf:
        inner = language_loss(step, s.size)

        def loss(model: nn.Module, rank: int) -> torch.Tensor:
            value = inner(model, rank)
            save()
            return value

        return loss

    for step in (0, 2):
        with nullcontext() if s.reference else dmuon.no_sync(s.model):
            s.backward(loss_of_rank(step), scale=0.5)
            save()
        s.backward(loss_of_rank(step + 1), scale=0.5)
        save()
        s.clip(0.5)
        save()
        s.step()


@pytest.mark.parametrize(("mesh", "schedule"), [((2, 2), AHEAD), ((2, 2), KEPT), ((4,), KEPT_NO_COPY)])
def test_a_state_dict_in_the_middle_of_a_step_changes_nothing(ranks, mesh, schedule):
    *notes, expected = check(ranks, saved_in_the_middle, mesh, schedule=schedule)
    for norms in notes:
        assert norms == pytest.approx(expected, rel=1e-4)
