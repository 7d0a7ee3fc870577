"""Which device computes, in which precision, and how much memory was used.

Only `torch.accelerator` and this file know about kinds of devices. A CPU computes in bfloat16 only if it multiplies bfloat16 natively
(AVX512-BF16 or AMX: seen 4 to 7 times float32's speed; without them bfloat16 is emulated and 60 times slower than float32).
"""

import ctypes
import re
import resource
import sys
from pathlib import Path

import torch

from evenround.checkpoint import parse_size
from evenround.errors import UserError


def pick_device(text: str) -> torch.device:
    """`auto`, `cpu`, `cuda`, `xpu:0`, or an accelerator's number. Raises `UserError` for what is not here or not understood."""
    wish = text.strip().lower()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if wish == "auto":
        return torch.device(accelerator.type, 0) if accelerator else torch.device("cpu")
    if wish == "cpu":
        return torch.device("cpu")
    if wish.startswith("sim:"):
        raise UserError(f"--device {text!r}: only `quantize` can run on a simulated device yet")
    if "," in wish or "=" in wish or re.fullmatch(r"\d+x.+", wish):
        raise UserError(f"--device {text!r}: more than one device and maps are not implemented yet; give one, such as cuda:0")
    match = re.fullmatch(r"(?:([a-z]+)(?::(\d+))?|(\d+))", wish)
    if not match:
        raise UserError(f"--device {text!r} is not understood; use auto, cpu, an accelerator such as cuda:0, or its number")
    kind, number = match.group(1), int(match.group(2) or match.group(3) or 0)
    if accelerator is None or (kind and kind != accelerator.type):
        there = accelerator.type if accelerator else "only the CPU"
        raise UserError(f"--device {text!r}: there is no such accelerator here ({there}); use --device cpu")
    if number >= torch.accelerator.device_count():
        raise UserError(f"--device {text!r}: devices 0 to {torch.accelerator.device_count() - 1} are here")
    return torch.device(accelerator.type, number)


def simulated_capacity(text: str) -> int | None:
    """Bytes of the one simulated device that `sim:256MiB` (or `sim:1x256MiB`) asks for; None for real devices. Raises `UserError`."""
    wish = text.strip()
    if not wish.lower().startswith("sim:"):
        return None
    size = re.sub(r"^1x", "", wish[4:])
    if "=" in size or "," in size or re.match(r"\d+x", size):
        raise UserError(f"--device {text!r}: several simulated devices are not implemented yet; give one, such as sim:256MiB")
    return parse_size(size, "--device")


def native_bfloat16(device: torch.device) -> bool:
    """Whether matrices of bfloat16 multiply natively."""
    if device.type != "cpu":
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def pick_compute_dtype(wish: torch.dtype | None, source: torch.dtype, device: torch.device) -> torch.dtype:
    """`wish`, or the checkpoint's dtype where the device multiplies it natively, else float32: never fewer bits than the weights have."""
    if wish is not None:
        return wish
    if source == torch.bfloat16 and native_bfloat16(device):
        return torch.bfloat16
    if source == torch.float16 and device.type != "cpu":
        return torch.float16
    return torch.float32


def peak_bytes(device: torch.device) -> int:
    """Most bytes held so far: allocated on an accelerator, resident in the process on a CPU."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    if sys.platform == "linux":  # getrusage's value includes what the parent process held before exec
        status = Path("/proc/self/status")
        held = re.search(r"^VmHWM:\s*(\d+) kB", status.read_text() if status.exists() else "", re.MULTILINE)
        if held:  # not every sandbox has it
            return int(held.group(1)) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def release_host_memory() -> None:
    """Give freed memory back to the system. glibc keeps pieces of it otherwise: 8 MB a layer of 10 MB was seen."""
    if sys.platform == "linux":
        try:
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        except (OSError, AttributeError):  # another C library than glibc: it has its own way
            return
