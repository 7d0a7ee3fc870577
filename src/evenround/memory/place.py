"""Where everything of a block group is, and the movements that follow from it.

A `Layout` is pure data: which module runs on which device (of each replica), who keeps each weight and its tuning state, how many samples
go through at once, where the chained inputs are. A `Placement` is a layout on real or simulated devices. Every module of a block has a
place, norms and attention and the sums between them included: code that a module runs itself, outside of its children, runs on the device
of that module, because tensors are moved to a module's device when it is called and its results to the device of its caller.

Why hooks: they see every architecture alike, autograd moves the gradients back, and taking them off leaves the module as it was.
What we gave up: cuts inside of a module's own code, and modules whose parameters another module uses behind their back (seen as an error
when the plan is made).
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from evenround.chains import HOST
from evenround.memory.simulate import Category

ON_HOST = -1
"""Number of the host among devices."""

Order = tuple[int, int]
"""(samples of a micro-batch, replicas): what decides in which order gradients are summed, and with it the last bits of a result."""

Label = Callable[[Category], AbstractContextManager[None]]
"""Says what memory allocated inside is for."""


def no_label(category: Category) -> AbstractContextManager[None]:
    """On real devices nobody counts."""
    return contextlib.nullcontext()


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a block group is laid out on devices, which are numbered from 0; `ON_HOST` is the host."""

    strategy: str
    """What a person calls it: single, share, split, pipeline, greedy, map."""
    replicas: tuple[Mapping[str, int], ...]
    """For each copy of the group: module → device. The nearest named ancestor decides; `""` is the default."""
    owners: Mapping[str, int]
    """Site → device that keeps its weight and tuning state. Sites that are not named: where replica 0 runs them."""
    micro_batch: int
    """Samples that go through a replica at once."""
    in_flight: int = 1
    """Micro-batches of a replica that are forward before the first goes backward."""
    recompute: bool = False
    """Activations inside of blocks are computed again in backward, not kept."""
    chains: Literal["device", "host", "disk"] = "device"
    chain_rows: tuple[int, ...] = ()
    """Samples of each chain on each device, where `chains` is `device`."""

    def device_of(self, module: str, replica: int = 0) -> int:
        """Number of the device that runs `module`."""
        places = self.replicas[replica]
        while module not in places and module:
            module = module.rpartition(".")[0]
        return places[module]

    def owner_of(self, site: str) -> int:
        return self.owners.get(site, self.device_of(site))

    @property
    def order(self) -> Order:
        return self.micro_batch, len(self.replicas)

    @property
    def at_once(self) -> int:
        """Samples whose activations are alive together."""
        return self.micro_batch * self.in_flight * len(self.replicas)


class Placement:
    """A layout on devices."""

    def __init__(self, layout: Layout, devices: Sequence[torch.device], label: Label = no_label) -> None:
        self.layout, self.devices, self.label = layout, tuple(devices), label
        self._running = threading.local()  # autograd calls modules again in a thread for each device

    def _device(self, number: int) -> torch.device:
        return HOST if number == ON_HOST else self.devices[number]

    def device(self, module: str, replica: int = 0) -> torch.device:
        """Where `module` of that replica runs."""
        return self._device(self.layout.device_of(module, replica))

    def owner(self, site: str) -> torch.device:
        """Where the site's weight and tuning state are kept."""
        return self._device(self.layout.owner_of(site))

    def work(self, site: str) -> torch.device:
        """Where the site is quantized: at its owner, or where it runs if the owner is the host."""
        return self.device(site) if self.layout.owner_of(site) == ON_HOST else self.owner(site)

    def home(self, name: str) -> torch.device:
        """Where the parameter or buffer `name` of the module tree is loaded to."""
        module = name.rpartition(".")[0]
        return self.owner(module) if name.endswith(".weight") and module in self.layout.owners else self.device(module)

    @contextlib.contextmanager
    def running(self, replica: int) -> Iterator[None]:
        """Modules called inside belong to `replica`."""
        before = self._replica
        self._running.replica = replica
        try:
            yield
        finally:
            self._running.replica = before

    @property
    def _replica(self) -> int:
        return int(vars(self._running).get("replica", 0))

    def cuts(self, name: str, root: nn.Module) -> bool:
        """Whether some module below `root`, called `name`, runs on another device than its caller."""
        return any(path != name and self._crosses(path) for path, _ in root.named_modules(prefix=name))

    @contextlib.contextmanager
    def moving(self, roots: Mapping[str, nn.Module]) -> Iterator[None]:
        """Tensors follow the layout in calls of modules below `roots` (name → module); calls of the roots are the caller's business."""
        handles: list[Any] = []
        try:
            for name, root in roots.items():
                for path, module in root.named_modules(prefix=name):
                    if path != name and self._crosses(path):
                        handles += self._hooks(path, module)
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _crosses(self, path: str) -> bool:
        caller = path.rpartition(".")[0]
        return any(self.device(path, replica) != self.device(caller, replica) for replica in range(len(self.layout.replicas)))

    def _hooks(self, path: str, module: nn.Module) -> list[Any]:
        caller = path.rpartition(".")[0]
        replicas = range(len(self.layout.replicas))
        inside, outside = ([self.device(name, replica) for replica in replicas] for name in (path, caller))

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return moved((args, kwargs), inside[self._replica])

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            return moved(output, outside[self._replica])

        # Compiled code ends where a device ends: what is on one device is compiled as one, transfers are not.
        entering, leaving = (torch.compiler.disable(hook) for hook in (enter, leave))  # type: ignore[no-untyped-call]
        return [module.register_forward_pre_hook(entering, with_kwargs=True), module.register_forward_hook(leaving)]


def moved(values: Any, device: torch.device) -> Any:
    """Every tensor in nested `values` on `device`."""
    return pytree.tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, values)
