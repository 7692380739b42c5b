"""A leaf's place: what the module holds in each state, and which changes are refused as bugs."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn as nn
from dmuon._setup.place import Place, State, holds_sentinel, restore_order


class Attribute:
    """A place in a Linear, and every parameter that it may hold."""

    def __init__(self, state: State = State.WHOLE) -> None:
        self.module = nn.Linear(3, 2)
        self.whole = self.module.weight
        self.provisional, self.placeholder, self.weight, self.other = (
            nn.Parameter(torch.zeros(2, 3)) for _ in range(4)
        )
        self.place = Place("block.up", self.module, "weight")
        ways = {State.TAKEN_OUT: [State.TAKEN_OUT], State.PLACEHOLDER: [State.TAKEN_OUT, State.PLACEHOLDER]}
        ways[State.PROVISIONAL] = [State.TAKEN_OUT, State.PROVISIONAL]
        ways[State.WEIGHT] = [*ways[State.PLACEHOLDER], State.WEIGHT]
        for step in ways.get(state, []):
            self.go(step)

    def go(self, state: State) -> None:
        before = self.place.state
        if state is State.PLACEHOLDER and before in (State.TAKEN_OUT, State.PROVISIONAL):
            self.place.put_back(self.placeholder, self.weight)
            return
        {
            State.TAKEN_OUT: self.place.hide_provisional if before is State.PROVISIONAL else self.place.take_out,
            State.PROVISIONAL: lambda: self.place.show_provisional(self.provisional),
            State.PLACEHOLDER: self.place.show_placeholder,
            State.WEIGHT: self.place.show_weight,
            State.WHOLE: lambda: self.place.show_whole(self.whole),
        }[state]()

    def held(self) -> nn.Parameter | None:
        return dict(self.module.named_parameters()).get("weight")

    def expected(self, state: State) -> nn.Parameter | None:
        return {
            State.TAKEN_OUT: None,
            State.PROVISIONAL: self.provisional,
            State.PLACEHOLDER: self.placeholder,
            State.WEIGHT: self.weight,
            State.WHOLE: self.whole,
        }[state]


LEGAL = [
    (State.WHOLE, State.TAKEN_OUT),
    (State.TAKEN_OUT, State.PROVISIONAL),
    (State.PROVISIONAL, State.TAKEN_OUT),
    (State.TAKEN_OUT, State.PLACEHOLDER),
    (State.PROVISIONAL, State.PLACEHOLDER),
    (State.PLACEHOLDER, State.WEIGHT),
    (State.WEIGHT, State.WEIGHT),
    (State.WEIGHT, State.PLACEHOLDER),
    (State.PLACEHOLDER, State.WHOLE),
]


@pytest.mark.parametrize(("before", "after"), list(itertools.product(State, State)), ids=lambda state: state.name)
def test_legal_changes_happen_and_all_others_are_refused_and_change_nothing(before, after):
    found = Attribute(before)
    assert found.held() is found.expected(before)
    if (before, after) in LEGAL:
        found.go(after)
        assert found.place.state is after
        assert found.held() is found.expected(after)
        return
    with pytest.raises(RuntimeError, match=rf"dmuon bug: 'block\.up\.weight'.*{before}.*{after}"):
        found.go(after)
    assert found.place.state is before
    assert found.held() is found.expected(before)


def test_after_full_params_the_placeholder_returns_whatever_the_user_left():
    found = Attribute(State.PLACEHOLDER)
    found.go(State.WHOLE)
    found.module.weight = found.other
    for _ in range(2):
        found.place.hide_whole()
        assert found.held() is found.placeholder
        assert found.place.state is State.PLACEHOLDER


@pytest.mark.parametrize("state", [State.PLACEHOLDER, State.WEIGHT], ids=lambda state: state.name)
def test_what_the_user_has_put_there_is_refused_and_stays(state):
    found = Attribute(state)
    found.module.weight = found.other
    if state is State.WEIGHT:
        found.go(State.PLACEHOLDER)
    with pytest.raises(ValueError, match=r"replaced after dmuon\.Muon"):
        found.go(State.WEIGHT)
    assert found.held() is found.other
    assert found.place.state is State.PLACEHOLDER


@pytest.mark.parametrize("state", [State.TAKEN_OUT, State.PROVISIONAL], ids=lambda state: state.name)
def test_what_the_user_has_put_there_between_the_calls_is_known_and_stays(state):
    found = Attribute(state)
    assert not found.place.is_replaced()
    found.module.weight = found.other
    assert found.place.is_replaced()
    found.place.hide_provisional()
    assert found.held() is found.other


@pytest.mark.parametrize("state", [State.TAKEN_OUT, State.PROVISIONAL], ids=lambda state: state.name)
def test_so_is_what_the_user_has_deleted(state):
    found = Attribute(state)
    del found.module.weight
    assert found.place.is_replaced()


def test_the_weight_is_trained_as_the_placeholder_says():
    found = Attribute(State.PLACEHOLDER)
    found.placeholder.requires_grad_(False)
    found.go(State.WEIGHT)
    assert not found.weight.requires_grad


def test_the_sentinel_follows_casts_is_not_saved_and_goes():
    found = Attribute(State.TAKEN_OUT)
    assert holds_sentinel(found.module)
    found.module.double()
    assert found.place.sentinel().dtype == torch.float64
    assert list(found.module.state_dict()) == ["bias"]
    found.go(State.PLACEHOLDER)
    assert not holds_sentinel(found.module)
    assert not found.module._non_persistent_buffers_set


def test_each_leaf_of_a_module_has_its_own_sentinel():
    module = nn.Module()
    module.a, module.b = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    places = [Place("", module, name) for name in "ab"]
    for place in places:
        place.take_out()
    assert [place.sentinel().dtype for place in places] == [torch.float32, torch.bfloat16]


def test_the_order_of_parameters_is_restored():
    module = nn.MultiheadAttention(4, 2)
    order = list(module._parameters)
    place = Place("", module, "in_proj_weight")
    place.take_out()
    place.put_back(nn.Parameter(torch.zeros(12, 4)), nn.Parameter(torch.zeros(12, 4)))
    assert list(module._parameters) != order
    restore_order(module, [*order, "gone"])
    assert list(module._parameters) == order


def test_names_are_those_of_the_model_without_wrappers():
    wrapped = "1._checkpoint_wrapped_module._orig_mod.up._checkpoint_wrapped_module"
    assert Place(wrapped, nn.Linear(1, 1), "weight").name == "1.up.weight"
    assert Place("", nn.Linear(1, 1), "weight").name == "weight"
