"""Bugs that a maintainer might make, each of which fuzz.py must find; plant.py tries them."""

from __future__ import annotations

from planted_change import Planted
from planted_device import DEVICE
from planted_engine import ENGINE
from planted_schedule import SCHEDULE

RUNNING = "python/dmuon/_running/"

PYTHON = (
    Planted(
        "momentum_without_gradient",
        RUNNING + "muon.py",
        "if has_gradient[index]:",
        "if True:",
        "A matrix that had no gradient on any rank decays, and moves by its old momentum.",
    ),
    Planted(
        "only_the_first_part_moves",
        RUNNING + "muon.py",
        "for index in self._runtime.parts[self._runtime.leaf_of[parameter]]:",
        "for index in self._runtime.parts[self._runtime.leaf_of[parameter]][:1]:",
        "Of a parameter in parts, one owner updates what it has, and the others do not.",
    ),
    Planted(
        "stack_taken_for_one_matrix",
        "python/dmuon/_planning/inventory.py",
        "        return leaf.views\n",
        "        return [View(1, view.count * view.rows, view.cols) for view in leaf.views]\n",
        "Experts and heads are orthogonalised together, as one tall matrix.",
    ),
    Planted(
        "step_before_closure",
        RUNNING + "muon.py",
        "        if closure is not None:\n"
        "            with torch.enable_grad():\n"
        "                loss = closure()\n"
        '        self._runtime.one_thread.begin("step()")\n'
        "        try:\n"
        "            self._take_step()\n",
        '        self._runtime.one_thread.begin("step()")\n'
        "        try:\n"
        "            self._take_step()\n"
        "            if closure is not None:\n"
        "                with torch.enable_grad():\n"
        "                    loss = closure()\n",
        "The step knows nothing of the closure's gradients.",
    ),
    Planted(
        "clip_leaves_host_gradients",
        RUNNING + "step_agreement.py",
        "        host_gradients.scale(self.host_parameters(), factor)\n",
        "",
        "Clipping scales what owners hold alone: AdamW's parameters move too far.",
    ),
    Planted(
        "dicts_not_entered",
        RUNNING + "structures.py",
        "if isinstance(value, Mapping) or is_record else value",
        "if is_record else value",
        "A block that returns a dict is not watched: its backward reads freed weights.",
    ),
    Planted(
        "dataclasses_not_entered",
        RUNNING + "structures.py",
        "if isinstance(value, Mapping) or is_record else value",
        "if isinstance(value, Mapping) else value",
        "A block that returns a dataclass is not watched: its backward reads freed weights.",
    ),
    Planted(
        "frozen_for_ever",
        "python/dmuon/_setup/place.py",
        "if weight.requires_grad != placeholder.requires_grad:",
        "if weight.requires_grad and not placeholder.requires_grad:",
        "A matrix that was frozen in one step has no gradient in any later one.",
    ),
    Planted(
        "change_not_taken_back",
        RUNNING + "unit_weights.py",
        "        self.begin_use()\n        self._take_back()\n",
        "        self.begin_use()\n",
        "A module's change of its own weight is lost at the next use.",
    ),
    Planted(
        "rank_without_gradient_left_out",
        RUNNING + "plain_gradients.py",
        "            if ranks >= 1 and parameter not in backward.late:\n",
        "            if ranks >= 1 and parameter.grad is not None and parameter not in backward.late:\n",
        "A rank that skipped a block does not update the block's plain parameters: ranks drift apart.",
    ),
    Planted(
        "mean_over_the_row",
        RUNNING + "plain_gradients.py",
        "message[len(has) :].div_(self._ranks.num_slots)",
        "message[len(has) :].div_(self._ranks.num_shards)",
        "Gradients that no fully_shard manages are averaged inside nodes, and added up over them.",
    ),
    Planted(
        "plain_gradients_of_no_sync_stay",
        RUNNING + "plain_gradients.py",
        "        return any(p.grad is not None and not is_mean",
        "        return any(p.grad is not None and False and not is_mean",
        "A step after no_sync uses gradients that no fully_shard manages as each rank has them: ranks drift apart.",
    ),
)

PLANTED = (*SCHEDULE, *ENGINE, *DEVICE, *PYTHON)
