"""A device that becomes smaller in mid-run: the run goes on elsewhere with the same result, or stops where another can go on."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from conftest import ARCHITECTURES, save_model
from evenround import quantize
from evenround.job import Silent
from evenround.memory import stage
from evenround.memory.simulate import SimulatedDevices
from evenround.plan import Plan

TOKENS = torch.randint(3, 100, (9, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    save_model(ARCHITECTURES["llama"], folder)
    return folder


def run(source: Path, folder: Path, device: str = "sim:2x1GiB", **changes: object) -> dict[str, object]:
    arguments: dict[str, object] = {
        "scheme": "W4A16", "group_size": 32, "iters": 3, "dataset": TOKENS, "nsamples": 9, "seqlen": 24, "batch_size": 4,
        "compute_dtype": "float32", "device_map": device,
    }  # fmt: skip
    return quantize(source, folder, **{**arguments, **changes})  # type: ignore[arg-type]


def digest(folder: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.rglob("*.safetensors")))).hexdigest()


class Shrinking(Silent):
    """After step number n (from 1, of all blocks), device 0 has `sizes[n]` bytes."""

    def __init__(self, devices: list[SimulatedDevices], sizes: Mapping[int, int]) -> None:
        self.devices, self.sizes, self.steps = devices, sizes, 0
        self.notes: list[str] = []
        self.plans: list[Plan] = []

    def plan(self, plan: Plan) -> None:
        self.plans.append(plan)

    def step(self, iteration: int, iters: int, loss: float) -> None:
        self.steps += 1
        if self.steps in self.sizes:
            self.devices[-1].set_capacity(0, self.sizes[self.steps])

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SimulatedDevices]]:
    """The devices of each run that is made."""
    made: list[SimulatedDevices] = []

    class Kept(SimulatedDevices):
        def __enter__(self) -> SimulatedDevices:
            made.append(self)
            return super().__enter__()

    monkeypatch.setattr(stage, "SimulatedDevices", Kept)
    yield made


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[int]]:
    """The bytes of a run without trouble, and the peak of its one device that is used."""
    folder = tmp_path_factory.mktemp("whole")
    record = run(source, folder)
    assert not any(block["notes"] for block in record["blocks"])  # type: ignore[index, attr-defined]
    return digest(folder), [max(block["peak_bytes"]) for block in record["blocks"]]  # type: ignore[index, attr-defined]


# At which steps device 0 shrinks, to which part of the peak.
CASES: dict[str, dict[int, float]] = {
    "in the first block": {2: 0.8},
    "in the second block": {5: 0.7},
    "in the last block": {7: 0.5},
    "twice": {2: 0.9, 5: 0.6},
    "twice in one block": {1: 0.9, 2: 0.6},
}


@pytest.mark.parametrize("case", CASES)
def test_a_device_that_shrinks_changes_the_plan_and_not_the_bytes(
    case: str, source: Path, tmp_path: Path, devices: list[SimulatedDevices], whole: tuple[str, list[int]]
) -> None:
    expected, peaks = whole
    tell = Shrinking(devices, {step: int(part * peaks[0]) for step, part in CASES[case].items()})
    record = run(source, tmp_path, progress=tell)
    assert digest(tmp_path) == expected
    blocks = record["blocks"]
    assert all(block["planned_bytes"] == block["peak_bytes"] for block in blocks)  # type: ignore[index, attr-defined]
    found = [note for block in blocks for note in block["notes"]]  # type: ignore[index, attr-defined]
    assert 1 <= len(found) <= len(CASES[case]) and found == [note for note in tell.notes if "ran out of memory" in note]
    at = (min(CASES[case]) - 1) // 3
    assert blocks[at]["notes"][0].startswith(f"model.layers.{at} ran out of memory (")  # type: ignore[index]
    assert (
        "sim:0 is full" in found[0] and f"it went on as {blocks[at]['strategy']}" in found[-1 if at == (max(CASES[case]) - 1) // 3 else 0]
    )  # type: ignore[index]
    smallest = min(int(part * peaks[0]) for part in CASES[case].values())
    assert blocks[-1]["peak_bytes"][0] <= smallest  # type: ignore[index]
    assert "sums over samples" not in " ".join(found)


def test_a_chain_that_lies_on_the_device_which_shrinks_is_read_back_to_elsewhere(
    source: Path, tmp_path: Path, devices: list[SimulatedDevices], whole: tuple[str, list[int]]
) -> None:
    """What is there stays there when the capacity goes; the first allocation afterwards fails."""
    tell = Shrinking(devices, {4: 1})
    record = run(source, tmp_path, progress=tell)
    assert digest(tmp_path) == whole[0]
    assert [block["peak_bytes"][0] > 0 for block in record["blocks"]] == [True, False, False]  # type: ignore[index, attr-defined]
    assert all(block["planned_bytes"] == block["peak_bytes"] for block in record["blocks"])  # type: ignore[index, attr-defined]


def test_smaller_micro_batches_are_told(
    source: Path, tmp_path: Path, devices: list[SimulatedDevices], whole: tuple[str, list[int]]
) -> None:
    """On one device with nothing else to give way: another order of sums, which the record tells."""
    plan = run(source, tmp_path / "one", "sim:1GiB")["plan"]
    assert plan["micro_batch"] == 4  # type: ignore[index]
    least = None
    for part in (0.5, 0.35, 0.25):
        tell = Shrinking(devices, {2: int(part * whole[1][0])})
        try:
            record = run(source, tmp_path / f"{part}", "sim:1GiB", progress=tell)
        except torch.OutOfMemoryError:
            break
        told = any("sums over samples are in another order" in note for note in tell.notes)
        smaller = "micro-batch 4" not in record["blocks"][0]["strategy"]  # type: ignore[index]
        assert told == smaller
        assert smaller or digest(tmp_path / f"{part}") == whole[0]
        least = part if smaller else least
    assert least is not None


def test_when_nothing_else_fits_the_run_stops_and_a_larger_device_goes_on_to_the_same_bytes(
    source: Path, tmp_path: Path, devices: list[SimulatedDevices], whole: tuple[str, list[int]]
) -> None:
    tell = Shrinking(devices, {5: 20_000})
    with pytest.raises(torch.OutOfMemoryError, match="nothing else fits: nothing fits: model.layers.1 needs more than") as caught:
        run(source, tmp_path, "sim:1GiB", progress=tell)
    assert "sim:0 19.5 KiB" in str(caught.value) and "the least that would do: sim:0 " in str(caught.value)
    assert not list(tmp_path.rglob("*.safetensors.index.json")) and (tmp_path / ".evenround").is_dir()
    again = Shrinking(devices, {})
    record = run(source, tmp_path, "sim:2x1GiB", progress=again)
    assert digest(tmp_path) == whole[0] and again.steps == 6  # the first block is not tuned again
    assert any("1 of 3 block groups are finished" in note for note in again.notes)
    assert all(block["planned_bytes"] == block["peak_bytes"] for block in record["blocks"])  # type: ignore[index, attr-defined]


def test_the_plan_that_the_record_holds_is_the_one_that_was_told(
    source: Path, tmp_path: Path, devices: list[SimulatedDevices], whole: tuple[str, list[int]]
) -> None:
    tell = Shrinking(devices, {2: int(0.8 * whole[1][0])})
    record = run(source, tmp_path, progress=tell)
    assert [plan.to_dict() for plan in tell.plans] == [record["plan"]]
