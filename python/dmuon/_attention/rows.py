"""The rows of matrices and biases that QK-clip scales, and their factors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from dmuon._running.runtime import Runtime
from dmuon._saving.owned_shards import MASTER
from dmuon._setup.leaf import Leaf
from dmuon._setup.place import clean_name, joined
from dmuon._setup.placeholder import OwnedTensor
from dmuon._setup.slices import cut_as
from dmuon.attention import Heads


class HeadRows:
    """The factors of all rows that this rank scales, from the largest logits of all heads.

    Head h of a group of query heads has gamma_h = min(1, tau / S_h), and the group has the least one, g. Key rows are
    multiplied by sqrt(g), query rows by gamma_h / sqrt(g), and the rows that meet a shared key by gamma_h. So the
    logits of each head shrink by its own gamma_h (Kimi K2, arXiv 2507.20534, algorithm 1, for groups of one head).
    """

    def __init__(self, runtime: Runtime, heads: Mapping[str, Heads]) -> None:
        """Finds the rows. Local.

        Raises:
            ValueError: a projection is no matrix of Muon's, or the rows are not there or belong to two heads; or the
                rows' bias is frozen, or a norm follows.
        """
        self._num_heads = sum(one.num_heads for one in heads.values())
        self._group_of = torch.tensor(_groups_of(heads.values()), device=runtime.device)
        self._num_groups = sum(one.kv_heads for one in heads.values())
        finder = _Finder(runtime, self._num_heads)
        self._projections: dict[str, tuple[list[int], list[nn.Parameter]]] = {}  # by module: parameters, biases
        for name, one in heads.items():
            leaves = finder.add(name, one)
            biases = [bias for bias, leaf in finder.biases if leaf in leaves]
            self._projections[name] = [part for leaf in leaves for part in runtime.parts[leaf]], biases
        self.parameters: list[int] = []  # owned here
        self.biases: list[nn.Parameter] = []
        pieces: list[torch.Tensor] = []
        for index, sources in finder.sources.items():
            cols = runtime.leaves[index].shape[1]
            for part in runtime.transfers.owned_parts(index, MASTER):
                pieces.append(sources[part.elements.begin // cols : part.elements.end // cols])
                self.parameters.append(part.parameter)
        for bias, index in finder.biases:
            sources = finder.sources[index]
            pieces.append(cut_as(sources, bias) if isinstance(bias, DTensor) else sources)
            self.biases.append(bias)
        self._sizes = [len(piece) for piece in pieces]
        self._sources = torch.cat(pieces).to(runtime.device) if pieces else None

    def resting(self, group_of: Sequence[int]) -> list[str]:
        """Returns the modules that a step must not clip: it leaves a projection or a bias of theirs as it is.

        Args:
            group_of: by parameter; negative if the step does not update it.
        """
        return [
            name
            for name, (parameters, biases) in self._projections.items()
            if min(group_of[parameter] for parameter in parameters) < 0 or not all(b.requires_grad for b in biases)
        ]

    def factors(self, maxima: torch.Tensor, tau: float, applies: torch.Tensor) -> list[torch.Tensor]:
        """Returns [rows] fp32 for each of `parameters`, then of `biases`. Does not wait for the device.

        Args:
            maxima: [heads] fp64, equal on all ranks. A head without a finite one has the factor 1.
            tau: heads with a larger logit are clipped.
            applies: [] bool; if it is false all factors are 1.
        """
        if self._sources is None:
            return []
        gamma = torch.where((maxima > tau) & maxima.isfinite(), tau / maxima, 1.0)
        least = gamma.new_ones(self._num_groups).scatter_reduce_(0, self._group_of, gamma, "amin")
        of_key = least.sqrt_()
        of_query = gamma / of_key.index_select(0, self._group_of)
        # In the order of the sources: see _Finder.
        of_sources = torch.cat([gamma.new_ones(1), of_query, gamma, of_key])
        of_sources = torch.where(applies, of_sources, 1.0).float()
        return list(of_sources.index_select(0, self._sources).split(self._sizes))


class _Finder:
    """Finds each row's source: 0 without one, then the query heads, their rows with a shared key, and the key heads."""

    def __init__(self, runtime: Runtime, num_heads: int) -> None:
        self.sources: dict[int, torch.Tensor] = {}  # [rows] of a leaf
        self.biases: list[tuple[nn.Parameter, int]] = []  # with the leaf whose rows they have
        self._runtime, self._num_heads = runtime, num_heads
        self._head, self._group = 1, 1 + 2 * num_heads  # sources of the next module's
        self._leaf_of = {place.name: index for index, leaf in enumerate(runtime.leaves) for place in leaf.places}
        named = nn.Module.named_parameters(runtime.model, remove_duplicate=False)
        self._parameters = {clean_name(name): parameter for name, parameter in named}

    def add(self, name: str, heads: Heads) -> set[int]:
        """Adds the rows of a module. Returns the leaves that have them."""
        if heads.normed:
            raise ValueError(
                f"QKClip: '{name}': expected queries and keys as the projections make them, got a norm behind the "
                "projections: it undoes every factor of their rows, so a clip would have no effect. Use QKClip(model, "
                "tau=math.inf) to log the logits alone."
            )
        query, key = self._leaf(name, heads.query), self._leaf(name, heads.key)
        for head, row in enumerate(heads.query_rows):
            self._claim(query, row, heads.head_dim, self._head + head)
            self._claim(query, row + heads.head_dim, heads.shared_dim, self._head + self._num_heads + head)
        for group, row in enumerate(heads.key_rows):
            self._claim(key, row, heads.head_dim, self._group + group)
        self._head += heads.num_heads
        self._group += heads.kv_heads
        return {query, key}

    def _leaf(self, name: str, path: str) -> int:
        """Returns the leaf of a projection. Notes its bias."""
        whole = joined(name, path)
        weight = whole if whole in self._parameters else f"{whole}.weight"
        index = self._leaf_of.get(weight)
        if index is None:
            parameter = self._parameters.get(weight)
            got = (
                "one below an adapter of LoRA's"
                if f"{whole}.base_layer.weight" in self._parameters
                else "no such parameter"
                if parameter is None
                else "one of AdamW's"
                if parameter.requires_grad
                else "a frozen one"
            )
            raise ValueError(f"QKClip: '{weight}': expected a matrix that Muon updates, got {got}")
        if index not in self.sources:
            leaf = self._runtime.leaves[index]
            _check_layout(weight, leaf)
            self.sources[index] = torch.zeros(leaf.shape[0], dtype=torch.long)
            bias = self._parameters.get(f"{weight.removesuffix('weight')}bias")
            if bias is not None:
                self._add_bias(weight, bias, index)
        return index

    def _add_bias(self, weight: str, bias: nn.Parameter, index: int) -> None:
        rows = self._runtime.leaves[index].shape[0]
        if not bias.requires_grad or isinstance(bias, OwnedTensor) or bias.shape != (rows,):
            got = f"shape {tuple(bias.shape)}, {'trainable' if bias.requires_grad else 'frozen'}"
            raise ValueError(
                f"QKClip: the bias beside '{weight}': expected a trainable one of shape ({rows},), because it is part "
                f"of the logits, got {got}"
            )
        self.biases.append((bias, index))

    def _claim(self, index: int, begin: int, count: int, source: int) -> None:
        rows = self.sources[index][begin : begin + count]
        leaf = self._runtime.leaves[index]
        if len(rows) < count:
            raise ValueError(
                f"QKClip: '{leaf.name}': expected a row {begin + count - 1}, of a head, got {leaf.shape[0]} rows"
            )
        if rows.any():
            raise ValueError(f"QKClip: '{leaf.name}': expected each row in one head, got rows from {begin} on in two")
        rows.fill_(source)


def _check_layout(name: str, leaf: Leaf) -> None:
    if len(leaf.shape) != 2 or leaf.num_columns > 1 or any(view.transposed for view in leaf.views):
        raise ValueError(
            f"QKClip: '{name}': expected a matrix [rows of heads, inputs], got shape {tuple(leaf.shape)}"
            f"{', stored as [inputs, rows of heads]' if any(view.transposed for view in leaf.views) else ''}"
        )


def _groups_of(all_heads: Iterable[Heads]) -> list[int]:
    """Returns the group of each query head, over all modules."""
    groups: list[int] = []
    for heads in all_heads:
        first = groups[-1] + 1 if groups else 0
        groups += [first + head * heads.kv_heads // heads.num_heads for head in range(heads.num_heads)]
    return groups
