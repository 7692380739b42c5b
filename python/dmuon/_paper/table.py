"""Data from the paper: its table of step times (tab:scaling), its breakdown (tab:ablation) and its headlines."""

from __future__ import annotations

from typing import NamedTuple

SOURCE = "DMuon, arXiv 2606.27153; A800-SXM4-80GB, 8 GPUs a node, NVLink, 200 Gbit/s InfiniBand, bf16"
GPUS_A_NODE = 8

WALL_OSS, PI0, WALL_WM, QWEN = "Wall-OSS", "Pi0", "Wall-WM", "Qwen2.5-7B"


class Row(NamedTuple):
    """One row of tab:scaling. Times in milliseconds; the last three are quotients as the paper prints them."""

    model: str
    gpus: int
    dmuon_optim: float
    dmuon_step: float
    vanilla_optim: float  # Muon-AG: every rank gathers every gradient and orthogonalises everything
    vanilla_step: float
    adamw_step: float
    printed_optim_speedup: float
    printed_step_speedup: float
    printed_overhead: float  # percent of AdamW's step

    @property
    def overhead(self) -> float:
        """DMuon's step above AdamW's, in percent of AdamW's."""
        return 100 * (self.dmuon_step / self.adamw_step - 1)

    @property
    def step_speedup(self) -> float:
        """Vanilla's step over DMuon's."""
        return self.vanilla_step / self.dmuon_step

    @property
    def optim_speedup(self) -> float:
        """Vanilla's optimizer time over DMuon's."""
        return self.vanilla_optim / self.dmuon_optim


ROWS = [
    Row(WALL_OSS, 8, 112, 1359, 1693, 2575, 1324, 15.12, 1.89, 2.7),
    Row(WALL_OSS, 16, 71, 1339, 1758, 2647, 1328, 24.76, 1.98, 0.7),
    Row(WALL_OSS, 32, 43, 1350, 1754, 2665, 1342, 40.79, 1.97, 0.9),
    Row(WALL_OSS, 64, 29, 1390, 1798, 2740, 1364, 62.00, 1.97, 1.9),
    Row(WALL_OSS, 128, 19, 1437, 1851, 2745, 1412, 97.42, 1.91, 1.8),
    Row(WALL_OSS, 256, 18, 1519, 1977, 2857, 1496, 109.44, 1.88, 1.5),
    Row(PI0, 8, 80, 1597, 1124, 2369, 1498, 14.05, 1.48, 6.6),
    Row(PI0, 16, 46, 1610, 1123, 2453, 1545, 24.41, 1.52, 4.1),
    Row(PI0, 32, 30, 1620, 1147, 2440, 1581, 38.23, 1.51, 2.5),
    Row(PI0, 64, 25, 1625, 1179, 2570, 1595, 47.16, 1.58, 1.9),
    Row(PI0, 128, 16, 1632, 1240, 2615, 1616, 77.50, 1.60, 0.6),
    Row(PI0, 256, 14, 1648, 1308, 2665, 1637, 93.43, 1.62, 1.2),
    Row(WALL_WM, 8, 472, 2986, 3707, 6212, 2539, 6.85, 2.08, 17.6),
    Row(WALL_WM, 16, 246, 2787, 4047, 6580, 2590, 15.45, 2.36, 7.6),
    Row(WALL_WM, 32, 181, 2796, 4046, 6609, 2615, 21.35, 2.36, 6.9),
    Row(WALL_WM, 64, 135, 2810, 4248, 6828, 2685, 30.47, 2.43, 4.7),
    Row(WALL_WM, 128, 99, 2895, 5105, 7748, 2794, 50.57, 2.79, 3.6),
    Row(WALL_WM, 256, 64, 3011, 6265, 9061, 2915, 96.89, 3.01, 3.3),
    Row(QWEN, 8, 214, 2715, 3469, 5934, 2590, 16.21, 2.19, 4.8),
    Row(QWEN, 16, 121, 2664, 3528, 6045, 2602, 29.16, 2.27, 2.4),
    Row(QWEN, 32, 79, 2636, 3511, 6033, 2624, 44.44, 2.29, 0.5),
    Row(QWEN, 64, 46, 2659, 3526, 6057, 2643, 76.65, 2.28, 0.6),
    Row(QWEN, 128, 32, 2744, 3554, 6109, 2734, 110.61, 2.23, 0.4),
    Row(QWEN, 256, 22, 2850, 3604, 6219, 2844, 163.82, 2.18, 0.2),
]

# Shares of the reduction of optimizer time on Wall-OSS at 128 GPUs, in percent. They add up to 96.
ABLATION_MODEL, ABLATION_GPUS = WALL_OSS, 128
ABLATION = {
    "symmetric Gram kernel": 48.0,
    "owner scheduling and load balancing": 32.0,
    "auto-tuning and NS batching": 16.0,
}

# The abstract, the captions and the text of the evaluation.
HEADLINES = {
    "mean overhead, %": "within +2",
    "step speedup": "1.48 to 3.01; 3.1 on average over the four models (caption of the first figure)",
    "optimizer speedup": "6.85 to 163.00",
}


def row_of(model: str, gpus: int) -> Row:
    """Returns the row of a model on this many GPUs."""
    return next(row for row in ROWS if (row.model, row.gpus) == (model, gpus))


def misprints() -> list[str]:
    """Returns printed quotients that the row's own times do not give, even if rounding moved each time by 0.5 ms."""
    found = []
    for row in ROWS:
        for what, value, printed, numerator, denominator, unit in (
            ("optimizer speedup", row.optim_speedup, row.printed_optim_speedup, row.vanilla_optim, row.dmuon_optim, 1),
            ("step speedup", row.step_speedup, row.printed_step_speedup, row.vanilla_step, row.dmuon_step, 1),
            ("overhead, %", row.overhead, row.printed_overhead, row.dmuon_step, row.adamw_step, 100),
        ):
            slack = unit * numerator / denominator * (0.5 / numerator + 0.5 / denominator)
            slack += 0.05 if unit == 100 else 0.005
            if abs(value - printed) > 1.02 * slack:
                found.append(f"{row.model} at {row.gpus}: {what} {value:.2f}, printed {printed:g}")
    return found
