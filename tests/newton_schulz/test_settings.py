"""Newton-Schulz on a CPU changes no setting of the process."""

from __future__ import annotations

import threading

import pytest
import torch

import dmuon


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_other_threads_see_their_settings(dtype):
    ends = threading.Event()
    seen = set()

    def look() -> None:
        while not ends.is_set():
            seen.add(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction)

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(20):
        dmuon.orthogonalize(torch.randn(300, 300), ns_dtype=dtype)
    ends.set()
    thread.join()
    assert seen == {True}
