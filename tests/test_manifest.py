"""A run that is killed anywhere goes on from the last finished group; anything else in the folder is refused with a reason."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from conftest import chain_of, host_chain, values_of
from evenround.chains import HOST, Chain, Chains, Home
from evenround.config import OutputConfig
from evenround.errors import UserError
from evenround.manifest import FOLDER, Manifest, refuse_other_settings, require_space
from evenround.output import clear, prepare
from evenround.record import RECORD, BlockRecord, read_record, total_seconds, write_record

GROUPS = 3
SCHEMES = {"q": {"bits": 4}, "k": None}
SETTINGS: dict[str, object] = {"tune": {"iters": 2, "lr": 0.1}, "schemes": SCHEMES, "rows": (4, 8), "versions": {"torch": "2"}}


def on_host(samples: int) -> tuple[Home, ...]:
    return (Home(HOST, samples),)


def scaled(chain: Chain, factor: float) -> Chain:
    return chain_of(values_of(chain) * factor)


class Killed(BaseException):
    """Stands for SIGKILL: no `except Exception` or `except OSError` sees it."""


def go(output_dir: Path, log: list[str]) -> list[dict[str, object]]:
    """A run in miniature: its groups double one chain and triple the other. Returns the records of all groups."""
    output = OutputConfig(output_dir=output_dir)
    finished = prepare(output, output_dir / "source", SETTINGS)
    if finished is not None:
        log.append("nothing to do")
        return finished["blocks"]  # type: ignore[return-value]
    manifest = Manifest.open(output_dir, SETTINGS)
    start = torch.ones(2, 3, 4, dtype=torch.bfloat16)
    if manifest.done == 0:
        first = chain_of(start)
        chains = Chains(first, first)
        manifest.commit(chains, None)
    elif manifest.done <= GROUPS:
        chains = manifest.chains(on_host)
    for number in range(manifest.done - 1, GROUPS):
        log.append(f"group {number}")
        chains = Chains(scaled(chains.float_inputs, 2), scaled(chains.quantized_inputs, 3))
        sums = [float(values_of(chain).sum()) for chain in (chains.float_inputs, chains.quantized_inputs)]
        manifest.commit(chains if number + 1 < GROUPS else None, {"group": number, "sums": sums, "seconds": {"tune": 0.5}})
    sites = [{"name": name, "scheme": scheme} for name, scheme in SCHEMES.items()]
    settings = {key: value for key, value in SETTINGS.items() if key not in ("schemes", "versions")}
    write_record(output_dir, {"blocks": manifest.blocks, "settings": settings, "sites": sites, "versions": SETTINGS["versions"]})
    manifest.remove()
    return manifest.blocks


EXPECTED = [{"group": n, "sums": [24.0 * 2 ** (n + 1), 24.0 * 3 ** (n + 1)], "seconds": {"tune": 0.5}} for n in range(GROUPS)]


class Killer:
    """Raises `Killed` in the `at`-th call of what changes names in the file system, before or after it is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, after: bool) -> None:
        self.left, self.after, self.struck = at, after, False
        for owner, name in ((os, "replace"), (Path, "unlink"), (Path, "rmdir"), (Path, "mkdir")):
            monkeypatch.setattr(owner, name, self.wrapped(getattr(owner, name)))

    def wrapped(self, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            self.left -= 1
            if self.left == 0 and not self.after:
                self.struck = True
                raise Killed
            result = real(*args, **kwargs)
            if self.left == 0:
                self.struck = True
                raise Killed
            return result

        return call


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_anywhere_a_run_goes_on(tmp_path: Path, after: bool) -> None:
    for at in range(1, 1000):
        folder, log = tmp_path / str(at), list[str]()
        with pytest.MonkeyPatch.context() as patch:
            killer = Killer(patch, at, after)
            try:
                result = go(folder, log)
            except Killed:
                result = None
        before = len(log)
        if result is None:
            result = go(folder, log)
        assert result == EXPECTED
        assert not (folder / FOLDER / "manifest.json").exists() and not list((folder / FOLDER).glob("*.safetensors"))
        # At most one group is done twice, and none is left out.
        groups = [line for line in log if line != "nothing to do"]
        assert sorted(set(groups)) == [f"group {n}" for n in range(GROUPS)] and len(groups) <= GROUPS + 1
        if not killer.struck:
            assert before == GROUPS and at > 15
            break
    else:
        pytest.fail("never ran to its end")


def test_killed_again_and_again_a_run_comes_to_its_end(tmp_path: Path) -> None:
    log: list[str] = []
    for _ in range(60):
        with pytest.MonkeyPatch.context() as patch:
            Killer(patch, 6, False)  # one group takes four such calls, the start two
            try:
                assert go(tmp_path / "out", log) == EXPECTED
            except Killed:
                continue
        break
    else:
        pytest.fail("no progress")
    assert go(tmp_path / "out", log) == EXPECTED and log[-1] == "nothing to do"


def started(folder: Path) -> Manifest:
    """A manifest with one finished group."""
    manifest = Manifest.open(folder, SETTINGS)
    start = chain_of(torch.arange(24.0).reshape(2, 3, 4))
    manifest.commit(Chains(start, start), None)
    manifest.commit(Chains(scaled(start, 2), scaled(start, 3)), {"group": 0})
    return manifest


def test_what_was_committed_is_found_again(tmp_path: Path) -> None:
    assert not Manifest.exists(tmp_path)
    started(tmp_path)
    assert Manifest.exists(tmp_path)
    again = Manifest.open(tmp_path, SETTINGS)
    assert (again.done, again.blocks) == (2, [{"group": 0}])
    chains = again.chains(on_host)
    assert torch.equal(values_of(chains.float_inputs), torch.arange(24.0).reshape(2, 3, 4) * 2)
    assert torch.equal(values_of(chains.quantized_inputs), torch.arange(24.0).reshape(2, 3, 4) * 3)
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == ["inputs-00002.safetensors", "manifest.json"]
    again.remove()
    again.remove()
    assert not (tmp_path / FOLDER).exists() and not Manifest.exists(tmp_path)


def test_one_tensor_for_both_chains_is_saved_once(tmp_path: Path) -> None:
    manifest = Manifest.open(tmp_path, SETTINGS)
    inputs = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0)).transpose(1, 2)  # not contiguous
    chain = chain_of(inputs)
    manifest.commit(Chains(chain, chain), None)
    assert list(safetensors.torch.load_file(tmp_path / FOLDER / "inputs-00001.safetensors")) == ["float"]
    chains = Manifest.open(tmp_path, SETTINGS).chains(on_host)
    assert chains.quantized_inputs is chains.float_inputs and torch.equal(values_of(chains.float_inputs), inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_chains_keep_their_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    inputs = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    Manifest.open(tmp_path, SETTINGS).commit(Chains(chain_of(inputs), chain_of(inputs + 1)), None)
    chains = Manifest.open(tmp_path, SETTINGS).chains(on_host)
    assert chains.float_inputs.dtype == dtype and torch.equal(values_of(chains.float_inputs), inputs)
    assert chains.quantized_inputs.dtype == dtype and torch.equal(values_of(chains.quantized_inputs), inputs + 1)


def test_chains_are_saved_from_and_loaded_to_wherever_they_lie(tmp_path: Path) -> None:
    values = torch.randn(11, 3, 4, generator=torch.Generator().manual_seed(0))
    homes = (Home(HOST, 2), Home(HOST, 8, tmp_path), Home(HOST, 1))
    spread = Chain.empty(values.shape, values.dtype, homes)
    spread.write(range(11), values)
    assert [len(part) for part in spread.parts] == [2, 8, 1]
    Manifest.open(tmp_path / "out", SETTINGS).commit(Chains(spread, chain_of(values)), None)
    saved = safetensors.torch.load_file(tmp_path / "out" / FOLDER / "inputs-00001.safetensors")
    assert torch.equal(saved["float"], values) and torch.equal(saved["quantized"], values)
    chains = Manifest.open(tmp_path / "out", SETTINGS).chains(lambda samples: homes if samples == 11 else ())
    assert [len(part) for part in chains.float_inputs.parts] == [2, 8, 1]
    assert torch.equal(values_of(chains.float_inputs), values) and torch.equal(values_of(chains.quantized_inputs), values)


def test_a_run_without_text_has_no_chains(tmp_path: Path) -> None:
    Manifest.open(tmp_path, SETTINGS).commit(None, None)
    assert Manifest.open(tmp_path, SETTINGS).done == 1
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["manifest.json"]


# ---------------------------------------------------------------------------------------------------------------------------------------
# Refused


def refused(action: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        action()
    assert str(caught.value) == message


GO_ON = "Repeat those settings to go on, choose another --output_dir, or start anew with --overwrite"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"tune": {"iters": 3, "lr": 0.1}}, "tune.iters was 2, is 3"),
        ({"tune": {"iters": 2, "lr": None}}, "tune.lr was 0.1, is None"),
        ({"schemes": {"q": None, "k": None}}, "schemes.q was {'bits': 4}, is None"),
        ({"schemes": {"q": {"bits": 4}, "k": {"bits": 2}}}, "schemes.k was None, is {'bits': 2}"),
        ({"schemes": {"q": {"bits": 8}, "k": None}, "rows": (2, 8)}, "rows was [4, 8], is [2, 8]; schemes.q.bits was 4, is 8"),
        ({"device": "cuda"}, "device was None, is 'cuda'"),
        (
            {"tune": {str(n): n for n in range(8)} | {"iters": 2, "lr": 0.1}},
            "; ".join(f"tune.{n} was None, is {n}" for n in range(8)),
        ),
    ],
)
def test_every_setting_that_differs_is_named(tmp_path: Path, changed: dict[str, object], named: str) -> None:
    started(tmp_path)
    refused(lambda: Manifest.open(tmp_path, SETTINGS | changed), f"{tmp_path} holds a run with other settings: {named}. {GO_ON}")
    assert Manifest.open(tmp_path, SETTINGS).done == 2


