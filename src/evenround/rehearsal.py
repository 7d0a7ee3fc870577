"""A block group's work without its weights: the bytes that a layout takes, from the very code that will run.

`rehearse` runs `tune_group` on simulated devices over tensors without values, two rounds of every loop, and reads off the peak of each
device. No factors, no estimates: a tensor that a run allocates is allocated here, with its size and its life.
`profile` does one forward pass and tells what each module keeps for backward: from that layouts are drawn up, before they are rehearsed.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from evenround.blocks import on_devices
from evenround.chains import Chain, Chains
from evenround.group import GroupJob, Work, homes, round_group, tune_group
from evenround.memory.place import Layout, Placement
from evenround.memory.simulate import SimulatedDevices
from evenround.states import REHEARSED, made_up_inputs, quantized_inputs, start_values
from evenround.tune import Samples, initial_states, micro_batch_error, tuned_weights

UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class Usage:
    """What a layout takes."""

    peaks: tuple[int, ...]
    """Bytes, for each device."""
    breakdowns: tuple[Mapping[str, int], ...]
    """Category → bytes at the peak, for each device; they add up to it."""


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """A group to rehearse: the job, and what its chains look like."""

    job: GroupJob
    shape: tuple[int, ...]
    """Of the chains: `[samples, tokens, hidden]`; none without text: `()`."""
    attention: Literal["fused", "math"]
    """How scaled dot product attention keeps what backward needs: q, k, v and the output, or the scores."""
    like_cpu: bool = True
    """Kernels are the CPU's (also on simulated devices)."""


@contextlib.contextmanager
def _stage(group: Rehearsed, layout: Layout, count: int) -> Iterator[tuple[SimulatedDevices, Placement]]:
    backend = sdpa_kernel(SDPBackend.MATH) if group.attention == "math" else contextlib.nullcontext()
    with SimulatedDevices([UNLIMITED] * count, values=False, like_cpu=group.like_cpu) as devices, backend:
        yield devices, Placement(layout, [torch.device("cpu", number) for number in range(count)], devices.label)


def _reader(group: Rehearsed) -> Any:
    specs = group.job.skeleton.checkpoint.specs
    return lambda name: torch.empty(specs[name].shape, dtype=specs[name].dtype)


def rehearse(group: Rehearsed, layout: Layout, count: int) -> Usage:
    """Peak and breakdown of each of `count` devices when the group is tuned under `layout`.

    Raises `RuntimeError` where the layout cannot run: a module uses another's parameters directly and they are apart.
    """
    if layout.chains == "disk":
        layout = replace(layout, chains="host")
    with _stage(group, layout, count) as (devices, place):
        if not group.shape:
            round_group(group.job, place, Work(draw=lambda: (), read=_reader(group), rehearse=True))
        else:
            chosen = _chosen(group, layout)
            work = Work(draw=lambda: chosen, read=_reader(group), rehearse=True)
            tune_group(replace(group.job, tokens=None, compiled=None), place, _chains(group, place, devices), work)
        return Usage(devices.peak, tuple(devices.breakdown_at_peak(number) for number in range(count)))


def _chains(group: Rehearsed, place: Placement, devices: SimulatedDevices) -> Chains:
    kept = homes(place.layout, place.devices, group.shape[0], None)
    with devices.label("chained inputs"):
        first = Chain.empty(group.shape, group.job.dtype, kept)
        second = Chain.empty(group.shape, group.job.dtype, kept) if group.job.tune.quantized_inputs else first
    return Chains(first, second)


def samples_of_step(group: Rehearsed) -> int:
    """Samples of one optimizer step."""
    tune = group.job.tune
    return min(tune.batch_size * tune.gradient_accumulate_steps, group.shape[0]) if group.shape else 1


def _chosen(group: Rehearsed, layout: Layout) -> range:
    """Samples of a step that is as long as it takes to see all memory of the real one."""
    step = samples_of_step(group)
    return range(min(step, REHEARSED * layout.at_once) if step % layout.micro_batch == 0 else step)


@dataclass(frozen=True, slots=True)
class Profile:
    """What the modules of a group cost, in bytes.

    A module that nobody calls, because its parent uses its parameters directly, is part of its parent here.
    """

    units: tuple[str, ...]
    """Modules that can be placed, in the order in which they first compute."""

    kept: Mapping[str, int]
    """Module → what one sample's forward pass leaves for backward; a module's own code counts apart from its children."""
    weights: Mapping[str, int]
    """Site → its float weight. A site may be no unit of its own: then it goes where its parent goes."""
    state: Mapping[str, int]
    """Site → its tuning state, without the float weight."""
    replica: Mapping[str, int]
    """Site → what every replica holds: quantized weight and its gradient."""
    others: Mapping[str, int]
    """Module → its parameters and buffers that are not sites."""
    chain: int
    """One sample of one chain."""


