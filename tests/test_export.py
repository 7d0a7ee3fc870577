"""Formats: exact round trips, bytes that auto-round 0.16.1 and compressed-tensors write, loading by transformers, and every message."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from evenround.checkpoint import Checkpoint, TensorSpec
from evenround.errors import UserError
from evenround.export import EXPORTERS, Exporter, StoredWeight, format_of, get_exporter, read_inputs, read_schemes, tensor_prefix
from evenround.export.autoround_config import SchemeFields
from evenround.model import Site
from evenround.numerics.packing import pack_bits
from evenround.numerics.quantized import QuantizedWeight
from evenround.numerics.weights import quantize as round_weight
from evenround.scheme import PRESETS, ActivationScheme, Scheme, WeightScheme

Table = dict[str, Scheme | None]


def scheme(bits: int = 4, group_size: int = 32, symmetric: bool = True) -> Scheme:
    return Scheme(weight=WeightScheme(bits=bits, group_size=group_size, symmetric=symmetric))


def site(name: str = "model.layers.0.mlp.up_proj", shape: tuple[int, int] = (32, 64), **changes: Any) -> Site:
    fields = {
        "checkpoint_name": name + ".weight", "transposed": False, "block": int(name.split(".")[2]) if "layers." in name else None,
        "is_head": name == "lm_head", "dtype": torch.bfloat16, "has_bias": False,
    }  # fmt: skip
    return Site(name=name, shape=shape, **{**fields, **changes})


def random_weight(wanted: Scheme, shape: tuple[int, int], seed: int = 0) -> QuantizedWeight:
    """Any codes and scales that a file may hold."""
    generator, weight = torch.Generator().manual_seed(seed), wanted.weight
    codes = torch.randint(0, 1 << weight.bits, shape, generator=generator, dtype=torch.uint8)
    scales = weight.scale_shape(shape)
    values = torch.randn(scales, generator=generator) / 16
    inputs = torch.rand(1, generator=generator) + 0.01 if wanted.activation.calibrated else None
    if weight.dtype == "int":
        zero_point = torch.randint(0, 1 << weight.bits, scales, generator=generator, dtype=torch.uint8)
        zero_point = torch.full_like(zero_point, 1 << weight.bits - 1) if weight.symmetric else zero_point
        return QuantizedWeight(codes, values.to(torch.float16), zero_point, weight, None, inputs)
    if weight.bits == 8:
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    scale = values.abs() if weight.dtype == "fp" else torch.randint(90, 160, scales, generator=generator, dtype=torch.uint8)
    whole = None
    if weight.dtype == "nv_fp":
        scale, whole = (values.abs() + 0.01).to(torch.float8_e4m3fn), torch.rand(1, generator=generator) + 0.5
    return QuantizedWeight(codes, scale, None, weight, whole, inputs)


def specs_of(tensors: dict[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(dtype=tensor.dtype, shape=tuple(tensor.shape)) for name, tensor in tensors.items()}


def write(name: str, table: Table, sites: list[Site], default: Scheme | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of a checkpoint with random weights."""
    exporter = get_exporter(name).for_schemes(table)
    tensors: dict[str, Tensor] = {}
    for one in sites:
        wanted = table[one.name]
        if wanted is None:
            tensors[one.checkpoint_name] = torch.zeros(one.shape)
        else:
            exporter.check(one, wanted)
            tensors |= exporter.pack(one, random_weight(wanted, one.shape), wanted)
    config = exporter.quantization_config(table, sites, {"iters": 3}, default or next(filter(None, table.values())))
    return {"quantization_config": config}, tensors


def read(config: dict[str, Any], tensors: dict[str, Tensor], modules: dict[str, str] | None = None) -> dict[str, StoredWeight]:
    return read_schemes(config, specs_of(tensors), tensors.__getitem__, modules)


SCHEMES = st.builds(scheme, st.integers(2, 8), st.sampled_from([16, 32, -1, 0]), st.booleans())


# Round trips


@settings(deadline=None)
@given(wanted=SCHEMES, rows=st.integers(1, 4), columns=st.integers(1, 4), seed=st.integers(0, 9))
def test_auto_round_gives_back_what_it_packed(wanted: Scheme, rows: int, columns: int, seed: int) -> None:
    check_round_trip(EXPORTERS["auto_round"], wanted, (32 * rows, 32 * columns), seed)


@settings(deadline=None)
@given(wanted=SCHEMES, rows=st.integers(1, 40), columns=st.integers(1, 70), seed=st.integers(0, 9))
def test_llm_compressor_gives_back_what_it_packed(wanted: Scheme, rows: int, columns: int, seed: int) -> None:
    width = columns * wanted.weight.group_size if wanted.weight.group_size > 0 else columns
    check_round_trip(EXPORTERS["llm_compressor"], wanted, (rows, width), seed)


def check_round_trip(exporter: Exporter, wanted: Scheme, shape: tuple[int, int], seed: int) -> None:
    one, quantized = site(shape=shape), random_weight(wanted, shape, seed)
    exporter = exporter.for_schemes({one.name: wanted})
    exporter.check(one, wanted)
    tensors = exporter.pack(one, quantized, wanted)
    assert specs_of(tensors) == exporter.tensor_specs(one, wanted)
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    config = json.loads(json.dumps({"quantization_config": exporter.quantization_config({one.name: wanted}, [one], {}, wanted)}))
    modules = {one.name: one.name}
    stored = read(config, tensors, modules)[one.name]
    assert (stored.shape, stored.scheme, set(stored.tensors)) == (shape, exporter.stored(wanted), set(tensors))
    back = stored.unpack(tensors.__getitem__)
    assert torch.equal(back.codes, quantized.codes)
    assert torch.equal(back.dequantize(), quantized.dequantize())
    for ours, theirs in ((back.global_scale, quantized.global_scale), (back.input_scale, quantized.input_scale)):
        assert ours is theirs is None or torch.equal(ours, theirs)  # type: ignore[arg-type]
    if stored.scheme.weight == wanted.weight:
        assert torch.equal(back.scale.view(torch.uint8), quantized.scale.view(torch.uint8))
        assert back.zero_point is quantized.zero_point is None or torch.equal(back.zero_point, quantized.zero_point)  # type: ignore[arg-type]
    inputs = read_inputs(config, specs_of(tensors), modules, {one.name: stored})
    assert {name: found.scheme for name, found in inputs.items()} == (
        {one.name: exporter.stored(wanted).activation} if wanted.activation.quantized else {}
    )