def test_equal_settings_pass_however_they_were_written(tmp_path: Path) -> None:
    refuse_other_settings(tmp_path, json.loads(json.dumps(SETTINGS)), SETTINGS)
    refuse_other_settings(tmp_path, {"lr": 0.1}, {"lr": 0.1, "new": None})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value: line 1 column 1 (char 0)"),
        ('{"version": 1, "done": 2, "blocks": [], ', "Expecting property name enclosed in double quotes: line 1 column 41 (char 40)"),
        ('{"version": 1, "done": 2}', "'blocks'"),
        ("[]", "list indices must be integers or slices, not str"),
        ('{"version": 1, "done": "two", "blocks": [], "settings": {}}', "invalid literal for int() with base 10: 'two'"),
    ],
)
def test_a_broken_manifest_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    started(tmp_path)
    path = tmp_path / FOLDER / "manifest.json"
    path.write_text(text)
    refused(lambda: Manifest.open(tmp_path, SETTINGS), f"{path} cannot be read ({reason}); start anew with --overwrite")


def test_a_manifest_of_another_version_is_refused(tmp_path: Path) -> None:
    started(tmp_path)
    path = tmp_path / FOLDER / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 3}))
    refused(lambda: Manifest.open(tmp_path, SETTINGS), f"{path} was written by another version of evenround; start anew with --overwrite")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-5]),
        lambda path: safetensors.torch.save_file({"other": torch.ones(1)}, path),
    ],
    ids=["gone", "empty", "cut", "other"],
)
def test_chains_that_are_gone_or_broken_are_refused(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    started(tmp_path)
    path = tmp_path / FOLDER / "inputs-00002.safetensors"
    spoil(path)
    with pytest.raises(UserError) as caught:
        Manifest.open(tmp_path, SETTINGS).chains(on_host)
    assert str(caught.value).startswith(f"{path} cannot be read (") and str(caught.value).endswith("); start anew with --overwrite")


def test_a_full_disk_leaves_the_group_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = started(tmp_path)
    path = tmp_path / FOLDER / "inputs-00003.safetensors"

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    inputs = torch.ones(2, 3, 4)
    refused(
        lambda: manifest.commit(Chains(chain_of(inputs), chain_of(inputs + 1)), {"group": 1}),
        f"cannot write the 192 bytes of {path}: [Errno 28] No space left on device; free some space and run the same command again",
    )
    monkeypatch.undo()
    again = Manifest.open(tmp_path, SETTINGS)
    assert (again.done, again.blocks) == (2, [{"group": 0}]) and again.chains(on_host)
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == ["inputs-00002.safetensors", "manifest.json"]


# ---------------------------------------------------------------------------------------------------------------------------------------
# The output directory and the record


def test_a_finished_run_is_recognized_and_another_refused(tmp_path: Path) -> None:
    log: list[str] = []
    go(tmp_path, log)
    assert go(tmp_path, log) == EXPECTED and log[-1] == "nothing to do"
    output = OutputConfig(output_dir=tmp_path)
    refused(
        lambda: prepare(output, tmp_path / "source", SETTINGS | {"rows": (1, 1)}),
        f"{tmp_path} holds a run with other settings: rows was [4, 8], is [1, 1]. {GO_ON}",
    )


def test_killed_while_it_clears_a_directory_no_half_of_a_checkpoint_counts_as_whole(tmp_path: Path) -> None:
    for at in range(1, 100):
        folder = tmp_path / str(at)
        go(folder, [])
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"x")
        (folder / "notes.txt").write_text("mine")
        with pytest.MonkeyPatch.context() as patch:
            killer = Killer(patch, at, after=True)
            try:
                output = OutputConfig(output_dir=folder, overwrite=True)
                assert prepare(output, folder / "source", SETTINGS) is None
                assert (folder / "config.json").exists()  # nothing is removed before the job is known to be possible
                clear(output)
            except Killed:
                pass
        left = {path.name for path in folder.iterdir()}
        assert "model.safetensors" in left or not left & {"config.json", RECORD}
        assert "notes.txt" in left
        if not killer.struck:
            assert left == {"notes.txt"}
            break


