"""Rules of update as a user writes them, registered in every process that imports this, and wrong ones."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from reference import ReferenceMuon

import dmuon

SIZES: dict[str, Any] = {"radius": (1, 1), "mean": ("rows", "cols"), "largest": ("rows", 1), "inputs": (1, "cols")}


def hyperball(update, weights, state, options):
    radius = state["radius"]
    radius.copy_(torch.where(radius == 0, weights.norm(), radius))
    moved = weights - options["lr"] * radius * update / update.norm().clamp_min(1e-12)
    return moved * (radius / moved.norm().clamp_min(1e-12))


def plain_hyperball(matrix, change, state, of):
    """Projects the unit sphere's step back to the sphere of the first norm."""
    radius = state.setdefault("radius", float(matrix.norm()))
    on_sphere = matrix / radius - of["lr"] * change / max(float(change.norm()), 1e-12)
    matrix.copy_(radius * on_sphere / on_sphere.norm())


def uneven(update, weights, state, options):
    """Treats rows, columns and weights apart: another orientation or another matrix's state gives other numbers."""
    state["mean"].lerp_(update, 1 - options["beta2"])
    state["largest"] = state["largest"] / 2 + update.abs().amax(1, keepdim=True)  # a new tensor
    state["inputs"] += update.abs().mean(0, keepdim=True)
    update.div_(state["largest"] + 0.1)  # of a copy
    return (state["mean"] + update) / (0.5 + state["inputs"]) + 0.1 * weights.tanh()


def plain_uneven(matrix, change, state, of):
    mean = state["mean"] = of["beta2"] * state.get("mean", 0) + (1 - of["beta2"]) * change
    largest = state["largest"] = 0.5 * state.get("largest", 0) + change.abs().max(dim=1).values
    inputs = state["inputs"] = state.get("inputs", 0) + change.abs().sum(dim=0) / len(change)
    moved = (mean + change / (largest + 0.1)[:, None]) / (0.5 + inputs)[None, :] + 0.1 * torch.tanh(matrix)
    decayed = matrix * (matrix * moved >= 0) if of["cautious_weight_decay"] else matrix
    matrix.copy_(matrix - of["lr"] * of["weight_decay"] * decayed - of["adjusted_lr"] * moved)


def slow(update, weights, state, options):
    time.sleep(0.2)
    return update


def collecting(update, weights, state, options):
    """What Python may do by itself in any function."""
    time.sleep(0.2)
    gc.collect()
    return update


# ---- wrong ones ----


def raises(update, weights, state, options):
    raise KeyError("no such thing")


def of_another_shape(update, weights, state, options):
    return update[:, 1:]


def of_another_dtype(update, weights, state, options):
    return update.half()


def of_another_device(update, weights, state, options):
    return update.to("meta")


def no_tensor(update, weights, state, options):
    return None


def with_another_state(update, weights, state, options):
    state["radius"] = weights.norm()
    return update


def that_waits_for_itself(update, weights, state, options):
    for optimizer in gc.get_objects():
        if isinstance(optimizer, dmuon.Muon) and optimizer.param_groups[0]["rule"] == "that_waits_for_itself":
            for of_matrix in optimizer.state.values():
                of_matrix.get("momentum_buffer")
    return update


ANSWERS: list[str] = []
QUESTIONS: list[Any] = []  # of the program, in every update


def that_asks(update, weights, state, options):
    for question in QUESTIONS:
        try:
            ANSWERS.append(f"answered {question()}")
        except (ValueError, RuntimeError) as error:
            ANSWERS.append(str(error))
    return update


def without_its_state(update, weights, state, options):
    del state["radius"]
    return update


WRONG = {
    "raises": "KeyError: 'no such thing'",
    "of_another_shape": "changed update: expected Float [",
    "of_another_dtype": "got Half [",
    "of_another_device": "on meta",
    "no_tensor": "TypeError: expected a tensor from the function, got NoneType",
    "with_another_state": "state 'radius': expected Float [1, 1] on",
    "that_waits_for_itself": "ValueError: a rule of update has used a model of dmuon, or the state of its optimizer",
    "without_its_state": "TypeError: state: expected a tensor for each of ['radius'], got {}",
}

dmuon.rules.register("hyperball", move=hyperball, state={"radius": SIZES["radius"]})
dmuon.rules.register("uneven", after=uneven, state={name: of for name, of in SIZES.items() if name != "radius"})
dmuon.rules.register("slow", after=slow)
dmuon.rules.register("collecting", after=collecting)
dmuon.rules.register("that_asks", after=that_asks)
for _name in WRONG:
    dmuon.rules.register(_name, after=globals()[_name], state={"radius": (1, 1)})
ReferenceMuon.users |= {"hyperball": plain_hyperball, "uneven": plain_uneven}
