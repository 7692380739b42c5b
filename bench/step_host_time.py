"""Host time of one `step()` over many tiny matrices: dmuon.Muon against torch.optim.Muon, one process.

Tiny matrices leave nothing but overhead to measure. No process group exists.
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


class Wide(nn.Module):
    """Many square matrices side by side, so that gradients neither vanish nor explode."""

    def __init__(self, num_matrices: int, side: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(side, side, bias=False) for _ in range(num_matrices))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).square().mean()


class Subject:
    """A model, its optimizer and a step of which only `step()` is timed."""

    def __init__(self, name: str, num_matrices: int, side: int) -> None:
        torch.manual_seed(0)
        self.model = Wide(num_matrices, side)
        self.optimizer: torch.optim.Optimizer
        if name == "dmuon":
            dmuon.dedicate_params(self.model)
            self.optimizer = dmuon.Muon(self.model, lr=1e-3)
        else:
            self.optimizer = torch.optim.Muon(self.model.parameters(), lr=1e-3)
        self._x = torch.randn(8, side)

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
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10, help="steps a block")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = provenance()
    print("\n".join(f"{key}: {value}" for key, value in facts.items()))
    subjects = {name: Subject(name, options.matrices, options.side) for name in ("torch", "dmuon")}
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for subject in subjects.values():
        subject.block(3)
    for order in orders(list(subjects), options.rounds):
        for name in order:
            seconds[name].append(subjects[name].block(options.steps))
    ratio = paired_ratio(seconds["dmuon"], seconds["torch"])
    medians = {name: 1e3 * statistics.median(blocks) for name, blocks in seconds.items()}
    print(f"step() over {options.matrices} matrices of {options.side} x {options.side}, {options.rounds} rounds")
    print(f"torch.optim.Muon {medians['torch']:8.3f} ms")
    print(f"dmuon.Muon       {medians['dmuon']:8.3f} ms   x torch.optim.Muon: {ratio}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        report = {**facts, "median_ms": medians, "ratio": asdict(ratio), "blocks_s": seconds}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
