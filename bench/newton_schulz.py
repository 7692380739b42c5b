"""Newton-Schulz alone, on one device: dmuon's, torch.optim.Muon's iteration, and the same in plain products.

It prints for each shape:

- milliseconds a matrix, and the times of torch.optim.Muon and of plain products over dmuon's;
- the share of the floor that dmuon reaches;
- dmuon's whole update from gradient to weight over the iteration alone, and the bytes an element that the update moves
  beside the products (as muon_step.h counts them, on CPUs);
- errors against the exact polynomial in fp64.

The floor is the least time of any backend: FLOPs of the cheaper form with symmetric products by triangles, at the rate
of the fastest large product found in this run. `make bench-ns`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.interleave import Ratio, orders, paired_ratio
from bench.provenance import machine, provenance
from dmuon import _C, _plan

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROW, STEPS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7  # torch.optim.Muon's own
# Squares and rectangles of growing size; matrices of the demo, of pi0 and of Qwen2.5-VL-3B's smaller ones; batches.
SHAPES = (
    "512x512 1024x1024 2048x2048 128x512 512x128 192x768 512x2048 1024x4096 4096x1024 256x2048 1152x4304 "
    "200*32x32 64*64x512 64*128x128 16*256x256"
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BATCHED = ((32, 32), (64, 64), (128, 128), (256, 256), (64, 512))
LEAST_S = 0.02  # of a block


@dataclass(frozen=True)
class Shape:
    """A batch of matrices."""

    batch: int
    rows: int
    cols: int

    def __str__(self) -> str:
        return f"{f'{self.batch} * ' if self.batch > 1 else ''}{self.rows} x {self.cols}"


def parse_shape(text: str) -> Shape:
    batch, _, sides = text.rpartition("*")
    rows, cols = (int(side) for side in sides.split("x"))
    return Shape(int(batch or 1), rows, cols)


def ours(x: Tensor, dtype: torch.dtype) -> Tensor:
    return _C.orthogonalize(x, [ROW], STEPS, EPS, dtype)


def theirs(x: Tensor, _: torch.dtype) -> Tensor:
    return torch.stack([_zeropower_via_newtonschulz(matrix, ROW, STEPS, EPS) for matrix in x])


def plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The direct form as one writes it down, batched, with addends inside the products."""
    a, b, c = ROW
    is_tall = x.shape[-2] > x.shape[-1]
    y = x.mT if is_tall else x
    y = (y / torch.linalg.matrix_norm(y, keepdim=True).clamp(min=EPS)).to(dtype)
    for _ in range(STEPS):
        r = y @ y.mT
        z = torch.baddbmm(r, r, r, beta=b, alpha=c)
        y = torch.baddbmm(y, z, y, beta=a)
    return y.mT if is_tall else y


Work = Callable[[Tensor, torch.dtype], Tensor]
CONTENDERS: dict[str, Work] = {"dmuon": ours, "torch": theirs, "plain": plain}


def whole_update(like: Tensor, dtype: torch.dtype) -> Work:
    """From a gradient to momentum and weights, which grow no larger by it."""
    master, momentum = torch.zeros_like(like), torch.zeros_like(like)
    applies = torch.ones((), dtype=torch.bool, device=like.device)

    group = _C.MuonGroup(
        lr=0.02,
        weight_decay=0.1,
        momentum=0.95,
        nesterov=True,
        coefficients=[ROW] * STEPS,
        eps=EPS,
        adjust_lr_fn="original",
        ns_dtype=dtype,
    )

    def work(x: Tensor, _: torch.dtype) -> Tensor:
        _C.muon_update(master, momentum, x, group, applies)
        return master

    return work


def exact(x: Tensor) -> Tensor:
    y: Tensor = x.double() / torch.linalg.matrix_norm(x.double(), keepdim=True)
    for _ in range(STEPS):
        r = y @ y.mT if y.shape[-2] <= y.shape[-1] else y.mT @ y
        z = ROW[1] * r + ROW[2] * (r @ r)
        y = ROW[0] * y + (z @ y if y.shape[-2] <= y.shape[-1] else y @ z)
    return y


def seconds_of(work: Work, x: Tensor, dtype: torch.dtype, times: int = 1) -> float:
    """Mean seconds of a call."""
    synchronize = torch.get_device_module(x.device).synchronize
    synchronize(x.device)
    start = time.perf_counter()
    for _ in range(times):
        work(x, dtype)
    synchronize(x.device)
    return (time.perf_counter() - start) / times


def peak_flops(dtype: torch.dtype, device: torch.device) -> float:
    """FLOPs a second of large products: the best of a few."""
    side = 2048 if device.type == "cpu" else 8192
    a = torch.randn(side, side, device=device).to(dtype)
    out = torch.empty_like(a)
    return 2 * side**3 / min(seconds_of(lambda a, _: torch.mm(a, a, out=out), a, dtype) for _ in range(6))


def moved_bytes(choice: _C.Choice, dtype: torch.dtype) -> int | None:
    """An element, before the iteration and after it, beside its products."""
    if choice.backend == "aten":
        return None
    passes_once = not choice.batched and dtype in (torch.float32, torch.bfloat16)
    before = (12 if passes_once else 24) + dtype.itemsize
    return before + (8 if choice.backend == "avx512" else 8 + 2 * dtype.itemsize)


