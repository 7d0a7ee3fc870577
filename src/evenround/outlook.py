"""From what the user decided to the plan of the whole run: nothing is read but config.json and headers.

How blocks are called is found by the same `embed` that the run uses, on two rows of text, with made-up embeddings that take no memory.
"""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from evenround.blocks import Compiled
from evenround.calls import BlockCall, embed
from evenround.config import PLACEMENTS, DeviceConfig, TuneConfig
from evenround.errors import UserError, nearest
from evenround.group import GroupJob, group_names
from evenround.layouts import Bounds
from evenround.memory.devices import Device, Machine, available_host_bytes
from evenround.memory.place import ON_HOST, Order
from evenround.memory.stage import accelerators
from evenround.model import Skeleton
from evenround.plan import Plan, Resources, make_plan
from evenround.rehearsal import UNLIMITED
from evenround.scheme import Scheme


def outlook(
    skeleton: Skeleton,
    schemes: Mapping[str, Scheme | None],
    tune: TuneConfig,
    tokens: Tensor | None,
    mask: Tensor | None,
    dtype: torch.dtype,
    machine: Machine,
    config: DeviceConfig,
    disk_bytes: int,
    orders: Mapping[str, Order] = MappingProxyType({}),
) -> Plan:
    """The plan of a run on `machine`.

    tokens, mask: `[samples, tokens]` of the calibration text, None without text; made-up ones of the same shape do.
    disk_bytes: of the finished checkpoints. orders: first block of a group → the order of sums that it is to keep, if that fits.
    Raises `UserError` where a map names what is not there.
    """
    calls, width = _calls(skeleton, tokens, mask, dtype)
    shape = () if tokens is None else (*tokens.shape, width)
    jobs = group_jobs(skeleton, schemes, tune, calls, dtype, mask)
    disk = disk_bytes + (4 * shape[0] * shape[1] * width * dtype.itemsize if shape else 0)
    host = available_host_bytes() if machine.here else UNLIMITED  # of the machine that is planned for, only the devices are known
    resources = Resources(devices=accelerators(machine), host_bytes=host)
    _check_names(jobs, machine, config)
    return _keeping(orders, jobs, shape, resources, machine, config, disk)


def replan(
    jobs: Sequence[GroupJob],
    shape: tuple[int, ...],
    devices: tuple[Device, ...],
    machine: Machine,
    config: DeviceConfig,
    orders: Mapping[str, Order],
) -> Plan:
    """The plan of what is left, for devices that are not what they were; sums stay in the same order if that fits."""
    resources = Resources(devices=devices, host_bytes=available_host_bytes())
    return _keeping(orders, jobs, shape, resources, machine, config, 0)


def _keeping(
    orders: Mapping[str, Order],
    jobs: Sequence[GroupJob],
    shape: tuple[int, ...],
    resources: Resources,
    machine: Machine,
    config: DeviceConfig,
    disk: int,
) -> Plan:
    if orders:
        kept = make_plan(jobs, shape, resources, bounds_for(jobs, machine, config, orders), disk)
        if kept.fits:
            return kept
    return make_plan(jobs, shape, resources, bounds_for(jobs, machine, config), disk)


def group_jobs(
    skeleton: Skeleton,
    schemes: Mapping[str, Scheme | None],
    tune: TuneConfig,
    calls: Sequence[BlockCall],
    dtype: torch.dtype,
    mask: Tensor | None,
    tokens: Tensor | None = None,
    compiled: Compiled | None = None,
) -> list[GroupJob]:
    """What is to be done with each group, in order."""
    bare = BlockCall((), {}, None, False)
    by_name = dict(zip(skeleton.block_names, calls, strict=True)) if calls else {}
    return [
        GroupJob(
            skeleton=skeleton,
            names=names,
            calls=tuple(by_name.get(name, bare) for name in names),
            schemes=schemes,
            tune=tune,
            dtype=dtype,
            mask=mask,
            tokens=tokens,
            compiled=compiled,
        )
        for names in group_names(skeleton, schemes, tune.nblocks)
    ]


def _calls(skeleton: Skeleton, tokens: Tensor | None, mask: Tensor | None, dtype: torch.dtype) -> tuple[tuple[BlockCall, ...], int]:
    if tokens is None:
        return (), 0
    rows = [0, len(tokens) - 1] if mask is None else [int(mask.sum(1).argmin()), 0]
    specs = skeleton.checkpoint.specs

    def made_up(name: str) -> Tensor:
        """Other values for other tokens, in no memory to speak of."""
        first, *rest = specs[name].shape or (1,)
        column = (torch.arange(first) % 61 / 61).to(dtype if specs[name].dtype.is_floating_point else specs[name].dtype)
        return column.reshape(-1, *[1] * len(rest)).expand(specs[name].shape)

    embedded = embed(skeleton, tokens[rows], None if mask is None else mask[rows], dtype, read=made_up)
    return tuple(call.for_any_sample() for call in embedded.calls), embedded.width


