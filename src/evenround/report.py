"""What a checkpoint or a run consists of: schemes, sizes, losses, seconds. `show` gives plain values, `render_…` draws them.

Sizes and schemes are read from headers and config.json, so files that others wrote are shown too; losses and seconds come from the run
record.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from evenround.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from evenround.errors import UserError, readable_bytes
from evenround.export import format_of, read_schemes
from evenround.export.base import are_strings
from evenround.loading import quant_method, read_config
from evenround.manifest import FOLDER
from evenround.record import RECORD, read_record
from evenround.scheme import Scheme
from evenround.verify import Verification


def show(path: Path) -> dict[str, Any]:
    """A checkpoint, or a run with a folder for each format, as plain values.

    A run: `{"path", "kind": "run", "formats": [checkpoints], "blocks", "seconds", …}`. A checkpoint: `{"path", "kind": "checkpoint",
    "format", "architecture", "schemes", "layers", "bits_per_weight" (quantized layers, scales included), "bytes" (of the shards),
    "source_bytes", "blocks", "seconds", "notes", …}`; what is not known is None or empty. Raises `UserError` for a directory that is
    neither, and for damaged files.
    """
    if _is_checkpoint(path):
        return _checkpoint(path)
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir() and _is_checkpoint(folder)) if path.is_dir() else []
    if (path / FOLDER).is_dir():
        raise UserError(f"{path} holds an unfinished run; run the command that began it again to finish it")
    if not folders:
        Checkpoint.open(path)  # says what is there instead
        raise UserError(f"{path} has no config.json; pass a checkpoint, or the output directory of a run")
    formats = [_checkpoint(folder) for folder in folders]
    record = next((read_record(folder) for folder in folders if (folder / RECORD).is_file()), None)
    return {"path": str(path), "kind": "run", "formats": formats, **_of_record(record or {})}


def _is_checkpoint(path: Path) -> bool:
    return (path / "config.json").is_file() and ((path / SINGLE_FILE).is_file() or (path / INDEX_FILE).is_file())


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    shape: tuple[int, ...]
    scheme: Scheme | None
    nbytes: int
    """In the file."""

    def to_dict(self) -> dict[str, Any]:
        scheme = self.scheme.to_dict() if self.scheme else None
        return {"name": self.name, "shape": list(self.shape), "scheme": scheme, "bytes": self.nbytes}


def _checkpoint(path: Path) -> dict[str, Any]:
    config, files, record = read_config(path), Checkpoint.open(path), read_record(path)
    known, method, notes = _of_record(record or {}), quant_method(config), []
    architectures = config.get("architectures")
    name, layers = method or "float", list[_Layer]()
    try:
        found = format_of(config)
        name = found if record or method else name
        layers = _fake_layers(files, record or {}) if found == "fake" else _packed_layers(config, files)
    except UserError as error:
        notes.append(str(error))
    quantized = [layer for layer in layers if layer.scheme]
    weights = sum(layer.shape[0] * layer.shape[1] for layer in quantized)
    schemes: dict[str, dict[str, int]] = {}
    for layer in quantized:
        entry = schemes.setdefault(layer.scheme.label if layer.scheme else "", {"layers": 0, "weights": 0})
        entry["layers"] += 1
        entry["weights"] += layer.shape[0] * layer.shape[1]
    return {
        "path": str(path),
        "kind": "checkpoint",
        "format": name,
        "architecture": architectures[0] if are_strings(architectures) and architectures else None,
        "schemes": schemes,
        "layers": [layer.to_dict() for layer in layers],
        "quantized_weights": weights,
        "bits_per_weight": round(sum(layer.nbytes for layer in quantized) * 8 / weights, 4) if weights else None,
        "bytes": sum(shard.size for shard in files.shards),
        "source_bytes": record.get("source_bytes") if record else None,
        "notes": notes,
        **known,
    }


def _packed_layers(config: Mapping[str, Any], files: Checkpoint) -> list[_Layer]:
    stored = read_schemes(config, files.specs, files.read)
    sizes = {name: sum(files.specs[tensor].nbytes for tensor in weight.tensors) for name, weight in stored.items()}
    return [_Layer(name, weight.shape, weight.scheme, sizes[name]) for name, weight in stored.items()]


def _fake_layers(files: Checkpoint, record: Mapping[str, Any]) -> list[_Layer]:
    """The record's sites; a tensor's name may lack the beginning of the module's (GPT-2 files lack `transformer.`)."""
    layers = []
    for site in record.get("sites", []):
        scheme = Scheme.from_dict(site["scheme"]) if site["scheme"] else None
        tensors = [name for name in files.specs if f".{site['name']}.weight".endswith(f".{name}")]
        layers.append(_Layer(site["name"], tuple(site["shape"]), scheme, sum(files.specs[name].nbytes for name in tensors[:1])))
    return layers


