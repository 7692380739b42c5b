"""The arguments of `dmuon`, and the errors of bad ones."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import re
from collections.abc import Callable
from typing import NoReturn

from dmuon import _plan
from dmuon._planning.owner_plan import DEFAULT_DEVICE
from dmuon._setup.strategies import strategies

_MOST = 1 << 20  # ranks, and all other counts
_MOST_BYTES = 2**63 - 1
_DEFAULTS = _plan.PlanOptions()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raises instead of printing the usage: one line says what is wrong."""
        raise ValueError(message.removeprefix("argument "))


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command `dmuon`. It raises ValueError for bad arguments."""
    top = _Parser(
        prog="dmuon",
        description="Owner plans of dmuon, the distributed Muon: who orthogonalises which matrix.",
        epilog="Example: dmuon plan --model qwen2.5-7b --mesh 2x8 --device a800-sxm4-80gb",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=_plan.__version__)
    commands = top.add_subparsers(
        dest="command", required=True, metavar="plan, compare, simulate, models, tune or doctor"
    )

    def add(name: str, text: str, example: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, epilog=example, allow_abbrev=False)

    _add_plan(
        add(
            "plan",
            "Plans a model on a mesh and shows every owner.",
            "Example: dmuon plan --model pi0 --mesh 16x8 --save plan.json --plot plan.svg",
        )
    )

    _add_compare(
        add(
            "compare",
            "Shows strategies side by side; or two saved plans.",
            "Examples: dmuon compare --model pi0 --mesh 16x8; dmuon compare a.json b.json",
        )
    )
    _add_simulate(
        add(
            "simulate",
            "Predicts a training step of AdamW, dmuon and Muon-AG on GPUs that need not be there.",
            "Example: dmuon simulate --model qwen2.5-7b --mesh 4x8 --device a800-sxm4-80gb --plot step.svg",
        )
    )

    models = add("models", "Lists the models and devices that dmuon knows.", "Example: dmuon models")
    models.add_argument("--json", action="store_true", help="print the list as JSON")
    _add_tune(
        add(
            "tune",
            "Times the forms of Newton-Schulz here and keeps the fastest of each shape, which Muon then takes.",
            "Example: dmuon tune --shapes 256x256,64*32x32 --threads 1 --budget 5",
        )
    )
    doctor = add(
        "doctor",
        "Shows what is on this machine, tests dmuon on it, also with two ranks, and says what would help.",
        "Example: dmuon doctor --json doctor.json",
    )
    doctor.add_argument("--json", metavar="FILE", help="file for the same as JSON")
    return top


_STRATEGY_HELP = f"{', '.join(strategies())} (milp needs SciPy, and up to a minute)"


def given_beside(arguments: argparse.Namespace, command: list[str]) -> list[str]:
    """Returns the options of a command line that differ from those of `command`, as a user writes them."""
    without = vars(parser().parse_args(command))
    return [f"--{name.replace('_', '-')}" for name, value in vars(arguments).items() if value != without[name]]


def require_alone(arguments: argparse.Namespace, option: str) -> None:
    """Raises ValueError if more than --json stands beside an option that has an answer of its own."""
    if given := {*given_beside(arguments, [arguments.command, option])} - {"--json"}:
        expected = f"{arguments.command}: {option}: expected at most --json beside it"
        raise ValueError(f"{expected}; got {', '.join(sorted(given))}")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_task(parser, mesh_required=True)
    add = parser.add_argument
    add("--strategy", type=_one_of(strategies()), default=strategies()[0], help=_STRATEGY_HELP)
    words = "of a node's network in each direction, such as 1Gbit or 3.2Tbit a second: shows the time of its messages"
    add("--inter-bandwidth", type=_bandwidth, metavar="RATE", help=words)
    add("--save", metavar="FILE", help="file for the plan (dedicate_params(..., plan=file))")
    add("--json", action="store_true", help="print the plan as JSON")
    add("--plot", metavar="FILE", help="file for a picture, such as plan.svg or plan.png")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plans", nargs="*", metavar="PLAN", help="two files of plans, instead of a model")
    _add_task(parser, mesh_required=False)
    words = f"may be given several times; {_STRATEGY_HELP} [all but milp]"
    parser.add_argument("--strategy", type=_one_of(strategies()), action="append", help=words)
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    _add_task(parser, mesh_required=False)
    networks, add = _plan.network_names(), parser.add_argument
    add("--paper", action="store_true", help="instead: the paper's table beside a model of its authors' engine")
    add("--meshes", type=_meshes, metavar="LIST", help="instead of --mesh: several, such as 1x8,2x8,4x8")
    add("--network", type=_one_of(networks), help=f"between nodes: {', '.join(networks)} [the device's]")
    words = "of a node's network in each direction, such as 1Gbit or 3.2Tbit a second, instead of the network's"
    add("--inter-bandwidth", type=_bandwidth, metavar="RATE", help=words)
    add("--tokens", type=_whole(1), metavar="N", help="of each device and step [a sequence of the model, or 4096]")
    add("--strategy", type=_one_of(strategies()), default=strategies()[0], help=_STRATEGY_HELP)
    add("--in-step", action="store_true", help="step() waits for its updates (late_updates=False)")
    add("--plot", metavar="FILE", help="file for a picture of the step, such as step.svg; of --meshes, of all steps")
    add("--trace", metavar="FILE", help="file for a trace for https://ui.perfetto.dev")
    add("--json", action="store_true", help="print the figures as JSON")


def _add_tune(parser: argparse.ArgumentParser) -> None:
    models, add = _plan.model_names(), parser.add_argument
    add("--shapes", type=_shapes, metavar="LIST", help="of matrices: rows x columns, such as 1024x4096,64*128x512")
    add("--inventory", metavar="FILE", help="instead: a JSON file, as dmuon.inventory(model) returns it")
    add("--model", type=_one_of(models), help=f"instead, one of: {', '.join(models)}")
    add("--dtype", type=_one_of(["bf16", "fp16", "fp32"]), help="ns_dtype of Muon: bf16, fp16 or fp32 [its default]")
    add("--steps", type=_whole(1, 99), metavar="N", default=_plan.NS_STEPS, help="ns_steps of Muon [%(default)s]")
    names = ["polar_express", "quintic", "you", "cans", "deepseekv4", "cubic5"]
    words = f"ns_coefficients of Muon: {', '.join(names)} [%(default)s]"
    add("--coefficients", type=_one_of(names), metavar="NAME", default=names[0], help=words)
    add("--threads", type=_whole(1, 1024), metavar="N", help="of a rank in training, on CPUs [PyTorch's default]")
    add("--budget", type=_seconds, metavar="S", default=60.0, help="seconds, for all shapes together [%(default)g]")
    add("--show", action="store_true", help="instead: list what is kept")
    add("--json", action="store_true", help="print the table as JSON")


def _add_task(parser: argparse.ArgumentParser, mesh_required: bool) -> None:
    models, devices = _plan.model_names(), _plan.device_names()
    add = parser.add_argument
    add("--model", type=_one_of(models), help=f"one of: {', '.join(models)}")
    add("--inventory", metavar="FILE", help="instead: a JSON file, as dmuon.inventory(model) returns it")
    add("--mesh", type=_mesh, required=mesh_required, help="nodes x GPUs a node, such as 2x8; or GPUs of one node")
    words = "GPUs of a node that every matrix is sharded over [%(default)s]"
    add("--tp", type=_whole(1), metavar="N", default=1, help=words)
    add("--device", type=_one_of(devices), help=f"of training: {', '.join(devices)} [{DEFAULT_DEVICE}]")
    add("--costs", metavar="FILE", help="a JSON file of measured costs, instead of the device's cost model")
    words = "units that travel at the same time [%(default)s]"
    add("--lookahead", type=_whole(0), metavar="N", default=_DEFAULTS.lookahead, help=words)
    words = "share of the makespan given up for a better spread over columns [%(default)g]"
    add("--layout-slack", type=_share, metavar="SHARE", default=_DEFAULTS.layout_slack, help=words)
    words = "bytes of matrices, their state and buffers that no rank may exceed, such as 80GB or 1.5GiB"
    add("--max-memory", type=_size, metavar="SIZE", default=_DEFAULTS.max_memory_bytes, help=words)
    rules = _plan.rule_names()
    words = f"rule of update, whose state takes memory: {', '.join(rules)} [%(default)s]"
    add("--rule", type=_one_of(rules), metavar="RULE", default=rules[0], help=words)
    add("--no-node-copy", action="store_true", help="columns do not keep what came from other nodes")
    add("--replicated", action="store_true", help="all weights stay on every GPU between steps, as under DDP")


def _one_of(known: list[str]) -> Callable[[str], str]:
    """Reads one of the names, in upper or lower case. An error suggests the nearest names."""
    by_lower = {name.lower(): name for name in known}

    def read(text: str) -> str:
        lower = text.lower()
        if lower in by_lower:
            return by_lower[lower]
        near = [name for name in known if lower and lower in name.lower()]
        near = near or [by_lower[match] for match in difflib.get_close_matches(lower, by_lower)]
        question = f"; did you mean {' or '.join(near)}?" if near else ""
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(known)}; got {text!r}{question}")

    return read


def _mesh(text: str) -> tuple[int, int]:
    """Reads nodes and GPUs a node."""
    match = re.fullmatch(r"(?:(\d{1,9})x)?(\d{1,9})", text, re.ASCII)
    nodes, gpus = (int(match[1] or 1), int(match[2])) if match else (0, 0)
    if nodes < 1 or gpus < 1:
        raise argparse.ArgumentTypeError(f"expected nodes x GPUs a node such as 2x8, or 8; got {text!r}")
    return nodes, gpus


def _meshes(text: str) -> list[tuple[int, int]]:
    return [_mesh(one) for one in text.split(",")]


def _whole(least: int, most: int = _MOST) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}; got {text!r}")
        return int(text)

    return read


def _shapes(text: str) -> list[tuple[int, int, int]]:
    """Reads number, rows and columns of each shape."""
    found = [
        re.fullmatch(r"(?:([1-9]\d{0,6})\*)?([1-9]\d{0,6})x([1-9]\d{0,6})", one, re.ASCII) for one in text.split(",")
    ]
    if not all(found):
        raise argparse.ArgumentTypeError(f"expected shapes such as 1024x4096,64*128x512; got {text!r}")
    return [(int(one[1] or 1), int(one[2]), int(one[3])) for one in found if one]


def _number(expected: str, is_good: Callable[[float], bool]) -> Callable[[str], float]:
    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if is_good(value := float(text)):
                return value
        raise argparse.ArgumentTypeError(f"expected {expected}; got {text!r}")

    return read


_seconds = _number("seconds, more than 0 and at most 86400", lambda value: 0 < value <= 86_400)
_share = _number("a number from 0 to 1", lambda value: 0 <= value <= 1)


def _bandwidth(text: str) -> float:
    """Reads bits a second from 1Gbit or 200mbit, as tools for networks write them. Returns bytes a second."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([kmgt])bit(?:/s)?", text.strip().lower(), re.ASCII)
    value = float(match[1]) * 1000 ** ("kmgt".index(match[2]) + 1) / 8 if match else 0.0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"expected bits a second such as 200Mbit, 1Gbit or 3.2Tbit; got {text!r}")
    return value


def _size(text: str) -> int:
    """Reads bytes from 80, 80GB (decimal), 80GiB (binary) or 1.5g. 0 means no limit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", text.strip().lower(), re.ASCII)
    power = "kmgt".index(match[2]) + 1 if match and match[2] else 0
    value = float(match[1]) * (1024 if match[3] else 1000) ** power if match else -1.0
    if not 0 <= value <= _MOST_BYTES:
        raise argparse.ArgumentTypeError(f"expected bytes such as 80GB, 80GiB or 85899345920; got {text!r}")
    return round(value)
