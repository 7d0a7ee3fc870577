"""N devices on a CPU, each with a hard capacity: real results, exact bytes.

What: inside `with SimulatedDevices([capacity, ...])` the devices `cpu:0`, `cpu:1`, ... exist. A tensor on one of them is a
`SimulatedTensor` around a plain CPU tensor: the CPU's own kernels compute, so results are the plain CPU's, bit for bit, autograd included,
while devices, capacities and errors are those of separate cards. The device `cpu` without a number is the host and is not counted.
Entered inside `FakeTensorMode`, nothing is computed or allocated and the bytes are the same: that is how a plan is made.

Why this way: a dispatch mode sees every operation below autograd, what autograd does included, and the life of a storage is the life of
its bytes: counted once however many views it has, freed the moment the last one is gone. Bytes are those asked for; what an allocator
rounds up, what a kernel takes for itself while it runs and what a context costs are a margin to add. A sum of gradients that meet at a
tensor used twice takes a new tensor for a moment, where autograd would add in place without a mode around it.

What we gave up: sparse tensors, `untyped_storage().resize_()`, a generator of random numbers for each device (all draw from the host's),
asynchronous copies. Over fake tensors a value that a program asks for (`.item()`, `bool()`) is 1, and `torch.equal` is true.
"""

import contextlib
import copy
import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from evenround.memory import shapes

Category = Literal["weights", "tuning state", "saved activations", "gradients", "chained inputs", "transfers", "other"]
"""What bytes are for."""

AMBIENT = ("saved activations", "other")
"""Categories that give way: copies from the host or another device are `transfers`, what else backward allocates is `gradients`."""

aten = torch.ops.aten
HOST = torch.device("cpu")
_SET_DATA: Callable[[Tensor, Tensor], None] = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_FROM_DATA = (torch.tensor, torch.as_tensor, Tensor.new_tensor)
_COPIES = (aten._to_copy.default, aten.copy_.default, aten.copy.default, aten._foreach_copy_.default)
_INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index, aten._unsafe_index_put)


class SimulatedTensor(torch.Tensor):
    """A tensor on a simulated device: everything but the values, which `_inner`, a plain or fake CPU tensor of the same layout, holds."""

    _inner: Tensor
    _home: "SimulatedDevices"

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device, home: "SimulatedDevices") -> "SimulatedTensor":
        made: SimulatedTensor = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype, device=device
        )
        made._inner, made._home = inner, home
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func}: a tensor on a simulated device is used outside of `with SimulatedDevices(...)`")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SimulatedTensor({self._inner!r}, device='{self.device}')"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = self.detach().clone()
            memo[id(self)] = torch.nn.Parameter(copied) if isinstance(self, torch.nn.Parameter) else copied
            memo[id(self)].requires_grad_(self.requires_grad).grad = copy.deepcopy(self.grad, memo)
        return memo[id(self)]

    def tolist(self) -> Any:
        """As for any tensor: the values."""
        return self.cpu().tolist()


@functools.cache
def _writes(func: OpOverload) -> tuple[tuple[tuple[int, str], ...], bool]:
    """Position and name of each argument that the operator writes, and whether it may change their shapes."""
    arguments = enumerate(func._schema.arguments)
    writes = [(position, argument) for position, argument in arguments if argument.alias_info is not None and argument.alias_info.is_write]
    reshapes = torch.Tag.inplace_view in func.tags or any(argument.kwarg_only for _, argument in writes)
    return tuple((position, argument.name) for position, argument in writes), reshapes