def _of_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Losses by block, seconds by phase, and where they come from. Raises `UserError` when something is not as a run writes it."""
    try:
        _ = [(site["name"], site["shape"][1], site["scheme"]) for site in record.get("sites", [])]
        blocks = [
            {
                **{key: block[key] for key in ("blocks", "rtn_loss", "tuned_loss", "kept", "best_iteration", "notes")},
                "ratio": block["tuned_loss"] / block["rtn_loss"] if block["tuned_loss"] is not None and block["rtn_loss"] else None,
                "seconds": round(sum(block["seconds"].values()), 3),
            }
            for block in record.get("blocks", [])
        ]
        totals = record.get("totals", {})
        known = {"seconds": totals.get("seconds", {}), "peak_bytes": totals.get("peak_bytes"), "versions": record.get("versions", {})}
        return {"model": record.get("model"), "blocks": blocks, **known}
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise UserError(f"{RECORD} is damaged: {error!r}; delete it to see the rest") from error


def render_show(values: Mapping[str, Any]) -> list[RenderableType]:
    """What `show` gave, drawn."""
    checkpoints: Sequence[Mapping[str, Any]] = values["formats"] if values["kind"] == "run" else [values]
    architecture = checkpoints[0]["architecture"] or "unknown architecture"
    parts: list[RenderableType] = [Text(f"{values['path']}: {architecture}"), _sizes(checkpoints)]
    parts += [Text(f"note: {note}") for entry in checkpoints for note in entry["notes"]]
    if values["blocks"]:
        parts.append(_losses(values["blocks"]))
        seconds = ", ".join(f"{phase} {spent:.1f} s" for phase, spent in values["seconds"].items())
        peak = f"; peak memory {readable_bytes(values['peak_bytes'])}" if values["peak_bytes"] else ""
        parts.append(Text(f"time: {seconds}{peak}"))
    return parts


def _sizes(checkpoints: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("format", "schemes", "bits per weight", "size", "of the original")
    for entry in checkpoints:
        schemes = ", ".join(f"{label} x {count['layers']}" for label, count in entry["schemes"].items()) or "not quantized"
        bits = "-" if entry["bits_per_weight"] is None else f"{entry['bits_per_weight']:.3f}"
        share = f"{100 * entry['bytes'] / entry['source_bytes']:.1f} %" if entry["source_bytes"] else "-"
        table.add_row(escape(entry["format"]), schemes, bits, readable_bytes(entry["bytes"]), share)
    return table


def _losses(blocks: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("block", "rtn loss", "tuned loss", "ratio", "kept", "best step", "seconds")
    for block in blocks:
        names = block["blocks"]
        name = names[0] if len(names) == 1 else f"{names[0]} … {names[-1].rsplit('.', 1)[-1]}"
        losses = ("-" if block[key] is None else f"{block[key]:.4g}" for key in ("rtn_loss", "tuned_loss", "ratio"))
        best = "-" if block["best_iteration"] is None else str(block["best_iteration"])
        table.add_row(escape(name), *losses, block["kept"], best, f"{block['seconds']:.1f}")
    return table


def render_verification(result: Verification) -> list[RenderableType]:
    """What `verify` found, drawn: what is wrong, the worst layers, the loss, and a last line that says whether all is well."""
    parts: list[RenderableType] = []
    if result.layers:
        table = _table("layer", "scheme", "relative error", "allowed", title="layers nearest to what their scheme allows")
        for layer in sorted(result.layers, key=lambda layer: layer.relative_rmse / layer.bound, reverse=True)[:10]:
            table.add_row(escape(layer.name), layer.scheme, f"{layer.relative_rmse:.4f}", f"{layer.bound:.4f}")
        parts.append(table)
    if result.loss is not None:
        original = "" if result.reference_loss is None else f", of the original {result.reference_loss:.4f}"
        parts.append(Text(f"loss on a short text: {result.loss:.4f}{original}"))
    parts += [Text(f"note: {note}") for note in result.notes]
    if result.findings:
        table = _table("where", "what is wrong", "what to do", title=f"{len(result.findings)} finding(s)")
        for finding in result.findings:
            table.add_row(escape(finding.place), escape(finding.what), escape(finding.fix))
        return [*parts, table]
    return [*parts, Text(f"{result.checkpoint}: all {result.tensors} tensors read back, nothing wrong")]


def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
