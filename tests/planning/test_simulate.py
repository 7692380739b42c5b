"""`dmuon.simulate`, of modules and of models by name."""

from __future__ import annotations

import json

import pytest
import torch.nn as nn
from dmuon._command.main import main

import dmuon


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)


def model(width: int = 64, num_layers: int = 4) -> nn.Module:
    return nn.ModuleDict(
        {
            "embed": nn.Embedding(1000, width, device="meta"),
            "blocks": nn.ModuleList(Block(width).to("meta") for _ in range(num_layers)),
        }
    )


def test_a_module_is_predicted_as_its_inventory():
    inventory = dmuon.inventory(model())
    assert inventory["training"] == {"outside_elements": 1000 * 64 + 4 * 2 * 64, "outside_flops": 0}
    simulation = dmuon.simulate(model(), (2, 4), tokens=512)
    assert "ModuleDict on 2x4, 512 tokens" in str(simulation)
    # An element takes two FLOPs a token in a forward, and four in a backward.
    device = simulation.cluster.device
    compute_ms = 6 * 512 * (4 * 2 * 64 * 256) / (device.training_tflops * 1e9)
    assert simulation.steps["dmuon"].busy_ms["compute"] == pytest.approx(compute_ms)


def test_frozen_parameters_have_no_update():
    tuned = model()
    for name, parameter in tuned.named_parameters():
        parameter.requires_grad_(name.startswith("blocks.3."))
    assert dmuon.inventory(tuned)["training"] == {"outside_elements": 2 * 64, "outside_flops": 3 * 2 * 2 * 64 * 256}
    found, whole = (dmuon.simulate(of, (1, 2), tokens=512).steps for of in (tuned, model()))
    assert found["dmuon"].adamw_ms == pytest.approx(whole["dmuon"].adamw_ms * 2 * 64 / (1000 * 64 + 4 * 2 * 64))
    assert found["AdamW"].memory_bytes < whole["AdamW"].memory_bytes / 3
    assert found["dmuon"].busy_ms["compute"] == pytest.approx(whole["dmuon"].busy_ms["compute"])


def test_a_named_model_has_its_own_sequence():
    simulation = dmuon.simulate("qwen2.5-7b", (1, 8), device="h100-sxm5-80gb")
    assert simulation.cluster.tokens == 4096 and simulation.ratio("AdamW") == 1
    late, in_step = (
        dmuon.simulate("qwen2.5-7b", (2, 8), late_updates=late).steps["dmuon"].phases_ms["step"]
        for late in (True, False)
    )
    assert late < in_step


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": "gpt-5"}, "simulate: model: expected one of"),
        ({"model": 5}, "simulate: model: expected a module"),
        ({"mesh": (0, 8)}, "simulate: mesh: expected"),
        ({"mesh": (2**10, 2**10)}, "simulate: mesh: expected at most 2048 GPUs"),
        ({"tensor_parallel": True}, "simulate: tensor_parallel: expected an int, at least 1, got True"),
        ({"device": "b300"}, "simulate: device: expected one of"),
        ({"network": "string"}, "simulate: network: expected None or one of"),
        ({"tokens": 0}, "simulate: tokens: expected"),
        ({"model": nn.Sequential(nn.LayerNorm(8))}, "expected a model with a matrix"),
        ({"strategy": "best"}, "simulate: strategy"),
        ({"rule": "shampoo"}, "simulate: rule: expected one of muon, normuon"),
        ({"late_updates": "early"}, "simulate: late_updates: expected"),
        ({"model": "pi0", "select": lambda *_: True}, "simulate: select: expected none"),
        ({"costs": "none.json"}, "simulate: costs: cannot read"),
        ({"tensor_parallel": 3}, "simulate: tensor_parallel: expected a divisor of the 4 GPUs of a node, got 3"),
        ({"tensor_parallel": 2, "rule": "normuon"}, "simulate: rule: expected muon under tensor .*; got normuon"),
        ({"rule": None}, "simulate: rule: expected the name of a rule, got None"),
        ({"lookahead": -1}, "simulate: lookahead: expected"),
        ({"node_copy": 1}, "simulate: node_copy: expected True or False, got 1"),
        ({"max_memory_bytes": 1}, "memory"),
        ({"inter_bandwidth": 0}, "simulate: inter_bandwidth: expected None or bytes a second, more than 0, got 0"),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        dmuon.simulate(**({"model": model(), "mesh": (1, 4)} | arguments))


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ({"tensor_parallel": 2}, ["--tp", "2"]),
        ({"lookahead": 0}, ["--lookahead", "0"]),
        ({"node_copy": False}, ["--no-node-copy"]),
        ({"replicated": True}, ["--replicated"]),
        ({"late_updates": False}, ["--in-step"]),
        ({"rule": "adamuon"}, ["--rule", "adamuon"]),
        ({"inter_bandwidth": 1e9}, ["--inter-bandwidth", "8Gbit"]),
    ],
    ids=lambda of: " ".join(of) if isinstance(of, list) else "",
)
def test_the_command_has_the_same_options(arguments, options, capsys):
    assert main(["simulate", "--model", "pi0", "--mesh", "2x4", "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(json.dumps(dmuon.simulate("pi0", (2, 4), **arguments).to_dict()))
    assert found != json.loads(json.dumps(dmuon.simulate("pi0", (2, 4)).to_dict()))
