"""The section of `dmuon tune`: which choices are kept for this machine."""

from __future__ import annotations

import json
from typing import Any

from dmuon._doctor.devices import accelerators
from dmuon._doctor.findings import Findings
from dmuon._planning.cache import cache_folder, device_name, machine_key


def tuned(findings: Findings) -> None:
    """Counts the stored choices for each device here. A file that cannot be read counts as unreadable."""
    import torch

    folder = cache_folder()
    findings.fact("folder", folder or "none (DMUON_CACHE_DIR)")
    if folder is None:
        return
    keys, elsewhere, unreadable = [], 0, 0
    # Devices of one name share a file.
    here = {device_name(one): machine_key(one) for one in [torch.device("cpu"), *accelerators()]}
    for path in sorted((folder / "tuned").glob("*.json")):
        try:
            held = json.loads(path.read_text())
            key, number = held["key"], len(held["choices"])
            if _fits(key, here.get(key["device"])):
                threads = f", {key['threads']} threads" if key["threads"] else ""
                findings.fact(key["device"], f"{number} shapes, {key['ns_dtype']}{threads}")
                keys.append(key["device"])
            else:
                elsewhere += 1
        except Exception:  # whatever is in it
            unreadable += 1
    findings.fact("files of other machines or versions", elsewhere)
    if unreadable:
        findings.fact("unreadable files", unreadable)
    for name in here.keys() - set(keys):
        command = "dmuon tune --inventory inventory.json (docs/plans.md, Tuning Newton-Schulz)"
        findings.hint(f"nothing is tuned for {name}: the default form of Newton-Schulz runs for every shape", command)


def _fits(key: dict[str, Any], machine: dict[str, Any] | None) -> bool:
    """True if a key is of this machine, on any number of threads."""
    return machine is not None and all(key[name] == machine[name] for name in ("device", "dmuon", "torch"))
