"""Peak memory of a rank, and its parts: AdamW under FSDP2 beside dmuon, or under DDP beside dmuon in its place.

    torchrun --nproc-per-node 4 bench/memory.py --mesh 1x4
    torchrun --nproc-per-node 4 bench/memory.py --mesh 2x2 --dtype fp32
    torchrun --nproc-per-node 4 bench/memory.py --mesh 1x4 --optim ddp,replicated

Each optimizer has processes of its own. The figures are of the rank with the highest peak, in MB above the idle
process, which has imported all libraries and sent a message. The kernel says the peak (VmHWM), dmuon's counters
its own parts, and mallinfo2 the blocks of malloc, every 2 ms. Freed pages are what the peak had beyond
these blocks and a process after malloc_trim. CPUs, Linux with glibc 2.33.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.contender import LABELS, Cluster, Contender, Rates, open_cluster
from bench.gpt import GPTConfig
from bench.text import Text, load_text

_RESET = Path("/proc/self/clear_refs")
OWNERS = ("dmuon", "replicated")
PHASES = ("forward", "backward", "step")
NUM_STEPS = 4

# Rows of the table: keys of measure(), and what they are. An indented row is a part of the next one that is not.
ROWS = {
    "state": "masters, momenta, gradients of owners",
    "node_copy": "node copies",
    "pool": "packed weights and gradients, inboxes",
    "adamw": "  parameters of AdamW, their state",
    "between": "blocks of malloc between steps",
    "forward": "  more in the forward",
    "backward": "  more in the backward",
    "step": "  more in the step",
    "within": "the most of these three",
    "kept": "freed pages that malloc keeps then",
    "libraries": "pages of libraries",
    "rest": "the rest",
    "peak": "peak of the training steps",
    "building": "peak while building",
}
ADDED = ("state", "node_copy", "pool", "between", "within", "kept", "libraries")


def _status_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


class MemoryMeter:
    """Peak memory of one contender, while others may live in the same process.

    Make one, build, warm up, `settle`, run the steps in question, read `peak_bytes`.

    On CUDA: bytes of torch's allocator. On Linux CPUs: resident pages, which include weights, gradients, state,
    activations, the transport's buffers and what malloc keeps; good to about a tenth. Both are the peak since `settle`,
    above the level when the meter was made.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._works = self._cuda or _RESET.exists()
        self._base = 0
        trim()
        if self._works:
            self._base = torch.cuda.memory_allocated() if self._cuda else _status_bytes("VmRSS")

    def settle(self) -> None:
        """Forgets peaks so far: building holds the whole model for a moment, training does not.

        On CPUs free pages that malloc keeps from earlier contenders would serve this one unseen: the system gets them.
        """
        trim()
        self.forget()

    def forget(self) -> None:
        """Forgets peaks so far."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        elif self._works:
            try:
                _RESET.write_text("5")  # VmHWM, the peak of VmRSS, starts afresh
            except OSError:  # some containers forbid it
                self._works = False

    def level(self) -> int:
        """Resident bytes now. CPUs."""
        return _status_bytes("VmRSS") - self._base

    def peak_bytes(self) -> int | None:
        """None where the system gives no way to measure it."""
        if not self._works:
            return None
        peak = torch.cuda.max_memory_allocated() if self._cuda else _status_bytes("VmHWM")
        return max(peak - self._base, 0)


def trim() -> None:
    """Returns free pages to the system."""
    gc.collect()
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(0)


def build(name: str, options: argparse.Namespace, cluster: Cluster, text: Text) -> Contender:
    config = GPTConfig(options.layers, options.width, options.width // 64, options.sequence)
    return Contender(name, config, text, cluster, dtype=options.dtype, rates=Rates())


class Blocks(threading.Thread):
    """The most bytes of malloc's blocks that were in use at once, by phase."""

    class _Info(ctypes.Structure):
        _fields_ = [("words", ctypes.c_size_t * 10)]

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.phase, self.most = "", dict.fromkeys(PHASES, 0)
        self._read = ctypes.CDLL(None).mallinfo2
        self._read.restype = self._Info

    def now(self) -> int:
        words = self._read().words
        return int(words[4] + words[7])  # hblkhd, blocks with pages of their own; uordblks, those in heaps

    def run(self) -> None:
        while True:
            if phase := self.phase:
                self.most[phase] = max(self.most[phase], self.now())
            time.sleep(0.002)


def train_step(contender: Contender, batch: Any, blocks: Blocks) -> None:
    blocks.phase = "forward"
    loss = contender._loss(*batch)
    blocks.phase = "backward"
    loss.backward()
    blocks.phase = "step"
    contender.optimizer.step()
    contender.optimizer.zero_grad()
    blocks.phase = ""


