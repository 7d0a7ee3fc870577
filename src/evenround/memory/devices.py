"""Which devices compute, in which precision, and how much memory they have and used.

What: a wish such as `cuda:0,cuda:1`, `4x80GiB`, `sim:2x1GiB` or `mlp.down_proj:1` becomes a `Machine` of `Device`s (`wishes` has the
grammar), and what each kind of device is like. Only `torch.accelerator` and this file know about kinds of devices.

Why a table by kind: workspaces and kernels are facts of drivers, which no operation on tensors tells. A kind that no table names gets the
values that assume most memory. A CPU computes in bfloat16 only if it multiplies bfloat16 natively (AVX512-BF16 or AMX: seen 4 to 7 times
float32's speed; without them bfloat16 is emulated and 60 times slower than float32).

What we gave up: systems without /proc tell how much memory they have, not how much is free.
"""

import ctypes
import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch

from evenround.errors import UserError
from evenround.memory.wishes import Item, Reader


@dataclass(frozen=True, slots=True)
class Device:
    """One device that computes, or is planned for."""

    name: str
    """`cuda:0`, `xpu:1`, `cpu`, `sim:0`: what tables and errors print."""
    kind: str
    """`cuda`, `xpu` or another type of accelerator, `cpu` (the plain host), `sim`."""
    capacity: int
    """Bytes that may be used: free now, or given; the lesser of both on a real device that a run uses."""
    where: torch.device | None
    """torch's device: `cuda:0`; `cpu`; `cpu:i` for the simulated device i. None: only planned for."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices of a run or a plan."""

    devices: tuple[Device, ...]
    """At least one, all of one kind, in the order given. With `layers`: accelerators by number, then the CPU if it is named."""
    layers: Mapping[str, int] = field(default_factory=dict)
    """Name, dotted part of a name or regex → index into `devices`, in the order given; what no rule names goes to index 0."""

    @property
    def simulated(self) -> bool:
        return self.devices[0].kind == "sim"

    @property
    def here(self) -> bool:
        return all(device.where is not None for device in self.devices)


def parse_devices(
    wish: str | int | torch.device | Sequence[str | int | torch.device] | Mapping[str, str | int | torch.device],
    *,
    planning: bool = False,
    flag: str = "--device",
) -> Machine:
    """The devices that `wish` names. Case and blanks do not matter; names of layers keep their case.

    - `auto`: all accelerators here, else the CPU. `cuda` is `cuda:0`; `0,1` or `cuda:0,1` are numbered accelerators; `cpu`.
    - `4x80GiB`, `xpu:2x24GiB`, `cuda:0=70GiB,cuda:1`, `cpu=8GiB`: with capacities. A run uses no more than that and than is free. A plan
      (`planning`) takes a given capacity as said, whatever is here, and its device's `where` is None; without one, the device must be here.
    - `sim:256MiB`, `sim:4x256MiB`, `sim:0=1GiB,1=2GiB`: simulated devices.
    - `mlp.down_proj:1,self_attn:cuda:0`, the same as a mapping, or as text that holds a JSON object: layers' devices, where `cpu` may
      stand beside accelerators. A name ends at the first ":" outside brackets.

    Sequences are lists of what stands between commas. Raises `UserError`, naming `flag` and `wish`, for all else and for what is not here.
    """
    reader = _reader(wish, planning, flag)
    items, layers = reader.read(wish)
    return Machine(tuple(_device(item, reader) for item in items), layers)


def _reader(wish: object, planning: bool, flag: str) -> Reader:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if accelerator else 0
    return Reader(f"{flag} {wish!r}", planning, accelerator.type if accelerator and count else None, count)


def _where(item: Item, reader: Reader) -> torch.device:
    reader.require(item)
    return torch.device("cpu") if item.kind == "cpu" else torch.device(item.kind, item.number)


