"""Draws step times of one or more runs of train_step.py, relative to AdamW's, with their 95 % intervals.

python bench/draw_step_time.py out/bench/1x4.json out/bench/2x2.json --out docs/step_time.svg
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.contender import LABELS
from bench.report import COLORS


def where(run: dict[str, Any]) -> str:
    """A run's mesh and network, as in "mesh 2x2, 1 Gbit/s"."""
    rate = re.search(r"(\d+)([kmg])bit", run.get("network", ""))
    network = f"{rate[1]} {rate[2].replace('m', 'M').replace('g', 'G')}bit/s" if rate else "loopback"
    mesh = run["mesh"] if "x" in run["mesh"] else f"1x{run['mesh']}"
    return f"mesh {mesh}, {network}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="the files of --json")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in options.runs]
    figure, axis = plt.subplots(figsize=(7, 0.8 + 0.9 * len(runs)), layout="constrained")
    for place, run in enumerate(runs):
        for line, (name, row) in enumerate(run["optimizers"].items()):
            ratio = row["ratio_to_adamw"]
            errors = [[ratio["median"] - ratio["low"]], [ratio["high"] - ratio["median"]]]
            label = LABELS[name] if place == 0 else None
            axis.barh(place + 0.27 * line, ratio["median"], 0.25, color=COLORS[name], label=label, xerr=errors)
    axis.set_yticks([place + 0.27 for place in range(len(runs))], [where(run) for run in runs])
    axis.axvline(1, color="black", linewidth=0.8)
    axis.invert_yaxis()
    axis.set(xlabel="time of a training step, AdamW's = 1", xlim=(0, None))
    axis.legend(loc="lower right")
    figure.savefig(options.out, metadata={"Date": None} if options.out.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
