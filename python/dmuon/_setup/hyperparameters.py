"""Hyperparameters of both algorithms: the keys of a group, their checks, and their form for the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dmuon import _C, _plan
from dmuon._setup import user_rules
from dmuon._setup.option_values import real_number
from dmuon._setup.shown import shown

NsCoefficients = str | Sequence[float] | Sequence[Sequence[float]]

# The iteration's defaults, for Muon and `orthogonalize`; C++ has the numbers.
NS_COEFFICIENTS = "polar_express"
NS_STEPS = _plan.NS_STEPS
EPS = _C.EPS
RULE = _plan.rule_names()[0]

_ROUNDING = 1e-12  # of a rate: many times what schedulers that compute in fp64 lose
_MUON = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn", "ns_dtype")
_OF_RULES = ("rule", "beta2", "cautious_weight_decay")  # keys that only some groups of matrices have
_ADAMW = ("lr", "betas", "eps", "weight_decay")
_ADAMW_SWITCHES = ("amsgrad", "maximize", "decoupled_weight_decay", "capturable", "differentiable")  # torch's defaults


def adamw_moments(group: dict[str, Any]) -> tuple[str, ...]:
    """Returns torch's names of the tensors that AdamW stores for a parameter, in its shape. `step` comes beside."""
    return ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group.get("amsgrad") else []))


