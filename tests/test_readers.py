"""transformers with compressed-tensors loads what we wrote, and computes what we tuned. (auto-round's own reader: `make peers`.)"""

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


def test_a_reloaded_checkpoint_generates(tiny: Path, tmp_path: Path) -> None:
    quantize(tiny, tmp_path, iters=0, format="llm_compressor")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    inputs = tokenizer(TEXT, return_tensors="pt")
    made = model.generate(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, do_sample=False, max_new_tokens=8)
    assert made.shape[1] == inputs.input_ids.shape[1] + 8
