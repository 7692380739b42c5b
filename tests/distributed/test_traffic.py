"""Who sends what, counted over all ranks.

With the sizes of accounting.py, and w and g the bytes of an element of weights and of gradients on the wire: in a step
with V(u) unshards and T routes the rank at slot s = (i, j) sends, of each unit,

    inside the node   V messages of w c(u, j), its column's weights as the broadcast's root
                      T messages of g c(u, k) to each other column k, in the pieces below
    between nodes     S messages of w p(u, s), its own weights as the broadcast's root
                      T messages of g p(u, s') to each other slot s' of column j, likewise

with S = 1 where there are node copies and V where not; nothing empty is sent. V is two a micro-step, and one for
the last unit, which stays between its forward and its backward once the order is known. On CPUs a gradient of which one
from each peer does not fit into an inbox as large as what is reduced comes in as few equal pieces as do; elsewhere the
backend reduces it whole, and a step sends its norms along the row and the column.

Once the order is known, what a step sends ahead for the next one it has itself received ahead.
"""

from __future__ import annotations

import pytest
from accounting import BYTES, Sizes, bytes_of_norms, covering, train
from pool import TEST_DEVICE


def pieces(size, room, num_peers):
    if size == 0 or TEST_DEVICE != "cpu":
        return [size]
    count = next(n for n in range(1, size + 2) if -(-size // n) * num_peers <= max(room, num_peers))
    largest = -(-size // count)
    return [min(largest, size - begin) for begin in range(0, size, largest)]


def sent_by(sizes, slot, dtypes, unshards, routes, copies):
    """{"intra": (messages, bytes), "inter": ...} of one step."""
    weight, gradient = BYTES[dtypes]
    shard = slot % sizes.num_shards
    intra, inter = [], []
    for unit in range(sizes.num_units):
        if sizes.num_shards > 1:
            intra += unshards[unit] * [weight * sizes.column(unit, shard)]
        if sizes.num_replicates > 1:
            inter += (1 if copies else unshards[unit]) * [weight * sizes.part(unit, slot)]
        for column in range(sizes.num_shards):
            if column != shard:
                sent = pieces(sizes.column(unit, column), sizes.unit(unit), sizes.num_shards - 1)
                intra += routes * [gradient * size for size in sent]
        for other in range(shard, sizes.num_slots, sizes.num_shards):
            if other != slot:
                sent = pieces(sizes.part(unit, other), sizes.column(unit, shard), sizes.num_replicates - 1)
                inter += routes * [gradient * size for size in sent]
    intra.append(bytes_of_norms(len(sizes.leaves), sizes.num_slots, sizes.num_shards))
    inter.append(bytes_of_norms(len(sizes.leaves), sizes.num_slots, sizes.num_replicates))
    return {
        where: (sum(size > 0 for size in messages), sum(messages))
        for where, messages in (("intra", intra), ("inter", inter))
    }


@pytest.mark.parametrize(
    ("mesh", "strategy", "dtypes", "node_copy", "micro_steps", "lookahead"),
    covering(
        [(4,), (2, 2), (4, 1), (3,)],
        [
            ("float32", True, 1, 0),
            ("float32", True, 1, 2),
            ("bfloat16, reduced in float32", True, 2, 3),
            ("bfloat16", False, 2, 1),
            ("bfloat16", False, 1, 2),
        ],
    ),
)
def test_each_rank_sends_exactly_the_formula(ranks, mesh, strategy, dtypes, node_copy, micro_steps, lookahead):
    results = ranks.run(
        train,
        mesh,
        strategy=strategy,
        dtypes=dtypes,
        node_copy=node_copy,
        micro_steps=micro_steps,
        lookahead=lookahead,
    )
    sizes = Sizes(results[0], mesh)
    for slot, result in enumerate(results):
        for step, (before, after) in enumerate(zip(result["stats"], result["stats"][1:], strict=False)):
            if step == 0 and lookahead > 0:
                continue  # it sends on demand, and ahead for the next
            unshards = [2 * micro_steps] * sizes.num_units
            unshards[-1] -= micro_steps if step > 0 else micro_steps - 1  # the first forward is traced
            expected = sent_by(sizes, slot, dtypes, unshards, micro_steps, node_copy)
            for where, (messages, num_bytes) in expected.items():
                sent = after[f"messages_{where}"] - before[f"messages_{where}"]
                assert sent == messages, f"slot {slot}, step {step}, {where}"
                sent = after[f"bytes_sent_{where}"] - before[f"bytes_sent_{where}"]
                assert sent == num_bytes, f"slot {slot}, step {step}, {where}"
            assert after["unshards"] - before["unshards"] == sum(unshards)
            assert after["routes"] - before["routes"] == micro_steps * sizes.num_units
        copies = 0
        if len(set(BYTES[dtypes])) > 1 or TEST_DEVICE != "cpu":
            copies = len(result["stats"][1:]) * micro_steps * len(result["owner"])
        assert result["stats"][-1]["gradient_copies"] == copies


@pytest.mark.parametrize("mesh", [(4,), (2, 2), (4, 1)])
@pytest.mark.parametrize("micro_steps", [1, 3])
def test_replicated_weights_travel_once_a_step(ranks, mesh, micro_steps):
    dtypes = "bfloat16, reduced in float32"
    options = {"strategy": "load_balance", "dtypes": dtypes, "node_copy": True, "lookahead": 2}
    results = ranks.run(train, mesh, **options, micro_steps=micro_steps, replicated=True)
    sizes = Sizes(results[0], mesh)
    for slot, result in enumerate(results):
        before, after = result["stats"][-2:]
        unshards = [1] * sizes.num_units
        expected = sent_by(sizes, slot, dtypes, unshards, micro_steps, copies=False)
        for where, counts in expected.items():
            sent = tuple(after[f"{what}_{where}"] - before[f"{what}_{where}"] for what in ("messages", "bytes_sent"))
            assert sent == counts, f"slot {slot}, {where}"
        assert after["unshards"] - before["unshards"] == sum(unshards)
        # Masters, momenta and gradients of its own, and all weights at all times.
        weights = BYTES[dtypes][0] * sum(map(sizes.unit, range(sizes.num_units)))
        assert after["current_bytes"] >= sum(map(sum, result["owned"])) + weights
        assert max(stats["peak_bytes"] for stats in result["stats"][1:]) == result["planned"]
