"""A machine whose times a test chooses, for the tuner to measure."""

from __future__ import annotations

import torch
from dmuon._planning import tuning
from dmuon._planning.choices import Result, Setting

from dmuon import _C

ROWS = _C.resolve_coefficients("polar_express", 5)
SETTING = Setting(torch.device("cpu"), torch.float32, ROWS)
WIDE = (8, 24, 96)  # Gram by default, in batches


class Machine:
    """Takes `seconds[form name, batched, panel_rows]` a call, or without the last; or 1 ms. `noise` multiplies them."""

    def __init__(self):
        self.now, self.calls, self.seconds = 0.0, [], {}
        self.noise = lambda name, call: 1.0

    def run(self, choice, batches, setting, times):
        name, panels = (choice.form.name, choice.batched), (choice.panel_rows,)
        self.calls.append(name)
        taken = (
            times * self.seconds.get(name + panels, self.seconds.get(name, 1e-3)) * self.noise(name, len(self.calls))
        )
        self.now += taken
        return taken


def tuned(shape=WIDE, budget_s=60.0):
    (result,), unreached = tuning.tune([shape], SETTING, budget_s)
    assert not unreached
    return result


def result_of(rows, cols, form="DIRECT", batched=False, number=8):
    return Result(number, rows, cols, "cpu", form, batched, 0, "", 10, 1e-6, "cpu", "GRAM", True, 0, "", 20, 1e-6, 0.5)
