"""Host memory does not grow with the number of layers."""

import os
import subprocess
import sys
from pathlib import Path

import torch
import transformers

import evenround
from conftest import SMALL

PROGRAM = """
import sys, torch
from evenround import quantize
from evenround.memory.devices import peak_bytes
torch.set_num_threads(1)
tokens = torch.randint(3, 128, (4, 32), generator=torch.Generator().manual_seed(0))
quantize(sys.argv[1], sys.argv[2], scheme="W4A16G32", iters=1, nsamples=4, seqlen=32, batch_size=2, dataset=tokens, compute_dtype="float32",
         format=["auto_round", "fake"])
print(peak_bytes(torch.device("cpu")) // 1024)
"""


def peak_kib(folder: Path, layers: int) -> int:
    """Peak resident KiB of a run on a model of `layers` layers of 10.5 MB each in float32."""
    values = {**SMALL, "hidden_size": 512, "intermediate_size": 1024, "head_dim": 128, "num_hidden_layers": layers}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values)).to(torch.float32)
    model.save_pretrained(folder / "source", max_shard_size="40MB")
    del model
    environment = {**os.environ, "PYTHONPATH": str(Path(evenround.__file__).parents[1])}
    command = [sys.executable, "-c", PROGRAM, str(folder / "source"), str(folder / "made")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_peak_memory_is_flat_in_depth(tmp_path: Path) -> None:
    shallow, deep = peak_kib(tmp_path / "two", 2), peak_kib(tmp_path / "many", 24)
    print(f"2 layers {shallow} KiB, 24 layers {deep} KiB")
    assert deep <= 1.10 * shallow
