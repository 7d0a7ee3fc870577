"""The memory plan of a run, made before the first weight is read: which layout each block group gets, and the bytes that it takes.

Wishes are tried fastest first; each that could fit is rehearsed (see `rehearsal`), and the first whose peaks, with the margin of their kind
of device, fit is taken. Groups that are alike share a plan. What does not fit says by how much, and when nothing fits, the plan says what
would: every capacity times the same factor.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction

import torch

from evenround.errors import UserError, readable_bytes
from evenround.group import GroupJob
from evenround.layouts import WORTH, Bounds, Drafter, Wish, device_of, greedy, relative_seconds, wishes
from evenround.memory.devices import Device, attention, margin
from evenround.memory.place import ON_HOST, Layout, Order
from evenround.model import structure
from evenround.rehearsal import NO_PROFILE, Rehearsed, Usage, profile, rehearse, samples_of_step

SMALLEST = 32
"""Wishes that are rehearsed to find the least that would fit, for a group of one block; fewer for longer groups."""

AFFORD = 2000
"""Passes of a micro-batch through a block, some 15 ms each, after which only the smallest wishes are rehearsed."""

LIKELY = Fraction(9, 10)
"""Of what wishes of the same strategy took, measured by what they hold at least: what takes more is not rehearsed before the smallest."""

REFINEMENTS = 4
"""Cuts that are drawn anew from what a rehearsal found, for a group of one block; fewer for longer groups, whose rehearsals take longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePlan:
    """One device: what it has and what it will hold."""

    name: str
    kind: str
    capacity_bytes: int
    peak_bytes: int
    margin_bytes: int
    """For what no operation on tensors tells: context, workspaces, rounding."""
    breakdown: Mapping[str, int]
    """Category → bytes at the peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A wish that was rehearsed, or that can be seen not to fit."""

    wish: str
    seconds: float
    peaks: tuple[int, ...]
    """Bytes, for each device; none if it was not rehearsed."""
    reason: str
    """Why not; empty: it fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan:
    """How one kind of block group runs."""

    names: tuple[str, ...]
    """Blocks of the first group of the kind."""
    groups: int
    """Groups of the kind."""
    layout: Layout
    usage: Usage
    fits: bool
    relative_time: float
    """Against one device with the whole batch at once, had it the memory; rough."""
    host_bytes: int
    disk_bytes: int
    """For chains that are on disk."""
    advice: str
    """What else makes it smaller."""
    factor: Fraction
    """Largest part of a capacity that is needed; above 1 it does not fit."""
    tried: tuple[Attempt, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The plan of a run."""

    fits: bool
    shape: tuple[int, ...]
    """Of the chained inputs, `[samples, tokens, hidden]`; none without text."""
    devices: tuple[DevicePlan, ...]
    """Peaks over all groups."""
    groups: tuple[GroupPlan, ...]
    """One of each kind."""
    kinds: Mapping[str, int]
    """First block of every group → its kind's number in `groups`."""
    host_bytes: int
    """Host memory for chained inputs, state and results; without the interpreter and its libraries."""
    disk_bytes: int
    least: tuple[int, ...]
    """Capacities that would do, in the proportions of those given. None if the devices are large enough, and where the greedy allocator
    does not fit: it would cut otherwise for other capacities."""

    @property
    def main(self) -> GroupPlan:
        """The kind of group that speaks for the run: one that does not fit, else the one that most blocks are in."""
        return max(self.groups, key=lambda group: (not group.fits, len(group.names) * group.groups))

    def layout(self, names: Sequence[str]) -> Layout:
        """The layout of the group of blocks `names`."""
        group = self.groups[self.kinds[names[0]]]
        return renamed(group.layout, dict(zip(group.names, names, strict=True)))

    @property
    def orders(self) -> dict[str, Order]:
        """First block of every group → in which order it sums."""
        return {name: self.groups[kind].layout.order for name, kind in self.kinds.items()}

    def usage(self, names: Sequence[str]) -> Usage:
        """What that group takes."""
        return self.groups[self.kinds[names[0]]].usage

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        main = self.main
        return {
            "fits": self.fits,
            "strategy": main.layout.strategy,
            "micro_batch": main.layout.micro_batch,
            "samples_at_once": main.layout.at_once,
            "recompute": main.layout.recompute,
            "chained_inputs": main.layout.chains,
            "tuning_state": _where_state(main.layout),
            "relative_time": round(main.relative_time, 3),
            "devices": [{**asdict(device), "breakdown": dict(device.breakdown)} for device in self.devices],
            "host_bytes": self.host_bytes,
            "disk_bytes": self.disk_bytes,
            "least_bytes": list(self.least),
            "tried": [attempt_dict(attempt) for attempt in main.tried],
            "groups": [_group_dict(group) for group in self.groups],
        }


