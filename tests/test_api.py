"""The Python front door."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import ARCHITECTURES, save_model
from evenround import AutoRound, Scheme, UserError, WeightScheme, quantize

TOKENS = torch.randint(3, 128, (4, 16), generator=torch.Generator().manual_seed(3))
LIGHT = {"iters": 2, "nsamples": 4, "seqlen": 16, "batch_size": 2}


def test_scheme_by_name_by_value_and_by_field(tmp_path: Path) -> None:
    save_model(ARCHITECTURES["llama"], tmp_path / "source")
    value = Scheme(weight=WeightScheme(bits=3, group_size=32))
    digests = []
    for number, scheme in enumerate(({"scheme": value}, {"scheme": "W3A16G32"}, {"scheme": "W4A16", "bits": 3, "group_size": 32})):
        quantize(tmp_path / "source", tmp_path / str(number), iters=0, **scheme)  # type: ignore[arg-type]
        digests.append((tmp_path / str(number) / "model.safetensors").read_bytes())
    assert digests[0] == digests[1] == digests[2]


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
