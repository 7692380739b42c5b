"""The gradients that neither dmuon nor fully_shard manages: their means over the ranks, sent while backwards run."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dmuon import _C
from dmuon._running.blocking import blocking_message
from dmuon._setup.dedication import Dedication
from dmuon._setup.groups import made_slots_group, slots_group
from dmuon._setup.slices import local_part

LARGE = 2**18  # elements of a gradient that is a message of its own


@dataclasses.dataclass(eq=False)
class _Sent:
    """A gradient on its way."""

    parameter: torch.Tensor
    gradient: torch.Tensor | None  # this rank's, None if it has none
    mean: Any = None  # [elements], a part of the message


@dataclasses.dataclass(eq=False)
class _Backward:
    """The messages of one backward."""

    parameters: list[torch.Tensor]  # in the order of the groups
    large: list[torch.Tensor]  # not sent yet; the last one is next
    came: set[torch.Tensor] = dataclasses.field(default_factory=set)
    sent: dict[torch.Tensor, _Sent] = dataclasses.field(default_factory=dict)
    works: list[Any] = dataclasses.field(default_factory=list)  # of all messages
    present: torch.Tensor | None = None  # [parameters]: how many ranks have a gradient; None if this one has all
    raised: bool = False

    def take(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Takes away the gradient to be sent. What comes from now on is no part of it."""
        if self.raised:
            return None
        gradient: Any = parameter.grad
        if isinstance(parameter, DTensor) and gradient is not None:
            # Autograd may leave a sum over the ranks of tensor parallelism open.
            gradient = gradient.redistribute(placements=parameter.placements)
        parameter.grad = None
        return gradient  # type: ignore[no-any-return]


