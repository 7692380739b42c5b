"""The section of devices: accelerators, processor, memory, and which of dmuon's kernels run here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dmuon._doctor.findings import Findings

_NVIDIA = Path("/proc/driver/nvidia/version")
_LEAST_SHARED_GIB = 1  # of /dev/shm, for NCCL between the GPUs of a node
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


def accelerators() -> list[Any]:
    """Returns the torch.devices that PyTorch can use besides the CPU. The first call in a process starts the driver."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return [torch.device(found.type, index) for index in range(torch.accelerator.device_count())] if found else []


def devices(findings: Findings) -> None:
    """Reports the devices."""
    _processor(findings)
    if driver := _driver():
        findings.fact("NVIDIA driver", driver)
    found = accelerators()
    for device in found:
        findings.fact(str(device), _described(device))
    if not found:
        findings.fact("accelerators", "none")
        _why_none(findings)
    if found and "expandable_segments:true" not in _allocator():
        reason = "parts of gradients have unequal sizes, which fragment the allocator's memory"
        findings.hint(reason, "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    if len(found) > 1:
        pairs = [(one.index, other.index) for one in found for other in found if one != other]
        _peers(findings, found[0].type, pairs)
        shared = shutil.disk_usage("/dev/shm").total / 2**30
        findings.fact("/dev/shm", f"{shared:.1f} GiB")
        if shared < _LEAST_SHARED_GIB:
            findings.hint(
                "NCCL needs shared memory between the GPUs of a node", "docker run --ipc=host or --shm-size=8g"
            )
        if os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") != "1":
            reason = "dmuon and FSDP2 use several communicators at once, which NCCL orders by itself only on request"
            findings.hint(reason, "export NCCL_LAUNCH_ORDER_IMPLICIT=1, if ranks hang")


def _processor(findings: Findings) -> None:
    import torch

    from dmuon import _C
    from dmuon._planning.cache import device_name

    cpu = torch.device("cpu")
    known = r"\b(?:avx512f|avx512_bf16|avx512_fp16|amx_bf16|avx2|sve|asimd)\b"
    flags = set(re.findall(known, Path("/proc/cpuinfo").read_text()))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    findings.fact("cpu", f"{device_name(cpu)}, {cores}, {memory:.0f} GiB")
    findings.fact("cpu instructions", " ".join(sorted(flags)) or "none of those that dmuon looks for")
    kinds = [name for name, dtype in DTYPES.items() if "avx512" in backends(cpu, getattr(torch, dtype))]
    findings.fact("dmuon's own kernels", f"avx512, for {' and '.join(kinds)}" if kinds else "none: PyTorch's BLAS")
    default = str(_C.default_ns_dtype(cpu)).removeprefix("torch.")
    findings.fact("ns_dtype on cpu", default)
    if not kinds and "avx512f" in flags:
        findings.hint("this dmuon was built without its AVX-512 kernels", "rebuild: pip install --force-reinstall .")


def backends(device: Any, dtype: Any) -> list[str]:
    """Returns the backends of products that serve a dtype on a device. The default comes first."""
    return list(dict.fromkeys(choice.backend for choice in choices(1, 1, device, dtype)))


def choices(rows: int, cols: int, device: Any, dtype: Any) -> Iterator[Any]:
    """Yields all choices for a shape, the default first."""
    from dmuon._planning.choices import Setting
    from dmuon._setup.hyperparameters import NS_COEFFICIENTS, NS_STEPS, resolved_coefficients

    yield from Setting(device, dtype, resolved_coefficients(NS_COEFFICIENTS, NS_STEPS)).candidates(rows, cols)


def _allocator() -> str:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return ",".join(os.environ.get(name, "") for name in names).lower()


def _driver() -> str:
    """Returns the driver's version, or nothing if there is no driver."""
    if _NVIDIA.exists():
        return " ".join(_NVIDIA.read_text().splitlines()[0].split()).removeprefix("NVRM version: ")
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return " ".join(set(subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.split()))
    return ""


def _described(device: Any) -> str:
    import torch

    if device.type != "cuda":
        return str(device.type)
    known = torch.cuda.get_device_properties(device)
    free, whole = torch.cuda.mem_get_info(device)
    memory = f"{whole / 2**30:.1f} GiB, {free / 2**30:.1f} free"
    return f"{known.name}, {memory}, sm_{known.major}{known.minor}, {known.multi_processor_count} multiprocessors"


def _peers(findings: Findings, kind: str, pairs: list[tuple[int, int]]) -> None:
    import torch

    if kind == "cuda":
        joined = sum(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
        findings.fact("pairs of GPUs with peer access", f"{joined} of {len(pairs)}")


def _why_none(findings: Findings) -> None:
    """Says why PyTorch uses no GPU though there is one."""
    import torch

    if not _driver():
        return
    if torch.version.cuda is None:
        findings.hint("there is an NVIDIA driver, but this PyTorch has no CUDA", "install PyTorch with CUDA")
        return
    try:
        torch.cuda.init()
    except Exception as error:
        findings.fail(f"PyTorch cannot use the GPU: {' '.join(str(error).split())}")
    if shutil.which("nvidia-smi"):
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
        findings.detail(done.stdout + done.stderr)
