"""Rounding to nearest writes the bytes that auto-round 0.16.1 writes: every packed tensor of the shipped model, by hash.

The goldens come from auto-round itself (tools/peers/rtn_goldens.py), which also says where it refuses or contradicts itself.
"""

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch

from evenround import Scheme, WeightScheme, quantize
from evenround.checkpoint import DTYPES, Checkpoint

GOLDENS = json.loads((Path(__file__).parent / "golden" / "autoround_rtn.json").read_text())["entries"]
NAMES = sorted({name.rsplit(" ", 1)[0] for name in GOLDENS if not name.endswith("model_free")})
CODES = {dtype: code for code, dtype in DTYPES.items()}


def hashes(checkpoint: Checkpoint) -> dict[str, dict[str, object]]:
    """By last part of the name: dtype and shape in layers.0.mlp.down_proj, sha256 over all layers in name order."""
    found: dict[str, dict[str, object]] = {}
    suffixes = {name.rsplit(".", 1)[1] for name in checkpoint.names if "proj." in name}
    for suffix in suffixes:
        names = sorted(name for name in checkpoint.names if name.endswith("proj." + suffix))
        digest = hashlib.sha256()
        for name in names:
            digest.update(checkpoint.read(name).view(torch.uint8).numpy().tobytes())
        spec = checkpoint.specs[f"model.layers.0.mlp.down_proj.{suffix}"]
        found[suffix] = {"dtype": CODES[spec.dtype], "shape": list(spec.shape), "sha256": digest.hexdigest()}
    return found


def test_the_goldens_cover_the_table() -> None:
    assert len(NAMES) == 4 * 3 * 2 and all(f"{name} {form}" in GOLDENS for name in NAMES for form in ("auto_round", "llm_compressor"))


@pytest.mark.parametrize("name", NAMES)
def test_every_packed_tensor_is_auto_rounds(name: str, tiny: Path, tmp_path: Path) -> None:
    match = re.fullmatch(r"W(\d) (g(\d+)|channel) (sym|asym)", name)
    assert match
    group = int(match.group(3)) if match.group(3) else -1
    scheme = Scheme(weight=WeightScheme(bits=int(match.group(1)), group_size=group, symmetric=match.group(4) == "sym"))
    quantize(tiny, tmp_path, scheme=scheme, iters=0, opt_rtn=False, format="auto_round,llm_compressor")
    for form in ("auto_round", "llm_compressor"):
        golden = GOLDENS[f"{name} {form}"]
        assert hashes(Checkpoint.open(tmp_path / form)) == golden["tensors"], form
        section = json.loads((tmp_path / form / "config.json").read_text())["quantization_config"]
        if form == "auto_round":
            assert section["packing_format"] == golden["packing"]