def loads(name: str, wanted: Scheme) -> bool:
    try:
        EXPORTERS[name].check(site(shape=(128, 256)), wanted)
    except UserError:
        return False
    return True


@pytest.mark.parametrize(("name", "preset"), [(name, preset) for name in ("auto_round", "llm_compressor") for preset in PRESETS])
def test_presets_come_back(name: str, preset: str) -> None:
    if not loads(name, PRESETS[preset]):
        pytest.skip("refused")
    check_round_trip(EXPORTERS[name], PRESETS[preset], (128, 256), 0)


def test_what_each_format_takes() -> None:
    takes = {name: {preset for preset in PRESETS if not loads(name, PRESETS[preset])} for name in EXPORTERS}
    assert takes == {
        "auto_round": {"MXFP4A16", "MXFP8A16", "NVFP4A16", "FPW8A16", "FP8_DYNAMIC", "INT4", "INT8", "INT8_W8A8"},
        "llm_compressor": {"MXINT4"},
        "fake": set(),
    }


ODD = {
    "W4A8 int": Scheme(weight=WeightScheme(bits=4, group_size=128), activation=ActivationScheme(bits=8, dtype="int")),
    "W8A8 asym": Scheme(
        weight=WeightScheme(bits=8, group_size=-1, symmetric=False), activation=ActivationScheme(bits=8, dtype="int", symmetric=False)
    ),
    "W8A8 static": Scheme(
        weight=WeightScheme(bits=8, group_size=0, symmetric=False),
        activation=ActivationScheme(bits=8, dtype="int", group_size=0, dynamic=False),
    ),
    "W4A8 fp": Scheme(weight=WeightScheme(bits=4, group_size=128), activation=ActivationScheme(bits=8)),
    "FP8 tensor": Scheme(
        weight=WeightScheme(bits=8, group_size=0, dtype="fp"), activation=ActivationScheme(bits=8, group_size=0, dynamic=False)
    ),
    "FP8 groups": Scheme(weight=WeightScheme(bits=8, group_size=32, dtype="fp"), activation=ActivationScheme(bits=8, group_size=0)),
    "FP8 small tiles": Scheme(weight=WeightScheme(bits=8, group_size=(16, 48), dtype="fp")),
    "FP8, inputs as MXFP4": Scheme(
        weight=WeightScheme(bits=8, group_size=-1, dtype="fp"), activation=ActivationScheme(bits=4, group_size=32, dtype="mx_fp")
    ),
    "MXFP4, inputs FP8": Scheme(weight=WeightScheme(bits=4, group_size=32, dtype="mx_fp"), activation=ActivationScheme(bits=8)),
    "NVFP4 on INT4": Scheme(
        weight=WeightScheme(bits=4, group_size=32), activation=ActivationScheme(bits=4, group_size=16, dtype="nv_fp")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_uncommon_schemes_come_back_from_llm_compressor(name: str) -> None:
    check_round_trip(EXPORTERS["llm_compressor"], ODD[name], (72, 256), 3)


@pytest.mark.parametrize("name", [*PRESETS, *ODD])
def test_fake_tells_how_inputs_are_quantized(name: str) -> None:
    wanted = (PRESETS | ODD)[name]
    one, other = site(shape=(128, 256)), site("model.layers.1.mlp.up_proj", (128, 256))
    table: Table = {one.name: wanted, other.name: None}
    exporter, quantized = EXPORTERS["fake"].for_schemes(table), random_weight(wanted, (128, 256))
    tensors = exporter.pack(one, quantized, wanted)
    assert specs_of(tensors) == exporter.tensor_specs(one, wanted)
    section = exporter.quantization_config(table, [one, other], {}, wanted)
    config = json.loads(json.dumps({"quantization_config": section} if section else {}))
    assert format_of(config) == "fake" and read(config, tensors) == {}
    inputs = read_inputs(config, specs_of(tensors), {one.name: one.name, other.name: other.name}, {})
    assert {name: found.scheme for name, found in inputs.items()} == ({one.name: wanted.activation} if wanted.activation.quantized else {})
    if wanted.activation.calibrated:
        assert torch.equal(inputs[one.name].scale(tensors.__getitem__), quantized.input_scale)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"the checkpoint has no model.layers.0.mlp.up_proj.input_(global_)?scale, which"):
            read_inputs(config, {}, {one.name: one.name}, {})


MIXED: Table = {
    "model.layers.0.mlp.up_proj": scheme(4, 64), "model.layers.0.mlp.down_proj": scheme(8, -1), "model.layers.1.mlp.up_proj": None,
    "model.layers.1.mlp.down_proj": scheme(3, 32, False), "lm_head": scheme(6, 32),
}  # fmt: skip


@pytest.mark.parametrize("name", ["auto_round", "llm_compressor"])
def test_mixed_schemes_come_back_by_name(name: str) -> None:
    sites = [site(module) for module in MIXED]
    config, tensors = write(name, MIXED, sites)
    stored = read(json.loads(json.dumps(config)), tensors, {module: module for module in MIXED})
    assert {module: found.scheme for module, found in stored.items()} == {module: s for module, s in MIXED.items() if s}


FLOATS: dict[str, Table] = {
    "auto_round": {
        "model.layers.0.a": PRESETS["MXFP8"], "model.layers.0.b": PRESETS["NVFP4"], "model.layers.0.c": None,
        "model.layers.1.a": PRESETS["MXFP4_RCEIL"],
    },
    "llm_compressor": {
        "model.layers.0.a": PRESETS["FP8_STATIC"], "model.layers.0.b": PRESETS["NVFP4"], "model.layers.0.c": None,
        "model.layers.1.a": PRESETS["MXFP8"], "model.layers.1.b": PRESETS["INT8"], "model.layers.1.c": PRESETS["W4A16"],
        "model.layers.2.a": PRESETS["FP8_BLOCK"], "model.layers.2.b": PRESETS["FPW8A16"], "lm_head": PRESETS["MXFP4A16"],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FLOATS)
def test_mixed_schemes_with_activations_come_back_by_name(name: str) -> None:
    table = FLOATS[name]
    config, tensors = write(name, table, [site(module, (128, 256)) for module in table])
    stored = read(json.loads(json.dumps(config)), tensors, {module: module for module in table})
    assert {module: found.scheme for module, found in stored.items()} == {
        module: EXPORTERS[name].stored(wanted) for module, wanted in table.items() if wanted
    }
    for module, found in stored.items():
        wanted = table[module]
        assert wanted is not None
        back, quantized = found.unpack(tensors.__getitem__), random_weight(wanted, (128, 256))
        assert torch.equal(back.codes, quantized.codes) and torch.equal(back.dequantize(), quantized.dequantize())


def test_mixed_precision_config() -> None:
    table = FLOATS["llm_compressor"]
    config, _ = write("llm_compressor", table, [site(module, (128, 256)) for module in table])
    section = config["quantization_config"]
    assert section["format"] == "mixed-precision" and section["ignore"] == ["model.layers.0.c"]
    assert [group["format"] for group in section["config_groups"].values()] == [
        "float-quantized", "nvfp4-pack-quantized", "mxfp8-quantized", "int-quantized", "pack-quantized", "float-quantized",
        "naive-quantized", "mxfp4-pack-quantized",
    ]  # fmt: skip
    QuantizationConfig.model_validate(section)


def test_layers_left_out_where_inputs_are_quantized() -> None:
    """auto-round's reader looks for a kernel for a layer with 16 bits and quantized inputs, and finds none."""
    table: Table = {"model.layers.0.a": PRESETS["MXFP4"], "model.layers.0.b": None, "lm_head": None}
    config, _ = write("auto_round", table, [site(module, (64, 64)) for module in table])
    left_out = {"bits": 16, "act_bits": 16}
    assert config["quantization_config"]["extra_config"] == {"model.layers.0.b": left_out, "lm_head": left_out}


def test_mixed_auto_round_uses_raw_zero_points_and_lists_exceptions() -> None:
    config, _ = write("auto_round", MIXED, [site(name) for name in MIXED])
    assert config["quantization_config"] == {
        "bits": 4, "data_type": "int", "group_size": 64, "sym": True, "iters": 3, "autoround_version": "0.16.1",
        "block_name_to_quantize": "model.layers", "quant_method": "auto-round", "packing_format": "auto_round",
        "extra_config": {
            "model.layers.0.mlp.down_proj": {"bits": 8, "group_size": -1},
            "model.layers.1.mlp.up_proj": {"bits": 16},
            "model.layers.1.mlp.down_proj": {"bits": 3, "group_size": 32, "sym": False},
            "lm_head": {"bits": 6, "data_type": "int", "group_size": 32, "sym": True, "act_bits": 16},
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("table", "packing"),
    [
        ({"a": scheme(3), "b": scheme(8), "c": None}, "auto_round:auto_gptq"),
        ({"a": scheme(4, 32, False), "b": scheme(4, -1, False), "c": None}, "auto_round:auto_awq"),
        ({"a": scheme(4, 32, False), "b": scheme(8, 32, False)}, "auto_round"),
        ({"a": scheme(4, 32, False), "b": scheme(4, 32)}, "auto_round"),
        ({"a": scheme(2, 32, False)}, "auto_round"),
    ],
)
def test_packing_of_a_table(table: Table, packing: str) -> None:
    config, _ = write("auto_round", table, [site(name) for name in table])
    assert config["quantization_config"]["packing_format"] == packing


def test_for_schemes_must_come_first_when_layers_differ() -> None:
    table: Table = {"a": scheme(4, 32, False), "b": scheme(4, 32)}
    with pytest.raises(ValueError, match="take the format from for_schemes"):
        EXPORTERS["auto_round"].quantization_config(table, [site("a"), site("b")], {}, scheme())
    with pytest.raises(ValueError, match=r"scheme table and sites differ: \['b'\]"):
        EXPORTERS["auto_round"].quantization_config(table, [site("a")], {}, scheme())


def test_modules_outside_the_sites_are_excluded() -> None:
    one = site()
    awq = EXPORTERS["auto_round"].quantization_config({one.name: scheme()}, [one], {}, scheme(), ["vision.fc"])
    assert awq and awq["extra_config"] == {"vision.fc": {"bits": 16}}
    packed = EXPORTERS["llm_compressor"].quantization_config({one.name: scheme()}, [one], {}, scheme(), ["vision.fc"])
    assert packed and packed["ignore"] == ["vision.fc", "lm_head"]


# auto-round's bytes


def golden_weight(bits: int, symmetric: bool) -> QuantizedWeight:
    out, column, group = torch.arange(32)[:, None], torch.arange(64)[None], torch.arange(2)[None]
    sign = torch.where((out + group) % 2 == 0, 1.0, -1.0 if symmetric else 1.0)
    middle = torch.full((32, 2), 1 << bits - 1)
    return QuantizedWeight(
        codes=((7 * out + 3 * column + out * column) % (1 << bits)).to(torch.uint8),
        scale=(2.0 ** -((out + group) % 5 + 3) * sign).to(torch.float16),
        zero_point=(middle if symmetric else (out * 5 + group) % (1 << bits)).to(torch.uint8),
        scheme=WeightScheme(bits=bits, group_size=32, symmetric=symmetric),
    )


def packed(name: str, quantized: QuantizedWeight) -> dict[str, Tensor]:
    one = site("x", (quantized.codes.shape[0], quantized.codes.shape[1]))
    return EXPORTERS[name].pack(one, quantized, Scheme(weight=quantized.scheme))


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]


GOLDEN_QWEIGHT = {
    2: "982fd94a07eb7f38", 3: "ab89022eeea2338f", 4: "4de96c5d1b644692", 5: "6871fb82ff74388b",
    6: "403107861f51bf3f", 7: "9217981fc40eca9c", 8: "c3fd06e0971cce5e",
}  # fmt: skip
GOLDEN_QZEROS = {
    True: {2: "b1bfaa407f70c80c", 3: "482227252e0bdebc", 4: "e29442e61ad354e5", 5: "51f75a609b7dae10",
           6: "6c5558a22032bc46", 7: "1d57859fb373b515", 8: "e0205519f6bcde42"},
    False: {2: "2f3e472b08777fad", 3: "10fa77b5c143ce0c", 5: "4a73d47808e65860",
            6: "7691758806fffd25", 7: "3729cd63b74f53a0", 8: "9f522429c506dd34"},
}  # fmt: skip
GOLDEN_SCALES = {True: "c74b76b2315095e1", False: "33e8b1b343310780"}


@pytest.mark.parametrize(("bits", "symmetric"), [(b, s) for s, table in GOLDEN_QZEROS.items() for b in table])
def test_same_bytes_as_auto_round(bits: int, symmetric: bool) -> None:
    """Digests of what auto-round 0.16.1's own packers make of these codes, scales and zero points."""
    tensors = packed("auto_round", golden_weight(bits, symmetric))
    assert digest(tensors["x.qweight"]) == GOLDEN_QWEIGHT[bits]
    assert digest(tensors["x.qzeros"]) == GOLDEN_QZEROS[symmetric][bits]
    assert digest(tensors["x.scales"]) == GOLDEN_SCALES[symmetric]


def test_same_bytes_as_auto_round_in_awq_order() -> None:
    tensors = packed("auto_round", golden_weight(4, False))
    assert tensors["x.qweight"].flatten()[:2].tolist() == [324512992, -1679874968]
    assert tensors["x.qzeros"].flatten()[:2].tolist() == [972416160, -1317180376]
    assert (digest(tensors["x.qweight"]), digest(tensors["x.qzeros"])) == ("aae2ddc5bf718bd5", "556ca0a22fc68ada")
    assert digest(tensors["x.scales"]) == GOLDEN_SCALES[False]


GOLDEN_FLOATS = {
    "MXFP4": {"weight_packed": "8ad994b729206c38", "weight_scale": "cce09097da9e74b9"},
    "MXFP8": {"weight": "cc3b9ca930c9119b", "weight_scale": "0267a109dc3ef95f"},
    "MXINT4": {"weight_packed": "93b76c24ac9a15ad", "weight_scale": "7a4aac2451cb559c"},
}


@pytest.mark.parametrize("preset", GOLDEN_FLOATS)
def test_same_bytes_as_auto_round_of_a_rounded_layer(preset: str, tiny: Path) -> None:
    """Digests of a layer of the shipped model as auto-round 0.16.1 exports it, rounded to nearest."""
    weight = Checkpoint.open(tiny).read("model.layers.0.self_attn.q_proj.weight")
    wanted, one = PRESETS[preset], site("x", (256, 256))
    tensors = EXPORTERS["auto_round"].pack(one, round_weight(weight.float(), wanted.weight), wanted)
    assert {name.removeprefix("x."): digest(tensor.view(torch.uint8)) for name, tensor in tensors.items()} == GOLDEN_FLOATS[preset]


def test_symmetric_zero_points_are_stored_less_one() -> None:
    tensors = packed("auto_round", golden_weight(4, True))
    assert (tensors["x.qzeros"] == 0x77777777).all()


# compressed-tensors


@pytest.mark.parametrize("group_size", [32, -1, 0])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(2, 9))
def test_compressed_tensors_makes_and_reads_the_same(bits: int, symmetric: bool, group_size: int) -> None:
    wanted, one = scheme(bits, group_size, symmetric), site("x", (36, 96))
    quantized = random_weight(wanted, one.shape)
    tensors = {name.removeprefix("x."): tensor for name, tensor in EXPORTERS["llm_compressor"].pack(one, quantized, wanted).items()}
    config = EXPORTERS["llm_compressor"].quantization_config({"x": wanted}, [one], {}, wanted)
    assert config is not None
    theirs = QuantizationConfig.model_validate(config).config_groups["group_0"]
    assert isinstance(theirs, QuantizationScheme)
    signed = (quantized.zero_point.to(torch.int16) - (1 << bits - 1)).to(torch.int8).reshape(tensors["weight_scale"].shape)
    full = {"weight": quantized.dequantize(), "weight_scale": tensors["weight_scale"].float(), "weight_zero_point": signed}
    made = PackedQuantizationCompressor.compress(full, theirs)
    assert set(made) == set(tensors)
    for name in set(made) - {"weight_scale"}:
        assert torch.equal(made[name], tensors[name]), name
    opened = PackedQuantizationCompressor.decompress({**tensors, "weight_scale": tensors["weight_scale"].float()}, theirs)
    assert torch.equal(opened["weight"], quantized.dequantize())


def test_files_of_older_compressed_tensors_are_read() -> None:
    """Up to 0.17, 3-bit codes lay ten to a word."""
    wanted, one = scheme(3, 32, False), site("x", (36, 64))
    quantized = random_weight(wanted, one.shape)
    config, tensors = write("llm_compressor", {"x": wanted}, [one])

    def loosely(codes: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 10)).view(codes.shape[0], -1, 10).to(torch.int32)
        return (padded << torch.arange(0, 30, 3)).sum(-1).to(torch.int32)

    tensors["x.weight_packed"] = loosely(quantized.codes)
    tensors["x.weight_zero_point"] = loosely(quantized.zero_point.t()).t().contiguous()
    back = read(config, tensors)["x"].unpack(tensors.__getitem__)
    assert torch.equal(back.codes, quantized.codes) and torch.equal(back.zero_point, quantized.zero_point)


