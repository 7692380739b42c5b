"""A predicted step, of dmuon and of what it is compared with. Imports no torch."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

from dmuon import _plan
from dmuon._planning.table import mesh_text
from dmuon._planning.timeline import COMPUTE, Bar, Panel, TraceSpan, draw, write_trace

DEFAULT_TOKENS = 4096
MOST_TOKENS = 1 << 20
MOST_DEVICES = 2048  # whose messages take some ten seconds to simulate
CONTENDERS = ("AdamW", "dmuon", "Muon-AG")
_CAUSES = {
    "outside": "parameters outside of Muon",
    "intra": "messages inside the node",
    "inter": "messages between nodes",
    "update": "updates",
    "peers": "peers",
}
_GB = 1e9
_MEANS = "ms: means over devices; update, and what others hold up: of the worst"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices and what connects their nodes.

    Attributes:
        device: the device's rates.
        network: the network's.
        tokens: of each device and step.
    """

    device: _plan.Device
    network: _plan.Network
    tokens: int


def cluster_of(
    device: str, network: str | None, inter_bandwidth: float | None, devices_a_node: int, tokens: int
) -> Cluster:
    """Returns a device of the catalogue, and its usual network or one of the catalogue.

    `inter_bandwidth` is instead of the network's, in bytes a second of a node and direction, which its devices share.
    """
    rates = _plan.device(device)
    between = _plan.network(network or rates.network)
    if inter_bandwidth is not None:
        adapters = devices_a_node if between.per_device else 1
        rate = inter_bandwidth / 1e9 / adapters
        between = _plan.Network("as given", rate, between.latency_us, between.per_device)
    return Cluster(rates, between, tokens)


class Simulation:
    """A training step of a model on a mesh, predicted for AdamW, dmuon, and Muon-AG.

    Muon-AG is Muon whose ranks gather every matrix and orthogonalise all of them. AdamW and Muon-AG shard by FSDP2 or
    HSDP. If the plan has replicated weights, they run under DistributedDataParallel. Prints as a table.

    Attributes:
        title: names the model and the mesh.
        plan: owners and batches, as `dmuon.plan` returns them.
        cluster: devices, network and tokens.
        steps: the prediction of each contender, by name.
    """

    def __init__(self, title: str, model: _plan.Model, plan: _plan.Plan, cluster: Cluster) -> None:
        if not plan.inventory:
            raise ValueError(f"simulate: expected a model with a matrix for Muon; {title} has none")
        self.title, self.plan, self.cluster = title, plan, cluster
        self.steps: dict[str, _plan.Prediction] = {
            name: _plan.predict(plan, model, cluster.device, cluster.network, cluster.tokens, name)
            for name in CONTENDERS
        }

    def ratio(self, contender: str) -> float:
        """Returns a contender's step over AdamW's."""
        return self.steps[contender].step_ms / self.steps["AdamW"].step_ms

    @property
    def num_idle(self) -> int:
        """The number of devices that own no matrix, nor a part of one."""
        return self.plan.mesh.num_owners() - len({owner for owner, _ in self.plan.batches})

    def idle_text(self) -> str:
        """Returns how many devices own no matrix, in words."""
        return f"{self.num_idle} of {self.plan.mesh.num_owners()} devices own no matrix: under dmuon they update none"

    def heading(self, with_mesh: bool = True) -> str:
        """Returns the title of a picture: model, mesh, tokens and device."""
        title = self.title if with_mesh else self.title.rpartition(" on ")[0]
        return f"{title}, {self.cluster.tokens} tokens a device and step, {self.cluster.device.description}, predicted"

    def task_text(self, with_mesh: bool = True) -> str:
        """Returns lines: model and mesh, device and network, costs, and a note on replicated weights."""
        title = self.title if with_mesh else self.title.rpartition(" on ")[0]
        network = self.cluster.network
        rate = f"{network.gb_per_s:g} GB/s each way {'a device' if network.per_device else 'a node'}"
        lines = [
            f"{title}, {self.cluster.tokens} tokens a device and step",
            f"{self.cluster.device.description}; between nodes {network.name}: {rate}",
            f"costs: {self.plan.costs.source}",
        ]
        if self.plan.options.replicated:
            lines.append("weights are whole on every device; AdamW and Muon-AG run under DistributedDataParallel")
        return "\n".join(lines)

    def memory_text(self, contender: str) -> str:
        """Returns the memory of a contender's fullest device in GB, with a mark if the device has less."""
        used = self.steps[contender].memory_bytes
        return f"{used / _GB:10.1f}{'!' if used > self.cluster.device.memory_gb * _GB else ''}"

    def __str__(self) -> str:
        lines = [
            self.task_text(),
            "           step ms  x AdamW   forward  backward     after  optimizer    update  hidden  GB in node  "
            "between  memory GB",
        ]
        for name, step in self.steps.items():
            forward, backward = step.phases_ms["forward"], step.phases_ms["backward"]
            lines.append(
                f"{name:<8} {step.step_ms:9.1f} {self.ratio(name):8.3f} {forward:9.1f} {backward:9.1f} "
                f"{step.step_ms - forward - backward:9.1f} {step.optimizer_ms:10.1f} {step.update_ms:9.1f} "
                f"{step.hidden:7.0%} {step.intra_bytes / _GB:11.2f} {step.inter_bytes / _GB:8.2f} "
                f"{self.memory_text(name)}"
            )
        lines += [_waits_text(name, step) for name, step in self.steps.items()]
        if self.num_idle:
            lines.append(self.idle_text())
        lines.append(f"{_MEANS}; {_memory_note(self.cluster)}; GB: through one device in one direction")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Returns all figures, for JSON."""
        return {
            "title": self.title,
            "mesh": mesh_text(self.plan.mesh),
            "device": self.cluster.device.name,
            "network": {
                "name": self.cluster.network.name,
                "gb_per_s": self.cluster.network.gb_per_s,
                "per_device": self.cluster.network.per_device,
            },
            "tokens": self.cluster.tokens,
            "costs": self.plan.costs.source,
            "devices_without_matrices": self.num_idle,
            "steps": {
                name: {
                    "step_ms": step.step_ms,
                    "over_adamw": self.ratio(name),
                    "phases_ms": step.phases_ms,
                    "optimizer_ms": step.optimizer_ms,
                    "update_ms": step.update_ms,
                    "beside_ms": step.beside_ms,
                    "adamw_ms": step.adamw_ms,
                    "waits_ms": step.waits_ms,
                    "busy_ms": step.busy_ms,
                    "hidden": step.hidden,
                    "intra_bytes": step.intra_bytes,
                    "inter_bytes": step.inter_bytes,
                    "memory_bytes": step.memory_bytes,
                    "host_ms": step.host_ms,
                }
                for name, step in self.steps.items()
            },
        }

    def save_picture(self, path: str | os.PathLike[str]) -> None:
        """Draws the lanes of the first rank in the step, for AdamW and for dmuon.

        Raises:
            ImportError: matplotlib is missing.
        """
        draw(path, [self._panel("AdamW"), self._panel("dmuon")], self.heading(), "ms", "simulate")

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the step as a Chrome trace for https://ui.perfetto.dev. A process is a contender, a thread a lane."""
        names = self._unit_names()

        def spans(step: _plan.Prediction) -> Iterator[TraceSpan]:
            for span in step.spans:
                times = (1e3 * ms for ms in (span.issued_ms, span.start_ms, span.end_ms))
                yield TraceSpan(span.lane, span.kind, _subject(span, names), *times)

        write_trace(path, ((pid, name, spans(step)) for pid, (name, step) in enumerate(self.steps.items())))

    def _panel(self, contender: str) -> Panel:
        step, names = self.steps[contender], self._unit_names()
        bars = []
        for span in step.spans:
            begin = span.start_ms
            if span.lane == "compute" and span.kind not in COMPUTE:
                begin = span.issued_ms  # a wait, which an operation of compute ends
            if span.end_ms > max(begin, 0.0):
                bars.append(Bar(span.lane, span.kind, _subject(span, names), max(begin, 0.0), span.end_ms))
        begins = [*step.begins_ms.values(), max((bar.end for bar in bars), default=0.0)]
        edges = itertools.pairwise(sorted(begins))
        phases = [(phase, *edge) for phase, edge in zip(("forward", "backward", "step"), edges, strict=True)]
        return Panel(contender, bars, phases)

    def _unit_names(self) -> list[str]:
        """Returns the name of every unit, in the order of `_plan.Span.unit`."""
        of_unit: dict[int, list[str]] = {}
        for parameter in self.plan.inventory:
            of_unit.setdefault(parameter.unit, []).append(parameter.name)
        return ["outside of Muon", *(_common(names) for names in of_unit.values())]


