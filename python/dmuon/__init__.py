"""dmuon: distributed Muon for PyTorch FSDP2/HSDP.

dedicate_params(model, mesh) -> fully_shard(...) -> Muon(model), then train as before.
"""

import torch as _torch  # noqa: F401  (its libraries must be loaded before the engine's)

from dmuon._C import __version__
from dmuon._inspecting.full_params import full_params
from dmuon._inspecting.profile import profile
from dmuon._inspecting.schedule import schedule
from dmuon._inspecting.verify import Verification, routing_table, verify
from dmuon._planning.plan import Plan, inventory, plan
from dmuon._running.clip import clip_grad_norm_
from dmuon._running.muon import Muon
from dmuon._running.no_sync import no_sync
from dmuon._running.orthogonalize import orthogonalize
from dmuon._setup.dedication import dedicate_params
from dmuon._setup.routing import Route, RoutingTable

__all__ = [
    "Muon",
    "Plan",
    "Route",
    "RoutingTable",
    "Verification",
    "__version__",
    "clip_grad_norm_",
    "dedicate_params",
    "full_params",
    "inventory",
    "no_sync",
    "orthogonalize",
    "plan",
    "profile",
    "routing_table",
    "schedule",
    "verify",
]