def test_llm_compressor_config_of_one_scheme() -> None:
    sites = [site(), site("model.layers.1.mlp.up_proj"), site("lm_head")]
    config, _ = write("llm_compressor", {sites[0].name: scheme(4, -1), sites[1].name: None, "lm_head": None}, sites)
    section = config["quantization_config"]
    assert section["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert section["config_groups"]["group_0"]["weights"] == {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None, "dynamic": False
    }  # fmt: skip
    assert section["ignore"] == ["model.layers.1.mlp.up_proj", "lm_head"]
    assert "dequantize" not in section


def test_llm_compressor_config_of_several_schemes() -> None:
    section = write("llm_compressor", MIXED, [site(name) for name in MIXED])[0]["quantization_config"]
    targets = [group["targets"] for group in section["config_groups"].values()]
    assert targets == [[name] for name, wanted in MIXED.items() if wanted]
    assert section["ignore"] == ["model.layers.1.mlp.up_proj"]


@pytest.mark.parametrize(
    ("group_size", "symmetric", "expected"), [(32, False, True), (-1, False, True), (0, False, False), (32, True, False)]
)
def test_asymmetric_files_ask_transformers_to_dequantize(group_size: int, symmetric: bool, expected: bool) -> None:
    section = write("llm_compressor", {"x": scheme(4, group_size, symmetric)}, [site("x")])[0]["quantization_config"]
    assert section.get("dequantize", False) is expected


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Tensor]]]:
    folder = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=True, dtype="float32")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    yield folder, {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


def per_layer(name: str, bits: int, symmetric: bool) -> Scheme | None:
    if name in ("model.layers.1.self_attn.o_proj", "lm_head"):
        return None
    return scheme(8, -1) if symmetric and "v_proj" in name else scheme(bits, 32, symmetric)


@pytest.mark.parametrize(("bits", "symmetric"), [(3, True), (4, False)])
def test_transformers_loads_llm_compressor(llama: tuple[Path, dict[str, Tensor]], tmp_path: Path, bits: int, symmetric: bool) -> None:
    """By default: mixed symmetric schemes, and one asymmetric scheme; an ignored layer in both."""
    source, state = llama
    names = [name.removesuffix(".weight") for name in state if name.endswith("proj.weight")]
    sites = [site(name, tuple(state[name + ".weight"].shape), dtype=torch.float32) for name in names]  # type: ignore[arg-type]
    sites.append(site("lm_head", (96, 64), checkpoint_name="model.embed_tokens.weight"))
    table = {one.name: per_layer(one.name, bits, symmetric) for one in sites}
    config, packed = write("llm_compressor", table, [one for one in sites if one.name != "lm_head"] + sites[-1:])
    expected = {name: found.unpack(packed.__getitem__).dequantize() for name, found in read(config, packed).items()}
    keep = {name: tensor for name, tensor in state.items() if name.removesuffix(".weight") not in expected}
    save_file({**packed, **keep}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model_config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**model_config, **config}))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        model(torch.zeros(1, 3, dtype=torch.long))
    for name in names:
        weight = model.get_submodule(name)(torch.eye(state[name + ".weight"].shape[1])).detach().t()
        reference = expected.get(name, state[name + ".weight"])
        # dequantize=True multiplies in the scale's float16
        torch.testing.assert_close(weight, reference, rtol=0 if symmetric else 2**-10, atol=0)


