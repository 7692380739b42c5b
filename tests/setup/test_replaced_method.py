"""A module's method is replaced for a while; what the module had is called, and comes back."""

from __future__ import annotations

import types
from typing import Any

import torch.nn as nn
from dmuon._setup.replaced_method import ReplacedMethod

import dmuon


def prefixed(prefix: str) -> Any:
    return lambda inner, module, *args: f"{prefix} {inner(*args)}"


class Named(nn.Module):
    def extra_repr(self) -> str:
        return "class"


def test_the_classs_method_comes_back():
    module = Named()
    handle = ReplacedMethod(module, "extra_repr", prefixed("a"))
    assert module.extra_repr() == "a class"
    handle.remove()
    assert module.extra_repr() == "class" and "extra_repr" not in vars(module)


def test_the_modules_own_method_is_called_and_comes_back():
    module = Named()
    own = module.extra_repr = types.MethodType(lambda self: f"own of {type(self).__name__}", module)
    handle = ReplacedMethod(module, "extra_repr", prefixed("a"))
    assert module.extra_repr() == "a own of Named"
    handle.remove()
    assert vars(module)["extra_repr"] is own


def test_methods_that_were_replaced_twice_end_in_any_order():
    module = Named()
    first, second = (ReplacedMethod(module, "extra_repr", prefixed(name)) for name in "ab")
    assert module.extra_repr() == "b a class"
    first.remove()
    assert module.extra_repr() == "b class"
    second.remove()
    assert module.extra_repr() == "class" and "extra_repr" not in vars(module)


class Fewer(nn.Linear):
    """A class whose methods take less than nn.Module's do."""

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:
        return super().named_parameters(prefix, recurse)

    def requires_grad_(self, *, mode: bool = True) -> Any:
        return super().requires_grad_(mode)

    def _apply(self, change: Any) -> Any:
        return super()._apply(change)


def test_methods_of_a_class_take_what_they_took_before():
    model = nn.Sequential(Fewer(8, 8), Fewer(8, 8))
    calls = []
    own = model[1].register_parameter = types.MethodType(lambda self, *args: calls.append(args), model[1])
    dmuon.dedicate_params(model)
    assert len(list(model[0].named_parameters())) == len(list(model.parameters())) / 2
    model[0].requires_grad_(mode=True)
    model[1].register_parameter("extra", None)
    assert calls == [("extra", None)]
    dmuon.Muon(model)
    assert model.float() is model
    assert vars(model[1])["register_parameter"] is own and "named_parameters" not in vars(model[0])
