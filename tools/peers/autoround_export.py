"""Quantize a model directory with auto-round 0.16.1 and write one checkpoint directory, in the peer environment.

    python autoround_export.py MODEL OUT --bits 4 --group_size 128 --iters 200 --rows rows.safetensors --seqlen 256 --format llm_compressor

Calibration tokens come from `--rows` (see rows.py), or from `--dataset FILE.txt` cut by the same rule, or from `--dataset NAME` by
auto-round's own means. Token rows are handed over as a list of tensors `[batch_size, seqlen]`, which auto-round treats as user data:
it masks the last position of each row in attention and in the loss, and every pad token (see README.md).

`--iters 0` is plain rounding to nearest (`disable_opt_rtn`) unless `--opt_rtn` asks for a search. Plain rounding has two implementations
upstream: `--route model_free` (shard by shard,
float32) and `--route regular` (the model in its compute type); `auto` lets auto-round choose.

Upstream's sub-folders are flattened into OUT. OUT/peer_run.json holds the settings, the compute type that was really used, versions,
seconds of the whole call (wall and processor), and those and the losses of each block.
"""

import argparse
import importlib.metadata
import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from auto_round import AutoRound
from auto_round.algorithms.quantization.sign_round import quantizer as sign_round
from transformers import AutoTokenizer

from rows import load_rows, text_rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--scheme", default="W4A16", help="a preset of auto-round's")
    parser.add_argument("--bits", type=int, help="on top of the scheme, as --group_size and --asym")
    parser.add_argument("--group_size", type=int)
    parser.add_argument("--asym", action="store_true")
    parser.add_argument("--iters", type=int, default=200)
    parser.add_argument("--opt_rtn", action="store_true", help="with --iters 0: search for scales")
    parser.add_argument("--enable_alg_ext", action="store_true")
    parser.add_argument("--nsamples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--dataset", help="a .txt file, or whatever auto-round takes by itself")
    parser.add_argument("--rows", type=Path, help="token rows to calibrate on, instead of --dataset")
    parser.add_argument("--format", default="auto_round", choices=["auto_round", "llm_compressor", "fake"])
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--float32", action="store_true", help="no autocast, the model in float32 (what a CPU without bf16 gets)")
    parser.add_argument("--no_compile", action="store_true", help="enable_torch_compile=False")
    parser.add_argument("--route", default="auto", choices=["auto", "regular", "model_free"], help="for --iters 0")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def calibration(args: argparse.Namespace) -> str | list[torch.Tensor] | None:
    """What auto-round is given as `dataset`."""
    if args.rows is not None:
        tokens = load_rows(args.rows)[: args.nsamples]
        if tokens.shape[1] != args.seqlen:
            raise SystemExit(f"{args.rows} holds rows of {tokens.shape[1]} tokens, --seqlen says {args.seqlen}")
        return list(tokens.split(args.batch_size))
    if args.dataset is not None and args.dataset.endswith(".txt"):
        tokens = text_rows(args.model, Path(args.dataset), seqlen=args.seqlen, rows=args.nsamples, seed=args.seed)
        return list(tokens.split(args.batch_size))
    return args.dataset


def timed_blocks(log: list[dict[str, float]]) -> None:
    """Make auto-round's block tuning append its wall and processor seconds to `log`. It has no hook for this, so its method is wrapped."""
    tune: Callable[..., object] = sign_round.SignRoundQuantizer.quantize_block

    def timed(self: object, *positional: object, **named: object) -> object:
        start, cpu_start = time.perf_counter(), time.process_time()
        result = tune(self, *positional, **named)
        log.append({"seconds": round(time.perf_counter() - start, 2), "cpu_seconds": round(time.process_time() - cpu_start, 2)})
        return result

    sign_round.SignRoundQuantizer.quantize_block = timed


def block_losses(log: list[dict[str, float]]) -> None:
    """Add upstream's own `loss iter 0: a -> iter n: b` to the entry of the block it was logged for."""
    report = sign_round.logger.infoclean

    def read(message: str, *positional: object) -> None:
        found = re.search(r"loss iter 0: (\S+) -> iter (\d+): (\S+)", message)
        if found:
            log.append({"first_loss": float(found[1]), "best_iteration": int(found[2]), "best_loss": float(found[3])})
        report(message, *positional)

    sign_round.logger.infoclean = read


def flatten(produced: Path, out: Path) -> None:
    """Move the one checkpoint that lies somewhere under `produced` to `out`."""
    configs = sorted(produced.rglob("config.json"))
    if len(configs) != 1:
        raise SystemExit(f"auto-round left {len(configs)} checkpoints in {produced}, expected one")
    shutil.move(configs[0].parent, out)
    shutil.rmtree(produced, ignore_errors=True)


def export(args: argparse.Namespace) -> dict[str, object]:
    """Run auto-round as `args` say; the content of peer_run.json. Raises whatever auto-round raises."""
    torch.set_num_threads(args.threads)
    options: dict[str, object] = {"bits": args.bits, "group_size": args.group_size, "sym": False if args.asym else None}
    options = {name: value for name, value in options.items() if value is not None}
    if args.enable_alg_ext:
        options["enable_alg_ext"] = True
    if args.iters == 0:
        options["disable_opt_rtn"] = not args.opt_rtn
        if args.route != "auto":
            options["model_free" if args.route == "model_free" else "disable_model_free"] = True
    if args.float32:
        options["amp"] = False
    if args.no_compile:
        options["enable_torch_compile"] = False
    seconds: list[dict[str, float]] = []
    losses: list[dict[str, float]] = []
    timed_blocks(seconds)
    block_losses(losses)
    start, cpu_start = time.perf_counter(), time.process_time()
    tuner = AutoRound(
        str(args.model),
        tokenizer=AutoTokenizer.from_pretrained(args.model),
        scheme=args.scheme,
        iters=args.iters,
        nsamples=args.nsamples,
        seqlen=args.seqlen,
        batch_size=args.batch_size,
        dataset=calibration(args),
        seed=args.seed,
        device_map="cpu",
        format=args.format,
        **options,
    )
    produced = args.out.with_name(args.out.name + ".partial")
    shutil.rmtree(produced, ignore_errors=True)
    tuner.quantize_and_save(str(produced), format=args.format)
    elapsed, cpu_elapsed = time.perf_counter() - start, time.process_time() - cpu_start
    flatten(produced, args.out)
    model_free = type(tuner).__name__ == "ModelFreeCompressor"
    return {
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in sorted(vars(args).items())},
        "compressor": type(tuner).__name__,
        "compute_dtype": "float32" if model_free else str(tuner.model_context.amp_dtype).removeprefix("torch."),
        "autocast": False if model_free else bool(tuner.model_context.amp),
        "torch_compile": False if model_free else bool(tuner.compress_context.enable_torch_compile),
        "seconds": round(elapsed, 2),
        "cpu_seconds": round(cpu_elapsed, 2),
        "tuning_seconds": round(sum(entry["seconds"] for entry in seconds), 2),
        "tuning_cpu_seconds": round(sum(entry["cpu_seconds"] for entry in seconds), 2),
        "blocks": [{**loss, **second} for loss, second in zip(losses, seconds, strict=True)] if losses else seconds,
        "versions": {name: importlib.metadata.version(name) for name in ("auto-round", "torch", "transformers", "compressed-tensors")},
    }


def main() -> None:
    args = arguments()
    if args.out.exists():
        raise SystemExit(f"{args.out} exists; remove it or name another directory")
    record = export(args)
    text = json.dumps(record, indent=1)
    (args.out / "peer_run.json").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
