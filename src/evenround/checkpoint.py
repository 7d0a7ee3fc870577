"""Checkpoint directories: reading one tensor at a time, writing one tensor at a time.

Every header is checked when a checkpoint is opened, before the first weight is read. Writes go to preallocated `.partial` files at known
offsets: a full disk shows before the work and not after it, a killed run goes on where it was, and equal input gives equal bytes. Shards
take their final names when all tensors are written and the index comes last, so that a checkpoint that can be opened is whole.

Given up: tensors whose shape is not known before the run, and several writers in one directory.
"""

import hashlib
import json
import os
import re
import shutil
import struct
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from evenround.errors import UserError, nearest, readable_bytes
from evenround.tensorfile import (
    DTYPES,
    FORMAT_PT,
    MAX_HEADER,
    PlannedFile,
    TensorFile,
    TensorSpec,
    atomic_write_bytes,
    atomic_write_text,
    bytes_of,
    create_file,
    file_size,
    load_json,
    plan_file,
    put,
    read_header,
    read_into,
    read_range,
    reading,
    shown,
    sync,
    writing,
)

__all__ = [
    "Checkpoint", "CheckpointWriter", "DTYPES", "FORMAT_PT", "INDEX_FILE", "PlannedFile", "SINGLE_FILE", "TensorFile", "TensorSpec",
    "atomic_write_bytes", "atomic_write_text", "parse_size", "remove_checkpoint",
]  # fmt: skip

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_SAMPLE = 4096
_OURS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors(\.partial|\.index\.json)?(\.new)?")
_UNITS = {"B": 1, **{f"{u}B": 1000**i for i, u in enumerate("KMGT", 1)}, **{f"{u}IB": 1024**i for i, u in enumerate("KMGT", 1)}}


