"""Draw what every device holds, operation by operation, while one block group is tuned: a picture of the memory plan.

    python tools/timeline.py MODEL_OR_CONFIG --device 4x80GiB [flags of quantize that change memory] -o FILE.svg

The plan is made as `evenround plan` makes it; its layout for the group that decides is then rehearsed once more, over tensors without
values, and after every operation the bytes in use are written down by category. Loops make two rounds, as in the plan: the picture is one
optimizer step with everything around it. The SVG is written by hand: a picture of some kilobytes needs no plotting library.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args
from xml.sax.saxutils import escape

import torch

from evenround import outlook as outlook_module
from evenround import rehearsal
from evenround.api import request
from evenround.config import RECIPES
from evenround.errors import UserError, readable_bytes
from evenround.group import Work, round_group, tune_group
from evenround.job import Job, _skeleton, compute_dtype, formats_and_schemes, plan_job
from evenround.memory.devices import attention, parse_devices
from evenround.memory.place import Layout, Placement
from evenround.memory.simulate import Category, SimulatedDevices
from evenround.plan import GroupPlan, Plan, describe
from evenround.rehearsal import Rehearsed

COLORS: dict[str, str] = {
    "weights": "#4477aa",
    "tuning state": "#aa5599",
    "chained inputs": "#66ccee",
    "saved activations": "#228833",
    "gradients": "#ddaa33",
    "transfers": "#ee6677",
    "other": "#999999",
}
"""From the bottom of the stack to its top."""

WIDTH, ROW, GAP, LEFT, TOP = 1000, 120, 26, 64, 92
"""Of the plots in pixels: their width, the height of each, what is between them, what is left of them and above them."""
BINS = 500
"""The operations are cut into so many runs; of each run the least and the most that a device holds are drawn."""

Sample = tuple[int, ...]
"""Bytes of each category, in the order of `COLORS`."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What a rehearsal held after each operation."""

    phases: tuple[tuple[str, int], ...]
    """Name and first operation, in order."""
    samples: tuple[tuple[Sample, ...], ...]
    """For each operation, of each device."""

    @property
    def peaks(self) -> tuple[int, ...]:
        """Most bytes that were seen on each device."""
        return tuple(max(sum(sample) for sample in device) for device in zip(*self.samples, strict=True))


class Recorder(SimulatedDevices):
    """Simulated devices that write down what they hold after every operation, and in which phase that was."""

    def __init__(self, count: int) -> None:
        super().__init__([rehearsal.UNLIMITED] * count, values=False)
        self.samples: list[tuple[Sample, ...]] = []
        self.phases: list[tuple[str, int]] = []
        self.laps: list[str] = []
        self.begin("load")

    def begin(self, phase: str) -> None:
        """From the next operation on it is `phase`."""
        if not self.phases or self.phases[-1][0] != phase:
            self.phases.append((phase, len(self.samples)))

    def lap(self, done: str) -> None:
        """`tune_group` says which part of its work is done."""
        self.laps.append(done)
        self.begin({"load": "float reference", "reference": "search scales"}.get(done, "judge"))

    @contextlib.contextmanager
    def label(self, category: Category) -> Iterator[None]:
        """What memory is for tells where the code is, between the laps."""
        now = self.phases[-1][0]
        if self.laps[-1:] == ["reference"]:
            if category == "weights" and now == "search scales":
                self.begin("judge plain rounding")
            elif category == "tuning state" and now == "judge plain rounding":
                self.begin("step forward")
            elif category == "saved activations" and now == "step backward" and torch._C._current_graph_task_id() == -1:
                self.begin("step forward")
            elif category == "weights" and now == "update":
                self.begin("judge")
        with super().label(category):
            yield

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch._C._current_graph_task_id() != -1 and self.phases[-1][0] == "step forward":
            self.begin("step backward")
        result = super()._dispatch(func, args, kwargs)
        self.samples.append(tuple(tuple(device.used[category] for category in COLORS) for device in self._devices))
        return result


def record(job: Job) -> tuple[Plan, GroupPlan, Timeline]:
    """The plan of `job`, its group that decides, and what that group's rehearsal holds after each operation."""
    plan = plan_job(job)
    group = _rehearsed(job, plan)
    layout = replace(plan.main.layout, chains="host") if plan.main.layout.chains == "disk" else plan.main.layout
    devices = Recorder(len(plan.devices))
    _run(group, layout, devices)
    return plan, plan.main, Timeline(phases=tuple(devices.phases), samples=tuple(devices.samples))


