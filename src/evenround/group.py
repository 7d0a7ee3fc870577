"""The whole work on one block group on its devices: load, float reference, tune, hand on.

A run and the plan for it both call `tune_group`: the plan with weights and inputs that are made up and have no values, and two rounds of
every loop. There is no second description of what a run does that could differ from it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from evenround.blocks import Block, Compiled, Group, on_devices
from evenround.calls import BlockCall, to_head_inputs
from evenround.chains import HOST, Chain, Chains, Home
from evenround.config import TuneConfig
from evenround.memory.place import Layout, Placement
from evenround.model import Reader, Skeleton
from evenround.numerics.quantized import QuantizedWeight
from evenround.scheme import Scheme
from evenround.states import start_values, untuned, watched
from evenround.tune import GroupResult, Samples, float_outputs, tune_block


def group_names(skeleton: Skeleton, schemes: Mapping[str, Scheme | None], nblocks: int) -> list[tuple[str, ...]]:
    """The blocks of every group in order, `nblocks` at a time; at last the output head by itself, if it is quantized."""
    blocks = skeleton.block_names
    names = [blocks[start : start + nblocks] for start in range(0, len(blocks), nblocks)]
    head = next((site for site in skeleton.sites if site.is_head and schemes[site.name]), None)
    return [*names, (head.name,)] if head else names


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupJob:
    """What is to be done with a group, wherever it is done."""

    skeleton: Skeleton
    names: tuple[str, ...]
    """Its blocks, or the output head."""
    calls: tuple[BlockCall, ...]
    """How each is called; the head: with hidden states alone."""
    schemes: Mapping[str, Scheme | None]
    tune: TuneConfig
    dtype: torch.dtype
    """Compute dtype."""
    mask: Tensor | None
    """bool `[samples, tokens]`, False where padded."""
    tokens: Tensor | None = None
    """`[samples, tokens]`: for the output head, before which the hidden states go through the final norm; None in a rehearsal."""
    compiled: Compiled | None = None
    """Blocks run through `torch.compile`, and what was compiled is kept here."""

    @property
    def is_head(self) -> bool:
        return self.skeleton.sites[-1].is_head and self.names == (self.skeleton.sites[-1].name,)

    @property
    def width(self) -> int | None:
        """Of what enters the output head, which may be narrower than hidden states; None for blocks."""
        return self.skeleton.sites[-1].shape[1] if self.is_head else None

    def blocks(self) -> tuple[Block, ...]:
        """The blocks with the weights to quantize in them."""
        made = []
        for name, call in zip(self.names, self.calls, strict=True):
            sites = []
            for site in self.skeleton.sites:
                scheme = self.schemes[site.name]
                if scheme is not None and (site.name == name or site.name.startswith(name + ".")):
                    sites.append((site, scheme))
            made.append(Block(name, self.skeleton.model.get_submodule(name), call, tuple(sites)))
        return tuple(made)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """How it is done: by a run, or in a rehearsal."""

    draw: Callable[[], Sequence[int]]
    read: Reader
    rehearse: bool = False
    folder: Path | None = None
    """For chains on disk."""
    on_step: Callable[[int, float], None] | None = None
    lap: Callable[[str], None] = lambda phase: None
    """Called at the end of each phase: load, reference, tune."""


def homes(layout: Layout, devices: Sequence[torch.device], samples: int, folder: Path | None) -> tuple[Home, ...]:
    """Where a chain of so many samples lies under `layout`."""
    if layout.chains == "device":
        return tuple(Home(device, rows) for device, rows in zip(devices, layout.chain_rows, strict=True))
    return (Home(HOST, samples, folder if layout.chains == "disk" else None),)


def round_group(job: GroupJob, place: Placement, work: Work) -> dict[str, QuantizedWeight]:
    """Plain rounding of the group's sites, no samples needed."""
    with place.label("weights"), job.skeleton.materialized(job.names, job.dtype, place.home, work.read):
        work.lap("load")
        with place.label("other"), on_devices(job.blocks(), place) as group:
            quantized = untuned(group, start_values(group, job.tune, {}, work.rehearse), HOST)
            work.lap("tune")
            return quantized


def tune_group(job: GroupJob, place: Placement, chains: Chains, work: Work) -> tuple[Chains | None, GroupResult]:
    """Tune the group on `chains`; returns the inputs of the next group (None after the head) and what tuning gave.

    `chains.float_inputs` is overwritten where nothing else needs it: two chains and one set of outputs live, not four.
    """
    with place.label("weights"), job.skeleton.materialized(job.names, job.dtype, place.home, work.read):
        with place.label("other"), on_devices(job.blocks(), place, job.compiled) as group:
            work.lap("load")
            return _tune_head(job, group, chains, work) if job.is_head else _tune_blocks(job, group, chains, work)


def _tune_blocks(job: GroupJob, group: Group, chains: Chains, work: Work) -> tuple[Chains, GroupResult]:
    chained = job.tune.quantized_inputs
    inputs = chains.quantized_inputs if chained else chains.float_inputs
    kept = homes(group.place.layout, group.place.devices, len(inputs), work.folder)

    def new_chain() -> Chain:
        with group.place.label("chained inputs"):
            return Chain.empty(inputs.shape, inputs.dtype, kept)

    targets = chains.float_inputs if chained and chains.float_inputs is not inputs else new_chain()
    seen = float_outputs(group, chains.float_inputs, targets, job.tune, job.mask, work.rehearse)
    work.lap("reference")
    outputs = new_chain() if chained else None
    samples = Samples(inputs, targets, job.mask)
    result = tune_block(group, samples, job.tune, work.draw, seen=seen, outputs=outputs, rehearse=work.rehearse, on_step=work.on_step)
    work.lap("tune")
    return Chains(targets, outputs or targets), result


def _tune_head(job: GroupJob, group: Group, chains: Chains, work: Work) -> tuple[None, GroupResult]:
    entering = {name: _head_inputs(job, group, chain, work) for name, chain in chains.tensors.items()}
    watches = any(watched(scheme, job.tune) for _, _, scheme in group.sites)
    seen = float_outputs(group, entering["float"], None, job.tune, job.mask, work.rehearse) if watches else {}
    work.lap("reference")
    inputs = entering.get("quantized", entering["float"]) if job.tune.quantized_inputs else entering["float"]
    samples = Samples(inputs, None, job.mask, entering["float"], group.float_weights())
    result = tune_block(group, samples, job.tune, work.draw, seen=seen, rehearse=work.rehearse, on_step=work.on_step)
    work.lap("tune")
    return None, result


def _head_inputs(job: GroupJob, group: Group, hidden: Chain, work: Work) -> Chain:
    """What enters the head: `hidden` itself, overwritten, unless the model makes it narrower on the way."""
    out = hidden
    if hidden.shape[-1] != job.width:
        with group.place.label("chained inputs"):
            kept = homes(group.place.layout, group.place.devices, len(hidden), work.folder)
            out = Chain.empty((*hidden.shape[:-1], job.width or 0), hidden.dtype, kept)
    if job.tokens is not None:
        to_head_inputs(job.skeleton, job.tokens, job.mask, hidden, out, job.dtype)
    return out
