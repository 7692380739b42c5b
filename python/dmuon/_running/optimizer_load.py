"""Loads a saved optimizer into a `Muon`: the check on all ranks, then the owners' tensors."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from typing import Any

from dmuon._running.runtime import Runtime
from dmuon._saving.optimizer_state import LoadedState, fitting_state
from dmuon._saving.owned_shards import MASTER
from dmuon._saving.saved_matrices import require_saved_matrices
from dmuon._setup.agreement import agreement
from dmuon._setup.shown import listed

logger = logging.getLogger("dmuon")
_ABSENT = (
    "dmuon: Muon.load_state_dict: no state of %s: it begins anew. (torch's set_state_dict leaves out what is frozen: "
    "unfreeze it before, and freeze it again.)"
)


def checked_state(
    optimizer: Any,
    state_dict: dict[str, Any],
    hooks: Iterable[Callable[[Any, dict[str, Any]], dict[str, Any] | None]],
    runtime: Runtime,
) -> tuple[dict[str, Any], LoadedState]:
    """Returns the state dict as the optimizer's `hooks` have made it, and its contents. Collective.

    Raises:
        ValueError: on all ranks, if something does not fit the optimizer, or ranks differ.
    """
    with agreement(runtime.ranks, "Muon.load_state_dict") as facts:
        state_dict = copy.copy(state_dict)  # as torch does before its hooks
        for hook in hooks:
            changed = hook(optimizer, state_dict)
            state_dict = state_dict if changed is None else changed
        groups, names = optimizer.param_groups, {id(p): name for name, p in runtime.model.named_parameters()}
        lrs = runtime.step_agreement.first_lrs
        loaded = fitting_state(state_dict, groups, runtime.leaf_of, names, runtime.shards, lrs, facts)
        facts.append(f"accepts_other_views {optimizer.accepts_other_views}")
        if not optimizer.accepts_other_views:
            require_saved_matrices(state_dict["param_groups"], groups, runtime.leaf_of, runtime.leaves)
    return state_dict, loaded


def write_state(runtime: Runtime, loaded: LoadedState) -> None:
    """Writes owners' tensors, and makes units see masters among them. Collective."""
    for name, values in loaded.owned.items():
        runtime.shards.write(values, name)
    for index in loaded.anew:
        runtime.shards.zero(index, runtime.shards.states)
    if loaded.absent and runtime.ranks.owner == 0:
        logger.warning(_ABSENT, listed([f"'{name}'" for name in loaded.absent], 1))
    if loaded.owned[MASTER]:
        runtime.publish(replaced=True)
