"""Tensors inside the nested structures that modules take and return."""

from __future__ import annotations

import collections
import copy
import dataclasses
import types
from typing import Any, NamedTuple

import pytest
import torch
from dmuon._running.structures import map_tensors, tensors_requiring_grad
from torch.fx.immutable_collections import immutable_dict

ONE = torch.ones(())


class Pair(NamedTuple):
    x: Any
    count: int


@dataclasses.dataclass
class Record:
    hidden: Any
    name: str = "hidden"


@dataclasses.dataclass(frozen=True)
class Frozen:
    hidden: Any
    others: tuple[Any, ...] = ()


class Output(collections.OrderedDict):
    """A mapping whose entries are attributes too, as a transformers ModelOutput's are."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


Output = dataclasses.dataclass(eq=False)(Output)


class Opaque:
    def __init__(self) -> None:
        self.tensor = ONE


def add(value: Any) -> Any:
    return map_tensors(value, lambda tensor: tensor + 1)


def keep(value: Any) -> Any:
    return map_tensors(value, lambda tensor: tensor)


STRUCTURES = [
    ONE,
    (ONE, 2),
    [None, [ONE]],
    {"x": ONE, "n": 1},
    collections.OrderedDict(b=ONE, a=(ONE,)),
    collections.defaultdict(list, a=[ONE]),
    collections.UserDict(a=ONE),
    Pair(ONE, 1),
    Record({"x": (ONE,)}),
    Frozen(ONE, (ONE, 2)),
    {"deep": [Pair(Record([Frozen(ONE)]), 3)]},
]


@pytest.mark.parametrize("value", STRUCTURES, ids=lambda value: type(value).__name__)
def test_every_tensor_is_changed_and_nothing_else(value):
    given = copy.deepcopy(value)
    changed = add(given)
    assert repr(changed) == repr(value).replace("tensor(1.)", "tensor(2.)")
    assert type(changed) is type(value)
    # Who gave it sees what others write into it; else it stays as it was.
    is_mutable = isinstance(value, list | dict | collections.UserDict | Record)
    assert (changed is given) == is_mutable
    assert repr(given) == repr(changed if is_mutable else value)


@pytest.mark.parametrize("value", STRUCTURES, ids=lambda value: type(value).__name__)
def test_what_does_not_change_is_the_same_object(value):
    assert keep(value) is value


def test_only_the_way_to_a_change_is_copied():
    still, moving = (torch.zeros(()),), (ONE,)
    changed = map_tensors((still, moving), lambda tensor: tensor + 1 if tensor is ONE else tensor)
    assert changed[0] is still
    assert changed[1] == (ONE + 1,) and moving == (ONE,)


def test_a_mapping_that_is_a_dataclass_too_keeps_both_views_in_step():
    value = Output()
    value["logits"] = ONE
    add(value)
    assert value["logits"] == value.logits == ONE + 1


def a_list() -> Any:
    value = [ONE]
    value.append(value)
    return value


def a_dict() -> Any:
    value = {"x": ONE}
    value["self"] = value
    return value


def a_dataclass() -> Any:
    value = Record(None, "parent")
    value.hidden = [ONE, Record(value, "child")]
    return value


def a_frozen_one() -> Any:
    value = Frozen(ONE)
    object.__setattr__(value, "others", (value,))
    return value


def a_tuple_in_a_list() -> Any:
    value = (ONE, [])
    value[1].append(value)
    return value


@pytest.mark.parametrize("make", [a_list, a_dict, a_dataclass, a_frozen_one, a_tuple_in_a_list])
def test_what_refers_to_itself_is_changed_once(make):
    changed = add(make())
    assert repr(changed).count("tensor(2.)") == repr(make()).count("tensor(1.)")


def test_a_tuple_in_a_list_of_its_own_stays_there():
    changed = add(a_tuple_in_a_list())
    assert changed[1][0] is changed


def test_what_is_shared_is_changed_once_and_stays_shared():
    value = (ONE,)
    for _ in range(10):
        value = Record((value, [value]))
    seen = []
    map_tensors(value, lambda tensor: seen.append(tensor) or tensor + 1)
    assert len(seen) == 1
    first, (second,) = value.hidden
    assert first is second


@pytest.mark.parametrize("make", [types.MappingProxyType, immutable_dict])
def test_a_mapping_that_nobody_can_write_into_is_copied(make):
    value = make({"x": ONE, "n": 1})
    assert add(value) == {"x": ONE + 1, "n": 1}
    assert value["x"] == ONE


class Own(tuple):
    """A tuple that is made in a way of its own."""

    def __new__(cls, x: Any, y: Any) -> Own:
        return super().__new__(cls, (x, y))


@dataclasses.dataclass
class Unset:
    later: Any = dataclasses.field(init=False)


@dataclasses.dataclass(eq=False)
class Module(torch.nn.Module):
    """Its field is a submodule, which is no attribute of the object's own."""

    layer: torch.nn.Module

    def __new__(cls, *_: Any) -> Module:
        made = super().__new__(cls)
        torch.nn.Module.__init__(made)
        return made


class Gathers(tuple):
    """A tuple of what it is called with."""

    def __new__(cls, *items: Any) -> Gathers:
        return super().__new__(cls, items)


OTHERS = [None, 3, "text", {1, 2}, Opaque(), Record, types.SimpleNamespace(x=ONE)]
OWN = [Own(ONE, 1), Gathers(ONE, 1), Unset(), Module(torch.nn.Linear(1, 1))]


@pytest.mark.parametrize("value", [*OTHERS, *OWN], ids=lambda value: getattr(value, "__name__", type(value).__name__))
def test_other_objects_pass_through(value):
    assert add(value) is value


@pytest.mark.parametrize("value", [(), [], {}, torch.Size([2, 3])], ids=repr)
def test_so_does_what_is_empty_or_holds_no_tensor(value):
    assert add(value) is value


def test_torchs_own_tuples_keep_their_type():
    changed = add(torch.tensor([1.0, 5.0]).max(0))
    assert type(changed) is torch.return_types.max
    assert (changed.values, changed.indices) == (torch.tensor(6.0), torch.tensor(2))


def test_tensors_that_require_grad_come_once_and_in_order():
    first, second, third = (torch.zeros((), requires_grad=True) for _ in range(3))
    value = {"a": [second, torch.zeros(())], "b": Frozen(first, (second, Pair(third, 1), Opaque()))}
    found = tensors_requiring_grad(value)
    assert [id(tensor) for tensor in found] == [id(second), id(first), id(third)]


def test_without_tensors_that_require_grad_there_are_none():
    assert tensors_requiring_grad({"a": [torch.zeros(())], "b": None}) == []
