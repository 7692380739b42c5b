"""An exponential mean of the weights, stored beside the weights."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.utils.hooks import RemovableHandle

from dmuon._running.runtime import runtime_of
from dmuon._saving.fits import form, misfit
from dmuon._saving.owned_shards import MASTER
from dmuon._setup.agreement import agreement
from dmuon._setup.option_values import real_number
from dmuon._setup.place import clean_name
from dmuon._setup.placeholder import OwnedTensor
from dmuon._setup.shown import shown
from dmuon._setup.slices import cut_like, local_part


class Ema:
    """The exponential mean, in fp32, of the parameters that are in the optimizer's groups or train.

        ema = dmuon.Ema(model)  # then ema.update() after every step
        with ema.applied():
            evaluate(model)

    The mean of a matrix is at its owner, beside the master. The mean of any other parameter is cut as the parameter is.
    So all ranks together hold 4 bytes an element more, and `update` sends nothing. Computes the same as
    torch.optim.swa_utils.AveragedModel with `get_ema_multi_avg_fn(decay)`, beginning with the present weights.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        """Begins with the present weights. Collective over the mesh.

        Args:
            model: a model with dmuon.Muon. Parameters that are frozen now and in no group have no mean.
            decay: factor of the old mean in an update, from 0 to 1. `ema.decay` can be set.

        Raises:
            ValueError: on all ranks, if any rank finds something wrong.
        """
        runtime = self._runtime = runtime_of(model, "Ema")
        runtime.meet("Ema()", whole=True)  # reshards: a forward alone leaves FSDP2's parameters whole
        with agreement(runtime.ranks, "Ema") as facts:
            decay = _checked_decay(decay, "Ema")
            facts.append(f"decay {decay}")
        self.decay, self.num_updates = decay, 0
        runtime.num_means += 1
        self._name = f"mean {runtime.num_means}"
        grouped = {id(p) for p in runtime.step_agreement.host_parameters()}  # also what is frozen for a while
        self._others = {
            clean_name(name): parameter
            for name, parameter in runtime.model.named_parameters()
            if (parameter.requires_grad or id(parameter) in grouped) and not isinstance(parameter, OwnedTensor)
        }
        with agreement(runtime.ranks, "Ema"):  # a rank may lack memory
            runtime.engine.owned().add(self._name)
            weakref.finalize(self, runtime.engine.remove_owned, self._name).atexit = False
            self._means = {name: p.detach().to(torch.float32, copy=True) for name, p in self._others.items()}
        for mean, master in self._owned():
            mean.copy_(master)

    @torch.no_grad()
    def update(self) -> None:
        """Adds (1 - decay) (weight - mean) to the mean, after a step. Sends nothing. Call it on all ranks.

        Raises:
            ValueError: the call is inside `applied`, or `decay` is no number from 0 to 1.
        """
        self._runtime.access.refuse("Ema.update()", averaged=True)
        weight = 1 - _checked_decay(self.decay, "Ema.update")
        for pairs in (list(self._owned()), list(self._local())):  # apart: FSDP2 may keep its own on the host
            if pairs:
                means, weights = zip(*pairs, strict=True)
                torch._foreach_lerp_(means, [w.float() for w in weights], weight)
        self.num_updates += 1

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Makes the model compute with the mean, and its `state_dict()` return the mean. Refuses training.

        The weights change on entry and on exit, so run all backwards of earlier forwards before. Collective over the
        mesh on entry and exit. A rank needs memory for a copy of its part of the parameters that AdamW updates. After
        an interrupt, also one of the exit, the weights are as before.

        Raises:
            ValueError: the call is inside `applied` or `full_params`, or ranks have come to different calls.
        """
        runtime, call = self._runtime, "Ema.applied()"
        runtime.end_passes(call, whole=True, averaged=True)
        weights = [weight.clone() for _, weight in self._local()]
        hooks: list[RemovableHandle] = []
        try:
            try:
                runtime.access.set_averaged(True)
                for module in runtime.model.modules():
                    hooks.append(module.register_state_dict_post_hook(_give_copies))
                runtime.engine.compute_with(self._name, call)
                for mean, weight in self._local():
                    weight.copy_(mean)
                runtime.renew_version()
                yield
            finally:
                self._leave(weights, hooks)
        finally:  # an interrupt may have come at any line of the first time
            self._leave(weights, hooks)

    def _leave(self, weights: list[torch.Tensor], hooks: list[RemovableHandle]) -> None:
        """Undoes what `applied` has done, or what an interrupted call of this has left of it."""
        runtime, call = self._runtime, "the end of Ema.applied()"
        if not runtime.access.is_averaged:
            return
        runtime.end_passes(call)
        runtime.engine.compute_with(MASTER, call)
        for (_, weight), own in zip(self._local(), weights, strict=True):
            weight.copy_(own)
        for hook in hooks:
            hook.remove()
        runtime.renew_version()
        runtime.access.set_averaged(False)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the mean in fp32 by the names of the parameters, cut like `model.state_dict()`. Collective.

        Raises:
            ValueError: the call is inside `applied`, or ranks have come to different calls.
        """
        self._runtime.meet("Ema.state_dict()", averaged=True)
        leaves = self._runtime.leaves
        means = self._runtime.shards.read(range(len(leaves)), self._name, torch.float32)
        owned = {leaf.name: mean for leaf, mean in zip(leaves, means, strict=True)}
        weights = {**owned, **{name: mean.clone() for name, mean in self._means.items()}}
        return {"decay": self.decay, "num_updates": self.num_updates, "weights": weights}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the result of `state_dict`, from this mesh or another, or whole tensors on every rank. Collective.

        Raises:
            ValueError: on all ranks, if something does not fit. Then nothing has changed.
        """
        runtime = self._runtime
        runtime.meet("Ema.load_state_dict()", averaged=True)
        with agreement(runtime.ranks, "Ema.load_state_dict") as facts:
            decay, num_updates, weights = self._fitting(state_dict)
            facts += [f"decay {decay}, {num_updates} updates", *(f"'{n}' {form(weights[n])}" for n in sorted(weights))]
        values = {index: weights[name] for name, index in runtime.leaf_named.items()}
        runtime.shards.write(values, self._name)
        for name, mean in self._means.items():
            mean.copy_(cut_like(weights[name], mean))
        self.decay, self.num_updates = decay, num_updates

    def _fitting(self, saved: Any) -> tuple[float, int, Mapping[str, Any]]:
        load, keys = "Ema.load_state_dict", {"decay", "num_updates", "weights"}
        if not isinstance(saved, Mapping) or saved.keys() != keys:
            got = sorted(saved) if isinstance(saved, Mapping) else type(saved).__name__
            raise ValueError(f"{load}: state_dict: expected {sorted(keys)}, got {got}")
        if not isinstance(weights := saved["weights"], Mapping):
            raise ValueError(f"{load}: weights: expected a dict by name, got {shown(weights)}")
        leaf_named, shards = self._runtime.leaf_named, self._runtime.shards
        if weights.keys() != (expected := {*leaf_named, *self._means}):
            missing, unknown = sorted(expected - weights.keys()), sorted(weights.keys() - expected)
            raise ValueError(
                f"{load}: weights: expected those of the optimizer's parameters; missing {missing}, unknown {unknown}"
            )
        for name, value in weights.items():
            index = leaf_named.get(name)
            if problem := misfit(self._means[name], value) if index is None else shards.problem(index, value):
                raise ValueError(f"{load}: '{name}': {problem}")
        if type(saved["num_updates"]) is not int or saved["num_updates"] < 0:
            raise ValueError(f"{load}: num_updates: expected an int from 0, got {shown(saved['num_updates'])}")
        return _checked_decay(saved["decay"], load), saved["num_updates"], weights

    def _owned(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields (mean, master) of the leaves' parts that this rank owns."""
        transfers = self._runtime.transfers
        for index in range(len(self._runtime.leaves)):
            parts = (transfers.owned_parts(index, name) for name in (self._name, MASTER))
            for mean, master in zip(*parts, strict=True):
                yield mean.tensor, master.tensor

    def _local(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields (mean, weight) of this rank's part of the other parameters."""
        for name, parameter in self._others.items():
            yield local_part(self._means[name]), local_part(parameter)


def _give_copies(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Puts copies of a module's parameters into a state dict, which may live longer than the mean in these."""
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if isinstance(value, torch.Tensor) and not isinstance(parameter, OwnedTensor):
            state_dict[prefix + name] = value.detach().clone()


def _checked_decay(decay: Any, function: str) -> float:
    if (number := real_number(decay)) is None or not 0 <= number <= 1:
        raise ValueError(f"{function}: decay: expected a number from 0 to 1, got {shown(decay)}")
    return number
