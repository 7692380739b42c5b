"""`dmuon doctor` (doctor_cases.py), in a process of its own: it forks, which autograd forbids after its first backward
on an accelerator, and other tests have had one.
"""

import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).parent / "doctor_cases.py"
RUN_S = 1800  # for hangs


def test_doctor_finds_what_is_there_and_what_is_broken():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
