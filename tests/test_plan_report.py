"""What people see of a plan: bars that are as long as what they show, everything named, nothing that does not fit hidden."""

from dataclasses import replace

import pytest
from rich.console import Console

from evenround.config import DeviceConfig
from evenround.errors import readable_bytes
from evenround.plan import Attempt, DevicePlan, Plan
from evenround.plan_report import COLORS, SHOWN, WIDTH, render_plan
from small_jobs import GIB, TWO_BLOCKS, Small, simulated


def printed(plan: Plan, full: bool = True, width: int = 200) -> str:
    console = Console(width=width, force_terminal=False, color_system=None, record=True)
    with console.capture() as capture:
        console.print(*render_plan(plan, full), sep="\n")
    return capture.get()


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Small(tune=TWO_BLOCKS).plan(simulated([GIB, GIB]), DeviceConfig(placement="split"))


def with_device(plan: Plan, **changes: object) -> Plan:
    device = DevicePlan(
        **{
            "name": "cuda:7", "kind": "cuda", "capacity_bytes": 1000, "peak_bytes": 500, "margin_bytes": 100,
            "breakdown": {"weights": 250, "gradients": 245, "other": 5}, **changes,
        }  # type: ignore[arg-type]
    )  # fmt: skip
    return replace(plan, devices=(device,))


def bar_of(text: str) -> str:
    (line,) = [line for line in text.splitlines() if "cuda:7" in line]
    return line


def test_a_bar_shows_the_parts_of_the_peak_the_margin_and_what_is_free(plan: Plan) -> None:
    bar = bar_of(printed(with_device(plan)))
    assert bar.count("█") == WIDTH // 2 and bar.count("░") == WIDTH // 10 and bar.count("·") == WIDTH - WIDTH // 2 - WIDTH // 10
    assert "60 %" in bar and "weights 250 B, gradients 245 B" in bar
    assert "other" not in bar  # 1 % of the peak


def test_a_bar_that_is_too_long_is_cut_off_and_tells_by_how_much(plan: Plan) -> None:
    bar = bar_of(printed(with_device(plan, capacity_bytes=300)))
    assert bar.count("█") == WIDTH and "░" not in bar and "·" not in bar and "200 %" in bar


def test_a_device_without_anything_on_it_is_drawn(plan: Plan) -> None:
    bar = bar_of(printed(with_device(plan, peak_bytes=0, margin_bytes=0, breakdown={})))
    assert bar.count("·") == WIDTH and " 0 %" in bar


def test_everything_that_was_planned_is_told(plan: Plan) -> None:
    text = printed(plan)
    assert text.startswith("plan: split, micro-batch 3, inputs on the devices\n")
    for device in plan.devices:
        assert device.name in text and readable_bytes(device.peak_bytes) in text
    assert [group.groups for group in plan.groups] == [1, 1]
    for group in plan.groups:
        assert group.names[0] in text and ", ".join(readable_bytes(peak) for peak in group.usage.peaks) in text
    assert all(f"█ {name}" in text for name in COLORS)
    assert f"host memory {readable_bytes(plan.host_bytes)}, disk {readable_bytes(plan.disk_bytes)}" in text
    assert "fastest first" in text and "split, 3 samples at once" in text and "fits" in text


def test_before_a_run_less_is_told(plan: Plan) -> None:
    text = printed(plan, full=False)
    assert "plan: split" in text and "sim:1" in text and "block groups" in text and "tried" not in text and "host memory" not in text
    alike = Small().plan(simulated([GIB]))
    assert "block groups" not in printed(alike, full=False) and "block groups" in printed(alike)


def test_categories_have_a_color_each(plan: Plan) -> None:
    assert len(set(COLORS.values())) == len(COLORS)
    assert {name for device in plan.devices for name in device.breakdown} <= set(COLORS)


def test_what_does_not_fit_is_told_with_the_least_that_would_do() -> None:
    plan = Small().plan(simulated([30_000]))
    for full in (False, True):
        text = " ".join(printed(plan, full).split())
        assert "nothing fits: model.layers.0 needs more than sim:0 29.3 KiB; the least that would do: sim:0 " in text
        assert f"{plan.least[0]} bytes" in text


def test_of_many_attempts_the_last_are_shown_and_the_others_counted(plan: Plan) -> None:
    tried = tuple(Attempt(wish=f"way {at}", seconds=1.0, peaks=(at,), reason="too large") for at in range(SHOWN + 5))
    seen = tuple(Attempt(wish=f"seen {at}", seconds=1.0, peaks=(), reason="needs more") for at in range(3))
    text = printed(replace(plan, groups=(replace(plan.main, tried=seen + tried),)))
    assert "way 4" not in text and all(f"way {at}" in text for at in range(5, SHOWN + 5)) and "seen" not in text.replace("seen not to", "")
    assert "and 8 that could be seen not to fit" in text
