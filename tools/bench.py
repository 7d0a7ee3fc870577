"""One tuning step against the bare float forward and backward of the same block, side by side in one process.

    python tools/bench.py [MODEL_DIR ...] [--tokens 2048] [--rounds 15] [--json]

The two are timed in turn, round after round, and the ratio of medians is printed: a ratio survives a noisy machine, seconds do not.
The bare pass computes the same gradients a float fine-tuning of the same weights would: of every quantized weight, and through the block.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from evenround.calls import embed
from evenround.checkpoint import Checkpoint
from evenround.config import RECIPES, TuneConfig
from evenround.data import tiny_llama
from evenround.memory.devices import native_bfloat16
from evenround.model import skeleton_from
from evenround.scheme import preset
from evenround.tune import Block, Samples, follow_sign, initial_state, run_all, squared_error, step

CPU = torch.device("cpu")


def measure(model: Path, tokens: int, rounds: int, dtype: torch.dtype) -> dict[str, object]:
    """Median seconds of a step and of a bare pass over `tokens` tokens in rows of 256, one block, one thread."""
    torch.set_num_threads(1)
    skeleton = skeleton_from(model, Checkpoint.open(model))
    ids = torch.randint(3, 1000, (tokens // 256, 256), generator=torch.Generator().manual_seed(0))
    embedded = embed(skeleton, ids, None, dtype, CPU)
    name, scheme, config = skeleton.block_names[1], preset("W4A16G64").weight, TuneConfig(iters=200, momentum=RECIPES["default"].momentum)
    chosen = torch.arange(len(ids))
    with skeleton.materialized([name], dtype):
        sites = tuple((site, scheme) for site in skeleton.sites if site.block == 1)
        block = Block(name, skeleton.block(1), embedded.calls[1], sites)
        samples = Samples(embedded.hidden, run_all([block], embedded.hidden, 8, CPU), None)
        states = [initial_state(block, site, scheme, True) for site, scheme in sites]
        weights = {site.name: skeleton.model.get_parameter(site.parameter) for site, _ in sites}

        def tuning() -> None:
            _, pending = step([block], states, samples, chosen, len(chosen), CPU)
            follow_sign(pending, config, 1.0)

        def bare() -> None:
            for weight in weights.values():
                weight.requires_grad_(True)
            output = block.call.run(block.module, samples.inputs, chosen)
            assert samples.targets is not None
            (squared_error(output + 1, samples.targets, None) / output.numel()).backward()
            for weight in weights.values():
                weight.grad = None
                weight.requires_grad_(False)

        seconds: dict[str, list[float]] = {"step": [], "bare": []}
        for number in range(rounds + 2):
            for what, work in (("step", tuning), ("bare", bare)):
                begun = time.perf_counter()
                work()
                if number >= 2:
                    seconds[what].append(time.perf_counter() - begun)
    medians = {what: statistics.median(values) for what, values in seconds.items()}
    return {
        "model": model.name,
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": tokens,
        "step_seconds": round(medians["step"], 4),
        "bare_seconds": round(medians["bare"], 4),
        "ratio": round(medians["step"] / medians["bare"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, help="model directories (default: the shipped tiny model)")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    dtypes = [torch.float32, *([torch.bfloat16] if native_bfloat16(CPU) else [])]
    for model in options.models or [tiny_llama()]:
        for dtype in dtypes:
            result = measure(model, options.tokens, options.rounds, dtype)
            if options.json:
                print(json.dumps(result))
            else:
                print("{model} {dtype}: step {step_seconds} s, bare {bare_seconds} s, ratio {ratio}".format(**result), flush=True)


if __name__ == "__main__":
    main()
