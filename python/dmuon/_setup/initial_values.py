"""Where a parameter's values are between to_empty and Muon, and what ranks must have done alike to it."""

from __future__ import annotations

import abc
import hashlib
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from dmuon._setup.checksum import checksum


class InitialValues(abc.ABC):
    """Of one parameter of a model that was built on the meta device."""

    def __init__(self, name: str, layout: torch.Tensor) -> None:
        """`layout`: its shape, strides and dtype."""
        self.name = name
        # The whole tensor where this rank has it, else on the meta device.
        self.base = torch.empty_strided(layout.size(), layout.stride(), dtype=layout.dtype, device="meta")
        self.is_written = False
        self._history = hashlib.sha256()

    @property
    @abc.abstractmethod
    def can_be_read(self) -> bool:
        """Whether `open` can bring the values to all ranks."""

    @abc.abstractmethod
    def open(self, device: torch.device, with_values: bool) -> None:
        """From now on this rank has the whole tensor, as all others have."""

    @abc.abstractmethod
    def close(self) -> None:
        """From now on it keeps what it is to keep."""

    def note(self, func: Any, arguments: list[Any], device: torch.device, is_new: bool) -> None:
        """`func` changes values now; `is_new`: all of them, whatever they were."""
        self.is_written = True
        if is_new:
            self._history = hashlib.sha256()
        generator = next((argument for argument in arguments if isinstance(argument, torch.Generator)), None)
        state = random_state(generator, device) if is_random(func) else b""
        told = [_told(argument) for argument in arguments if argument is not generator]
        self._history.update(state + f"{func}{told}".encode())

    def fact(self) -> str:
        """Equal on all ranks if these have done the same to it, from the same random states."""
        digest = self._history.hexdigest()[:12] if self.is_written else "none"
        return f"initial values of '{self.name}', by this rank's seed and operations: {digest}"


class AtHolder(InitialValues):
    """A leaf that one rank keeps."""

    can_be_read = False

    def __init__(self, name: str, layout: torch.Tensor, holder: int, here: int) -> None:
        """`holder`: the global rank that keeps them; `here`: this one."""
        super().__init__(name, layout)
        self.holder, self._is_here = holder, holder == here

    def open(self, device: torch.device, with_values: bool) -> None:
        """Without values: they are at the holder alone."""
        assert not with_values
        if self.base.is_meta:
            self.base = torch.empty_like(self.base, device=device)

    def close(self) -> None:
        """Gives up what is not to be kept here."""
        if not self._is_here:
            self.base = self.base.to("meta")

    def move(self, device: torch.device) -> None:
        """The module of the leaf has a device, or another one."""
        if not self.base.is_meta:
            self.base = self.base.to(device)
        elif self._is_here:
            self.base = torch.empty_like(self.base, device=device)


class InShards(InitialValues):
    """What `fully_shard` manages, of which every rank keeps its shard."""

    can_be_read = True

    def __init__(self, name: str, sharded: DTensor, has_values: bool) -> None:
        """`sharded`: with memory; `has_values`: it was not on the meta device."""
        super().__init__(name, sharded)
        self._sharded, self.is_written = sharded, has_values

    def open(self, device: torch.device, with_values: bool) -> None:
        """Collective where values are asked for."""
        if with_values:
            self.base = self._sharded.full_tensor().detach().clone()
        else:
            self.base = torch.empty_like(self.base, device=device)

    def close(self) -> None:
        """Cuts this rank's shard from its own values, without communication."""
        sharded: Any = self._sharded.detach()
        whole = distribute_tensor(self.base, sharded.device_mesh, sharded.placements, src_data_rank=None)
        sharded.to_local().copy_(whole.to_local())
        self.base = self.base.to("meta")


def is_random(func: Any) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def random_state(generator: torch.Generator | None, device: torch.device) -> bytes:
    """The state from which numbers are drawn next."""
    if generator is not None:
        state = generator.get_state()
    elif device.type == "cpu":
        state = torch.get_rng_state()
    else:
        state = torch.get_device_module(device).get_rng_state(device)
    return state.numpy().tobytes()


def _told(argument: Any) -> Any:
    """What of an argument is the same on all ranks; of a tensor its bits."""
    if isinstance(argument, torch.Tensor):
        return tuple(argument.shape), int(checksum(argument))
    return repr(argument)
