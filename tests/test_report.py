"""What `show` says about checkpoints, runs and files of others, and that everything can be drawn."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console, RenderableType

from conftest import ARCHITECTURES, save_model
from evenround import UserError, quantize
from evenround.distance import LayerError
from evenround.report import render_show, render_verification, show
from evenround.verify import Finding, Verification

TOKENS = torch.randint(3, 128, (4, 16), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    save_model(ARCHITECTURES["gpt2"], folder, torch.bfloat16)
    return folder


@pytest.fixture(scope="module")
def run(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    options: dict[str, Any] = {"iters": 2, "nsamples": 4, "seqlen": 16, "dataset": TOKENS, "device_map": "cpu", "nblocks": 2}
    layers = {"mlp": {"bits": 8}}
    quantize(source, folder, scheme="W4A16G32", layer_config=layers, ignore_layers="h.0", format="auto_round,fake", **options)
    return folder


def drawn(parts: list[RenderableType]) -> str:
    console = Console(width=300, file=io.StringIO())
    console.print(*parts, sep="\n")
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_run(run: Path) -> None:
    values = show(run)
    assert json.loads(json.dumps(values)) == values
    assert values["kind"] == "run" and [entry["format"] for entry in values["formats"]] == ["auto_round", "fake"]
    packed, fake = values["formats"]
    weights = {"W4 g32 sym": 2 * 4 * 64 * 64, "W8 g32 sym": 2 * 8 * 64 * 64}
    for entry in values["formats"]:
        assert {label: counted["weights"] for label, counted in entry["schemes"].items()} == weights
    assert packed["quantized_weights"] == sum(weights.values()) == fake["quantized_weights"]
    assert packed["bits_per_weight"] == pytest.approx((4 + 2 * 8) / 3 + (16 + (4 + 2 * 8) / 3) / 32, abs=1e-3)
    assert fake["bits_per_weight"] == 16
    assert packed["bytes"] < fake["bytes"] and packed["source_bytes"] == fake["source_bytes"] > 0
    assert [block["blocks"] for block in values["blocks"]] == [["transformer.h.0", "transformer.h.1"], ["transformer.h.2"]]
    tuned = values["blocks"][1]
    assert tuned["ratio"] == pytest.approx(tuned["tuned_loss"] / tuned["rtn_loss"]) and tuned["seconds"] > 0
    assert set(values["seconds"]) >= {"load", "tune", "pack", "write"} and values["peak_bytes"] > 0
    text = drawn(render_show(values))
    for part in ("GPT2LMHeadModel", "W4 g32 sym x 4", "W8 g32 sym x 4", "transformer.h.0 … 1", "tuned loss", "peak memory"):
        assert part in text, part


def test_one_checkpoint(run: Path) -> None:
    values = show(run / "auto_round")
    assert values["kind"] == "checkpoint" and values["blocks"] and values["layers"][0]["scheme"]["bits"] == 4
    assert "auto_round" in drawn(render_show(values))


def test_files_of_others(source: Path, tmp_path: Path) -> None:
    save_model(ARCHITECTURES["llama"], tmp_path / "source")
    options: dict[str, Any] = {"recipe": "rtn", "device_map": "cpu", "max_shard_size": "60KB"}
    quantize(tmp_path / "source", tmp_path / "out", scheme="W3A16G32", format="llm_compressor", **options)
    with_record = show(tmp_path / "out")
    (tmp_path / "out" / "evenround.json").unlink()
    values = show(tmp_path / "out")
    assert values["schemes"] == with_record["schemes"] and values["bits_per_weight"] == with_record["bits_per_weight"] > 3.5
    assert (values["blocks"], values["source_bytes"], values["seconds"], values["model"]) == ([], None, {}, None)
    assert "W3 g32 sym x 21" in drawn(render_show(values))
    config = tmp_path / "out" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": {"quant_method": "awq"}}))
    values = show(tmp_path / "out")
    assert values["format"] == "awq" and values["schemes"] == {} and "cannot be read" in drawn(render_show(values))
    values = show(source)
    assert (values["format"], values["schemes"], values["bits_per_weight"]) == ("float", {}, None)
    assert "not quantized" in drawn(render_show(values))


def test_directories_that_cannot_be_shown(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist; pass a directory"):
        show(tmp_path / "nothing")
    with pytest.raises(UserError, match="holds no checkpoint"):
        show(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match="has no config.json; pass a checkpoint, or the output directory of a run"):
        show(tmp_path)
    (tmp_path / ".evenround").mkdir()
    with pytest.raises(UserError, match="holds an unfinished run; run the command that began it again"):
        show(tmp_path)


@pytest.mark.parametrize("damage", [{"blocks": [{}]}, {"blocks": 3}, {"sites": [{"name": 1}]}, {"totals": []}], ids=str)
def test_a_damaged_record(run: Path, tmp_path: Path, damage: dict[str, Any]) -> None:
    for path in (run / "fake").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    record = tmp_path / "evenround.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), **damage}))
    with pytest.raises(UserError, match="evenround.json is damaged: .*; delete it to see the rest"):
        show(tmp_path)


def test_a_verification_is_drawn() -> None:
    layers = tuple(LayerError(name=f"layer.{at}", scheme="W4 g32 sym", relative_rmse=0.1 * at, bound=0.6) for at in range(12))
    whole = Verification(checkpoint="out", findings=(), layers=layers, loss=3.25, reference_loss=3.125, tensors=7, notes=("[note]",))
    text = drawn(render_verification(whole))
    for part in ("layer.11", "layer.2", "1.1000", "loss on a short text: 3.2500, of the original 3.1250", "note: [note]"):
        assert part in text, part
    assert "layer.1 " not in text and "out: all 7 tensors read back, nothing wrong" in text
    text = drawn(render_verification(Verification(checkpoint="out", findings=(Finding("[place]", "is wrong", "mend it"),))))
    for part in ("1 finding(s)", "[place]", "is wrong", "mend it"):
        assert part in text, part
    assert "nothing wrong" not in text


@pytest.mark.parametrize("value", [7, {"a": 1}, [], [None]])
def test_architectures_that_are_no_names(value: object, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "fake", tmp_path / "fake")
    config = json.loads((tmp_path / "fake" / "config.json").read_text())
    (tmp_path / "fake" / "config.json").write_text(json.dumps({**config, "architectures": value}))
    assert show(tmp_path / "fake")["architecture"] is None
