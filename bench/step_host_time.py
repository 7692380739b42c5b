"""Time of one `step()` over many matrices on one process: dmuon.Muon against torch.optim.Muon's loop.

dmuon runs twice: the matrices are parameters of their own, or one parameter with a view, like heads or experts. With
tiny matrices overhead is all that there is to measure. No process group exists.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

import dmuon

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.interleave import orders, paired_ratio
from bench.provenance import provenance

TORCH, APART, STACK = "torch.optim.Muon", "dmuon.Muon", "dmuon.Muon, one parameter"


class Wide(nn.Module):
    """Many matrices side by side, so that gradients neither vanish nor explode; or all of them in one parameter."""

    def __init__(self, num_matrices: int, rows: int, cols: int, is_stack: bool) -> None:
        super().__init__()
        values = torch.randn(num_matrices, rows, cols) / cols**0.5
        self.matrices = nn.ParameterList([values] if is_stack else values.unbind())

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x @ matrix.mT for matrix in self.matrices]).square().mean()


class Subject:
    """A model, its optimizer, and a training step that times `step()` alone."""

    def __init__(self, name: str, num_matrices: int, rows: int, cols: int) -> None:
        torch.manual_seed(0)
        self.model = Wide(num_matrices, rows, cols, is_stack=name == STACK)
        self.optimizer: torch.optim.Optimizer
        if name == TORCH:
            self.optimizer = torch.optim.Muon(self.model.parameters(), lr=1e-3)
        else:
            view_of = dmuon.views.experts if name == STACK else dmuon.views.matrix
            dmuon.dedicate_params(self.model, select=lambda _, module, parameter: view_of(parameter))
            self.optimizer = dmuon.Muon(self.model, lr=1e-3)
        self._x = torch.randn(8, cols)

    def block(self, num_steps: int) -> float:
        """Median seconds of `step()`."""
        seconds = []
        for _ in range(num_steps):
            self.model(self._x).backward()
            start = time.perf_counter()
            self.optimizer.step()
            seconds.append(time.perf_counter() - start)
            self.optimizer.zero_grad()
        return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--matrices", type=int, default=200)
    parser.add_argument("--shape", default="32x32", help="rows x columns of a matrix")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10, help="steps a block")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = provenance()
    print("\n".join(f"{key}: {value}" for key, value in facts.items()))
    rows, cols = (int(side) for side in options.shape.split("x"))
    subjects = {name: Subject(name, options.matrices, rows, cols) for name in (TORCH, APART, STACK)}
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for subject in subjects.values():
        subject.block(3)
    for order in orders(list(subjects), options.rounds):
        for name in order:
            seconds[name].append(subjects[name].block(options.steps))
    ratios = {name: paired_ratio(blocks, seconds[TORCH]) for name, blocks in seconds.items()}
    medians = {name: 1e3 * statistics.median(blocks) for name, blocks in seconds.items()}
    print(f"step() over {options.matrices} matrices of {rows} x {cols}, {options.rounds} rounds, x {TORCH}")
    for name, ratio in ratios.items():
        print(f"{name:26} {medians[name]:8.3f} ms   {ratio}")
    stacked = paired_ratio(seconds[STACK], seconds[APART])
    print(f"one parameter, x as many parameters: {stacked}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        said = {name: asdict(ratio) for name, ratio in ratios.items()}
        report = {**facts, "median_ms": medians, "ratio": said, "stack": asdict(stacked), "blocks_s": seconds}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
