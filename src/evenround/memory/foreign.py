"""Other libraries' placement, off for a while: accelerate's hooks and compressed-tensors' offload caches.

What: `with suspended(block):` takes their wrappers off `block` and everything in it and puts real tensors where they left placeholders, so
that the tuner may move things itself. On any exit the same hooks, caches, forwards and tensor objects are back, on their old devices.

Why this way: the libraries' own ways out throw away what a way back needs. So a module's own entries (`forward`, the hook, the dictionaries
of tensors) are set aside and put back as they are, and library code runs only to read or write a tensor. All is read before anything is
changed. A tensor whose store is on the device that executes shares the store's memory, as in a forward of accelerate's. Neither library
is imported unless the tree holds something of it.

Kept, however the block is left: the value that each parameter and buffer has at the end, changed in place or assigned, on whatever device.
It goes, in the store's dtype, to the tensor in memory that holds it, to a file of compressed-tensors' disk cache or to accelerate's `.dat`
file; for accelerate's view of safetensors files (a checkpoint, never written) to the loader's `state_dict`, in host memory. Disk is
written only if bits changed. Tied tensors are one object inside; a value assigned to one name goes to all. A tensor left on the meta
device keeps the value it had. Without offloaded tensors in a module, its new names and shapes stay; with them, a new or lost name or a new
shape is a ValueError once all is back. A `forward` assigned to a hooked module is dropped. A tree without hooks is left alone altogether.

What we gave up: hooks of modules around `module` stay on, and a tensor that only such a hook can fetch is refused; all is in memory at
once, so pass a block and not a model; wrappers that somebody put around a hooked `forward` are off too; classes of parameters that are more
than their values (bitsandbytes) and the flat lists of RNN layers are not rebuilt; a tensor that the code inside replaces by another stays
in memory until the block is left (`module.to` replaces no parameter); under torch.distributed every rank writes.
"""

import contextlib
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from evenround.errors import UserError

Kind = Literal["_parameters", "_buffers"]
KINDS: tuple[Kind, ...] = ("_parameters", "_buffers")
WRAPPERS = ("_hf_hook", "_old_forward", "_original_forward_func")
MOVERS = ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa", "neuron")
"""Methods that accelerate's `dispatch_model` covers with ones that warn or refuse."""


@dataclass(frozen=True, slots=True)
class MapStore:
    """One entry of what accelerate's hooks load from: a dictionary in memory, an `OffloadedWeightsLoader` on disk, or a user's mapping."""

    entries: Mapping[str, Tensor]
    key: str
    device: torch.device | str | int | None

    def resident(self) -> Tensor | None:
        """The tensor in memory that holds the value; None when it is elsewhere."""
        return self.entries[self.key] if isinstance(self.entries, dict) else None

    def read(self) -> Tensor:
        """The value on the device that executes; may share the store's memory."""
        value = self.entries[self.key]
        return value if self.device is None or torch.device(self.device).type == "meta" else value.to(self.device)

    def write(self, value: Tensor) -> bool:
        """Keeps `value`, of the store's shape, any device and dtype; False where the mapping takes none."""
        from accelerate.utils import OffloadedWeightsLoader, offload_weight

        held, entries = self.entries[self.key], self.entries
        if same_bits(held, value):
            return True
        new = value.detach().to(held.device, held.dtype, copy=True)
        if isinstance(entries, OffloadedWeightsLoader) and entries.index[self.key].get("safetensors_file") is None:
            offload_weight(new, self.key, entries.save_folder)
        elif isinstance(entries, OffloadedWeightsLoader):
            entries.state_dict[self.key] = new.cpu()
        elif isinstance(entries, MutableMapping) and not isinstance(entries, dict):
            entries[self.key] = new
        else:
            held.copy_(new)
        return same_bits(self.entries[self.key], new)


@dataclass(frozen=True, slots=True)
class CacheStore:
    """One tensor of compressed-tensors' `OffloadCache`, whatever its global switches say."""

    cache: Any
    offloaded: Tensor

    def resident(self) -> Tensor | None:
        return None if self.offloaded.is_meta else self.offloaded

    def read(self) -> Tensor:
        """As `MapStore.read`; the copy that `disable_offloading` keeps goes first."""
        kept = self.cache.keep_onloaded_values.get(self.offloaded)
        value: Tensor = self.cache.onload(self.offloaded) if kept is None else kept
        return value

    def write(self, value: Tensor) -> bool:
        """As `MapStore.write`, the kept copy included."""
        if self.cache.is_staged:
            self.offloaded.copy_(value)
        elif not self.offloaded.is_meta or not same_bits(self.cache.onload(self.offloaded), value):
            self.cache.update_offload(self.offloaded, value.detach().contiguous())
        kept = self.cache.keep_onloaded_values.get(self.offloaded)
        if kept is not None:
            kept.copy_(value)
        return True


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor's place in a module, the object that is there outside, its device and dtype, and its store."""

    module: nn.Module
    kind: Kind
    name: str
    original: Tensor
    device: torch.device
    dtype: torch.dtype
    store: MapStore | CacheStore | None


