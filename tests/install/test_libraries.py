"""What the extension module asks of the machine: one wheel serves a PyTorch with CUDA and one without."""

import subprocess
from pathlib import Path

from dmuon import _C

EXTENSION = Path(_C.__file__)


def test_it_names_nothing_that_only_a_pytorch_with_cuda_has():
    done = subprocess.run(["nm", "-D", "--undefined-only", str(EXTENSION)], capture_output=True, text=True, check=True)
    names = done.stdout.split()
    assert any("3c10" in name for name in names)
    assert [name for name in names if "3c104cuda" in name or name.startswith(("cuda", "cu", "cublas"))] == []


def test_it_links_no_library_of_cuda():
    done = subprocess.run(["readelf", "-d", str(EXTENSION)], capture_output=True, text=True, check=True)
    needed = [line.split("[")[1].rstrip("]") for line in done.stdout.splitlines() if "(NEEDED)" in line]
    assert "libtorch_cpu.so" in needed
    assert [name for name in needed if "cuda" in name or name.startswith(("libcu", "libnv"))] == []