def _device(item: Item, reader: Reader) -> Device:
    """The device with its capacity. A driver is asked only for what a run uses, or where no capacity was given."""
    if item.capacity is not None and item.kind == "sim":
        return Device(item.name, item.kind, item.capacity, torch.device("cpu", item.number))
    if item.capacity is not None and reader.planning:
        return Device(item.name, item.kind, item.capacity, None)
    where = _where(item, reader)
    try:
        free = free_bytes(where)
    except UserError as error:
        if item.capacity is None:
            raise reader.fail(str(error)) from None
        free = item.capacity
    return Device(item.name, item.kind, free if item.capacity is None else min(free, item.capacity), where)


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


class Margin(NamedTuple):
    """Memory to leave free: a fixed number of bytes and a share of the peak in percent."""

    fixed: int
    percent: int


MARGINS: Mapping[str, Margin] = MappingProxyType(
    {
        "sim": Margin(0, 0),
        "cuda": Margin(512 * 2**20, 4),
        "xpu": Margin(2**30, 4),
        "cpu": Margin(256 * 2**20, 4),
    }
)
"""What the exact count of tensor bytes cannot know, by kind of device.

- sim: nothing, a simulated device counts tensor bytes and nothing else.
- cuda: libraries' handles and workspaces (cuBLAS keeps up to 32 MiB a stream on recent cards), kernels that are loaded when first used, and
  a context where the process has none yet; allocations are rounded up to 512 bytes when small and to 2 MiB pieces when large, and pieces
  between them lie idle: the share.
- xpu: as cuda; oneDNN and SYCL keep compiled kernels and scratch memory on the device, and how much is not measured yet: a larger sum.
- cpu: threads' stacks and scratch memory of oneDNN and OpenMP; what glibc keeps of freed memory: the share.
"""


def margin(kind: str, peak: int) -> int:
    """Bytes to leave free beside a `peak` of tensor bytes on a device of that kind (see `MARGINS`); unknown kinds are taken for xpu."""
    fixed, percent = MARGINS.get(kind, MARGINS["xpu"])
    return fixed + -(-peak * percent // 100)


def attention(kind: str) -> Literal["fused", "math"]:
    """How scaled_dot_product_attention keeps what backward needs: `fused` (sums of rows) or `math` (all scores)."""
    return "fused" if kind in ("cuda", "cpu", "sim") else "math"


def free_bytes(device: torch.device) -> int:
    """Bytes that this process could still take: free according to the driver, and reserved by torch's allocator without being in use.

    A CPU has `available_host_bytes()`. Asking an accelerator makes a context on it. Raises `UserError` where the driver does not tell.
    """
    if device.type == "cpu":
        return available_host_bytes()
    try:
        if device.type in ("cuda", "xpu"):  # torch 2.9 has no torch.accelerator.get_memory_info
            free = int(torch.get_device_module(device).mem_get_info(device)[0])
        else:
            free = torch.accelerator.get_memory_info(device)[0]
        return free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    except (RuntimeError, AttributeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{device} does not tell its free memory ({reason}); say how much may be used, as in {device}=16GiB") from None


def available_host_bytes(root: Path = Path("/")) -> int:
    """Bytes of main memory that can be taken without swapping: Linux' MemAvailable, or what the control groups leave if that is less.

    `root` is where `proc` and `sys` lie. A system without /proc/meminfo tells only its whole memory, hence that.
    """
    meminfo = _read(root / "proc/meminfo")
    found = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo, re.MULTILINE)
    available = int(found.group(1)) * 1024 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([available, *_left_by_control_groups(root)])


def _left_by_control_groups(root: Path) -> Iterator[int]:
    """Limit less usage of each group that holds this process. Cached file pages that the kernel would drop do not count as used.

    Inside a container the path that /proc tells may be the host's; then the groups above it, which are looked at anyway, are the limit.
    """
    base = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            top, limit, usage, cached = base, "memory.max", "memory.current", "inactive_file"
        elif "memory" in names.split(","):
            top, limit, usage, cached = base / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            group = top.joinpath(*parts[:depth])
            most, used = _read(group / limit).strip(), _read(group / usage).strip()
            if most.isdecimal() and used.isdecimal():  # "max" is no limit
                dropped = re.search(rf"^{cached} (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
                yield max(0, int(most) - max(0, int(used) - int(dropped.group(1) if dropped else 0)))


def _read(path: Path) -> str:
    """What a file holds; nothing where there is none or it may not be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
