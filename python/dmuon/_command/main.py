"""The command `dmuon`: reads the arguments and prints the answer."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from dmuon._command.answers import compare, compare_plans, models, plan
from dmuon._command.arguments import given_beside, parser
from dmuon._command.doctor import doctor
from dmuon._command.simulate import simulate
from dmuon._command.tune import tune


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and prints its answer.

    Args:
        argv: the arguments, those of the process by default.

    Returns:
        The exit status: 0; 1 if a self-test of `doctor` failed; 2 after one line on stderr that says what is wrong.
    """
    try:
        arguments = _parsed(argv)
        if arguments is not None and arguments.command == "doctor":
            return doctor(arguments, _print)
        _print(_answer(arguments) if arguments is not None else "")
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        _discard_output()
    except (ValueError, ImportError, OSError) as error:
        message = " ".join(str(error).split()).removeprefix("dmuon: ")
        message = message.replace("max_memory_bytes", "--max-memory")  # the option that Python calls so
        print(f"dmuon: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace | None:
    try:
        return parser().parse_args(argv)
    except SystemExit:  # --help and --version have printed their answer
        return None


def _answer(arguments: argparse.Namespace) -> str:
    if arguments.command == "models":
        return models(arguments.json)
    if arguments.command == "plan":
        return plan(arguments)
    if arguments.command == "simulate":
        return simulate(arguments)
    if arguments.command == "tune":
        return tune(arguments)
    if arguments.plans:
        return compare_plans(_two_plans(arguments))
    if arguments.mesh is None:
        raise ValueError("compare: expected --mesh and a model, or two files of plans; got no --mesh")
    return compare(arguments)


def _two_plans(arguments: argparse.Namespace) -> list[str]:
    if given := given_beside(arguments, ["compare", *arguments.plans]):
        options = ", ".join(given)
        raise ValueError(
            f"compare: expected two files of plans alone, or a model with options; got files and {options}"
        )
    if len(arguments.plans) != 2:
        raise ValueError(f"compare: expected two files of plans, got {len(arguments.plans)}")
    return list(arguments.plans)


def _print(text: str) -> None:
    if sys.stdout is None:  # it was closed before the start
        raise OSError("cannot write to standard output: it is closed")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard_output()
        raise OSError(f"cannot write to standard output: {error.strerror}") from error


def _discard_output() -> None:
    """Discards the rest of the buffer, which Python would write again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
