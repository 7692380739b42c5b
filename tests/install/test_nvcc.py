"""Where a build of dmuon gets nvcc from, and what of its output fails the build."""

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

CMAKE = Path(__file__).parents[2] / "cmake"


def _load(name: str):
    spec = importlib.util.spec_from_file_location(name, CMAKE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pytorch(monkeypatch):
    monkeypatch.delenv("DMUON_CUDA", raising=False)
    return _load("pytorch")


@pytest.mark.parametrize(("cuda", "asks"), [("None", False), ("'13.0'", True)])
def test_nvcc_is_required_where_pytorch_has_cuda(pytorch, monkeypatch, tmp_path, cuda, asks):
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\ndebug = False\ncuda: Optional[str] = {cuda}\n")
    monkeypatch.setattr(pytorch, "find", lambda: ("2.13.0", tmp_path))
    required = pytorch.Provider().get_requires_for_dynamic_metadata({})
    assert set(pytorch.CUDA_PACKAGES) <= set(required) if asks else not set(pytorch.CUDA_PACKAGES) & set(required)


def test_nvcc_is_required_on_request(pytorch, monkeypatch, tmp_path):
    (tmp_path / "version.py").write_text("cuda: Optional[str] = None\n")
    monkeypatch.setattr(pytorch, "find", lambda: ("2.13.0", tmp_path))
    monkeypatch.setenv("DMUON_CUDA", "1")
    assert set(pytorch.CUDA_PACKAGES) <= set(pytorch.Provider().get_requires_for_dynamic_metadata({}))


def test_nvcc_is_the_one_that_is_named_then_that_of_a_package_then_that_on_path(monkeypatch, tmp_path):
    nvcc = _load("nvcc")
    for folder in ("named", "path", "site/nvidia/cu13/bin"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "nvcc").touch(0o755)
    package = importlib.util.spec_from_loader("nvidia", None, is_package=True)
    package.submodule_search_locations = [os.fspath(tmp_path / "site/nvidia")]
    monkeypatch.setenv("PATH", os.fspath(tmp_path / "path"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: package)
    monkeypatch.setenv("NVCC", os.fspath(tmp_path / "named/nvcc"))
    assert nvcc.find() == os.fspath(tmp_path / "named/nvcc")
    monkeypatch.delenv("NVCC")
    assert nvcc.find() == os.fspath(tmp_path / "site/nvidia/cu13/bin/nvcc")
    ptxas = tmp_path / "site/nvidia/cuda_nvcc/bin/ptxas"
    assert nvcc.find_older_ptxas(nvcc.find()) == ""
    ptxas.parent.mkdir(parents=True)
    ptxas.touch(0o755)
    assert nvcc.find_older_ptxas(nvcc.find()) == os.fspath(ptxas)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert nvcc.find() == os.fspath(tmp_path / "path/nvcc")
    assert nvcc.find_older_ptxas(nvcc.find()) == ""
    monkeypatch.setenv("NVCC", "none")
    assert nvcc.find() == nvcc.find_older_ptxas("") == ""
    assert nvcc.find_older_ptxas("/bin/nvcc") == ""


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("exit 0", 0),
        ("exit 3", 1),
        ("echo 'ptxas info : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized'", 1),
        ("echo 'ptxas info : 48 registers'", 0),
    ],
)
def test_slow_code_fails_the_build(command, status):
    assert subprocess.run([CMAKE / "strict_nvcc", "sh", "-c", command], capture_output=True).returncode == status