def _rehearsed(job: Job, plan: Plan) -> Rehearsed:
    """The group that decides, as the plan rehearsed it."""
    machine, skeleton = parse_devices(job.device.device, planning=True), _skeleton(job)
    _, schemes = formats_and_schemes(job, skeleton)
    first = machine.devices[0]
    dtype = compute_dtype(job, skeleton, schemes, first.where or torch.device(first.kind), _Quiet())
    tokens = None
    if plan.shape:
        samples, length, _ = plan.shape
        tokens = (torch.arange(length) + torch.arange(samples)[:, None]) % skeleton.config.get_text_config().vocab_size
    calls, _ = outlook_module._calls(skeleton, tokens, None, dtype)
    jobs = outlook_module.group_jobs(skeleton, schemes, job.tune, calls, dtype, None)
    chosen = next(item for item in jobs if item.names == plan.main.names)
    return Rehearsed(chosen, plan.shape, attention(first.kind))


class _Quiet:
    """Progress of which only notes could come."""

    def note(self, text: str) -> None: ...


def _run(group: Rehearsed, layout: Layout, devices: Recorder) -> None:
    """As `rehearse` does it."""
    math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with devices, math if group.attention == "math" else contextlib.nullcontext():
        place = Placement(layout, [torch.device("cpu", number) for number in range(len(devices.capacities))], devices.label)
        if not group.shape:
            round_group(group.job, place, Work(draw=lambda: (), read=rehearsal._reader(group), rehearse=True, lap=devices.lap))
            return
        chosen = rehearsal._chosen(group, layout)
        work = Work(
            draw=lambda: chosen,
            read=rehearsal._reader(group),
            rehearse=True,
            on_step=lambda iteration, loss: devices.begin("update"),
            lap=devices.lap,
        )
        tune_group(replace(group.job, tokens=None, compiled=None), place, rehearsal._chains(group, place, devices), work)


def draw(plan: Plan, group: GroupPlan, line: Timeline, title: str) -> str:
    """The picture, as the text of an SVG file."""
    count = len(line.samples)
    height = TOP + len(plan.devices) * (ROW + GAP) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 24} {height}" font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{LEFT}" y="20" font-size="15">{escape(title)}</text>',
        f'<text x="{LEFT}" y="38" fill="#555">{escape(describe(group.layout))}</text>',
        *_legend(),
    ]
    for number, device in enumerate(plan.devices):
        samples = [sample[number] for sample in line.samples]
        top = TOP + number * (ROW + GAP)
        parts += _row(device.name, samples, device.capacity_bytes, top)
    parts += _phases(line, count, TOP + len(plan.devices) * (ROW + GAP) - GAP)
    parts.append(
        f'<text x="{LEFT}" y="{height - 10}" fill="#555">operations of a rehearsal, 1 to {count}; every loop makes two rounds, there is '
        "one optimizer step</text>"
    )
    return "\n".join([*parts, "</svg>\n"])


def _legend() -> list[str]:
    parts, at = [], LEFT
    for name, color in COLORS.items():
        parts.append(f'<rect x="{at}" y="48" width="10" height="10" fill="{color}"/><text x="{at + 14}" y="57">{name}</text>')
        at += 30 + 7 * len(name)
    return parts


def _row(name: str, samples: Sequence[Sample], capacity: int, top: int) -> list[str]:
    """One device: stacked areas, the axis in GiB, the capacity as a line."""
    peak = max(sum(sample) for sample in samples)
    scale = ROW / max(capacity * 1.04, peak)
    bottom = top + ROW
    points = _thinned(samples)
    parts = [f'<g data-device="{escape(name)}" data-peak-bytes="{peak}" data-capacity-bytes="{capacity}">']
    for upto in range(len(COLORS), 0, -1):  # the whole stack first, then what is below its top category, …
        heights = [(at, bottom - round(sum(sample[:upto]) * scale, 1)) for at, sample in points]
        if any(sample[upto - 1] for _, sample in points):
            parts.append(f'<path fill="{list(COLORS.values())[upto - 1]}" d="{_area(heights, len(samples), bottom)}"/>')
    line, highest = bottom - capacity * scale, bottom - peak * scale
    parts += [
        f'<path d="M{LEFT} {line:.1f}h{WIDTH}" stroke="#b00" stroke-dasharray="6 3"/>',
        f'<path d="M{LEFT} {top}V{bottom}h{WIDTH}" stroke="#333" fill="none"/>',
        f'<text x="{LEFT - 6}" y="{line + 9:.1f}" text-anchor="end" fill="#b00">{_gib(capacity)}</text>',
        f'<path d="M{LEFT - 4} {highest:.1f}h4" stroke="#333"/>',
        f'<text x="{LEFT - 6}" y="{max(highest + 4, line + 23):.1f}" text-anchor="end">{_gib(peak)}</text>',
        f'<text x="{LEFT - 6}" y="{bottom}" text-anchor="end">0 GiB</text>',
        f'<text x="{LEFT}" y="{top - 5}">{escape(name)}: peak {readable_bytes(peak)} of {readable_bytes(capacity)}</text>',
        "</g>",
    ]
    return parts


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g}"


