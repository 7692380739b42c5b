"""The answer of `dmuon tune`, the only command that needs PyTorch. Imports PyTorch when there is something to time."""

from __future__ import annotations

import argparse
import json
import logging
from typing import Any

from dmuon._command.arguments import require_alone
from dmuon._command.task import read_model
from dmuon._planning.cache import cache_folder, steps_text

logger = logging.getLogger("dmuon")

_NO_FOLDER = "there is no folder for it"
_SOURCES = ("shapes", "inventory", "model", "show")


def tune(arguments: argparse.Namespace) -> str:
    """Tunes the shapes that the cache lacks, or lists the cache."""
    given = [f"--{name}" for name in _SOURCES if getattr(arguments, name)]
    if len(given) != 1:
        names = "--shapes, --inventory, --model or --show"
        raise ValueError(f"tune: expected one of {names}; got {' and '.join(given) or 'none'}")
    if arguments.show:
        require_alone(arguments, "--show")
        return _shown(arguments.json)
    shapes = arguments.shapes or [sizes for item in read_model(arguments).inventory for sizes in item.sizes_of_costs()]
    import torch

    from dmuon import _C
    from dmuon._planning import tuning
    from dmuon._planning.choices import Setting, cached

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtypes = {None: _C.default_ns_dtype(device), "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    rows = _C.resolve_coefficients(arguments.coefficients, arguments.steps)
    setting = Setting(device, dtypes[arguments.dtype], rows)
    results, unreached = tuning.tune(shapes, setting, arguments.budget)
    found = {"key": setting.key(), "choices": [result._asdict() for result in results]}
    missing = [(*shape, why) for shape, why in unreached.items()]
    known = cached(setting, quiet=True)
    is_kept = all(known.get(result[1:3]) == result for result in results)
    if arguments.json:
        return json.dumps({**found, "not_tuned": missing, "kept": is_kept}) + "\n"
    lines = [_table(found)]
    lines += [f"{_shape_text(number, rows, cols)}: the default stays: {why}" for number, rows, cols, why in missing]
    if not is_kept:
        why = _NO_FOLDER if cache_folder() is None else f"{cache_folder()} cannot be written"
        lines.append(f"nothing is kept: {why} (DMUON_CACHE_DIR)")
    return "\n".join([*lines, ""])


def _shown(as_json: bool) -> str:
    """Returns all choices in the cache, of every setting. Warns of unreadable rows and files, and omits them."""
    folder = cache_folder()
    shown, tables = [], []
    for path in sorted((folder / "tuned").glob("*.json")) if folder else []:
        problems: list[Exception] = []
        try:
            found = json.loads(path.read_text())
            found["choices"] = [one for one in found["choices"] if _is_shown(one, problems)]
            table = _table(found)
        except Exception as error:  # whatever is in it
            found, problems = None, [error]
        if problems:
            kind = type(problems[0]).__name__
            logger.warning("dmuon: tuned choices are not read from %s: %s: %s", path, kind, problems[0])
        if found is None:
            continue
        shown.append(found)
        tables.append(table)
    if as_json:
        return json.dumps(shown) + "\n"
    if tables:
        return "\n\n".join(tables) + "\n"
    return f"nothing is kept in {folder}\n" if folder else f"nothing is kept: {_NO_FOLDER} (DMUON_CACHE_DIR)\n"


def _table(found: dict[str, Any]) -> str:
    key = found["key"]
    threads = f", {key['threads']} thread{'s' if key['threads'] > 1 else ''}" if key["threads"] else ""
    lines = [
        f"{key['device']}{threads}, {key['ns_dtype']}, {steps_text(key)}, dmuon {key['dmuon']}, PyTorch {key['torch']}",
        f"{'shape':<20}{'default':<42}{'chosen':<42}{'default ms':>12}{'chosen ms':>12}{'ratio':>8}{'error':>10}",
    ]
    return "\n".join([*lines, *map(_row, found["choices"])])


def _row(one: dict[str, Any]) -> str:
    shape = _shape_text(one["number"], one["rows"], one["cols"])
    numbers = f"{one['default_ns'] / 1e6:12.3f}{one['ns'] / 1e6:12.3f}{one['ratio']:8.2f}{one['error']:10.1e}"
    return f"{shape:<20}{_choice_text(one, 'default_'):<42}{_choice_text(one, ''):<42}{numbers}"


def _is_shown(one: Any, problems: list[Exception]) -> bool:
    try:
        _row(one)
    except Exception as error:
        problems.append(error)
        return False
    return True


def _shape_text(number: int, rows: int, cols: int) -> str:
    return f"{f'{number}*' if number > 1 else ''}{rows}x{cols}"


def _choice_text(of: dict[str, Any], prefix: str) -> str:
    names = ("backend", "form", "batched", "panel_rows", "elementwise")
    backend, form, batched, rows, elementwise = (of[f"{prefix}{name}"] for name in names)
    panels, kernels = f", panels of {rows}" if rows else "", f", elementwise {elementwise}" if elementwise else ""
    return f"{backend}, {form.lower()}{', batched' if batched else ''}{panels}{kernels}"
