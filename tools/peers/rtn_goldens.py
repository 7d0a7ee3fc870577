"""What auto-round 0.16.1 writes when it rounds to nearest, as hashes small enough to commit.

    python rtn_goldens.py MODEL GOLDEN.json [--check] [--only W4] [--bf16] [--keep DIR]

Exports MODEL at W2/W3/W4/W8, symmetric and asymmetric, groups 32, 128 and per channel, in both formats, each in a process of its own, by
the route that loads the model; where the shard-by-shard route writes another layout, also by that one (marked `model_free`; without
torch.compile, see README.md).
Writes one entry a combination under a key such as `W4 g128 sym auto_round` or `W4 g128 asym auto_round model_free`:

    {"packing": …, "layers": 28, "tensors": {suffix: {"dtype": "I32", "shape": […], "sha256": …}}}   or   {"error": …}

`sha256` runs over the raw little-endian bytes of that suffix's tensors, all layers in sorted name order; `shape` is that of the first
of them. `--check` compares with GOLDEN.json instead of writing it and exits with 1 when something differs.

The goldens are made with float32 arithmetic (`amp=False`): on a CPU that multiplies bf16 natively, auto-round computes the scale in
bf16 and writes other bytes for asymmetric schemes (`--bf16` shows them), so its default depends on the machine.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

from safetensors import safe_open

import autoround_export

BITS = (2, 3, 4, 8)
GROUPS = (32, 128, -1)
FORMATS = ("auto_round", "llm_compressor")
COMBINATIONS = (
    *((bits, group, asym, fmt, "regular") for fmt in FORMATS for bits in BITS for group in GROUPS for asym in (False, True)),
    *((4, group, True, "auto_round", "model_free") for group in (32, 128)),
)
"""(bits, group, asymmetric, format, route). Where upstream's shard-by-shard route works it writes the same, but for this layout."""
OPT_IN = "AR_ALLOW_W8_ASYM"
"""Environment variable without which upstream refuses 8 bits asymmetric in the auto_round format; set for those exports alone."""
SUFFIXES = ("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
DTYPES = {
    "torch.int32": "I32",
    "torch.int64": "I64",
    "torch.int8": "I8",
    "torch.float16": "F16",
    "torch.float32": "F32",
    "torch.bfloat16": "BF16",
}


def describe(checkpoint: Path) -> dict[str, object]:
    """The golden entry of one checkpoint directory with a single `model.safetensors`."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    tensors: dict[str, object] = {}
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        names = sorted(file.keys())
        layers = {name.rsplit(".", 1)[0] for name in names if name.rsplit(".", 1)[1] in ("qweight", "weight_packed")}
        suffixes = (*SUFFIXES, "weight") if any(f"{layer}.weight" in names for layer in layers) or not layers else SUFFIXES
        for suffix in suffixes:
            digest = hashlib.sha256()
            ours = [name for name in names if name.rsplit(".", 1)[1] == suffix and (suffix != "weight" or name.endswith("_proj.weight"))]
            for name in ours:
                digest.update(file.get_tensor(name).contiguous().view(-1).numpy().tobytes())
            if ours:
                first = file.get_tensor(ours[0])
                tensors[suffix] = {"dtype": DTYPES[str(first.dtype)], "shape": list(first.shape), "sha256": digest.hexdigest()}
    return {"packing": config.get("packing_format") or config.get("format"), "layers": len(layers), "tensors": tensors}


def export_in_child(argv: list[str], error_file: str, opt_in: bool) -> None:
    if opt_in:
        os.environ[OPT_IN] = "1"
    sys.argv = ["autoround_export.py", *argv]
    try:
        autoround_export.main()
    except BaseException as error:  # SystemExit too: upstream calls sys.exit
        Path(error_file).write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        traceback.print_exc()


def one(model: Path, bits: int, group: int, asym: bool, fmt: str, *, route: str, bf16: bool, keep: Path | None) -> dict[str, object]:
    """Export one combination in a forked child and describe what it left, or why it left nothing."""
    work = Path(tempfile.mkdtemp())
    error_file = work / "error.txt"
    out = work / "out"
    argv = [str(model), str(out), "--bits", str(bits), "--group_size", str(group), "--format", fmt, "--iters", "0", "--route", route]
    argv += ["--asym"] if asym else []
    argv += ["--no_compile"] if route == "model_free" else []
    argv += [] if bf16 else ["--float32"]
    opt_in = bits == 8 and asym and fmt == "auto_round"
    child = multiprocessing.get_context("fork").Process(target=export_in_child, args=(argv, str(error_file), opt_in))
    child.start()
    child.join()
    try:
        if error_file.exists():
            return {"error": " ".join(error_file.read_text(encoding="utf-8").split())}
        if not out.exists():
            return {"error": f"the export died with exit code {child.exitcode}"}
        entry = describe(out) | ({"opt_in": f"{OPT_IN}=1"} if opt_in else {})
        if keep is not None:
            target = keep / label(bits, group, asym, fmt, route).replace(" ", "_")
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(out, target)
        return entry
    finally:
        shutil.rmtree(work, ignore_errors=True)


def label(bits: int, group: int, asym: bool, fmt: str, route: str) -> str:
    words = f"W{bits} {'channel' if group == -1 else f'g{group}'} {'asym' if asym else 'sym'} {fmt}"
    return words if route == "regular" else f"{words} {route}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("golden", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", default="", help="keys that contain this")
    parser.add_argument("--bf16", action="store_true", help="leave the compute type to auto-round")
    parser.add_argument("--keep", type=Path, help="also keep the checkpoints in this folder")
    args = parser.parse_args()
    entries: dict[str, dict[str, object]] = {}
    for bits, group, asym, fmt, route in COMBINATIONS:
        key = label(bits, group, asym, fmt, route)
        if args.only in key:
            entries[key] = one(args.model, bits, group, asym, fmt, route=route, bf16=args.bf16, keep=args.keep)
            print("GOLDEN", key, json.dumps(entries[key])[:300], file=sys.stderr, flush=True)
    if args.check:
        known = json.loads(args.golden.read_text(encoding="utf-8"))["entries"]
        different = [key for key, entry in entries.items() if known.get(key) != entry]
        print(f"{len(entries) - len(different)} of {len(entries)} combinations equal {args.golden}", *different, sep="\n  ")
        raise SystemExit(1 if different else 0)
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(entry, separators=(',', ':'))}" for key, entry in entries.items())
    args.golden.parent.mkdir(parents=True, exist_ok=True)
    about = f"auto-round 0.16.1, {args.model.name}, iters 0, disable_opt_rtn, {'machine default' if args.bf16 else 'float32'}"
    args.golden.write_text(f'{{"about": {json.dumps(about)},\n"entries": {{\n{lines}\n}}}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
