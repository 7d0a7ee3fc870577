"""One safetensors file: the checks on its header, reads and writes at offsets, and files that appear whole or not at all.

The format is small (8 bytes of header length, a JSON header, the tensors' bytes), so headers are parsed here: a file from the internet
is hostile until checked, and a wrong one must be refused by name before the first weight is read. After `read_header` a read cannot
leave the file or take more memory than the file has bytes.

Reads copy into fresh memory. A memory map would be shorter, but mapped pages count as resident memory, and peak memory has to be one
block's, whatever the model's depth.

Given up: Windows and big-endian machines (positioned reads and writes, little-endian data), and files with holes or trailing bytes,
which the format forbids.
"""

import errno
import json
import math
import os
import reprlib
import stat
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from evenround.errors import UserError, readable_bytes

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64,
    "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
})  # fmt: skip
"""Names of element types in a header → torch's."""

FORMAT_PT: Mapping[str, str] = MappingProxyType({"format": "pt"})
"""Header metadata without which transformers refuses a file."""

MAX_HEADER = 100_000_000
"""Bytes; the safetensors library's own bound."""

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxother = 200, 10, 4, 80


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Element type and shape of a stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A safetensors file whose header has been checked. Tensors lie in `tensors`' order, without holes, up to the end of the file."""

    path: Path
    data_start: int
    size: int
    """Bytes of the whole file."""
    tensors: Mapping[str, tuple[TensorSpec, int]]
    """Name → spec and offset in the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedFile:
    """A file to be: its name, its header, where each tensor begins in it and its size, in bytes."""

    name: str
    header: bytes
    offsets: Mapping[str, int]
    size: int


def shown(value: object) -> str:
    """`repr`, cut short: what stands in a hostile file can be megabytes long."""
    return _SHORT.repr(value)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns the system's refusals into messages that name `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; check the path, its permissions and its disk") from None


def read_into(path: Path, offset: int, buffer: memoryview) -> None:
    """Fills `buffer` with the file's bytes from `offset` on. Raises `UserError`."""
    with reading(path):
        file = os.open(path, os.O_RDONLY)
        try:
            while buffer.nbytes:
                count = os.preadv(file, [buffer], offset)
                if count == 0:
                    raise UserError(f"{path} ended at byte {offset}: it became shorter since it was opened; run again with the whole file")
                buffer, offset = buffer[count:], offset + count
        finally:
            os.close(file)


def read_range(path: Path, offset: int, count: int) -> bytes:
    """`count` bytes from `offset` on. Raises `UserError` when the file has fewer."""
    data = bytearray(count)
    read_into(path, offset, memoryview(data))
    return bytes(data)


def file_size(path: Path) -> int:
    """Bytes of a regular file (or of what a link leads to). Raises `UserError` for anything else."""
    with reading(path):
        info = os.stat(path)
    if not stat.S_ISREG(info.st_mode):
        raise UserError(f"{path} is not a regular file; put the file itself there")
    return info.st_size


