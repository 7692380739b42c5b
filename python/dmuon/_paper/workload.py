"""The paper's four models: their matrices from the catalogue, and the counts that the catalogue does not have."""

from __future__ import annotations

from typing import NamedTuple

from dmuon import _plan
from dmuon._paper.table import PI0, QWEN, WALL_OSS, WALL_WM


class Shape(NamedTuple):
    """A matrix by its sides, rows <= cols."""

    rows: int
    cols: int

    @property
    def millions(self) -> float:
        """Elements, in millions."""
        return self.rows * self.cols / 1e6


class Workload(NamedTuple):
    """A model of the paper as the profile sees it."""

    name: str  # the paper's
    catalogue_name: str
    billions: float  # parameters, also those that Muon does not take
    tensors: int  # parameter tensors
    origin: str  # of the two counts
    # Fits to Wall-WM's own rows, and neutral for the other models.
    gpus_an_owner: int = 1
    gather_latency_factor: float = 1.0
    is_stand_in: bool = False  # sizes are not public, so rows of this model prove nothing

    def shapes(self) -> list[Shape]:
        """Returns the matrices that Muon updates, in module order."""
        items = _plan.model(self.catalogue_name).inventory
        return [
            Shape(min(rows, cols), max(rows, cols))
            for item in items
            for number, rows, cols in item.sizes_of_costs()
            for _ in range(number)
        ]

    def num_owners(self, gpus: int) -> int:
        """Returns the number of owners on this many GPUs."""
        return gpus // self.gpus_an_owner


_BY_TOWER = "inferred, tower by tower, from public configs"

WORKLOADS = {
    WALL_OSS: Workload(WALL_OSS, "wall-oss-0.5", billions=4.2, tensors=1260, origin=_BY_TOWER),
    PI0: Workload(PI0, "pi0", billions=3.3, tensors=612, origin=_BY_TOWER),
    QWEN: Workload(QWEN, "qwen2.5-7b", billions=7.6, tensors=339, origin="counted in Hugging Face's config.json"),
    WALL_WM: Workload(
        WALL_WM,
        "wall-wm",
        billions=6.0,
        tensors=0,
        origin="inferred; 0 tensors: its steps show none",
        gpus_an_owner=2,
        gather_latency_factor=5.8,
        is_stand_in=True,
    ),
}

WALL_WM_FITS = (
    "Wall-WM's sizes are not public. The catalogue has a stand-in, which includes one very large matrix that its own "
    "rows ask for. Three more numbers are fitted to its rows: half as many owners as GPUs, 5.8 times the latency of a "
    "gather, and no time by tensor. So its rows show that the formulas can be bent to them, and nothing else."
)
