"""The section of `dmuon tune`: which choices are kept for this machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dmuon._doctor.devices import accelerators
from dmuon._doctor.findings import Findings
from dmuon._planning.cache import cache_folder, device_name, machine_key, steps_text

if TYPE_CHECKING:
    import torch


def tuned(findings: Findings) -> None:
    """Counts the stored choices for each device here. A file that cannot be read counts as unreadable.

    A device without choices for the dtype, steps and coefficients of Muon's defaults gets a hint.
    """
    import torch

    folder = cache_folder()
    findings.fact("folder", folder or "none (DMUON_CACHE_DIR)")
    if folder is None:
        return
    elsewhere, unreadable = 0, 0
    # Devices of one name share a file.
    here = {device_name(one): one for one in [torch.device("cpu"), *accelerators()]}
    untuned = {name: _default_key(one) for name, one in here.items()}
    for path in sorted((folder / "tuned").glob("*.json")):
        try:
            held = json.loads(path.read_text())
            key, number = held["key"], len(held["choices"])
            if _fits(key, here.get(key["device"])):
                threads = f", {key['threads']} threads" if key["threads"] else ""
                findings.fact(key["device"], f"{number} shapes, {key['ns_dtype']}, {steps_text(key)}{threads}")
                if _without_threads(key) == untuned.get(key["device"]):
                    del untuned[key["device"]]
            else:
                elsewhere += 1
        except Exception:  # whatever is in it
            unreadable += 1
    findings.fact("files of other machines or versions", elsewhere)
    if unreadable:
        findings.fact("unreadable files", unreadable)
    for name in untuned:
        command = "dmuon tune --inventory inventory.json (docs/plans.md, Tuning Newton-Schulz)"
        reason = (
            f"nothing is tuned for Muon's defaults on {name}: the default form of Newton-Schulz runs for every shape"
        )
        findings.hint(reason, command)


def _fits(key: dict[str, Any], device: torch.device | None) -> bool:
    """True if a key is of this machine, whatever the number of threads, the dtype and the coefficients."""
    machine = machine_key(device) if device is not None else {}
    return device is not None and all(key[name] == machine[name] for name in ("device", "dmuon", "torch"))


def _default_key(device: torch.device) -> dict[str, Any]:
    """Returns the key of Muon's defaults on a device, as a file holds it, for any number of threads."""
    from dmuon import _C
    from dmuon._planning.choices import Setting
    from dmuon._setup.hyperparameters import NS_COEFFICIENTS, NS_STEPS, resolved_coefficients

    rows = resolved_coefficients(NS_COEFFICIENTS, NS_STEPS)
    return _without_threads(json.loads(json.dumps(Setting(device, _C.default_ns_dtype(device), rows).key())))


def _without_threads(key: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in key.items() if name != "threads"}
