"""Attributes that users set on parameters, such as a factor of the learning rate, by which they make groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.nn as nn
from torch.distributed.tensor import DTensor

from dmuon._setup.provisional import ProvisionalTensor
from dmuon._setup.replaced_method import ReplacedMethod

# Set by torch and by dmuon themselves.
_OF_TORCH = {"_is_param", "_fsdp_orig_uid"}
OWN = _OF_TORCH | {"_initial", "_desk", "_name", "_gradient", "_source", "_views", "_identity"}


def give_attributes(parameter: nn.Parameter, attributes: Mapping[str, Any]) -> None:
    """Sets those of the attributes that the parameter lacks."""
    held = vars(parameter)
    for name in attributes.keys() - held.keys() - OWN:
        held[name] = attributes[name]


class Attributes:
    """Gives DTensors of `fully_shard`, and their stand-ins, the attributes of what they replace.

    Between dedicate_params and Muon, `parameters()` and `named_parameters()` give them first, so that groups for Muon
    can be made of what these return.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Notes the parameters that the modules themselves hold."""
        self._noted = {
            module: {name: _noted(p) for name, p in module._parameters.items() if p is not None} for module in modules
        }
        self.handles = [ReplacedMethod(module, "named_parameters", self._named_parameters) for module in self._noted]

    def give(self, modules: Iterable[nn.Module]) -> None:
        """Gives the attributes to the parameters that the modules themselves hold now."""
        for module in modules:
            for name, attributes in self._noted.get(module, {}).items():
                parameter = module._parameters.get(name)
                if isinstance(parameter, DTensor | ProvisionalTensor):
                    give_attributes(parameter, attributes)

    def _named_parameters(self, inner: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recurse = args[1] if len(args) > 1 else kwargs.get("recurse", True)
        self.give(module.modules() if recurse else [module])
        return inner(*args, **kwargs)  # as given: a class's own may take fewer arguments


def _noted(parameter: nn.Parameter) -> dict[str, Any]:
    """Returns the attributes, together with those that the user sets later, if the parameter is a plain tensor.

    A tensor of tensors stores these in attributes too, which must not outlive it.
    """
    if not hasattr(parameter, "__tensor_flatten__"):
        return vars(parameter)
    inner, _ = parameter.__tensor_flatten__()
    return {name: value for name, value in vars(parameter).items() if name not in inner}