def _thinned(samples: Sequence[Sample]) -> list[tuple[int, Sample]]:
    """Of each run of operations the one with least and the one with most bytes, in their order, with their numbers."""
    size = max(1, -(-len(samples) // BINS))
    kept = []
    for start in range(0, len(samples), size):
        run = range(start, min(start + size, len(samples)))
        ends = {min(run, key=lambda at: sum(samples[at])), max(run, key=lambda at: sum(samples[at]))}
        kept += [(at, samples[at]) for at in sorted(ends)]
    return kept


def _area(heights: Sequence[tuple[int, float]], count: int, bottom: int) -> str:
    """A path of steps from `bottom` up to each height, closed; steps that cannot be seen are left out."""
    parts, before = [f"M{LEFT} {bottom}"], float(bottom)
    for at, height in heights:
        if abs(height - before) >= 0.2:
            parts.append(f"H{LEFT + at * WIDTH / count:.1f}V{height:.1f}".replace(".0", ""))
            before = height
    return "".join([*parts, f"H{LEFT + WIDTH}V{bottom}z"])


def _phases(line: Timeline, count: int, bottom: int) -> list[str]:
    """A line where each phase begins, and its name where there is room for it."""
    parts = []
    ends = [*(start for _, start in line.phases[1:]), count]
    for (name, start), end in zip(line.phases, ends, strict=True):
        left, right = (LEFT + at * WIDTH / count for at in (start, end))
        parts.append(f'<path d="M{left:.1f} {TOP - 4}V{bottom + 8}" stroke="#333" stroke-width=".6" stroke-dasharray="2 2"/>')
        short = next((text for text in (name, name.split()[-1]) if 6 * len(text) < right - left), "")
        text = f'<text x="{left + 3:.1f}" y="{bottom + 15}" font-size="11">{escape(short)}</text>' if short else ""
        parts.append(f'<g data-phase="{escape(name)}" data-first="{start}"><title>{escape(name)}</title>{text}</g>')
    return parts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="a picture of what each device holds while a block group is tuned")
    parser.add_argument("model", help="model directory, hub id, or config.json")
    parser.add_argument("-o", "--output", type=Path, required=True, help="SVG file to write")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--scheme", default="W4A16")
    parser.add_argument("--recipe", default="default", choices=sorted(RECIPES))
    parser.add_argument("--placement", default="auto")
    parser.add_argument("--output_device", choices=["cpu"])
    parser.add_argument("--compute_dtype", default="auto")
    parser.add_argument("--low_gpu_mem_usage", action="store_true")
    parser.add_argument("--title", help="default: model, scheme and devices")
    for name in ("group_size", "nblocks", "nsamples", "seqlen", "batch_size", "gradient_accumulate_steps"):
        parser.add_argument(f"--{name}", type=int, default=argparse.SUPPRESS)
    given = vars(parser.parse_args(arguments))
    output, title, model, device = (given.pop(name) for name in ("output", "title", "model", "device"))
    try:
        job, _ = request(model, device_map=device, **given)
        plan, group, line = record(job)
    except UserError as error:
        sys.exit(f"error: {error}")
    name = Path(model).parent.name if Path(model).name == "config.json" else Path(model).name
    blocks = f", {len(group.names)} blocks together" if len(group.names) > 1 else ""
    output.write_text(draw(plan, group, line, title or f"{name} {given['scheme']}{blocks}, {device}"), encoding="utf-8")
    print(f"{output}: {len(line.samples)} operations, {output.stat().st_size} bytes")
    for item, seen, planned in zip(plan.devices, line.peaks, group.usage.peaks, strict=True):
        print(f"{item.name}: {seen} bytes at most, {planned} planned")
    return 0


assert set(COLORS) == set(get_args(Category))


if __name__ == "__main__":
    sys.exit(main())
