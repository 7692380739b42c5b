"""A step on the asynchronous device in which the host never waits for it: clipping, skipping and loss scaling too."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

import dmuon

pytestmark = pytest.mark.xdist_group("async_device")
NUM_STEPS, BAD_STEP = 6, 3
ON_NODES, ON_ONE_NODE = ((2, 2), "side_first", "inf"), ((4,), "compute_first", "nan")


class Net(nn.Sequential):
    without = -1  # a module that is left out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, module in enumerate(self):
            x = module(x) if number != self.without else x
        return x


def start(mesh: Any, device: torch.device) -> tuple[Net, dmuon.Muon]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8)) for _ in range(3)]
    model = Net(nn.Embedding(10, 8), *blocks, nn.Linear(8, 10)).to(device)
    dmuon.dedicate_params(model, mesh, costs="modelled")
    for module in [*blocks, model]:
        fully_shard(module, mesh=mesh)
    return model, dmuon.Muon(model, lr=0.02, adamw_lr=1e-2)


def bits(model: nn.Module, opt: dmuon.Muon) -> dict[str, torch.Tensor]:
    """All weights and all state that this rank holds."""
    state = {f"{number} {key}": value for number, of in opt.state_dict()["state"].items() for key, value in of.items()}
    tensors = {**model.state_dict(), **state}
    return {name: getattr(value, "_local_tensor", value).cpu().clone() for name, value in tensors.items()}


def train(mesh: Any, how: str, bad: float, order: str) -> dict[str, Any]:
    """Six steps; in the fourth, if `bad` is not 1, one rank's loss is multiplied by it."""
    import async_device

    async_device.reset()
    async_device.configure(order=order, seed=mesh.get_rank())
    device = torch.device("emulated", torch.emulated.current_device())
    model, opt = start(mesh, device)
    opt._step_supports_amp_scaling = True
    scaler = torch.amp.GradScaler("emulated", init_scale=2.0**10, growth_interval=100, enabled="scaler" in how)
    factors = torch.ones(NUM_STEPS, device=device)
    factors[BAD_STEP] = bad if mesh.get_rank() == 1 else 1.0
    words: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dmuon").addHandler(handler)
    found: dict[str, Any] = {}
    for step in range(NUM_STEPS):
        tokens = torch.randint(10, (6,), generator=torch.Generator().manual_seed(4 * step + mesh.get_rank())).to(device)
        if step == BAD_STEP:
            found["before"] = bits(model, opt)
        model.without = 1 + step % 3 if how == "drops" and step >= 2 else -1
        torch.emulated.synchronize()  # what was awaited last has arrived
        with async_device.no_host_sync():
            scaler.scale(nn.functional.cross_entropy(model(tokens), tokens) * factors[step]).backward()
            if how == "scaler clips":
                scaler.unscale_(opt)
            if "torch" in how:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            elif "clips" in how:
                dmuon.clip_grad_norm_(model, 0.1)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        if step == BAD_STEP:
            found["after"] = bits(model, opt)
            found["scale"] = scaler.get_scale()
    logging.getLogger("dmuon").removeHandler(handler)
    return {
        **found,
        "end": bits(model, opt),
        "skipped": opt.skipped_steps,
        "words": words,
        "races": async_device.races(),
    }


def unlike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize(
    ("mesh", "order", "bad", "how"),
    [
        *((*ON_NODES, how) for how in ("step", "clips", "scaler clips", "torch clips")),
        *((*ON_ONE_NODE, how) for how in ("drops", "scaler", "torch clips")),
    ],
)
def test_the_host_never_waits_and_a_bad_gradient_changes_no_bit(device_ranks, how, mesh, order, bad):
    for number, rank in enumerate(device_ranks.run(train, mesh, how=how, bad=float(bad), order=order)):
        assert not rank["races"], rank["races"][0]
        assert unlike(rank["before"], rank["after"]) == []
        assert unlike(rank["after"], rank["end"]) == list(rank["end"])
        assert rank["skipped"] == 1
        assert [word for word in rank["words"] if "1 so far" in word] == rank["words"]
        assert len(rank["words"]) == (number == 0)
        if "scaler" in how:
            assert rank["scale"] == 2.0**9


def orthogonalised(mesh: Any) -> list[torch.Tensor]:
    batches = torch.ones(3, 3, 8, 12)
    batches[1, 1, 2, 3] = float("nan")
    batches[2, 1, 2, 3] = float("-inf")
    return [dmuon.orthogonalize(batch.to("emulated")).cpu() for batch in batches]


def test_a_matrix_that_is_not_finite_becomes_all_nan_and_no_other(device_ranks):
    whole, *bad = device_ranks.run(orthogonalised, (1,))[0]
    for batch in bad:
        assert batch[1].isnan().all()
        assert torch.equal(batch[::2], whole[::2])


@pytest.mark.parametrize("how", ["scaler", "scaler clips"])
def test_a_scaled_loss_trains_as_one_that_is_not(device_ranks, how):
    scaled = device_ranks.run(train, (2, 2), how=how, bad=1.0, order="random")
    plain = device_ranks.run(train, (2, 2), how=how.replace("scaler", "").strip() or "step", bad=1.0, order="random")
    for one, other in zip(scaled, plain, strict=True):
        for name, value in one["end"].items():
            assert torch.allclose(value, other["end"][name], rtol=1e-4, atol=1e-5), name
