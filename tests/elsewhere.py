"""A second device for tests on a CPU: it computes, and refuses to be mixed with the CPU.

    with Elsewhere():
        model.to(DEVICE)  # real numbers, on device "meta"

Like CUDA it takes CPU tensors where it takes numbers (no dimension) and indices, and gives no numpy
arrays. Kernels are the CPU's, attention is written out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only

DEVICE = torch.device("meta")
_ATEN = torch.ops.aten
_COPIES = {_ATEN.copy_.default, _ATEN._to_copy.default}
_INDEXING = {_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default,
             _ATEN._index_put_impl_.default}  # fmt: skip
_MATH = 0
"""`SDPBackend.MATH` as an int."""


class _Away(torch.Tensor):
    """A tensor on that device; its numbers are in `here`."""

    here: torch.Tensor

    @staticmethod
    def __new__(cls, here: torch.Tensor) -> _Away:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            here.size(),
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=DEVICE,
            requires_grad=here.requires_grad,
        )

    def __init__(self, here: torch.Tensor) -> None:
        self.here = here.detach()

    def __repr__(self) -> str:
        return f"_Away({self.here!r})"

    def __getitem__(self, index: Any) -> Any:
        # torch would turn a list into a tensor of this device by itself, without its numbers.
        each = index if isinstance(index, tuple) else (index,)
        return super().__getitem__(
            tuple(torch.as_tensor(one) if isinstance(one, list) else one for one in each)
        )

    def tolist(self) -> Any:
        return self.here.tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a tensor elsewhere is not pickled: take it to the CPU first")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Elsewhere(TorchDispatchMode):
    """Within it tensors can be made on `DEVICE`."""

    def __enter__(self) -> Elsewhere:
        # torch.tensor(..., device="meta") would never have numbers: made on the CPU, then moved.
        self._tensor = torch.tensor
        torch.tensor = lambda *args, device=None, **how: self._tensor(*args, **how).to(device)
        # A module that is moved gets new parameters: the old ones are of another class.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.tensor = self._tensor
        torch.__future__.set_overwrite_module_params_on_conversion(False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    flat, _ = tree_flatten((args, kwargs))
    away = [x for x in flat if isinstance(x, _Away)]
    wanted = kwargs.get("device")
    there = bool(away) if wanted is None else torch.device(wanted) == DEVICE
    if not away and not there:
        return func(*args, **kwargs)
    if away and func not in _COPIES:
        looked_at = args[:1] if func in _INDEXING else flat
        for x in looked_at:
            if isinstance(x, torch.Tensor) and not isinstance(x, _Away) and x.dim():
                raise RuntimeError(f"{func}: expected all tensors on one device, found two")
    if func is _ATEN._fused_sdp_choice.default:
        return _MATH
    here, how = tree_map_only(_Away, lambda x: x.here, (args, kwargs))
    out = func(*here, **({**how, "device": torch.device("cpu")} if wanted is not None else how))
    if func is _ATEN.copy_.default:
        return args[0]
    if not there:
        return out
    out = tree_map_only(torch.Tensor, _Away, out)
    return return_and_correct_aliasing(func, args, kwargs, out) if away else out
