"""Block groups of small models: planned, and really run on simulated devices, without a driver around them."""

import atexit
import functools
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from conftest import ARCHITECTURES, save_model, values_of
from evenround.api import scheme_from
from evenround.calls import BlockCall, embed
from evenround.chains import Chain, Chains
from evenround.checkpoint import Checkpoint
from evenround.config import DeviceConfig, TuneConfig
from evenround.group import GroupJob, Work, homes, round_group, tune_group
from evenround.layouts import Bounds, Drafter, Wish
from evenround.memory.devices import Device, Machine, parse_devices
from evenround.memory.place import Layout, Placement
from evenround.memory.simulate import SimulatedDevices
from evenround.model import Skeleton, skeleton_from
from evenround.numerics.quantized import QuantizedWeight
from evenround.outlook import group_jobs, outlook
from evenround.plan import Plan
from evenround.rehearsal import Rehearsed, Usage, profile
from evenround.rules import SchemeRules, resolve_schemes
from evenround.scheme import GroupSize, Scheme
from evenround.states import needs_text
from evenround.tune import Draw, GroupResult

GIB = 2**30
TUNE = TuneConfig(iters=2, batch_size=3, momentum=0.8, keep="last")
TWO_BLOCKS = replace(TUNE, nblocks=2)

SCHEMES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "MXFP4": ("MXFP4", {}),
    "MXFP8": ("MXFP8", {}),
    "NVFP4": ("NVFP4", {}),
    "FP8_STATIC": ("FP8_STATIC", {}),
    "FP8_DYNAMIC": ("FP8_DYNAMIC", {}),
    "FP8_TILES": ("FP8_BLOCK", {"group_size": (16, 16), "act_group_size": 32}),
    "INT8": ("INT8", {}),
    "INT4": ("INT4", {}),
    "MXINT4": ("MXINT4", {}),
    "W4A16_ASYM": ("W4A16_ASYM", {"group_size": 32}),
}
"""Schemes of every kind, as small models can have them: (preset, fields on top)."""