def test_a_checkpoint_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    refused(
        lambda: prepare(OutputConfig(output_dir=tmp_path), tmp_path / "source", SETTINGS),
        f"{tmp_path} holds a checkpoint that this run did not write; choose another --output_dir, or replace it with --overwrite",
    )


def test_the_model_itself_is_no_place_for_the_result(tmp_path: Path) -> None:
    for overwrite in (False, True):
        output = OutputConfig(output_dir=tmp_path / "x" / "..", overwrite=overwrite)
        refused(
            lambda output=output: prepare(output, tmp_path, SETTINGS),  # type: ignore[misc]
            f"--output_dir {output.output_dir} is the model itself; choose another directory",
        )
    several = OutputConfig(output_dir=tmp_path, formats=("fake", "auto_round"))
    refused(lambda: prepare(several, tmp_path / "fake", SETTINGS), f"--output_dir {tmp_path} is the model itself; choose another directory")


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "out"
    refused(
        lambda: prepare(OutputConfig(output_dir=place), tmp_path / "source", SETTINGS),
        f"--output_dir {place} cannot be written: Not a directory",
    )


def record(**changes: object) -> BlockRecord:
    values: dict[str, object] = {
        "blocks": ("model.layers.0",), "rtn_loss": 0.5, "tuned_loss": None, "kept": "untuned", "best_iteration": 1,
        "losses": (1.0, 0.5), "seconds": {"tune": 1.25}, "strategy": "single", "planned_bytes": (7, 8),
        "peak_bytes": (6, 8), "notes": ("a note",),
    }  # fmt: skip
    return BlockRecord(**(values | changes))  # type: ignore[arg-type]


