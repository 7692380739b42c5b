"""Compares dmuon without one part of its schedule or plan with dmuon as it is, in interleaved blocks.

    tools/cluster --nodes 2 --ranks 2 --rate 1gbit -- bench/ablation.py --mesh 2x2 --json out/bench/ablation.json
    torchrun --nproc-per-node 4 bench/ablation.py --mesh 2x2 --variants plan

Uses train_step.py's blocks, ratios and intervals. All variants compute the same weights up to rounding.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.interleave import Ratio
from bench.train_step import PARTS, arguments, conclude, measure, prepare, show_above, show_waits, summarise

DEFAULT = "default"


def switched(**switches: bool) -> Callable[[nn.Module], None]:
    """Sets switches of a model's `Ablation`, for which users have no option."""

    def configure(model: nn.Module) -> None:
        dedication = model.__dict__["_dmuon_dedication"]
        dedication.ablation = dataclasses.replace(dedication.ablation, **switches)

    return configure


def is_half(name: str, _: nn.Module) -> bool:
    """True for the attention and the MLP of a block."""
    return name.rpartition(".")[2] in ("attention", "mlp")


def is_half_of_the_first(name: str, module: nn.Module) -> bool:
    """True for those of the first block alone, whose messages have the least to hide behind."""
    return is_half(name, module) and name.startswith("blocks.0.")


@dataclass(frozen=True)
class Variant:
    """Differences from the default."""

    without: str
    dedicate: dict[str, Any] = field(default_factory=dict)
    configure: Callable[[nn.Module], None] | None = None


VARIANTS = {
    DEFAULT: Variant("nothing"),
    "no_lookahead": Variant("fetching the next units ahead", {"lookahead": 0}),
    "one_stage": Variant("the two stages: a matrix goes to every rank directly", configure=switched(one_stage=True)),
    "in_step": Variant("late updates: step() waits for its update", {"late_updates": False}),
    "late": Variant("nothing, with late updates on every mesh", {"late_updates": True}),
    "halves": Variant("whole blocks as units: attention and MLP move apart", {"units": is_half}),
    "first_halves": Variant("a whole first block as a unit", {"units": is_half_of_the_first}),
    "no_copy": Variant("node copies", {"node_copy": False}),
    # The paper's components (tab:ablation) as far as they are there; symmetric products are not.
    "no_batching": Variant("batches: every matrix alone", configure=switched(batching=False)),
    "lpt": Variant("batches in the balance: longest processing time first", {"strategy": "lpt"}),
    "round_robin": Variant("balance: owners in turn", {"strategy": "round_robin"}),
    "xor_layout": Variant("balance: owners by eq. comm-layout", {"strategy": "xor_layout"}),
    "one_owner": Variant("owners: one rank has everything", {"strategy": "rank0"}),
}
PLAN = ("no_batching", "lpt", "round_robin", "xor_layout", "one_owner")


def show(summary: dict[str, Any]) -> None:
    columns = "".join(f"{part:>10}" for part in ("step", "forward", "backward", "optim"))
    print(f"{'':21}{columns}  {'x default':22} without")
    for name, row in summary.items():
        ratio = str(Ratio(**row["ratio_to_default"])) if name != DEFAULT else ""
        times = "".join(f"{row[f'{part}_ms']:10.1f}" for part in PARTS)
        print(f"{name:21}{times}  {ratio:22} {VARIANTS[name].without}")
    for name, row in summary.items():
        if name != DEFAULT:
            show_above(name, DEFAULT, row["above_default_ms"])
    for name, row in summary.items():
        show_waits(name, row)


def main() -> None:
    parser = arguments(__doc__)
    variants = [name for name in VARIANTS if name != DEFAULT]
    groups = {"plan": PLAN, "schedule": [name for name in variants if name not in PLAN]}
    parser.add_argument(
        "--variants", default="schedule", help=f"schedule (default), plan, or some of {', '.join(variants)}"
    )
    options = parser.parse_args()
    names = [DEFAULT, *groups.get(options.variants, filter(None, options.variants.split(",")))]
    unknown = set(names) - VARIANTS.keys()
    if unknown:
        parser.error(f"--variants: expected names of {', '.join(variants)}; got {', '.join(sorted(unknown))}")
    setting, facts = prepare(options)
    if setting.cluster.rank == 0:
        print("\n".join(f"{key}: {value}" for key, value in facts.items()), flush=True)
    contenders = {
        name: setting.contender("dmuon", dedicate=VARIANTS[name].dedicate, configure=VARIANTS[name].configure)
        for name in names
    }
    summary = summarise(measure(contenders, options, setting.cluster), 1 + options.steps, DEFAULT)
    if setting.cluster.rank == 0:
        show(summary)
    conclude(options, setting.cluster, {**facts, "variants": summary})


if __name__ == "__main__":
    main()
