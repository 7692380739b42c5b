"""Rules of update of your own: functions in Python that `dmuon.Muon(model, rule="mine")` calls at the owners.

A rule has one function. It reads one matrix at a time, after Newton-Schulz:

    def signed(update, weights, state, options):
        return update.sign()

    dmuon.rules.register("signed", after=signed)
    optimizer = dmuon.Muon(model, rule="signed")

`update` is the orthogonalised update and `weights` the present weights, both fp32 [out, in] on the model's device,
however the matrix is stored. `state` is a dict of the rule's own tensors. `options` is a dict of this step's numbers
for the matrix's group: "lr", "adjusted_lr" (as `adjust_lr_fn` says, for this shape), "weight_decay" and "beta2". The
function may change the tensors that it reads: they are copies. It returns an fp32 tensor of the same shape and device.

The function runs at the matrix's owner, on CPUs in another thread than the training, with gradients off. On an
accelerator it runs on another stream, and a read of a value on the host makes the training wait. It must compute the
same on every rank: owners are others on another mesh. It must not communicate.

If the function raises, or returns a tensor of another shape, dtype or device, all ranks raise an error that names the
rule and the matrix. As after any error in an update, go on from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping

from dmuon import _plan
from dmuon._setup import user_rules
from dmuon._setup.user_rules import Function, Side

__all__ = ["Function", "Side", "register"]

_TAKEN_STATES = ("momentum_buffer", "master", "gradient", "memo", "step")
_TAKEN_NAMES = ("adam", "adamw")  # algorithms in saved groups


def register(
    name: str,
    *,
    after: Function | None = None,
    move: Function | None = None,
    state: Mapping[str, tuple[Side, Side]] | None = None,
) -> None:
    """Makes a rule of update known by its name, for this process. Every rank registers the same.

    Args:
        name: of the rule, an identifier, for `dmuon.Muon(model, rule=name)`. Checkpoints have it.
        after: `after(update, weights, state, options)` returns the changed update, which Muon then applies with
            `adjusted_lr` and its weight decay.
        move: `move(update, weights, state, options)` returns the new weights, in place of Muon's own move. Give either
            this or `after`. Weight decay is the function's own affair.
        state: tensors that each matrix keeps from step to step, `{"radius": (1, 1), "mean": ("rows", "cols")}`. They
            are fp32, zeros before the first step, and saved with the optimizer. Rows and columns are those of the
            [out, in] matrix, or numbers up to 1024. The function changes a tensor in place, or puts a new one into the
            dict.

    Raises:
        ValueError: an argument is bad, or the name has another rule. A function replaces the former one, as when a
            notebook's cell runs again, if it has the same qualified name, and the rule the same `state` and use.
    """
    where = "dmuon.rules.register"
    if not isinstance(name, str) or not name.isidentifier() or name in _TAKEN_NAMES:
        raise ValueError(f"{where}: name: expected an identifier other than {_TAKEN_NAMES}, got {name!r}")
    if name in _plan.rule_names():
        raise ValueError(f"{where}: name: expected another name than dmuon's own {_plan.rule_names()}, got {name!r}")
    function = after if move is None else move
    if (after is None) == (move is None) or not callable(function):
        raise ValueError(
            f"{where}: expected one function, as after or as move; got after={_kind(after)}, move={_kind(move)}"
        )
    states = _checked_states({} if state is None else state, where)
    if (former := user_rules.add(name, function, move is not None, states)) is not None:
        raise ValueError(f"{where}: name: expected one that no other rule has, got {name!r} again, which {former}")


def _checked_states(state: Mapping[str, tuple[Side, Side]], where: str) -> dict[str, tuple[Side, Side]]:
    if not isinstance(state, Mapping):
        raise ValueError(f"{where}: state: expected a dict of names and sizes, got {_kind(state)}")
    for name, sizes in state.items():
        if not isinstance(name, str) or not name.isidentifier() or name in _TAKEN_STATES:
            raise ValueError(f"{where}: state: expected identifiers other than {_TAKEN_STATES} as names, got {name!r}")
        is_pair = isinstance(sizes, tuple | list) and len(sizes) == 2
        if not is_pair or not (_is_side(sizes[0], "rows") and _is_side(sizes[1], "cols")):
            raise ValueError(
                f"{where}: state: '{name}': expected ('rows' or a number, 'cols' or a number), with numbers in "
                f"[1, {_plan.MOST_OF_STATE}]; got {sizes!r}"
            )
    return {name: (sizes[0], sizes[1]) for name, sizes in state.items()}


def _is_side(value: object, own: str) -> bool:
    return value == own or (type(value) is int and 1 <= value <= _plan.MOST_OF_STATE)


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__
