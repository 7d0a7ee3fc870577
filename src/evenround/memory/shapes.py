"""Operations on tensors that have a shape and no values, fast.

Tensors on the meta device say which shape, layout and aliasing an operation's result has; PyTorch computes that in Python, at 0.1 ms an
operation. A plan runs the same few hundred operations on the same shapes many thousand times, so each is asked once and remembered: the
answer depends on nothing but the layouts of its arguments.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

HOST, META = torch.device("cpu"), torch.device("meta")
_CHOICE = torch.ops.aten._fused_sdp_choice.default

_LAYER_NORM = torch.ops.aten.native_layer_norm.default

_New = tuple[torch.Size, tuple[int, ...], torch.dtype]
_View = tuple[int, torch.Size, tuple[int, ...], int]
_remembered: dict[Hashable, list[Any] | None] = {}
"""(operation, layouts of its arguments) → what its results are; None: of a kind that is not remembered. A memo, never wrong when kept."""


def run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], like_cpu: bool) -> Any:
    """`func` on tensors without values (real ones count as such): new tensors on the meta device, views of arguments, or arguments.

    like_cpu: results that a CPU's kernel has in another dtype than an accelerator's are as the CPU has them.
    """
    if func is _CHOICE:  # by the CPU's rules: of tensors whose memory nobody touches
        return func(*_like(args, HOST), **_like(kwargs, HOST))
    args, kwargs = _like(args, META), _like(kwargs, META)
    given = tensors_in((args, kwargs))
    if "device" in kwargs or (not given and any(argument.name == "device" for argument in func._schema.arguments)):
        kwargs["device"] = META
    if func.namespace != "aten":  # their arguments may be anything
        return func(*args, **kwargs)
    layouts = _layout(given)
    key = (func, _layout(args), _layout(kwargs), like_cpu)
    if key not in _remembered:
        result = func(*args, **kwargs)
        if like_cpu and func is _LAYER_NORM:  # the CPU keeps mean and deviation in the dtype of input and weight, if these are of one
            same = args[2] is None or args[2].dtype == args[0].dtype
            result = (result[0], *(value.to(args[0].dtype) if same else value for value in result[1:]))
        # What changes the layout of an argument itself (`t_`, `resize_`, a growing `out=`) has to happen each time.
        _remembered[key] = _recipe(result, given) if _layout(given) == layouts else None
        return result
    recipe = _remembered[key]
    if recipe is None:
        return func(*args, **kwargs)
    made = [_make(item, given) for item in recipe]
    return made[0] if len(func._schema.returns) == 1 and func._schema.returns[0].type.kind() != "ListType" else made


def _make(item: Any, given: list[Tensor]) -> Any:
    kind, value = item
    if kind == "new":
        size, stride, dtype = value
        return torch.empty_strided(size, stride, dtype=dtype, device=META)
    if kind == "view":
        index, size, stride, offset = value
        return torch.as_strided(given[index], size, stride, offset)
    return given[value] if kind == "argument" else value


def _recipe(result: Any, given: list[Tensor]) -> list[Any] | None:
    results = list(result) if isinstance(result, list | tuple) else [result]
    by_storage = {tensor.untyped_storage()._cdata: index for index, tensor in enumerate(given)}
    recipe: list[Any] = []
    for made in results:
        same = next((index for index, tensor in enumerate(given) if tensor is made), None)
        if not isinstance(made, Tensor):
            recipe.append(("value", made))
        elif same is not None:
            recipe.append(("argument", same))
        elif (index := by_storage.get(made.untyped_storage()._cdata)) is not None:
            if made.dtype != given[index].dtype:
                return None
            recipe.append(("view", (index, made.size(), made.stride(), made.storage_offset())))
        elif made.storage_offset() or made.untyped_storage().nbytes() != _span(made):
            return None  # a part of something larger that only it keeps alive
        else:
            recipe.append(("new", (made.size(), made.stride(), made.dtype)))
    storages = [made.untyped_storage()._cdata for made in results if isinstance(made, Tensor)]
    return recipe if len(set(storages) - set(by_storage)) == sum(kind == "new" for kind, _ in recipe) else None


def _span(tensor: Tensor) -> int:
    """Bytes that a storage of its own needs for a tensor of this layout."""
    if tensor.numel() == 0:
        return 0
    return (1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))) * tensor.dtype.itemsize


def _layout(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return (value.dtype, value.size(), value.stride(), value.storage_offset())
    if isinstance(value, list | tuple):
        return tuple([_layout(item) for item in value])
    if isinstance(value, dict):
        return tuple([(name, _layout(item)) for name, item in value.items()])
    return (type(value), value)


def _like(value: Any, device: torch.device) -> Any:
    """Tensors of the same layout on `device`, where they are not there."""
    if isinstance(value, Tensor):
        if value.device.type == device.type:
            return value
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    if isinstance(value, dict):
        return {name: _like(item, device) for name, item in value.items()}
    return type(value)([_like(item, device) for item in value]) if type(value) in (list, tuple) else value


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors in nested lists, tuples and mappings, in order."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_in(item)]
