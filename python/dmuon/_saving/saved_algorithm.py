"""The text that a saved group of matrices has as its `algorithm`.

    normuon+cautious_weight_decay {"blocks.0.qkv.weight": "3 of 4 x 12"}

The name of the rule stands for the algorithm, so that a checkpoint of another rule is refused by name. The rest has no
keys of its own in the group: `dcp.load` refuses an older checkpoint, which would lack such a key, and ignores a key
that the present group has not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dmuon._setup.leaf import Leaf, described

_CAUTIOUS = "+cautious_weight_decay"
_MEMBERS = ""  # the key of the group's members, among names of leaves


def views_to_save(leaves: Sequence[Leaf]) -> dict[str, str]:
    """Returns the views in words by the names of their leaves. A leaf that is one matrix is not listed."""
    words = {leaf.name: described(leaf.views, leaf.shape) for leaf in leaves}
    return {name: view for name, view in words.items() if view}


def algorithm_to_save(rule: str, is_cautious: bool, views: Mapping[str, str], members: str) -> str:
    """Returns the text. The `members` are not listed if they are ""."""
    listed = json.dumps({_MEMBERS: members, **views} if members else views)
    return f"{rule}{_CAUTIOUS if is_cautious else ''} {listed}"


class SavedAlgorithm(NamedTuple):
    """The parts of the text of a group, also of one by torch's optimizers or by an older dmuon."""

    name: str  # of the algorithm or the rule
    is_cautious: bool
    listed: str  # JSON; "" in groups of torch's optimizers and of an older dmuon

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> SavedAlgorithm:
        """Returns the parts. The name is "" if the group has none."""
        words, _, listed = str(group.get("algorithm") or "").partition(" ")
        name, cautious, _ = words.partition(_CAUTIOUS)
        return cls(name, bool(cautious), listed)

    def views(self) -> dict[str, str]:
        """Returns the listed views by the names of their leaves."""
        return {name: str(view) for name, view in self._read().items() if name != _MEMBERS}

    def members(self) -> str:
        """Returns the group's members in words, "" if they were not saved."""
        return self._read().get(_MEMBERS, "")

    def _read(self) -> dict[str, str]:
        try:
            found = json.loads(self.listed or "{}")
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ValueError(f"Muon.load_state_dict: algorithm: expected views as dmuon saves them, got {self.listed}")
        return found
