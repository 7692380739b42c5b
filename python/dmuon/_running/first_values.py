"""Copies the values that owners begin with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dmuon._running.runtime import Runtime
from dmuon._saving.owned_shards import MASTER
from dmuon._setup.dedication import Dedication
from dmuon._setup.groups import verdict_group
from dmuon._setup.meta_start import MetaStart


class FirstValues:
    """Copies masters to their owners from where the values are: on every rank, in its shards, or at one rank.

        with agreement(ranks, "Muon"):
            first_values = FirstValues(runtime, dedication)
        first_values.copy()
        with agreement(ranks, "Muon"):
            first_values.raise_failure()

    A rank that fails still sends and receives every message, with meaningless values, so that no peer waits for it.
    Messages travel over the host, one part of a leaf at a time.
    """

    def __init__(self, runtime: Runtime, dedication: Dedication) -> None:
        """Allocates memory for the largest message, so that an exchange cannot fail for lack of it."""
        self._runtime, self._meta_start = runtime, dedication.meta_start
        self._syncs = dedication.across_ranks.sync_from_rank0
        self._group = verdict_group(runtime.ranks)
        travelling = [leaf.parameter for leaf in runtime.leaves] + runtime.plain_parameters
        most = max((tensor.numel() * tensor.element_size() for tensor in travelling), default=0)
        self._spare = torch.empty(most if self._syncs or self._meta_start else 0, dtype=torch.uint8, device="cpu")
        self._failure: Exception | None = None

    def copy(self) -> None:
        """Fills all masters. Collective. A leaf without values is zero, and must be loaded before the first forward."""
        runtime = self._runtime
        initial = {} if self._meta_start is None else self._meta_start.values
        sharded = {
            index: leaf.parameter
            for index, leaf in enumerate(runtime.leaves)
            if index not in initial and leaf.num_columns == 1 and isinstance(leaf.parameter, DTensor)
        }
        runtime.shards.write(sharded, MASTER)
        for index, leaf in enumerate(runtime.leaves):
            if self._meta_start is not None and index in initial:
                self._copy_initial_values(index, self._meta_start)
            elif leaf.num_columns > 1:
                self._copy_experts(index)
            elif index in sharded:
                pass  # copied above
            elif self._syncs:
                self._copy_from(index, runtime.ranks.everyone[0], leaf.parameter.detach())
            else:
                with self._attempt():
                    runtime.engine.scatter(index, MASTER, leaf.parameter.detach())
            leaf.parameter = runtime.placeholders[index]  # from here on only the owner has the values
        if self._syncs and self._group is not None:
            for parameter in runtime.plain_parameters:
                self._broadcast(parameter.detach())

    def raise_failure(self) -> None:
        """Raises this rank's first error, if it had one."""
        if self._failure is not None:
            raise self._failure

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        """Stores the block's error instead of raising it."""
        try:
            yield
        except Exception as error:  # `raise_failure` raises it
            self._failure = self._failure or error

    def _read(self, tensor: torch.Tensor, travels: bool) -> torch.Tensor:
        """Returns the values, flat, and on the host if they travel. After an error returns meaningless values."""
        with self._attempt():
            flat = tensor.reshape(-1)
            return flat.cpu().contiguous() if travels else flat
        return self._spare_of(tensor.numel(), tensor.dtype)

    def _spare_of(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._spare[: numel * dtype.itemsize].view(dtype)

    def _send(self, values: torch.Tensor, holder: int, receivers: Sequence[int]) -> None:
        """Sends `values` from one global rank to others, which receive into theirs."""
        here = self._runtime.ranks.here
        for receiver in receivers:
            if here == holder != receiver:
                dist.send(values, receiver, group=self._group)
            elif here == receiver != holder:
                dist.recv(values, holder, group=self._group)

    def _copy_initial_values(self, index: int, meta_start: MetaStart) -> None:
        """Copies from the rank that has initialised the leaf, if one has."""
        values, own = meta_start.values[index], meta_start.taken(index)
        if values.is_written:
            self._copy_from(index, values.holder, own)
            return
        self._runtime.shards.without_values.add(index)
        with self._attempt():
            for *_, master in self._runtime.engine.owned_parts(index, MASTER):
                master.zero_()

    def _copy_experts(self, index: int) -> None:
        """Copies from this rank's own experts, or with `sync_from_rank0` from the first rank of its column."""
        ranks, local = self._runtime.ranks, self._runtime.leaves[index].local()
        travels = self._syncs and ranks.num_replicates > 1
        if travels and ranks.replicate > 0:
            values = self._spare_of(local.numel(), local.dtype)
        else:
            values = self._read(local, travels)
        if travels:
            self._send(values, ranks.column[0], ranks.column)
        origin = ranks.shard * local.numel()
        with self._attempt():
            for _, begin, end, master in self._runtime.engine.owned_parts(index, MASTER):
                master.view(-1).copy_(values[begin - origin : end - origin])

    def _copy_from(self, index: int, holder: int, own: torch.Tensor | None) -> None:
        """Copies from the global rank `holder`, which has the values `own`."""
        runtime, ranks, dtype = self._runtime, self._runtime.ranks, self._runtime.leaves[index].parameter.dtype
        here, masters, end = ranks.here, {}, 0
        with self._attempt():
            masters = {part: master for part, _, _, master in runtime.engine.owned_parts(index, MASTER)}
        flat = None if own is None else self._read(own, travels=False)
        for part in runtime.parts[index]:
            item, owner = runtime.plan.native.inventory[part], ranks.everyone[runtime.plan.owner[part]]
            begin, end = end, end + item.num_matrices * item.rows * item.cols
            values = self._spare_of(end - begin, dtype)
            if here == holder:
                assert flat is not None
                values = self._read(flat[begin:end], travels=here != owner)
            self._send(values, holder, [owner])
            if here == owner:
                with self._attempt():
                    masters[part].view(-1).copy_(values)

    def _broadcast(self, parameter: torch.Tensor) -> None:
        """Sends a parameter from the first rank to all, in any dtype."""
        first = self._runtime.ranks.slot == 0
        values = self._read(parameter, travels=True) if first else self._spare_of(parameter.numel(), parameter.dtype)
        dist.broadcast(values.view(torch.uint8), self._runtime.ranks.everyone[0], group=self._group)
        with self._attempt():
            parameter.copy_(values.view(parameter.shape))
