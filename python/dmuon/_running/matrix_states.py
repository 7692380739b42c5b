"""The entries of `opt.state` that matrices have."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from dmuon._running.owned_state import OwnedState
from dmuon._running.runtime import Runtime
from dmuon._saving.owned_shards import MASTER
from dmuon._setup.placeholder import OwnedTensor
from dmuon._setup.ways_out import STATE_AT_OWNER


class MatrixStates:
    """Makes the entries, and lets them begin anew."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def made(self) -> dict[torch.Tensor, OwnedState]:
        """Returns new entries, by placeholder."""
        return {placeholder: self._of_leaf(index) for placeholder, index in self._runtime.leaf_of.items()}

    def renew(self, states: MutableMapping[Any, Any], removed: Mapping[Any, frozenset[str]]) -> None:
        """Lets `removed_states` begin anew, as torch's optimizers do: they become zeros at their owners."""
        shards = self._runtime.shards
        for parameter, names in removed.items():
            index = self._runtime.leaf_of[parameter]
            made = self._of_leaf(index)
            shards.zero(index, [name for name in shards.states if name in names or not names])
            if names:
                states[parameter].update({name: made[name] for name in names})
            else:
                states[parameter] = made

    def _of_leaf(self, index: int) -> OwnedState:
        """Returns tensors at the leaf's owner, and placeholders elsewhere and for leaves of several parts."""
        runtime = self._runtime
        leaf, transfers, names = runtime.leaves[index], runtime.transfers, list(runtime.shards.states)
        if runtime.placeholders[index].dtype != torch.float32:
            names.append(MASTER)
        state: dict[str, torch.Tensor] = {}
        for name in names:
            own, shape = transfers.owned_parts(index, name), runtime.shards.shape(index, name)
            if len(own) == len(runtime.parts[index]) == 1:
                of_rank = own[0].tensor.view(transfers.sizes_of(index, name))
                state[name] = of_rank if leaf.slices is None else leaf.slices.as_dtensor(of_rank)
            else:
                elsewhere = OwnedTensor(f"{leaf.name}.{name}", shape, torch.float32, runtime.device)
                elsewhere._at_owner = STATE_AT_OWNER
                state[name] = elsewhere
        return OwnedState(state, runtime.engine)
