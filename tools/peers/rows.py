"""Rows of token ids for calibration and evaluation, cut the same way for every tool that is compared.

    python rows.py MODEL TEXT OUT.safetensors --seqlen 256 --rows 128 --seed 42

The whole text is tokenized at once, without special tokens, cut into rows of `seqlen` (a short rest is dropped), and the first `rows`
of `torch.randperm` with a generator seeded `seed` are kept. The file holds one int64 tensor `tokens` `[rows, seqlen]`.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer


def text_rows(model: Path, text: Path, *, seqlen: int, rows: int, seed: int) -> Tensor:
    """int64 `[rows, seqlen]`. Raises `SystemExit` when the text is too short, with the number of rows it would give."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = torch.tensor(tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"])
    cut = ids[: len(ids) // seqlen * seqlen].view(-1, seqlen)
    if len(cut) < rows:
        raise SystemExit(f"{text} gives {len(cut)} rows of {seqlen} tokens, fewer than the {rows} asked for (--rows)")
    order = torch.randperm(len(cut), generator=torch.Generator().manual_seed(seed))
    return cut[order[:rows]].contiguous()


def load_rows(path: Path) -> Tensor:
    """The tensor `tokens` of a rows file, int64 `[rows, seqlen]`."""
    return load_file(path)["tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    tokens = text_rows(args.model, args.text, seqlen=args.seqlen, rows=args.rows, seed=args.seed)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_file({"tokens": tokens}, args.out)
    print(f"{args.out}: tokens {tuple(tokens.shape)}, first row starts {tokens[0, :8].tolist()}")


if __name__ == "__main__":
    main()
