"""The views of leaves in a saved optimizer. Another view is another algorithm.

Views follow the algorithm's name in its group: 'muon {"blocks.0.qkv.weight": "3 of 4 x 12"}'. A leaf that is one matrix
is not listed. Views have no key of their own, because `dcp.load` refuses older checkpoints, which would lack the key.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dmuon._saving.saved_members import KEY as MEMBERS
from dmuon._setup.leaf import Leaf, described
from dmuon._setup.shown import listed

_MOST_NAMED = 3
_WHOLE = "one matrix"


def with_views(algorithm: str, leaves: Sequence[Leaf], members: str) -> str:
    """Returns the text to save as a group's `algorithm`. `members` are the group's, "" if none are to be saved."""
    words = {MEMBERS: members} | {leaf.name: described(leaf.views, leaf.shape) for leaf in leaves}
    return f"{algorithm} {json.dumps({name: view for name, view in words.items() if view})}"


def without_views(algorithm: str) -> str:
    """Returns the algorithm from a saved text."""
    return algorithm.partition(" ")[0]


def require_saved_views(groups: Sequence[dict[str, Any]], leaves: Sequence[Leaf]) -> None:
    """Checks saved groups. Groups without views, by torch's optimizers or by an older dmuon, fit.

    Raises:
        ValueError: a leaf has other views now, or another name. Names the leaf.
    """
    words = {text for group in groups if (text := str(group.get("algorithm", "")).partition(" ")[2])}
    for text in words:
        try:
            saved = json.loads(text)
            unknown = [f"'{name}'" for name in sorted(saved.keys() - {leaf.name for leaf in leaves} - {MEMBERS})]
            theirs = [str(saved.get(leaf.name, "")) for leaf in leaves]
        except (ValueError, AttributeError):
            raise ValueError(
                f"Muon.load_state_dict: algorithm: expected views as dmuon saves them, got {text}"
            ) from None
        ours = [described(leaf.views, leaf.shape) for leaf in leaves]
        differing = [
            f"'{leaf.name}' was {then or _WHOLE} and is {now or _WHOLE} now"
            for leaf, then, now in zip(leaves, theirs, ours, strict=True)
            if then != now
        ]
        if unknown:
            raise ValueError(
                "Muon.load_state_dict: the checkpoint has matrices that this model has not, "
                f"{listed(unknown, _MOST_NAMED)}. Expected: the model, with its depth and names, of which the "
                "checkpoint is. Where names alone differ, accepts_other_views = True of the dmuon.Muon itself loads "
                "it, if views need no comparison."
            )
        if differing:
            raise ValueError(
                f"Muon.load_state_dict: views: {listed(differing, _MOST_NAMED, '; ')}. Expected: the views by "
                "select and dmuon.views.by_class with which the training began, because Muon comes to another result "
                "with others. To go on with others nevertheless, set accepts_other_views = True of the dmuon.Muon "
                "itself, not of a wrapper, on all ranks before."
            )
