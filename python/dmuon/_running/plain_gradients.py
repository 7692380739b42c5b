"""The gradients that neither dmuon nor fully_shard manages: their means over the ranks."""

# Longer than other files because it tells one backward in its order, from the first gradient to the means.

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from collections.abc import Collection, Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dmuon import _C
from dmuon._running.blocking import blocking_message
from dmuon._running.host_gradients import sparse_error
from dmuon._running.plain_parameters import PlainParameters, is_mean, mark
from dmuon._running.weak_call import WeakCall
from dmuon._setup.dedication import Dedication
from dmuon._setup.groups import made_slots_group, slots_group
from dmuon._setup.slices import local_part

LARGE = 2**18  # elements of a gradient that is a message of its own
_NEVER = 2**31 - 1  # more triggers than any backward crosses
_TRAINS = 2.0**-14  # counts a rank that trains a parameter but has no gradient of it: 10,000 together are below 1
_GONE = (
    "dmuon: a backward through a model that Python has freed, so nobody averages the gradients that no fully_shard "
    "manages. Expected: the model, or its optimizer, kept until its backwards have ended."
)


@dataclasses.dataclass(eq=False)
class _Backward:
    """The messages of one backward."""

    parameters: list[torch.Tensor] = dataclasses.field(default_factory=list)  # in one order on all ranks
    large: list[torch.Tensor] = dataclasses.field(default_factory=list)  # not sent yet; the last one is next
    came: dict[torch.Tensor, int] = dataclasses.field(default_factory=dict)  # after so many triggers
    events: dict[torch.Tensor, torch.Event] = dataclasses.field(default_factory=dict)  # of large ones that came
    sent: dict[torch.Tensor, torch.Tensor | None] = dataclasses.field(default_factory=dict)  # `.grad` before more came
    late: dict[torch.Tensor, torch.Tensor] = dataclasses.field(default_factory=dict)  # what came after it was sent
    has: dict[torch.Tensor, bool] = dataclasses.field(default_factory=dict)  # of those sent: this rank has a gradient
    means: dict[torch.Tensor, torch.Tensor] = dataclasses.field(default_factory=dict)  # [elements], in messages
    works: list[Any] = dataclasses.field(default_factory=list)  # of all messages
    present: torch.Tensor | None = None  # [parameters] ranks with a gradient, see _TRAINS; None: this one has all
    raised: bool = False
    places: torch.Tensor | None = None  # of the large ones, if they are to be found


