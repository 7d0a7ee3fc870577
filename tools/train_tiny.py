"""Train the small language models that tests and benchmarks quantize, on text that anyone may use.

    python tools/train_tiny.py TEXT OUT_DIR [--moe] [--steps 1000] [--seed 0]

TEXT is a UTF-8 file of a few megabytes. OUT_DIR receives a transformers checkpoint: bf16 safetensors, config, tokenizer. The dense model
(Llama, 4 layers, width 256) has 3.7 million parameters and takes some minutes on two CPU cores; `--moe` makes a Qwen3-MoE
(16 experts, 4 per token) of 7.6 million.

Why: a trained model is needed because random weights have no outliers and no meaning; on them every rounding is as good as another.
What we gave up: bit-for-bit repetition across machines and library versions. So the shipped model is a file, its SHA-256 in a test.
"""

import argparse
import math
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCABULARY = 2048
CONTEXT = 512
END = "<|endoftext|>"
SEQUENCE = 256
BATCH = 8
LEARNING_RATE = 2e-3
WARM_UP_STEPS = 50


def make_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `VOCABULARY` tokens learned from `text`; id 0 is the one special token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator((text[start : start + 10_000] for start in range(0, len(text), 10_000)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, bos_token=END, pad_token=END, model_max_length=CONTEXT)


def make_model(*, moe: bool) -> LlamaForCausalLM | Qwen3MoeForCausalLM:
    """A new model in float32; the caller has seeded torch."""
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
    }
    if not moe:
        return LlamaForCausalLM(LlamaConfig(intermediate_size=768, **common))
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "decoder_sparse_step": 1}
    routing = {"norm_topk_prob": True, "output_router_logits": True, "router_aux_loss_coef": 0.01}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(intermediate_size=512, head_dim=32, **experts, **routing, **common))


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to 5 %."""
    return LEARNING_RATE * min(1, (step + 1) / WARM_UP_STEPS) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(model: torch.nn.Module, ids: torch.Tensor, steps: int) -> None:
    """AdamW over random windows of `ids` [tokens]; prints the loss every 25 steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.05, betas=(0.9, 0.95))
    start = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        offsets = torch.randint(len(ids) - SEQUENCE - 1, (BATCH,)).tolist()
        rows = torch.stack([ids[offset : offset + SEQUENCE] for offset in offsets])
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}, {time.monotonic() - start:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, metavar="TEXT")
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--moe", action="store_true", help="a mixture of experts instead of the dense model")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    text = arguments.text.read_text(encoding="utf-8")
    tokenizer = make_tokenizer(text)
    ids = torch.tensor(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
    if len(ids) < 2 * SEQUENCE:
        sys.exit(f"error: {arguments.text} gives {len(ids)} tokens; a few megabytes of text are needed")
    model = make_model(moe=arguments.moe)
    print(f"{len(ids)} tokens, {model.num_parameters()} parameters", flush=True)
    train(model, ids, arguments.steps)
    if arguments.moe:
        model.config.output_router_logits = False  # only the training loss wants them
    model.to(torch.bfloat16).save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    print(f"written to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
