"""Finds the ranks of a mesh: hosts, and the ranks of tensor parallelism, by messages in the user's own groups."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
import os
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from dmuon._setup.agreement import exchange
from dmuon._setup.groups import are_over, forget
from dmuon._setup.ranks import Ranks, backends, rows_of
from dmuon._setup.shown import listed

logger = logging.getLogger("dmuon")

_SLOW_S = 10.0  # as the engine's own watch
_RANKS_NAMED = 8
_num_calls: Counter[tuple[int, ...]] = Counter()  # calls of dedicate_params, by the ranks of the mesh


def resolve_ranks(
    mesh: DeviceMesh | None,
    model: nn.Module,
    timeout: datetime.timedelta | None,
    find_tensor_mesh: Callable[[Collection[int], int], DeviceMesh | None],
) -> Ranks:
    """Returns the ranks of `mesh`. Collective over the mesh, and over the ranks of tensor parallelism.

    If an earlier training on these ranks has failed on any of them, all forget its groups.

    A 1-D mesh that spans hosts (LOCAL_WORLD_SIZE) gets a row for each host, so that weights and gradients travel in two
    stages. Bad arguments do not raise here, so that all ranks can refuse them together (`check_mesh`, `check_timeout`,
    `agreement`). A mesh of more than two dimensions is flattened. A bad timeout, or one that differs between ranks,
    becomes None.

    Args:
        mesh: None means all ranks of the default process group, or this process alone if there is none.
        model: its device is the device of the ranks if `mesh` is None.
        timeout: the timeout of dmuon's process groups.
        find_tensor_mesh: returns the mesh of tensor parallelism, given the ranks of `mesh` and this one.

    Raises:
        ValueError: `mesh` is no mesh, or does not hold this rank. Without a common mesh no other rank can know.
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ValueError(f"dedicate_params: mesh: expected a DeviceMesh or None, got {type(mesh).__name__}")
    if mesh is None and not dist.is_initialized():
        if are_over([0]):
            forget([0])
        return Ranks(((0,),), 0, _device_type(model), None, ((0,),))
    mesh_rows: tuple[tuple[int, ...], ...]
    groups: tuple[dist.ProcessGroup, ...]
    if mesh is None:
        mesh_rows = (tuple(range(dist.get_world_size())),)
        device_type, groups = _device_type(model), (dist.distributed_c10d._get_default_group(),)
    else:
        device_type, table = mesh.device_type, mesh.mesh
        mesh_rows = rows_of(table if table.ndim <= 2 else table.flatten())
        groups = tuple(mesh.get_group(dim) for dim in range(table.ndim))
    device = device_of(model, device_type)
    here = dist.get_rank()
    rows = tuple(sorted(tuple(sorted(row)) for row in mesh_rows))
    everyone = [rank for row in rows for rank in row]
    if here not in everyone:
        raise ValueError(f"dedicate_params: mesh: expected a mesh that holds this rank ({here}), got {mesh_rows}")
    tensor_mesh = find_tensor_mesh(everyone, here)
    slots: tuple[tuple[int, ...], ...] = ()
    with _watched(tuple(everyone)):
        tensor_size = 1 if tensor_mesh is None else tensor_mesh.size()
        numbers = _local_world_size(), _milliseconds(timeout), tensor_size, are_over(everyone)
        local_sizes, timeouts, tensor_sizes, (_, any_over) = _extremes(groups, device, numbers)
        if len(rows) == 1 and local_sizes[0] == local_sizes[1]:
            rows = _hosts(rows[0], local_sizes[0])
        if tensor_mesh is not None and 1 < tensor_sizes[0] == tensor_sizes[1]:
            with _watched(tuple(sorted(tensor_mesh.mesh.flatten().tolist()))):
                slots = _slots(tensor_mesh, everyone, device)
                # The training may have failed on the meshes of other slices alone.
                ((_, any_over),) = _extremes([tensor_mesh.get_group()], device, [any_over])
    if any_over:
        forget(everyone)
    agreed = datetime.timedelta(milliseconds=timeouts[0]) if 0 < timeouts[0] == timeouts[1] else None
    slot, index = everyone.index(here), device.index
    return Ranks(rows, slot, device_type, agreed, mesh_rows, groups, tensor_mesh, slots, index)


