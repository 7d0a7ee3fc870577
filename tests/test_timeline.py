"""tools/timeline.py: the picture shows the plan's own peaks, and is a small well-formed file."""

import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import evenround
from evenround import cli
from evenround.data import tiny_llama

TOOL = Path(__file__).parent.parent / "tools" / "timeline.py"
SVG = "{http://www.w3.org/2000/svg}"
SMALL = {"nsamples": 16, "seqlen": 64, "compute_dtype": "float32"}


@pytest.fixture(scope="module")
def main() -> Any:
    return runpy.run_path(str(TOOL))["main"]


def flags(settings: dict[str, object]) -> list[str]:
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in settings.items()]


@pytest.mark.parametrize(
    ("device", "settings"),
    [
        ("sim:64MiB", {}),
        ("sim:2x20MiB", {}),
        ("sim:3x64MiB", {"placement": "share"}),
        ("sim:2x64MiB", {"placement": "pipeline", "nblocks": 2, "scheme": "W2A16", "group_size": 64}),
        ("xpu:1x1GiB", {"low_gpu_mem_usage": True, "recipe": "auto-round"}),
    ],
)
def test_the_maxima_of_the_picture_are_the_peaks_of_the_plan(main: Any, device: str, settings: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "picture.svg"
    assert main([str(tiny_llama()), f"--device={device}", "-o", str(file), *flags({**SMALL, **settings})]) == 0
    plan = evenround.plan(tiny_llama(), device_map=device, **{**SMALL, **settings})
    root = ElementTree.parse(file).getroot()
    rows = [group for group in root.iter(f"{SVG}g") if "data-device" in group.attrib]
    assert [row.get("data-device") for row in rows] == [item.name for item in plan.devices]
    assert tuple(int(row.attrib["data-peak-bytes"]) for row in rows) == plan.main.usage.peaks
    assert [int(row.attrib["data-capacity-bytes"]) for row in rows] == [item.capacity_bytes for item in plan.devices]
    assert file.stat().st_size < 150_000


def test_the_phases_of_a_step_are_marked_in_their_order(main: Any, tmp_path: Path) -> None:
    file = tmp_path / "picture.svg"
    main([str(tiny_llama()), "--device=sim:64MiB", "-o", str(file), *flags(SMALL)])
    marks = [group.attrib for group in ElementTree.parse(file).getroot().iter(f"{SVG}g") if "data-phase" in group.attrib]
    expected = ["load", "float reference", "search scales", "judge plain rounding", "step forward", "step backward", "update", "judge"]
    assert [mark["data-phase"] for mark in marks] == expected
    starts = [int(mark["data-first"]) for mark in marks]
    assert starts == sorted(set(starts)) and starts[0] == 0


def test_samples_with_two_micro_batches_go_forward_and_backward_twice(main: Any, tmp_path: Path) -> None:
    file = tmp_path / "picture.svg"
    main([str(tiny_llama()), "--device=sim:64MiB", "-o", str(file), *flags({**SMALL, "batch_size": 2, "gradient_accumulate_steps": 2})])
    names = [group.get("data-phase") for group in ElementTree.parse(file).getroot().iter(f"{SVG}g") if "data-phase" in group.attrib]
    assert names[4:-2] == ["step forward", "step backward"] * 2


def test_wrong_input_is_said_in_words(main: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="error: model 'nowhere' is not a directory"):
        main(["nowhere", "--device=sim:64MiB", "-o", str(tmp_path / "picture.svg")])


PAGE = Path(__file__).parent.parent / "docs" / "memory.md"
COMMANDS = [line.removeprefix("$ evenround plan ") for line in PAGE.read_text("utf-8").splitlines() if line.startswith("$ evenround plan ")]


@pytest.mark.parametrize("command", sorted({" ".join(command.split()[1:]) for command in COMMANDS}))
def test_the_commands_of_the_page_on_memory_work(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With a small model in place of the large one."""
    small = ["--nsamples", "8", "--seqlen", "16", "--compute_dtype", "float32"]
    assert cli.main(["plan", str(tiny_llama()), *shlex.split(command), *small, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]


def test_the_pictures_of_the_page_on_memory_are_there_and_small() -> None:
    pictures = re.findall(r"\]\((images/[^)]+)\)", PAGE.read_text("utf-8"))
    assert len(pictures) == 2
    for picture in pictures:
        file = PAGE.parent / picture
        assert ElementTree.parse(file).getroot().tag == f"{SVG}svg" and file.stat().st_size < 150_000
