"""Mean KL(reference ‖ candidate) per token on held-out text, for checkpoints of any maker, by plain transformers in float32.

    python kl.py REFERENCE CANDIDATE [CANDIDATE …] --text FILE [--seqlen 256] [--rows 128] [--json]

Rows are cut as in rows.py (generator seed `--seed`, 0 by default); every position of every row counts once. A candidate may be a plain
checkpoint (`fake`), a compressed-tensors one (decompressed by transformers' own reader) or an auto-round one: there the weights come out
of auto-round's reader, one layer at a time, by sending the identity matrix through it, because that reader otherwise computes in float16.
The forward pass is then the same float32 one for all.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, PreTrainedModel

from rows import text_rows


def load(directory: Path) -> PreTrainedModel:
    """The float32 model whose weights are what the checkpoint's reader makes of them."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("quantization_config")
    method = config["quant_method"] if config else None
    if method == "compressed-tensors":
        reader = CompressedTensorsConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, quantization_config=reader)
    elif method == "auto-round":
        model = load_auto_round(directory)
    elif method is None:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    else:
        raise SystemExit(f"{directory}: quant_method {method!r} has no reader here; known: compressed-tensors, auto-round, none")
    return model.float().eval()


def load_auto_round(directory: Path) -> PreTrainedModel:
    """A plain float32 model with the layers' weights `[out, in]` read through auto-round's own linear modules."""
    quantized = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, device_map="cpu")
    modules = dict(quantized.named_modules())
    state: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                layer, suffix = name.rsplit(".", 1)
                if suffix == "qweight":
                    state[f"{layer}.weight"] = through(modules[layer])
                elif suffix not in ("qzeros", "scales", "g_idx"):
                    state[name] = file.get_tensor(name).float()
    config = quantized.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise SystemExit(f"{directory}: missing {sorted(set(missing) - tied)}, unknown {unexpected}")
    model.tie_weights()
    return model


@torch.no_grad()
def through(module: nn.Module) -> Tensor:
    """`[out, in]` weight of a linear module of unknown kind: what it answers to each unit vector, without its bias."""
    width = next(value for name, value in vars(module).items() if name in ("infeatures", "in_features"))
    zero = module(torch.zeros(1, width))
    return (module(torch.eye(width)) - zero).t().float().contiguous()


@torch.no_grad()
def mean_kl(reference: PreTrainedModel, candidate: PreTrainedModel, tokens: Tensor, *, batch: int = 8) -> tuple[float, float]:
    """Mean KL in nats per token and the share of tokens with the same most likely successor, over `tokens` `[rows, seqlen]`."""
    total, same = 0.0, 0
    for rows in tokens.split(batch):
        first = reference(input_ids=rows, use_cache=False).logits.float().log_softmax(-1)
        second = candidate(input_ids=rows, use_cache=False).logits.float().log_softmax(-1)
        total += (first.exp() * (first - second)).sum(-1).double().sum().item()
        same += int((first.argmax(-1) == second.argmax(-1)).sum())
    return total / tokens.numel(), same / tokens.numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", type=Path)
    parser.add_argument("candidates", type=Path, nargs="+")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokens = text_rows(args.reference, args.text, seqlen=args.seqlen, rows=args.rows, seed=args.seed)
    reference = load(args.reference)
    results = {}
    for directory in args.candidates:
        kl, top1 = mean_kl(reference, load(directory), tokens)
        results[str(directory)] = {"kl": kl, "top1": top1, "tokens": tokens.numel()}
        if not args.json:
            print(f"{directory}: KL {kl:.6f}  top-1 {top1:.4f}  ({tokens.numel()} tokens)", flush=True)
    if args.json:
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