@functools.cache
def skeleton_of(architecture: str) -> Skeleton:
    """The skeleton of a saved random model."""
    folder = Path(tempfile.mkdtemp(prefix="evenround-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    save_model(ARCHITECTURES[architecture], folder)
    return skeleton_from(folder, Checkpoint.open(folder))


@dataclass(frozen=True, kw_only=True)
class Small:
    """What a run over a small model is given."""

    architecture: str = "llama"
    scheme: str = "W4A16"
    """One of `SCHEMES`, or a preset."""
    group_size: GroupSize | None = None
    """None: 32 where the preset says 128."""
    ignore_layers: tuple[str, ...] = ()
    tune: TuneConfig = TUNE
    samples: int = 7
    seqlen: int = 12
    padded: bool = False
    head: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def skeleton(self) -> Skeleton:
        return skeleton_of(self.architecture)

    @property
    def schemes(self) -> Mapping[str, Scheme | None]:
        name, fields = SCHEMES.get(self.scheme, (self.scheme, {}))
        default = scheme_from(name, fields)
        size = 32 if self.group_size is None and default.weight.group_size == 128 else self.group_size
        default = scheme_from(default, {"group_size": size})
        rules = SchemeRules(default=default, ignore_layers=self.ignore_layers, quant_lm_head=self.head)
        return resolve_schemes(self.skeleton.sites, rules, ragged_groups=False)

    @property
    def runs_text(self) -> bool:
        return needs_text(self.schemes.values(), self.tune)

    @property
    def tokens(self) -> Tensor | None:
        """`[samples, tokens]`, None where no text is run."""
        generator = torch.Generator().manual_seed(7)
        return torch.randint(3, 128, (self.samples, self.seqlen), generator=generator) if self.runs_text else None

    @property
    def mask(self) -> Tensor | None:
        if not self.padded:
            return None
        lengths = torch.tensor([self.seqlen - 2 - number % 5 for number in range(self.samples)])
        return torch.arange(self.seqlen) < lengths[:, None]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the chains."""
        hidden = self.skeleton.config.get_text_config().hidden_size
        return (self.samples, self.seqlen, hidden) if self.runs_text else ()

    def jobs(self) -> list[GroupJob]:
        """As a run makes them."""
        calls: tuple[BlockCall, ...] = ()
        if self.tokens is not None:
            calls = embed(self.skeleton, self.tokens, self.mask, self.dtype).calls
        return group_jobs(self.skeleton, self.schemes, self.tune, calls, self.dtype, self.mask, self.tokens)

    def rehearsed(self, number: int = 0) -> Rehearsed:
        """Group `number`, to be rehearsed."""
        return Rehearsed(self.jobs()[number], self.shape, "fused")

    def plan(self, machine: Machine | str, config: DeviceConfig | None = None) -> Plan:
        """The plan of the whole run."""
        machine = parse_devices(machine) if isinstance(machine, str) else machine
        return outlook(
            self.skeleton, self.schemes, self.tune, self.tokens, self.mask, self.dtype, machine, config or DeviceConfig(), disk_bytes=0
        )


def simulated(capacities: Sequence[int]) -> Machine:
    """Simulated devices with these capacities."""
    return Machine(tuple(Device(f"sim:{at}", "sim", size, torch.device("cpu", at)) for at, size in enumerate(capacities)))


def drafted(group: Rehearsed, wish: Wish, count: int, placed: Mapping[str, int] | None = None) -> Layout:
    """A layout of `wish` on `count` equal devices, its chains spread evenly where the wish has them on devices."""
    drafter = Drafter(group, profile(group), [GIB] * count, Bounds(placed=placed or {}))
    layout = drafter.layout(wish)
    return drafter.with_chains(layout, [0] * count) if wish.chains_on_device else layout


STORED = ("codes", "scale", "zero_point", "global_scale", "input_scale")


def same_weight(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    """The same codes, scales of every kind and zero points."""
    pairs = [(getattr(one, name), getattr(other, name)) for name in STORED]
    return all(
        a is b is None or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(_raw(a), _raw(b))) for a, b in pairs
    )


def _raw(values: Tensor) -> Tensor:
    """Its bytes."""
    return values.contiguous().view(torch.uint8)


@dataclass(frozen=True)
class Measured:
    """What a real run of a group took and gave."""

    usage: Usage
    quantized: Mapping[str, QuantizedWeight]
    result: GroupResult | None
    outputs: tuple[Tensor, ...]
    """The inputs of the next group, float and quantized; none after the head and without text."""
    left: tuple[int, ...]
    """Bytes on each device when the group is done and its outputs are dropped."""

    def same_bytes(self, other: "Measured") -> bool:
        """Everything that is stored of each weight, losses and outputs are the same."""
        equal = self.quantized.keys() == other.quantized.keys() and all(
            same_weight(weight, other.quantized[name]) for name, weight in self.quantized.items()
        )
        outputs = all(torch.equal(a, b) for a, b in zip(self.outputs, other.outputs, strict=True))
        return equal and outputs and (self.result and self.result.losses) == (other.result and other.result.losses)


def measured(small: Small, layout: Layout, capacities: Sequence[int], number: int = 0, folder: Path | None = None) -> Measured:
    """Group `number`, really tuned under `layout` on simulated devices with these capacities, its inputs random."""
    job = small.jobs()[number]
    generator = torch.Generator().manual_seed(number)
    values = torch.randn(small.shape, generator=generator) if small.shape else torch.empty(0)
    inputs = [values.to(small.dtype), (values + 0.01 * torch.randn(values.shape, generator=generator)).to(small.dtype)]
    with SimulatedDevices(capacities) as devices:
        where = [torch.device("cpu", at) for at in range(len(capacities))]
        place = Placement(layout, where, devices.label)
        draw = Draw(small.samples, small.tune.batch_size * small.tune.gradient_accumulate_steps, torch.Generator().manual_seed(1))
        work = Work(draw=draw, read=small.skeleton.read, folder=folder)
        result, chains = None, None
        if small.shape:
            chains = Chains(*_filled(inputs, layout, devices, where, small.tune.quantized_inputs, folder))
            chains, result = tune_group(job, place, chains, work)
            quantized = result.quantized
        else:
            quantized = round_group(job, place, work)
        usage = Usage(devices.peak, tuple(devices.breakdown_at_peak(at) for at in range(len(capacities))))
        outputs = (values_of(chains.float_inputs), values_of(chains.quantized_inputs)) if chains else ()
        del chains
        return Measured(usage, quantized, result, outputs, devices.used)


def _filled(
    inputs: Sequence[Tensor], layout: Layout, devices: SimulatedDevices, where: Sequence[torch.device], two: bool, folder: Path | None
) -> tuple[Chain, Chain]:
    kept = homes(layout, where, len(inputs[0]), folder)
    made = []
    for values in inputs if two else inputs[:1]:
        with devices.label("chained inputs"):
            chain = Chain.empty(values.shape, values.dtype, kept)
        for at in range(len(values)):
            chain.write([at], values[at : at + 1])
        made.append(chain)
    return made[0], made[-1]
