"""Whole checkpoints pass; every kind of damage is found and named."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conftest import ARCHITECTURES, save_model
from evenround import UserError, quantize
from evenround.checkpoint import Checkpoint
from evenround.distance import far_codes, layer_error
from evenround.numerics.grouping import to_groups
from evenround.numerics.weights import quantize as round_weight
from evenround.scheme import WeightScheme
from evenround.verify import Verification, verify

FORMATS = ("auto_round", "llm_compressor", "fake")
Q = "model.layers.1.self_attn.q_proj"
TOKENS = torch.randint(3, 128, (4, 16), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    save_model(ARCHITECTURES["llama_tied"], folder, torch.bfloat16)
    return folder


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in all formats, several shards each, rounded to nearest."""
    folder = tmp_path_factory.mktemp("whole")
    make(source, folder, format=",".join(FORMATS), max_shard_size="60KB")
    return folder


def make(source: Path, folder: Path, **changes: Any) -> dict[str, object]:
    return quantize(source, folder, **{"scheme": "W4A16G32", "recipe": "rtn", "device_map": "cpu", **changes})


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of one format's checkpoint to damage."""
    return lambda form: shutil.copytree(whole / form, tmp_path / form)


def overwrite(folder: Path, name: str, change: Callable[[Tensor], object]) -> None:
    """Change a tensor in its file; `change` works in place."""
    files = Checkpoint.open(folder)
    tensor = files.read(name)
    change(tensor)
    with files.homes[name].path.open("r+b") as file:
        file.seek(files.homes[name].tensors[name][1])
        file.write(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Write the whole checkpoint anew, as one file, after a change of its tensors."""
    files = Checkpoint.open(folder)
    tensors = {name: files.read(name) for name in files.names}
    change(tensors)
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def said(result: Verification) -> str:
    return "\n".join(f"{finding.place}: {finding.what} ({finding.fix})" for finding in result.findings)


def codes_of(form: str, name: str = Q) -> str:
    return f"{name}.{'qweight' if form == 'auto_round' else 'weight_packed'}"


def scales_of(form: str, name: str = Q) -> str:
    return f"{name}.{'scales' if form == 'auto_round' else 'weight_scale'}"


def test_whole_checkpoints_pass(whole: Path, source: Path, form: str) -> None:
    alone, against = verify(whole / form), verify(whole / form, source)
    assert alone.ok and against.ok, said(alone) + said(against)
    assert not alone.layers and len(against.layers) == 21
    assert all(0 < layer.relative_rmse < 0.6 * layer.bound for layer in against.layers)
    assert alone.loss is None and "no tokenizer" in alone.notes[0]
    assert json.loads(json.dumps(against.to_dict()))["ok"] is True


@pytest.mark.parametrize(
    "changes",
    [
        {"bits": 2, "sym": False},
        {"bits": 3, "group_size": -1, "sym": False},
        {"bits": 3, "group_size": 0},
        {"bits": 5, "group_size": 0, "sym": False},
        {"bits": 8, "group_size": 16},
        {"quant_lm_head": True, "layer_config": '{"down_proj": {"bits": 8, "sym": false}}', "ignore_layers": "layers.0"},
    ],
    ids=str,
)
def test_schemes_pass(source: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    make(source, tmp_path, format="auto_round,llm_compressor", **changes)
    for form in FORMATS[:2]:
        result = verify(tmp_path / form, source)
        assert result.ok and result.layers, said(result)


FLOATS = ["FP8_STATIC", "FPW8A16", "FP8_DYNAMIC", "INT8", "MXFP4", "MXFP8_RCEIL", "NVFP4", "MXINT4", "NVFP4A16"]
WITH_TEXT = {"dataset": TOKENS, "seqlen": 16, "nsamples": 4, "batch_size": 2}


@pytest.mark.parametrize("scheme", FLOATS)
def test_float_schemes_pass(source: Path, tmp_path: Path, scheme: str) -> None:
    for form in FORMATS:
        try:
            make(source, tmp_path / form, scheme=scheme, format=form, **WITH_TEXT)
        except UserError as error:
            assert f"use --format {'auto_round' if form == 'llm_compressor' else 'llm_compressor'}" in str(error)
            continue
        with_record = verify(tmp_path / form, source)
        (tmp_path / form / "evenround.json").unlink()
        for result in (with_record, *([verify(tmp_path / form, source)] if form != "fake" else ())):
            assert result.ok, said(result)
            assert result.layers and all(0 < layer.relative_rmse < 0.75 * layer.bound for layer in result.layers)


@pytest.mark.parametrize("scheme", ["FP8_BLOCK", "MXFP4", "NVFP4"])
def test_tuned_float_schemes_pass(tiny: Path, tmp_path: Path, scheme: str) -> None:
    layers = {"layers.[123]": {"bits": 16}}
    text = {"dataset": "demo", "seqlen": 16, "nsamples": 4, "batch_size": 2}
    quantize(tiny, tmp_path, scheme=scheme, layer_config=layers, format="llm_compressor", iters=3, lr=0.2, keep="last", **text)  # type: ignore[arg-type]
    result = verify(tmp_path, tiny)
    assert result.ok and len(result.layers) == 7, said(result)
    assert result.loss is not None and result.reference_loss is not None and abs(result.loss - result.reference_loss) < 0.3
    overwrite(tmp_path, f"{Q0}.{'weight' if scheme == 'FP8_BLOCK' else 'weight_packed'}", lambda codes: flip(codes, 0x30))
    assert "code(s) are not the original's weights" in said(verify(tmp_path, tiny))


Q0 = "model.layers.0.self_attn.q_proj"


def flip(tensor: Tensor, bits: int) -> None:
    """Flip these bits of the sixth byte."""
    tensor.view(torch.uint8).view(-1)[5].bitwise_xor_(bits)


@pytest.fixture(scope="module")
def floats(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("floats")
    for scheme in ("FP8_STATIC", "MXFP4", "NVFP4", "INT8"):
        make(source, folder / scheme, scheme=scheme, format="llm_compressor", **WITH_TEXT)
    make(source, folder / "fake", scheme="FP8_STATIC", format="fake", **WITH_TEXT)
    return folder


@pytest.mark.parametrize(
    ("scheme", "tensor", "change", "told"),
    [
        ("FP8_STATIC", "weight", lambda codes: codes.view(torch.uint8).view(-1)[3:5].fill_(0xFF), f"{Q}: 2 of 4096 codes are NaN"),
        ("FP8_STATIC", "weight_scale", lambda scale: scale[2:4].neg_(), f"{Q}: 2 of 64 scales are negative"),
        ("FP8_STATIC", "weight_scale", lambda scale: scale[2:4].mul_(torch.inf), f"{Q}: 2 scale(s) NaN or infinite, 0 zero, of 64"),
        ("FP8_STATIC", "input_scale", lambda scale: scale.fill_(0), f"{Q}.input_scale: is 0, no positive number"),
        ("MXFP4", "weight_scale", lambda scale: scale[0, :2].fill_(255), f"{Q}: 2 scale(s) NaN or infinite, 0 zero, of 128"),
        ("NVFP4", "weight_scale", lambda scale: scale.view(torch.uint8)[0, :2].fill_(0x7F), f"{Q}: 2 scale(s) NaN or infinite"),
        ("NVFP4", "weight_scale", lambda scale: scale.view(torch.uint8)[0, :2].fill_(0), f"{Q}: 0 scale(s) NaN or infinite, 2 zero"),
        ("NVFP4", "input_global_scale", lambda scale: scale.fill_(torch.nan), f"{Q}.input_global_scale: is nan, no positive number"),
        (
            "NVFP4",
            "weight_global_scale",
            lambda scale: scale.mul_(2),
            "another weight_global_scale than layers that servers run with it as one: k_",
        ),
        ("fake", "input_scale", lambda scale: scale.neg_(), f"{Q}.input_scale: is -"),
    ],
)
def test_damaged_floats(floats: Path, tmp_path: Path, scheme: str, tensor: str, change: Callable[[Tensor], object], told: str) -> None:
    folder = shutil.copytree(floats / scheme, tmp_path / scheme)
    assert verify(folder).ok
    overwrite(folder, f"{Q}.{tensor}", change)
    assert told in said(verify(folder))


@pytest.mark.parametrize(("scheme", "bits"), [("FP8_STATIC", 0x10), ("MXFP4", 0x02), ("NVFP4", 0x80), ("INT8", 0x08)])
def test_a_flipped_bit_in_float_codes(floats: Path, source: Path, tmp_path: Path, scheme: str, bits: int) -> None:
    folder = shutil.copytree(floats / scheme, tmp_path / scheme)
    leaf = "weight" if scheme in ("FP8_STATIC", "INT8") else "weight_packed"
    overwrite(folder, f"{Q}.{leaf}", lambda codes: flip(codes, bits))
    assert verify(folder).ok, "it cannot be known without the original"
    assert said(verify(folder, source)).startswith(f"{Q}: 1 code(s) are not the original's weights rounded to their grid")


def test_codes_above_the_width(source: Path, tmp_path: Path) -> None:
    make(source, tmp_path, scheme="INT4", format="llm_compressor")
    overwrite(tmp_path, f"{Q}.weight", lambda codes: codes[0, :3].fill_(8))
    assert f"{Q}: 3 of 4096 codes are above 15" in said(verify(tmp_path))


def test_activations_of_the_record(floats: Path, tmp_path: Path) -> None:
    for form in ("fake", "INT8"):
        folder = shutil.copytree(floats / form, tmp_path / form)
        changed = {"act_bits": 8, "act_group_size": -1, "act_sym": True, "act_data_type": "fp", "act_dynamic": True}
        edit_json(folder / "evenround.json", lambda values, changed=changed: values["sites"][0]["scheme"].update(changed))
        text = said(verify(folder))
        if form == "fake":
            assert f"{Q0}: has inputs A8 fp tensor static here, the record says A8 fp token" in text
        else:
            assert f"{Q0}: is W8 channel sym A8 int token here, the record says W8 channel sym A8 fp token" in text


@pytest.mark.parametrize("scheme", ["W4A16G32", "NVFP4"])
def test_a_quantized_tied_head_passes(source: Path, tmp_path: Path, scheme: str) -> None:
    make(source, tmp_path, scheme=scheme, quant_lm_head=True, format="auto_round,llm_compressor,fake", **WITH_TEXT)
    for form in FORMATS:
        result = verify(tmp_path / form, source)
        assert result.ok and [layer.name for layer in result.layers].count("lm_head") == 1, said(result)
    overwrite(tmp_path / "fake", "model.embed_tokens.weight", lambda weight: weight[0, 0].add_(2**-7))
    assert "model.embed_tokens.weight: is not quantized, and" in said(verify(tmp_path / "fake", source))


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "opt", "phi"])
def test_architectures_pass(tmp_path: Path, name: str) -> None:
    save_model(ARCHITECTURES[name], tmp_path / "source", torch.float16)
    make(tmp_path / "source", tmp_path / "out", format="auto_round,fake")
    for form in ("auto_round", "fake"):
        result = verify(tmp_path / "out" / form, tmp_path / "source")
        assert result.ok and result.layers, said(result)


def test_loss_of_the_shipped_model(tiny: Path, tmp_path: Path) -> None:
    make(tiny, tmp_path, scheme="W4A16", layer_config={"layers.[12]": {"bits": 16}}, format="llm_compressor")
    result = verify(tmp_path, tiny)
    assert result.ok and result.loss is not None and result.reference_loss is not None
    assert 3 < result.reference_loss < 6 and abs(result.loss - result.reference_loss) < 0.02
    short = verify(tmp_path, text="Call me Ishmael. Some years ago, never mind how long precisely.")
    assert short.loss is not None and short.reference_loss is None and short.loss != result.loss


@pytest.mark.parametrize("form", FORMATS[:2])
def test_scales(copy: Callable[[str], Path], form: str) -> None:
    folder = copy(form)
    overwrite(folder, scales_of(form), lambda scale: scale.view(-1)[3].fill_(float("nan")))
    overwrite(folder, scales_of(form, "model.layers.2.mlp.up_proj"), lambda scale: scale.mul_(0))
    text = said(verify(folder))
    assert f"{Q}: 1 scale(s) NaN or infinite, 0 zero, of 128" in text and "up_proj: 0 scale(s) NaN or infinite, 192 zero" in text


@pytest.mark.parametrize("form", FORMATS[:2])
def test_a_flipped_bit_in_the_codes(copy: Callable[[str], Path], source: Path, form: str) -> None:
    folder = copy(form)
    overwrite(folder, codes_of(form), lambda words: words.view(-1)[5].bitwise_xor_(1 << 9))
    assert verify(folder).ok, "it cannot be known without the original"
    assert said(verify(folder, source)).startswith(f"{Q}: 1 code(s) are not the original's weights rounded to their grid")


def test_tuned_codes_and_a_flipped_byte_in_them(source: Path, tmp_path: Path) -> None:
    make(source, tmp_path, bits=3, iters=3, dataset=TOKENS, seqlen=16, nsamples=4, batch_size=2, lr=0.2, recipe="auto-round", keep="last")
    whole = verify(tmp_path, source)
    assert whole.ok and max(layer.relative_rmse / layer.bound for layer in whole.layers) > 0.5
    overwrite(tmp_path, codes_of("auto_round"), lambda words: words.view(-1)[5].bitwise_xor_(0xFF00))
    assert "code(s) are not the original's weights" in said(verify(tmp_path, source))


@pytest.mark.parametrize("form", FORMATS)
def test_layers_changed_places(copy: Callable[[str], Path], source: Path, form: str) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.0.self_attn.q_proj.")]:
            other = name.replace("layers.0", "layers.1")
            tensors[name], tensors[other] = tensors[other], tensors[name]

    folder = copy(form)
    rewrite(folder, change)
    if form != "fake":
        (folder / "evenround.json").unlink()
        assert verify(folder).ok, "it cannot be known without the original"
    found = [finding for finding in verify(folder, source).findings if "another layer's weights" in finding.what]
    assert [finding.place for finding in found] == ["model.layers.0.self_attn.q_proj", Q]


def test_codes_of_methods_that_move_weights(copy: Callable[[str], Path], source: Path) -> None:
    folder = copy("llm_compressor")
    (folder / "evenround.json").unlink()
    overwrite(folder, codes_of("llm_compressor"), lambda words: words.view(-1)[5].bitwise_xor_(1 << 9))
    assert verify(folder, source).ok, "codes of unknown origin are judged by their layer's error only"


def test_unquantized_tensors(copy: Callable[[str], Path], source: Path, form: str) -> None:
    folder = copy(form)
    overwrite(folder, "model.embed_tokens.weight", lambda weight: weight[7].neg_())
    overwrite(folder, "model.norm.weight", lambda weight: weight[1:3].fill_(float("nan")))
    text = said(verify(folder, source))
    assert "model.embed_tokens.weight: is not quantized, and 64 bytes differ from the original's" in text
    assert "model.norm.weight: 2 value(s) NaN or infinite" in text


def test_fake_weights(copy: Callable[[str], Path], source: Path) -> None:
    folder = copy("fake")
    overwrite(folder, f"{Q}.weight", lambda weight: weight.mul_(2))
    assert f"{Q}: relative error" in said(verify(folder, source)) and verify(folder).ok


@pytest.mark.parametrize("form", FORMATS)
def test_files(copy: Callable[[str], Path], form: str) -> None:
    folder = copy(form)
    shard = sorted(folder.glob("*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[:-10])
    text = said(verify(folder))
    assert f"{shard} is cut short" in text and "(quantize again, or copy it again)" in text
    shard.unlink()
    assert f"{shard} is missing" in said(verify(folder))
    shard.write_bytes(data)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config[:-5])
    assert "config.json: its JSON cannot be read" in said(verify(folder))
    (folder / "config.json").unlink()
    assert "config.json cannot be read: No such file" in said(verify(folder))
    (folder / "config.json").write_text(config.replace('"llama"', '"lama"'))
    assert "config.json cannot be used" in said(verify(folder))


def test_names(copy: Callable[[str], Path], source: Path, form: str) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.input_layernorm.weigth"] = tensors.pop("model.layers.0.input_layernorm.weight")
        if form != "fake":
            tensors[f"{scales_of(form)}x"] = tensors.pop(scales_of(form))

    folder = copy(form)
    rewrite(folder, rename)
    text = said(verify(folder))
    assert "model.layers.0.input_layernorm.weight: is missing; did you mean 'model.layers.0.input_layernorm.weigth'?" in text
    assert form == "fake" or f"the checkpoint has no {scales_of(form)}" in text
    assert "input_layernorm.weigth: is not in the original" in said(verify(folder, source))


@pytest.mark.parametrize("form", FORMATS[:2])
def test_a_weight_packed_and_plain(copy: Callable[[str], Path], form: str) -> None:
    folder = copy(form)
    rewrite(folder, lambda tensors: tensors.update({f"{Q}.weight": torch.zeros(64, 64)}))
    text = said(verify(folder))
    assert f"{Q}.weight: is there twice, packed and as a plain weight" in text
    assert "bytes of tensors and headers, the record says" in text


def test_twice_under_two_names(copy: Callable[[str], Path], form: str) -> None:
    folder = copy(form)
    rewrite(folder, lambda tensors: tensors.update({"norm.weight": tensors["model.norm.weight"].clone()}))
    assert "model.norm.weight: is there under several names: model.norm.weight, norm.weight" in said(verify(folder))


@pytest.mark.parametrize("form", FORMATS[:2])
def test_packed_weights_of_no_layer(copy: Callable[[str], Path], form: str) -> None:
    folder = copy(form)
    rewrite(folder, lambda tensors: tensors.update({scales_of(form, "model.layers.7.mlp.gate_proj"): torch.zeros(1)}))
    assert "model.layers.7.mlp.gate_proj: is packed, but no linear layer of LlamaForCausalLM has that name" in said(verify(folder))
    edit_json(folder / "config.json", lambda config: config.pop("quantization_config"))
    text = said(verify(folder))
    assert "config.json: has no quantization_config, but there are packed tensors" in text


def test_kinds_of_tensors(copy: Callable[[str], Path], source: Path, form: str) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"] = torch.ones(65)
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].to(torch.uint8)

    folder = copy(form)
    rewrite(folder, change)
    text = said(verify(folder, source))
    assert "model.norm.weight: has shape [65], but config.json makes it [64]" in text
    assert "model.norm.weight: is torch.float32 [65], the original torch.bfloat16 [64]" in text
    assert "model.embed_tokens.weight: is torch.uint8; float16, bfloat16 or float32 is needed" in text


def test_config_against_tensors(copy: Callable[[str], Path]) -> None:
    folder = copy("auto_round")
    edit_json(folder / "config.json", lambda config: config["quantization_config"].update(group_size=16))
    assert "down_proj.qzeros has shape [3, 8], but quantization_config (config.json) makes it [6, 8]" in said(verify(folder))
    folder = copy("llm_compressor")
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    section["config_groups"]["group_0"]["weights"]["num_bits"] = 8
    edit_json(folder / "config.json", lambda config: config.update(quantization_config=section))
    assert "weight_packed has shape" in said(verify(folder))
    edit_json(folder / "config.json", lambda config: config.update(quantization_config={"quant_method": "gptq"}))
    assert "quant_method 'gptq' in config.json cannot be read" in said(verify(folder))
    for section in (True, [], {"quant_method": []}):
        edit_json(folder / "config.json", lambda config, section=section: config.update(quantization_config=section))
        assert "config.json: quantization_config must be an object with a quant_method (restore the file)" in said(verify(folder))


def test_zero_points(copy: Callable[[str], Path], source: Path, tmp_path: Path) -> None:
    folder = copy("auto_round")
    overwrite(folder, f"{Q}.qzeros", lambda words: words.view(-1)[0].bitwise_xor_(1))
    assert f"{Q}: 1 of 128 zero points are not 8 (symmetric)" in said(verify(folder))
    make(source, tmp_path / "asym", scheme="W4A16", group_size=0, sym=False, format="llm_compressor")
    overwrite(tmp_path / "asym", f"{Q}.weight_zero_point", lambda zero: zero.fill_(60))
    assert f"{Q}: 1 of 1 zero points are not 0 to 15" in said(verify(tmp_path / "asym"))


def test_padding_bits(tmp_path: Path) -> None:
    config = type(ARCHITECTURES["llama_tied"])(**{**ARCHITECTURES["llama_tied"].to_dict(), "intermediate_size": 80})
    save_model(config, tmp_path / "source", torch.bfloat16)
    make(tmp_path / "source", tmp_path / "out", bits=3, group_size=16, sym=False, format="llm_compressor")
    assert verify(tmp_path / "out", tmp_path / "source").ok
    for name in ("mlp.down_proj.weight_packed", "mlp.up_proj.weight_zero_point"):
        overwrite(tmp_path / "out", f"model.layers.0.{name}", lambda words: words[-1, -1].bitwise_or_(-(2**31)))
        assert f"{name}: has bits set after its last code" in said(verify(tmp_path / "out"))


def test_record(copy: Callable[[str], Path]) -> None:
    folder = copy("llm_compressor")
    record = folder / "evenround.json"
    whole = record.read_text()
    edit_json(record, lambda values: values["sites"][0]["scheme"].update(bits=3))
    assert "layers.0.self_attn.q_proj: is W4 g32 sym here, the record says W3 g32 sym" in said(verify(folder))
    edit_json(record, lambda values: values["sites"][0].update(scheme=None))
    assert "is W4 g32 sym here, the record says not quantized" in said(verify(folder))
    record.write_text(whole)
    edit_json(record, lambda values: values["sites"][0].update(shape=[64, 32]))
    assert "has shape [64, 64], the record says [64, 32]" in said(verify(folder))
    record.write_text(whole)
    edit_json(record, lambda values: values["formats"].pop("llm_compressor"))
    assert "is of a run that wrote auto_round, fake; this is llm_compressor" in said(verify(folder))
    edit_json(record, lambda values: values.pop("formats"))
    assert "evenround.json: is damaged: KeyError('formats')" in said(verify(folder))
    record.write_text("{")
    assert "evenround.json is damaged" in said(verify(folder))


def test_lost_tensors(tmp_path: Path) -> None:
    save_model(ARCHITECTURES["llama"], tmp_path / "source", torch.bfloat16)
    rewrite(tmp_path / "source", lambda tensors: tensors.update({"extra.table": torch.ones(3)}))
    make(tmp_path / "source", tmp_path / "out")
    assert verify(tmp_path / "out", tmp_path / "source").ok
    rewrite(tmp_path / "out", lambda tensors: tensors.pop("extra.table"))
    assert "extra.table: is in the original and not here" in said(verify(tmp_path / "out", tmp_path / "source"))


def test_a_reference_that_cannot_be_used(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is quantized already"):
        verify(whole / "auto_round", whole / "llm_compressor")
    with pytest.raises(UserError, match="^--reference .*nothing is not a directory; give a checkpoint directory"):
        verify(whole / "auto_round", tmp_path / "nothing")
    config = type(ARCHITECTURES["llama_tied"])(**{**ARCHITECTURES["llama_tied"].to_dict(), "intermediate_size": 128})
    save_model(config, tmp_path, torch.bfloat16)
    for form in FORMATS:
        (finding,) = verify(whole / form, tmp_path).findings
        assert finding.what.startswith("is not the same model: its model.layers.0.mlp.gate_proj.weight is of shape [128, 64], the ch")
        assert "is of shape [96, 64] (9 tensors differ)" in finding.what and finding.place == str(tmp_path)
    save_model(ARCHITECTURES["gpt2"], tmp_path, torch.bfloat16)
    text = said(verify(whole / "auto_round", tmp_path))
    assert text.count("\n") == 0 and "is not the same model: it is GPT2LMHeadModel, the checkpoint LlamaForCausalLM" in text


def test_a_layer_in_the_place_of_one_of_another_shape(copy: Callable[[str], Path], source: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for leaf in ("qweight", "qzeros", "scales"):
            tensors[f"model.layers.0.mlp.gate_proj.{leaf}"] = tensors[f"{Q}.{leaf}"].clone()

    folder = copy("auto_round")
    rewrite(folder, change)
    assert "model.layers.0.mlp.gate_proj: has shape [64, 64], the original [96, 64]" in said(verify(folder, source))


def test_paths_that_are_no_checkpoints(whole: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", whole / "fake" / "config.json"):
        with pytest.raises(UserError, match=f"^{path} is not a directory; give a checkpoint directory"):
            verify(path)
    with pytest.raises(
        UserError, match=f"is no checkpoint itself; give one of the folders in it: {whole}/auto_round, {whole}/fake, {whole}/llm_compressor"
    ):
        verify(whole)
    (tmp_path / ".evenround").mkdir()
    with pytest.raises(UserError, match="holds an unfinished run; run the command that began it again"):
        verify(tmp_path)


def test_a_tokenizer_that_cannot_be_loaded_is_a_note(copy: Callable[[str], Path]) -> None:
    folder = copy("fake")
    (folder / "tokenizer.json").write_text("{")
    assert "no loss was computed: the tokenizer in" in verify(folder).notes[0]


@settings(max_examples=60, deadline=None)
@given(
    bits=st.integers(2, 8),
    group=st.sampled_from([-1, 0, 16, 32]),
    symmetric=st.booleans(),
    clip=st.floats(0.6, 1.0),
    seed=st.integers(0, 2**32),
    scale=st.floats(1e-3, 1e3),
)
def test_every_rounding_is_within_the_bounds(bits: int, group: int, symmetric: bool, clip: float, seed: int, scale: float) -> None:
    random = torch.Generator().manual_seed(seed)
    scheme = WeightScheme(bits=bits, group_size=group, symmetric=symmetric)
    weight = torch.randn(24, 64, generator=random) * scale
    rows = 1 if group == 0 else 24 * 64 // (64 if group == -1 else group)
    offset = torch.rand(rows, 24 * 64 // rows, generator=random) - 0.5
    tuned, plain = round_weight(weight, scheme, offset, (clip, 1.0)), round_weight(weight, scheme)
    assert far_codes(tuned, weight, travel=0.5, exact=True) == 0
    assert far_codes(plain, weight, travel=0.0, exact=True) == 0
    error = layer_error("layer", scheme, plain.dequantize(), weight)
    assert error.relative_rmse <= 0.6 * error.bound or error.bound == 1.1
    assert error.relative_rmse <= error.bound
    other = round_weight(torch.randn(24, 64, generator=random) * scale, scheme)
    swapped = layer_error("layer", scheme, other.dequantize(), weight)
    assert swapped.relative_rmse > swapped.bound or bits == 2


FLOAT_SCHEMES = [
    WeightScheme(bits=8, group_size=-1, dtype="fp"), WeightScheme(bits=8, group_size=0, dtype="fp"),
    WeightScheme(bits=8, group_size=(16, 24), dtype="fp"), WeightScheme(bits=4, group_size=32, dtype="mx_fp"),
    WeightScheme(bits=8, group_size=32, dtype="mx_fp"), WeightScheme(bits=4, group_size=32, dtype="mx_fp_rceil"),
    WeightScheme(bits=4, group_size=32, dtype="mx_int"), WeightScheme(bits=4, group_size=16, dtype="nv_fp"),
]  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(scheme=st.sampled_from(FLOAT_SCHEMES), clip=st.floats(0.7, 1.0), seed=st.integers(0, 2**32), scale=st.floats(1e-3, 1e3))
def test_every_rounding_to_floats_is_within_the_bounds(scheme: WeightScheme, clip: float, seed: int, scale: float) -> None:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(32, 96, generator=random) * scale
    offset = torch.rand(to_groups(weight, scheme.group_size).shape, generator=random) - 0.5
    tuned, plain = round_weight(weight, scheme, offset, (clip, 1.0)), round_weight(weight, scheme)
    assert far_codes(tuned, weight, travel=0.5, exact=True) == 0
    assert far_codes(plain, weight, travel=0.0, exact=True) == 0
    error = layer_error("layer", scheme, plain.dequantize(), weight)
    assert 0 < error.relative_rmse <= 0.75 * error.bound
    other = round_weight(torch.randn(32, 96, generator=random) * scale, scheme)
    swapped = layer_error("layer", scheme, other.dequantize(), weight)
    assert swapped.relative_rmse > swapped.bound
    damaged = plain.codes.clone()
    damaged[3, 5] ^= 1 << scheme.bits - 1
    expected = int(plain.codes[3, 5] & (1 << scheme.bits - 1) - 1 > 0)  # 0 has no other sign
    assert far_codes(replace(plain, codes=damaged), weight, travel=0.0, exact=True) == expected


def test_offsets_as_auto_round_adds_them() -> None:
    scheme = WeightScheme(bits=8, group_size=-1, dtype="fp")
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    plain = round_weight(weight, scheme)
    ratio = plain.dequantize() / plain.scales() + 0.4  # far more than a step of small numbers
    moved = replace(plain, codes=ratio.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    assert far_codes(moved, weight, travel=0.5, exact=True, whole_steps=False) == 0 < far_codes(moved, weight, travel=0.5, exact=True)


def test_a_layer_of_zeros() -> None:
    scheme = WeightScheme(bits=4, group_size=16)
    zeros = torch.zeros(16, 32)
    assert layer_error("layer", scheme, round_weight(zeros, scheme).dequantize(), zeros).relative_rmse == 0
    assert layer_error("layer", scheme, torch.ones(16, 32), zeros).relative_rmse > 1


def test_padding_of_tiles_and_groups_does_not_narrow_the_bound() -> None:
    """Zeros that fill up a tile lie where the grid is finest; an intact layer at a tile's edge would be called damaged."""
    weight = torch.randn(36, 72, generator=torch.Generator().manual_seed(3))
    whole = layer_error("layer", WeightScheme(bits=8, group_size=(36, 72), dtype="fp"), weight, weight).bound
    cut = layer_error("layer", WeightScheme(bits=8, group_size=(128, 128), dtype="fp"), weight, weight).bound
    assert cut == pytest.approx(whole)