def plain(group: dict[str, Any]) -> dict[str, Any]:
    """Returns `group` with one-element tensors as numbers: a tensor prints its device, which differs between ranks."""

    def number(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return tuple(number(item) for item in value)
        return float(value) if isinstance(value, torch.Tensor) else value

    return {key: number(value) for key, value in group.items()}


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a group that must be equal on all ranks."""
    of_muon = group["algorithm"] == "muon"
    known = ("algorithm", *(_MUON if of_muon else _ADAMW))
    others = _OF_RULES if of_muon else _ADAMW_SWITCHES
    return plain({key: group[key] for key in known} | {key: group[key] for key in others if key in group})


def rule_settings(rule: str, beta2: float, cautious_weight_decay: bool) -> dict[str, Any]:
    """Returns the keys of a group of matrices for a rule of update and its options.

    Groups of the rule "muon" without cautious weight decay have none of them. So their saved groups have the keys that
    they have always had: `dcp.load` refuses a checkpoint that lacks one.
    """
    settings: dict[str, Any] = {} if rule == RULE else {"rule": rule, "beta2": beta2}
    return settings if cautious_weight_decay is False else {**settings, "cautious_weight_decay": cautious_weight_decay}


def rule_of(group: dict[str, Any]) -> str:
    """Returns the name of the rule of update of a group of matrices."""
    rule: str = group.get("rule", RULE)
    return rule


def require_rule(group: dict[str, Any], rule: str, where: str) -> None:
    """Raises ValueError if a group of matrices names another rule than the optimizer's, whose states owners store."""
    if rule_of(group) != rule:
        raise ValueError(
            f"{where}: rule: expected '{rule}', the optimizer's, got {shown(group.get('rule', RULE))}. All matrices of "
            "an optimizer have one rule."
        )


class Tuned(NamedTuple):
    """The choices of `dmuon tune` by rows and columns, and the settings that they hold for."""

    ns_dtype: torch.dtype
    coefficients: list[tuple[float, float, float]]
    choices: dict[tuple[int, int], _C.Choice]

    def rows(self) -> list[tuple[int, int, str, str, bool, int, str]]:
        """Returns the choices as plain values, sorted by rows and columns."""
        return [(*sides, *plain_choice(self.choices[sides])) for sides in sorted(self.choices)]

    def memo_words(self, device: torch.device) -> int:
        """Returns the words of a matrix that choices keep from step to step.

        Kernels are tested for this only where they are tuned or the default.
        """
        kernels = any(choice.elementwise for choice in self.choices.values()) or _C.prefers_cuda_kernels(device)
        return _C.memo_words(device) if kernels else 0


PlainChoice = tuple[str, str, bool, int, str]


def plain_choice(choice: _C.Choice) -> PlainChoice:
    return choice.backend, choice.form.name, choice.batched, choice.panel_rows, choice.elementwise


def choice_of(backend: str, form: str, batched: bool, panel_rows: int, elementwise: str) -> _C.Choice:
    return _C.Choice(backend, getattr(_C.Form, form), batched, panel_rows, elementwise)


def rate_of(group: dict[str, Any], first: Any = None) -> Any:
    """Returns a group's learning rate. Returns 0 for one that schedulers' rounding has put below 0.

    Rounding is less than 1e-12 of the group's `initial_lr`, which schedulers set, else of `first`, the constructor's.
    With None the group has passed `check_group`, so that all below 0 is rounding. A tensor stays a tensor.
    """
    lr = group["lr"]
    number, initial = real_number(lr), math.inf if first is None else real_number(group.get("initial_lr", first))
    if number is None or initial is None:  # `check_group` says what is wrong
        return lr
    if -_ROUNDING * initial < number < 0:
        return torch.zeros_like(lr) if isinstance(lr, torch.Tensor) else 0.0
    return lr


def native_group(
    group: dict[str, Any], device: torch.device, tuned: Tuned | None = None, records: bool = False
) -> _C.MuonGroup:
    """Returns the present hyperparameters of a Muon group, with the choices if they were tuned for these.

    `records`: updates record figures for `dmuon.update_stats`.
    """
    coefficients = resolved_coefficients(group["ns_coefficients"], group["ns_steps"])
    ns_dtype = group["ns_dtype"] or _C.default_ns_dtype(device)
    choices: dict[Any, _C.Choice] = tuned.choices if tuned and tuned[:2] == (ns_dtype, coefficients) else {}
    numbers = {name: _float(group[name]) for name in ("weight_decay", "momentum", "eps")}
    return _C.MuonGroup(
        lr=_float(rate_of(group)),
        **numbers,
        nesterov=bool(group["nesterov"]),
        coefficients=coefficients,
        adjust_lr_fn="original" if group["adjust_lr_fn"] is None else group["adjust_lr_fn"],
        ns_dtype=ns_dtype,
        choices=choices,
        rule=user_rules.native(rule_of(group)),
        beta2=_float(group.get("beta2", 0.0)),
        cautious_weight_decay=bool(group.get("cautious_weight_decay", False)),
        records=records,
    )


def _float(value: Any) -> float:
    return float(value.item() if hasattr(value, "item") else value)  # NumPy's arrays of one have no other way


def resolved_coefficients(
    given: NsCoefficients, steps: int, function: str = "Muon"
) -> list[tuple[float, float, float]]:
    """Returns one (a, b, c) for each step.

    Raises:
        ValueError: the coefficients do not exist. Names `function` and its argument `ns_coefficients`.
    """
    try:
        if not isinstance(given, str):
            if not isinstance(given, list | tuple):  # an iterator would be used up, and no checkpoint takes an array
                raise TypeError(f"it is of type {type(given).__name__}")
            rows: Any = list(given)
            if rows and not isinstance(rows[0], list | tuple):
                rows = [rows]
            if any(not isinstance(row, list | tuple) or len(row) != 3 for row in rows):
                raise ValueError("a row is no list or tuple of three")
            given = [(float(a), float(b), float(c)) for a, b, c in rows]
        return _C.resolve_coefficients(given, steps)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{function}: ns_coefficients: expected rows (a, b, c) or a name, got {shown(given)} with ns_steps="
            f"{steps}: {error}"
        ) from None


