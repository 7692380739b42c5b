"""Gives every weight whole, one unit after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from dmuon._running.runtime import Runtime, runtime_of
from dmuon._setup.place import clean_name
from dmuon._setup.placeholder import OwnedTensor

Named = tuple[str, torch.Tensor]


def iter_full_params(model: nn.Module) -> Iterator[Named]:
    """Returns an iterator over names and whole weights, for an inference engine that takes new weights, for example.

        for name, weight in dmuon.iter_full_params(model):  # on every rank
            bucket.add(name, weight.clone())

    Collective over the mesh: every rank iterates to the end. Matrices of Muon come first, unit by unit, as a forward
    would get them: in its dtype, by one publication of each unit, and with memory for one unit at a time. A rank may
    read such a tensor until the next one of another unit comes; copy what you keep. Then come all other parameters, in
    their own dtype. A tied weight comes once. A forward between two turns may free the tensor of the last one.

    Raises:
        ValueError: the model has no dmuon.Muon yet, or is inside of `full_params`, or is offloaded. On a turn, also if
            the weights have changed since this call, for example by a step.
    """
    runtime = runtime_of(model, "iter_full_params")
    runtime.meet("iter_full_params()", whole=True)
    return _of_one_version(runtime, _weights(runtime, model), (runtime.version, runtime.num_taken_back))


def _of_one_version(runtime: Runtime, weights: Iterator[Named], first: tuple[int, int]) -> Iterator[Named]:
    """Yields the weights. Raises if their version is not the first one, so that nobody mixes two."""
    while True:
        runtime.access.refuse("a turn of iter_full_params()", whole=True)
        if (runtime.version, runtime.num_taken_back) != first:
            raise ValueError(
                "dmuon.iter_full_params: the weights have changed between two turns, by a step, a load or a write. "
                "Expected: all turns before the change, or a new iter_full_params(model) after it."
            )
        found = next(weights, None)
        if found is None:
            return
        yield found


@torch.no_grad()
def _weights(runtime: Runtime, model: nn.Module) -> Iterator[Named]:
    for index in range(len(runtime.units)):
        was_ready = runtime.engine.ready(index)  # a backward that is still to come needs it
        try:
            for leaf, weight in runtime.readers[index].weights.items():
                runtime.engine.unshard(index)  # again, if a forward between two turns has freed the unit
                divided = runtime.leaves[leaf].num_columns > 1  # this rank computes with some of its matrices
                held: Any = weight.detach()
                if divided:
                    held = runtime.transfers.gather(leaf, "master").to(weight.dtype)
                elif isinstance(held, DTensor):
                    held = held.full_tensor()
                yield runtime.leaves[leaf].name, held
        finally:
            if not was_ready:
                runtime.engine.reshard(index)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            yield clean_name(name), parameter.full_tensor()
        elif not isinstance(parameter, OwnedTensor):
            yield clean_name(name), parameter.detach()
