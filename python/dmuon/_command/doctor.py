"""The answer of `dmuon doctor`. Starts processes that import PyTorch; this one does not."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from dmuon._doctor.examine import as_json, examine


def doctor(arguments: argparse.Namespace, write: Callable[[str], None]) -> int:
    """Examines this machine, and writes section by section. Returns the exit status: 1 if a self-test failed."""
    file = arguments.json
    try:
        if file is not None:
            Path(file).write_text("")  # before minutes of work
        sections = examine(write)
        if file is not None:
            Path(file).write_text(as_json(sections))
    except BrokenPipeError:
        raise
    except OSError as error:
        if file is None or error.filename != file:
            raise
        raise ValueError(f"--json: cannot write {file!r}: {error.strerror}") from error
    return int(any(section.failures for section in sections))
