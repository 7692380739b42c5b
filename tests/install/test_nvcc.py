"""Where a build of dmuon gets nvcc from, and what of its output fails the build."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
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
    monkeypatch.delenv("NVCC", raising=False)
    return _load("pytorch")


@pytest.mark.parametrize(
    ("version", "cuda", "asks"),
    [
        ("2.13.0", "None", False),
        ("2.13.0", "'13.0'", True),
        ("2.11.0+cu130", "'13.0'", True),
        ("2.9.1+cu128", "'12.8'", False),
    ],
)
def test_nvcc_is_required_where_pytorch_has_cuda(pytorch, monkeypatch, tmp_path, version, cuda, asks):
    (tmp_path / "version.py").write_text(f"__version__ = '{version}'\ndebug = False\ncuda: Optional[str] = {cuda}\n")
    monkeypatch.setattr(pytorch, "find", lambda: (version, tmp_path))
    required = pytorch.Provider().get_requires_for_dynamic_metadata({})
    assert set(pytorch.CUDA_PACKAGES) <= set(required) if asks else not set(pytorch.CUDA_PACKAGES) & set(required)


def test_nvcc_is_required_on_request(pytorch, monkeypatch, tmp_path):
    (tmp_path / "version.py").write_text("cuda: Optional[str] = None\n")
    monkeypatch.setattr(pytorch, "find", lambda: ("2.13.0", tmp_path))
    monkeypatch.setenv("DMUON_CUDA", "1")
    assert set(pytorch.CUDA_PACKAGES) <= set(pytorch.Provider().get_requires_for_dynamic_metadata({}))


@pytest.mark.parametrize("named", ["none", "/opt/cuda/bin/nvcc"])
def test_nvcc_is_not_required_where_one_is_named(pytorch, monkeypatch, tmp_path, named):
    (tmp_path / "version.py").write_text("cuda: Optional[str] = '13.0'\n")
    monkeypatch.setattr(pytorch, "find", lambda: ("2.13.0", tmp_path))
    monkeypatch.setenv("DMUON_CUDA", "1")
    monkeypatch.setenv("NVCC", named)
    assert not set(pytorch.CUDA_PACKAGES) & set(pytorch.Provider().get_requires_for_dynamic_metadata({}))


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


# Writes the file after -o, or that of --create.
TOOL = """#!/bin/sh
echo "$0 $*" >>{log}
for word; do
  case $word in --create=*) echo made >"${{word#--create=}}" ;; esac
  [ "$last" != -o ] || echo .version 9.0 >"$word"
  last=$word
done
"""


@pytest.fixture
def configure(tmp_path):
    """Runs cuda_kernels.cmake with tools like PyPI's; returns what it set, and the tools' commands."""
    tools = {
        name: tmp_path / "nvidia" / folder
        for name, folder in (
            ("nvcc", "cu13/bin/nvcc"),
            ("fatbinary", "cu13/bin/fatbinary"),
            ("ptxas", "cuda_nvcc/bin/ptxas"),
        )
    }
    programs, script, log = tmp_path / "bin", tmp_path / "probe.cmake", tmp_path / "log"
    programs.mkdir()
    for name in ("sh", "sed", "cat"):
        (programs / name).symlink_to(shutil.which(name))
    for tool in tools.values():
        tool.parent.mkdir(parents=True, exist_ok=True)
        tool.write_text(TOOL.format(log=log))
        tool.chmod(0o755)
    names = ("NVCC", "OLDER_PTXAS", "WHY_NO_KERNELS")
    show = "".join(f'message(STATUS "{name}=[${{DMUON_{name}}}]")\n' for name in names)
    script.write_text(f"cmake_minimum_required(VERSION 3.24)\ninclude({CMAKE}/cuda_kernels.cmake)\n{show}")

    def run(nvcc: str = str(tools["nvcc"])) -> tuple[dict[str, str], str]:
        log.write_text("")
        defined = {"PROJECT_SOURCE_DIR": CMAKE.parent, "CMAKE_CXX_COMPILER": "c++", "Python_EXECUTABLE": sys.executable}
        command = [shutil.which("cmake"), *(f"-D{name}={value}" for name, value in defined.items()), "-P", script]
        environment = {**os.environ, "NVCC": nvcc, "PATH": str(programs)}
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return dict(re.findall(r"^-- (\w+)=\[(.*)\]$", done.stdout, re.MULTILINE)), log.read_text()

    return run, tools


needs_cmake = pytest.mark.skipif(not shutil.which("cmake"), reason="there is no cmake")


@needs_cmake
def test_the_whole_chain_is_tried(configure):
    run, tools = configure
    found, commands = run()
    assert found == {"NVCC": str(tools["nvcc"]), "OLDER_PTXAS": str(tools["ptxas"]), "WHY_NO_KERNELS": ""}
    assert "nvcc -c -ptx -arch=compute_80" in commands and "ptxas -O3 -arch=sm_80" in commands
    assert (
        "nvcc -c -cubin -gencode=arch=compute_120,code=sm_120" in commands and "image3=kind=elf,sm=80,file=" in commands
    )


@needs_cmake
def test_an_older_ptxas_that_refuses_the_ptx_is_not_used(configure):
    run, tools = configure
    tools["ptxas"].write_text("#!/bin/sh\necho \"Unsupported .version 8.7; current version is '8.4'\"; exit 255\n")
    found, commands = run()
    assert found == {"NVCC": str(tools["nvcc"]), "OLDER_PTXAS": "", "WHY_NO_KERNELS": ""}
    assert (
        "nvcc -c -cubin -gencode=arch=compute_80,code=sm_80" in commands and "image3=kind=elf,sm=120,file=" in commands
    )


@needs_cmake
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda tools: tools["nvcc"].write_text("#!/bin/sh\nexit 1\n"), "it must be of CUDA 12.8 or later"),
        (
            lambda tools: tools["nvcc"].write_text("#!/bin/sh\ncase $* in *120*) exit 1; esac\n"),
            "it must be of CUDA 12.8",
        ),
        (lambda tools: tools["fatbinary"].write_text("#!/bin/sh\nexit 1\n"), "nvcc did not work"),
        (lambda tools: tools["fatbinary"].unlink(), "nvcc was found without fatbinary"),
        (lambda tools: tools["nvcc"].unlink(), "nvcc was not found"),
    ],
)
def test_without_a_working_chain_there_are_no_kernels(configure, change, why):
    run, tools = configure
    change(tools)
    found, _ = run()
    assert found["NVCC"] == "" and why in found["WHY_NO_KERNELS"]
    assert ";" not in found["WHY_NO_KERNELS"]  # else a list of CMake's would cut the sentence in a definition


@needs_cmake
def test_none_is_no_nvcc(configure):
    run, _ = configure
    found, commands = run("none")
    assert found["NVCC"] == commands == "" and found["WHY_NO_KERNELS"] == "the build was given NVCC=none"


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
