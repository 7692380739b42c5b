"""Runs a program as `python PROGRAM ...` does, with Muon's iteration in fp32 wherever it names no dtype.

By default a CPU that multiplies bf16 iterates in it: too coarse to compare weights with another program's.
"""

import functools
import runpy
import sys

import torch

import dmuon

if __name__ == "__main__":
    dmuon.Muon = functools.partial(dmuon.Muon, ns_dtype=torch.float32)  # type: ignore[assignment,misc]
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
