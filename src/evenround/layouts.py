"""Layouts to consider: what there is to choose from, how fast each would be, and how a block group is cut for each.

A `Wish` says how a group could run in the terms a person uses; `Drafter.layout` makes it a `Layout` with every module and byte in its
place. Cuts are contiguous in execution order and min-max: the fullest device, relative to its capacity, is as empty as can be. What a
module costs comes from a profile; what a rehearsal then finds different is added to the next draft.

`relative_seconds` orders wishes, fastest first. It is arithmetic with round figures of a data-centre card, no promise: only ratios count.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from evenround.memory.place import ON_HOST, Layout, Order
from evenround.rehearsal import Profile, Rehearsed, samples_of_step, unit_of

FLOPS = 2e14
"""Operations a second in the products of matrices."""
MEMORY = 1.5e12
"""Bytes a second on the device: rounding and the update move some 60 bytes a weight."""
LINK = 2e10
"""Bytes a second between two devices, or device and host."""
HOST_MEMORY = 3e10
"""Bytes a second in the host's memory."""
INSIDE = 6
"""Hidden states' worth of tensors that cross a cut inside of a block: residuals, wider tensors of the MLP, and back again."""
WORTH = 1.1
"""How much faster something must be than one device with everything on it, to be taken instead: such figures are not better than that."""
LAUNCH = 3e-3
"""Seconds that the program takes to start one block's forward and backward pass; it starts one after another, whatever the devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """One way to run a group."""

    strategy: str
    replicas: int = 1
    micro_batch: int
    in_flight: int = 1
    recompute: bool = False
    chains_on_device: bool = True
    state_on_host: bool = False

    @property
    def label(self) -> str:
        """As tables print it."""
        parts = [self.strategy if self.replicas == 1 or self.strategy == "share" else f"share of {self.replicas} splits"]
        parts.append(f"{self.micro_batch} samples at once" + (f" x {self.in_flight} in flight" if self.in_flight > 1 else ""))
        parts += ["recompute"] if self.recompute else []
        parts += [] if self.chains_on_device else ["inputs on the host"]
        parts += ["tuning state on the host"] if self.state_on_host else []
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What the user leaves open."""

    strategy: str = "auto"
    placed: Mapping[str, int] = field(default_factory=dict)
    """Module → device, for strategies `map`, `greedy` and where only quantized layers are on devices."""
    chains_on_device: bool = True
    """False: chained inputs stay off the devices."""
    host_device: bool = False
    """The device is the host itself: nothing can be moved from one to the other."""

    def relative_to(self, names: Sequence[str]) -> object:
        """Equal for groups whose bounds are the same but for the names of their blocks."""
        numbers = {name: number for number, name in enumerate(names)}

        def relative(path: str) -> tuple[int, str]:
            root = next((name for name in names if path == name or path.startswith(name + ".")), None)
            return (-1, path) if root is None else (numbers[root], path.removeprefix(root))

        placed = tuple(sorted((relative(path), device) for path, device in self.placed.items()))
        return self.strategy, placed, self.chains_on_device, self.host_device, self.order

    order: Order | None = None
    """Only this one, if there is such a wish: a run that was begun with it goes on with it, and its bytes stay what they would be."""


def _halves(size: int) -> list[int]:
    sizes = [size]
    while sizes[-1] > 1:
        sizes.append(math.ceil(sizes[-1] / 2))
    return sizes