def bounds_for(
    jobs: Sequence[GroupJob], machine: Machine, config: DeviceConfig, orders: Mapping[str, Order] = MappingProxyType({})
) -> list[Bounds]:
    """What `config` leaves open for each group. Raises `UserError` for a placement that makes no sense."""
    devices = accelerators(machine)
    host_device = devices[0].kind == "cpu"
    strategy, layers = _placement(config.placement, machine, len(devices))
    if config.output_device is not None and (layers or strategy != "auto"):
        raise UserError(f"--output_device {config.output_device} places modules, and so does a map or --placement; give one")
    bounds = []
    for job in jobs:
        placed: dict[str, int] = {}
        if layers:
            placed = _resolved(job, layers)
        elif config.output_device == "cpu" and not host_device:
            sites = [site.name for block in job.blocks() for site, _ in block.sites]
            placed = {"": ON_HOST, **{name: number % len(devices) for number, name in enumerate(sites)}}
        bounds.append(
            Bounds(
                strategy="map" if placed else strategy,
                placed=placed,
                chains_on_device=not config.low_gpu_mem_usage,
                host_device=host_device,
                order=orders.get(job.names[0]),
            )
        )
    return bounds


def _check_names(jobs: Sequence[GroupJob], machine: Machine, config: DeviceConfig) -> None:
    """Raise `UserError` for a map that names what is in no block."""
    _, layers = _placement(config.placement, machine, len(accelerators(machine)))
    modules = [path for job in jobs for path in _modules(job)] if layers else []
    for name in layers:
        if not any(_matches(name, path) for path in modules):
            close = difflib.get_close_matches(name, {path.partition(".layers.")[2].partition(".")[2] or path for path in modules}, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UserError(f"the device map names {name!r}, which is no module of a block{hint}")


def _modules(job: GroupJob) -> list[str]:
    return [path for root in job.names for path, _ in job.skeleton.model.get_submodule(root).named_modules(prefix=root)]


def _placement(wish: str, machine: Machine, count: int) -> tuple[str, Mapping[str, int]]:
    """Strategy and explicit map (name or regex → device number)."""
    if wish in PLACEMENTS:
        if machine.layers and wish != "auto":
            raise UserError(f"--placement {wish} and a map in --device contradict each other; give one")
        host = next((number for number, device in enumerate(machine.devices) if device.kind == "cpu"), None)
        only_host = len(machine.devices) == 1
        layers = {name: ON_HOST if number == host and not only_host else number for name, number in machine.layers.items()}
        return wish, layers
    if not wish.lstrip().startswith("{"):
        known = f"{', '.join(PLACEMENTS)}, nor a JSON map{nearest(wish, PLACEMENTS)}"
        raise UserError(f'--placement {wish!r} is not one of {known}; a map looks so: {{"mlp.down_proj": 1}}')
    if machine.layers:
        raise UserError("--placement and --device both hold a map; give one")
    try:
        table = json.loads(wish, object_pairs_hook=_unique)
    except ValueError as error:
        raise UserError(f"--placement {wish!r} is no JSON object: {error}") from None
    if not table:
        raise UserError('--placement {} names no module; leave it out, or give a map such as {"mlp.down_proj": 1}')
    for name, number in table.items():
        if number != "cpu" and (isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count):
            raise UserError(
                f'--placement: {name!r} goes to {number!r}; give the number of a device of --device, 0 to {count - 1}, or "cpu"'
            )
    return "map", {name: ON_HOST if number == "cpu" else number for name, number in table.items()}


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError(f"a name occurs twice among {', '.join(name for name, _ in pairs)}")
    return dict(pairs)


def _resolved(job: GroupJob, layers: Mapping[str, int]) -> dict[str, int]:
    placed = {}
    for path in _modules(job):
        device = next((device for name, device in layers.items() if _matches(name, path)), None)
        if device is not None:
            placed[path] = device
    return placed or {"": 0}


def _matches(name: str, path: str) -> bool:
    """Whether `name` is `path`, its last dotted parts, or a regular expression for one of these."""
    if path == name or path.endswith("." + name):
        return True
    parts = path.split(".")
    try:
        return any(re.fullmatch(name, ".".join(parts[start:])) for start in range(len(parts)))
    except re.error as error:
        raise UserError(f"the device map names {name!r}, which is neither a module nor a regular expression: {error}") from None