def parts(name: str, options: argparse.Namespace, cluster: Cluster, text: Text) -> dict[str, int]:
    """Builds and trains. Returns bytes above those of now."""
    meter, files, blocks = MemoryMeter(cluster.device), _status_bytes("RssFile"), Blocks()
    before = blocks.now()
    blocks.start()
    meter.forget()
    contender = build(name, options, cluster, text)
    found = {"building": meter.peak_bytes() or 0, "state": 0, "node_copy": 0, "pool": 0}
    meter.forget()
    for index in range(NUM_STEPS):
        train_step(contender, text.train_batch(index, cluster.part), blocks)
    cluster.barrier()
    found["peak"] = meter.peak_bytes() or 0
    found["libraries"] = _status_bytes("RssFile") - files
    found["adamw"] = adamw_bytes(contender)
    optimizer: Any = contender.optimizer
    if name in OWNERS:
        memory = optimizer.plan.native.memory[cluster.rank]
        found |= {"state": memory.state, "node_copy": memory.node_copy}
        found["pool"] = int(optimizer.stats()["peak_bytes"]) - memory.state - memory.node_copy
    gc.collect()
    after = blocks.now()
    trim()
    lasting = meter.level()
    found["between"] = after - before
    found |= {phase: most - after for phase, most in blocks.most.items()}
    found["within"] = max(found[phase] for phase in PHASES)
    found["kept"] = found["peak"] - lasting - found["within"]
    found["rest"] = found["peak"] - sum(found[part] for part in ADDED)
    return found


def adamw_bytes(contender: Contender) -> int:
    """Bytes of the parameters that AdamW updates on this rank, and of their two moments."""
    groups = [group for group in contender.optimizer.param_groups if group.get("algorithm") != "muon"]
    weights = [weight for group in groups for weight in group["params"]]
    return 3 * sum(weight.to_local().nbytes if isinstance(weight, DTensor) else weight.nbytes for weight in weights)


def measure(name: str, options: argparse.Namespace) -> None:
    """Runs in processes of its own; rank 0 writes the figures of all ranks."""
    torch.set_num_threads(1)
    if name in OWNERS:
        importlib.import_module("dmuon")  # its libraries are part of the idle process
    cluster = open_cluster(options.mesh)
    text = Text(load_text(None), options.batch, options.sequence, 0, cluster.device)
    cluster.barrier()
    found = cluster.gather(parts(name, options, cluster, text))
    if cluster.rank == 0:
        options.write.write_text(json.dumps(found))
    if cluster.mesh is not None:
        dist.destroy_process_group()


def in_own_processes(name: str, number: int, folder: str) -> list[dict[str, int]]:
    """Calls `measure` in a new process for each rank. Returns the figures on rank 0."""
    out = Path(folder) / f"{number}.json"
    command = [sys.executable, *sys.argv, "--only", name, "--write", str(out)]
    # A store of their own: torchrun's has the keys of the processes before.
    port = int(os.environ["MASTER_PORT"]) + number
    own = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
    subprocess.run(command, env={**os.environ, **own}, check=True)
    found: list[dict[str, int]] = json.loads(out.read_text()) if out.exists() else []
    return found


def show(results: dict[str, dict[str, int]], title: str) -> None:
    print(f"{title}\n{'MB of a rank':40}" + "".join(f"{LABELS[name]:>11}" for name in results) + "    ratio")
    for key, text in ROWS.items():
        cells = "".join(f"{one[key] / 1e6:11.1f}" for one in results.values())
        first, *_, last = [one[key] for one in results.values()] * 2
        print(f"{text:40}{cells}" + (f"{last / first:9.2f}" if key == "peak" else ""))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--mesh", help="RxG: R replicas of G shards; default: all ranks one row")
    add("--optim", default="adamw,dmuon", help=f"comma-separated, of: {', '.join(LABELS)}")
    add("--layers", type=int, default=16)
    add("--width", type=int, default=512)
    add("--sequence", type=int, default=64)
    add("--batch", type=int, default=1, help="sequences a rank")
    add("--dtype", choices=("bf16", "fp32"), default="bf16")
    for inside in ("--only", "--write"):
        add(inside, type=Path if inside == "--write" else str, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.only is not None:
        return measure(options.only, options)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(options.optim.split(","), start=1):
            if ranks := in_own_processes(name, number, folder):
                results[name] = max(ranks, key=lambda one: one["peak"])
    if results:
        show(results, f"mesh {options.mesh}, {options.layers} blocks of width {options.width}, {options.dtype}")


if __name__ == "__main__":
    main()