def wishes(group: Rehearsed, count: int, bounds: Bounds) -> list[Wish]:
    """Everything that could be tried on `count` devices, in no order."""
    if not group.shape:
        return [Wish(strategy="single", micro_batch=1, chains_on_device=False)]
    step, batch = samples_of_step(group), min(group.job.tune.batch_size, group.shape[0])
    largest = 1 if group.job.is_head else batch  # logits are a vocabulary wide
    blocks = len(group.job.names)
    found = []
    for strategy, replicas in list(_strategies(group, count, bounds)) or [("single", 1)]:  # nothing to divide: one sample, one module
        share = min(largest, math.ceil(step / replicas))
        sizes = [1] if group.job.is_head else _halves(share)
        flights = [(size, 1) for size in sizes]
        if strategy == "pipeline":
            whole = [(size, math.ceil(step / size)) for size in _halves(batch) if size < step]
            flights = [*whole, *((size, count) for size, flight in whole if flight > count)]
        for micro_batch, in_flight in flights:
            for recompute in (False, True) if blocks > 1 else (False,):
                for on_device in (True, False) if bounds.chains_on_device else (False,):
                    for on_host in (False,) if bounds.host_device else (False, True):
                        found.append(
                            Wish(
                                strategy=strategy,
                                replicas=replicas,
                                micro_batch=micro_batch,
                                in_flight=in_flight,
                                recompute=recompute,
                                chains_on_device=on_device,
                                state_on_host=on_host,
                            )
                        )
    return [wish for wish in found if bounds.order in (None, (wish.micro_batch, wish.replicas))] or found


def _strategies(group: Rehearsed, count: int, bounds: Bounds) -> Iterator[tuple[str, int]]:
    step = samples_of_step(group)
    if bounds.placed:
        yield bounds.strategy, 1
        return
    wanted = (bounds.strategy,) if bounds.strategy != "auto" else ("single", "share", "split", "pipeline")
    if "single" in wanted or count == 1:
        yield "single", 1
    if count > 1 and "share" in wanted and step > 1:
        yield "share", min(count, step)
    if count > 1 and "split" in wanted and not group.job.is_head:
        yield "split", 1
        yield from (("split", groups) for groups in range(2, count) if count % groups == 0 and groups <= step)
    if count > 1 and "pipeline" in wanted and step > 1 and not group.job.is_head:
        yield "pipeline", 1


def moves(placed: Mapping[str, int], profile: Profile) -> int:
    """Modules that an explicit map puts on another device than their parent: what they get and give crosses."""
    return sum(device_of(placed, unit) != device_of(placed, unit.rpartition(".")[0]) for unit in profile.units) if placed else 0


def device_of(placed: Mapping[str, int], module: str) -> int:
    """The nearest named ancestor decides, as in `Layout.device_of`."""
    while module not in placed and module:
        module = module.rpartition(".")[0]
    return placed.get(module, 0)


def relative_seconds(wish: Wish, group: Rehearsed, profile: Profile, count: int, bounds: Bounds) -> float:
    """Rough seconds of one step on cards of a data centre; to be compared, not believed."""
    width = group.job.dtype.itemsize
    weights = sum(profile.weights.values()) / width
    step, tokens = samples_of_step(group), group.shape[1] if group.shape else 0
    stages = count // wish.replicas if wish.strategy in ("split", "pipeline") else 1
    passes = math.ceil(step / wish.micro_batch)
    products = 6 * weights * step * tokens / FLOPS * (4 / 3 if wish.recompute else 1)
    if wish.strategy == "pipeline":
        products *= (wish.in_flight + stages - 1) / (wish.in_flight * stages)
    products /= wish.replicas
    rounding = 60 * weights / MEMORY / max(wish.replicas, stages)
    crossing: float = step * profile.chain * (0 if wish.chains_on_device else 2)
    # Every cut has a link of its own; only where one device works at a time they wait for each other.
    cuts = max(0, stages - 1) if wish.strategy == "split" else min(1, stages - 1)
    wide = 1 if len(group.job.names) >= stages else INSIDE
    crossing += 4 * step * profile.chain * cuts * wide / wish.replicas
    crossing += 4 * width * weights * (wish.replicas - 1) / wish.replicas
    crossing += (6 + 18) * weights if wish.state_on_host else 0
    crossing += 4 * step * profile.chain * moves(bounds.placed, profile)
    on_host = sum(kept for unit, kept in profile.kept.items() if device_of(bounds.placed, unit) == ON_HOST)
    rounding += 6 * step * on_host / HOST_MEMORY
    started = passes * len(group.job.names) * LAUNCH * (4 / 3 if wish.recompute else 1)
    return max(products, started) + rounding + crossing / LINK