def parse_size(text: str | int, flag: str = "--max_shard_size") -> int:
    """A size in bytes: `5GB` is 5·10⁹, `2GiB` 2·2³⁰, a bare number is bytes; any case. Raises `UserError`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    unit = (match.group(2).upper() or "B") if match else ""
    size = int(float(match.group(1)) * _UNITS[unit]) if match and unit in _UNITS else 0
    if size < 1:
        raise UserError(f"size {text!r} ({flag}) cannot be read; write a positive number and a unit, such as 5GB, 500MB or 2GiB")
    return size


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint directory whose headers have been read and checked. Holds no weights and no open files."""

    directory: Path
    specs: Mapping[str, TensorSpec]
    """Tensor name → dtype and shape, in the order of the files and of the bytes in them."""
    shards: tuple[TensorFile, ...]
    homes: Mapping[str, TensorFile]
    """Tensor name → the file that holds it."""

    @staticmethod
    def open(path: Path) -> "Checkpoint":
        """Reads and checks `model.safetensors`, or else `model.safetensors.index.json` and every shard that it names.

        Raises `UserError` for anything but a whole, consistent checkpoint, naming the file and, where there is one, a way out.
        """
        with reading(path):
            if os.path.lexists(path / SINGLE_FILE):  # transformers looks for this one first, too
                shards = [read_header(path / SINGLE_FILE)]
            elif os.path.lexists(path / INDEX_FILE):
                shards = _read_indexed(path)
            else:
                raise UserError(_advice(path))
        homes = {name: shard for shard in shards for name in shard.tensors}
        specs = {name: shard.tensors[name][0] for name, shard in homes.items()}
        return Checkpoint(directory=path, specs=MappingProxyType(specs), shards=tuple(shards), homes=MappingProxyType(homes))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.specs)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, headers not counted."""
        return sum(spec.nbytes for spec in self.specs.values())

    def shard_of(self, name: str) -> str:
        """Name of the file that holds tensor `name`."""
        return self._home(name).path.name

    def read(self, name: str) -> Tensor:
        """The tensor, in fresh memory; only its own bytes are read. Raises `UserError` for an unknown name or a failed read."""
        spec, offset = self._home(name).tensors[name]
        return self._read(name, spec, offset)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` (0 ≤ start ≤ stop ≤ rows) along the first dimension; only their bytes are read."""
        spec, offset = self._home(name).tensors[name]
        if not spec.shape or not 0 <= start <= stop <= spec.shape[0]:
            raise ValueError(f"rows {start} to {stop} of {name!r} with shape {list(spec.shape)}")
        row = TensorSpec(spec.dtype, spec.shape[1:])
        return self._read(name, TensorSpec(spec.dtype, (stop - start, *spec.shape[1:])), offset + start * row.nbytes)

    def fingerprint(self) -> str:
        """sha256 over each file's name, size and header, and the first, middle and last 4 KiB of every tensor; no times of change.

        Of every tensor, not of every file: a model tuned further often keeps the embeddings and norms with which files begin and end.
        """
        digest = hashlib.sha256()
        for shard in self.shards:
            parts = [shard.path.name.encode(), struct.pack("<Q", shard.size), read_range(shard.path, 0, shard.data_start)]
            for spec, offset in shard.tensors.values():
                size = min(_SAMPLE, spec.nbytes)
                starts = sorted({0, (spec.nbytes - size) // 2, spec.nbytes - size})
                parts += [read_range(shard.path, offset + start, size) for start in starts]
            for part in parts:
                digest.update(struct.pack("<Q", len(part)) + part)
        return digest.hexdigest()

    def _home(self, name: str) -> TensorFile:
        if name not in self.homes:
            raise UserError(f"{self.directory} holds no tensor {name!r}{nearest(name, self.homes)}")
        return self.homes[name]

    def _read(self, name: str, spec: TensorSpec, offset: int) -> Tensor:
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        read_into(self.homes[name].path, offset, bytes_of(tensor))
        return tensor


def _read_indexed(directory: Path) -> list[TensorFile]:
    path = directory / INDEX_FILE
    size = file_size(path)
    if size > MAX_HEADER:
        raise UserError(f"{path} has {size} bytes; an index has at most {MAX_HEADER}")
    weight_map = load_json(path, read_range(path, 0, size)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
        raise UserError(f"{path}: weight_map must map tensor names to files; download the file again")
    shards = {}
    for file in sorted(set(weight_map.values())):
        if not re.fullmatch(r"[^/\\\x00]+\.safetensors", file):
            raise UserError(f"{path} names {shown(file)}; only .safetensors files beside it are read")
        if not (directory / file).exists():
            raise UserError(f"{directory / file} is missing, {path.name} names it; download it, then run again")
        shards[file] = read_header(directory / file)
    for name, file in weight_map.items():
        if name not in shards[file].tensors:
            raise UserError(f"{directory / file} does not hold tensor {shown(name)}, though {path.name} says so; download both again")
    for file, shard in shards.items():
        extra = [name for name in shard.tensors if weight_map.get(name) != file]
        if extra:
            some = ", ".join(map(shown, extra[:5])) + (f" and {len(extra) - 5} more" if len(extra) > 5 else "")
            raise UserError(f"{shard.path} holds tensors that {path.name} does not place there: {some}; download both again")
    return list(shards.values())


def _advice(path: Path) -> str:
    """What to do about a path that holds no safetensors checkpoint."""
    if not path.exists():
        return f"{path} does not exist; pass a directory with config.json and model.safetensors"
    if not path.is_dir():
        return f"{path} is a file; pass the directory that holds config.json and model.safetensors"
    files = sorted(entry.name for entry in path.iterdir())
    torch_files = [name for name in files if re.fullmatch(r"pytorch_model.*\.bin(\.index\.json)?", name)]
    gguf_files = [name for name in files if name.endswith(".gguf")]
    if any(name.startswith("adapter_") for name in files) and not torch_files:
        code = f"from peft import AutoPeftModelForCausalLM as M; m = M.from_pretrained({str(path)!r}).merge_and_unload(); "
        code += "m.save_pretrained('NEW_DIR')"
        return f'{path} holds an adapter, not a model; merge it into its base model: `python -c "{code}"`, then pass NEW_DIR'
    load = f"from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; p = {str(path)!r}; "
    if torch_files:
        save = "M.from_pretrained(p, dtype='auto').save_pretrained('NEW_DIR'); T.from_pretrained(p).save_pretrained('NEW_DIR')"
        return f'{path} holds {torch_files[0]}, a pickle, not read here; convert it: `python -c "{load}{save}"`, then pass NEW_DIR'
    if gguf_files:  # transformers refuses to save the object that came from GGUF; a new one with its weights saves
        load += f"g = {gguf_files[0]!r}; m = M.from_pretrained(p, gguf_file=g); m.config.__dict__.pop('quantization_config', None); "
        save = "n = M.from_config(m.config); n.load_state_dict(m.state_dict()); n.save_pretrained('NEW_DIR'); "
        save += "T.from_pretrained(p, gguf_file=g).save_pretrained('NEW_DIR')"
        return f'{path} holds {gguf_files[0]}, GGUF, not read here; convert it: `python -c "{load}{save}"`, then pass NEW_DIR'
    if any(name.endswith(".partial") for name in files):
        return f"{path} holds an unfinished checkpoint (.partial files); run the command that began it again"
    shards = [name for name in files if name.endswith(".safetensors")]
    if shards:
        return f"{path} holds {shards[0]}, but neither {SINGLE_FILE} nor {INDEX_FILE}; download the missing file"
    return f"{path} holds no checkpoint ({SINGLE_FILE} or {INDEX_FILE}); pass a directory that does"


def remove_checkpoint(directory: Path) -> None:
    """Deletes what `CheckpointWriter` may have left in `directory`, finished or not, index first. Other files stay."""
    if directory.is_dir():
        for path in sorted((path for path in directory.iterdir() if _OURS.fullmatch(path.name)), key=lambda path: path.name != INDEX_FILE):
            with writing(path, 0):
                path.unlink()


class CheckpointWriter:
    """Writes a checkpoint whose names, dtypes and shapes are all known beforehand. Holds one tensor at a time and no open files.

    A directory with the same checkpoint, begun by a run that was killed, is taken over; any other checkpoint in it is refused.
    Raises `UserError` for a full disk (before anything is written), missing permission, and a directory that holds another checkpoint.
    """

    def __init__(
        self, directory: Path, specs: Mapping[str, TensorSpec], max_shard_size: int, metadata: Mapping[str, str] = FORMAT_PT
    ) -> None:
        self.directory = directory
        self.specs = MappingProxyType(dict(specs))
        self.shards = self.shard_plan(specs, max_shard_size, metadata)
        self._homes = {name: shard for shard in self.shards for name in shard.offsets}
        self._index = self._index_bytes() if len(self.shards) > 1 else b""
        self._final: set[str] = set()  # files that have their final name
        self._touched: set[str] = set()  # files with writes that are not synced
        self._session: set[str] = set()  # tensors written by this object
        with writing(directory, self.total_bytes):
            directory.mkdir(parents=True, exist_ok=True)
            missing = self._take_over()
        self.fresh = frozenset(name for shard in missing for name in shard.offsets)
        """Tensors in files that did not exist before: nothing of them can have been written by an earlier run."""
        self._reserve(missing)

    @staticmethod
    def shard_plan(
        specs: Mapping[str, TensorSpec], max_shard_size: int, metadata: Mapping[str, str] = FORMAT_PT
    ) -> tuple[PlannedFile, ...]:
        """Tensors in the order given, a new file when the next one would exceed `max_shard_size` bytes of data. Touches no disk.

        Raises `ValueError` for no tensors, a size below 1, and names or dtypes that safetensors cannot hold.
        """
        if not specs or "__metadata__" in specs or max_shard_size < 1:
            raise ValueError(f"{len(specs)} tensors in shards of {max_shard_size} bytes, or a tensor named __metadata__")
        groups: list[dict[str, TensorSpec]] = [{}]
        filled = 0
        for name, spec in specs.items():
            if spec.dtype not in DTYPES.values():
                raise ValueError(f"tensor {name!r} has dtype {spec.dtype}, which safetensors cannot hold")
            if groups[-1] and filled + spec.nbytes > max_shard_size:
                groups.append({})
                filled = 0
            groups[-1][name] = spec
            filled += spec.nbytes
        if len(groups) == 1:
            return (plan_file(SINGLE_FILE, groups[0], metadata),)
        return tuple(
            plan_file(f"model-{i:05d}-of-{len(groups):05d}.safetensors", group, metadata) for i, group in enumerate(groups, start=1)
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of all files when finished, headers and index included."""
        return sum(shard.size for shard in self.shards) + len(self._index)

    def write(self, name: str, tensor: Tensor) -> None:
        """Puts `tensor` (any device and strides) in its place. Writing again replaces. Raises `ValueError` if the plan has another."""
        found = TensorSpec(tensor.dtype, tuple(tensor.shape))
        if self.specs.get(name) != found:
            raise ValueError(f"tensor {name!r}: planned {self.specs.get(name)}, given {found}")
        shard = self._homes[name]
        with writing(self._path(shard), found.nbytes):
            self._demote(shard)
            file = os.open(self._path(shard), os.O_WRONLY)
            try:
                put(file, bytes_of(tensor.detach().cpu().contiguous()), shard.offsets[name])
            finally:
                os.close(file)
        self._touched.add(shard.name)
        self._session.add(name)

    def flush(self) -> None:
        """After this everything written so far survives a power failure; call it before a manifest says so."""
        for shard in self.shards:
            if shard.name in self._touched:
                with writing(self._path(shard), shard.size):
                    sync(self._path(shard))
        self._touched.clear()

    def finish(self, written: Collection[str]) -> None:
        """Gives the files their final names, then writes the index.

        `written`: all tensors written in this run and earlier ones, by the caller's record. Raises `ValueError` unless these are
        all tensors of the plan, `UserError` when the record claims tensors of a file that was deleted since.
        """
        missing, unknown = self.specs.keys() - set(written), set(written) - self.specs.keys()
        if missing or unknown:
            raise ValueError(f"checkpoint is not complete: missing {sorted(missing)[:5]}, unknown {sorted(unknown)[:5]}")
        lost = [name for name in self.specs if name in self.fresh and name not in self._session]
        if lost:
            path = self._path(self._homes[lost[0]])
            raise UserError(f"{path}: an earlier run wrote tensor {lost[0]!r} and the file was deleted since; start anew with --overwrite")
        self._touched.update(shard.name for shard in self.shards)
        self.flush()
        with writing(self.directory, self.total_bytes):
            for shard in self.shards:
                if shard.name not in self._final:
                    os.replace(self._path(shard), self.directory / shard.name)
                    self._final.add(shard.name)
            sync(self.directory)
        if self._index:
            atomic_write_bytes(self.directory / INDEX_FILE, self._index)

    def _path(self, shard: PlannedFile) -> Path:
        return self.directory / (shard.name if shard.name in self._final else shard.name + ".partial")

    def _index_bytes(self) -> bytes:
        weight_map = {name: shard.name for name, shard in self._homes.items()}
        total = sum(spec.nbytes for spec in self.specs.values())
        table = {"metadata": {"total_size": total}, "weight_map": weight_map}
        return (json.dumps(table, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode("utf-8")

    def _take_over(self) -> list[PlannedFile]:
        """Accepts the files of an earlier run of the same plan and returns the shards that have none."""
        present = {path.name for path in self.directory.iterdir() if _OURS.fullmatch(path.name) and path.suffix != ".new"}
        missing = []
        for shard in self.shards:
            found = present & {shard.name, shard.name + ".partial"}
            present -= {name for name in found if len(found) == 1 and _begins_with(self.directory / name, shard)}
            if not found:
                missing.append(shard)
            elif shard.name in found:
                self._final.add(shard.name)
        index = self.directory / INDEX_FILE
        if index.name in present and self._index and index.stat().st_size == len(self._index) and index.read_bytes() == self._index:
            present.remove(index.name)
        if present:
            other = self.directory / min(present)
            raise UserError(f"{other} belongs to another checkpoint or run; pass another --output_dir, or --overwrite to delete it")
        if len(self._final) < len(self.shards):
            index.unlink(missing_ok=True)
        return missing

    def _reserve(self, missing: list[PlannedFile]) -> None:
        needed = sum(shard.size for shard in missing)
        with writing(self.directory, needed):
            free = shutil.disk_usage(self.directory).free
        if needed > free:
            raise UserError(
                f"{self.directory}: the disk is full, {needed} bytes ({readable_bytes(needed)}) needed, {free} ({readable_bytes(free)}) "
                "free; free some space, or pass an --output_dir on another disk"
            )
        try:
            for shard in missing:
                create_file(self._path(shard), shard.header, shard.size)
        except UserError:
            for shard in missing:
                with suppress(OSError):
                    self._path(shard).unlink(missing_ok=True)
            raise

    def _demote(self, shard: PlannedFile) -> None:
        """Takes its final name from a finished file that is about to change, so that nobody reads it half old and half new."""
        if shard.name in self._final:
            (self.directory / INDEX_FILE).unlink(missing_ok=True)
            self._final.remove(shard.name)
            os.replace(self.directory / shard.name, self._path(shard))
            sync(self.directory)


def _begins_with(path: Path, shard: PlannedFile) -> bool:
    return file_size(path) == shard.size and read_range(path, 0, len(shard.header)) == shard.header
