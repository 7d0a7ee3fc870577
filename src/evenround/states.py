"""What is known of a weight before it is tuned, and what tuning moves.

While the float blocks compute their reference, `Watch` sees what enters each site: second moments of neighbouring input channels weigh
errors in the search for scales, the largest magnitude calibrates static activation scales. Both come from all samples and from the float
model, so what is exported never depends on which iterate of tuning is kept.

What we gave up: scales of static activations are not tuned. Floating point codes lose nothing to a range that is a little too wide.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evenround.blocks import Group, Intake
from evenround.config import TuneConfig
from evenround.errors import UserError
from evenround.model import Site
from evenround.numerics.activations import fake_quantize, input_scale
from evenround.numerics.grouping import from_groups, to_groups
from evenround.numerics.quantized import QuantizedWeight
from evenround.numerics.search import moment_shape, moments, search_limits, searchable
from evenround.numerics.weights import global_scale, group_limits, parameter_gradients, qdq, quantize
from evenround.rules import fused_groups
from evenround.scheme import Scheme

REHEARSED = 2
"""Rounds of each loop that a rehearsal makes: what the first leaves behind is there in the second, and later ones repeat it."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What entered one site, over the samples so far. Changed in place."""

    magnitude: Tensor
    """float32 `[1]`: the largest magnitude."""
    moments: Tensor | None
    """float32 `[squares, size, size]`: Σ x xᵀ of neighbouring channels (`numerics.search`), where scales are searched."""

    def see(self, values: Tensor, mask: Tensor | None) -> None:
        """values: `[…, in]`; mask: bool, its leading dimensions where tokens may not count."""
        rows = values.reshape(-1, values.shape[-1]).float()
        if mask is not None and mask.numel() == len(rows):  # blocks may flatten tokens; experts see some of them only
            rows = rows * mask.to(values.device).reshape(-1, 1)
        torch.maximum(self.magnitude, rows.abs().amax(), out=self.magnitude)
        if self.moments is not None:
            moments(rows, self.moments)

    def add(self, other: "Seen") -> None:
        """What another replica saw."""
        torch.maximum(self.magnitude, other.magnitude.to(self.magnitude.device), out=self.magnitude)
        if self.moments is not None and other.moments is not None:
            self.moments.add_(other.moments.to(self.moments.device))

    def to(self, device: torch.device) -> "Seen":
        """The same on `device`."""
        return Seen(self.magnitude.to(device), None if self.moments is None else self.moments.to(device))


def _nothing_seen(site: Site, scheme: Scheme, config: TuneConfig, device: torch.device) -> Seen:
    squares = None
    if config.search_scales and searchable(scheme.weight):
        squares = torch.zeros(moment_shape(scheme.weight, site.shape[1]), device=device)
    return Seen(torch.zeros(1, device=device), squares)


class Watch:
    """Sees the inputs of the sites that need it, each replica its share of the samples."""

    def __init__(self, group: Group, config: TuneConfig) -> None:
        self.group = group
        self.replicas: list[dict[str, Seen]] = []
        with group.place.label("tuning state"):
            for replica in range(len(group.replicas)):
                there = {}
                for _, site, scheme in group.sites:
                    if watched(scheme, config):
                        there[site.name] = _nothing_seen(site, scheme, config, group.place.device(site.name, replica))
                self.replicas.append(there)

    def intake(self, replica: int, mask: Tensor | None) -> dict[str, Intake]:
        """For `Group.forward`: sees what passes. mask: bool `[batch, tokens]`."""

        def of(seen: Seen) -> Intake:
            return lambda values: seen.see(values, mask)

        return {name: of(seen) for name, seen in self.replicas[replica].items()}

    def total(self) -> dict[str, Seen]:
        """Of all replicas, each site's where it is worked on. The shares are gone afterwards."""
        result = {}
        for name in list(self.replicas[0]):
            first, *rest = (replica.pop(name) for replica in self.replicas)
            result[name] = first.to(self.group.place.work(name))
            for other in rest:
                result[name].add(other)
        return result


def made_up_inputs(group: Group, config: TuneConfig) -> dict[str, Seen]:
    """As if zeros had entered every site that is watched."""
    return Watch(group, config).total()


def watched(scheme: Scheme, config: TuneConfig) -> bool:
    """Whether a site's inputs must be seen before it is quantized."""
    return scheme.activation.calibrated or (config.search_scales and searchable(scheme.weight))


def needs_text(schemes: Iterable[Scheme | None], config: TuneConfig) -> bool:
    """Whether calibration text is run through the model."""
    return config.iters > 0 or any(scheme is not None and watched(scheme, config) for scheme in schemes)


@dataclass(frozen=True, slots=True)
class Start:
    """What is fixed of a site when tuning begins, where the site is worked on."""

    limits: tuple[Tensor, ...]
    """Each float32 `[groups, 1]`: see `numerics.weights`."""
    whole: Tensor | None
    """`nv`: the global scale, float32 `[1]`."""
    input_scale: Tensor | None
    """float32 `[1]`, for calibrated activations."""

    def to(self, device: torch.device) -> "Start":
        """The same on `device`."""
        whole, inputs = (None if part is None else part.to(device) for part in (self.whole, self.input_scale))
        return Start(tuple(limit.to(device) for limit in self.limits), whole, inputs)