def _number(argument: str, value: Any, most: float = math.inf) -> None:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValueError(f"{argument}: expected one element, got a tensor of shape {tuple(value.shape)}")
    if (number := real_number(value)) is None:  # even "0.1": a scheduler would compute with it
        raise ValueError(f"{argument}: expected a number, got {shown(value)}")
    if not 0 <= number < most:
        raise ValueError(f"{argument}: expected a number in [0, {most:g}), got {number:g}")
    if number > torch.finfo(torch.float32).max:
        raise ValueError(f"{argument}: expected a number that fp32 can hold, got {number:g}")


def check_group(group: dict[str, Any], where: str = "", first_lr: Any = 0.0) -> None:
    """Raises ValueError naming the first hyperparameter of a group that is bad or missing.

    `where` names the group in the message. Without it the message names Muon's arguments. `first_lr` is as in
    `rate_of`.
    """
    if "algorithm" not in group:
        raise ValueError(f"{where or 'Muon'}: expected a group with 'algorithm', got one without")
    if (algorithm := group["algorithm"]) not in ("muon", "adamw"):
        raise ValueError(f"{where or 'Muon'}: algorithm: expected 'muon' or 'adamw', got {shown(algorithm)}")
    of_muon = algorithm == "muon"
    prefix = f"{where}: " if where else "Muon: " if of_muon else "Muon: adamw_"
    if of_muon and rule_of(group) not in (known := user_rules.all_names()):
        raise ValueError(
            f"{prefix}rule: expected one of {known} or a rule of dmuon.rules.register, got {shown(group['rule'])}"
        )
    of_rule = ("beta2",) if of_muon and rule_of(group) != RULE else ()
    for name in (*(_MUON if of_muon else _ADAMW), *of_rule):
        if name not in group:
            raise ValueError(f"{where or 'Muon'}: expected a group with '{name}', got one without")
    _number(f"{prefix}lr", rate_of(group, first_lr))
    for name in ("weight_decay", "eps"):
        _number(f"{prefix}{name}", group[name])
    if not of_muon:
        betas = group["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise ValueError(f"{prefix}betas: expected two numbers, got {shown(betas)}")
        for beta in betas:
            _number(f"{prefix}betas", beta, 1)
        _check_switches(group, prefix)
        return
    for name in ("momentum", *of_rule):
        _number(f"{prefix}{name}", group[name], 1)
    steps = group["ns_steps"]
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < 100:
        raise ValueError(f"{prefix}ns_steps: expected an int in [1, 99], got {shown(steps)}")
    for name in ("nesterov", "cautious_weight_decay"):
        if not isinstance(switch := group.get(name, False), bool):
            raise ValueError(f"{prefix}{name}: expected True or False, got {shown(switch)}")
    if not isinstance(adjust := group["adjust_lr_fn"], str | None):
        raise ValueError(f"{prefix}adjust_lr_fn: expected a name or None, got {shown(adjust)}")
    if group["ns_dtype"] not in (None, torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise ValueError(f"{prefix}ns_dtype: expected fp64, fp32, bf16, fp16 or None, got {group['ns_dtype']}")
    try:
        native_group({**group, "ns_dtype": torch.float32}, torch.device("cpu"))
    except TypeError as error:
        raise ValueError(f"{prefix}a hyperparameter has the wrong type: {error}") from None
    except ValueError as error:
        raise ValueError(prefix + str(error).removeprefix("Muon: ")) from None


def _check_switches(group: dict[str, Any], prefix: str) -> None:
    """Raises ValueError naming the first of AdamW's switches that is wrong. Most of these torch refuses in its step."""
    for name in _ADAMW_SWITCHES:
        if not isinstance(switch := group.get(name, False), bool):
            raise ValueError(f"{prefix}{name}: expected True or False, got {shown(switch)}")
    for name in ("foreach", "fused"):
        if not isinstance(switch := group.get(name), bool | None):
            raise ValueError(f"{prefix}{name}: expected True, False or None, got {shown(switch)}")
    if group.get("differentiable", False):
        raise ValueError(f"{prefix}differentiable: expected False, got True: no gradient passes through a step of Muon")