def same_bits(held: Tensor, value: Tensor) -> bool:
    """Whether `value`, in the dtype and on the device of `held`, is the same bytes."""
    ours, theirs = (x.detach().to(held.device, held.dtype).contiguous().view(-1).view(torch.uint8) for x in (held, value))
    return torch.equal(ours, theirs)


def memory(tensor: Tensor, original: Tensor) -> Hashable:
    """Equal for tensors that are the same bytes and look the same in place of `original`; for one without bytes, its own."""
    layout = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), original.dtype, type(original))
    return layout if tensor.data_ptr() else id(original)


def fresh(original: Tensor, value: Tensor) -> Tensor:
    """A tensor of the kind of `original` over the bytes of `value`: our own object, so that moving it leaves the store's alone."""
    made = value.detach().to(original.dtype)
    if isinstance(original, nn.Parameter):
        made = nn.Parameter(made, requires_grad=original.requires_grad)
    vars(made).update(vars(original))
    return made


def is_cache(tensors: object) -> bool:
    """Whether a module's dictionary of tensors is one of compressed-tensors'; those exist only where that library is imported."""
    if isinstance(tensors, dict) or "compressed_tensors" not in sys.modules:
        return False
    from compressed_tensors.offload.cache import OffloadCache

    return isinstance(tensors, OffloadCache)


def hook_stores(hook: object, module: nn.Module) -> Iterator[tuple[tuple[int, Kind, str], MapStore]]:
    """Where the accelerate hook of `module` keeps tensors: (id of the module that has it, kind, name), store."""
    from accelerate.hooks import AlignDevicesHook, SequentialHook
    from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset

    for part in hook.hooks if isinstance(hook, SequentialHook) else ():
        yield from hook_stores(part, module)
    if not isinstance(hook, AlignDevicesHook) or not hook.offload or hook.weights_map is None:
        return
    for path, inner in module.named_modules() if hook.place_submodules else [("", module)]:
        buffers = set(inner._buffers) - inner._non_persistent_buffers_set if hook.offload_buffers else set()
        for kind, names in zip(KINDS, (set(inner._parameters), buffers), strict=True):
            for name in names:
                key, entries = f"{path}.{name}" if path else name, hook.weights_map
                while isinstance(entries, PrefixedDataset):
                    key, entries = entries.prefix + key, entries.dataset
                if isinstance(entries, OffloadedWeightsLoader) and (key in entries.state_dict or key not in entries.index):
                    entries = entries.state_dict
                if isinstance(entries, OffloadedWeightsLoader) or key in entries:  # of tied names a map may have one only
                    yield (id(inner), kind, name), MapStore(entries, key, hook.execution_device)


def outside(module: nn.Module, kind: Kind) -> dict[str, Tensor | None]:
    """The tensors of a module as they are while nobody looks: placeholders and offloaded ones included."""
    held: Any = vars(module)[kind]
    tensors: dict[str, Tensor | None] = held.offloaded_values if is_cache(held) else held
    return tensors


def slots_of(modules: Iterable[nn.Module]) -> Iterator[Slot]:
    """Every tensor of `modules`, which come outermost first: as in a forward, the innermost and last hook has the say."""
    stores: dict[tuple[int, Kind, str], MapStore] = {}
    for module in modules:
        stores.update(hook_stores(vars(module)["_hf_hook"], module) if "_hf_hook" in vars(module) else ())
    for module, kind in ((module, kind) for module in modules for kind in KINDS):
        held = vars(module)[kind]
        for name, tensor in outside(module, kind).items():
            if tensor is not None:
                store = CacheStore(held, tensor) if is_cache(held) else stores.get((id(module), kind, name))
                yield Slot(module, kind, name, tensor, tensor.device, tensor.dtype, store)


def materialized(slots: Iterable[Slot]) -> dict[int, Tensor]:
    """What takes each original's place, by its id. What was one object, or the same bytes of a store, is one object inside."""
    given = {id(slot.original): slot.original for slot in slots if not (slot.original.is_meta or isinstance(slot.store, CacheStore))}
    shared = {memory(tensor, tensor): tensor for tensor in given.values()}
    for original, store in ((slot.original, slot.store) for slot in slots):
        if id(original) not in given and store is not None:
            resident = store.resident()
            key = id(original) if resident is None else memory(resident, original)
            given[id(original)] = shared[key] if key in shared else shared.setdefault(key, fresh(original, store.read()))
    return given


