"""The devices of a run while it runs: real ones, or simulated ones that exist inside `stage`."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from evenround.memory.devices import Device, Machine, available_host_bytes, free_bytes, peak_bytes
from evenround.memory.place import Label, Layout, Placement, no_label
from evenround.memory.simulate import SimulatedDevices


@dataclass(frozen=True, slots=True)
class Stage:
    """Devices to place things on, and what was measured there."""

    devices: tuple[Device, ...]
    where: tuple[torch.device, ...]
    label: Label
    simulated: SimulatedDevices | None

    @property
    def kind(self) -> str:
        return self.devices[0].kind

    def peaks(self) -> tuple[int, ...]:
        """Most bytes on each device since `reset_peaks`; on the host itself: resident since the process began."""
        return self.simulated.peak if self.simulated else tuple(peak_bytes(device) for device in self.where)

    def reset_peaks(self) -> None:
        """A new block group begins."""
        if self.simulated:
            self.simulated.reset_peak()
        elif self.kind != "cpu":
            for device in self.where:
                torch.accelerator.reset_peak_memory_stats(device)

    def measured(self) -> tuple[Device, ...]:
        """The devices with what they can hold now, when this run holds nothing: somebody else may have come."""
        if self.simulated:
            capacities = self.simulated.capacities
        else:
            if self.kind != "cpu":
                torch.accelerator.empty_cache()
            capacities = tuple(free_bytes(device) for device in self.where)
        limits = zip(self.devices, capacities, strict=True)
        return tuple(replace(device, capacity=max(1, min(device.capacity, capacity))) for device, capacity in limits)


@contextlib.contextmanager
def spread(model: nn.Module, blocks: Sequence[str], devices: Sequence[torch.device]) -> Iterator[None]:
    """`model` moved onto `devices` for evaluation: its blocks in order, even by bytes, everything else on the first."""
    places = {"": 0}
    sizes = [sum(tensor.nbytes for tensor in model.get_submodule(name).parameters()) for name in blocks]
    held, share = 0, max(1, sum(sizes)) / len(devices)
    for name, size in zip(blocks, sizes, strict=True):
        places[name] = min(len(devices) - 1, int((held + size / 2) / share))
        held += size
    place = Placement(Layout(strategy="split", replicas=(places,), owners={}, micro_batch=1), devices)
    there: dict[int, torch.Tensor] = {}
    for path, module in model.named_modules():
        for own in (module._parameters, module._buffers):
            for leaf, tensor in own.items():
                if tensor is not None and id(tensor) not in there:  # tied ones move once
                    moved = tensor.to(place.device(path))
                    there[id(tensor)] = nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
                if tensor is not None:
                    own[leaf] = there[id(tensor)]
    with place.moving({"": model}):
        yield


@contextlib.contextmanager
def stage(machine: Machine) -> Iterator[Stage]:
    """The accelerators (or the CPU) of `machine`; a CPU beside accelerators is the host, not a device to fill."""
    devices = accelerators(machine)
    where = tuple(device.where for device in devices if device.where is not None)
    if machine.simulated:
        with SimulatedDevices([device.capacity for device in devices]) as simulated:
            yield Stage(devices, where, simulated.label, simulated)
    else:
        yield Stage(devices, where, no_label, None)


def accelerators(machine: Machine) -> tuple[Device, ...]:
    """The devices to plan for."""
    real = tuple(device for device in machine.devices if device.kind != "cpu")
    return real or machine.devices


__all__ = ["Stage", "accelerators", "available_host_bytes", "stage"]