class _Device:
    """Capacity of one device and bytes on it."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name, self.capacity, self.peak = name, capacity, 0
        self.used: Counter[str] = Counter()
        self.at_peak: dict[str, int] = {}

    def take(self, count: int, category: str) -> None:
        before = self.used.total()
        if count > 0 and before + count > self.capacity:
            held = ", ".join(f"{name} {bytes_held}" for name, bytes_held in self.used.items() if bytes_held) or "nothing"
            raise torch.OutOfMemoryError(
                f"{self.name} is full: {count} bytes for {category} do not fit; of {self.capacity} bytes "
                f"{max(0, self.capacity - before)} are free and {before} in use ({held})"
            )
        self.used[category] += count
        if before + count > self.peak:
            self.mark_peak()

    def mark_peak(self) -> None:
        self.peak, self.at_peak = self.used.total(), {name: held for name, held in self.used.items() if held}


class _DataMode(TorchFunctionMode):
    """What no dispatch mode sees: `torch.tensor(..., device=)` and `tensor.data = other`, which keeps the object, hence its ties."""

    def __torch_function__(self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FROM_DATA and not isinstance((args or [kwargs.get("data")])[-1], Tensor):
            device = torch.device(kwargs.get("device") or (args[0].device if func == Tensor.new_tensor else HOST))
            made = func(*args, **{name: value for name, value in kwargs.items() if name != "requires_grad"} | {"device": HOST})
            return made.to(device).requires_grad_(kwargs.get("requires_grad", False))
        if func != _SET_DATA or not any(isinstance(tensor, SimulatedTensor) for tensor in args):
            return func(*args, **kwargs)
        tensor, other = args[0], args[1].detach()
        if isinstance(tensor, SimulatedTensor) and isinstance(other, SimulatedTensor):
            _SET_DATA(tensor, other)
            tensor._inner, tensor._home = other._inner, other._home
            return None
        grad, other = tensor.grad, torch.nn.Parameter(other) if isinstance(tensor, torch.nn.Parameter) else other
        torch.utils.swap_tensors(tensor, other.requires_grad_(tensor.requires_grad))  # type: ignore[no-untyped-call]
        tensor.grad = None if grad is None else grad.to(tensor.device)


class SimulatedDevices(TorchDispatchMode):
    """Context in which the devices `cpu:0` … `cpu:N-1` exist, device i with `capacities[i]` bytes. May be entered again and again.

    Inside, an allocation beyond the capacity raises `torch.OutOfMemoryError`, and tensors of different devices in one operation raise
    `RuntimeError`, as on CUDA: copies may mix them, and so may host tensors without dimensions and host tensors that are indices.
    """

    def __init__(self, capacities: Sequence[int], values: bool = True, like_cpu: bool = True) -> None:
        """`values` False: nothing is computed, all bytes are the same. `like_cpu` False: as where no CPU computes (see `shapes.run`)."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._values, self._like_cpu = values, like_cpu
        self._devices = [_Device(f"sim:{index}", capacity) for index, capacity in enumerate(capacities)]
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int, str, str | None]] = {}  # device, bytes, category, tag
        self._labels: list[Category] = []
        self.tag: str | None = None
        """Noted with every storage allocated from now on, for `held_by_tag`: a profile sets it to the module that runs."""
        self.tags: dict[str | None, None] = {}
        """Tags that something was allocated under, in the order of the first allocation."""
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> "SimulatedDevices":
        with contextlib.ExitStack() as stack:
            stack.callback(torch.__future__.set_swap_module_params_on_conversion, torch.__future__.get_swap_module_params_on_conversion())
            torch.__future__.set_swap_module_params_on_conversion(True)  # Module.to keeps the parameter objects, hence ties
            stack.enter_context(_DataMode())
            super().__enter__()  # type: ignore[no-untyped-call]
            self._entered.append(stack.pop_all())
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._entered.pop().close()

    @property
    def capacities(self) -> tuple[int, ...]:
        """Bytes that each device holds at most."""
        return tuple(device.capacity for device in self._devices)

    @property
    def used(self) -> tuple[int, ...]:
        """Bytes in use on each device."""
        return tuple(device.used.total() for device in self._devices)

    @property
    def peak(self) -> tuple[int, ...]:
        """Most bytes that were in use on each device, since the last `reset_peak`."""
        return tuple(device.peak for device in self._devices)

    def breakdown_at_peak(self, index: int) -> dict[str, int]:
        """Category → bytes in use on device `index` when it first reached its peak; they add up to the peak."""
        return dict(self._devices[index].at_peak)

    def held_by_tag(self, category: Category) -> dict[str | None, int]:
        """Bytes of `category` in use on all devices, by the tag that they were allocated under, in the order of allocation."""
        held: dict[str | None, int] = {}
        for _, _, count, of, tag in self._storages.values():
            if of == category:
                held[tag] = held.get(tag, 0) + count
        return held

    def reset_peak(self) -> None:
        """Peaks start anew from what is in use."""
        for device in self._devices:
            device.mark_peak()

    def set_capacity(self, index: int, capacity: int) -> None:
        """Device `index` holds `capacity` bytes from now on. What is in use stays, also beyond it; the next allocation there fails."""
        self._devices[index].capacity = capacity

    @contextlib.contextmanager
    def label(self, category: Category) -> Iterator[None]:
        """Storages allocated inside count as `category`; the innermost label decides, without one it is `other` (see `AMBIENT`)."""
        if category not in get_args(Category):
            raise ValueError(f"no category {category!r}; there are {', '.join(get_args(Category))}")
        self._labels.append(category)
        try:
            yield
        finally:
            self._labels.pop()

    def __torch_dispatch__(self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # function modes are for what programs call, not for what happens below autograd
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors, wanted = _tensors((*args, *kwargs.values())), kwargs.get("device")
        made_up = next((tensor for tensor in tensors if _is_made_up(_unwrap(tensor))), None)
        if made_up is not None and func in (aten._local_scalar_dense.default, aten.equal.default):
            return _made_up_value(func, made_up)
        device = wanted or next((tensor.device for tensor in tensors if _is_simulated(tensor.device)), HOST)
        if not _is_simulated(device) and made_up is None and (self._values or tensors):
            if not any(isinstance(tensor, SimulatedTensor) for tensor in tensors):
                return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        writes, reshapes = _writes(func)
        if reshapes and any(isinstance(arg, torch.UntypedStorage) for arg in args):
            raise NotImplementedError(f"{func}: a storage cannot be given to a tensor on a simulated device")
        written = _tensors(args[position] if position < len(args) else kwargs.get(name) for position, name in writes)
        self._check(func, args, tensors, written, device)
        crosses = func is aten._to_copy.default and tensors[0].device != device
        plain = self._run(func, args, kwargs)
        result = self._wrap(plain, device, {id(_unwrap(tensor)): tensor for tensor in tensors}, crosses)
        for tensor in written if reshapes else ():
            if isinstance(tensor, SimulatedTensor):  # its tensor has another shape now, or its storage another size
                if _is_simulated(device):
                    self._account(tensor._inner, device.index, False)
                with torch._C._DisableTorchDispatch():
                    _SET_DATA(tensor, SimulatedTensor(tensor._inner, tensor.device, self))
        return result

    def _run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operation on what is inside: values on the CPU, or shapes alone."""
        plain_args, plain_kwargs = _unwrap(args), {name: _unwrap(value) for name, value in kwargs.items()}
        named = plain_kwargs.get("device")
        if named is not None and named.type == "cpu":
            plain_kwargs["device"] = HOST
        if self._values:
            if func is aten._to_copy.default and type(plain_args[0]) is not FakeTensor:
                with torch._C._DisableTorchDispatch():  # FakeTensorMode keeps a weak reference, which would forbid to swap a parameter
                    plain_args = (plain_args[0].detach(),)
            return func(*plain_args, **plain_kwargs)
        return shapes.run(func, plain_args, plain_kwargs, self._like_cpu)

    def _check(self, func: OpOverload, args: Any, tensors: list[Tensor], written: list[Tensor], device: torch.device) -> None:
        """Raise `RuntimeError` where CUDA would: no such device, or tensors of different devices."""
        if _is_simulated(device) and device.index >= len(self._devices):
            raise RuntimeError(f"{func}: invalid device ordinal: no {device} among {len(self._devices)} simulated devices")
        if any(isinstance(tensor, SimulatedTensor) and tensor._home is not self for tensor in tensors):
            raise RuntimeError(f"{func}: a tensor belongs to other SimulatedDevices than the innermost ones")
        if func in _COPIES:
            return
        free = {id(tensor) for tensor in tensors if tensor.dim() == 0} - {id(tensor) for tensor in written}
        if func.overloadpacket in _INDEXING and isinstance(args[0], SimulatedTensor):
            free |= {id(index) for index in _tensors(args[1])}
        places = {str(tensor.device) for tensor in tensors if tensor.device != HOST or id(tensor) not in free}
        if len(places) > 1:
            found = " and ".join(sorted(places))
            raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices, {found}! (in {func})")

    def _wrap(self, made: Any, device: torch.device, given: dict[int, Tensor], crosses: bool) -> Any:
        """Results as the caller sees them: what was written in place is the argument itself, new tensors are on `device`."""
        if isinstance(made, list | tuple):
            return type(made)(self._wrap(tensor, device, given, crosses) for tensor in made)
        if not isinstance(made, Tensor) or id(made) in given or (self._values and not _is_simulated(device)):
            return given.get(id(made), made)
        if _is_simulated(device):
            self._account(made, device.index, crosses)
        wrapped, key = SimulatedTensor(made, device, self), made.untyped_storage()._cdata
        for tensor in given.values():
            if isinstance(tensor, SimulatedTensor) and tensor._inner.untyped_storage()._cdata == key:
                torch._functionalize_unsafe_set(wrapped, tensor)  # views share a storage, as their tensors do
        return wrapped

    def _account(self, inner: Tensor, index: int, crosses: bool) -> None:
        storage = inner.untyped_storage()
        key, count = storage._cdata, storage.nbytes()
        alive, on, before, category, tag = self._storages.get(key) or (None, index, 0, self._category(crosses), self.tag)
        if alive is None or before != count:
            self._devices[on].take(count - before, category)
            self.tags.setdefault(tag)
            self._storages[key] = (alive or weakref.ref(storage, functools.partial(self._free, key)), on, count, category, tag)

    def _free(self, key: int, _: object) -> None:
        _, on, count, category, _ = self._storages.pop(key)
        self._devices[on].used[category] -= count

    def _category(self, crosses: bool) -> str:
        label = self._labels[-1] if self._labels else "other"
        if label not in AMBIENT or crosses:
            return "transfers" if label in AMBIENT else label
        in_backward = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()  # recomputed activations want gradients
        return "gradients" if in_backward else label


def _is_simulated(device: torch.device) -> bool:
    return device.type == "cpu" and device.index is not None


def _is_made_up(tensor: Tensor) -> bool:
    """Without values: `.item()` has nothing to read."""
    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


def _made_up_value(func: OpOverload, tensor: Tensor) -> bool | float | int:
    inner = _unwrap(tensor)
    known = inner.constant if isinstance(inner, FakeTensor) else None
    value = True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1
    return func is aten.equal.default or (value if known is None else known.item())


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    nested = ([value] if isinstance(value, Tensor) else _tensors(value) if isinstance(value, list | tuple) else () for value in values)
    return list(itertools.chain.from_iterable(nested))


def _unwrap(value: Any) -> Any:
    if isinstance(value, SimulatedTensor):
        return value._inner
    return type(value)(map(_unwrap, value)) if type(value) in (list, tuple) else value
