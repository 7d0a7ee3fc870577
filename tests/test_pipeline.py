"""The whole job on small models: same bytes twice, interrupted anywhere, every flag has an effect, wrong input is refused in time."""

import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

import evenround
from conftest import ARCHITECTURES, save_model
from evenround import UserError, manifest, quantize
from evenround.checkpoint import Checkpoint, CheckpointWriter
from evenround.manifest import Manifest
from evenround.memory import stage
from evenround.memory.simulate import SimulatedDevices
from evenround.pipeline import Silent
from evenround.plan import NothingFits, Plan
from evenround.tensorfile import put

TOKENS = torch.randint(3, 128, (6, 16), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    save_model(ARCHITECTURES["llama_tied"], folder, torch.bfloat16, max_shard_size="60KB")
    (folder / "generation_config.json").write_text('{"bos_token_id": 1}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def run(source: Path, folder: Path, **changes: object) -> dict[str, object]:
    arguments: dict[str, object] = {
        "scheme": "W4A16G32", "iters": 2, "nsamples": 6, "seqlen": 16, "batch_size": 2, "dataset": TOKENS, "format": "auto_round",
        "compute_dtype": "float32",
    }  # fmt: skip
    return quantize(source, folder, **{**arguments, **changes})  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, str]:
    """Digest of each file; of the record without what was measured, and the plan, which tells the memory that was free."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            if path.name == "evenround.json":
                record = json.loads(data)
                assert set(record["totals"]) == {"seconds", "peak_bytes"}
                del record["totals"], record["plan"]
                for block in record["blocks"]:
                    del block["seconds"], block["peak_bytes"]
                data = json.dumps(record).encode()
            digests[str(path.relative_to(folder))] = hashlib.sha256(data).hexdigest()
    return digests


def test_twice_the_same_bytes(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "one")
    run(source, tmp_path / "two")
    first = contents(tmp_path / "one")
    assert first == contents(tmp_path / "two")
    assert {"config.json", "evenround.json", "generation_config.json", "chat_template.jinja", "model.safetensors"} == set(first)


class Stop(BaseException):
    pass


def stopping_at(number: int, original: Callable[..., object]) -> Callable[..., object]:
    """`original`, but its call number `number` raises."""
    calls = itertools.count()

    def counting(*args: object, **kwargs: object) -> object:
        if next(calls) == number:
            raise Stop
        return original(*args, **kwargs)

    return counting


@pytest.mark.parametrize("place", ["write", "commit", "replace", "unlink"])
def test_interrupted_anywhere_it_goes_on_to_the_same_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    settings = {"max_shard_size": "40KB"}
    run(source, tmp_path / "whole", **settings)
    expected = contents(tmp_path / "whole")
    owner, name = {
        "write": (CheckpointWriter, "write"),
        "commit": (Manifest, "commit"),
        "replace": (os, "replace"),
        "unlink": (Path, "unlink"),
    }[place]
    original = getattr(owner, name)
    interruptions = 0
    for at in range(0, 400, 1 if place == "commit" else 4):
        folder = tmp_path / f"{place}{at}"
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, stopping_at(at, original))
            try:
                run(source, folder, **settings)
            except Stop:
                interruptions += 1
            else:
                break
        run(source, folder, **settings)
        assert contents(folder) == expected, f"interrupted at {place} number {at}"
    assert interruptions >= 2


@pytest.mark.slow
def test_killed_ten_times_it_goes_on_to_the_same_bytes(source: Path, tmp_path: Path) -> None:
    safetensors.torch.save_file({"tokens": TOKENS}, tmp_path / "tokens.safetensors")
    program = (
        "import sys, safetensors.torch; from evenround import quantize;"
        "quantize(sys.argv[1], sys.argv[2], scheme='W4A16G32', iters=40, nsamples=6, seqlen=16, batch_size=2,"
        "dataset=safetensors.torch.load_file(sys.argv[3])['tokens'], format=['auto_round', 'llm_compressor'], compute_dtype='float32')"
    )

    def start(folder: Path) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": str(Path(evenround.__file__).parents[1])}
        return subprocess.Popen([sys.executable, "-c", program, source, folder, tmp_path / "tokens.safetensors"], env=environment)

    begun = time.monotonic()
    assert start(tmp_path / "whole").wait() == 0
    duration = time.monotonic() - begun
    expected, dice, kills = contents(tmp_path / "whole"), random.Random(0), 0
    folder = tmp_path / "killed"
    while kills < 10:
        process = start(folder)
        try:
            process.wait(timeout=dice.uniform(0.4, 1.0) * duration)
            assert process.returncode == 0
            folder = tmp_path / f"killed{kills}"  # it ended before the blow: go on killing in a new place
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
    assert start(folder).wait() == 0
    assert contents(folder) == expected


def test_a_finished_run_is_not_repeated(source: Path, tmp_path: Path) -> None:
    first = run(source, tmp_path)
    stamp = (tmp_path / "model.safetensors").stat().st_mtime_ns
    assert run(source, tmp_path) == first
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == stamp


def test_other_settings_are_refused_naming_the_difference(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path)
    with pytest.raises(UserError, match=r"tune\.iters was 2, is 3.*--overwrite"):
        run(source, tmp_path, iters=3)
    run(source, tmp_path, iters=3, overwrite=True)
    with pytest.raises(UserError, match=r"tune\.iters was 3, is 2"):
        run(source, tmp_path)


def test_other_settings_are_refused_in_the_middle_too(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopping(Silent):
        def group_done(self, *args: object) -> None:  # type: ignore[override]
            raise Stop

    with pytest.raises(Stop):
        run(source, tmp_path, progress=Stopping())
    assert not (tmp_path / "config.json").exists() and not list(tmp_path.glob("*.safetensors"))
    for change, message in (
        ({"seed": 1}, "tune.seed was 42, is 1"),
        ({"scheme": "W3A16G32"}, r"schemes\.model.*bits was 4, is 3; 20 more differences between the schemes of layers"),
        ({"dataset": TOKENS.flip(0)}, "data.sha256 was"),
    ):
        with pytest.raises(UserError, match=message):
            run(source, tmp_path, **change)
    run(source, tmp_path)
    assert not (tmp_path / ".evenround").exists()


TUNED = {"iters": 6, "lr": 0.01}
"""Steps small enough that six of them help."""


@pytest.mark.parametrize(
    "change",
    [
        {"scheme": "W3A16G32"},
        {"bits": 5},
        {"group_size": 16},
        {"sym": False},
        {"layer_config": {"mlp.down_proj": {"bits": 8}}},
        {"ignore_layers": "v_proj"},
        {"quant_lm_head": True},
        {"iters": 5},
        {"nsamples": 4},
        {"seqlen": 12},
        {"batch_size": 3},
        {"gradient_accumulate_steps": 2},
        {"lr": 0.012},
        {"minmax_lr": 0.01},
        {"momentum": 0.9},
        {"enable_minmax_tuning": False},
        {"keep": "best"},
        {"recipe": "auto-round"},
        {"enable_quanted_input": False},
        {"nblocks": 2},
        {"dataset": TOKENS.flip(0)},
        {"seed": 7},
        {"compute_dtype": "bfloat16"},
        {"max_shard_size": "40KB"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_argument_changes_the_checkpoint(source: Path, tmp_path: Path, baseline: dict[str, str], change: dict[str, object]) -> None:
    run(source, tmp_path, **{**TUNED, **change})
    names = [name for name in contents(tmp_path) if name.endswith(".safetensors")]
    assert {name: contents(tmp_path)[name] for name in names} != {name: baseline.get(name) for name in names}


@pytest.fixture(scope="module")
def baseline(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("baseline")
    record = run(source, folder, **TUNED)
    blocks = record["blocks"]
    assert isinstance(blocks, list) and {block["kept"] for block in blocks} == {"tuned"}
    return contents(folder)


def test_each_format_gets_a_folder(source: Path, tmp_path: Path) -> None:
    record = run(source, tmp_path, format="auto_round,llm_compressor,fake")
    assert {path.name for path in tmp_path.iterdir()} == {"auto_round", "llm_compressor", "fake"}
    for name in ("auto_round", "llm_compressor", "fake"):
        assert (tmp_path / name / "config.json").is_file() and (tmp_path / name / "evenround.json").is_file()
    sizes = record["formats"]
    assert isinstance(sizes, dict) and sizes["fake"]["bits_per_weight"] == 16
    single = tmp_path.parent / "single"
    run(source, single, format="llm_compressor")
    assert contents(single)["model.safetensors"] == contents(tmp_path / "llm_compressor")["model.safetensors"]


def test_unquantized_tensors_are_the_sources_own_bytes(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path)
    made = safetensors.torch.load_file(tmp_path / "model.safetensors")
    original: dict[str, torch.Tensor] = {}
    for path in source.glob("*.safetensors"):
        original.update(safetensors.torch.load_file(path))
    kept = {name for name in original if "proj" not in name}
    assert kept <= set(made) and all(torch.equal(made[name], original[name]) for name in kept)
    assert all(made[name].dtype == torch.bfloat16 for name in kept)
    assert not any(name.endswith("proj.weight") for name in made)
    assert "lm_head.weight" not in made  # tied stays tied


def test_tensors_that_the_class_does_not_know_are_copied(source: Path, tmp_path: Path) -> None:
    save_model(ARCHITECTURES["llama"], tmp_path / "source")
    state = safetensors.torch.load_file(tmp_path / "source" / "model.safetensors")
    state["model.mtp.0.weight"] = torch.arange(6, dtype=torch.int64)
    safetensors.torch.save_file(state, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    run(tmp_path / "source", tmp_path / "made", iters=0)
    assert torch.equal(
        safetensors.torch.load_file(tmp_path / "made" / "model.safetensors")["model.mtp.0.weight"], state["model.mtp.0.weight"]
    )


def test_a_quantized_tied_head_is_untied(source: Path, tmp_path: Path) -> None:
    record = run(source, tmp_path, quant_lm_head=True, format="auto_round,fake")
    config = json.loads((tmp_path / "fake" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    made = safetensors.torch.load_file(tmp_path / "fake" / "model.safetensors")
    original = safetensors.torch.load_file(next(path for path in source.glob("*.safetensors") if b"embed_tokens" in path.read_bytes()))
    assert torch.equal(made["model.embed_tokens.weight"], original["model.embed_tokens.weight"])
    assert not torch.equal(made["lm_head.weight"], made["model.embed_tokens.weight"])
    blocks = record["blocks"]
    assert isinstance(blocks, list) and blocks[-1]["blocks"] == ["lm_head"] and blocks[-1]["rtn_loss"] > 0


def test_a_quantized_head_is_untied_also_if_the_file_had_one_of_its_own(source: Path, tmp_path: Path) -> None:
    """Readers that obey tie_word_embeddings would put the embedding in its place."""
    save_model(ARCHITECTURES["llama_tied"], tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    state = safetensors.torch.load_file(path)
    safetensors.torch.save_file({**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}, path, {"format": "pt"})
    run(tmp_path / "source", tmp_path / "made", iters=0, quant_lm_head=True, format="fake")
    assert json.loads((tmp_path / "made" / "config.json").read_text())["tie_word_embeddings"] is False


def test_overwrite_leaves_no_tokenizer_files_of_the_earlier_model(source: Path, tmp_path: Path) -> None:
    save_model(ARCHITECTURES["llama"], tmp_path / "other")  # has no chat template
    run(source, tmp_path / "made", iters=0)
    (tmp_path / "made" / "notes.txt").write_text("mine")
    assert (tmp_path / "made" / "chat_template.jinja").exists()
    run(tmp_path / "other", tmp_path / "made", iters=0, overwrite=True)
    assert not (tmp_path / "made" / "chat_template.jinja").exists() and (tmp_path / "made" / "notes.txt").exists()


def test_gpt2_is_quantized_transposed(tmp_path: Path) -> None:
    model = save_model(ARCHITECTURES["gpt2"], tmp_path / "source")
    run(tmp_path / "source", tmp_path / "made", format="fake")
    made = safetensors.torch.load_file(tmp_path / "made" / "model.safetensors")
    weight, before = made["transformer.h.0.mlp.c_fc.weight"], model.get_parameter("transformer.h.0.mlp.c_fc.weight")
    assert weight.shape == before.shape == (64, 256)
    assert (weight.T.reshape(-1, 32).unique(dim=0).shape[0] > 1) and all(len(row.unique()) <= 16 for row in weight.T.reshape(-1, 32)[:50])


def test_a_ragged_group_only_for_fake(source: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"group_size 48 .* does not divide the width 64 of model\.layers\.0\.self_attn\.q_proj; groups that would: 16, 32, 64",
    ):
        run(source, tmp_path, group_size=48)
    assert not (tmp_path / ".evenround").exists()
    run(source, tmp_path / "fake", group_size=48, format="fake")


def test_zero_iterations_need_no_text(source: Path, tmp_path: Path) -> None:
    record = run(source, tmp_path, iters=0, opt_rtn=False, dataset="no/such/file.txt")
    blocks = record["blocks"]
    assert isinstance(blocks, list) and [block["kept"] for block in blocks] == ["untuned"] * 3 and blocks[0]["rtn_loss"] is None


def test_a_block_left_in_floating_point_is_passed_through(source: Path, tmp_path: Path) -> None:
    record = run(source, tmp_path, ignore_layers=r"re:model\.layers\.1\.")
    blocks = record["blocks"]
    assert isinstance(blocks, list) and [block["kept"] for block in blocks][1] == "float"
    assert "model.layers.1.mlp.up_proj.weight" in safetensors.torch.load_file(tmp_path / "model.safetensors")


def test_the_source_is_never_the_output(source: Path) -> None:
    with pytest.raises(UserError, match="is the model itself"):
        run(source, source, overwrite=True)


def test_a_foreign_checkpoint_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    save_model(ARCHITECTURES["llama"], tmp_path)
    before = contents(tmp_path)
    with pytest.raises(UserError, match="holds a checkpoint that this run did not write"):
        run(source, tmp_path)
    assert contents(tmp_path) == before


def test_an_output_that_cannot_be_written(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        run(source, tmp_path / "file" / "sub")


def test_a_full_disk_loses_nothing_that_is_finished(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tmp_path / "whole"
    run(source, whole)
    saves = 0

    def full(handle: int, data: memoryview, offset: int) -> None:
        nonlocal saves
        saves += offset == 0  # the header
        if saves == 3 and offset > 0:
            raise OSError(28, "No space left on device")
        put(handle, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "put", full)
        with pytest.raises(UserError, match="No space left on device.*free some space and run the same command again"):
            run(source, tmp_path / "made")
    assert saves == 3 and not (tmp_path / "made" / "config.json").exists()
    assert sorted(path.name for path in (tmp_path / "made" / ".evenround").iterdir()) == ["inputs-00002.safetensors", "manifest.json"]
    run(source, tmp_path / "made")
    assert contents(tmp_path / "made") == contents(whole)


@pytest.mark.parametrize("model", ["./nowhere", "/no/such/place", "nowhere"])
def test_a_path_that_is_not_there(model: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a directory; give a transformers model directory or a hub id"):
        quantize(model, tmp_path)


def test_integer_weights_are_refused(source: Path, tmp_path: Path) -> None:
    save_model(ARCHITECTURES["llama"], tmp_path / "source")
    state = safetensors.torch.load_file(tmp_path / "source" / "model.safetensors")
    state = {name: value.to(torch.float8_e4m3fn) if "proj" in name else value for name, value in state.items()}
    safetensors.torch.save_file(state, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="float8_e4m3fn cannot be quantized; convert"):
        run(tmp_path / "source", tmp_path / "made")


def test_no_tokenizer_needs_token_ids(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no tokenizer that can be loaded"):
        run(source, tmp_path, dataset="demo")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_source_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    save_model(ARCHITECTURES["llama"], tmp_path / "source", dtype)
    run(tmp_path / "source", tmp_path / "made", format="fake", compute_dtype="auto")
    made = safetensors.torch.load_file(tmp_path / "made" / "model.safetensors")
    assert {value.dtype for value in made.values()} == {dtype}


def test_padded_samples(source: Path, tmp_path: Path) -> None:
    ragged = [row[: 16 - 2 * number] for number, row in enumerate(TOKENS)]
    record = run(source, tmp_path, dataset=ragged)
    blocks = record["blocks"]
    assert isinstance(blocks, list) and all(block["rtn_loss"] > 0 for block in blocks)


def test_two_runs_do_not_share_a_directory(source: Path, tmp_path: Path) -> None:
    class Intruder(Silent):
        def group_done(self, number: int, count: int, record: object) -> None:  # type: ignore[override]
            with pytest.raises(UserError, match="another evenround is at work in .*; wait for it to end"):
                run(source, tmp_path)

    run(source, tmp_path, progress=Intruder())
    run(source, tmp_path)


def test_a_lost_partial_file_is_noticed_before_work_goes_on(source: Path, tmp_path: Path) -> None:
    class Stopping(Silent):
        def group_done(self, number: int, count: int, record: object) -> None:  # type: ignore[override]
            raise Stop

    with pytest.raises(Stop):
        run(source, tmp_path, progress=Stopping())
    next(tmp_path.glob("*.partial")).unlink()
    with pytest.raises(UserError, match="has lost files of the unfinished run .* start anew with --overwrite"):
        run(source, tmp_path)
    run(source, tmp_path, overwrite=True)


def test_one_format_and_several_are_not_mixed(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "several", format="auto_round,fake", iters=0)
    with pytest.raises(UserError, match=r"holds a run of several formats \(auto_round, fake\); choose another --output_dir"):
        run(source, tmp_path / "several", iters=0)
    run(source, tmp_path / "several", iters=0, overwrite=True)
    assert not (tmp_path / "several" / "fake" / "config.json").exists()
    run(source, tmp_path / "one", iters=0)
    with pytest.raises(UserError, match="holds a run of one format, auto_round, fake would go into folders"):
        run(source, tmp_path / "one", format="auto_round,fake", iters=0)


def test_another_model_is_named_as_such(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "made", iters=0)
    save_model(ARCHITECTURES["llama"], tmp_path / "other", seed=1)
    with pytest.raises(UserError, match="holds a run of another model; choose another --output_dir"):
        run(tmp_path / "other", tmp_path / "made", iters=0)


def test_a_changed_config_is_another_model(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "source")
    run(tmp_path / "source", tmp_path / "made")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    with pytest.raises(UserError, match="holds a run of another model"):
        run(tmp_path / "source", tmp_path / "made")


def test_plain_rounding_does_not_depend_on_the_compute_dtype(tmp_path: Path) -> None:
    save_model(ARCHITECTURES["llama"], tmp_path / "source", torch.float32)
    for dtype in ("float32", "bfloat16"):
        run(tmp_path / "source", tmp_path / dtype, iters=0, opt_rtn=False, compute_dtype=dtype)
    assert contents(tmp_path / "float32")["model.safetensors"] == contents(tmp_path / "bfloat16")["model.safetensors"]


def test_coarser_computing_than_the_weights_is_told(tmp_path: Path) -> None:
    class Listening(Silent):
        notes: list[str] = []

        def note(self, text: str) -> None:
            self.notes.append(text)

    save_model(ARCHITECTURES["llama"], tmp_path / "source", torch.float32)
    run(tmp_path / "source", tmp_path / "made", compute_dtype="bfloat16", progress=Listening())
    assert any("--compute_dtype bfloat16 rounds the weights, which are float32" in note for note in Listening.notes)


def test_no_room_for_the_second_format_gives_back_the_firsts(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = CheckpointWriter.__init__

    def crowded(self: CheckpointWriter, directory: Path, *arguments: object) -> None:
        if directory.name == "fake":
            raise UserError("no room")
        reserve(self, directory, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(CheckpointWriter, "__init__", crowded)
    with pytest.raises(UserError, match="no room"):
        run(source, tmp_path, format="auto_round,fake")
    assert not list(tmp_path.rglob("*.partial"))


def results(folder: Path) -> dict[str, str]:
    """`contents` without the record, which says where things were."""
    return {name: digest for name, digest in contents(folder).items() if name != "evenround.json"}


def plain_record(record: dict[str, object]) -> dict[str, object]:
    """The record without what was measured and where things were: the same on every device."""
    kept = {name: value for name, value in record.items() if name not in ("totals", "plan")}
    where = ("seconds", "peak_bytes", "planned_bytes", "strategy", "notes")
    kept["blocks"] = [{name: value for name, value in block.items() if name not in where} for block in record["blocks"]]  # type: ignore[attr-defined]
    return kept


def planned_peak(record: dict[str, object]) -> int:
    """Of the one device. Every block's plan was kept to the byte."""
    blocks, plan, totals = record["blocks"], record["plan"], record["totals"]
    assert isinstance(blocks, list) and isinstance(plan, dict) and isinstance(totals, dict)
    assert [block["peak_bytes"] for block in blocks] == [block["planned_bytes"] for block in blocks]
    (device,) = plan["devices"]
    assert totals["peak_bytes"] == device["peak_bytes"] == max(block["peak_bytes"][0] for block in blocks)
    assert sum(device["breakdown"].values()) == device["peak_bytes"] <= device["capacity_bytes"]
    assert isinstance(device["peak_bytes"], int)
    return device["peak_bytes"]


def test_a_simulated_device_gives_the_same_bytes_and_its_own_peak(source: Path, tmp_path: Path) -> None:
    expected = run(source, tmp_path / "cpu")
    record = run(source, tmp_path / "simulated", device_map="sim:1GiB")
    assert results(tmp_path / "cpu") == results(tmp_path / "simulated") and plain_record(record) == plain_record(expected)
    fits = planned_peak(record)
    assert 100_000 < fits < 10_000_000
    again = run(source, tmp_path / "exactly", device_map=f"sim:{fits}")
    assert contents(tmp_path / "exactly") == contents(tmp_path / "simulated") and planned_peak(again) == fits


def test_with_a_byte_less_another_layout_is_planned_that_fits(source: Path, tmp_path: Path) -> None:
    fits = planned_peak(run(source, tmp_path / "most", device_map="sim:1GiB"))
    record = run(source, tmp_path / "less", device_map=f"sim:{fits - 1}")
    assert planned_peak(record) < fits
    first, second = (json.loads((tmp_path / name / "evenround.json").read_text()) for name in ("most", "less"))
    assert [block["strategy"] for block in first["blocks"]] != [block["strategy"] for block in second["blocks"]]
    if first["plan"]["micro_batch"] == second["plan"]["micro_batch"]:
        assert results(tmp_path / "most") == results(tmp_path / "less")


class Heedful(Silent):
    """Keeps the plan and the notes, and minds whether a group began."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.notes: list[str] = []
        self.begun = 0

    def plan(self, plan: Plan) -> None:
        self.plans.append(plan)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def group_started(self, number: int, count: int, names: object) -> None:
        self.begun += 1


def test_where_nothing_fits_no_weight_is_read(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the refusal names is enough, and of the layout that takes least a byte less is refused."""
    told = Heedful()
    with monkeypatch.context() as patch, pytest.raises(NothingFits, match="nothing fits: .* the least that would do: sim:0 [0-9]+ bytes"):
        patch.setattr(Checkpoint, "read", stopping_at(0, Checkpoint.read))
        run(source, tmp_path / "refused", device_map="sim:10000", progress=told)
    (least,) = told.plans[0].least
    for number in range(20):
        record = run(source, tmp_path / str(number), device_map=f"sim:{least}")
        assert planned_peak(record) <= least
        least = planned_peak(record)
        try:
            run(source, tmp_path / "refused", device_map=f"sim:{least - 1}", progress=told)
        except NothingFits as error:
            assert f"sim:0 {least} bytes" in str(error)
            break
        shutil.rmtree(tmp_path / "refused")
    assert not told.plans[-1].fits and not list((tmp_path / "refused").rglob("*.partial"))
    assert planned_peak(run(source, tmp_path / "exactly", device_map=f"sim:{least}")) == least


class Shrinking(Heedful):
    """After the first group the simulated device holds no more than `capacity` bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
        super().__init__()
        self.capacity, self.devices = capacity, list[SimulatedDevices]()

        def made(capacities: list[int]) -> SimulatedDevices:
            self.devices.append(SimulatedDevices(capacities))
            return self.devices[-1]

        monkeypatch.setattr(stage, "SimulatedDevices", made)

    def group_started(self, number: int, count: int, names: object) -> None:
        if number == 1:
            self.devices[0].set_capacity(0, self.capacity)


def test_a_device_that_becomes_too_small_loses_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(source, tmp_path / "whole", device_map="sim:1GiB")
    with (
        monkeypatch.context() as patch,
        pytest.raises(torch.OutOfMemoryError, match="sim:0 is full.*nothing else fits: nothing fits"),
    ):
        run(source, tmp_path / "made", device_map="sim:1GiB", progress=Shrinking(patch, 10_000))
    assert not (tmp_path / "made" / "config.json").exists() and (tmp_path / "made" / ".evenround" / "manifest.json").exists()
    run(source, tmp_path / "made", device_map="sim:1GiB")
    assert contents(tmp_path / "made") == contents(tmp_path / "whole")


def test_a_device_that_becomes_smaller_is_planned_for_anew(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = planned_peak(run(source, tmp_path / "whole", device_map="sim:1GiB"))
    with monkeypatch.context() as patch:
        told = Shrinking(patch, fits - 1)
        record = run(source, tmp_path / "made", device_map="sim:1GiB", progress=told)
    assert results(tmp_path / "made") == results(tmp_path / "whole")
    blocks = record["blocks"]
    assert isinstance(blocks, list) and [any("ran out" in note for note in block["notes"]) for block in blocks][:2] == [False, True]
    assert all(block["peak_bytes"] == block["planned_bytes"] for block in blocks)
    assert all(block["peak_bytes"][0] < fits for block in blocks[1:])
    ran_out = [note for note in told.notes if "did not help" not in note]
    assert all("ran out of memory (sim:0 is full: " in note and "; it went on as single, " in note for note in ran_out)
    assert [note for block in blocks for note in block["notes"]] == told.notes