# fake


@pytest.mark.parametrize("transposed", [False, True])
def test_fake_writes_plain_weights(transposed: bool) -> None:
    exporter = get_exporter("fake")
    one = site(shape=(5, 40), transposed=transposed)
    quantized = random_weight(scheme(4, 32), (5, 40))
    exporter.check(one, scheme())
    tensors = exporter.for_schemes({one.name: scheme()}).pack(one, quantized, scheme())
    assert specs_of(tensors) == exporter.tensor_specs(one, scheme())
    weight = tensors[one.checkpoint_name]
    assert torch.equal(weight.t() if transposed else weight, quantized.dequantize(torch.bfloat16))
    assert exporter.quantization_config({one.name: scheme()}, [one], {}, scheme()) is None
    assert exporter.read_schemes({}, {}, tensors.__getitem__) == {}
    assert exporter.allows_ragged and exporter.stored(scheme()) == scheme()
    with pytest.raises(UserError, match="a: a checkpoint of format 'fake' holds plain weights"):
        exporter.unpack("a", tensors.__getitem__, scheme(), (5, 40))


# Names


def test_tensor_names_follow_the_checkpoint() -> None:
    assert tensor_prefix(site("transformer.h.0.attn.c_attn", checkpoint_name="h.0.attn.c_attn.weight", block=0)) == "h.0.attn.c_attn"
    tied = site("lm_head", checkpoint_name="model.embed_tokens.weight")
    assert tensor_prefix(tied) == "lm_head"
    assert set(get_exporter("fake").tensor_specs(tied, scheme())) == {"lm_head.weight"}


