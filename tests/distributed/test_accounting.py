"""Who holds what and who sends what, counted over all ranks.

Of a unit u on R x G, c(u, j) elements lie in column j and p(u, s) at the owner of slot s; w and g are the bytes
of an element of weights and of gradients on the wire. In a step with V(u) unshards and T routes the rank at slot
s = (i, j) sends, of each unit:

    inside the node   V messages of w c(u, j), its column's weights as the broadcast's root
                      T messages of g c(u, k) to each other column k, in the pieces below
    between nodes     S messages of w p(u, s), its own weights as the broadcast's root
                      T messages of g p(u, s') to each other slot s' of column j, likewise

with S = 1 where there are node copies and V where not; nothing empty is sent. V is two a micro-step, and one for
the last unit, which stays between its forward and its backward once the order is known. A gradient of which one from
each peer does not fit into an inbox as large as what is reduced comes in as few equal pieces as do.

Once the order is known, what a step sends ahead for the next one it has itself received ahead.
"""

from __future__ import annotations

import itertools

import accounting_cases as cases
import pytest

STRATEGIES = ("load_balance", "round_robin", "rank0")
MESHES = ((4,), (2, 2))
BYTES = {"float32": (4, 4), "bfloat16": (2, 2), "bfloat16, reduced in float32": (2, 4)}
FP32 = 4


def shape_of(mesh):
    return mesh if len(mesh) == 2 else (1, mesh[0])