def test_a_record_is_plain_json() -> None:
    values = record().to_dict()
    assert values["losses"] == [1.0, 0.5] and values["blocks"] == ["model.layers.0"] and values["notes"] == ["a note"]
    assert (values["strategy"], values["planned_bytes"], values["peak_bytes"]) == ("single", [7, 8], [6, 8])
    spoiled = record(rtn_loss=float("inf"), losses=(1.0, float("nan"), float("-inf"))).to_dict()
    assert spoiled["rtn_loss"] is None and spoiled["losses"] == [1.0, None, None]
    assert "NaN" not in json.dumps(spoiled)


def test_a_record_is_read_back(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    write_record(tmp_path, {"model": "größe", "blocks": []})
    assert read_record(tmp_path) == {"model": "größe", "blocks": []}
    path = tmp_path / RECORD
    for text, reason in (("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"), ("[]", "not an object")):
        path.write_text(text)
        refused(lambda: read_record(tmp_path), f"{path} is damaged ({reason}); delete it, or quantize anew with --overwrite")


def test_seconds_add_up_by_phase() -> None:
    assert total_seconds([{"seconds": {"load": 0.1, "tune": 1.0}}, {"seconds": {"load": 0.2}}]) == {"load": 0.3, "tune": 1.0}


def test_too_little_room_to_resume_is_told_before_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chains, usage = Chains(host_chain((4, 8, 32)), host_chain((4, 8, 32))), shutil.disk_usage(tmp_path)
    require_space(tmp_path, chains)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=16383))
    message = f"{tmp_path} has 16.0 KiB free, and resuming needs 16.0 KiB there while blocks are tuned; free some space"
    with pytest.raises(UserError) as caught:
        require_space(tmp_path, chains)
    assert str(caught.value).startswith(message)
