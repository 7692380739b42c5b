"""Lets torchtitan 0.3 run on CPUs and with PyTorch 2.13. Import it before torchtitan. Also a module of configs.

torchtitan asks for an accelerator, for triton, for FlexAttention's backward, which CPUs lack, and for a function that
PyTorch 2.13 calls otherwise. None of this concerns the optimizer. torch.compile is off.
"""

import sys
import types
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch._utils
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_mask


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_mask: Any, **options: Any) -> Any:
    """FlexAttention without a kernel: [batch, heads, length, head_dim], and no other results."""
    mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device=q.device)
    of_torch = {name: options[name] for name in ("scale", "enable_gqa")}
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, **of_torch), None


_set_divide_factor = FSDPModule.set_gradient_divide_factor


def _divide_factor_for_gloo(module: FSDPModule, factor: float) -> None:
    _set_divide_factor(module, factor)
    module.set_force_sum_reduction_for_comms(True)


torch._dynamo.config.disable = True
FSDPModule.set_gradient_divide_factor = _divide_factor_for_gloo  # type: ignore[method-assign]
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = mock.MagicMock()  # needs triton
torch._utils._get_available_device_type = lambda: "cpu"
_of_a_device = {
    "current_device": lambda: 0,
    "empty_cache": lambda: None,
    "get_device_name": lambda _: "CPU",
    "get_device_properties": lambda _: types.SimpleNamespace(total_memory=2**34),
    "memory_stats": lambda _: {},
    "reset_peak_memory_stats": lambda: None,
}
for _name, _function in _of_a_device.items():
    setattr(torch.cpu, _name, _function)

import torchtitan_muon  # noqa: E402  (the example; it imports torchtitan)
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.train import main as train  # noqa: E402, F401
from torchtitan.trainer import Trainer  # noqa: E402

FlexAttention._compiled_flex_attn = _attend


def two_layers() -> Trainer.Config:
    """The example's config of the debug model, with two of its layers."""
    config = torchtitan_muon.llama3_debugmodel()
    del config.model_spec.model.layers[2:]
    return config
