"""The matrices of a saved optimizer: their views, and the members of its groups. Both must be as they were.

Another view is another algorithm. With other groups rates would be mixed up: PyTorch's functions look for the group of
each parameter by its name, and take the last one found for the whole group.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from dmuon._saving.saved_algorithm import SavedAlgorithm, views_to_save
from dmuon._setup.leaf import Leaf
from dmuon._setup.shown import listed

_MOST_NAMED = 3
_WHOLE = "one matrix"


def members_of(groups: Sequence[dict[str, Any]], leaf_of: Mapping[Any, int], leaves: Sequence[Leaf]) -> dict[int, str]:
    """Returns the members of each group of matrices, by its number, in words that are equal for equal lists."""
    found = {}
    for number, group in enumerate(groups):
        if group["algorithm"] == "muon":
            names = [leaves[leaf_of[parameter]].name for parameter in group["params"]]
            first = f" from '{names[0]}' on" if names else ""
            found[number] = f"{len(names)} matrices{first} ({zlib.crc32(chr(10).join(names).encode()):08x})"
    return found


def require_saved_matrices(
    saved: Sequence[dict[str, Any]],
    groups: Sequence[dict[str, Any]],
    leaf_of: Mapping[Any, int],
    leaves: Sequence[Leaf],
) -> None:
    """Checks saved groups against the present `groups`. Those by torch's optimizers or by an older dmuon fit.

    Raises:
        ValueError: a leaf has other views now, or another name; or the checkpoint has other groups of matrices. Names
            the leaf, or the first group that differs.
    """
    now = views_to_save(leaves)  # described once: there may be as many groups as leaves
    for algorithm in dict.fromkeys(map(SavedAlgorithm.of, saved)):
        if algorithm.listed and (views := algorithm.views()) != now:
            _refuse_views(views, now, [leaf.name for leaf in leaves])
    _require_members(saved, members_of(groups, leaf_of, leaves))


def _refuse_views(saved: Mapping[str, str], now: Mapping[str, str], leaves: Sequence[str]) -> NoReturn:
    if unknown := [f"'{name}'" for name in sorted(saved.keys() - {*leaves})]:
        raise ValueError(
            "Muon.load_state_dict: the checkpoint has matrices that this model has not, "
            f"{listed(unknown, _MOST_NAMED)}. Expected: the model, with its depth and names, of which the "
            "checkpoint is. Where names alone differ, accepts_other_views = True of the dmuon.Muon itself loads "
            "it, if views need no comparison."
        )
    words = [(name, saved.get(name, _WHOLE), now.get(name, _WHOLE)) for name in leaves]
    differing = [f"'{name}' was {then} and is {view} now" for name, then, view in words if then != view]
    raise ValueError(
        f"Muon.load_state_dict: views: {listed(differing, _MOST_NAMED, '; ')}. Expected: the views by "
        "select and dmuon.views.by_class with which the training began, because Muon comes to another result "
        "with others. To go on with others nevertheless, set accepts_other_views = True of the dmuon.Muon "
        "itself, not of a wrapper, on all ranks before."
    )


def _require_members(saved: Sequence[dict[str, Any]], now: Mapping[int, str]) -> None:
    with_keys = [number for number in now if saved[number].keys() - {"params", "param_names"}]
    for number, ours in now.items() if with_keys else ():
        algorithm = SavedAlgorithm.of(saved[number])
        without = "matrices of one group" if algorithm.listed and len(now) > 1 else ours  # torch's optimizers list none
        theirs = algorithm.members() or without if number in with_keys else "none"
        if theirs != ours:
            raise ValueError(
                f"Muon.load_state_dict: param_groups[{number}]: the checkpoint has other groups of matrices. Expected "
                f"{ours}, as this optimizer has, got {theirs}. Expected: the muon_groups with which the checkpoint was "
                "saved; or, in a state dict by names, the 'param_groups' of get_optimizer_state_dict now, which have "
                "the present hyperparameters."
            )