class Drafter:
    """Makes layouts of one group for devices with these capacities."""

    def __init__(self, group: Rehearsed, profile: Profile, capacities: Sequence[int], bounds: Bounds) -> None:
        self.group, self.profile, self.bounds = group, profile, bounds
        self.shares = [max(1e-6, capacity / max(1, *capacities)) for capacity in capacities]  # a full card has next to nothing, not zero
        self.units = list(profile.units)
        self.sites: dict[str, list[str]] = {}
        """Unit → sites that go where it goes."""
        for site in profile.weights:
            self.sites.setdefault(unit_of(site, profile.units), []).append(site)

    @property
    def count(self) -> int:
        return len(self.shares)

    @property
    def chain_bytes(self) -> int:
        """Of one sample in all chains that live at once: inputs, targets, and outputs where these are the next inputs."""
        job = self.group.job
        count = (2 if job.tune.quantized_inputs else 1) if job.is_head else (3 if job.tune.quantized_inputs else 2)
        return count * self.profile.chain

    @property
    def largest(self) -> int:
        """The device with most memory, the first of these."""
        return self.shares.index(max(self.shares))

    def least_bytes(self, wish: Wish) -> float:
        """Bytes that all devices together hold at the end of a forward pass at least, over as many devices as share them."""
        profile = self.profile
        at_once = wish.micro_batch * wish.in_flight
        kept = len(self.group.job.names) * profile.chain if wish.recompute else sum(profile.kept.values())
        replica = at_once * kept + sum(profile.replica.values()) / 2 + sum(profile.others.values())
        state = 0 if wish.state_on_host else sum(profile.state.values()) + sum(profile.weights.values())
        chains = self.group.shape[0] * self.chain_bytes if wish.chains_on_device and self.group.shape else 0
        return (wish.replicas * replica + state + chains) / (1 if wish.strategy == "single" else sum(self.shares))

    def layout(self, wish: Wish, extra: Sequence[float] | None = None) -> Layout:
        """The layout without chains on devices. `extra`: bytes on each device that the profile does not know (see `refined`)."""
        sites = self.profile.weights
        owners: dict[str, int] = dict.fromkeys(sites, ON_HOST) if wish.state_on_host else {}
        if self.bounds.placed:
            replicas: tuple[Mapping[str, int], ...] = ({"": 0, **self.bounds.placed},)
        elif wish.strategy == "single":
            replicas = ({"": self.largest},)
        elif wish.strategy == "share":
            replicas = tuple({"": device} for device in range(wish.replicas))
        else:
            each = self.count // wish.replicas
            replicas = tuple(self._cut(wish, range(at * each, (at + 1) * each), extra) for at in range(wish.replicas))
        if not wish.state_on_host and len(replicas) > 1:
            owners = self._dealt_out()
        return Layout(
            strategy=wish.strategy,
            replicas=replicas,
            owners=owners,
            micro_batch=wish.micro_batch,
            in_flight=wish.in_flight,
            recompute=wish.recompute,
            chains="host",
        )

    def _dealt_out(self) -> dict[str, int]:
        """Sites, largest first, to the device that is emptiest for its capacity."""
        held = [0.0] * self.count
        owners = {}
        for site in sorted(self.profile.weights, key=lambda name: -self.profile.weights[name]):
            cost = self.profile.weights[site] + self.profile.state[site]
            best = min(range(self.count), key=lambda device: ((held[device] + cost) / self.shares[device], device))
            held[best] += cost
            owners[site] = best
        return owners

    def _cost(self, unit: str, wish: Wish) -> float:
        profile = self.profile
        at_once = wish.micro_batch * wish.in_flight
        sites = self.sites.get(unit, ())
        cost: float = profile.others.get(unit, 0) + sum(profile.replica[site] for site in sites)
        cost += 0 if wish.recompute else at_once * profile.kept.get(unit, 0)
        if wish.recompute and unit in self.group.job.names:
            cost += at_once * profile.chain
        if not wish.state_on_host and wish.replicas == 1:
            cost += sum(profile.weights[site] + profile.state[site] for site in sites)
        return cost

    def _cut(self, wish: Wish, devices: Sequence[int], extra: Sequence[float] | None) -> dict[str, int]:
        """Units in order to `devices` in order, so that the fullest is as empty as can be."""
        costs = [self._cost(unit, wish) for unit in self.units]
        low, high = 0.0, sum(costs) + sum(abs(value) for value in extra or ()) + 1
        high /= min(self.shares[device] for device in devices)
        ends = None
        for _ in range(60):
            middle = (low + high) / 2
            found = _packed(costs, [middle * self.shares[device] - (extra[device] if extra else 0) for device in devices])
            if found is None:
                low = middle
            else:
                high, ends = middle, found
        assert ends is not None
        places = {}
        start = 0
        for device, end in zip(devices, ends, strict=True):
            places.update(dict.fromkeys(self.units[start:end], device))
            start = end
        return {"": devices[0], **places}

    def costs_of(self, layout: Layout, wish: Wish) -> list[float]:
        """What the profile says that each device holds under a cut."""
        held = [0.0] * self.count
        for replica in layout.replicas:
            for unit in self.units:
                device = replica[unit] if unit in replica else replica[""]
                if device != ON_HOST:
                    held[device] += self._cost(unit, wish)
        return held

    def with_chains(self, layout: Layout, needed: Sequence[int]) -> Layout:
        """The chains' samples on the devices, where `needed` bytes are taken already: the fullest is then as empty as can be."""
        samples, size = self.group.shape[0], self.chain_bytes
        used = [number for number in range(self.count) if layout.strategy != "single" or number == self.largest]
        rows = [0] * self.count
        low, high = 0.0, (max(needed) + samples * size) / min(self.shares[number] for number in used) + 1
        for _ in range(60):
            middle = (low + high) / 2
            fits = [
                max(0, int((middle * self.shares[number] - needed[number]) // size)) if number in used else 0
                for number in range(self.count)
            ]
            if sum(fits) >= samples:
                high, rows = middle, fits
            else:
                low = middle
        surplus = sum(rows) - samples
        for number in reversed(range(self.count)):
            taken = min(surplus, rows[number])
            rows[number] -= taken
            surplus -= taken
        return replace(layout, chains="device", chain_rows=tuple(rows))


def _packed(costs: Sequence[float], limits: Sequence[float]) -> list[int] | None:
    """Where each device's run of units ends if every one takes as many as its limit allows; None if some remain."""
    ends, at = [], 0
    for limit in limits:
        held = 0.0
        while at < len(costs) and held + costs[at] <= limit:
            held += costs[at]
            at += 1
        ends.append(at)
    return ends if at == len(costs) else None


def greedy(layers: Mapping[str, float], free: Sequence[float]) -> dict[str, int]:
    """auto-round's allocator, for those who compare: layer (in block order) → device.

    layers: bytes that each needs. free: bytes free on each device.
    The largest layers go one each to the last device, the last but one, … ; each other layer, by size, to the device with the highest
    (free / needed) + 1 for each neighbour that is on it, among those with room; where none has room, to the one with most free. Ties go to
    the later device.
    """
    names = list(layers)
    left, placed = list(free), dict[str, int]()
    ordered = sorted(names, key=lambda name: -layers[name])
    for name, device in zip(ordered, reversed(range(len(free))), strict=False):
        placed[name] = device
        left[device] -= layers[name]
    for name in ordered[len(free) :]:
        at = names.index(name)
        around = [names[place] for place in (at - 1, at + 1) if 0 <= place < len(names)]

        def score(device: int, name: str = name, around: Sequence[str] = tuple(around)) -> float:
            return left[device] / layers[name] + sum(placed.get(neighbour) == device for neighbour in around)

        room = [device for device in range(len(free)) if left[device] >= layers[name]]
        rank: Callable[[int], float] = score if room else left.__getitem__
        best = max(room or range(len(free)), key=lambda device: (rank(device), device))
        placed[name] = best
        left[best] -= layers[name]
    return placed