def test_config_may_call_a_module_by_a_longer_name_than_the_file() -> None:
    one = site("transformer.h.0.c_fc", checkpoint_name="h.0.c_fc.weight", block=0)
    config, tensors = write("auto_round", {one.name: scheme(8)}, [one])
    assert config["quantization_config"]["block_name_to_quantize"] == "transformer.h"
    stored = read(config, tensors, {"h.0.c_fc": one.name})
    assert stored[one.name].prefix == "h.0.c_fc"


def test_formats_by_name() -> None:
    assert list(EXPORTERS) == ["auto_round", "llm_compressor", "fake"]
    assert [exporter.name for exporter in EXPORTERS.values()] == list(EXPORTERS)
    with pytest.raises(
        UserError, match=r"no format 'autoround' \(--format\); did you mean 'auto_round'\?.*Formats: auto_round, llm_compressor"
    ):
        get_exporter("autoround")
    with pytest.raises(UserError, match="format 'gguf:q4_0' .*is not implemented yet; implemented are: auto_round, llm_compressor, fake"):
        get_exporter("gguf:q4_0")
    with pytest.raises(UserError, match="format 'auto_gptq' .*is not implemented yet"):
        get_exporter("auto_gptq")
    with pytest.raises(UserError, match="'auto_round:auto_awq' .*not implemented yet; 'auto_round' chooses its packing by the schemes"):
        get_exporter("auto_round:auto_awq")