class PlainGradients:
    """The gradients of plain parameters, which every rank has whole.

    They become means over all slots in every backward outside of `no_sync`, as under DistributedDataParallel. Large
    ones are messages of their own, in the reverse order of the groups. Over gloo each leaves as soon as it and those
    before it have come. NCCL wants one order of all messages on all ranks, so there they leave at the backward's end.
    The rest leave then in one message. Missing ones count as zeros; a parameter without a gradient on all ranks gets
    none.

    Gradients that came otherwise are *open*: in `no_sync`, in a backward that is no pass of the engine, or a second
    time in one backward. The next such backward averages them too, or the step's agreement. A mean does not change
    by that. If `start` made no group, because no parameter was plain then, all are open, and the first average makes
    it.

    On a device the host waits only if this rank lacks a gradient.
    """

    _senders: ClassVar[dict[tuple[int, ...], weakref.ref[PlainGradients]]] = {}  # the last one that sent, by ranks

    def __init__(self, parameters: Iterable[torch.Tensor], dedication: Dedication, engine: _C.Engine) -> None:
        """Of `parameters`, the model's, those count that `add` names."""
        ranks = dedication.ranks
        self._of_model, self._ranks, self._engine = list(parameters), ranks, engine
        self._dtype = dedication.mp_policy.reduce_dtype or torch.float32  # of messages
        self._group = made_slots_group(ranks)
        self._scale = ranks.num_slots / dedication.across_ranks.divide_factor(ranks.num_slots)
        self._added: dict[torch.Tensor, None] = {}  # in the order of the groups
        self._backward: _Backward | None = None  # that has sent something, or could
        self.is_open = False
        self.made: list[torch.Tensor] = []  # gradients that this rank lacked, since the last clear()
        if self._group is not None:
            self._listen()

    def _listen(self) -> None:
        send, finish = weakref.WeakMethod(self.send), weakref.WeakMethod(self.finish)
        self._engine.set_other_gradients(lambda raised: _call(send, raised), lambda: _call(finish))

    def __iter__(self) -> Iterator[torch.Tensor]:
        """The plain parameters of the model and of all groups."""
        known = set(self._of_model)
        return iter([*self._of_model, *(parameter for parameter in self._added if parameter not in known)])

    def add(self, parameters: Sequence[torch.Tensor]) -> None:
        """Adds the plain parameters of a group of AdamW's."""
        arrived = weakref.WeakMethod(self._arrived)
        for parameter in parameters:
            if parameter in self._added:
                continue
            self._added[parameter] = None
            is_trainable = parameter.requires_grad
            parameter.requires_grad_(True)  # frozen parameters allow no hooks
            if self._ranks.num_slots > 1:
                parameter.register_post_accumulate_grad_hook(lambda of: _call(arrived, of))
            if self._scale != 1:
                # Their mean over the slots becomes the sum over the divide factor. At the source, so that sums of
                # micro-steps, norms and momentum all have one size.
                parameter.register_hook(functools.partial(torch.mul, other=self._scale))
            parameter.requires_grad_(is_trainable)

    def average(self) -> None:
        """Averages all gradients now. Collective."""
        if self._group is None:
            self._group = slots_group(self._ranks)
            self._listen()
        self.send()
        self.finish()

    @torch.no_grad()
    def send(self, raised: bool = False) -> None:
        """Sends what a backward has not sent yet: zeros if it has raised. Waits for no other rank."""
        backward = self._backward or self._begin()
        backward.raised = raised
        while backward.large:
            self._send_large(backward, backward.large.pop())
        if not backward.parameters:
            return
        small = [parameter for parameter in backward.parameters if parameter not in backward.sent]
        gradients = [backward.take(parameter) for parameter in small]
        values = [self._values(parameter, gradient) for parameter, gradient in zip(small, gradients, strict=True)]
        backward.sent |= {p: _Sent(p, gradient) for p, gradient in zip(small, gradients, strict=True)}
        has = [backward.sent[parameter].gradient is not None for parameter in backward.parameters]
        like = local_part(backward.parameters[0])
        present = like.new_ones(len(has), dtype=self._dtype) if all(has) else like.new_tensor(has, dtype=self._dtype)
        message = torch.cat([present, *values])
        backward.works.append(dist.all_reduce(message, group=self._group, async_op=True))
        present, *values = message.split([len(has), *map(len, values)])
        # Only a rank that lacks a gradient reads from the device which ones exist: reading waits for the device.
        backward.present = None if all(has) else present
        for parameter, mean in zip(small, values, strict=True):
            backward.sent[parameter].mean = mean

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for what was sent, and gives parameters their means; none after a backward that has raised."""
        backward = self._backward
        assert backward is not None
        if backward.works:
            with blocking_message(self._engine, "the mean of the gradients that no fully_shard manages"):
                for work in backward.works:
                    work.wait()
        self._backward = None
        if backward.raised:
            return
        present = [True] * len(backward.parameters) if backward.present is None else backward.present.tolist()
        for parameter, anywhere in zip(backward.parameters, present, strict=True):
            if anywhere:
                self._give(backward.sent[parameter])

    def _give(self, sent: _Sent) -> None:
        later = sent.parameter.grad  # came after it was sent
        gradient = torch.empty_like(sent.parameter) if sent.gradient is None else sent.gradient
        of_rank = local_part(gradient).detach()
        if of_rank.data_ptr() != sent.mean.data_ptr():
            of_rank.copy_(sent.mean.view(of_rank.shape))
        sent.parameter.grad = gradient if later is None else gradient + later
        if sent.gradient is None:
            self.made.append(sent.parameter.grad)

    def _begin(self) -> _Backward:
        parameters = [parameter for parameter in self._added if parameter.requires_grad]
        large = [p for p in parameters if p.numel() >= LARGE and not isinstance(p, DTensor)]
        self._backward = _Backward(parameters, large)
        self.is_open = False
        return self._backward

    def _arrived(self, parameter: torch.Tensor) -> None:
        """Notes that autograd has accumulated a gradient."""
        creates_graph = torch.is_grad_enabled()
        if creates_graph or self._group is None or not self._engine.in_synchronised_backward():
            self.is_open = True
            self._engine.forget_verdict()
            return
        backward = self._backward or self._begin()
        if parameter in backward.sent:
            self.is_open = True
            return
        hooks: Any = parameter._post_accumulate_grad_hooks
        if len(hooks) == 1 and self._may_send_early():  # the user's own hooks want to see it
            backward.came.add(parameter)
        while backward.large and backward.large[-1] in backward.came:
            self._send_large(backward, backward.large.pop())

    def _may_send_early(self) -> bool:
        """False on devices, and while another model of these ranks sends: one backward may go through both."""
        if self._ranks.device_type != "cpu":
            return False
        last = self._senders.get(self._ranks.by_slot)
        other = None if last is None else last()
        if other is not None and other is not self and other._backward is not None:
            return False
        self._senders[self._ranks.by_slot] = weakref.ref(self)
        return True

    @torch.no_grad()
    def _send_large(self, backward: _Backward, parameter: torch.Tensor) -> None:
        gradient = backward.take(parameter)
        values = self._values(parameter, gradient)
        backward.works.append(dist.all_reduce(values, group=self._group, async_op=True))
        backward.sent[parameter] = _Sent(parameter, gradient, values)

    def _values(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
        """Returns [elements] of a message: this rank's part of the mean, in the gradient's own memory if it can be."""
        if gradient is None:
            part = local_part(parameter)
            return part.new_zeros(part.numel(), dtype=self._dtype)
        return local_part(gradient).detach().reshape(-1).to(self._dtype).div_(self._ranks.num_slots)


def _call(method: weakref.WeakMethod[Any], *arguments: Any) -> None:
    """Calls a method of what lives. The engine and the parameters would keep it, and it them."""
    if (found := method()) is not None:
        found(*arguments)