NO_PROFILE = Profile(units=(), kept={}, weights={}, state={}, replica={}, others={}, chain=0)
"""Of a group that nothing is run through."""


def profile(group: Rehearsed) -> Profile:
    """Costs of every module of the group, from one sample's forward pass on one device."""
    job = group.job
    layout = Layout(strategy="single", replicas=({"": 0},), owners={}, micro_batch=1, chains="host")
    with _stage(group, layout, 1) as (devices, place), contextlib.ExitStack() as stack:
        with devices.label("weights"):
            stack.enter_context(job.skeleton.materialized(job.names, job.dtype, place.home, _reader(group)))
        blocks = job.blocks()
        roots = {block.name: block.module for block in blocks}
        with on_devices(blocks, place) as on, _tagging(roots, devices):
            starts = start_values(on, job.tune, made_up_inputs(on, job.tune), rehearse=True)
            states = initial_states(on, starts, job.tune)
            leaves = tuned_weights(on, states, job.dtype)
            chain = Chain.empty((1, *group.shape[1:-1], job.width or group.shape[-1]), job.dtype, homes(layout, place.devices, 1, None))
            samples = Samples(chain, None if job.is_head else chain, job.mask, chain, on.float_weights())
            intakes = quantized_inputs(on, {name: start.input_scale for name, start in starts.items()})
            error = micro_batch_error(on, samples, [0], 0, leaves[0], 1, intakes)
            kept = devices.held_by_tag("saved activations")
            for tag, count in devices.held_by_tag("transfers").items():
                kept[tag] = kept.get(tag, 0) + count
            del error
        last = blocks[-1].name
        state = {
            item.site.name: sum(_nbytes(tensor) for tensor in (*item.parameters, *item.averages, *item.start.limits)) for item in states
        }
        sites = {item.site.name: _nbytes(item.weight) for item in states}
        others = _others(roots, set(sites))
        units = tuple(tag for tag in devices.tags if tag is not None)
        return Profile(
            units=units,
            kept=_by_unit({tag or last: count for tag, count in kept.items()}, units),
            weights=sites,
            state=state,
            replica={name: 2 * count for name, count in sites.items()},
            others=_by_unit(others, units),
            chain=_nbytes(chain.parts[0]),
        )


def _by_unit(costs: Mapping[str, int], units: Sequence[str]) -> dict[str, int]:
    """Costs of modules as those of the units that they belong to."""
    found: dict[str, int] = {}
    for name, cost in costs.items():
        unit = unit_of(name, units)
        found[unit] = found.get(unit, 0) + cost
    return found


def unit_of(name: str, units: Collection[str]) -> str:
    """The module itself, or the nearest one above it that is a unit."""
    while name not in units and "." in name:
        name = name.rpartition(".")[0]
    return name


def _nbytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _others(roots: Mapping[str, nn.Module], sites: set[str]) -> dict[str, int]:
    found = {}
    for name, root in roots.items():
        for path, module in root.named_modules(prefix=name):
            own = [*module._parameters.items(), *module._buffers.items()]
            found[path] = sum(tensor.nbytes for leaf, tensor in own if tensor is not None and not (path in sites and leaf == "weight"))
    return {path: count for path, count in found.items() if count}


@contextlib.contextmanager
def _tagging(roots: Mapping[str, nn.Module], devices: SimulatedDevices) -> Iterator[None]:
    """Storages allocated inside a call of a module are tagged with its name."""
    stack: list[str | None] = [None]
    devices.tags.clear()
    handles: list[Any] = []

    def watch(path: str, module: nn.Module) -> Sequence[Any]:
        def enter(module: nn.Module, args: Any) -> None:
            stack.append(path)
            devices.tag = path

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            stack.pop()
            devices.tag = stack[-1]

        return module.register_forward_pre_hook(enter), module.register_forward_hook(leave)

    try:
        for name, root in roots.items():
            for path, module in root.named_modules(prefix=name):
                handles += watch(path, module)
        yield
    finally:
        devices.tag = None
        for handle in handles:
            handle.remove()
