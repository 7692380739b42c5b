"""Memory that malloc keeps goes back to the system once, at the end of set-up."""

from __future__ import annotations

import ctypes
import platform
import re
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from dmuon._running import start
from dmuon._setup.heap import give_back_heap

import dmuon


def resident_bytes() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has malloc_trim")
def test_freed_blocks_below_a_live_one_leave_the_process():
    libc, size, count = ctypes.CDLL(None), 100_000, 640  # larger blocks may have pages of their own
    libc.malloc.restype = ctypes.c_void_p
    blocks = [libc.malloc(ctypes.c_size_t(size)) for _ in range(count)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks[:-1]:
        libc.free(ctypes.c_void_p(block))
    before = resident_bytes()
    give_back_heap()
    assert before - resident_bytes() >= size * count // 2
    assert ctypes.string_at(blocks[-1], size) == bytes([1]) * size
    libc.free(ctypes.c_void_p(blocks[-1]))


def test_muon_gives_the_heap_back_once_the_owners_have_the_weights(monkeypatch):
    calls: list[list[str]] = []
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    monkeypatch.setattr(start, "give_back_heap", lambda: calls.append([type(p).__name__ for p in model.parameters()]))
    dmuon.dedicate_params(model, costs="modelled")
    assert calls == []
    dmuon.Muon(model)
    assert len(calls) == 1
    assert calls[0] != ["Parameter"]
    model(torch.ones(1, 8)).sum().backward()
    assert len(calls) == 1