def floor_seconds(shape: Shape, peak: float) -> float:
    m, n = sorted((shape.rows, shape.cols))
    return shape.batch * min(15 * m * m * n + 5 * m**3, 6 * m * m * n + 14 * m**3) / peak


def measure(shape: Shape, names: list[str], options: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the seconds of a call by round, for each contender."""
    torch.manual_seed(0)
    x = torch.randn(shape.batch, shape.rows, shape.cols, device=options.device)
    works = {**CONTENDERS, "update": whole_update(x, options.dtype)}
    once = {name: [seconds_of(works[name], x, options.dtype) for _ in range(2)][1] for name in names}
    found: dict[str, list[float]] = {name: [] for name in names}
    for order in orders(names, options.rounds):
        for name in order:
            times = max(1, round(LEAST_S / once[name]))
            found[name].append(seconds_of(works[name], x, options.dtype, times))
    return found


def errors(shape: Shape, options: argparse.Namespace) -> dict[str, float]:
    """Relative, in the Frobenius norm, of the first matrix."""
    torch.manual_seed(1)
    x = torch.randn(1, shape.rows, shape.cols, device=options.device)
    right = exact(x)
    values = {name: work(x, options.dtype).double() for name, work in CONTENDERS.items()}
    return {name: ((value - right).norm() / right.norm()).item() for name, value in values.items()}


def report(shape: Shape, peak: float, options: argparse.Namespace) -> dict[str, Any]:
    """Prints a line, and returns what it says."""
    found = measure(shape, [*CONTENDERS, "update"], options)
    ratios: dict[str, Ratio] = {name: paired_ratio(found[name], found["dmuon"]) for name in found if name != "dmuon"}
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    floor = floor_seconds(shape, peak)
    wrong = errors(shape, options)
    choice = _C.choose(shape.rows, shape.cols, [ROW], STEPS, options.device, options.dtype)
    form, moved = choice.form.name.lower(), moved_bytes(choice, options.dtype)
    print(
        f"{shape!s:16} {form:6} {1e3 * medians['dmuon'] / shape.batch:9.3f} {ratios['torch']!s:>22} "
        f"{ratios['plain']!s:>22} {floor / medians['dmuon']:6.0%} {ratios['update'].median:9.3f} {moved or '':>5} "
        f"{wrong['dmuon']:9.1e} {wrong['torch']:9.1e}",
        flush=True,
    )
    said = {name: asdict(ratio) for name, ratio in ratios.items()}
    return {
        **asdict(shape),
        "form": form,
        "bytes": moved,
        "floor_s": floor,
        "errors": wrong,
        "ratio": said,
        "seconds": found,
    }


def draw_batches(options: argparse.Namespace, to: Path) -> dict[str, list[tuple[int, float]]]:
    """Microseconds a matrix by the number in a batch, with torch.optim.Muon's beside them."""
    figure, axis = plt.subplots(figsize=(8.5, 4), layout="constrained")
    curves: dict[str, list[tuple[int, float]]] = {}
    for color, (rows, cols) in enumerate(tqdm(BATCHED, desc="batches", leave=False, disable=None)):
        for name, style in (("dmuon", "o-"), ("torch", ":")):
            points = []
            for batch in BATCHES if name == "dmuon" else BATCHES[:1]:
                seconds = measure(Shape(batch, rows, cols), [name], options)[name]
                points.append((batch, 1e6 * statistics.median(seconds) / batch))
            curves[f"{name}, {rows} x {cols}"] = points
            drawn = points if name == "dmuon" else [(batch, points[0][1]) for batch in BATCHES]
            label = f"{rows} x {cols}" if name == "dmuon" else None
            axis.plot(*zip(*drawn, strict=True), style, color=f"C{color}", label=label)
    axis.set(xscale="log", yscale="log", xlabel="matrices in a batch", ylabel="µs a matrix")
    axis.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
    axis.minorticks_off()
    axis.plot([], [], ":", color="black", label="torch.optim.Muon's,\nbf16, one by one")
    dtype = str(options.dtype).removeprefix("torch.")
    axis.set_title(f"Newton-Schulz by batch size, {dtype}, {machine(options.device)}, measured", fontsize=10)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, metadata={"Date": None} if to.suffix == ".svg" else None)
    return curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="[batch*]rows x columns, apart by spaces, as in '16*256x256'")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--dtype", choices=DTYPES, help="default: what Muon takes on the device")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--draw", type=Path, help="where to draw time a matrix by batch size")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shapes = [parse_shape(text) for text in options.shapes.split()]
    options.dtype = DTYPES[options.dtype] if options.dtype else _C.default_ns_dtype(options.device)
    torch.set_num_threads(options.threads)
    facts = {**provenance(), "dmuon": _plan.__version__}
    print("\n".join(f"{key}: {value}" for key, value in facts.items()))
    peak = peak_flops(options.dtype, options.device)
    print(f"{options.dtype}, products at {peak / 1e9:.0f} GFLOP/s, {options.rounds} rounds")
    print(
        f"{'matrices':16} {'form':6} {'ms each':>9} {'torch.optim.Muon, x':>22} {'plain products, x':>22} "
        f"{'floor':>6} {'update, x':>9} {'bytes':>5} {'error':>9} {'torch':>9}"
    )
    said: dict[str, Any] = {"peak_flops": peak, "shapes": [report(shape, peak, options) for shape in shapes]}
    if options.draw is not None:
        said["batches"] = draw_batches(options, options.draw)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**facts, **said}, indent=1) + "\n")


if __name__ == "__main__":
    main()
