"""Operators give the CPU's bits, whatever the order."""

import copy

import async_device
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def model():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return torch.nn.Sequential(
        torch.nn.Embedding(50, 16), layer, torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.LayerNorm(64),
        torch.nn.Linear(64, 50),
    )  # fmt: skip


@sdpa_kernel(SDPBackend.MATH)  # CPUs have a kernel of their own for attention, which PyTorch takes by device
def train(device, dtype, **options):
    net = model().to(dtype).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, **options)
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        tokens = torch.randint(0, 50, (4, 8)).to(device)
        loss = torch.nn.functional.cross_entropy(net(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in net.parameters())]


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_is_bit_equal_to_the_cpu_in_every_order(device, options, dtype):
    torch.set_num_threads(1)
    expected = train("cpu", dtype, **options)
    for order in async_device.ORDERS:
        device.configure(order=order)
        for ours, theirs in zip(train("emulated", dtype, **options), expected, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0)
    assert not device.races()


def test_batch_norm_evaluates_by_its_running_statistics(device):
    norm = torch.nn.BatchNorm1d(8)
    ours, values = copy.deepcopy(norm).to("emulated"), torch.randn(6, 8)
    for _ in (norm.train(), ours.train()), (norm.eval(), ours.eval()):
        torch.testing.assert_close(ours(values.to("emulated")).cpu(), norm(values), rtol=0, atol=0)


def test_counts_integers_as_accelerators_do(device):
    values = torch.tensor([0, 2, 2, 5, 5, 5], dtype=torch.int32)
    counted = torch.histc(values.to("emulated"), bins=6, min=0, max=5)
    assert counted.dtype == torch.int32
    torch.testing.assert_close(counted.cpu(), torch.bincount(values).int())


def test_tensors_of_the_host_are_refused_as_by_cuda(device):
    ours, hosts = torch.ones(3, device="emulated"), torch.ones(3)
    total, table, tokens = torch.zeros(()), torch.ones(4, 2, device="emulated"), torch.tensor([0, 2])
    for call in (
        lambda: ours + hosts,
        lambda: torch.cat([hosts, ours]),
        lambda: ours.add_(hosts),
        lambda: total.add_(ours.sum()),
        lambda: torch.nn.functional.embedding(tokens, table),
    ):
        with pytest.raises(RuntimeError, match="and of the host"):
            call()
    assert (ours + torch.ones(())).sum() == 6
    assert ours[torch.tensor([0, 2])].sum() == 2


def test_random_numbers_depend_on_the_order_of_issue_alone(device):
    drawn = []
    for order in async_device.ORDERS:
        device.configure(order=order)
        torch.emulated.manual_seed(5)
        side = torch.emulated.Stream()
        a = torch.rand(10, device="emulated")
        with torch.emulated.stream(side):
            b = torch.randn(10, device="emulated")
        torch.emulated.current_stream().wait_stream(side)
        drawn.append(torch.stack([a.cpu(), b.cpu()]))
    assert all(torch.equal(drawn[0], other) for other in drawn[1:])
    assert not torch.equal(drawn[0][0], drawn[0][1])


def test_views_outs_and_results_of_unknown_shape(device):
    a = torch.arange(24, dtype=torch.float32)
    b = a.to("emulated")
    for function in (
        lambda x: x.view(4, 6).t()[1:3, ::2].reshape(-1),
        lambda x: x.unfold(0, 4, 2),
        lambda x: x[x > 7],
        lambda x: torch.cat([x, x]).view(torch.int32)[:5],
        lambda x: torch.stack(x.split([10, 14])[0].chunk(2)),
        lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
        lambda x: x.view(4, 6).sum(1, keepdim=True).expand(4, 3),
        lambda x: torch.unique(x // 5),
        lambda x: x.to(torch.bfloat16).float() * 3,
        lambda x: torch.where(x > 3, x, 0.5).topk(3).values,
    ):
        torch.testing.assert_close(function(b).cpu(), function(a), rtol=0, atol=0)
    assert torch.equal(b, a.to("emulated"))


def test_bad_arguments_raise_where_they_are_given(device):
    a = torch.ones(3, 4, device="emulated")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"mat1 and mat2|must match"):
            a @ a
    with pytest.raises(RuntimeError, match=r"emulated:0 and emulated:1|emulated:1 and emulated:0"):
        a + torch.ones(3, 4, device="emulated:1")