def sweep_table(simulations: Sequence[Simulation]) -> str:
    """Returns a table of one model on several meshes."""
    meshes = [mesh_text(simulation.plan.mesh) for simulation in simulations]
    width = max(map(len, meshes))
    columns = "  AdamW ms   dmuon ms  x AdamW  Muon-AG ms  x AdamW  optimizer ms  update  hidden  memory GB"
    lines = ["mesh".ljust(width) + columns]
    for mesh, simulation in zip(meshes, simulations, strict=True):
        steps = simulation.steps
        dmuon = steps["dmuon"]
        lines.append(
            f"{mesh:<{width}} {steps['AdamW'].step_ms:9.1f} {dmuon.step_ms:10.1f} "
            f"{simulation.ratio('dmuon'):8.3f} {steps['Muon-AG'].step_ms:11.1f} {simulation.ratio('Muon-AG'):8.3f} "
            f"{dmuon.optimizer_ms:13.1f} {dmuon.update_ms:7.1f} {dmuon.hidden:7.0%} {simulation.memory_text('dmuon')}"
        )
    first = simulations[0]
    idle = [f"{mesh}: {each.idle_text()}" for mesh, each in zip(meshes, simulations, strict=True) if each.num_idle]
    notes = f"{_MEANS}; {_memory_note(first.cluster)}"
    return "\n".join([first.task_text(with_mesh=False), *lines, *idle, notes])


def _memory_note(cluster: Cluster) -> str:
    return f"memory: the fullest device's, of {cluster.device.memory_gb:g} GB, without activations (!: more than that)"


def _waits_text(name: str, step: _plan.Prediction) -> str:
    waits = [
        f"{phase} {ms:.1f} for {_CAUSES[cause]}"
        for phase, causes in step.waits_ms.items()
        for cause, ms in causes.items()
        if ms >= 0.05
    ]
    if step.beside_ms >= 0.05:
        waits.append(f"{step.beside_ms:.1f} while others share the device")
    decides = ", which the step takes" if step.step_ms <= step.host_ms else ""
    return f"{name} waits, ms: {', '.join(waits) or 'none'}; host {step.host_ms:.0f} ms{decides}"


def _subject(span: _plan.PredictedSpan, names: Sequence[str]) -> str:
    if span.unit >= 0:
        return names[span.unit]
    return f"batch {span.batch}" if span.batch >= 0 else ""


def _common(names: Sequence[str]) -> str:
    """Returns the path that the names of a unit's parameters have in common."""
    paths = [name.split(".") for name in names]
    shared = []
    for parts in zip(*(path[:-1] or path for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared) or names[0]