def pieces(size, room, num_peers):
    if size == 0:
        return []
    count = next(n for n in range(1, size + 2) if -(-size // n) * num_peers <= max(room, num_peers))
    largest = -(-size // count)
    return [min(largest, size - begin) for begin in range(0, size, largest)]


class Sizes:
    """Elements of each unit by column and by owner, from the layout that a rank reported."""

    def __init__(self, facts, mesh):
        self.num_replicates, self.num_shards = shape_of(mesh)
        self.num_slots = self.num_replicates * self.num_shards
        self.num_units = max(facts["unit"]) + 1
        self._matrices = list(zip(facts["elements"], facts["owner"], facts["unit"], strict=True))

    def part(self, unit, slot):
        return sum(n for n, owner, u in self._matrices if (owner, u) == (slot, unit))

    def column(self, unit, column):
        return sum(self.part(unit, slot) for slot in range(column, self.num_slots, self.num_shards))

    def unit(self, unit):
        return sum(self.column(unit, column) for column in range(self.num_shards))

    def owned(self, slot):
        return sum(self.part(unit, slot) for unit in range(self.num_units))

    def held_column(self, slot):
        return sum(self.column(unit, slot % self.num_shards) for unit in range(self.num_units))

    def sent(self, slot, dtypes, unshards, routes, copies):
        """{"intra": (messages, bytes), "inter": ...} of one step."""
        weight, gradient = BYTES[dtypes]
        shard = slot % self.num_shards
        intra, inter = [], []
        for unit in range(self.num_units):
            if self.num_shards > 1:
                intra += unshards[unit] * [weight * self.column(unit, shard)]
            if self.num_replicates > 1:
                inter += (1 if copies else unshards[unit]) * [weight * self.part(unit, slot)]
            for column in range(self.num_shards):
                if column != shard:
                    sent = pieces(self.column(unit, column), self.unit(unit), self.num_shards - 1)
                    intra += routes * [gradient * size for size in sent]
            for other in range(shard, self.num_slots, self.num_shards):
                if other != slot:
                    sent = pieces(self.part(unit, other), self.column(unit, shard), self.num_replicates - 1)
                    inter += routes * [gradient * size for size in sent]
        return {
            where: (sum(size > 0 for size in sizes), sum(sizes))
            for where, sizes in (("intra", intra), ("inter", inter))
        }


def covering(meshes, options):
    """Every mesh with every row of options; a third of them with each strategy, every mesh with every strategy."""
    pairs = itertools.product(meshes, options)
    return [(mesh, STRATEGIES[i % len(STRATEGIES)], *row) for i, (mesh, row) in enumerate(pairs)]


@pytest.mark.parametrize(
    ("mesh", "strategy", "dtypes", "lookahead", "node_copy"),
    covering(
        MESHES,
        [
            *((dtypes, lookahead, True) for dtypes in BYTES for lookahead in (0, 2)),
            ("bfloat16", 1, True),
            ("bfloat16, reduced in float32", 9, True),
            ("bfloat16, reduced in float32", 2, False),
            ("float32", 1, False),
        ],
    ),
)
def test_owners_alone_hold_state_and_a_rank_stays_below_its_bound(ranks, mesh, strategy, dtypes, lookahead, node_copy):
    results = ranks.run(cases.train, mesh, strategy=strategy, dtypes=dtypes, lookahead=lookahead, node_copy=node_copy)
    sizes = Sizes(results[0], mesh)
    weight, gradient = BYTES[dtypes]

    # Each matrix's master, momentum and accumulator once over the mesh, at its owner.
    for matrix, elements in enumerate(results[0]["elements"]):
        for slot, result in enumerate(results):
            expected = FP32 * elements if slot == result["owner"][matrix] else 0
            assert result["owned"][matrix] == [expected] * 3, f"slot {slot}, matrix {matrix}"
    for slot, result in enumerate(results):
        assert result["master_storage"] == FP32 * sizes.owned(slot)
        assert result["momenta"] == [slot == owner for owner in result["owner"]]
    assert sum(result["master_storage"] for result in results) == FP32 * sum(results[0]["elements"])

    largest = max(sizes.unit(unit) for unit in range(sizes.num_units))
    for slot, result in enumerate(results):
        node_copies = weight * sizes.held_column(slot) if sizes.num_replicates > 1 and node_copy else 0
        kept = node_copies + 3 * FP32 * sizes.owned(slot)
        bound = kept + (lookahead + 2) * largest * (weight + gradient)
        for step, stats in enumerate(result["stats"][1:]):
            assert stats["peak_bytes"] <= bound, f"slot {slot}, step {step}"
            assert stats["peak_bytes"] >= kept + largest * weight, f"slot {slot}, step {step}"


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
        cases.train,
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
            expected = sizes.sent(slot, dtypes, unshards, micro_steps, node_copy)
            for where, (messages, num_bytes) in expected.items():
                sent = after[f"messages_{where}"] - before[f"messages_{where}"]
                assert sent == messages, f"slot {slot}, step {step}, {where}"
                sent = after[f"bytes_sent_{where}"] - before[f"bytes_sent_{where}"]
                assert sent == num_bytes, f"slot {slot}, step {step}, {where}"
            assert after["unshards"] - before["unshards"] == sum(unshards)
            assert after["routes"] - before["routes"] == micro_steps * sizes.num_units
        copies = 0
        if len(set(BYTES[dtypes])) > 1:
            copies = len(result["stats"][1:]) * micro_steps * len(result["owner"])
        assert result["stats"][-1]["gradient_copies"] == copies


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_allocator_sees_what_the_engine_counts(ranks, mesh, strategy):
    results = ranks.run(cases.measure, mesh, strategy=strategy)
    sizes = Sizes(results[0], mesh)
    matrix = FP32 * max(results[0]["elements"])
    unit = FP32 * max(sizes.unit(index) for index in range(sizes.num_units))
    # Activations of one row are small beside matrices of 160 x 160.
    slack = matrix // 6
    for slot, result in enumerate(results):
        node_copies = FP32 * sizes.held_column(slot) if sizes.num_replicates > 1 else 0
        kept = node_copies + 3 * FP32 * sizes.owned(slot)
        # Beside the engine autograd computes one matrix's gradient, which it then adds to the packed buffer.
        beside = result["largest"] - result["stats"]["peak_bytes"]
        assert -slack <= beside <= matrix + slack, f"slot {slot}"
        assert abs(result["last"] - result["stats"]["current_bytes"]) <= slack, f"slot {slot}"
        assert result["largest"] <= kept + 2 * (cases.LOOKAHEAD + 2) * unit + slack, f"slot {slot}"