def unhook(module: nn.Module) -> None:
    """Leaves the forward that the module had before any wrapper, and nothing of the wrappers."""
    own, bound = vars(module), MethodType(type(module).forward, module)
    inner = own["_original_forward_func"].__get__(module) if "_original_forward_func" in own else own.get("_old_forward")
    for name in (*WRAPPERS, *(MOVERS if "_hf_hook" in own else ())):
        own.pop(name, None)
    if inner is not None:
        own["forward"] = inner
    if own.get("forward") == bound:
        del own["forward"]


@torch.no_grad()
def keep(group: Iterable[Slot], before: Tensor) -> list[Slot]:
    """Gives the value now at the places of one tensor, `before` at first, to its originals and stores; returns where that cannot be."""
    value, real, lost = before, [], []
    for slot in group:
        now = vars(slot.module)[slot.kind].get(slot.name)
        if isinstance(now, Tensor) and now.shape == slot.original.shape:
            value = value if now is before or now.is_meta else now
            real += [slot] if before is slot.original else []
        elif before is not slot.original:
            lost.append(slot)
    assigned, value = value is not before, value.detach()
    residents = [held for slot in group if slot.store is not None and (held := slot.store.resident()) is not None]
    for slot in real:
        was = (slot.device, slot.dtype)
        if residents and (residents[0].device, residents[0].dtype) == was:
            slot.original.data = residents[0].detach()  # memory that it shares with the store, which is written below
        elif (slot.original.device, slot.original.dtype) != was:
            slot.original.data = value.to(*was)
        elif assigned:
            slot.original.copy_(value)
        vars(slot.module)[slot.kind][slot.name] = slot.original
    return lost + [slot for slot in group if slot.store is not None and not slot.store.write(value)]


def restore(entries: dict[str, Any], saved: Mapping[str, Any], names: Iterable[str]) -> None:
    """The `names` of `entries` as they are in `saved`, or gone where they are not."""
    for name in names:
        entries.pop(name, None)
        entries.update({name: saved[name]} if name in saved else {})


@contextlib.contextmanager
def suspended(module: nn.Module) -> Iterator[None]:
    """Hooks and offloading of accelerate and compressed-tensors off `module` and all within it; as before on any exit.

    Inside, every parameter and buffer is a plain tensor with its value: where a forward would have it, or as it was if it was not
    offloaded. The text of this file says what is kept of what the code inside does. Raises UserError for a tensor on the meta device that
    nothing in `module` can load, and ValueError on leaving for what cannot be kept.
    """
    paths = {inner: f"{path}." if path else "" for path, inner in module.named_modules()}
    hooked = {m for m in paths if any(name in vars(m) for name in WRAPPERS) or any(is_cache(vars(m)[kind]) for kind in KINDS)}
    if not hooked:
        yield
        return
    slots = list(slots_of(paths))
    given = materialized(slots)
    for slot in slots:
        if id(slot.original) not in given:
            raise UserError(
                f"{paths[slot.module]}{slot.name} is on the meta device and no hook inside the module given holds its value; "
                "suspend hooks on the outer module whose hook loads it, or load the weights"
            )
    inside = {(slot.module, slot.kind): outside(slot.module, slot.kind) for slot in slots if given[id(slot.original)] is not slot.original}
    inside.update({(inner, kind): outside(inner, kind) for inner in paths for kind in KINDS if is_cache(vars(inner)[kind])})
    groups: dict[int, list[Slot]] = {}
    for slot in slots:
        groups.setdefault(id(given[id(slot.original)]), []).append(slot)
    lost: list[str] = []
    with contextlib.ExitStack() as back:  # each of its callbacks runs, whatever the others raise
        for inner in paths:
            names = (*WRAPPERS, *MOVERS, "forward") if inner in hooked else ()
            back.callback(restore, vars(inner), dict(vars(inner)), (*names, *(kind for kind in KINDS if (inner, kind) in inside)))
        for (inner, kind), old in inside.items():
            vars(inner)[kind] = {name: None if tensor is None else given[id(tensor)] for name, tensor in old.items()}
        for inner in hooked:
            unhook(inner)

        def leave(group: list[Slot]) -> None:
            lost.extend(f"{paths[slot.module]}{slot.name}" for slot in keep(group, given[id(group[0].original)]))

        for group in groups.values():
            back.callback(leave, group)
        yield
        lost += [f"{paths[inner]}{name}" for (inner, kind), old in inside.items() for name in vars(inner)[kind].keys() - old.keys()]
    if lost:
        raise ValueError(f"new, missing or of another shape, so an offloading module cannot keep them: {', '.join(sorted(lost))}")