def load_json(path: Path, data: bytes) -> dict[str, Any]:
    """The JSON object in `data`; repeated keys, of which a reader would see one and a checker the other, are refused."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for key, value in pairs:
            if key in table:
                raise UserError(f"{path}: key {shown(key)} occurs twice; download the file again")
            table[key] = value
        return table

    try:
        parsed = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: its JSON cannot be read ({error}); download the file again") from None
    if not isinstance(parsed, dict):
        raise UserError(f"{path}: its JSON is a {type(parsed).__name__}, an object is needed; download the file again")
    return parsed


def read_header(path: Path) -> TensorFile:
    """Reads and checks the header and nothing else. Raises `UserError` naming the file, the tensor and what is wrong."""
    size = file_size(path)
    if size < 8:
        raise UserError(f"{path} has {size} bytes, too few for a safetensors file; download it again")
    first = read_range(path, 0, 8)
    if first == b"version ":
        raise UserError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in {path.parent}")
    (length,) = struct.unpack("<Q", first)
    if length > min(MAX_HEADER, size - 8):
        raise UserError(
            f"{path}: its header claims {length} bytes; the file has {size}, and a header at most {MAX_HEADER}. "
            "It is cut short or no safetensors file; download it again"
        )
    fields = load_json(path, read_range(path, 8, length))
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UserError(f"{path}: __metadata__ in its header must hold strings only")
    entries = sorted(((begin, end, name, spec) for name, (spec, begin, end) in _entries(path, fields)), key=lambda entry: entry[:2])
    data_start, at, previous = 8 + length, 0, "the start of the data"
    for begin, end, name, _ in entries:
        if begin != at:
            what = "overlap" if begin < at else "have a hole between them"
            found = f"{previous} and {shown(name)} {what} (data offset {begin}, expected {at})"
            raise UserError(f"{path}: {found}; download the file again")
        at, previous = end, shown(name)
    if data_start + at != size:
        what = "is cut short" if size < data_start + at else "has bytes after its last tensor"
        raise UserError(f"{path} {what}: expected {data_start + at} bytes, it has {size}; download it again")
    return TensorFile(path, data_start, size, MappingProxyType({name: (spec, data_start + begin) for begin, _, name, spec in entries}))


def _entries(path: Path, fields: dict[str, Any]) -> Iterator[tuple[str, tuple[TensorSpec, int, int]]]:
    """(name, (spec, begin, end)) of every tensor in a header, each checked by itself."""
    for name, entry in fields.items():
        where = f"{path}: tensor {shown(name)}"
        if any("\ud800" <= character <= "\udfff" for character in name):
            raise UserError(f"{where} has a name that is not valid Unicode")
        if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
            raise UserError(f"{where} must have dtype, shape and data_offsets in the header")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise UserError(f"{where} has dtype {shown(dtype)}, which is not known here; known: {', '.join(DTYPES)}")
        if not _is_naturals(shape) or len(shape) > 64 or math.prod(max(size, 1) for size in shape) >= 2**60:
            raise UserError(f"{where} has shape {shown(shape)}, which no tensor can have")
        if not _is_naturals(offsets) or len(offsets) != 2:
            raise UserError(f"{where} has data_offsets {shown(offsets)}; two whole numbers are needed")
        spec = TensorSpec(DTYPES[dtype], tuple(shape))
        if offsets[1] - offsets[0] != spec.nbytes:
            what = f"{dtype} {shape}, {spec.nbytes} bytes, but its data_offsets {offsets} span {offsets[1] - offsets[0]}"
            raise UserError(f"{where} is {what}; download the file again")
        yield name, (spec, offsets[0], offsets[1])


def _is_naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def plan_file(file: str, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> PlannedFile:
    """The layout of `specs` in a file. Wider elements first, else the order given: aligned to the element size, without holes."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begins, at = {}, 0
    for name, spec in sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize):
        begins[name] = at
        header[name] = {"dtype": _DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [at, at + spec.nbytes]}
        at += spec.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    offsets = MappingProxyType({name: start + begin for name, begin in begins.items()})
    return PlannedFile(name=file, header=struct.pack("<Q", len(text)) + text, offsets=offsets, size=start + at)


@contextmanager
def writing(path: Path, needed: int) -> Iterator[None]:
    """Turns the system's refusals into messages that name `path` and the `needed` bytes."""
    try:
        yield
    except OSError as error:
        need = f"{needed} bytes ({readable_bytes(needed)})"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"{path}: the disk is full, {need} needed; free some space, or pass an --output_dir on another disk") from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(f"{path}: no permission to write {need} ({error.strerror}); pass another --output_dir") from None
        if error.errno == errno.EFBIG:
            raise UserError(f"{path}: {need} are too many for one file here; pass a smaller --max_shard_size") from None
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            raise UserError(f"{path}: there is a file where a directory is needed; pass another --output_dir") from None
        raise UserError(f"{path}: {need} cannot be written: {error.strerror}; check --output_dir") from None


def sync(path: Path) -> None:
    """fsync of a file or directory."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def put(file: int, data: memoryview, offset: int) -> None:
    """All of `data` at `offset` of an open file."""
    while data.nbytes:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


def create_file(path: Path, head: bytes, size: int) -> None:
    """A file of `size` bytes that begins with `head`, its blocks reserved; `path` appears complete or not at all."""
    new = path.with_name(path.name + ".new")
    try:
        with writing(path, size):
            file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                os.ftruncate(file, size)
                if sys.platform == "linux" and size:
                    try:
                        os.posix_fallocate(file, 0, size)
                    except OSError as error:
                        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):  # not every file system reserves
                            raise
                put(file, memoryview(head), 0)
                os.fsync(file)
            finally:
                os.close(file)
            os.replace(new, path)
            sync(path.parent)
    except UserError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Writes beside `path`, syncs, renames: after a crash the file is the old one or the new one. Raises `UserError`."""
    create_file(path, data, len(data))


def atomic_write_text(path: Path, text: str) -> None:
    """`atomic_write_bytes` of `text` in UTF-8."""
    atomic_write_bytes(path, text.encode("utf-8"))
