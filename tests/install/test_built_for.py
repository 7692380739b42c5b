"""Importing dmuon beside a PyTorch that it was not built for. In processes of their own: imports happen once."""

import subprocess
import sys

import pytest
import torch


def import_with(torch_version: str) -> subprocess.CompletedProcess[str]:
    program = f"import torch; torch.__version__ = {torch_version!r}; import dmuon; print(dmuon.__version__)"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


@pytest.mark.parametrize("torch_version", ["1.0.0", "2.130.0", "3.1.0a0+git123"])
def test_another_torch_is_named_before_the_engine_is_loaded(torch_version: str) -> None:
    built_for = ".".join(torch.__version__.split(".")[:2])
    done = import_with(torch_version)
    assert done.returncode != 0
    message = done.stderr.splitlines()[-1]
    assert message.startswith(
        f"ImportError: dmuon was built for PyTorch {built_for} and this environment has {torch_version}:"
    )
    assert f"install 'torch=={built_for}.*'" in message


def test_another_patch_release_will_do() -> None:
    built_for = ".".join(torch.__version__.split(".")[:2])
    done = import_with(f"{built_for}.99+other")
    assert done.returncode == 0, done.stderr
