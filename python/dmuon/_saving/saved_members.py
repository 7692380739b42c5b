"""The members of Muon's groups in a saved optimizer that has several: with other groups rates would be mixed up.

PyTorch's functions look for the group of each parameter by its name, and take the last one found for the whole group.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from dmuon._setup.leaf import Leaf

KEY = ""  # among the views, beside names of leaves


def members_of(groups: Sequence[dict[str, Any]], leaf_of: Mapping[Any, int], leaves: Sequence[Leaf]) -> dict[int, str]:
    """Returns the members of each group of matrices, by its number, in words that are equal for equal lists."""
    found = {}
    for number, group in enumerate(groups):
        if group["algorithm"] == "muon":
            names = [leaves[leaf_of[parameter]].name for parameter in group["params"]]
            first = f" from '{names[0]}' on" if names else ""
            found[number] = f"{len(names)} matrices{first} ({zlib.crc32(chr(10).join(names).encode()):08x})"
    return found


def require_saved_members(saved: Sequence[dict[str, Any]], now: Mapping[int, str]) -> None:
    """Checks saved groups, whose texts `require_saved_views` can read, against `members_of` the present groups.

    Raises:
        ValueError: the checkpoint has other groups of matrices. Names the first group that differs.
    """
    with_keys = [number for number in now if saved[number].keys() - {"params", "param_names"}]
    for number, ours in now.items() if with_keys else ():
        text = str(saved[number].get("algorithm", "")).partition(" ")[2]
        without = "matrices of one group" if text and len(now) > 1 else ours  # torch's optimizers have no text
        theirs = (json.loads(text) if text else {}).get(KEY, without) if number in with_keys else "none"
        if theirs != ours:
            raise ValueError(
                f"Muon.load_state_dict: param_groups[{number}]: the checkpoint has other groups of matrices. Expected "
                f"{ours}, as this optimizer has, got {theirs}. Expected: the muon_groups with which the checkpoint was "
                "saved; or, in a state dict by names, the 'param_groups' of get_optimizer_state_dict now, which have "
                "the present hyperparameters."
            )
