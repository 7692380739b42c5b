"""The way out that an error of a placeholder names, by the library that calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from dmuon._setup.ways_out import of_caller

VECTORS = "torch.nn.utils.convert_parameters"
DDP = "torch.nn.parallel.distributed"
WORDS = {VECTORS: "vector_to_parameters", DDP: "DistributedDataParallel"}


def called_by(module: str, function: Callable[[], str]) -> Callable[[], str]:
    """Returns a function of that module which calls `function`."""
    names = {"__name__": module, "function": function}
    exec("def call():\n    return function()", names)
    return names["call"]


@pytest.mark.parametrize(("outer", "inner"), [(VECTORS, DDP), (DDP, VECTORS)])
def test_the_innermost_library_that_is_known_decides(outer, inner):
    assert of_caller() == ""
    assert WORDS[inner] in called_by("torch.nn", called_by(inner, of_caller))()
    both = called_by(outer, called_by("mine", called_by(inner, called_by("torch", of_caller))))()
    assert WORDS[inner] in both and WORDS[outer] not in both


def test_a_function_of_a_library_is_known_by_its_name():
    names = {"__name__": "torch.nn.utils.clip_grad", "function": of_caller}
    exec("def clip_grad_value_():\n    return function()\ndef another():\n    return function()", names)
    assert "torch.nn.utils.clip_grad_value_" in names["clip_grad_value_"]() and names["another"]() == ""
