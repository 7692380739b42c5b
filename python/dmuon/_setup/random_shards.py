"""DTensors between the calls of a model that was built on the meta device: drawn as one process would."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

_aten = torch.ops.aten
_IN_PLACE = (_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float)
_LIKE = (_aten.rand_like.default, _aten.randn_like.default)

_num_open = 0
_before: dict[Any, Any] = {}  # what stood in the place of ours


def open_draws() -> None:
    """From now on random numbers of every DTensor of this process are the whole tensor's, of which ranks keep shards.

    PyTorch itself draws each shard by itself: on CPUs from states that then differ between ranks, elsewhere other
    numbers than one process. And what is decided by values (nn.init.trunc_normal_ draws again what lies outside) counts
    the values of all ranks, where PyTorch looks at this rank's. Ends with as many calls of `close_draws`.
    """
    global _num_open
    handlers = dispatch_handlers()
    if _num_open == 0:
        for func, ours in _ours().items():
            _before[func] = handlers.get(func)
            handlers[func] = ours
    _num_open += 1


def close_draws() -> None:
    """Ends what one `open_draws` began."""
    global _num_open
    _num_open -= 1
    if _num_open == 0:
        handlers = dispatch_handlers()
        for func, before in _before.items():
            if before is None:
                handlers.pop(func, None)
            else:
                handlers[func] = before
        _before.clear()


def dispatch_handlers() -> dict[Any, Any]:
    """PyTorch's own, of what DTensors dispatch.

    Raises:
        ValueError: this PyTorch dispatches them in another way.
    """
    found = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    if not isinstance(found, dict):
        raise ValueError(
            f"dedicate_params: model: on the meta device, which dmuon does not know to initialise under PyTorch "
            f"{torch.__version__}. Expected: a model with values."
        )
    return found


def _ours() -> dict[Any, Any]:
    return {**dict.fromkeys((*_IN_PLACE, *_LIKE), _draw), _aten._local_scalar_dense.default: _scalar}


def _draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if tensor.is_meta or not all(isinstance(placement, Shard | Replicate) for placement in tensor.placements):
        return _as_before(func, args, kwargs)
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    drawn = func(whole, *args[1:], **kwargs)
    # src_data_rank=None: every rank cuts its shard from its own values, without communication.
    made = distribute_tensor(drawn, tensor.device_mesh, tensor.placements, src_data_rank=None)
    if func in _LIKE:
        return made
    tensor.to_local().copy_(made.to_local())
    return tensor


def _scalar(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if not any(isinstance(placement, Partial) for placement in tensor.placements):
        return _as_before(func, args, kwargs)
    # Not in its own dtype: gloo does not reduce truth values.
    part = DTensor.from_local(tensor.to_local().double(), tensor.device_mesh, tensor.placements, run_check=False)
    return part.full_tensor().to(tensor.dtype).item()


def _as_before(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handlers = dispatch_handlers()
    ours = handlers.pop(func)
    try:
        if _before[func] is not None:
            return _before[func](func, args, kwargs)
        return func(*args, **kwargs)
    finally:
        handlers[func] = ours
