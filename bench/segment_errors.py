"""Errors of Newton-Schulz with 16-bit products by segments, over those of torch.optim.Muon's arithmetic in that dtype.

The procedure behind `measured_segments` (newton_schulz/coefficients.h) for squares in one dtype. Products have fp32
sums and are rounded once, as on tensor cores. References are exact polynomials in fp64, or in fp32 from --fp32-from on:
its error is a thousandth of fp16's. Each line has a set, a shape and ways to run the steps. It has for each way

- the largest ratio, the matrix, and the error of torch.optim.Muon's arithmetic there;
- the largest ratio where that arithmetic's error exceeds 4 eps (3.9e-3 in fp16): matrices whose condition decides;
- the largest error of the other matrices.

A way is the lengths of its segments and the products that are mirrored triangles:

    212       all square products are
    212full   none is
    23mixed   all but R Z and Z Q
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/newton_schulz"))
from exact import constructed, of_networks, relative_error, textbook  # type: ignore[import-not-found]

from dmuon import _C

SETS = ["polar_express", "you", "quintic"]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
Rows = list[tuple[float, float, float]]


def run(x: Tensor, rows: Rows, way: str, dtype: torch.dtype) -> Tensor:
    """x is upright."""
    mirrors = not way.endswith("full")
    mirrors_mixed = mirrors and not way.endswith("mixed")

    def product(beta: float, c: Tensor | None, alpha: float, a: Tensor, b: Tensor, mirrored: bool = mirrors) -> Tensor:
        out = a @ b if c is None else torch.addmm(c, a, b, beta=beta, alpha=alpha)
        out = out.to(dtype).float()
        return out.tril() + out.tril(-1).T if mirrored else out

    steps = iter(rows)
    x = (x / x.norm()).to(dtype).float()
    for length in (int(digit) for digit in way if digit.isdigit()):
        q = r = product(0, None, 1, x, x.T)
        for step in range(length):
            a, b, c = next(steps)
            z = product(b, r, c, r, r)
            if length == 1:
                x = product(a, x, 1, z, x, False)
                break
            if step > 0:
                q = product(a, q, 1, z, q, mirrors_mixed)
            if step + 1 < length:
                scratch = product(a, r, 1, r, z, mirrors_mixed)
                r = product(a, scratch, 1, z, scratch)
            if step == 0:
                q = z
                q.diagonal().copy_((q.diagonal() + a).to(dtype))
        else:
            x = product(0, None, 1, q, x, False)
    return x


def exact(x: Tensor, rows: Rows) -> Tensor:
    x = x / x.norm()
    for a, b, c in rows:
        r = x @ x.T
        x = torch.addmm(x, torch.addmm(r, r, r, beta=b, alpha=c), x, beta=a)
    return x


def measure(shape: tuple[int, int], name: str, cases: dict[str, Tensor], options: argparse.Namespace) -> None:
    rows, dtype = _C.resolve_coefficients(name, 5), DTYPES[options.dtype]
    wide = torch.float32 if shape[0] >= options.fp32_from else torch.float64
    found: dict[str, list[tuple[float, float, str]]] = {way: [] for way in options.ways}
    for what, x in cases.items():
        reference = exact(x.to(wide), rows)
        theirs = relative_error(textbook(x.float(), rows, dtype), reference)
        for way in options.ways:
            error = relative_error(run(x.float(), rows, way, dtype), reference)
            found[way].append((error / theirs, theirs, what))
    units = 4 * torch.finfo(dtype).eps
    texts = []
    for way, list_of in found.items():
        ratio, theirs, what = max(list_of)
        hard = max((one[0] for one in list_of if one[1] > units), default=0)
        most = max((one[0] * one[1] for one in list_of if one[1] <= units), default=0)
        texts.append(f"{way} {ratio:.2f} ({what}: {theirs:.1e}) {hard:.2f} {most:.1e}")
    print(f"{name:13} {shape[0]} x {shape[1]}: " + " | ".join(texts), flush=True)
    for at, what in enumerate(cases if options.all else {}):
        ratios = " ".join(f"{list_of[at][0]:6.2f}" for list_of in found.values())
        print(f"    {what:18} {found[options.ways[0]][at][1]:.2e} {ratios}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["128x192", "256x384", "256x1024"], help="short side first")
    parser.add_argument("--ways", nargs="+", default=["212", "32", "23", "23mixed"])
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--matrices", nargs="+", help="some of them, by the names of the output; default: all")
    parser.add_argument("--fp32-from", type=int, default=1024)
    parser.add_argument("--all", action="store_true", help="a line for each matrix")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for text, seed in itertools.product(options.shapes, range(options.seeds)):
        rows, cols = (int(side) for side in text.split("x"))
        makers = {**constructed((rows, cols), seed), **of_networks((rows, cols), seed)}
        cases = {what: makers[what]() for what in options.matrices or makers}
        for name in options.sets:
            measure((rows, cols), name, cases, options)


if __name__ == "__main__":
    main()
