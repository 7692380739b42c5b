"""How ranks agree at set-up: all leave a block well, or all raise, each with what it can know; and what meshes say."""

from __future__ import annotations

import datetime
import time
from typing import Any

import pytest
import torch
import torch.nn as nn
from dmuon._setup import resolve_ranks as ranks_module
from dmuon._setup.agreement import agreement, from_first
from dmuon._setup.ranks import Ranks
from dmuon._setup.resolve_ranks import resolve_ranks
from logged import logged
from torch.distributed.device_mesh import DeviceMesh

import dmuon


def _ranks(mesh: Any, timeout: Any = None) -> Ranks:
    return resolve_ranks(mesh, nn.Linear(1, 1), timeout, lambda data_ranks, here: None)


def _told(error: Exception) -> tuple[str, str, str]:
    return type(error).__name__, str(error), repr(error.__cause__)


def block(mesh: Any, errors: dict[int, Exception], facts: dict[int, list[str]]) -> tuple[str, str, str] | None:
    """What a rank raises (kind, message, cause), None where it leaves well; both arguments are by rank."""
    ranks = _ranks(mesh)
    slot = torch.distributed.get_rank()
    try:
        with agreement(ranks, "test") as lines:
            lines += facts.get(slot, ["the same"])
            if slot in errors:
                raise errors[slot]
    except Exception as error:
        return _told(error)
    return None


def chain(mesh: Any) -> tuple[str, str, str] | None:
    """A ValueError of the block leaves with its own cause, as the same object."""
    ranks = _ranks(mesh)
    own = ValueError("mine")
    try:
        with agreement(ranks, "test"):
            try:
                raise KeyError("deep")
            except KeyError as error:
                raise own from error
    except ValueError as error:
        assert error is own
        return _told(error)
    return None


def first(mesh: Any, fails: bool) -> Any:
    def make() -> int:
        assert torch.distributed.get_rank() == 0
        if fails:
            raise OSError("no file")
        return 7

    try:
        return from_first(_ranks(mesh), make)
    except ValueError as error:
        return str(error)


def agreed_timeout(mesh: Any, timeouts: dict[int, Any]) -> float | None:
    """Seconds that the ranks of a mesh have; `timeouts` by rank."""
    timeout = _ranks(mesh, timeouts.get(torch.distributed.get_rank(), datetime.timedelta(seconds=9))).timeout
    return None if timeout is None else timeout.total_seconds()


MESH = (2, 2)


def test_all_leave_well_where_nothing_is_wrong(ranks):
    assert ranks.run(block, MESH, errors={}, facts={}) == [None] * 4


def test_one_ranks_error_is_raised_by_all_with_its_number(ranks):
    mine, *others = ranks.run(block, MESH, errors={0: ValueError("bad")}, facts={})
    assert mine == ("ValueError", "bad", "None")
    assert others == [("ValueError", "bad (on rank 0)", "None")] * 3


def test_each_rank_names_its_own_error_and_the_others_the_first(ranks):
    errors = {3: ValueError("third"), 1: ValueError("one")}
    found = [message for _, message, _ in ranks.run(block, MESH, errors=errors, facts={})]
    assert found == ["one (on rank 1)", "one", "one (on rank 1)", "third"]


def test_another_kind_of_error_becomes_the_cause_of_a_value_error(ranks):
    found = ranks.run(block, MESH, errors={2: KeyError("k")}, facts={})
    assert found[2] == ("ValueError", "KeyError: 'k'", "KeyError('k')")
    assert found[0] == ("ValueError", "KeyError: 'k' (on rank 2)", "None")


def test_a_value_error_keeps_its_cause(ranks):
    assert ranks.run(chain, MESH) == [("ValueError", "mine", "KeyError('deep')")] * 4


@pytest.mark.parametrize(
    ("lines", "has"),
    [(["the same", "more"], ("nothing", "more")), ([], ("the same", "nothing")), (["other"], ("the same", "other"))],
)
def test_facts_that_differ_are_named_by_all(ranks, lines, has):
    found = {message for _, message, _ in ranks.run(block, MESH, errors={}, facts={2: lines})}
    (message,) = found
    assert message.startswith("test: ranks differ.")
    assert message.endswith(f"Rank 0 has: {has[0]}; rank 2 has: {has[1]}")


