"""Stock FSDP2 trains to the CPU's bits in every order, without a race."""

import async_device
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def train(device, shape, bf16):
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    torch.manual_seed(0)
    blocks = [Block(32) for _ in range(3)]
    model = torch.nn.Sequential(torch.nn.Embedding(100, 32), *blocks, torch.nn.Linear(32, 100)).to(device)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for module in [*blocks, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(2):
        torch.manual_seed(100 * step + dist.get_rank())
        tokens = torch.randint(0, 100, (64,)).to(device)
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            loss = torch.nn.functional.cross_entropy(model(tokens).float(), tokens)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return [*losses, *(parameter.full_tensor().detach().cpu() for parameter in model.parameters())]


def trains_as_on_cpus(shape, bf16):
    expected = train("cpu", shape, bf16)
    unlike = {}
    for order in async_device.ORDERS:
        async_device.configure(order=order, seed=dist.get_rank())
        ours = train("emulated", shape, bf16)
        worst = max((a.float() - b.float()).abs().max().item() for a, b in zip(ours, expected, strict=True))
        if worst != 0:
            unlike[order] = worst
    return unlike, async_device.races()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_fsdp2_trains_to_the_bits_of_the_cpu_in_every_order(make_ranks, shape, bf16):
    ranks = make_ranks(torch.Size(shape).numel())
    for unlike, races in ranks.run(trains_as_on_cpus, shape=shape, bf16=bf16):
        assert not races and not unlike
