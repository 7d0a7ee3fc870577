"""What a run has finished, on disk, so that a killed run goes on where it was.

After each block group the two input chains and then the manifest are written (write new, fsync, rename), in this order: a kill between any
two writes leaves the state of the group before. Nothing random needs saving: each group's generator is seeded from the seed and the group's
number. A manifest is continued only by a run with the same settings; any difference is named.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch

from evenround.chains import Chain, Chains, Home
from evenround.errors import UserError, readable_bytes
from evenround.memory.place import Order
from evenround.tensorfile import TensorFile, TensorSpec, atomic_write_text, bytes_of, plan_file, put, read_header, read_into

FOLDER = ".evenround"
_MANIFEST = "manifest.json"
_VERSION = 2


@dataclass(slots=True)
class Manifest:
    """State of one output directory. `done` counts finished groups; `blocks` holds their records."""

    folder: Path
    settings: Mapping[str, object]
    done: int = 0
    blocks: list[dict[str, object]] = field(default_factory=list)
    written: dict[str, list[str]] = field(default_factory=dict)
    """Format → tensors that are in its files."""
    orders: dict[str, Order] = field(default_factory=dict)
    """First block of a group → in which order it sums: a run that goes on keeps it, whatever memory is free then."""

    @staticmethod
    def exists(output_dir: Path) -> bool:
        """Whether a run in `output_dir` has begun and is not finished."""
        return (output_dir / FOLDER / _MANIFEST).is_file()

    @staticmethod
    def new(output_dir: Path, settings: Mapping[str, object]) -> "Manifest":
        """Of a run that begins, whatever is there."""
        return Manifest(output_dir / FOLDER, settings)

    @staticmethod
    def open(output_dir: Path, settings: Mapping[str, object]) -> "Manifest":
        """The manifest under `output_dir`, or a new one. Raises `UserError` naming each setting that differs."""
        folder = output_dir / FOLDER
        path = folder / _MANIFEST
        if not path.is_file():
            return Manifest(folder, settings)
        try:
            saved = json.loads(path.read_text())
            done, blocks, before = int(saved["done"]), list(saved["blocks"]), dict(saved["settings"])
            written = {name: list(tensors) for name, tensors in saved["written"].items()}
            orders = {name: (int(micro), int(replicas)) for name, (micro, replicas) in saved["orders"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} cannot be read ({error}); start anew with --overwrite") from error
        if saved.get("version") != _VERSION:
            raise UserError(f"{path} was written by another version of evenround; start anew with --overwrite")
        refuse_other_settings(output_dir, before, settings)
        return Manifest(folder, settings, done, blocks, written, orders)

    def commit(
        self, chains: Chains | None, block: dict[str, object] | None, written: Mapping[str, Sequence[str]] = MappingProxyType({})
    ) -> None:
        """The group after `done` is finished: save what the next needs, then say so, then drop what the last needed.

        `written`: format → names of the tensors that the group put into its files.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        before = self._chain_path(self.done)
        if block is not None:
            self.blocks.append(block)
        for form, names in written.items():
            self.written.setdefault(form, []).extend(names)
        self.done += 1
        if chains is not None:
            _save(self._chain_path(self.done), chains)
        state = {
            "version": _VERSION,
            "done": self.done,
            "blocks": self.blocks,
            "written": self.written,
            "orders": self.orders,
            "settings": self.settings,
        }
        atomic_write_text(self.folder / _MANIFEST, json.dumps(state, indent=1))
        before.unlink(missing_ok=True)

    def chains(self, homes: Callable[[int], Sequence[Home]]) -> Chains:
        """The chains saved with the last commit, where `homes` (samples → homes) wants them.

        Raises `UserError` when they are gone or broken.
        """
        path = self._chain_path(self.done)
        try:
            saved = read_header(path)
            shape = saved.tensors["float"][0].shape
            found = {name: _load(saved, name, homes(shape[0])) for name in ("float", "quantized") if name in saved.tensors}
            return Chains(found["float"], found.get("quantized", found["float"]))
        except (OSError, KeyError, UserError) as error:
            raise UserError(f"{path} cannot be read ({error}); start anew with --overwrite") from error

    def remove(self) -> None:
        """The run is over: drop the working folder, the manifest last. Killed in between, the next run still knows that all is done."""
        manifest = self.folder / _MANIFEST
        with suppress(OSError):
            for path in self.folder.iterdir():
                if path != manifest:
                    path.unlink()
            manifest.unlink()
            self.folder.rmdir()

    def _chain_path(self, done: int) -> Path:
        return self.folder / f"inputs-{done:05d}.safetensors"


def require_space(folder: Path, chains: Chains) -> None:
    """Raise `UserError` unless the file system has room for the chains of two groups (the new ones are written before the old ones go)."""
    needed = 4 * chains.float_inputs.nbytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{folder} has {readable_bytes(free)} free, and resuming needs {readable_bytes(needed)} there while blocks are tuned; free "
            "some space, choose another --output_dir, or use smaller --nsamples or --seqlen"
        )


def refuse_other_settings(output_dir: Path, before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raises `UserError` naming every setting that differs between an earlier run in `output_dir` and this one."""
    plain = json.loads(json.dumps(now))
    if before.get("model") != plain.get("model"):
        raise UserError(f"{output_dir} holds a run of another model; choose another --output_dir, or start anew with --overwrite")
    schemes = _differences("schemes.", before.get("schemes"), plain.get("schemes"))
    keys = [key for key in {**before, **plain} if key != "schemes"]
    others = [item for key in keys for item in _differences(f"{key}.", before.get(key), plain.get(key))]
    shown = [*others, *schemes[:1]]
    if len(schemes) > 1:
        shown.append(f"{len(schemes) - 1} more differences between the schemes of layers")
    if shown:
        raise UserError(
            f"{output_dir} holds a run with other settings: {'; '.join(shown)}. Repeat those settings to go on, choose another "
            "--output_dir, or start anew with --overwrite"
        )


def _differences(prefix: str, before: object, now: object) -> Sequence[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        found: list[str] = []
        for key in {**before, **now}:
            found += _differences(f"{prefix}{key}.", before.get(key), now.get(key))
        return found
    return [] if before == now else [f"{prefix.rstrip('.')} was {before!r}, is {now!r}"]


def _load(saved: TensorFile, name: str, homes: Sequence[Home]) -> Chain:
    spec, offset = saved.tensors[name]
    chain = Chain.empty(spec.shape, spec.dtype, homes)
    row = TensorSpec(spec.dtype, spec.shape[1:])
    for number in range(spec.shape[0]):
        values = torch.empty(row.shape, dtype=row.dtype)
        read_into(saved.path, offset + number * row.nbytes, bytes_of(values))
        chain.write([number], values.unsqueeze(0))
    return chain


def _save(path: Path, chains: Chains) -> None:
    """Sample by sample: a chain that is spread over devices never is on the host as a whole."""
    specs = {name: TensorSpec(chain.dtype, chain.shape) for name, chain in chains.tensors.items()}
    new = path.with_suffix(".new")
    try:
        plan = plan_file(path.name, specs, {})
        with open(new, "wb") as file:
            put(file.fileno(), memoryview(plan.header), 0)
            for name, chain in chains.tensors.items():
                at = plan.offsets[name]
                for rows in chain.on_host():
                    put(file.fileno(), bytes_of(rows), at)
                    at += rows.nbytes
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as error:
        new.unlink(missing_ok=True)
        needed = sum(spec.nbytes for spec in specs.values())
        raise UserError(f"cannot write the {needed} bytes of {path}: {error}; free some space and run the same command again") from error
