"""The place of a parameter's values between to_empty and Muon, and the history that all ranks must share."""

from __future__ import annotations

import abc
import hashlib
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dmuon._setup.checksum import checksum
from dmuon._setup.slices import cut_as


class InitialValues(abc.ABC):
    """The values of one parameter of a model that was built on the meta device."""

    def __init__(self, name: str, layout: torch.Tensor) -> None:
        """`layout` has the parameter's shape, strides and dtype."""
        self.name = name
        # The whole tensor if this rank has it, else one on the meta device.
        self.base = torch.empty_strided(layout.size(), layout.stride(), dtype=layout.dtype, device="meta")
        self.is_written = False
        self._history = hashlib.sha256()

    @property
    @abc.abstractmethod
    def can_be_read(self) -> bool:
        """True if `open` can bring the values to all ranks."""

    @abc.abstractmethod
    def open(self, device: torch.device, with_values: bool) -> None:
        """Makes the tensor whole on this rank, as on all others."""

    @abc.abstractmethod
    def close(self) -> None:
        """Frees all values that this rank does not store until Muon."""

    def note(self, func: Any, arguments: list[Any], device: torch.device, is_new: bool) -> None:
        """Adds an operation that changes values to the history. `is_new`: True if it overwrites all of them."""
        self.is_written = True
        if is_new:
            self._history = hashlib.sha256()
        generator = next((argument for argument in arguments if isinstance(argument, torch.Generator)), None)
        state = random_state(generator, device) if is_random(func) else b""
        common = [_common(argument) for argument in arguments if argument is not generator]
        self._history.update(state + f"{func}{common}".encode())

    def fact(self) -> str:
        """Returns a line that is equal on all ranks if they ran the same operations from the same random states."""
        digest = self._history.hexdigest()[:12] if self.is_written else "none"
        return f"initial values of '{self.name}', by this rank's seed and operations: {digest}"


class AtHolder(InitialValues):
    """The values of a leaf, which one rank stores: the holder."""

    can_be_read = False

    def __init__(self, name: str, layout: torch.Tensor, holder: int, here: int) -> None:
        """`holder` and `here`: the global ranks of the holder and of this process."""
        super().__init__(name, layout)
        self.holder, self._is_here = holder, holder == here

    def open(self, device: torch.device, with_values: bool) -> None:
        """Allocates the tensor. Values cannot come: the holder alone has them."""
        assert not with_values
        if self.base.is_meta:
            self.base = torch.empty_like(self.base, device=device)

    def close(self) -> None:
        """Frees the tensor unless this rank is the holder."""
        if not self._is_here:
            self.base = self.base.to("meta")

    def move(self, device: torch.device) -> None:
        """Follows the leaf's module to a device."""
        if not self.base.is_meta:
            self.base = self.base.to(device)
        elif self._is_here:
            self.base = torch.empty_like(self.base, device=device)


class InShards(InitialValues):
    """The values of a parameter that `fully_shard` manages: every rank stores its shard."""

    can_be_read = True

    def __init__(self, name: str, sharded: DTensor, has_values: bool) -> None:
        """`sharded` has memory. `has_values`: True if it was not on the meta device."""
        super().__init__(name, sharded)
        self._sharded, self.is_written = sharded, has_values

    def open(self, device: torch.device, with_values: bool) -> None:
        """Collective if values are to come."""
        if with_values:
            self.base = self._sharded.full_tensor().detach().clone()
        else:
            self.base = torch.empty_like(self.base, device=device)

    def close(self) -> None:
        """Cuts this rank's shard from its own values, without communication."""
        sharded: Any = self._sharded.detach()
        sharded.to_local().copy_(cut_as(self.base, sharded))
        self.base = self.base.to("meta")


def is_random(func: Any) -> bool:
    """True if an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def random_state(generator: torch.Generator | None, device: torch.device) -> bytes:
    """Returns the state of the generator that draws the next numbers."""
    if generator is not None:
        state = generator.get_state()
    elif device.type == "cpu":
        state = torch.get_rng_state()
    else:
        state = torch.get_device_module(device).get_rng_state(device)
    return state.numpy().tobytes()


def _common(argument: Any) -> Any:
    """Returns a description of an argument that is equal on all ranks: for a tensor, by its bits."""
    if isinstance(argument, torch.Tensor):
        return tuple(argument.shape), int(checksum(argument))
    return repr(argument)
