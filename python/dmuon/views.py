"""Views: which matrices Muon orthogonalises in a parameter.

A matrix is the parameter itself, one of several that follow each other in its memory, a block of its columns, or a part
of interleaved rows. One view describes all matrices of a parameter; several views describe them one after the other.
Muon treats each matrix as a parameter of its own, with the learning rate of its own rows and columns. The parameter is
saved whole.
`select` of `dedicate_params` may return a view or several:

    def select(name, module, parameter):
        if name.endswith("gate_up_proj.weight"):
            return dmuon.views.gate_up(parameter)  # gate and up apart, not as one matrix
        return None  # by the default rule

`by_class` holds the default views of all modules of a class. Another view gives another result: choose views at the
start of a training and do not change them, because `Muon.load_state_dict` compares them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
import torch.nn as nn


@dataclasses.dataclass(frozen=True)
class View:
    """`count` matrices of `rows` x `cols`, one after the other in the memory of a contiguous parameter.

    Attributes:
        count: number of matrices.
        rows: rows of each matrix.
        cols: columns of each matrix, the length of a row of the parameter.
        column_blocks: number of equally wide blocks of columns that are orthogonalised apart.
        transposed: True if the parameter is stored as [in, out]. Only `adjust_lr_fn` then exchanges rows and columns.
        heights: of parts whose rows are interleaved, at least two; () if rows are not interleaved. Rows then consist of
            equal groups, and each group of parts of these heights, one above the other. The i-th parts of all groups
            are one matrix.

    Raises:
        ValueError: a number is not a positive int, `column_blocks` does not divide `cols`, or the sum of `heights` does
            not divide `rows`; or there are heights beside blocks of columns or a transposed parameter.
    """

    count: int
    rows: int
    cols: int
    column_blocks: int = 1
    transposed: bool = False
    heights: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in ("count", "rows", "cols", "column_blocks"):
            value = getattr(self, field)
            if type(value) is not int or not 1 <= value < 2**31:
                raise ValueError(f"View: {field}: expected an integer in [1, 2**31), got {value!r}")
        if self.cols % self.column_blocks:
            raise ValueError(
                f"View: column_blocks: expected a divisor of the {self.cols} cols, got {self.column_blocks}"
            )
        if type(self.transposed) is not bool:
            raise ValueError(f"View: transposed: expected True or False, got {self.transposed!r}")
        heights = self.heights
        if type(heights) is not tuple or len(heights) == 1 or not all(type(h) is int and h >= 1 for h in heights):
            raise ValueError(f"View: heights: expected () or a tuple of several positive integers, got {heights!r}")
        if heights and self.rows % sum(heights):
            raise ValueError(f"View: heights: expected a sum that divides the {self.rows} rows, got {heights}")
        if heights and (self.transposed or self.column_blocks > 1):
            raise ValueError(
                f"View: heights: expected () beside column_blocks or transposed, got {heights} beside "
                f"column_blocks = {self.column_blocks}, transposed = {self.transposed}"
            )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The shape [count, rows, cols] in which the parameter's elements are read."""
        return self.count, self.rows, self.cols

    @property
    def sides(self) -> tuple[int, int]:
        """The shape [rows, cols] of each matrix that is orthogonalised; of interleaved parts, the lowest one's."""
        rows = self.num_groups * min(self.heights) if self.heights else self.rows
        return rows, self.cols // self.column_blocks

    @property
    def num_groups(self) -> int:
        """The number of groups of interleaved rows, 1 if rows are not interleaved."""
        return self.rows // sum(self.heights) if self.heights else 1

    def matrices(self, values: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yields the matrices to orthogonalise, as they are stored. Those of interleaved rows are copies.

        The first stored matrix comes first, with its blocks of columns from left to right, or its parts in the order of
        `heights`.

        Args:
            values: all elements of this view, in order, in any shape.
        """
        for stored in values.reshape(self.sizes):
            if self.heights:
                groups = stored.view(self.num_groups, -1, self.cols)
                yield from (part.flatten(0, 1) for part in groups.split(self.heights, 1))
            else:
                yield from stored.chunk(self.column_blocks, 1)

    def __str__(self) -> str:
        number = f"{self.count} of " if self.count > 1 else ""
        blocks = f"{self.column_blocks}*" if self.column_blocks > 1 else ""
        groups = f"{self.num_groups}*" if self.num_groups > 1 else ""
        rows = f"{groups}({' + '.join(map(str, self.heights))})" if self.heights else self.rows
        return f"{number}{rows} x {blocks}{self.sides[1]}{' transposed' if self.transposed else ''}"


def matrix(parameter: torch.Tensor) -> View:
    """Views [rows, cols] as one matrix, as Muon does without a view.

    Raises:
        ValueError: the parameter has another shape.
    """
    return View(1, *_sizes("matrix", parameter, "[rows, cols]", 2))


def experts(parameter: torch.Tensor) -> View:
    """Views [experts, rows, cols] as one matrix for each expert. The default rule does so for modules named so.

    Raises:
        ValueError: the parameter has another shape.
    """
    return View(*_sizes("experts", parameter, "[experts, rows, cols]", 3))


def gate_up(parameter: torch.Tensor) -> View:
    """Views [2 rows, cols] or [experts, 2 rows, cols] as gate and up, which lie one above the other.

    Raises:
        ValueError: the parameter has another shape, or an odd number of rows.
    """
    *stack, rows, cols = _sizes("gate_up", parameter, "[2 rows, cols] or [experts, 2 rows, cols]", 2, 3)
    if rows % 2:
        shape = tuple(parameter.shape)
        raise ValueError(f"views.gate_up: parameter: expected rows that are a multiple of 2, got {shape}")
    return View(2 * (stack[0] if stack else 1), rows // 2, cols)


def per_head(parameter: torch.Tensor, head_dim: int) -> View:
    """Views [heads * head_dim, cols] as one [head_dim, cols] for each head. Fused Q, K and V are treated alike.

    Raises:
        ValueError: the parameter has another shape, or `head_dim` does not divide its rows.
    """
    rows, cols = _sizes("per_head", parameter, "[heads * head_dim, cols]", 2)
    if type(head_dim) is not int or head_dim < 1 or rows % head_dim:
        raise ValueError(f"views.per_head: head_dim: expected a divisor of the {rows} rows, got {head_dim!r}")
    return View(rows // head_dim, head_dim, cols)


def qkv(parameter: torch.Tensor, num_heads: int = 1, num_kv_heads: int | None = None) -> tuple[View, ...]:
    """Views [rows, cols] as Q, K and V, which lie one above the other. K and V may have fewer heads than Q.

    Args:
        parameter: has (num_heads + 2 num_kv_heads) * head_dim rows.
        num_heads: heads of Q.
        num_kv_heads: heads of K, and of V. None means as many as Q has.

    Raises:
        ValueError: the parameter has another shape, or other rows than for these heads; or a number is not positive.
    """
    heads = [num_heads, *[num_heads if num_kv_heads is None else num_kv_heads] * 2]
    if not all(type(number) is int and number >= 1 for number in heads):
        raise ValueError(
            f"views.qkv: num_heads, num_kv_heads: expected positive integers, got {num_heads!r}, {num_kv_heads!r}"
        )
    height, _ = _sizes("qkv", parameter, "[rows, cols]", 2)
    if height % sum(heads):
        raise ValueError(
            f"views.qkv: num_heads, num_kv_heads: expected num_heads + 2 num_kv_heads that divide the {height} rows, "
            f"got {heads[0]} + 2 * {heads[1]}"
        )
    head_dim = height // sum(heads)
    return rows(parameter, [number * head_dim for number in heads])


def rows(parameter: torch.Tensor, heights: Sequence[int]) -> tuple[View, ...]:
    """Views [rows, cols] as matrices of these heights, which lie one above the other.

    Raises:
        ValueError: the parameter has another shape, or the heights do not sum to its rows.
    """
    height, cols = _sizes("rows", parameter, "[rows, cols]", 2)
    if not _are_sizes(heights) or sum(heights) != height:
        raise ValueError(f"views.rows: heights: expected positive integers that sum to {height}, got {heights!r}")
    return tuple(View(len(list(alike)), of, cols) for of, alike in groupby(heights))


def interleaved(parameter: torch.Tensor, heights: Sequence[int], by_group: bool = False) -> View:
    """Views [groups * sum(heights), cols] as interleaved parts: each group of rows has a block of each part.

    GPT-NeoX's `query_key_value` has a group for each head, and in it rows of Q, K and V:

        dmuon.views.interleaved(parameter, [head_dim] * 3)  # three matrices of [heads * head_dim, cols]

    DeepSeek's `kv_b_proj` has rows of K without positions and of V in each head:

        dmuon.views.interleaved(parameter, [qk_nope_head_dim, v_head_dim], by_group=True)  # two for each head

    Parts have one owner, in a stack those of each expert, unless `by_group`. Tensor parallelism may not divide them.

    Args:
        parameter: [rows, cols], or [experts, rows, cols] with such parts in each expert.
        heights: of the parts of a group, from above.
        by_group: True gives each group its own matrices. False joins the i-th parts of all groups to one matrix.

    Raises:
        ValueError: the parameter has another shape, a height is not positive, or their sum does not divide the rows.
    """
    *stack, num_rows, cols = _sizes("interleaved", parameter, "[rows, cols] or [experts, rows, cols]", 2, 3)
    if not _are_sizes(heights) or not heights or num_rows % sum(heights):
        wanted = f"positive integers, whose sum divides the {num_rows} rows"
        raise ValueError(f"views.interleaved: heights: expected {wanted}, got {heights!r}")
    count = stack[0] if stack else 1
    if by_group:
        count, num_rows = count * num_rows // sum(heights), sum(heights)
        if len(set(heights)) == 1:
            return View(count * len(heights), heights[0], cols)
    return View(count, num_rows, cols, heights=tuple(heights) if len(heights) > 1 else ())


def columns(parameter: torch.Tensor, num_blocks: int) -> View:
    """Views [rows, cols] or [experts, rows, cols] as blocks of equally many columns, which lie side by side.

    Raises:
        ValueError: the parameter has another shape, or `num_blocks` does not divide its columns.
    """
    *stack, rows, cols = _sizes("columns", parameter, "[rows, cols] or [experts, rows, cols]", 2, 3)
    if type(num_blocks) is not int or num_blocks < 1 or cols % num_blocks:
        raise ValueError(f"views.columns: num_blocks: expected a divisor of the {cols} columns, got {num_blocks!r}")
    return View(stack[0] if stack else 1, rows, cols, column_blocks=num_blocks)


def transposed(view: View) -> View:
    """Returns the same view of a parameter that is stored as [in, out]: `adjust_lr_fn` exchanges rows and columns.

    Raises:
        ValueError: `view` is no dmuon.View.
    """
    if not isinstance(view, View):
        raise ValueError(f"views.transposed: view: expected a dmuon.View, got {view!r}")
    return dataclasses.replace(view, transposed=True)


def conv1d(parameter: torch.Tensor) -> View:
    """Views [in, out] of Transformers' `Conv1D` as one matrix, which is stored transposed.

    Raises:
        ValueError: the parameter has another shape.
    """
    return transposed(matrix(parameter))


def conv(parameter: torch.Tensor, groups: int = 1) -> View:
    """Views [out, in / groups, ...] of a convolution as one matrix for each group.

    `by_class` reads the groups of PyTorch's convolutions. It views the weights of transposed ones as transposed.

    Raises:
        ValueError: the parameter has another shape, or `groups` does not divide `out`.
    """
    out = _sizes("conv", parameter, "[out, in / groups, ...]", 3, 4, 5)[0]
    if type(groups) is not int or groups < 1 or out % groups:
        raise ValueError(f"views.conv: groups: expected a divisor of the {out} rows, got {groups!r}")
    return View(groups, out // groups, parameter.numel() // out)


def _are_sizes(values: object) -> bool:
    return isinstance(values, Sequence) and all(type(value) is int and value >= 1 for value in values)


def _sizes(function: str, parameter: torch.Tensor, expected: str, *dimensions: int) -> torch.Size:
    if not isinstance(parameter, torch.Tensor) or parameter.ndim not in dimensions or parameter.numel() == 0:
        shape = tuple(parameter.shape) if isinstance(parameter, torch.Tensor) else type(parameter).__name__
        raise ValueError(f"views.{function}: parameter: expected {expected}, got {shape}")
    return parameter.shape


by_class: dict[type[nn.Module] | str, dict[str, Callable[[torch.Tensor], View | Sequence[View]]]] = {
    nn.Linear: {"weight": matrix},
    "transformers.pytorch_utils.Conv1D": {"weight": conv1d},
    nn.MultiheadAttention: {"in_proj_weight": matrix, "?_proj_weight": matrix},
    nn.RNNBase: {"weight_*": matrix},
    nn.RNNCellBase: {"weight_*": matrix},
}
"""The parameters that Muon updates by default, and their views, for modules of these classes and of subclasses.

A key is a class or its qualified name; the nearest base class counts. In a parameter's name `*` and `?` stand for
anything. Add your own before `dedicate_params`, the same on all ranks; {} gives a class to AdamW. dmuon warns of an
entry that fits nothing in a model.
"""
_BY_DEFAULT = {cls: dict(rule) for cls, rule in by_class.items()}
