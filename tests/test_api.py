"""The Python front door."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import ARCHITECTURES, save_model
from evenround import AutoRound, Scheme, UserError, WeightScheme, quantize
from evenround.api import request
from evenround.config import MixConfig
from evenround.scheme import PRESETS, ActivationScheme
from evenround.states import needs_text

TOKENS = torch.randint(3, 128, (4, 16), generator=torch.Generator().manual_seed(3))
LIGHT = {"iters": 2, "nsamples": 4, "seqlen": 16, "batch_size": 2}


def scheme_of(**arguments: object) -> Scheme:
    """The scheme of the job that these arguments ask for."""
    return request("model", **arguments)[0].rules.default  # type: ignore[arg-type]


def test_scheme_by_name_by_value_and_by_field(tmp_path: Path) -> None:
    """Plain rounding needs no text."""
    save_model(ARCHITECTURES["llama"], tmp_path / "source")
    value = Scheme(weight=WeightScheme(bits=3, group_size=32))
    digests = []
    for number, scheme in enumerate(({"scheme": value}, {"scheme": "W3A16G32"}, {"scheme": "W4A16", "bits": 3, "group_size": 32})):
        quantize(tmp_path / "source", tmp_path / str(number), recipe="rtn", **scheme)  # type: ignore[arg-type]
        digests.append((tmp_path / str(number) / "model.safetensors").read_bytes())
    assert digests[0] == digests[1] == digests[2]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("MXFP4A16", {"data_type": "mx_fp"}),
        ("MXFP8A16", {"data_type": "mx_fp8"}),
        ("MXFP4", {"data_type": "mx_fp", "act_bits": 4}),
        ("MXFP4_RCEIL", {"scheme": "MXFP4", "act_data_type": "mx_fp_rceil"}),
        ("MXINT4", {"data_type": "mx_int", "act_bits": 4}),
        ("NVFP4A16", {"data_type": "nv_fp"}),
        ("NVFP4", {"data_type": "nv_fp", "act_bits": 4, "act_data_type": "nv_fp4_with_static_gs"}),
        ("FPW8A16", {"data_type": "fp", "group_size": 0}),
        ("FP8_DYNAMIC", {"data_type": "fp8", "act_bits": 8}),
        ("FP8_STATIC", {"data_type": "fp8", "act_bits": 8, "act_dynamic": False}),
        ("FP8_BLOCK", {"data_type": "fp", "group_size": (128, 128), "act_bits": 8, "act_group_size": 128}),
        ("FP8_BLOCK", {"data_type": "fp", "group_size": "128,128", "act_bits": 8, "act_group_size": 128}),
        ("INT8", {"bits": 8, "group_size": -1, "act_bits": 8}),
        ("INT4", {"scheme": "INT8", "bits": 4, "act_bits": 4}),
        ("W4A16_ASYM", {"sym": False}),
        ("W4A16", {"scheme": PRESETS["MXFP4"], "data_type": "int", "act_bits": 16}),
    ],
)
def test_fields_spell_presets(name: str, fields: dict[str, object]) -> None:
    assert scheme_of(**fields) == scheme_of(scheme=name) == PRESETS[name]


def test_activations_by_field() -> None:
    assert scheme_of(act_bits=8, act_sym=False).activation == ActivationScheme(bits=8, dtype="int", symmetric=False)
    assert scheme_of(act_bits=8, act_data_type="fp", act_group_size=0).activation == ActivationScheme(bits=8, group_size=0)
    with pytest.raises(UserError, match=r"^act_dynamic False \(--disable_act_dynamic\) would change nothing"):
        request("model", act_dynamic=False)


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        ({}, True),
        ({"recipe": "rtn"}, False),
        ({"recipe": "rtn", "scheme": "MXFP4"}, False),
        ({"recipe": "rtn", "scheme": "NVFP4"}, True),  # its global scale
        ({"recipe": "rtn", "scheme": "NVFP4A16"}, False),
        ({"recipe": "rtn", "scheme": "FP8_STATIC"}, True),
        ({"recipe": "rtn", "act_bits": 8, "act_dynamic": False}, True),
        ({"iters": 0, "opt_rtn": False}, False),
        ({"iters": 0}, True),
        ({"recipe": "opt-rtn", "scheme": "MXFP4A16"}, True),
        ({"recipe": "opt-rtn", "scheme": "W8A16"}, False),  # nothing to search
        ({"recipe": "opt-rtn", "scheme": "FP8_DYNAMIC"}, False),
        ({"recipe": "opt-rtn", "group_size": 0}, False),
    ],
)
def test_which_jobs_need_text(arguments: dict[str, object], needed: bool) -> None:
    job, _ = request("model", **arguments)  # type: ignore[arg-type]
    assert needs_text([job.rules.default, None], job.tune) is needed


def test_schemes_to_choose_from() -> None:
    assert request("model", avg_bits=3, options=["W2A16", "W4A16"])[0].mix == MixConfig(avg_bits=3, options="W2A16,W4A16")
    assert request("model", scheme="W4A16")[0].mix is None
    with pytest.raises(UserError, match=r"^--scheme W4A16 is for one scheme"):
        request("model", scheme="W4A16", avg_bits=3, options="W2A16,W4A16")
    with pytest.raises(UserError, match=r"^--act_bits 8 is for one scheme"):
        request("model", act_bits=8, avg_bits=3, options="W2A16,W4A16")


def test_those_who_come_from_auto_round(tmp_path: Path) -> None:
    save_model(ARCHITECTURES["llama"], tmp_path / "source")
    rounder = AutoRound(str(tmp_path / "source"), None, "W4A16", group_size=32, dataset=TOKENS, **LIGHT)  # type: ignore[arg-type]
    rounder.quantize_and_save(tmp_path / "made", format="auto_round,llm_compressor")
    quantize(tmp_path / "source", tmp_path / "same", group_size=32, dataset=TOKENS, **LIGHT)  # type: ignore[arg-type]
    assert (tmp_path / "made/auto_round/model.safetensors").read_bytes() == (tmp_path / "same/model.safetensors").read_bytes()


def test_a_model_in_memory_is_saved_first(tiny: Path, tmp_path: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    with pytest.raises(UserError, match="needs tokenizer="):
        AutoRound(model)
    AutoRound(model, tokenizer, dataset="demo", **LIGHT).quantize_and_save(tmp_path / "made")  # type: ignore[arg-type]
    quantize(tiny, tmp_path / "same", dataset="demo", **LIGHT)  # type: ignore[arg-type]
    assert (tmp_path / "made/model.safetensors").read_bytes() == (tmp_path / "same/model.safetensors").read_bytes()
    assert json.loads((tmp_path / "made/config.json").read_text())["quantization_config"]["bits"] == 4


def test_unknown_arguments_raise() -> None:
    with pytest.raises(TypeError, match="nsample"):
        AutoRound("model", nsample=3)  # type: ignore[call-arg]
