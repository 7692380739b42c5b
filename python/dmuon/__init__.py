"""dmuon: distributed Muon for PyTorch FSDP2/HSDP.

dedicate_params(model, mesh) -> fully_shard(...) -> Muon(model), then train as before.
"""

import torch as _torch  # noqa: F401  (its libraries must be loaded before the engine's)

from dmuon._C import __version__
from dmuon.clip import clip_grad_norm_
from dmuon.dedication import dedicate_params
from dmuon.full_params import full_params
from dmuon.muon import Muon
from dmuon.no_sync import no_sync
from dmuon.orthogonalize import orthogonalize
from dmuon.plan import Plan, inventory, plan
from dmuon.profile import profile
from dmuon.routing import Route, RoutingTable
from dmuon.schedule import schedule
from dmuon.verify import Verification, routing_table, verify

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
