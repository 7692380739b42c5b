"""Who sends what under tensor parallelism, counted.

In a group of T ranks a step has as many waves as its busiest rank has batches. In a wave each rank sends

    directions   to each owner one message, of 4 bytes an element of its own slices of that owner's batch
    updates      to each other rank one message, of the iteration's bytes an element of that rank's slices of its batch

and nothing empty. Of a matrix that all ranks have whole, no direction travels and T - 1 whole updates do. Inside of
nodes and between them each rank sends what it would send without tensor parallelism if its slices were the matrices.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accounting import Sizes
from test_traffic import sent_by
from torch.distributed.device_mesh import DeviceMesh
from tp_models import OnRanks

import dmuon

STEPS = 3
FP32 = 4


def traffic(mesh: DeviceMesh, dims: tuple[int, ...], ns_dtype: torch.dtype, strategy: str) -> dict[str, Any]:
    """What one step of a rank sends, and the facts from which it follows."""
    options = {"strategy": strategy, "lookahead": 2, "node_copy": True}
    ranks = OnRanks(mesh.device_type, dims, options=options, muon={"ns_dtype": ns_dtype}, sequence=False, gate=True)
    stats = []
    for step in range(STEPS):
        ranks.run(1, first=step)
        ranks.optimizer._runtime.engine.drain()  # what is on its way counts
        stats.append(ranks.optimizer.stats())
    before, after = stats[-2:]
    plan = dmuon.plan(ranks.model)
    return {
        "sent": {key: after[key] - before[key] for key in after if key.startswith(("messages_", "bytes_sent_"))},
        "items": [(item.rows * item.cols, item.tensor_parallel, item.unit) for item in plan.native.inventory],
        "owner": plan.owner,
        "batches": plan.batches,
        "place": (ranks.part, ranks.tensor.get_local_rank()),
    }


def slices_sent(facts: dict[str, Any], size: int, ns_bytes: int) -> tuple[int, int]:
    """(messages, bytes) inside of the slot."""
    slot, own = facts["place"]
    by_rank = [[batch for owner, batch in facts["batches"] if owner == slot * size + rank] for rank in range(size)]
    sent = []
    for wave in range(max(map(len, by_rank))):
        for rank, batches in enumerate(by_rank):
            items = [facts["items"][index] for index in (batches[wave] if wave < len(batches) else ())]
            if rank != own:
                sent.append(FP32 * sum(elements // size for elements, is_cut, _ in items if is_cut))
            else:
                update = ns_bytes * sum(elements // size if is_cut else elements for elements, is_cut, _ in items)
                sent += [update] * (size - 1)
    return sum(num_bytes > 0 for num_bytes in sent), sum(sent)


@pytest.mark.cpu("on a device norms are added up in the slot too")
@pytest.mark.parametrize(
    ("dims", "ns_dtype", "strategy"),
    [
        ((2, 2), torch.float32, "load_balance"),
        ((2, 2), torch.bfloat16, "round_robin"),
        ((1, 4), torch.float32, "round_robin"),
        ((1, 2, 2), torch.float32, "lpt"),
        ((2, 1, 2), torch.bfloat16, "load_balance"),
        ((2, 1, 2), torch.float32, "rank0"),
    ],
)
def test_each_rank_sends_exactly_the_formula(ranks, dims, ns_dtype, strategy):
    size = dims[-1]
    for facts in ranks.run(traffic, (4,), dims=dims, ns_dtype=ns_dtype, strategy=strategy):
        sent, slot = facts["sent"], facts["place"][0]
        expected = slices_sent(facts, size, ns_dtype.itemsize)
        assert (sent["messages_slices"], sent["bytes_sent_slices"]) == expected
        layout = {
            "elements": [elements // size if is_cut else elements for elements, is_cut, _ in facts["items"]],
            "owner": [owner // size for owner in facts["owner"]],
            "unit": [unit for _, _, unit in facts["items"]],
        }
        sizes = Sizes(layout, dims[:-1])
        unshards = [2] * sizes.num_units
        unshards[-1] -= 1  # it stays between its forward and its backward
        for where, (messages, num_bytes) in sent_by(sizes, slot, "float32", unshards, 1, True).items():
            assert (sent[f"messages_{where}"], sent[f"bytes_sent_{where}"]) == (messages, num_bytes), where