class PlainGradients:
    """The gradients of plain parameters, which every rank has whole.

    They become means over all slots in every backward outside of `no_sync`, as under DistributedDataParallel. Large
    ones are messages of their own. The rest leave in one message at the backward's end. Missing ones count as zeros; a
    parameter without a gradient on all ranks gets none.

    NCCL wants one order of all messages on all ranks. So a large one has a *place* between the engine's operations: the
    number of triggers that the backward has crossed when it has come on all ranks. One backward finds the places. In
    later ones a message leaves before the backward crosses the next trigger, whether its gradient has come or not.

    Other gradients are *open*: of `no_sync`, of a backward that is no pass of the engine, those that come a second
    time in one backward after their messages, and assigned ones before clip or step. The next backward averages them
    too, or the step's agreement. A mean does not change by that, but for rounding, and what came late is added to the
    mean before. If `start` made no group, because no parameter was plain then, all are open, and the first average
    makes it.

    On a device the host waits in each backward in which this rank lacks a gradient, and in one that finds places.
    """

    _models: ClassVar[weakref.WeakSet[PlainGradients]] = weakref.WeakSet()  # that live

    def __init__(
        self,
        model: nn.Module,
        dedication: Dedication,
        engine: _C.Engine,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Averages the parameters that `add` names. Reads the optimizer's groups."""
        ranks = dedication.ranks
        self._ranks, self._engine = ranks, engine
        self._parameters = PlainParameters(model, ranks, engine, optimizer)
        self._reduce_dtype = dedication.mp_policy.reduce_dtype
        self._group = made_slots_group(ranks)
        self._scale = ranks.num_slots / dedication.across_ranks.divide_factor(ranks.num_slots)
        self._backward: _Backward | None = None  # that has sent something, or could
        self._places: dict[torch.Tensor, int] | None = None  # of large ones; None: the next backward finds them
        self._num_averages = 0
        self.made: list[torch.Tensor] = []  # gradients that this rank lacked, since the last clear()
        if self._group is not None:
            self._listen()

    def join(self) -> None:
        """Counts the model among those that live, when all its ranks have one. They call it alike."""
        self._models.add(self)
        for other in self._models:
            if set(other._ranks.by_slot) <= set(self._ranks.by_slot):
                other._places = None  # a backward may go through both, see _send_places

    def _listen(self) -> None:
        calls = (WeakCall(call, self, gone=_GONE) for call in (PlainGradients._send_early, PlainGradients._average))
        self._engine.set_other_gradients(*calls)

    @property
    def travelling(self) -> Collection[torch.Tensor]:
        """The parameters that train on any rank, as all ranks agreed last."""
        return self._parameters.travelling

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._parameters

    def add(self, parameters: Iterable[torch.Tensor], is_agreed: bool) -> None:
        """Adds the plain parameters of a group of AdamW's. `is_agreed` is as for `PlainParameters.add`."""
        changes = self._ranks.num_slots > 1 or self._scale != 1  # else a gradient is its mean
        for parameter in parameters:
            if parameter not in self._parameters:
                self._parameters.add(parameter, is_agreed and changes)
                if changes and parameter.is_floating_point():
                    self._hook(parameter)

    def _hook(self, parameter: torch.Tensor) -> None:
        is_trainable = parameter.requires_grad
        parameter.requires_grad_(True)  # frozen parameters allow no hooks
        parameter.register_post_accumulate_grad_hook(WeakCall(PlainGradients._arrived, self))
        # Their mean over the slots becomes the sum over the divide factor. At the source, so that sums of micro-steps,
        # norms and momentum all have one size.
        if self._scale != 1:
            parameter.register_hook(functools.partial(torch.mul, other=self._scale))
        for large in _large_of([parameter]):  # others leave when all have come
            parameter.register_hook(WeakCall(PlainGradients._arrives, self, weakref.ref(large)))
        parameter.requires_grad_(is_trainable)

    def has_open(self) -> bool:
        """True if this rank has open gradients."""
        if self._ranks.num_slots == 1:
            return False
        return any(p.grad is not None and not is_mean(p.grad) for p in self._parameters)

    def note_zeros(self, parameters: Iterable[torch.Tensor]) -> None:
        """Notes that the gradients of these parameters are zeros on all ranks, so none of them is open."""
        for parameter in parameters:
            if parameter in self._parameters and parameter.grad is not None:
                mark(parameter.grad, is_mean=True)

    def average_open(self) -> None:
        """Averages all gradients now, open ones too. Collective."""
        if self._group is None:
            self._group = slots_group(self._ranks)
            self._listen()
        try:
            self._average(finds_places=False)  # what is open now is of no backward
        finally:
            self._num_averages += 1
            if self._num_averages.bit_count() == 1:  # ever more rarely: most are open for another reason
                self._places = None

    @torch.no_grad()
    def _average(self, raised: bool = False, finds_places: bool = True) -> None:
        """Sends what a backward has not sent yet, and gives parameters their means. Collective.

        After a backward that has `raised` it sends zeros and gives nothing. With `finds_places` it may look for places.

        Raises:
            ValueError: on all ranks, as `PlainParameters.agree`; or on this one, if a gradient of its is sparse.
            RuntimeError: not all ranks are here; from the watch.
        """
        backward, self._backward = self._backward or self._begin(), None
        backward.raised = raised
        self._take_late(backward)
        try:
            if self._parameters.agree():
                self._list(backward)
                self._places = None
            self._send_rest(backward)
            if finds_places and self._places is None:
                self._send_places(backward)
        except ValueError:  # mostly on all ranks, so the messages that were sent come
            self._wait_for(backward)
            raise
        self._wait_for(backward)
        self._finish(backward)

    def _send_rest(self, backward: _Backward) -> None:
        while backward.large:
            self._send_large(backward)
        if not backward.parameters:
            return
        left = self._parameters.left_with_mean(backward.parameters)
        small = [parameter for parameter in backward.parameters if parameter not in backward.means]
        dtype = self._dtype_of(small)
        pieces = [self._values(backward, parameter, dtype) for parameter in small]
        backward.has |= dict.fromkeys(left, False)
        trains = self._parameters.trained([p for p in backward.parameters if not backward.has[p]])
        has = [1.0 if backward.has[p] else _TRAINS * (p in trains) for p in backward.parameters]
        has_all, like = min(has) == 1, local_part(backward.parameters[0])
        present = like.new_ones(len(has), dtype=dtype) if has_all else like.new_tensor(has, dtype=dtype)
        message = torch.cat([present, *pieces])
        present, *pieces = message.split([len(has), *map(len, pieces)])
        message[len(has) :].div_(self._ranks.num_slots)
        backward.works.append(dist.all_reduce(message, group=self._group, async_op=True))
        # Only a rank that lacks a gradient reads from the device which ones exist: reading waits for the device.
        backward.present = None if has_all else present
        backward.means |= zip(small, pieces, strict=True)

    def _finish(self, backward: _Backward) -> None:
        """Takes what the messages of a backward have brought."""
        present = [1.0] * len(backward.parameters) if backward.present is None else backward.present.tolist()
        dropped = [p for p, ranks in zip(backward.parameters, present, strict=True) if ranks == 0]
        self._parameters.drop(dropped)
        if self._places is not None:
            for parameter in dropped:
                self._places.pop(parameter, None)
        if backward.places is not None:
            found = zip(_large_of(backward.parameters), backward.places.tolist(), strict=True)
            self._places = {parameter: place for parameter, place in found if 0 <= place < _NEVER}
            self._engine.set_other_places(set(self._places.values()))
        if backward.raised:
            return
        for parameter, ranks in zip(backward.parameters, present, strict=True):
            if ranks >= 1 and parameter not in backward.late:
                self._give(parameter, backward.means[parameter])
        for parameter, late in backward.late.items():
            parameter.grad = late + backward.means[parameter].view(late.shape)  # unmarked, so that it is averaged

    def _wait_for(self, backward: _Backward) -> None:
        if backward.works:
            with blocking_message(self._engine, "the mean of the gradients that no fully_shard manages"):
                for work in backward.works:
                    work.wait()

    def _give(self, parameter: torch.Tensor, mean: torch.Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
            self.made.append(parameter.grad)
        of_rank = local_part(parameter.grad).detach()
        of_rank.copy_(mean.view(of_rank.shape))
        mark(parameter.grad, is_mean=True)

    def _begin(self) -> _Backward:
        self._backward = _Backward()
        self._list(self._backward)
        return self._backward

    def _list(self, backward: _Backward) -> None:
        """Lists what travels."""
        places = self._places or {}
        backward.parameters = [*self._parameters.travelling]
        in_order = sorted(reversed(_large_of(backward.parameters)), key=lambda p: places.get(p, _NEVER))
        backward.large = [parameter for parameter in reversed(in_order) if parameter not in backward.means]

    def _arrives(self, of: weakref.ref[torch.Tensor], gradient: torch.Tensor) -> None:
        """Sets aside what was sent of a gradient: autograd is about to accumulate more, which comes late."""
        parameter, backward = of(), self._backward
        if parameter is None or backward is None:
            return
        if parameter in backward.means and parameter not in backward.sent:
            backward.sent[parameter], parameter.grad = parameter.grad, None

    def _take_late(self, backward: _Backward) -> None:
        """Notes what has come late, and adds it to what was set aside. After an error both are lost."""
        if backward.raised:
            return  # the user may have cleared gradients since
        for parameter, sent in backward.sent.items():
            late = parameter.grad
            if late is not None:
                backward.late[parameter] = late
            parameter.grad = sent if late is None else late if sent is None else sent + late

    def _arrived(self, parameter: torch.Tensor) -> None:
        """Notes that autograd has accumulated a gradient."""
        if parameter.grad is not None:
            mark(parameter.grad, is_mean=False)
        creates_graph = torch.is_grad_enabled()
        if creates_graph or self._group is None or not self._engine.in_synchronised_backward():
            self._engine.forget_verdict()
            return
        backward = self._backward or self._begin()
        backward.came[parameter] = self._engine.num_crossed()
        # The forward may have been on another stream. Autograd lets the caller's wait for it only after the backward.
        if parameter.device.type != "cpu" and _large_of([parameter]):
            backward.events[parameter] = torch.accelerator.current_stream(parameter.device).record_event()

    def _send_early(self, num_crossed: int) -> None:
        backward, places = self._backward or self._begin(), self._places or {}
        while backward.large and places.get(backward.large[-1], _NEVER) <= num_crossed:
            self._send_large(backward)

    def _send_places(self, backward: _Backward) -> None:
        """Finds places, with the last message of a backward.

        There are none while other models with some of these ranks live: ranks may order their messages differently.
        """
        large = _large_of(backward.parameters)
        if not large:
            return
        gc.collect()  # models that nobody has any more
        is_alone = sum(not set(self._ranks.by_slot).isdisjoint(other._ranks.by_slot) for other in self._models) == 1
        places = [backward.came.get(parameter, -1) if is_alone else _NEVER for parameter in large]
        backward.places = local_part(large[0]).new_tensor(places, dtype=torch.int32)
        backward.works.append(dist.all_reduce(backward.places, dist.ReduceOp.MAX, group=self._group, async_op=True))

    @torch.no_grad()
    def _send_large(self, backward: _Backward) -> None:
        parameter = backward.large[-1]
        if (came_on := backward.events.pop(parameter, None)) is not None:
            torch.accelerator.current_stream(parameter.device).wait_event(came_on)
        gradient, dtype = parameter.grad, self._dtype_of([parameter])
        values = self._values(backward, parameter, dtype)
        is_copy = gradient is None or gradient.dtype != dtype
        values = values.div_(self._ranks.num_slots) if is_copy else values.div(self._ranks.num_slots)
        backward.works.append(dist.all_reduce(values, group=self._group, async_op=True))
        backward.means[parameter] = values
        backward.large.pop()

    def _dtype_of(self, parameters: Iterable[torch.Tensor]) -> torch.dtype:
        """Returns the dtype of a message of these gradients."""
        return self._reduce_dtype or functools.reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)

    def _values(self, backward: _Backward, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns [elements] of this rank's gradient. Autograd may have left a sum over tensor parallelism open."""
        gradient: Any = None if backward.raised else parameter.grad
        backward.has[parameter] = gradient is not None
        if gradient is None:
            part = local_part(parameter)
            return part.new_zeros(part.numel(), dtype=dtype)
        if gradient.layout != torch.strided:
            raise sparse_error(self._parameters.name_of(parameter))
        if isinstance(parameter, DTensor):
            gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
        return local_part(gradient).detach().reshape(-1).to(dtype)


def _large_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [p for p in parameters if p.numel() >= LARGE and not is_traceable_wrapper_subclass(p)]  # see is_swapped
