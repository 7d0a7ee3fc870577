"""What auto-round 0.16.1's own data types round weights to, as hashes small enough to commit.

    python float_goldens.py GOLDEN.json [--check]

Calls the quantization functions of auto-round's registry, as its plain rounding to nearest does, on float32 weights that
`tests/reference_floats.py` makes from integers, and writes one entry a scheme, kind of weight and shape:

    {"weight": sha256, "values": sha256, "scale": sha256}

`values` are the dequantized weights `[out, in]`, `scale` what the function returns as scale (an exponent for mx), both float32 and
little-endian with 0.0 for -0.0. Of NVFP4 `values` are the FP4 numbers: auto-round multiplies and divides by reciprocals where we divide
by the scale, so that dequantized weights differ in the last digit while codes and scales are the same.

`--check` compares with GOLDEN.json instead of writing it and exits with 1 when something differs.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from auto_round.data_type import QUANT_FUNC_WITH_DTYPE

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from reference_floats import fingerprint, golden_weight  # noqa: E402

SCHEMES = {
    "FP8 tensor": ("fp8_sym", 8, 0),
    "FP8 channel": ("fp8_sym", 8, -1),
    "FP8 128x128": ("block_fp8_sym", 8, (128, 128)),
    "FP8 16x24": ("block_fp8_sym", 8, (16, 24)),
    "MXFP4": ("mx_fp4", 4, 32),
    "MXFP8": ("mx_fp8", 8, 32),
    "MXFP4 rceil": ("mx_fp4_rceil", 4, 32),
    "MXFP8 rceil": ("mx_fp8_rceil", 8, 32),
    "MXINT4": ("mx_int4", 4, 32),
    "NVFP4": ("nv_fp4", 4, 16),
    "W4 g32 sym": ("int_sym", 4, 32),
    "W4 g32 asym": ("int_asym", 4, 32),
    "W8 channel sym": ("int_sym", 8, -1),
    "W2 tensor asym": ("int_asym", 2, 0),
}
"""Our name → auto-round's data type, bits, group size."""
KINDS = ("normal", "outliers", "zeros")
SHAPES = ((48, 256), (20, 72))


def entry(scheme: str, kind: str, shape: tuple[int, int]) -> dict[str, str]:
    dtype, bits, group_size = SCHEMES[scheme]
    weight = golden_weight(kind, shape, seed=len(kind) + shape[0])
    function = QUANT_FUNC_WITH_DTYPE[dtype]
    values, scale, _ = function(weight.clone(), bits=bits, group_size=group_size, data_type=dtype, v=0)
    if scheme == "NVFP4":
        whole = 2688 / weight.abs().max()
        grouped = torch.nn.functional.pad(values, (0, -shape[1] % group_size)).reshape(-1, group_size)
        numbers = torch.where(scale == 0, 0.0, grouped * whole / scale)
        values = ((numbers * 2).round() / 2).reshape(shape[0], -1)[:, : shape[1]]
    return {"weight": fingerprint(weight), "values": fingerprint(values), "scale": fingerprint(scale)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("golden", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    entries = {
        f"{scheme} {kind} {shape[0]}x{shape[1]}": entry(scheme, kind, shape) for scheme in SCHEMES for kind in KINDS for shape in SHAPES
    }
    if args.check:
        known = json.loads(args.golden.read_text(encoding="utf-8"))["entries"]
        different = [key for key, found in entries.items() if known.get(key) != found]
        print(f"{len(entries) - len(different)} of {len(entries)} entries equal {args.golden}", *different, sep="\n  ")
        raise SystemExit(1 if different else 0)
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(found, separators=(',', ':'))}" for key, found in entries.items())
    about = "auto-round 0.16.1, its data types' functions on float32 weights"
    args.golden.write_text(f'{{"about": {json.dumps(about)},\n"entries": {{\n{lines}\n}}}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