def _where_state(layout: Layout) -> str:
    return "host" if ON_HOST in layout.owners.values() else "device"


def attempt_dict(attempt: Attempt) -> dict[str, object]:
    """Plain JSON values."""
    return {"wish": attempt.wish, "peaks_bytes": list(attempt.peaks), "fits": not attempt.reason, "reason": attempt.reason}


def _group_dict(group: GroupPlan) -> dict[str, object]:
    layout = group.layout
    return {
        "names": list(group.names),
        "groups": group.groups,
        "strategy": layout.strategy,
        "micro_batch": layout.micro_batch,
        "in_flight": layout.in_flight,
        "replicas": len(layout.replicas),
        "recompute": layout.recompute,
        "chained_inputs": layout.chains,
        "tuning_state": _where_state(layout),
        "relative_time": round(group.relative_time, 3),
        "fits": group.fits,
        "host_bytes": group.host_bytes,
        "chain_rows": list(layout.chain_rows),
        "peaks_bytes": list(group.usage.peaks),
        "places": [dict(replica) for replica in layout.replicas],
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What there is to plan for."""

    devices: tuple[Device, ...]
    host_bytes: int
    """Host memory that may be used."""


def _need(device: Device, peak: int) -> int:
    return peak + margin(device.kind, peak) if peak else 0  # what is not used needs no context either


def _factor(devices: Sequence[Device], peaks: Sequence[int]) -> Fraction:
    """The largest part of a capacity that is needed: exact, as a byte decides."""
    return max(Fraction(_need(device, peak), max(1, device.capacity)) for device, peak in zip(devices, peaks, strict=True))


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A wish that was rehearsed."""

    factor: Fraction
    wish: Wish
    layout: Layout
    usage: Usage
    fits: bool
    """The host included."""


def _kind(wish: Wish) -> object:
    """Wishes of a kind take about as many times more than they hold at least."""
    return wish.strategy, wish.replicas


class _Search:
    """Rehearsals for one kind of group."""

    def __init__(self, group: Rehearsed, resources: Resources, bounds: Bounds) -> None:
        self.group, self.resources, self.bounds = group, resources, bounds
        self.devices = resources.devices
        self.profile = profile(group) if group.shape else NO_PROFILE
        if bounds.strategy == "greedy" and group.shape:
            bounds = self.bounds = replace(bounds, placed=self._greedy())
        self.drafter = Drafter(group, self.profile, [device.capacity for device in self.devices], bounds)
        self.rehearsed: dict[str, Usage] = {}
        self.spent = 0
        """Passes through blocks that were rehearsed."""
        self.excess: dict[object, Fraction] = {}
        """Kind of wish → what the least takes of its kind took, as a multiple of what it holds at least."""

    def _greedy(self) -> dict[str, int]:
        """auto-round's way: quantized layers by its allocator, everything else on the first device."""
        profile, batch = self.profile, min(self.group.job.tune.batch_size, self.group.shape[0])
        layers = {
            site: float(profile.weights[site] + profile.state[site] + profile.replica[site] + batch * profile.kept.get(site, 0))
            for site in profile.weights
        }
        free = [float(device.capacity) for device in self.devices]
        free[0] -= sum(profile.others.values()) + batch * sum(kept for name, kept in profile.kept.items() if name not in layers)
        return greedy(layers, free)

    def usage(self, layout: Layout) -> Usage:
        key = repr(replace(layout, strategy=""))
        if key not in self.rehearsed:
            self.rehearsed[key] = rehearse(self.group, layout, len(self.devices))
            micro_batches = min(samples_of_step(self.group) // layout.micro_batch, 2 * layout.in_flight * len(layout.replicas))
            self.spent += len(self.group.job.names) * (micro_batches + 6 * len(layout.replicas))
        return self.rehearsed[key]

    def worst(self, usage: Usage) -> Fraction:
        return _factor(self.devices, usage.peaks)

    def even(self, usage: Usage) -> bool:
        """Whether no device is more than 1 % fuller, for its capacity, than the mean: not worth another rehearsal."""
        parts = [Fraction(peak, max(1, device.capacity)) for device, peak in zip(self.devices, usage.peaks, strict=True)]
        return max(parts) * len(parts) * 100 <= sum(parts) * 101

    def best(self, wish: Wish) -> tuple[Layout, Usage]:
        """The best layout of a wish, rehearsed. Drafts have all micro-batches in flight as one, which takes about the same memory."""
        draft = replace(wish, micro_batch=wish.micro_batch * wish.in_flight, in_flight=1)
        layout, usage = self._cut(draft)
        with_chains = wish.chains_on_device and bool(self.group.shape)
        if with_chains:
            layout = self.drafter.with_chains(layout, usage.peaks)
        layout = replace(layout, micro_batch=wish.micro_batch, in_flight=wish.in_flight)
        usage = self.usage(layout)
        if with_chains and draft != wish and not self.even(usage):  # now that it is known what the micro-batches take when they are not one
            size = self.drafter.chain_bytes
            without = [peak - rows * size for peak, rows in zip(usage.peaks, layout.chain_rows, strict=True)]
            again = self.drafter.with_chains(layout, without)
            if self.worst(self.usage(again)) < self.worst(usage):
                layout, usage = again, self.usage(again)
        return layout, usage

    def _cut(self, wish: Wish) -> tuple[Layout, Usage]:
        """The most even cut that was found, with its chains on the host."""
        drafted = self.drafter.layout(wish)
        layout, usage = drafted, self.usage(drafted)
        cut = wish.strategy in ("split", "pipeline") and not self.bounds.placed and len(self.devices) > 1
        for _ in range(max(1, REFINEMENTS // len(self.group.job.names)) if cut else 0):
            if self.even(usage):
                break
            costs = self.drafter.costs_of(drafted, wish)
            extra = [peak - cost for peak, cost in zip(self.usage(drafted).peaks, costs, strict=True)]
            again = self.drafter.layout(wish, extra)
            if again == drafted:
                break
            drafted = again
            found = self.usage(drafted)
            if self.worst(found) < self.worst(usage):
                layout, usage = drafted, found
        return layout, usage

    def run(self) -> GroupPlan:
        count = len(self.devices)
        found = wishes(self.group, count, self.bounds)
        ordered = sorted(found, key=lambda wish: self._seconds(wish) * (1 if wish.strategy == "single" else WORTH))
        attempts: list[Attempt] = []
        plans: list[_Candidate] = []
        largest = max(device.capacity for device in self.devices)
        for wish in ordered:
            least = self.drafter.least_bytes(wish)
            if least <= largest < least * self.excess.get(_kind(wish), Fraction(0)) * LIKELY:
                attempts.append(self._attempt(wish, (), "takes more, by what others like it took"))
            elif least <= largest and self.spent > AFFORD:
                attempts.append(self._attempt(wish, (), "not rehearsed: enough has been"))
            elif least > largest:
                attempts.append(self._attempt(wish, (), f"needs at least {readable_bytes(int(least))} on a device"))
            elif self._try(wish, attempts, plans):
                break
        else:
            self._try_smallest(found, attempts, plans)
        if not plans:
            raise UserError(f"{self.group.job.names[0]} cannot run in any way that was tried: {attempts[-1].reason}")
        chosen = plans[-1] if plans[-1].fits else min(plans, key=lambda plan: plan.factor)
        first = Wish(strategy="single", micro_batch=min(self.group.job.tune.batch_size, self.group.shape[0]) if self.group.shape else 1)
        return GroupPlan(
            names=self.group.job.names,
            groups=1,
            layout=chosen.layout,
            usage=chosen.usage,
            fits=chosen.fits,
            relative_time=self._seconds(chosen.wish) / max(1e-12, self._seconds(first)),
            host_bytes=self.host_bytes(chosen.layout),
            disk_bytes=self.group.shape[0] * self.drafter.chain_bytes if chosen.layout.chains == "disk" else 0,
            advice=self._advice(chosen.usage),
            factor=chosen.factor,
            tried=tuple(attempts),
        )

    def _try_smallest(self, found: Sequence[Wish], attempts: list[Attempt], plans: list[_Candidate]) -> None:
        """Nothing fits: of the wishes that hold least at least, as many as can be afforded, to tell what would fit.

        Which these are does not depend on capacities: what is found to be the least here is refused with less.
        """
        afford = SMALLEST // min(len(self.group.job.names), 4)
        tried = {attempt.wish for attempt in attempts if attempt.peaks}
        largest = max(device.capacity for device in self.devices)
        for wish in sorted(found, key=self.drafter.least_bytes)[:afford]:
            if wish.label in tried:
                continue
            if plans and self.drafter.least_bytes(wish) > largest * min(plan.factor for plan in plans):
                break
            if self._try(wish, attempts, plans):
                break

    def _advice(self, usage: Usage) -> str:
        """Flags that make the fullest device emptier, though with other results."""
        tune = self.group.job.tune
        fullest = max(range(len(self.devices)), key=lambda number: usage.peaks[number])
        activations = usage.breakdowns[fullest].get("saved activations", 0) + usage.breakdowns[fullest].get("transfers", 0)
        found = ["fewer --nblocks"] if len(self.group.job.names) > 1 else []
        found += ["--momentum 0 (4 bytes a weight)"] if tune.momentum and self.group.shape else []
        found += ["a smaller --seqlen"] if activations * 10 > usage.peaks[fullest] else []
        return f"; or use {' or '.join(found)}" if found else ""

    def _seconds(self, wish: Wish) -> float:
        return relative_seconds(wish, self.group, self.profile, len(self.devices), self.bounds)

    def _attempt(self, wish: Wish, peaks: tuple[int, ...], reason: str) -> Attempt:
        return Attempt(wish=wish.label, seconds=self._seconds(wish), peaks=peaks, reason=reason)

    def _try(self, wish: Wish, attempts: list[Attempt], plans: list[_Candidate]) -> bool:
        try:
            layout, usage = self.best(wish)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "same device" not in str(error):
                raise
            attempts.append(self._attempt(wish, (), f"cannot be cut there: {str(error).splitlines()[0]}"))
            return False
        factor, layout = self.worst(usage), self._with_disk(layout)
        over = [
            f"{device.name} needs {readable_bytes(_need(device, peak))}, {_need(device, peak) - device.capacity} bytes too many"
            for device, peak in zip(self.devices, usage.peaks, strict=True)
            if _need(device, peak) > device.capacity
        ]
        least = int(self.drafter.least_bytes(wish))
        if least:
            took = Fraction(max(usage.peaks), least)
            self.excess[_kind(wish)] = min(took, self.excess.get(_kind(wish), took))
        host = self.host_bytes(layout)
        if host > self.resources.host_bytes:
            over.append(f"the host needs {readable_bytes(host)} of {readable_bytes(self.resources.host_bytes)}")
        attempts.append(self._attempt(wish, usage.peaks, ", ".join(over)))
        plans.append(_Candidate(factor, wish, layout, usage, not over))
        return not over

    def host_bytes(self, layout: Layout) -> int:
        """Host memory for chains, state, results and the largest tensor that is read: counted from shapes, not measured."""
        sites, total = self.profile.weights, 0
        width = self.group.job.dtype.itemsize
        if layout.chains == "host" and self.group.shape:
            total += self.group.shape[0] * self.drafter.chain_bytes
        if ON_HOST in layout.owners.values():
            total += sum(sites.values()) + sum(self.profile.state.values())
        places = layout.replicas[0]
        if ON_HOST in places.values():  # modules that run there
            on_host = [unit for unit in self.profile.units if device_of(places, unit) == ON_HOST]
            total += sum(self.profile.others.get(unit, 0) + layout.at_once * self.profile.kept.get(unit, 0) for unit in on_host)
        specs = self.group.job.skeleton.checkpoint.specs.values()
        return total + sum(sites.values()) // width + max((spec.nbytes for spec in specs), default=0)

    def _with_disk(self, layout: Layout) -> Layout:
        """Chains go to disk when host memory cannot hold them, or is the very device that they are to be kept off."""
        if layout.chains != "host" or not self.group.shape:
            return layout
        short = self.bounds.host_device or self.host_bytes(layout) > self.resources.host_bytes
        return replace(layout, chains="disk") if short else layout


def make_plan(jobs: Sequence[GroupJob], shape: tuple[int, ...], resources: Resources, bounds: Sequence[Bounds], disk_bytes: int) -> Plan:
    """The plan of a run over `jobs`, whose chains have `shape` `[samples, tokens, hidden]` (`()` without text); `bounds`: of each job."""
    kind = resources.devices[0].kind
    plans: dict[object, GroupPlan] = {}
    kinds: dict[str, int] = {}
    for job, limits in zip(jobs, bounds, strict=True):
        key = (signature(job), limits.relative_to(job.names))
        if key in plans:
            plans[key] = replace(plans[key], groups=plans[key].groups + 1)
        else:
            plans[key] = _Search(Rehearsed(job, shape, attention(kind), kind in ("cpu", "sim")), resources, limits).run()
        kinds[job.names[0]] = list(plans).index(key)
    groups = tuple(plans.values())
    factor = max(group.factor for group in groups)
    greedy_fails = any(not group.fits and group.layout.strategy == "greedy" for group in groups)
    devices = []
    for number, device in enumerate(resources.devices):
        fullest = max(groups, key=lambda group: group.usage.peaks[number])
        peak = fullest.usage.peaks[number]
        devices.append(
            DevicePlan(
                name=device.name,
                kind=device.kind,
                capacity_bytes=device.capacity,
                peak_bytes=peak,
                margin_bytes=_need(device, peak) - peak,
                breakdown=fullest.usage.breakdowns[number],
            )
        )
    return Plan(
        fits=all(group.fits for group in groups),
        shape=shape,
        devices=tuple(devices),
        groups=groups,
        kinds=kinds,
        host_bytes=max(group.host_bytes for group in groups),
        disk_bytes=disk_bytes + max(group.disk_bytes for group in groups),
        least=() if factor <= 1 or greedy_fails else tuple(math.ceil(factor * device.capacity) for device in resources.devices),
    )


class NothingFits(UserError):
    """No layout that was tried fits the devices."""


def refusal(plan: Plan) -> NothingFits:
    """Why a plan cannot be run, and what would do."""
    main = plan.main
    if main.factor > 1 and main.layout.strategy == "greedy":
        return NothingFits(f"--placement greedy: {main.tried[-1].reason}; leave it out, or use --placement split")
    if not plan.least:
        needed = readable_bytes(max(group.host_bytes for group in plan.groups if not group.fits))
        return NothingFits(f"the devices are large enough, but {needed} of host memory are needed; free some, or use fewer --nsamples")
    had = ", ".join(f"{device.name} {readable_bytes(device.capacity_bytes)}" for device in plan.devices)
    pairs = zip(plan.devices, plan.least, strict=True)
    least = ", ".join(f"{device.name} {count} bytes ({readable_bytes(count)})" for device, count in pairs)
    what = main.names[0]
    return NothingFits(f"nothing fits: {what} needs more than {had}; the least that would do: {least}{main.advice}")


def describe(layout: Layout) -> str:
    """A layout in a few words."""
    parts = [layout.strategy]
    if len(layout.replicas) > 1:
        parts.append(f"{len(layout.replicas)} replicas")
    parts.append(f"micro-batch {layout.micro_batch}" + (f" x {layout.in_flight} in flight" if layout.in_flight > 1 else ""))
    parts += ["recompute"] if layout.recompute else []
    parts.append(f"inputs on {'the devices' if layout.chains == 'device' else layout.chains}")
    parts += ["tuning state on the host"] if ON_HOST in layout.owners.values() else []
    return ", ".join(parts)


def renamed(layout: Layout, names: Mapping[str, str]) -> Layout:
    """The layout for other blocks of the same kind; `names`: block that it was made for → block."""

    def rename(places: Mapping[str, int]) -> dict[str, int]:
        found = {}
        for path, device in places.items():
            old = next((name for name in names if path == name or path.startswith(name + ".")), "")
            found[names[old] + path.removeprefix(old) if old else path] = device
        return found

    return replace(layout, replicas=tuple(rename(places) for places in layout.replicas), owners=rename(layout.owners))


def signature(job: GroupJob) -> object:
    """Equal for groups that take the same memory under the same layout, up to their names."""
    return tuple(
        (
            structure(block.module),
            tuple((site.name.removeprefix(block.name), scheme) for site, scheme in block.sites),
            block.call.signature,
        )
        for block in job.blocks()
    )
