"""The groups that an optimizer begins with: those that the user gives, and one of the rest for each algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.nn as nn

from dmuon._setup.dedication import Dedication
from dmuon._setup.hyperparameters import check_group, require_rule, rule_of, settings_of
from dmuon._setup.members import Member, Members
from dmuon._setup.shown import shown

Group = dict[str, Any]


class Given(NamedTuple):
    """Hyperparameters and groups that the user gives to `Muon`."""

    muon: Group
    adamw: Group
    muon_groups: Any
    adamw_groups: Any


def first_groups(
    model: nn.Module, dedication: Dedication, given: Given, facts: list[str]
) -> tuple[list[Group], list[Group]]:
    """Returns Muon's groups, whose "params" are indices of leaves, and AdamW's.

    The rest comes before the given groups.

    Args:
        model: a model whose leaves are taken out, or provisional.
        dedication: the model's dedication.
        given: the defaults of the groups' options, and the groups in torch's form.
        facts: gets a line for each group.

    Raises:
        ValueError: a group is none; or has a bad hyperparameter, or parameters that `Members.resolved` refuses or that
            another group has.
    """
    members = Members(model, dedication.leaves, dedication.former, dedication.replaced)
    muon = _groups(members, given.muon, given.muon_groups, "muon_groups", dedication, facts)
    adamw = _groups(members, given.adamw, given.adamw_groups, "adamw_groups", dedication, facts)
    return (
        [{**group, "params": [m.leaf for m in of]} for group, of in muon],
        [{**group, "params": [m.parameter for m in of]} for group, of in adamw],
    )


def _groups(
    members: Members, defaults: Group, given: Any, argument: str, dedication: Dedication, facts: list[str]
) -> list[tuple[Group, list[Member]]]:
    """Returns the groups given in an argument with all their options; first the members that none of them has."""
    algorithm = defaults["algorithm"]
    if not isinstance(given, list | tuple):
        raise ValueError(f"Muon: {argument}: expected a list of groups, got {_kind(given)}")
    taken: dict[Member, str] = {}
    groups = []
    for index, options in enumerate(given):
        where = f"Muon: {argument}[{index}]"
        if not isinstance(options, dict) or "params" not in options:
            raise ValueError(f"{where}: expected a dict with 'params', got {_kind(options)}")
        if options.get("algorithm", algorithm) != algorithm:
            raise ValueError(
                f"{where}: algorithm: expected '{algorithm}' or nothing, got {shown(options['algorithm'])}"
            )
        params = options["params"]
        if dedication.meta_start is not None:
            params = dedication.meta_start.resolved(list(params) if isinstance(params, Iterator) else params)
        found = members.resolved(params, algorithm, where)
        if not found and algorithm == "muon":
            raise ValueError(f"{where}: params: expected matrices that Muon updates, got none")
        for member in found:
            if member in taken:
                raise ValueError(
                    f"{where}: params: expected parameters that no other group has, got '{member.name}' twice, also in "
                    f"{taken[member]}"
                )
            taken[member] = f"{argument}[{index}]"
        group = {**defaults, **options}
        if algorithm == "muon":
            require_rule(group, rule_of(defaults), where)
        check_group(group, where)
        facts.append(f"{argument}[{index}] {settings_of(group)} of {[member.name for member in found]}")
        groups.append((group, found))
    rest = [member for member in members.of(algorithm) if member not in taken]
    return [*([({**defaults}, rest)] if rest else []), *groups]


def _kind(value: Any) -> str:
    """Describes a value that should be a group, or a list of groups."""
    return f"a dict with {sorted(map(str, value))}" if isinstance(value, dict) else type(value).__name__