def test_cautions() -> None:
    auto_round, llm_compressor = EXPORTERS["auto_round"], EXPORTERS["llm_compressor"]
    assert auto_round.cautions({"a": scheme()}) == ()
    assert "auto-round-lib or gptqmodel" in auto_round.cautions({"a": scheme(4, 32, False)})[0]
    assert "not by vLLM" in auto_round.cautions({"a": scheme(3, 32, False)})[0]
    assert llm_compressor.cautions({"a": scheme(4, 32, False), "b": None}) == ()
    assert "cannot load several schemes" in llm_compressor.cautions({"a": scheme(4, 32, False), "b": scheme()})[0]
    assert "reads from 0.18 on" in llm_compressor.cautions({"a": scheme(3)})[0]
    assert "saves no space" in EXPORTERS["fake"].cautions({})[0]


def test_cautions_about_activations() -> None:
    cautions = {name: lambda preset, name=name: " ".join(EXPORTERS[name].cautions({"a": PRESETS[preset], "b": None})) for name in EXPORTERS}
    assert "`evenround eval` and auto-round's reader do it; other loaders stop" in cautions["fake"]("INT8")
    assert "auto-round 0.16.1 itself stops at FP8 in tiles" in cautions["auto_round"]("FP8_BLOCK")
    assert cautions["auto_round"]("MXINT4") == cautions["auto_round"]("NVFP4") == cautions["auto_round"]("FP8_STATIC") == ""
    assert "less than 8 bits are computed by transformers" in cautions["llm_compressor"]("INT4")
    assert "in bfloat16 only" in cautions["llm_compressor"]("NVFP4")
    assert "scales of activations are rounded up: readers" in cautions["llm_compressor"]("MXFP8_RCEIL")
    assert cautions["llm_compressor"]("INT8") == cautions["llm_compressor"]("FP8_STATIC") == cautions["llm_compressor"]("NVFP4A16") == ""


# What a format cannot hold


@pytest.mark.parametrize("name", ["auto_round", "llm_compressor"])
def test_ragged_groups_are_refused(name: str) -> None:
    assert not EXPORTERS[name].allows_ragged
    with pytest.raises(UserError, match=r"mlp.up_proj: group_size 48 \(--group_size\) does not divide its width 64.*--ignore_layers"):
        EXPORTERS[name].check(site(), scheme(4, 48))


def test_shapes_that_auto_round_cannot_pack_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"mlp.up_proj: shape \[40, 64\] is not a multiple of 32.*--ignore_layers, or use --format llm_comp"
    ):
        EXPORTERS["auto_round"].check(site(shape=(40, 64)), scheme())


def test_transposed_layers_are_refused_by_llm_compressor() -> None:
    with pytest.raises(UserError, match=r"mlp.up_proj is a transposed layer \(Conv1D\).*use --format auto_round or fake"):
        EXPORTERS["llm_compressor"].check(site(transposed=True), scheme())
    EXPORTERS["auto_round"].check(site(transposed=True), scheme())


@pytest.mark.parametrize(
    ("preset", "label"),
    [
        ("INT8", "W8 channel sym A8 int token"),
        ("NVFP4A16", "NVFP4 without quantized activations"),
        ("FP8_DYNAMIC", "FP8 channel A8 fp token"),
    ],
)
def test_schemes_that_auto_round_cannot_load_are_refused(preset: str, label: str) -> None:
    with pytest.raises(UserError) as caught:
        EXPORTERS["auto_round"].check(site(shape=(128, 256)), PRESETS[preset])
    assert str(caught.value) == (
        f"model.layers.0.mlp.up_proj: auto-round's reader has no kernel for {label}, so format 'auto_round' (--format) does not take it; "
        "use --format llm_compressor or fake"
    )


def test_schemes_that_do_not_share_a_checkpoint_of_auto_round_are_refused() -> None:
    table: Table = {"a": PRESETS["MXFP4"], "b": PRESETS["MXFP8"], "c": PRESETS["FP8_STATIC"], "d": None}
    with pytest.raises(UserError, match=r"^MXFP4 A4 mx_fp and FP8 channel A8 fp tensor static cannot lie in one checkpoint"):
        EXPORTERS["auto_round"].for_schemes(table)
    EXPORTERS["auto_round"].for_schemes({"a": PRESETS["MXFP4"], "b": PRESETS["INT8"]})  # `check` names the layer


def test_transposed_layers_are_refused_where_inputs_are_quantized() -> None:
    with pytest.raises(UserError, match=r"transposed layer \(Conv1D\), which auto-round's reader .* not MXFP4 A4 mx_fp; use --format fake"):
        EXPORTERS["auto_round"].check(site(transposed=True), PRESETS["MXFP4"])
    with pytest.raises(UserError, match=r"knows Linear layers only; use --format fake$"):
        EXPORTERS["llm_compressor"].check(site(transposed=True), PRESETS["MXFP4"])


def test_mxint4_is_refused_by_llm_compressor() -> None:
    with pytest.raises(UserError, match="compressed-tensors, .* has no MXINT4; use --format auto_round or fake, or scheme MXFP4"):
        EXPORTERS["llm_compressor"].check(site(), PRESETS["MXINT4"])


def test_a_calibrated_scale_must_be_given() -> None:
    wanted = PRESETS["FP8_STATIC"]
    for exporter in EXPORTERS.values():
        with pytest.raises(ValueError, match="mlp.up_proj: its input has a calibrated scale, and none is given"):
            exporter.pack(site(), replace(random_weight(wanted, (32, 64)), input_scale=None), wanted)


