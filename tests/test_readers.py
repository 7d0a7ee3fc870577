"""transformers with compressed-tensors loads what we wrote, and computes what we tuned. (auto-round's own reader: `make peers`.)"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evenround import Scheme, WeightScheme, quantize
from evenround.loading import load_model

TEXT = "And it came to pass in those days, that there went out a decree from the king, that all the world should be counted."

SCHEMES = {
    "W4 g128": WeightScheme(bits=4),
    "W4 g32 asym": WeightScheme(bits=4, group_size=32, symmetric=False),
    "W2 g64": WeightScheme(bits=2, group_size=64),
    "W3 channel": WeightScheme(bits=3, group_size=-1),
    "W5 g32 asym": WeightScheme(bits=5, group_size=32, symmetric=False),
    "W8 g128": WeightScheme(bits=8),
    "W6 tensor": WeightScheme(bits=6, group_size=0),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_those_of_the_fake_quantized_model(name: str, tiny: Path, tmp_path: Path) -> None:
    quantize(
        tiny, tmp_path, scheme=Scheme(weight=SCHEMES[name]), iters=2, nsamples=8, seqlen=32, batch_size=4, dataset="demo",
        format="fake,llm_compressor,auto_round", ignore_layers="layers.2.self_attn.k_proj", compute_dtype="float32",
    )  # fmt: skip
    tokens = AutoTokenizer.from_pretrained(tiny)(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        fake = AutoModelForCausalLM.from_pretrained(tmp_path / "fake", dtype=torch.float32).eval()(tokens).logits
        read = AutoModelForCausalLM.from_pretrained(tmp_path / "llm_compressor", dtype=torch.float32).eval()(tokens).logits
        original = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()(tokens).logits
        ours = load_model(tmp_path / "auto_round")[0](tokens).logits
    spread = float((original - fake).abs().max())
    # `fake` holds scale * code in bfloat16, a reader multiplies in float16 or float32: half a unit in bfloat16's last place apart.
    for logits in (read, ours):
        error = torch.linalg.vector_norm(logits - fake) / torch.linalg.vector_norm(fake)
        assert float(error) < 0.01 and float((logits - fake).abs().max()) < max(0.2 * spread, 0.05), (float(error), spread)
    torch.testing.assert_close(read, ours, rtol=2e-3, atol=2e-2)


RUN = {
    "recipe": "rtn", "nsamples": 8, "seqlen": 32, "dataset": "demo", "compute_dtype": "float32",
    "ignore_layers": "layers.2.self_attn.k_proj",
}  # fmt: skip


def logits_of(folder: Path, tokens: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()(tokens).logits.float()


@pytest.mark.parametrize("scheme", ["INT8", "INT4", "FP8_STATIC", "FP8_DYNAMIC", "FP8_BLOCK", "FPW8A16", "MXFP4A16", "MXFP8A16"])
def test_compressed_tensors_computes_what_we_do(scheme: str, tiny: Path, tmp_path: Path) -> None:
    """Weights and activations, to the last bits."""
    quantize(tiny, tmp_path, scheme=scheme, format="llm_compressor", **RUN)  # type: ignore[arg-type]
    tokens = AutoTokenizer.from_pretrained(tiny)(TEXT, return_tensors="pt").input_ids
    read = logits_of(tmp_path, tokens)
    with torch.no_grad():
        ours = load_model(tmp_path)[0](tokens).logits
    assert float((read - logits_of(tiny, tokens)).abs().max()) > 0.05
    torch.testing.assert_close(read, ours, rtol=1e-5, atol=1e-4)


def test_mixed_precision_with_activations(tiny: Path, tmp_path: Path) -> None:
    layers = {"self_attn.[qkv]_proj": "W4A16", "o_proj": "INT8", "down_proj": "FP8_STATIC"}
    quantize(tiny, tmp_path, scheme="FP8_DYNAMIC", layer_config=layers, format="llm_compressor", **RUN)  # type: ignore[arg-type]
    tokens = AutoTokenizer.from_pretrained(tiny)(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        torch.testing.assert_close(logits_of(tmp_path, tokens), load_model(tmp_path)[0](tokens).logits, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("scheme", ["MXFP4", "MXFP8", "NVFP4", "NVFP4A16"])
def test_compressed_tensors_loads_mx_and_nv(scheme: str, tiny: Path, tmp_path: Path) -> None:
    """In bfloat16, and with a rule of its own for mx scales of activations; weights multiplied out are ours."""
    quantize(tiny, tmp_path, scheme=scheme, format="llm_compressor", **RUN)  # type: ignore[arg-type]
    tokens = AutoTokenizer.from_pretrained(tiny)(TEXT, return_tensors="pt").input_ids
    model = load_model(tmp_path)[0]
    with torch.no_grad():
        ours = model(tokens).logits
    read = logits_of(tmp_path, tokens, torch.bfloat16)
    assert float(torch.linalg.vector_norm(read - ours) / torch.linalg.vector_norm(ours)) < 0.1
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["dequantize"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name in [name for name, _ in model.named_modules() if name.endswith("_proj")]:
        rtol = 2**-7 if "NV" in scheme else 0  # there compressed-tensors divides scales in bfloat16
        torch.testing.assert_close(plain.get_submodule(name).weight, model.get_submodule(name).weight, rtol=rtol, atol=0)


@pytest.mark.parametrize("scheme", ["FP8_STATIC", "FP8_BLOCK", "MXFP4_RCEIL", "MXFP8", "NVFP4", "MXINT4"])
def test_formats_agree(scheme: str, tiny: Path, tmp_path: Path) -> None:
    """Ours, read by ourselves. `fake` holds bfloat16 weights."""
    quantize(tiny, tmp_path, scheme=scheme, format="fake,auto_round", **RUN)  # type: ignore[arg-type]
    tokens = AutoTokenizer.from_pretrained(tiny)(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        fake, packed = (load_model(tmp_path / form)[0](tokens).logits for form in ("fake", "auto_round"))
    assert float(torch.linalg.vector_norm(packed - fake) / torch.linalg.vector_norm(fake)) < 0.03


def test_a_reloaded_checkpoint_generates(tiny: Path, tmp_path: Path) -> None:
    quantize(tiny, tmp_path, recipe="rtn", format="llm_compressor")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    inputs = tokenizer(TEXT, return_tensors="pt")
    made = model.generate(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, do_sample=False, max_new_tokens=8)
    assert made.shape[1] == inputs.input_ids.shape[1] + 8
