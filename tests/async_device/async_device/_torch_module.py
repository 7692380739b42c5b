"""`torch.emulated`: the functions that PyTorch and FSDP2 call in a device's module."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch

from . import _extension

_native = _extension.load()
_NAME = "emulated"


def _index(device: Any = None) -> int:
    if device is None:
        return _native.current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return _native.current_device() if index is None else index


def _device(device: Any = None) -> torch.device:
    return torch.device(_NAME, _index(device))


class Stream(torch.Stream):
    """Makes a stream of the device's pool."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, _device(device), priority=priority)


class Event(torch.Event):
    """A point in a stream."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(cls, _NAME, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


class device:  # noqa: N801 - the name that PyTorch looks for
    """Makes a device the current one in a `with`."""

    def __init__(self, index: Any) -> None:
        self._index = -1 if index is None else _index(index)

    def __enter__(self) -> None:
        self._before = _native.current_device()
        if self._index >= 0:
            _native.set_device(self._index)

    def __exit__(self, *_: object) -> None:
        _native.set_device(self._before)


def _default_stream(device: Any = None) -> torch.Stream:
    kind = torch._C._autograd.DeviceType.PrivateUse1
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=kind)


def _seed_all(seed: int) -> None:
    for generator in torch.emulated.default_generators:
        generator.manual_seed(seed)


def _peak_bytes(device: Any = None) -> int:
    return max(counts["peak_bytes"] for counts in _native.statistics().values())


def _make() -> types.ModuleType:
    module = types.ModuleType(f"torch.{_NAME}")
    generators: list[torch.Generator] = []
    functions = {
        "Stream": Stream,
        "Event": Event,
        "device": device,
        "default_generators": generators,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "empty_cache": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": _native.device_count,
        "current_device": _native.current_device,
        "set_device": lambda device: _native.set_device(_index(device)),
        "get_device_name": lambda device=None: "emulated accelerator",
        "current_stream": lambda device=None: torch.accelerator.current_stream(_device(device)),
        "default_stream": _default_stream,
        "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
        "set_stream": lambda stream: None if stream is None else torch.accelerator.set_stream(stream),
        "synchronize": lambda device=None: torch.accelerator.synchronize(_device(device)),
        "manual_seed": _seed_all,
        "manual_seed_all": _seed_all,
        "get_rng_state": lambda device=None: generators[_index(device)].get_state(),
        "set_rng_state": lambda state, device=None: generators[_index(device)].set_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda *_, **__: True,
        "memory_allocated": lambda device=None: _native.live_bytes(),
        "max_memory_allocated": _peak_bytes,
    }
    for name, value in functions.items():
        setattr(module, name, value)
    return module


def register() -> None:
    """Names the device type, and makes `torch.emulated` and the methods of tensors, modules and storages."""
    torch.utils.rename_privateuse1_backend(_NAME)
    module = _make()
    torch._register_device_module(_NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    module.default_generators.extend(_native.default_generator(i) for i in range(_native.device_count()))
