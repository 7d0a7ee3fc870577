"""The output directory: what may be there before a run, and the files that make finished shards a checkpoint.

config.json is written last: a directory that has one is a whole checkpoint.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import nn

from evenround.checkpoint import CheckpointWriter, TensorSpec, atomic_write_text, remove_checkpoint
from evenround.config import OutputConfig
from evenround.errors import UserError
from evenround.export import EXPORTERS, Exporter
from evenround.manifest import FOLDER, Manifest, refuse_other_settings
from evenround.model import Site, Skeleton
from evenround.record import RECORD, read_record, write_record
from evenround.scheme import Scheme

NOT_COPIED = {".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".md", ".part", ".lock"}
NOT_COPIED_NAMES = {"config.json", RECORD, "model.safetensors.index.json", "pytorch_model.bin.index.json", "quantization_config.json"}
MAX_COPIED = 200 * 1024 * 1024
COMPANIONS = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*", "generation_config.json",
    "preprocessor_config.json", "processor_config.json", "*.tiktoken",
)  # fmt: skip
"""Files that transformers finds by their names: those of another model must not stay beside this one's."""


def folders(output: OutputConfig) -> list[Path]:
    """One directory a format; a single format goes straight into the output directory."""
    if len(output.formats) == 1:
        return [output.output_dir]
    return [output.output_dir / name for name in output.formats]


