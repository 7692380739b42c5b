"""The asynchronous device as the default one of a rank, with the CPU's random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class RandomNumbersOfTheCpu(TorchFunctionMode):
    """A device's random numbers are the CPU's: a program has the same there, and so the same weights."""

    is_on = True
    _MADE = (torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like)
    _FILLED = (torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.bernoulli_, torch.Tensor.exponential_)

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not self.is_on:
            return func(*args, **kwargs)
        if func in self._MADE and kwargs.get("device") is None:
            args = [value.cpu() if isinstance(value, torch.Tensor) else value for value in args]
            return func(*args, **{**kwargs, "device": "cpu"}).to(self._device_type)
        target = kwargs.get("tensor", args[0] if args else None)
        fills = func in self._FILLED or getattr(func, "__module__", "") == "torch.nn.init"
        if fills and type(target) in _PLAIN and target.device.type == self._device_type:
            values = torch.empty(target.shape, dtype=target.dtype, device="cpu")
            if "tensor" in kwargs:
                kwargs["tensor"] = values
            func(*(values, *args[1:])[: len(args)], **kwargs)
            with torch.no_grad():
                return target.copy_(values)
        return func(*args, **kwargs)


@contextlib.contextmanager
def own_random_numbers() -> Iterator[None]:
    """Inside, or in a function that this decorates, a device draws its own."""
    RandomNumbersOfTheCpu.is_on = False
    try:
        yield
    finally:
        RandomNumbersOfTheCpu.is_on = True


def random_state() -> torch.Tensor:
    """Returns the state of the default device's random numbers."""
    device = torch.get_default_device()
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


@contextlib.contextmanager
def as_default_device(rank: int) -> Iterator[None]:
    """The asynchronous device is where tensors are made that name no device.

    Raises:
        AssertionError: it has seen races.
    """
    import async_device

    async_device.reset()
    async_device.configure(seed=10 * async_device.configure()["seed"] + rank)
    with torch.device("emulated"), RandomNumbersOfTheCpu("emulated"):
        yield
    torch.emulated.synchronize()
    races = async_device.races()
    assert not races, f"{len(races)} races, first: {races[0]}"


def on_default_device(function: Callable[..., Any], mesh: DeviceMesh, kwargs: dict[str, Any]) -> Any:
    """Returns what the function does on this rank, with tensors on the CPU."""
    with as_default_device(mesh.get_rank()):
        result = function(mesh, **kwargs)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), result)