def _slots(mesh: DeviceMesh, by_slot: Sequence[int], device: torch.device) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks of each slot, from what each rank of this slot knows of its own slices. Collective over `mesh`.

    Empty, which all ranks will refuse, if they do not know of equally many slots.
    """
    group, own = mesh.get_group(), mesh.mesh.flatten().tolist()
    ((least, most),) = _extremes([group], device, [len(by_slot)])
    if least != most:
        return ()
    words = torch.tensor(by_slot, device=device)
    found = [torch.empty_like(words) for _ in own]
    dist.all_gather(found, words, group=group)
    by_rank = dict(zip(sorted(own), (one.tolist() for one in found), strict=True))  # groups count by global rank
    return tuple(zip(*(by_rank[rank] for rank in own), strict=True))


def check_timeout(timeout: object) -> None:
    """Raises a ValueError, unless it is a positive datetime.timedelta or None."""
    if _milliseconds(timeout) < 0:
        raise ValueError(f"dedicate_params: timeout: expected a positive datetime.timedelta or None, got {timeout!r}")


def _milliseconds(timeout: object) -> int:
    """Returns milliseconds: 0 for None, -1 for a bad timeout."""
    if timeout is None:
        return 0
    if not isinstance(timeout, datetime.timedelta) or timeout.total_seconds() <= 0:
        return -1
    return max(1, timeout // datetime.timedelta(milliseconds=1))


def _extremes(
    groups: Sequence[dist.ProcessGroup], device: torch.device, numbers: Sequence[int]
) -> list[tuple[int, int]]:
    """Returns the least and the largest of each number over all ranks. `groups` has one for each mesh dimension."""
    words = torch.tensor([*numbers, *(-number for number in numbers)], device=device)
    for group in groups:
        with exchange():
            dist.all_reduce(words, op=dist.ReduceOp.MAX, group=group)
    largest, minus_least = words.view(2, -1).tolist()
    return [(-least, most) for most, least in zip(largest, minus_least, strict=True)]


@contextlib.contextmanager
def _watched(everyone: tuple[int, ...]) -> Iterator[None]:
    """Lets one waiting rank warn of ranks that have not come. Before dmuon has groups, the engine's Watch cannot."""
    store, here = dist.distributed_c10d._get_default_store(), dist.get_rank()
    _num_calls[everyone] += 1
    key = f"dmuon: dedicate_params {zlib.crc32(repr(everyone).encode())} {_num_calls[everyone]}"
    try:
        store.set(f"{key} {here}", "here")
    except RuntimeError:  # the store of torch's fake process groups stores nothing
        yield
        return

    def warn() -> None:
        # A connection of its own: a group's first collective may hold the other connection until all ranks have come.
        own = store.clone() if hasattr(store, "clone") else store
        if own.check([f"{key} {rank}" for rank in everyone]) or own.add(f"{key} warned", 1) != 1:
            return
        if missing := [rank for rank in everyone if not own.check([f"{key} {rank}"])]:
            logger.warning(
                "dmuon: dedicate_params on rank %d has waited for %g s, and waits until the timeout of your process "
                "group: it is collective over its mesh, and has not been called on rank %s.",
                here,
                _SLOW_S,
                listed([*map(str, missing)], _RANKS_NAMED),
            )

    timer = threading.Timer(_SLOW_S, warn)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _hosts(row: tuple[int, ...], local_size: int) -> tuple[tuple[int, ...], ...]:
    """Divides a row by host if each host has equally many ranks, more than one, which follow each other."""
    if local_size <= 1:
        return (row,)
    blocks = tuple(tuple(block) for _, block in itertools.groupby(row, lambda rank: rank // local_size))
    together = len({block[0] // local_size for block in blocks}) == len(blocks)  # no host comes twice
    even = {len(block) for block in blocks} == {len(row) // len(blocks)}
    return blocks if together and even and len(blocks[0]) > 1 else (row,)


def _local_world_size() -> int:
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(value) if value.isdigit() else 0


def device_of(model: nn.Module, device_type: str) -> torch.device:
    """Returns the device of this type on which the model lies; before, that of `init_process_group(device_id=)`.

    Without both, no index: the current device.
    """
    found = [p.device for p in (model.parameters() if isinstance(model, nn.Module) else ())]
    if dist.is_initialized() and (bound := dist.distributed_c10d._get_default_group().bound_device_id) is not None:
        found.append(bound)
    return next((device for device in found if device.type == device_type), torch.device(device_type))


def _device_type(model: nn.Module) -> str:
    """Returns the device type on which the model lies or will lie.

    A model on the CPU or the meta device will be on the accelerator if the default process group has a backend of its
    own for it, as `fully_shard` assumes too. `Muon` refuses a model that stayed elsewhere.
    """
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    if first is not None and first.device.type not in ("cpu", "meta"):
        return first.device.type
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not dist.is_initialized():
        return "cpu"
    served = backends()
    own = served.get(accelerator.type)
    return accelerator.type if own is not None and own != served.get("cpu") else "cpu"
