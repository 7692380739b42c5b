"""The choices of `dmuon tune` for each shape, in a file of the user's cache, and their way to Muon."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple, get_type_hints

import torch

from dmuon import _C
from dmuon._planning.cache import CacheFile, machine_key
from dmuon._setup.agreement import agreement, from_first
from dmuon._setup.hyperparameters import Tuned, choice_of, plain_choice, resolved_coefficients
from dmuon._setup.ranks import Ranks

logger = logging.getLogger("dmuon")

VERSION = 9  # of the cached rows

Shape = tuple[int, int, int]  # matrices, rows, cols


class Setting(NamedTuple):
    """Everything that a choice depends on besides the shape."""

    device: torch.device
    ns_dtype: torch.dtype
    coefficients: list[tuple[float, float, float]]

    def key(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            **machine_key(self.device),
            # CPUs of one name may differ in their instructions. On an accelerator a look at all candidates would run
            # dmuon's kernels, for users who have never tuned, too.
            "backends": sorted({one.backend for one in self.candidates(1, 1)}) if self.device.type == "cpu" else [],
            "ns_dtype": str(self.ns_dtype).removeprefix("torch."),
            "ns_coefficients": self.coefficients,
        }

    def candidates(self, rows: int, cols: int) -> list[_C.Choice]:
        """Returns all choices. The default comes first."""
        place = self.coefficients, len(self.coefficients), self.device, self.ns_dtype
        default = _C.choose(rows, cols, *place)
        return [default, *(one for one in _C.candidates(rows, cols, *place) if one != default)]

    def allows(self, rows: int, cols: int, choice: _C.Choice) -> bool:
        """True if the choice is a candidate, whoever works element by element beside it.

        A rank without dmuon's kernels goes on by PyTorch's operators: results differ by rounding alone.
        """
        known = ("",) if self.device.type == "cpu" else ("", "aten", "cuda")
        return choice.elementwise in known and choice_of(*plain_choice(choice)[:-1], "") in self.candidates(rows, cols)


class Result(NamedTuple):
    """A cached row: the choice for a shape, and its times and errors beside the default's."""

    number: int
    rows: int
    cols: int
    backend: str
    form: str
    batched: bool
    panel_rows: int
    elementwise: str
    ns: int  # nanoseconds of a call, in the median
    error: float  # relative to the same polynomial in fp64, the largest of several matrices
    default_backend: str
    default_form: str
    default_batched: bool
    default_panel_rows: int
    default_elementwise: str
    default_ns: int
    default_error: float
    ratio: float  # time over the default's, in the median over rounds; 1 if the default stays

    @property
    def choice(self) -> _C.Choice:
        return choice_of(self.backend, self.form, self.batched, self.panel_rows, self.elementwise)


_TYPES = tuple(get_type_hints(Result).values())


def cached_choices(ranks: Ranks, shapes: Iterable[Shape], muon: dict[str, Any], device: torch.device) -> Tuned:
    """Returns slot 0's cached choices for these shapes. Times nothing. Collective, with equal results on all ranks.

    Raises:
        ValueError: on every rank, if the machine of one of them cannot run a choice.
    """
    sides = sorted({shape[1:] for shape in shapes})

    def look() -> tuple[Any, ...]:
        rows = resolved_coefficients(muon["ns_coefficients"], muon["ns_steps"])
        setting = Setting(device, muon["ns_dtype"] or _C.default_ns_dtype(device), rows)
        known = cached(setting) if sides else {}
        return *setting[1:], [(*one, *plain_choice(known[one].choice)) for one in sides if one in known]

    ns_dtype, coefficients, found = from_first(ranks, look)
    if found and ranks.owner == 0:
        logger.info("dmuon: %d of %d shapes are orthogonalised as `dmuon tune` has chosen", len(found), len(sides))
    choices = {(rows, cols): choice_of(*choice) for rows, cols, *choice in found}
    if choices:
        with agreement(ranks, "Muon"):
            _check_machine(choices, Setting(device, ns_dtype, coefficients))
    return Tuned(ns_dtype, coefficients, choices)


def _check_machine(choices: dict[tuple[int, int], _C.Choice], setting: Setting) -> None:
    for sides, choice in choices.items():
        if not setting.allows(*sides, choice):
            backends = ", ".join(sorted({one.backend for one in setting.candidates(*sides)}))
            raise ValueError(
                f"Muon: what `dmuon tune` has kept on slot 0's machine for {sides[0]} x {sides[1]} matrices cannot be "
                f"done on this one: expected one of its backends {backends}, got {plain_choice(choice)}; without the "
                "folder `tuned` in slot 0's DMUON_CACHE_DIR the defaults are taken"
            )


def cached(setting: Setting, quiet: bool = False) -> dict[tuple[int, int], Result]:
    """Returns cached results by rows and columns. Warns of damaged rows or a damaged file, and skips these."""
    file = CacheFile("tuned", "choices", setting.key())
    found, problems = {}, []
    # After any error the defaults hold, and the shapes may be tuned again.
    try:
        rows = list(file.rows())
    except Exception as error:
        rows, problems = [], [error]
    for row in rows:
        try:
            result = _checked(row, setting)
            found[result[1:3]] = result
        except Exception as error:
            problems.append(error)
    if problems and not quiet:
        which = f"{len(problems)} tuned choices" if rows else "tuned choices"
        kind = type(problems[0]).__name__
        logger.warning("dmuon: %s are not read from %s: %s: %s", which, file.path, kind, problems[0])
    return found


def _checked(row: dict[str, Any], setting: Setting) -> Result:
    result = Result(**row)
    if any(type(value) is not kind for value, kind in zip(result, _TYPES, strict=True)) or min(result[:3]) < 1:
        raise ValueError(f"expected numbers of a shape and a choice, got {row}")
    if not setting.allows(result.rows, result.cols, result.choice):
        raise ValueError(
            f"{result.rows} x {result.cols}: expected what may be chosen on this machine, got "
            f"{plain_choice(result.choice)}; `dmuon tune` times it anew"
        )
    return result


def store(result: Result, setting: Setting) -> None:
    """Adds a result to the cached ones, which other processes may have stored meanwhile."""

    def rows() -> list[Any]:
        return [one._asdict() for _, one in sorted((cached(setting, quiet=True) | {result[1:3]: result}).items())]

    CacheFile("tuned", "choices", setting.key()).replace(rows, "tuned choices")
