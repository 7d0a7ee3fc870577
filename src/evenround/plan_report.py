"""A plan as people look at it: a bar for each device, what fills it, how each kind of block group runs, what was tried."""

from rich.table import Table
from rich.text import Text

from evenround.errors import readable_bytes
from evenround.plan import Attempt, DevicePlan, GroupPlan, Plan, describe, refusal

COLORS = {
    "weights": "blue",
    "tuning state": "magenta",
    "saved activations": "green",
    "gradients": "yellow",
    "chained inputs": "cyan",
    "transfers": "red",
    "other": "white",
}
"""Category → color of its piece of a bar."""

WIDTH = 40
"""Characters of a full bar."""

SHOWN = 8
"""Attempts that are printed; `--json` has all."""


def render_plan(plan: Plan, full: bool = False) -> list[object]:
    """What rich prints for `evenround plan` (`full`), and for `quantize` before it begins."""
    main = plan.main
    parts: list[object] = [Text(f"plan: {describe(main.layout)}", style="bold"), _devices(plan)]
    if len(plan.groups) > 1 or full:
        parts.append(_groups(plan))
    if full:
        parts.append(_legend())
        resources = f"host memory {readable_bytes(plan.host_bytes)}, disk {readable_bytes(plan.disk_bytes)}"
        parts.append(f"{resources}; time of a step against one device that is large enough: about x {main.relative_time:.2f}")
        parts.append(_tried(main))
    if not plan.fits:
        parts.append(Text(str(refusal(plan)), style="bold red"))
    return parts


def _devices(plan: Plan) -> Table:
    table = Table()
    for column in ("device", "peak", "margin", "capacity", "of the capacity", "peak consists of"):
        table.add_column(column, overflow="fold", no_wrap=column != "peak consists of")
    for device in plan.devices:
        shares = sorted(device.breakdown.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{name} {readable_bytes(held)}" for name, held in shares if held * 50 > device.peak_bytes)
        sizes = (device.peak_bytes, device.margin_bytes, device.capacity_bytes)
        table.add_row(device.name, *(readable_bytes(size) for size in sizes), _bar(device), shown)
    return table


def _bar(device: DevicePlan) -> Text:
    """The capacity as a bar: what the peak consists of, the margin, what is left; what does not fit is cut off."""
    scale = WIDTH / max(1, device.capacity_bytes)
    bar, drawn, total = Text(), 0, 0
    pieces = [(held, COLORS.get(name, "white"), "█") for name, held in device.breakdown.items()]
    for held, color, mark in [*pieces, (device.margin_bytes, "white", "░")]:
        total += held
        upto = min(WIDTH, round(total * scale))
        bar.append(mark * (upto - drawn), style=color)
        drawn = upto
    bar.append("·" * (WIDTH - drawn), style="dim")
    percent = 100 * (device.peak_bytes + device.margin_bytes) / max(1, device.capacity_bytes)
    bar.append(f" {percent:.0f} %", style="bold red" if percent > 100 else "")
    return bar


def _legend() -> Text:
    legend = Text()
    for name, color in COLORS.items():
        legend.append("█ ", style=color)
        legend.append(f"{name}  ")
    return legend.append("░ margin  · free")


def _groups(plan: Plan) -> Table:
    table = Table(title="block groups", title_justify="left")
    for column in ("first block", "blocks", "groups", "how", "peak on each device"):
        table.add_column(column, overflow="fold")
    for group in plan.groups:
        peaks = ", ".join(readable_bytes(peak) for peak in group.usage.peaks)
        table.add_row(group.names[0], str(len(group.names)), str(group.groups), describe(group.layout), peaks)
    return table


def _tried(group: GroupPlan) -> Table:
    table = Table(title=f"tried for {group.names[0]}, fastest first", title_justify="left")
    for column in ("what", "largest peak", "verdict"):
        table.add_column(column, overflow="fold")
    shown = [attempt for attempt in group.tried if attempt.peaks] or list(group.tried)
    hidden = len(group.tried) - len(shown[-SHOWN:])
    for attempt in shown[-SHOWN:]:
        table.add_row(attempt.wish, readable_bytes(max(attempt.peaks)) if attempt.peaks else "", _verdict(attempt))
    if hidden:
        table.caption = f"and {hidden} that could be seen not to fit, or fitted no better; --json has all"
    return table


def _verdict(attempt: Attempt) -> str:
    return attempt.reason or "fits"
