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
from dmuon._setup.groups import everyone_group
from dmuon._setup.meta_start import MetaStart
from dmuon._setup.slices import local_part
from dmuon._setup.tensor_parallel import is_sharded


class FirstValues:
    """Copies masters to their owners from where the values are: on every rank, in its shards, or at one rank.

        with agreement(ranks, "Muon"):
            first_values = FirstValues(runtime, dedication)
        first_values.copy()
        with agreement(ranks, "Muon"):
            first_values.raise_failure()

    A rank that fails still sends and receives every message, with meaningless values, so that no peer waits for it.
    DTensors are the exception: their shards travel under the Watch, by which peers of a failed rank raise.
    """

    def __init__(self, runtime: Runtime, dedication: Dedication, meta_start: MetaStart | None) -> None:
        """Allocates memory for the largest message, so that an exchange cannot fail for lack of it."""
        self._runtime, self._meta_start = runtime, meta_start
        self._syncs = dedication.across_ranks.sync_from_rank0
        leaves = [leaf.parameter for leaf in runtime.leaves] if self._syncs or self._meta_start else []
        self._plain = runtime.plain_of(runtime.model.parameters()) if self._syncs else []
        travelling = [*leaves, *self._plain]
        most = max((tensor.numel() * tensor.element_size() for tensor in travelling), default=0)
        self._spare = torch.empty(most, dtype=torch.uint8, device="cpu")
        self._failure: Exception | None = None

    def copy(self) -> None:
        """Fills all masters. Collective. A leaf without values is zero, and must be loaded before the first forward."""
        runtime, meta_start, ranks = self._runtime, self._meta_start, self._runtime.ranks
        initial = {} if meta_start is None else meta_start.values
        sharded = {
            index: leaf.parameter
            for index, leaf in enumerate(runtime.leaves)
            if index not in initial and leaf.num_columns == 1 and is_sharded(leaf.parameter, runtime.ranks)
        }
        runtime.shards.write(sharded, MASTER)
        for index, leaf in enumerate(runtime.leaves):
            if meta_start is not None and index in initial:
                values, own = initial[index], meta_start.taken(index)
                if values.is_written:
                    self._copy_slices(index, values.holder, own)
                else:
                    runtime.shards.without_values.add(index)
                    with self._attempt():
                        runtime.shards.zero(index, [MASTER])
            elif leaf.num_columns > 1:
                self._copy_experts(index)
            elif index in sharded:
                pass  # copied above
            elif self._syncs and leaf.cut is None:
                self._copy_slices(index, ranks.everyone[0], leaf.local())
            elif self._syncs:
                self._copy_parts(index, ranks.by_slot[0], leaf.local(), ranks.by_slot)
            else:
                with self._attempt():
                    runtime.transfers.scatter(index, MASTER, leaf.local())
            leaf.parameter = runtime.placeholders[index]  # from here on only the owner has the values
        for parameter in self._plain:
            own = local_part(parameter)
            first, those = (ranks.everyone[0], ranks.everyone)
            if isinstance(parameter, DTensor) and not parameter.placements[0].is_replicate():
                first, those = ranks.by_slot[0], ranks.by_slot
            new = self._sent(own, first, those, own.dtype, 0, own.numel())
            with self._attempt():
                own.copy_(new.view(own.shape))

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

    def _copy_experts(self, index: int) -> None:
        """Copies from this rank's own experts, or with `sync_from_rank0` from the first rank of its column."""
        ranks, local = self._runtime.ranks, self._runtime.leaves[index].local()
        column = ranks.column if self._syncs else (ranks.here,)
        values = self._sent(local, column[0], column, local.dtype, 0, local.numel())
        origin = ranks.shard * local.numel()
        with self._attempt():
            for part in self._runtime.transfers.owned_parts(index, MASTER):
                part.tensor.view(-1).copy_(values[part.elements.begin - origin : part.elements.end - origin])

    def _copy_slices(self, index: int, holder: int, whole: torch.Tensor | None) -> None:
        """Copies from the global rank `holder`, which has the whole leaf, to each rank of a slot its slice."""
        ranks, slices = self._runtime.ranks, self._runtime.leaves[index].slices
        for number in range(ranks.tensor_parallel):
            own = None
            if whole is not None:
                with self._attempt():
                    own = whole if slices is None else slices.of_rank(whole, number)
            self._copy_parts(index, holder, own, [slot[number] for slot in ranks.slots] or ranks.by_slot, number)

    def _copy_parts(
        self, index: int, holder: int, own: torch.Tensor | None, by_slot: Sequence[int], number: int | None = None
    ) -> None:
        """Copies from the global rank `holder`, which has the values `own`, one part of the leaf at a time.

        `by_slot`: the ranks that have these values. `number`: theirs in their slots, None for this rank's.
        """
        runtime, dtype, end = self._runtime, self._runtime.leaves[index].parameter.dtype, 0
        number = runtime.ranks.tensor_rank if number is None else number
        for part in runtime.parts[index]:
            owner = by_slot[runtime.plan.owner[part] // runtime.ranks.tensor_parallel]
            begin, end = end, end + runtime.engine.num_elements(part, number)
            values = self._sent(own, holder, (owner,), dtype, begin, end)
            with self._attempt():
                for own_part in runtime.transfers.owned_parts(index, MASTER) if runtime.ranks.here == owner else ():
                    if own_part.parameter == part:
                        own_part.tensor.view(-1).copy_(values)

    def _sent(
        self, own: torch.Tensor | None, holder: int, receivers: Sequence[int], dtype: torch.dtype, begin: int, end: int
    ) -> torch.Tensor:
        """Returns, at the receivers, elements from `begin` to `end` of the holder's `own`, on the host if they travel.

        `holder` and `receivers` are global ranks. The result is flat, in the dtype of `own`, `dtype`.
        """
        ranks, group = self._runtime.ranks, everyone_group(self._runtime.ranks)
        values, travels = self._spare[: (end - begin) * dtype.itemsize].view(dtype), set(receivers) != {holder}
        with self._attempt():
            if ranks.here == holder and own is not None:
                found = own.reshape(-1)[begin:end]
                values = found.cpu().contiguous() if travels else found
        if travels and tuple(receivers) == ranks.everyone:
            dist.broadcast(values.view(torch.uint8), holder, group=group)
            return values
        for receiver in receivers:
            if ranks.here == holder != receiver:
                dist.send(values, receiver, group=group)
            elif ranks.here == receiver != holder:
                dist.recv(values, holder, group=group)
        return values
