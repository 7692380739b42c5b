"""Refuses a PyTorch that the engine was not compiled for, before loading it ends in an undefined symbol."""

from importlib import metadata

import torch


def _require_series() -> None:
    """Compares the running PyTorch with the series, as 2.13, that the build wrote into dmuon's requirements."""
    try:
        requirements = metadata.requires("dmuon") or []
    except metadata.PackageNotFoundError:  # used from a folder, without having been installed
        return
    series = [text[len("torch==") : -len(".*")] for text in requirements if text.startswith("torch==")]
    running = str(torch.__version__)
    if series and running.split(".")[:2] != series[0].split("."):
        raise ImportError(
            f"dmuon was built for PyTorch {series[0]} and this environment has {running}: "
            f"install 'torch=={series[0]}.*', or build dmuon for this PyTorch by `pip install .` in dmuon's sources"
        )


_require_series()