def start_values(group: Group, config: TuneConfig, seen: Mapping[str, Seen], rehearse: bool = False) -> dict[str, Start]:
    """Limits of every site's groups, searched where `config` says so, and the scales that sites share.

    rehearse: search no longer than it takes to see all memory.
    """
    place, limits, magnitudes = group.place, dict[str, tuple[Tensor, ...]](), dict[str, Tensor]()
    with place.label("tuning state"):
        for block, site, scheme in group.sites:
            rows = to_groups(block.weight(site).to(place.work(site.name)), scheme.weight.group_size)
            limits[site.name] = group_limits(rows, scheme.weight)
            if scheme.weight.dtype == "nv_fp":
                magnitudes[site.name] = limits[site.name][0].amax().reshape(1)
        shared = {name: global_scale(magnitude) for name, magnitude in _shared(magnitudes).items()}
        inputs = _shared({name: what.magnitude for name, what in seen.items()})
        result = {}
        for block, site, scheme in group.sites:
            name, found = site.name, limits.pop(site.name)
            if config.search_scales and searchable(scheme.weight):
                measured = seen[name].moments
                assert measured is not None
                weight, tries = block.weight(site).to(place.work(name)), REHEARSED if rehearse else None
                found = search_limits(weight, found, scheme.weight, measured, shared.get(name), tries)
            scale = input_scale(inputs[name], scheme.activation) if scheme.activation.calibrated else None
            result[name] = Start(found, shared.get(name), scale)
    return result


def _shared(magnitudes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The largest of each fused group (`rules.fused_groups`) for all of its members, each where its own was."""
    result = {}
    for names in fused_groups(list(magnitudes)):
        for name in names:
            largest = magnitudes[name]
            for other in names:
                largest = torch.maximum(largest, magnitudes[other].to(largest.device))
            result[name] = largest
    return result


def quantized_inputs(group: Group, scales: Mapping[str, Tensor | None]) -> dict[str, Intake]:
    """For `Group.forward`: the inputs of sites as their schemes quantize them; `scales`: site → scale of calibrated activations."""

    def of(scheme: Scheme, scale: Tensor | None) -> Intake:
        return lambda values: fake_quantize(values, scheme.activation, None if scale is None else scale.to(values.device))

    return {site.name: of(scheme, scales.get(site.name)) for _, site, scheme in group.sites if scheme.activation.quantized}


@dataclass(frozen=True, slots=True)
class SiteState:
    """Tuning state of one site."""

    site: Site
    scheme: Scheme
    weight: Tensor
    """`[out, in]`."""
    start: Start
    offset: Tensor
    """V, float32 `[groups, size]`."""
    clips: tuple[Tensor, ...]
    """Factors of the limits, each float32 `[groups, 1]`."""
    averages: tuple[Tensor, ...]
    """Decaying means of the gradients of offset and clips, where there is momentum."""

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return self.offset, *self.clips

    @property
    def rows(self) -> Tensor:
        """The weight's groups `[groups, size]`."""
        return to_groups(self.weight, self.scheme.weight.group_size)

    def on(self, device: torch.device) -> "SiteState":
        """This very state, or a copy of it if it is kept elsewhere."""
        if self.weight.device == device:
            return self
        return replace(
            self,
            weight=self.weight.to(device),
            start=self.start.to(device),
            offset=self.offset.to(device),
            clips=tuple(clip.to(device) for clip in self.clips),
            averages=tuple(average.to(device) for average in self.averages),
        )

    def take(self, other: "SiteState") -> None:
        """What `other`, a copy made by `on`, has been changed to."""
        if other is not self:
            for mine, its in zip((*self.parameters, *self.averages), (*other.parameters, *other.averages), strict=True):
                mine.copy_(its)

    def quantize_dequantize(self, dtype: torch.dtype) -> Tensor:
        """W' `[out, in]`."""
        rows = qdq(self.rows, self.offset, self.clips, self.start.limits, self.scheme.weight, dtype, self.start.whole)
        return from_groups(rows, self.site.shape, self.scheme.weight.group_size)

    def gradients(self, gradient: Tensor, clips: bool) -> tuple[Tensor, ...]:
        """Gradients of V and, if `clips`, of the clip factors, from that of W' `[out, in]`."""
        scheme = self.scheme.weight
        rows = to_groups(gradient, scheme.group_size)
        found = parameter_gradients(rows, self.rows, self.offset, self.clips, self.start.limits, scheme, self.start.whole)
        return found if clips else found[:1]

    def export(self) -> QuantizedWeight:
        return _quantized(self.weight, self.scheme, self.start, self.offset, self.clips)


def _quantized(
    weight: Tensor, scheme: Scheme, start: Start, offset: Tensor | None = None, clips: Sequence[Tensor | float] = (1.0, 1.0)
) -> QuantizedWeight:
    found = quantize(weight, scheme.weight, offset, clips, start.limits, start.whole)
    return replace(found, input_scale=start.input_scale)


def initial_state(weight: Tensor, site: Site, scheme: Scheme, start: Start, momentum: bool = False) -> SiteState:
    """Untuned: V = 0, clip factors 1. `weight`: `[out, in]`; the state is kept where it is."""
    start = start.to(weight.device)
    offset = torch.zeros(to_groups(weight, scheme.weight.group_size).shape, dtype=torch.float32, device=weight.device)
    clips = tuple(torch.ones_like(limit) for limit in start.limits)
    averages = tuple(torch.zeros_like(parameter) for parameter in (offset, *clips)) if momentum else ()
    return SiteState(site, scheme, weight, start, offset, clips, averages)


def untuned(group: Group, starts: Mapping[str, Start], home: torch.device) -> dict[str, QuantizedWeight]:
    """Every site of the blocks as it is without tuning, on `home`. Raises `UserError` naming the layer whose scale does not fit float16."""
    result = {}
    for block, site, scheme in group.sites:
        try:
            work = group.place.work(site.name)
            result[site.name] = _quantized(block.weight(site).to(work), scheme, starts[site.name].to(work)).to(home)
        except OverflowError as error:
            raise UserError(f"{site.name}: {error}; leave it out with --ignore_layers") from None
    return result