@pytest.mark.parametrize("name", ["auto_round", "llm_compressor"])
@pytest.mark.parametrize(
    ("preset", "leaf", "tensor", "message"),
    [
        ("FP8_STATIC", "input_scale", None, "the checkpoint has no model.layers.0.a.input_scale, which"),
        ("FP8_STATIC", "input_scale", torch.ones(2), r"a.input_scale has shape \[2\], but .* makes it \[1\]"),
        ("FP8_STATIC", "weight", torch.zeros(128, 256, dtype=torch.int8), "a.weight is torch.int8, but .* stores torch.float8_e4m3fn"),
        ("FP8_STATIC", "weight", torch.zeros(128, dtype=torch.int8), r"a has weight \[128\], which should have two dimensions"),
        ("MXFP4", "weight_scale", torch.zeros(128, 8), "a.weight_scale is torch.float32, but .* stores torch.uint8"),
        ("NVFP4", "weight_global_scale", None, "the checkpoint has no model.layers.0.a.weight_global_scale"),
        ("NVFP4", "weight_scale", torch.zeros(128, 8).to(torch.float8_e4m3fn), r"\[128, 8\], but .* makes it \[128, 16\]"),
        ("MXFP8", "weight", None, "the checkpoint has no tensor named ….weight$"),
    ],
)
def test_float_tensors_are_checked(name: str, preset: str, leaf: str, tensor: Tensor | None, message: str) -> None:
    config, tensors = write(name, {A: PRESETS[preset]}, [site(A, (128, 256))])
    if tensor is None:
        del tensors[f"{A}.{leaf}"]
    else:
        tensors[f"{A}.{leaf}"] = tensor
    with pytest.raises(UserError, match=message):
        read(config, tensors)


def test_what_auto_round_itself_writes_is_read() -> None:
    """Scales in the model's bfloat16; an output head that `ignore` forgets; nv_fp inputs under a name of their own."""
    config, tensors = write("llm_compressor", {A: PRESETS["FP8_STATIC"], "lm_head": None}, [site(A), site("lm_head")])
    config["quantization_config"]["ignore"], group(config["quantization_config"])["format"] = [], None
    tensors = {name: tensor.bfloat16() if name.endswith("_scale") else tensor for name, tensor in tensors.items()}
    found = read(config, tensors, {A: A, "lm_head": "lm_head"})[A]
    assert found.scheme == PRESETS["FP8_STATIC"] and found.unpack(tensors.__getitem__).scale.dtype == torch.float32
    config, _ = write("auto_round", {A: PRESETS["NVFP4"]}, [site(A)])
    assert config["quantization_config"]["act_data_type"] == "nv_fp4_with_static_gs"


# Config against tensors

Edit = Callable[[dict[str, Any], dict[str, Tensor]], object]


def refused(name: str, edit: Edit, table: Table | None = None, modules: dict[str, str] | None = None) -> str:
    """The message when a checkpoint written by `name` has been changed by `edit`."""
    table = table or {"model.layers.0.a": scheme(4, 32, False), "model.layers.0.b": scheme(8, 32, False), "model.layers.0.c": None}
    config, tensors = write(name, table, [site(module) for module in table])
    edit(config["quantization_config"], tensors)
    with pytest.raises(UserError) as caught:
        read(config, tensors, modules)
    return str(caught.value)


def test_configs_that_cannot_be_read() -> None:
    assert read({}, {}) == {}
    with pytest.raises(UserError, match="quantization_config in config.json must be an object, not list"):
        read({"quantization_config": []}, {})
    with pytest.raises(UserError, match="quant_method 'gptq' in config.json cannot be read; can: auto-round, compressed-tensors"):
        read({"quantization_config": {"quant_method": "gptq"}}, {})


A = "model.layers.0.a"


def group(section: dict[str, Any]) -> dict[str, Any]:
    return section["config_groups"]["group_0"]  # type: ignore[no-any-return]


def weights(section: dict[str, Any]) -> dict[str, Any]:
    return group(section)["weights"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c, t: c.update(packing_format="auto_round:mlx"), "packing_format 'auto_round:mlx' .*cannot be read; readable are:"),
        (lambda c, t: c.update(data_type="mx"), r"config.json\), default: data type 'mx' .*is not known"),
        (lambda c, t: c.update(act_bits=8, act_data_type="mx_fp", act_group_size=16), "default: act_group_size 16 .*has groups of 32 only"),
        (lambda c, t: c.update(bits=9), r"config.json\), default: bits 9 .* must be a whole number from 2 to 8"),
        (lambda c, t: c["extra_config"][A[:-1] + "b"].update(bits=12), r"extra_config\['model.layers.0.b'\]: bits 12"),
        (lambda c, t: c["extra_config"].update({A: 4}), r"extra_config\['model.layers.0.a'\] is 4, not an object"),
        (lambda c, t: c.update(extra_config=[1]), "extra_config must be an object and block_name_to_quantize a string or list"),
        (lambda c, t: c["extra_config"].update({"*": {"bits": 4}}), r"extra_config: '\*' is no regular expression: nothing to repeat"),
        (lambda c, t: c["extra_config"].update({"zz": {"bits": 4}}), "zz is W4 g32 asym in extra_config, but no packed tensors"),
        (lambda c, t: c["extra_config"].update({A: {"bits": 16}}), "layers.0.a is left unquantized in the config, but .*a.qweight exists"),
        (lambda c, t: c.update(block_name_to_quantize="other"), "model.layers.0.a is left unquantized in the config"),
        (lambda c, t: t.clear(), r"says quant_method 'auto-round', but the checkpoint has no tensor named ….qweight"),
        (lambda c, t: t.pop(A + ".scales"), "the checkpoint has no model.layers.0.a.scales, which quantization_config .*incomplete"),
        (lambda c, t: t.update({A + ".scales": torch.zeros(2, 32, 1)}), r"a has scales \[2, 32, 1\] and qweight \[8, 32\], which"),
        (lambda c, t: t.update({A + ".qzeros": torch.zeros(2, 4)}), "a.qzeros is torch.float32, but the format in .* stores torch.int32"),
        (lambda c, t: c.update(group_size=16), r"a.qzeros has shape \[2, 4\], but quantization_config .* makes it \[4, 4\]"),
        (lambda c, t: c.update(bits=2), r"a.qzeros has shape \[2, 4\], but quantization_config"),
    ],
)  # fmt: skip
def test_auto_round_disagreements_are_named(edit: Edit, message: str) -> None:
    assert re.search(message, refused("auto_round", edit))


