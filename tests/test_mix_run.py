"""Mixed precision through the whole job: chosen schemes are written, recorded, kept by a resumed run, and never above the target."""

from pathlib import Path

import pytest
import torch

from conftest import ARCHITECTURES, save_model
from evenround import UserError, plan, quantize
from evenround.checkpoint import Checkpoint
from evenround.export import read_schemes
from evenround.job import Silent
from evenround.loading import read_config
from evenround.scheme import Scheme

TOKENS = torch.randint(3, 128, (8, 16), generator=torch.Generator().manual_seed(4))
LIGHT = {"iters": 2, "nsamples": 8, "seqlen": 16, "batch_size": 4, "dataset": TOKENS, "compute_dtype": "float32"}
MIX = {"avg_bits": 4.0, "options": "W2A16G32,W4A16G32,W8A16G32"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    save_model(ARCHITECTURES["llama"], folder)
    return folder


def test_chosen_schemes_are_written_and_recorded(source: Path, tmp_path: Path) -> None:
    record = quantize(source, tmp_path, format="auto_round", **LIGHT, **MIX)  # type: ignore[arg-type]
    mixture, sites = record["mixture"], record["sites"]
    assert isinstance(mixture, dict) and mixture["mean_bits"] <= 4.0 and isinstance(sites, list)
    chosen = {site["name"]: Scheme.from_dict(site["scheme"]) for site in sites if site["scheme"]}
    assert len({scheme.weight.bits for scheme in chosen.values()}) > 1
    bits = sum(chosen[site["name"]].weight.stored_bits(tuple(site["shape"])) for site in sites if site["scheme"])
    assert bits / sum(site["shape"][0] * site["shape"][1] for site in sites if site["scheme"]) == pytest.approx(mixture["mean_bits"])
    for name in chosen:
        assert chosen[name] == chosen[name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")]
    checkpoint = Checkpoint.open(tmp_path)
    stored = read_schemes(read_config(tmp_path), checkpoint.specs, checkpoint.read)
    assert {name: weight.scheme for name, weight in stored.items()} == chosen


def test_the_target_and_the_options_decide(source: Path, tmp_path: Path) -> None:
    rounded = {**LIGHT, "iters": 0, "opt_rtn": False, "format": "fake"}
    means = []
    for number, changes in enumerate(({}, {"avg_bits": 5.0}, {"options": "W2A16G32,W3A16G32,BF16"})):
        record = quantize(source, tmp_path / str(number), **rounded, **{**MIX, **changes})  # type: ignore[arg-type]
        mixture = record["mixture"]
        assert isinstance(mixture, dict)
        means.append(mixture["mean_bits"])
    assert means[0] <= 4.0 < means[1] <= 5.0 and means[2] <= 4.0 and len(set(means)) == 3


def test_the_same_command_finds_the_finished_result(source: Path, tmp_path: Path) -> None:
    first = quantize(source, tmp_path, format="fake", **LIGHT, **MIX)  # type: ignore[arg-type]
    assert quantize(source, tmp_path, format="fake", **LIGHT, **MIX) == first  # type: ignore[arg-type]
    with pytest.raises(UserError, match="mix"):
        quantize(source, tmp_path, format="fake", **LIGHT, **{**MIX, "avg_bits": 4.5})  # type: ignore[arg-type]


def test_a_simulated_device_measures_the_same(source: Path, tmp_path: Path) -> None:
    records = [quantize(source, tmp_path / device[:3], format="fake", device_map=device, **LIGHT, **MIX) for device in ("cpu", "sim:1GiB")]  # type: ignore[arg-type]
    assert records[0]["sites"] == records[1]["sites"]


def test_what_is_too_large_for_the_device_is_measured_on_the_host(source: Path, tmp_path: Path) -> None:
    class Listening(Silent):
        notes: list[str] = []

        def note(self, text: str) -> None:
            self.notes.append(text)

    wish = {**LIGHT, "recipe": "rtn", "iters": 0, "format": "fake"}
    rounding = plan(source, scheme="W8A16G32", **wish).devices[0].peak_bytes  # type: ignore[arg-type]
    told = Listening()
    small = quantize(source, tmp_path / "small", device_map=f"sim:{rounding}", progress=told, **wish, **MIX)  # type: ignore[arg-type]
    assert any("is measured on the host, as the first device ran out of memory (sim:0 is full" in note for note in told.notes)
    assert small["sites"] == quantize(source, tmp_path / "large", device_map="cpu", **wish, **MIX)["sites"]  # type: ignore[arg-type]


def test_a_plan_assumes_the_largest_option(source: Path) -> None:
    mixed = plan(source, **LIGHT, **MIX)  # type: ignore[arg-type]
    assert mixed.devices[0].peak_bytes == plan(source, scheme="W8A16G32", **LIGHT).devices[0].peak_bytes  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"avg_bits": 3.0},
            "--avg_bits and --options go together: a mean number of bits, and the schemes to choose from, such as W2A16,W4A16",
        ),
        ({**MIX, "scheme": "W4A16"}, "--scheme W4A16 is for one scheme, and --avg_bits chooses among --options; leave it out"),
        ({**MIX, "sym": False}, "--asym is for one scheme, and --avg_bits chooses among --options; leave it out"),
        (
            {**MIX, "options": "W4A16"},
            "options 'W4A16' (--options) leave nothing to choose; give at least two schemes, such as W2A16,W4A16",
        ),
        ({**MIX, "avg_bits": 1.0}, "avg_bits 1.0 (--avg_bits) cannot be kept: 2.5 is the least that --options give, scales counted"),
    ],
)
def test_wrong_wishes(source: Path, tmp_path: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        quantize(source, tmp_path, **LIGHT, **settings)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_a_layer_config_that_splits_what_servers_fuse_is_told(source: Path, tmp_path: Path) -> None:
    class Listening(Silent):
        notes: list[str] = []

        def note(self, text: str) -> None:
            self.notes.append(text)

    told = Listening()
    settings = {**LIGHT, "recipe": "rtn", "iters": 0, "format": "fake", "scheme": "W4A16G32", "layer_config": {"k_proj": "W8A16G32"}}
    quantize(source, tmp_path, progress=told, **settings)  # type: ignore[arg-type]
    first = "model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj, model.layers.0.self_attn.v_proj"
    assert (
        f"{first} have different schemes, and 2 more such groups: transformers loads that; servers that run them as one layer, such as "
        "vLLM, do not. Give them the same scheme, or leave all of them out"
    ) in told.notes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"options": "W4A16G32,FP8_DYNAMIC"},
            "'FP8_DYNAMIC' (--options): model.layers.0.self_attn.q_proj: auto-round's reader has no kernel for ",
        ),
        ({"options": "W4A16G32,MXFP8"}, "W4 g32 sym and MXFP8 A8 mx_fp cannot lie in one checkpoint of format 'auto_round' (--format)"),
        ({"avg_bits": float("nan")}, "avg_bits nan (--avg_bits) must be a positive number, such as 3.5"),
        ({"avg_bits": -3.0}, "avg_bits -3.0 (--avg_bits) must be a positive number, such as 3.5"),
    ],
)
def test_options_are_refused_before_anything_is_measured(source: Path, tmp_path: Path, settings: dict[str, object], message: str) -> None:
    for run in (lambda **wish: quantize(source, tmp_path, **wish), lambda **wish: plan(source, **wish)):
        with pytest.raises(UserError) as caught:
            run(format="auto_round", **LIGHT, **{**MIX, **settings})
        assert str(caught.value).startswith(message)
