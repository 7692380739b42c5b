"""Draws the figures of the paper from dmuon's own figures, each as SVG into --out.

    python bench/paper.py --predicted        # five figures, without PyTorch
    python bench/paper.py                    # two more, which are measured on this machine, some minutes

docs/paper.md describes them. `make paper`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.paper_figures import draw_predicted

ROOT = Path(__file__).resolve().parents[1]
RANKS, MESH = 4, "2x2"


def run(*words: str) -> None:
    """Runs a benchmark with this Python and shows its command.

    Raises SystemExit with the benchmark's status if it fails.
    """
    print("+", *words, flush=True)
    done = subprocess.run([sys.executable, *words], cwd=ROOT)
    if done.returncode:
        raise SystemExit(done.returncode)


def measure_batches(out: Path) -> Path:
    """Measures Newton-Schulz by batch size and draws it."""
    path = out / "batches.svg"
    # One small shape: the table of shapes is make bench-ns's.
    run("bench/newton_schulz.py", "--shapes", "64x64", "--rounds", "5", "--draw", str(path))
    return path


def measure_loss(out: Path, steps: int) -> Path:
    """Trains the demo's contenders and draws their losses against training time."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    race = ["bench/race.py", "--mesh", MESH, "--steps", str(steps), "--out", str(out / "race")]
    run(*launch, "--nproc-per-node", str(RANKS), *race)
    return Path(shutil.copyfile(out / "race" / "loss_by_time.svg", out / "loss.svg"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predicted", action="store_true", help="only figures that measure nothing")
    parser.add_argument("--out", type=Path, default=Path("out/paper"))
    parser.add_argument("--steps", type=int, default=64, help="training steps of each optimizer, for the loss")
    options = parser.parse_args()
    out = options.out.resolve()
    files = draw_predicted(out)
    if not options.predicted:
        files += [measure_batches(out), measure_loss(out, options.steps)]
    print(*files, sep="\n")


if __name__ == "__main__":
    main()