def test_auto_round_awq_width_is_checked() -> None:
    table: Table = {A: scheme(4, 32, False)}
    message = refused("auto_round", lambda c, t: t.update({A + ".qweight": torch.zeros(64, 5, dtype=torch.int32)}), table)
    assert message == f"{A}.qweight has shape [64, 5], but quantization_config (config.json) makes it [64, 4]"


@pytest.mark.parametrize("name", ["auto_round", "llm_compressor"])
def test_a_linear_layer_neither_packed_nor_excluded_is_named(name: str) -> None:
    modules = {f"model.layers.0.{leaf}": f"model.layers.0.{leaf}" for leaf in "abcd"}
    table: Table = {"model.layers.0.a": scheme(), "model.layers.0.b": scheme(), "model.layers.0.c": None}
    message = refused(name, lambda c, t: None, table, modules)
    assert message.startswith("quantization_config (config.json) and tensors disagree: model.layers.0.d is W4 g32 sym in the config")
    assert message.endswith("is missing")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c, t: c.update(config_groups=None), "config_groups must be an object of objects and ignore a list"),
        (lambda c, t: c["config_groups"].update(group_0="W4A16"), "config_groups must be an object of objects"),
        (lambda c, t: group(c).update(targets="Linear"), "group_0: targets must be a list of names"),
        (lambda c, t: group(c).update(format="int-quantized"), "no model.layers.0.a.weight, which"),
        (lambda c, t: group(c).update(format="marlin-24"), "group_0: format 'marlin-24' with weights W4 g32 asym cannot"),
        (lambda c, t: group(c).update(format="mxfp8-quantized"), "no model.layers.0.a.weight, which"),
        (lambda c, t: group(c).update(format="nvfp4-pack-quantized"), "W4 g32 asym cannot be read; 'pack-quantized' can"),
        (lambda c, t: group(c).update(input_activations=8), "group_0: targets must be .*input_activations objects"),
        (lambda c, t: weights(c).update(type="complex"), "group_0, weights: type 'complex' cannot be read"),
        (lambda c, t: weights(c).update(num_bits=1), "group_0: bits 1 .* must be a whole number from 2 to 8"),
        (lambda c, t: weights(c).update(strategy="head"), "group_0, weights: strategy 'head' cannot be read"),
        (lambda c, t: weights(c).update(strategy="block", block_structure=[128, 128]), "only data type 'fp' has"),
        (lambda c, t: c["ignore"].append("re:*"), r"targets and ignore: '\*' is no regular expression"),
        (lambda c, t: group(c)["targets"].append("zz"), "zz is W4 g32 asym in config_groups, but no packed tensors"),
        (lambda c, t: c["ignore"].append(A), "layers.0.a is not quantized in the config, but .*a.weight_packed exists"),
        (lambda c, t: t.clear(), "says format 'pack-quantized', but the checkpoint has no tensor named ….weight_packed"),
        (lambda c, t: t.pop(A + ".weight_shape"), "the checkpoint has no model.layers.0.a.weight_shape"),
        (lambda c, t: t.update({A + ".weight_shape": torch.tensor([0, 64])}), r"model.layers.0.a has weight_shape \[0, 64\]"),
        (lambda c, t: t.update({A + ".weight_shape": torch.tensor([32, 96])}), r"a.weight_packed has shape \[32, 8\], .* it \[32, 12\]"),
        (lambda c, t: t.update({A + ".weight_scale": torch.zeros(32, 3)}), r"a.weight_scale has shape \[32, 3\], .* it \[32, 2\]"),
        (lambda c, t: t.pop(A + ".weight_zero_point"), "the checkpoint has no model.layers.0.a.weight_zero_point"),
        (lambda c, t: weights(c).update(symmetric=True), "a is symmetric in the config, but .*exists"),
    ],
)  # fmt: skip
def test_llm_compressor_disagreements_are_named(edit: Edit, message: str) -> None:
    assert re.search(message, refused("llm_compressor", edit))


def test_targets_by_regular_expression_and_inferred_strategy() -> None:
    """As llm-compressor writes them: patterns, and a group_size without a strategy."""
    config, tensors = write("llm_compressor", {A: scheme(4, 32), "model.layers.0.b": scheme(4, -1)}, [site(A), site("model.layers.0.b")])
    groups = config["quantization_config"]["config_groups"]
    groups["group_0"]["targets"], groups["group_1"]["targets"] = [r"re:.*\.a$"], ["Linear"]
    for group, size in (("group_0", 32), ("group_1", -1)):
        groups[group]["weights"].update(strategy=None, group_size=size)
    stored = read(config, tensors)
    assert [found.scheme.weight.group_size for found in stored.values()] == [32, -1]


def test_extra_config_by_regular_expression() -> None:
    """As auto-round writes them for patterns that a user gave."""
    config, tensors = write("auto_round", {A: scheme(4, 32), "model.layers.0.b": scheme(8, 32)}, [site(A), site("model.layers.0.b")])
    config["quantization_config"]["extra_config"] = {r".*\.b.*": {"bits": 8}}
    assert [found.scheme.weight.bits for found in read(config, tensors).values()] == [4, 8]
    config["quantization_config"]["block_name_to_quantize"] = ["model.layers"]
    assert [found.scheme.weight.bits for found in read(config, tensors).values()] == [4, 8]


def test_packed_bytes_are_a_bit_string_along_in() -> None:
    quantized = random_weight(scheme(5), (32, 64))
    assert torch.equal(packed("auto_round", quantized)["x.qweight"], pack_bits(quantized.codes.t().contiguous(), 5, axis=0))


def test_fields_left_out_of_extra_config_are_the_defaults() -> None:
    """Also where a data type would bring another group size to a user's flags: per group stays per group."""
    default = PRESETS["FP8_BLOCK"].to_dict()
    activation = ActivationScheme(bits=4, group_size=128, dtype="int")
    other = Scheme(weight=WeightScheme(bits=8, group_size=128), activation=activation)
    changed = {key: value for key, value in other.to_dict().items() if value != default[key]}
    assert "act_group_size" not in changed
    config = {**default, "quant_method": "auto-round", "extra_config": {"down_proj": changed}}
    assert SchemeFields.read(config).scheme("model.layers.0.mlp.down_proj") == other
