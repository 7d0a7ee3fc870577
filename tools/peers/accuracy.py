"""Evenround against auto-round 0.16.1 over schemes and seeds: KL of both on text that neither has seen.

    python tools/peers/accuracy.py --peer PEER_PYTHON [--out accuracy_out] [--schemes MXFP4,W4A16] [--seeds 42,43,44] [--steps 200x8]

Both tune the shipped model on the same 128 rows of 256 tokens (a seed draws the rows and their order), each by its default recipe with the
same number of iterations and the same batch; auto-round with `enable_alg_ext` where the table says so. Both write `llm_compressor`
checkpoints, and the same code reads both and computes with quantized activations where the scheme has them, in float32.
`--ours 132x4` gives Evenround fewer samples than auto-round. Results are kept in the output directory: a second call does what is missing.
Exit code 1 when our mean KL is larger anywhere.
"""

import argparse
import json
import shutil
import statistics
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from compare import TEXTS, peer
from evenround import quantize
from evenround.data import tiny_llama
from evenround.loading import load_model
from rows import text_rows

SCHEMES = ("W2A16G64", "W3A16", "W4A16", "MXFP4", "NVFP4", "FP8_STATIC", "FP8_BLOCK", "INT8")
EXTENDED = {"W2A16G64"}
"""Schemes for which auto-round runs with `enable_alg_ext`."""
SEQLEN = 256
EVALUATED = 128
"""Rows of the evaluation text."""


def steps(text: str) -> tuple[int, int]:
    """`200x8` → (iterations, samples of each)."""
    iters, _, batch = text.partition("x")
    return int(iters), int(batch)


def theirs(options: argparse.Namespace, scheme: str, seed: int, rows: Path) -> Path:
    """auto-round's checkpoint, made unless it is there."""
    iters, batch = steps(options.steps)
    folder: Path = options.out / f"auto-round-{scheme}-{options.steps}-{seed}"
    if not folder.exists():
        extended = ["--enable_alg_ext"] if scheme in EXTENDED else []
        flags = ["--scheme", scheme, "--iters", iters, "--batch_size", batch, "--seed", seed, "--rows", rows, *extended]
        peer(options.peer, "autoround_export.py", tiny_llama(), folder, *flags, "--format", "llm_compressor")
    return folder


def ours(options: argparse.Namespace, scheme: str, seed: int, rows: Path) -> Path:
    """Our checkpoint, made unless it is there."""
    iters, batch = steps(options.ours)
    folder: Path = options.out / f"evenround-{scheme}-{options.ours}-{seed}"
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        begun = time.perf_counter()
        quantize(
            tiny_llama(), folder, scheme=scheme, iters=iters, batch_size=batch, seed=seed, recipe=options.recipe,
            dataset=load_file(rows)["tokens"], seqlen=SEQLEN, format="llm_compressor", device_map="cpu",
        )  # fmt: skip
        (folder / "done").write_text(f"{time.perf_counter() - begun:.1f} s\n")
    return folder


class Judge:
    """Mean KL(original ‖ checkpoint) per token on the evaluation text."""

    def __init__(self) -> None:
        self.rows = text_rows(tiny_llama(), TEXTS / "evaluation.txt", seqlen=SEQLEN, rows=EVALUATED, seed=0)
        self.wanted = self.predictions(tiny_llama())

    @torch.inference_mode()
    def predictions(self, path: Path) -> list[torch.Tensor]:
        model, _ = load_model(path)
        return [model(part).logits.log_softmax(-1) for part in self.rows.split(16)]

    def kl(self, path: Path) -> float:
        """In nats."""
        total = 0.0
        for wanted, found in zip(self.wanted, self.predictions(path), strict=True):
            total += float((wanted.exp() * (wanted - found)).sum())
        return total / self.rows.numel()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="python of the environment that make_env.sh made")
    parser.add_argument("--out", type=Path, default=Path("accuracy_out"))
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--seeds", default="42,43,44")
    parser.add_argument("--steps", default="200x8", help="iterations x samples of each")
    parser.add_argument("--ours", help="the same for Evenround (default: as --steps)")
    parser.add_argument("--recipe", default="default", help="Evenround's")
    parser.add_argument("--only", choices=("theirs", "ours"), help="make these checkpoints and stop")
    options = parser.parse_args()
    options.ours = options.ours or options.steps
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    judge = None if options.only else Judge()
    results: dict[str, dict[str, list[float]]] = {}
    for scheme in options.schemes.split(","):
        results[scheme] = {"auto-round": [], "evenround": []}
        for seed in seeds:
            rows = options.out / f"rows-{seed}.safetensors"
            if not rows.exists():
                save_file({"tokens": text_rows(tiny_llama(), TEXTS / "calibration.txt", seqlen=SEQLEN, rows=128, seed=seed)}, rows)
            made = {}
            if options.only != "ours":
                made["auto-round"] = theirs(options, scheme, seed, rows)
            if options.only != "theirs":
                made["evenround"] = ours(options, scheme, seed, rows)
            for tool, folder in made.items() if judge else ():
                results[scheme][tool].append(judge.kl(folder))
        print(json.dumps({scheme: results[scheme]}), flush=True)
    return 0 if options.only else report(options, results)


def report(options: argparse.Namespace, results: dict[str, dict[str, list[float]]]) -> int:
    """Prints the table; the exit code."""
    (options.out / f"accuracy-{options.ours}.json").write_text(json.dumps(results, indent=1))
    table = Table(
        title=f"tiny-llama, KL x 1000, mean ± spread over seeds {options.seeds}; auto-round {options.steps}, Evenround {options.ours}"
    )
    for column in ("scheme", "auto-round", "evenround", "ratio"):
        table.add_column(column)
    worse = []
    for scheme, found in results.items():
        mean = {tool: statistics.mean(values) for tool, values in found.items()}
        cells = [f"{1000 * mean[tool]:.4f} ± {1000 * statistics.pstdev(values):.4f}" for tool, values in found.items()]
        table.add_row(scheme + (" alg_ext" if scheme in EXTENDED else ""), *cells, f"{mean['evenround'] / mean['auto-round']:.3f}")
        if mean["evenround"] > mean["auto-round"]:
            worse.append(scheme)
    Console(width=140).print(table)
    if worse:
        print(f"worse than auto-round: {', '.join(worse)}")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
