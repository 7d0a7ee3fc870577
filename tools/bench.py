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

from evenround.blocks import Block, on_devices
from evenround.calls import embed
from evenround.chains import HOST, Chain, Home
from evenround.checkpoint import Checkpoint
from evenround.config import RECIPES, TuneConfig
from evenround.data import tiny_llama
from evenround.memory.devices import native_bfloat16
from evenround.memory.place import Layout, Placement
from evenround.model import skeleton_from
from evenround.scheme import preset
from evenround.tune import Samples, float_outputs, follow_sign, initial_state, squared_error, step


def measure(model: Path, tokens: int, rounds: int, dtype: torch.dtype) -> dict[str, object]:
    """Median seconds of a step and of a bare pass over `tokens` tokens in rows of 256, one block, one thread."""
    torch.set_num_threads(1)
    skeleton = skeleton_from(model, Checkpoint.open(model))
    ids = torch.randint(3, 1000, (tokens // 256, 256), generator=torch.Generator().manual_seed(0))

    def chain(shape: tuple[int, ...]) -> Chain:
        return Chain.empty(shape, dtype, [Home(HOST, shape[0])])

    embedded = embed(skeleton, ids, None, dtype, chain)
    assert embedded.hidden is not None
    name, scheme, config = skeleton.block_names[1], preset("W4A16G64").weight, TuneConfig(iters=200, momentum=RECIPES["default"].momentum)
    chosen = range(len(ids))
    sites = tuple((site, scheme) for site in skeleton.sites if site.block == 1)
    layout = Layout(strategy="single", replicas=({"": 0},), owners={}, micro_batch=len(ids), chains="host")
    with (
        skeleton.materialized([name], dtype),
        on_devices([Block(name, skeleton.block(1), embedded.calls[1], sites)], Placement(layout, [HOST])) as group,
    ):
        targets = chain(embedded.hidden.shape)
        float_outputs(group, embedded.hidden, targets)
        samples = Samples(embedded.hidden, targets, None)
        states = [initial_state(block.weight(site), site, scheme, config.momentum > 0) for block, site, scheme in group.sites]
        weights = {site.name: skeleton.model.get_parameter(site.parameter) for site, _ in sites}
        inputs, wanted, block = embedded.hidden.read(chosen, HOST), targets.read(chosen, HOST), group.blocks[0]

        def tuning() -> None:
            _, pending = step(group, states, samples, chosen)
            follow_sign(group, pending, config, 1.0)

        def bare() -> None:
            for weight in weights.values():
                weight.requires_grad_(True)
            output = block.call.run(block.module, inputs, chosen)
            (squared_error(output + 1, wanted, None) / output.numel()).backward()
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
    dtypes = [torch.float32, *([torch.bfloat16] if native_bfloat16(HOST) else [])]
    for model in options.models or [tiny_llama()]:
        for dtype in dtypes:
            result = measure(model, options.tokens, options.rounds, dtype)
            if options.json:
                print(json.dumps(result))
            else:
                print("{model} {dtype}: step {step_seconds} s, bare {bare_seconds} s, ratio {ratio}".format(**result), flush=True)


if __name__ == "__main__":
    main()