def test_facts_do_not_hide_an_error(ranks):
    found = ranks.run(block, MESH, errors={1: ValueError("bad")}, facts={1: []})
    assert [message for _, message, _ in found] == ["bad (on rank 1)", "bad", "bad (on rank 1)", "bad (on rank 1)"]


def test_what_slot_0_makes_or_raises_reaches_all(ranks):
    assert ranks.run(first, MESH, fails=False) == [7] * 4
    assert ranks.run(first, MESH, fails=True) == ["OSError: no file"] * 4


NINE = datetime.timedelta(seconds=9)


@pytest.mark.parametrize("mesh", [(2, 2), (4,)])
@pytest.mark.parametrize(
    ("timeouts", "agreed"),
    [
        ({}, 9.0),
        (dict.fromkeys(range(4)), None),
        ({1: None}, None),
        ({1: 5}, None),
        ({1: NINE * 2}, None),
        (dict.fromkeys(range(4), -NINE), None),
    ],
    ids=str,
)
def test_ranks_take_a_timeout_that_all_have_and_else_none(ranks, mesh, timeouts, agreed):
    assert ranks.run(agreed_timeout, mesh, timeouts=timeouts) == [agreed] * 4


MESH_NAMES = {
    ("replicate", "shard"): None,
    ("shard", "replicate"): "'shard' as replicate and 'replicate' as shard",
    ("dp_shard", "dp_replicate"): "'dp_shard' as replicate and 'dp_replicate' as shard",
    ("dp_replicate", "dp_shard_cp"): None,
    ("dp_replicate", "dp_shard"): None,
    ("replicate",): "'replicate' as shard",
    ("dp",): None,
}


def refused_names(mesh: Any) -> list[str]:
    found = []
    for names in [("dp", "tp"), ("pp", "dp"), ("data", "tensor_parallel")]:
        with pytest.raises(ValueError, match="expected the data-parallel part of the mesh") as error:
            named = DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=names)
            dmuon.dedicate_params(nn.Linear(4, 4), named)
        found.append(str(error.value))
    return found


def test_a_mesh_with_a_dimension_of_another_parallelism_is_refused(ranks):
    for found in ranks.run(refused_names, (2, 2)):
        for name, error in zip(["tp", "pp", "tensor_parallel"], found, strict=True):
            assert error.endswith(f"got one with the dimension '{name}'")


def said_of_names(mesh: Any) -> list[list[str]]:
    """What dmuon logs of meshes with these names."""
    found = []
    for names in MESH_NAMES:
        named = DeviceMesh(mesh.device_type, mesh.mesh if len(names) == 2 else range(4), mesh_dim_names=names)
        with logged() as said:
            dmuon.dedicate_params(nn.Linear(4, 4), named)
        found.append([message for message in said if "by position" in message])
    return found


def test_a_mesh_whose_names_contradict_the_positions_is_warned_of_at_slot_0(ranks):
    first, *others = ranks.run(said_of_names, (2, 2))
    for said, expected in zip(first, MESH_NAMES.values(), strict=True):
        assert len(said) == (expected is not None)
        assert not said or f"by position, as fully_shard takes them: {expected}, which" in said[0]
    assert others == [[[]] * len(MESH_NAMES)] * 3


def said_of_late_ranks(mesh: Any, late: tuple[int, ...]) -> list[str]:
    slow_s, ranks_module._SLOW_S = ranks_module._SLOW_S, 0.3 if late else 60.0
    try:
        with logged() as said:
            torch.distributed.barrier()
            if torch.distributed.get_rank() in late:
                time.sleep(1.5)
            _ranks(mesh)
    finally:
        ranks_module._SLOW_S = slow_s
    return said


@pytest.mark.parametrize("late", [(), (1, 3)])
def test_one_rank_says_on_which_ranks_dedicate_params_has_not_been_called(ranks, late):
    said = ranks.run(said_of_late_ranks, (2, 2), late=late)
    messages = [message for of_rank in said for message in of_rank]
    assert len(messages) == bool(late)
    assert not late or "has not been called on rank 1, 3." in messages[0]