@contextlib.contextmanager
def exclusive(root: Path) -> Iterator[None]:
    """No other run works in `root` until the context ends. Raises `UserError` when one does, or when `root` cannot be made.

    The lock is on the directory itself, so it leaves no file, and the system drops it when a process is killed.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        handle = os.open(root, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"--output_dir {root} cannot be written: {error.strerror or error}") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another evenround is at work in {root}; wait for it to end, or choose another --output_dir") from None
        yield
    finally:
        os.close(handle)


def prepare(output: OutputConfig, source: Path, settings: Mapping[str, object]) -> dict[str, object] | None:
    """Check that the output directory is fit for this run, or return the record when it holds this very run's finished result.

    Raises `UserError` when it cannot be written, is the source itself, or holds something else and `overwrite` is not set.
    """
    root = output.output_dir
    if any(folder.resolve() == source.resolve() for folder in [root, *folders(output)]):
        raise UserError(f"--output_dir {root} is the model itself; choose another directory")
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / ".evenround-probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--output_dir {root} cannot be written: {error.strerror or error}") from error
    if output.overwrite or Manifest.exists(root):
        return None
    for folder in folders(output):
        record = read_record(folder)
        if record is not None:
            refuse_other_settings(root, _settings_of(record), settings)
        elif (folder / "config.json").exists() or any(folder.glob("*.safetensors")):
            raise UserError(
                f"{folder} holds a checkpoint that this run did not write; choose another --output_dir, or replace it with --overwrite"
            )
    _refuse_other_layout(output)
    records = [read_record(folder) for folder in folders(output)]
    return records[0] if all(record is not None for record in records) else None


def _refuse_other_layout(output: OutputConfig) -> None:
    """One format lies in the directory itself, several in folders: raise `UserError` when an earlier run was laid out the other way."""
    if len(output.formats) > 1:
        if read_record(output.output_dir) is not None:
            raise UserError(
                f"{output.output_dir} holds a run of one format, {', '.join(output.formats)} would go into folders in it; choose another "
                "--output_dir, or replace it with --overwrite"
            )
        return
    earlier = [name for name in EXPORTERS if (output.output_dir / name / RECORD).is_file()]
    if earlier:
        raise UserError(
            f"{output.output_dir} holds a run of several formats ({', '.join(earlier)}); choose another --output_dir, or replace it "
            "with --overwrite"
        )


def _settings_of(record: Mapping[str, object]) -> dict[str, object]:
    sites = record.get("sites")
    schemes = {site["name"]: site["scheme"] for site in sites} if isinstance(sites, list) else {}
    settings = record.get("settings")
    return {**(settings if isinstance(settings, dict) else {}), "schemes": schemes, "versions": record.get("versions")}


def clear(output: OutputConfig) -> None:
    """Remove what a run writes, and nothing else; first what says that a checkpoint is whole.

    Tokenizer and generation files of the earlier model go, too: one that the new source lacks would be taken for its own.
    """
    shutil.rmtree(output.output_dir / FOLDER, ignore_errors=True)
    earlier = [folder for name in EXPORTERS if (folder := output.output_dir / name) and (folder / RECORD).is_file()]
    for folder in {output.output_dir, *folders(output), *earlier}:
        if folder.is_dir():
            for name in ("config.json", RECORD):
                (folder / name).unlink(missing_ok=True)
            remove_checkpoint(folder)
            for path in [path for pattern in COMPANIONS for path in folder.glob(pattern) if path.is_file()]:
                path.unlink(missing_ok=True)


def finish_checkpoint(
    exporter: Exporter,
    folder: Path,
    writer: CheckpointWriter,
    source: Path,
    skeleton: Skeleton,
    schemes: Mapping[str, Scheme | None],
    settings: Mapping[str, object],
    default: Scheme,
    record: Mapping[str, object],
    written: Sequence[str],
) -> None:
    """Name the shards, copy tokenizer and generation files, write the run record and, last, config.json."""
    writer.finish(written)
    copy_companions(source, folder)
    write_record(folder, record)
    config = json.loads((source / "config.json").read_text())
    known = {site.name for site in skeleton.sites}
    others = [name for name, module in skeleton.model.named_modules() if isinstance(module, nn.Linear) and name not in known]
    quantization = exporter.quantization_config(schemes, skeleton.sites, settings, default, others)
    if quantization is not None:
        config["quantization_config"] = quantization
    if any(schemes[site.name] and site.is_head for site in skeleton.sites):
        config["tie_word_embeddings"] = False  # also where the source stores both and says tied: a reader would take the embedding
    atomic_write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def copy_companions(source: Path, folder: Path) -> None:
    """Copy what belongs to a model beside its weights and config: tokenizer, generation config, chat template, licence."""
    for path in sorted(source.iterdir()):
        wanted = path.suffix not in NOT_COPIED and path.name not in NOT_COPIED_NAMES and not path.name.startswith(".")
        if wanted and path.is_file() and path.stat().st_size <= MAX_COPIED:
            try:
                shutil.copyfile(path, folder / path.name)
            except OSError as error:
                raise UserError(
                    f"cannot copy {path.name} to {folder}: {error.strerror or error}; run the same command again to go on"
                ) from error


def output_specs(exporter: Exporter, skeleton: Skeleton, schemes: Mapping[str, Scheme | None]) -> dict[str, TensorSpec]:
    """Every tensor of the finished checkpoint in order: the source's, with each quantized weight replaced by its packed tensors."""
    replaced = {site.checkpoint_name: site for site in skeleton.sites if schemes[site.name] and site.parameter not in skeleton.tied}
    specs: dict[str, TensorSpec] = {}
    for name, spec in skeleton.checkpoint.specs.items():
        site = replaced.get(name)
        specs.update({name: spec} if site is None else packed_specs(exporter, site, schemes))
    for site in skeleton.sites:
        if schemes[site.name] and site.parameter in skeleton.tied:
            specs.update(packed_specs(exporter, site, schemes))
    return specs


def packed_specs(exporter: Exporter, site: Site, schemes: Mapping[str, Scheme | None]) -> dict[str, TensorSpec]:
    """The tensors that stand for a quantized site."""
    scheme = schemes[site.name]
    assert scheme is not None
    return exporter.tensor_specs(site, scheme)


def check_formats(exporters: Sequence[Exporter], sites: Sequence[Site], schemes: Mapping[str, Scheme | None]) -> None:
    """Raise `UserError` naming a site that a format cannot hold."""
    for exporter in exporters:
        for site in sites:
            scheme = schemes[site.name]
            if scheme is not None:
                exporter.check(site, scheme)
