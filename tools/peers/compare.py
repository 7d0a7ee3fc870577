"""Evenround against auto-round 0.16.1 on the shipped model: accuracy and seconds in one run, and what readers make of our files.

    python tools/peers/compare.py --peer PEER_PYTHON [--out peers_out] [--schemes W2g64,W3g128,W4g128] [--iters 200] [--seed 42]

Both tune on the same token rows (128 x 256, batch 8, same number of iterations), with one thread each, one after the other. KL is measured
by tools/peers/kl.py in the peer's environment, on text that neither has seen, with the weights that the checkpoint's own readers give.
Exit code 1 when our KL is larger anywhere, or a reader's logits are not ours.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from evenround import Scheme, WeightScheme, quantize
from evenround.data import tiny_llama

HERE = Path(__file__).parent
TEXTS = HERE.parents[1] / "tests" / "data"
READERS_AGREE = 1e-4
"""Largest mean KL between our fake-quantized model and what a reader makes of the packed one: float16 rounding of products."""


def peer(python: Path, script: str, *arguments: object) -> str:
    """Run a script in the peer's environment; returns what it printed."""
    command = [str(python), str(HERE / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", **arl(python)})
    if done.returncode:
        sys.exit(f"{script} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def arl(python: Path) -> dict[str, str]:
    """auto-round-lib, without which auto-round cannot read its own 4-bit asymmetric files on a CPU."""
    folder = python.parent.parent / "arl"
    return {"PYTHONPATH": str(folder)} if folder.is_dir() else {}


def kl(python: Path, reference: Path, candidates: list[Path]) -> list[float]:
    """Mean KL(reference ‖ candidate) per token on the evaluation text."""
    printed = peer(python, "kl.py", reference, *candidates, "--text", TEXTS / "evaluation.txt", "--json")
    values = json.loads(printed[printed.index("{") :])
    return [values[str(candidate)]["kl"] for candidate in candidates]


def weight_scheme(name: str) -> WeightScheme:
    """`W4g128`, `W2g64asym`, `W3channel` → the scheme."""
    match = re.fullmatch(r"W(\d)(?:g(\d+)|(channel)|(tensor))(asym)?", name)
    if not match:
        sys.exit(f"scheme {name!r} is not of the form W4g128, W3channel or W8tensor, with asym behind it or not")
    group = int(match.group(2)) if match.group(2) else -1 if match.group(3) else 0
    return WeightScheme(bits=int(match.group(1)), group_size=group, symmetric=not match.group(5))


def read_back(options: argparse.Namespace, name: str) -> dict[str, object]:
    """Our files of one scheme, rounded to nearest, through both readers: mean KL of each to our fake-quantized model."""
    folder = options.out / "readers" / name
    scheme = Scheme(weight=weight_scheme(name))
    quantize(tiny_llama(), folder, scheme=scheme, iters=0, format="llm_compressor,auto_round,fake", overwrite=True)
    values = kl(options.peer, folder / "fake", [folder / "llm_compressor", folder / "auto_round"])
    return {"scheme": name, "reader_kl_compressed_tensors": values[0], "reader_kl_auto_round": values[1]}


def compare(options: argparse.Namespace, name: str, rows: Path) -> dict[str, object]:
    """One scheme: both tools, KL of both, seconds of both, and our files through the readers."""
    weight = weight_scheme(name)
    model, folder = tiny_llama(), options.out / name
    theirs = folder / "auto-round"
    asym = [] if weight.symmetric else ["--asym"]
    flags = ["--bits", weight.bits, "--group_size", weight.group_size, *asym, "--iters", options.iters, "--seed", options.seed]
    peer(options.peer, "autoround_export.py", model, theirs, *flags, "--rows", rows, "--format", "llm_compressor")
    their_run = json.loads((theirs / "peer_run.json").read_text())
    torch.set_num_threads(1)
    begun = time.perf_counter()
    record = quantize(
        model,
        folder / "ours",
        scheme=Scheme(weight=weight),
        iters=options.iters,
        dataset=load_file(rows)["tokens"],
        seqlen=256,
        seed=options.seed,
        format="llm_compressor,auto_round,fake",
        overwrite=True,
    )
    seconds = time.perf_counter() - begun
    ours = {form: folder / "ours" / form for form in ("llm_compressor", "auto_round", "fake")}
    our_kl, their_kl = kl(options.peer, model, [ours["llm_compressor"], theirs])
    read_ct, read_ar = kl(options.peer, ours["fake"], [ours["llm_compressor"], ours["auto_round"]])
    tuned = sum(block["seconds"]["tune"] + block["seconds"]["reference"] for block in record["blocks"])  # type: ignore[attr-defined]
    return {
        "scheme": name,
        "kl_auto_round": their_kl,
        "kl_evenround": our_kl,
        "dtype_auto_round": their_run["compute_dtype"],
        "dtype_evenround": record["settings"]["compute_dtype"],  # type: ignore[index]
        "tuning_seconds_auto_round": their_run["tuning_seconds"],
        "tuning_seconds_evenround": round(tuned, 1),
        "seconds_evenround": round(seconds, 1),
        "reader_kl_compressed_tensors": read_ct,
        "reader_kl_auto_round": read_ar,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="python of the environment that make_env.sh made")
    parser.add_argument("--out", type=Path, default=Path("peers_out"))
    parser.add_argument("--schemes", default="W2g64,W3g128,W4g128")
    parser.add_argument("--readers", default="W4g32asym,W2g64asym,W3channel,W5g32,W8g128,W8g32asym,W4tensor", help="rounded, read back")
    parser.add_argument("--iters", type=int, default=200)
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = options.out / "rows.safetensors"
    peer(options.peer, "rows.py", tiny_llama(), TEXTS / "calibration.txt", rows, "--seed", options.seed)
    results = []
    for name in options.schemes.split(","):
        results.append(compare(options, name, rows))
        print(json.dumps(results[-1]), flush=True)
    (options.out / "peers.json").write_text(json.dumps(results, indent=1))
    table = Table(title=f"tiny-llama, {options.iters} iterations, 128 x 256 tokens, batch 8, one thread")
    for column in (
        "scheme",
        "KL auto-round",
        "KL evenround",
        "ratio",
        "tuning s auto-round",
        "tuning s evenround",
        "CT reader",
        "auto-round reader",
    ):
        table.add_column(column)
    for row in results:
        ratio = row["kl_evenround"] / row["kl_auto_round"]  # type: ignore[operator]
        table.add_row(
            str(row["scheme"]), f"{row['kl_auto_round']:.6f}", f"{row['kl_evenround']:.6f}", f"{ratio:.3f}",
            f"{row['tuning_seconds_auto_round']:.0f}", f"{row['tuning_seconds_evenround']:.0f}",
            f"{row['reader_kl_compressed_tensors']:.1e}", f"{row['reader_kl_auto_round']:.1e}",
        )  # fmt: skip
    Console(width=140).print(table)
    read = [read_back(options, name) for name in options.readers.split(",") if name]
    (options.out / "readers.json").write_text(json.dumps(read, indent=1))
    for row in read:
        values = "compressed-tensors {reader_kl_compressed_tensors:.1e}, auto-round {reader_kl_auto_round:.1e}".format(**row)
        print(f"{row['scheme']}: mean KL of what a reader makes of our files to our fake-quantized model: {values}", flush=True)
    worse = [row["scheme"] for row in results if row["kl_evenround"] > row["kl_auto_round"]]  # type: ignore[operator]
    misread = [
        row["scheme"] for row in [*results, *read] if max(row["reader_kl_compressed_tensors"], row["reader_kl_auto_round"]) > READERS_AGREE
    ]  # type: ignore[type-var, operator]
    if worse or misread:
        print(f"worse than auto-round: {worse or 'none'}; readers disagree: {misread or 'none'}")
    return 1 if worse or misread else 0


if __name__ == "__main__":
    sys.exit(main())
