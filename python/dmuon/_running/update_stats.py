"""Figures of the last update of each matrix, for logs."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn as nn

from dmuon import _C
from dmuon._running.host_gradients import add_up
from dmuon._running.runtime import Runtime, runtime_of


class UpdateStats(NamedTuple):
    """Figures of one parameter's update: 0-dimensional fp32 tensors, equal on every rank.

    O is the orthogonalised update of a matrix, before the rule changes it, and m the lesser of its sides. For a
    parameter with several matrices `spectral_norm` and `residual` are the largest, and `cosine` is the mean.

    Attributes:
        rms: root mean square of the change of the weights, weight decay included. 0 for a skipped step, whose other
            figures say nothing.
        spectral_norm: estimate of the largest singular value of O, from below, by 20 steps of power iteration.
        residual: |O O' - I| / sqrt(m) with the Frobenius norm: 0 if O is orthogonal, 1 if it is 0.
        cosine: between the step's gradient and the momentum before the step; 0 in the first step.
    """

    rms: torch.Tensor
    spectral_norm: torch.Tensor
    residual: torch.Tensor
    cosine: torch.Tensor


@torch.no_grad()
def update_stats(model: nn.Module) -> dict[str, UpdateStats]:
    """Returns figures of the last update that was recorded, for each matrix that Muon updates, by its name.

    Collective over the mesh, outside of a forward or backward. A step is recorded if `optimizer.record_stats` is True;
    set it alike on every rank before the step's `clip_grad_norm_`, or a step raises: this one, or the next one if it
    differs since the clip. Owners then compute the figures beside the update, for about a fifth of its products more,
    in fp32; weights have the same bits. This call sends four numbers a matrix in one message. It does not wait for the
    device.

    Args:
        model: a model with dmuon.Muon.

    Returns:
        NaN for parameters that had no gradient on any rank.

    Raises:
        ValueError: the model has no dmuon.Muon yet, no step was recorded, or ranks have come to different calls.
    """
    runtime = runtime_of(model, "update_stats")
    runtime.access.refuse("update_stats()", whole=True)
    was_recorded = runtime.engine.owned().has_name(_C.UPDATE_STATS)
    runtime.meet(f"update_stats() {'after' if was_recorded else 'without'} a recorded step")
    if not was_recorded:
        raise ValueError("update_stats: model: expected a step with optimizer.record_stats = True, got none")
    # Each word is 0 on all ranks but one.
    figures = torch.zeros(
        sum(map(len, runtime.parts)), len(UpdateStats._fields), dtype=torch.float32, device=runtime.device
    )
    for index in range(len(runtime.leaves)):
        for part in runtime.transfers.owned_parts(index, _C.UPDATE_STATS):
            rms, spectral_norm, residual, cosine = part.tensor.view(-1, len(UpdateStats._fields)).unbind(1)
            of_part = [rms.square().mean().sqrt(), spectral_norm.max(), residual.max(), cosine.mean()]
            figures[part.parameter] = torch.stack(of_part)
    runtime.engine.drain()
    add_up(figures, runtime.ranks)
    return {leaf.name: _joined(figures, runtime, index) for index, leaf in enumerate(runtime.leaves)}


def _joined(figures: torch.Tensor, runtime: Runtime, index: int) -> UpdateStats:
    """Returns the figures of a leaf from those of its parts."""
    parts = runtime.parts[index]
    if len(parts) == 1:
        return UpdateStats(*figures[parts[0]].unbind())
    items = [runtime.plan.native.inventory[part] for part in parts]
    elements = [item.num_matrices * item.rows * item.cols for item in items]
    matrices = [item.num_matrices * item.column_blocks for item in items]

    def mean(values: list[torch.Tensor], counts: list[int]) -> torch.Tensor:
        weighted = [value * (count / sum(counts)) for value, count in zip(values, counts, strict=True)]
        return torch.stack(weighted).sum()

    rms, spectral_norm, residual, cosine = (list(column.unbind()) for column in figures[parts[0] : parts[-1] + 1].T)
    squares = mean([value.square() for value in rms], elements)
    largest = [torch.stack(of).max() for of in (spectral_norm, residual)]
    return UpdateStats(squares.sqrt(), largest[0], largest[1], mean(cosine, matrices))


def problem_of_recording(runtime: Runtime, record_stats: object) -> str | None:
    """Returns the reason why a step cannot be recorded, or None. Alike on all ranks."""
    if not isinstance(record_stats, bool):
        return f"Muon: record_stats: expected True or False, got {record_stats!r}"
    if not record_stats:
        return None
    expected = "Muon: record_stats: expected False"
    if runtime.ranks.tensor_parallel > 1:
        return f"{expected} under tensor parallelism, where an owner has slices, got True"
    for leaf, parts in zip(runtime.leaves, runtime.parts, strict=True):
        if any(runtime.plan.native.inventory[part].heights for part in parts):
            return f"{expected} with '{leaf.name}', whose view interleaves its rows, got True"
        if leaf.num_columns > 1:
            return f"{expected} with '{leaf.name}', of whose experts each column has its own, got True"
    return None
