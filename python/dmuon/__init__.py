"""dmuon: distributed Muon for PyTorch FSDP2/HSDP.

Call dedicate_params(model, mesh), then fully_shard(...), then Muon(model), and train as before.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmuon import rules as rules
    from dmuon._attention.qk_clip import QKClip as QKClip
    from dmuon._inspecting.full_params import full_params as full_params
    from dmuon._inspecting.iter_full_params import iter_full_params as iter_full_params
    from dmuon._inspecting.profile import Profile as Profile
    from dmuon._inspecting.profile import profile as profile
    from dmuon._inspecting.routing_table import routing_table as routing_table
    from dmuon._inspecting.schedule import StepSchedule as StepSchedule
    from dmuon._inspecting.schedule import schedule as schedule
    from dmuon._inspecting.verify import Verification as Verification
    from dmuon._inspecting.verify import verify as verify
    from dmuon._plan import __version__ as __version__
    from dmuon._planning.inventory import inventory as inventory
    from dmuon._planning.owner_plan import Plan as Plan
    from dmuon._planning.plan import plan as plan
    from dmuon._running.clip import clip_grad_norm_ as clip_grad_norm_
    from dmuon._running.ema import Ema as Ema
    from dmuon._running.muon import Muon as Muon
    from dmuon._running.no_sync import no_sync as no_sync
    from dmuon._running.norms import grad_norms as grad_norms
    from dmuon._running.norms import weight_norms as weight_norms
    from dmuon._running.offload import load as load
    from dmuon._running.offload import offload as offload
    from dmuon._running.orthogonalize import orthogonalize as orthogonalize
    from dmuon._running.prepare import prepare as prepare
    from dmuon._running.update_stats import UpdateStats as UpdateStats
    from dmuon._running.update_stats import update_stats as update_stats
    from dmuon._saving.whole_states import whole_states as whole_states
    from dmuon._setup.dedication import dedicate_params as dedicate_params
    from dmuon._setup.routing_table import Route as Route
    from dmuon._setup.routing_table import RoutingTable as RoutingTable
    from dmuon._setup.views_for import views_for as views_for
    from dmuon._simulating.simulate import simulate as simulate
    from dmuon._simulating.simulation import Simulation as Simulation
    from dmuon.views import View as View

# The module that holds each name, imported at its first use. So the command needs no torch, which imports in seconds.
_HOMES = {
    "_attention.qk_clip": ("QKClip",),
    "_inspecting.full_params": ("full_params",),
    "_inspecting.iter_full_params": ("iter_full_params",),
    "_inspecting.profile": ("Profile", "profile"),
    "_inspecting.routing_table": ("routing_table",),
    "_inspecting.schedule": ("StepSchedule", "schedule"),
    "_inspecting.verify": ("Verification", "verify"),
    "_plan": ("__version__",),
    "_planning.inventory": ("inventory",),
    "_planning.owner_plan": ("Plan",),
    "_planning.plan": ("plan",),
    "_running.clip": ("clip_grad_norm_",),
    "_running.ema": ("Ema",),
    "_running.muon": ("Muon",),
    "_running.no_sync": ("no_sync",),
    "_running.norms": ("grad_norms", "weight_norms"),
    "_running.offload": ("load", "offload"),
    "_running.orthogonalize": ("orthogonalize",),
    "_running.prepare": ("prepare",),
    "_running.update_stats": ("UpdateStats", "update_stats"),
    "_saving.whole_states": ("whole_states",),
    "_setup.dedication": ("dedicate_params",),
    "_setup.routing_table": ("Route", "RoutingTable"),
    "_setup.views_for": ("views_for",),
    "_simulating.simulate": ("simulate",),
    "_simulating.simulation": ("Simulation",),
    "views": ("View",),
}
__all__ = ["attention", "rules", "views", *(name for names in _HOMES.values() for name in names)]


if "torch" in sys.modules:  # else the engine's first use imports both
    from dmuon import _built_for  # noqa: F401  (refuses another torch)

if not TYPE_CHECKING:  # a type checker shall know the names above and no others

    def __getattr__(name: str) -> Any:
        if name == "_C":
            import torch  # noqa: F401  (its libraries must be loaded before the engine's)

            from dmuon import _built_for  # noqa: F401  (refuses another torch)

            return importlib.import_module("dmuon._C")
        if name in ("attention", "rules", "views"):
            return importlib.import_module(f"dmuon.{name}")
        for home, names in _HOMES.items():
            if name in names:
                value = globals()[name] = getattr(importlib.import_module(f"dmuon.{home}"), name)
                return value
        raise AttributeError(f"module 'dmuon' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __all__
