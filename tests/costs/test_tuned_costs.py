"""Costs are those of the choices by which owners will run."""

from __future__ import annotations

import torch
from dmuon._planning import costs
from dmuon._setup.hyperparameters import Tuned
from dmuon._setup.ranks import Ranks

from dmuon import _C

ALONE = Ranks(((0,),), 0, "cpu", None, ((0,),))
SHAPE = (1, 24, 40)
MUON = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9, "nesterov": True, "ns_steps": 5, "ns_coefficients": "quintic"}
MUON |= {"ns_dtype": torch.float32, "eps": 1e-7, "adjust_lr_fn": None}


def test_costs_are_measured_with_the_tuned_choices_and_kept_for_them_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("DMUON_CACHE_DIR", str(tmp_path))
    ran = []

    def run(job, group, *_):
        masters = torch.zeros(job.size, 24, 40)
        gradient = torch.randn(masters.shape, generator=torch.Generator().manual_seed(0))
        _C.muon_update(masters, masters.clone(), gradient, group, torch.tensor(True))
        ran.append(masters[0])
        return 1000

    monkeypatch.setattr(costs, "_run", run)

    def measured(form):
        ran.clear()
        choices = {(24, 40): _C.Choice("cpu", form, False, 0)} if form else {}
        tuned = Tuned(torch.float32, _C.resolve_coefficients("quintic", 5), choices)
        dtypes = {SHAPE: torch.float32}
        costs.measured_costs(ALONE, {SHAPE: 1}, MUON, dtypes, torch.device("cpu"), tuned)
        return list(ran)

    direct, gram, default = measured(_C.Form.DIRECT), measured(_C.Form.GRAM), measured(None)
    assert direct and gram and default
    assert not torch.equal(direct[0], gram[0])
    assert measured(_C.Form.DIRECT) == measured(_C.Form.GRAM) == measured(None) == []
