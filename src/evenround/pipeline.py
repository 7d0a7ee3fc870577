"""The driver: from a model directory to quantized checkpoints, one block group at a time.

Read `run` from top to bottom; everything else is a function it calls. Finished blocks are written at once and never read again. Host memory
holds one block group and the two input chains, whatever the model's depth.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor

from evenround.calibration import TokenRows, load_calibration
from evenround.calls import BlockCall, embed, head_inputs
from evenround.checkpoint import Checkpoint, CheckpointWriter, TensorSpec, remove_checkpoint
from evenround.config import DataConfig, DeviceConfig, OutputConfig, TuneConfig, as_dict, torch_dtype
from evenround.errors import UserError
from evenround.export import Exporter, get_exporter
from evenround.loading import load_tokenizer
from evenround.manifest import Chains, Manifest, require_space
from evenround.memory.devices import peak_bytes, pick_compute_dtype, pick_device, release_host_memory, simulated_capacity
from evenround.memory.simulate import SimulatedDevices
from evenround.model import Site, Skeleton, max_length, skeleton_from
from evenround.numerics.integer import QuantizedWeight
from evenround.output import exclusive, finish_checkpoint, prepare
from evenround.record import BlockRecord, total_seconds, versions
from evenround.scheme import Scheme, SchemeRules, resolve_schemes
from evenround.tune import Block, GroupResult, Samples, round_to_nearest, run_all, tune_block


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything the user decided."""

    model: str
    """Directory, or hub id."""
    label: str | None = None
    """What the record calls it, where that is not `model`."""
    rules: SchemeRules
    tune: TuneConfig
    data: DataConfig
    output: OutputConfig
    device: DeviceConfig = DeviceConfig()
    trust_remote_code: bool = False


class Progress(Protocol):
    """What a run tells while it goes."""

    def schemes(self, sites: Sequence[Site], schemes: Mapping[str, Scheme | None]) -> None:
        """The table of schemes, before any weight is read."""

    def note(self, text: str) -> None:
        """Something the user should know."""

    def group_started(self, number: int, count: int, names: Sequence[str]) -> None:
        """Block group `number` of `count` begins."""

    def step(self, iteration: int, iters: int, loss: float) -> None:
        """An optimizer step was made."""

    def group_done(self, number: int, count: int, record: BlockRecord) -> None:
        """Block group `number` of `count` is on disk."""


class Silent:
    """Progress that nobody sees."""

    def schemes(self, sites: Sequence[Site], schemes: Mapping[str, Scheme | None]) -> None: ...
    def note(self, text: str) -> None: ...
    def group_started(self, number: int, count: int, names: Sequence[str]) -> None: ...
    def step(self, iteration: int, iters: int, loss: float) -> None: ...
    def group_done(self, number: int, count: int, record: BlockRecord) -> None: ...


@dataclass(frozen=True, slots=True)
class _Group:
    """Consecutive decoder blocks tuned together, or the output head. `tensors`: checkpoint tensors written when it is done."""

    names: tuple[str, ...]
    blocks: tuple[int, ...]
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Format:
    exporter: Exporter
    folder: Path
    writer: CheckpointWriter


@dataclass(frozen=True, slots=True)
class _Run:
    """What stays the same from group to group."""

    job: Job
    source: Path
    skeleton: Skeleton
    schemes: Mapping[str, Scheme | None]
    rows: TokenRows | None
    formats: tuple[_Format, ...]
    device: torch.device
    dtype: torch.dtype
    peak: Callable[[], int]
    """Most bytes that the device has held so far."""
    tell: Progress


def run(job: Job, progress: Progress | None = None) -> dict[str, object]:
    """Quantize; returns the run record.

    Raises `UserError` for wrong input, always before finished work would be lost, and `torch.OutOfMemoryError` when the device is too
    small: the same job on a larger one goes on where it stopped.
    """
    tell = progress or Silent()
    capacity = simulated_capacity(job.device.device)
    if capacity is None:
        device = pick_device(job.device.device)
        return _quantize(job, tell, device, lambda: peak_bytes(device))
    with SimulatedDevices([capacity]) as devices:
        return _quantize(job, tell, torch.device("cpu", 0), lambda: devices.peak[0])


def _quantize(job: Job, tell: Progress, device: torch.device, peak: Callable[[], int]) -> dict[str, object]:
    exporters = [get_exporter(name) for name in job.output.formats]
    source = locate(job.model)
    checkpoint = Checkpoint.open(source)
    skeleton = skeleton_from(source, checkpoint, job.trust_remote_code)
    schemes = resolve_schemes(skeleton.sites, job.rules, ragged_groups=all(exporter.allows_ragged for exporter in exporters))
    exporters = [exporter.for_schemes(schemes) for exporter in exporters]
    _check_formats(exporters, skeleton.sites, schemes)
    tell.schemes(skeleton.sites, schemes)
    for note in [note for exporter in exporters for note in exporter.cautions(schemes)]:
        tell.note(note)

    dtype = _compute_dtype(job, skeleton, device, tell)
    rows = _calibration_rows(job, source, skeleton, tell) if job.tune.iters else None
    settings = _settings(job, source, checkpoint, schemes, rows, dtype, device)
    with exclusive(job.output.output_dir):
        finished = prepare(job.output, source, settings)
        if finished is not None:
            tell.note(f"{job.output.output_dir} holds the finished result of this very command already (--overwrite starts anew)")
            return finished
        manifest = Manifest.open(job.output.output_dir, settings)
        formats = _open_formats(job.output, exporters, skeleton, schemes)
        return _work(_Run(job, source, skeleton, schemes, rows, formats, device, dtype, peak, tell), settings, manifest)


def _work(run: _Run, settings: Mapping[str, object], manifest: Manifest) -> dict[str, object]:
    """From the embeddings, or from where an earlier run stopped, to finished checkpoints."""
    groups = _groups(run.skeleton, run.schemes, run.job.tune.nblocks)
    chains, calls = _first_inputs(run, manifest, len(groups))
    if chains is not None:
        require_space(manifest.folder.parent, chains)
    if manifest.done == 0:
        manifest.commit(chains, None, _write_group(_outside(run.skeleton, groups), run, {}, _Clock()))
    else:
        _check_partials(run, manifest)
        run.tell.note(f"going on where the last run stopped: {manifest.done - 1} of {len(groups)} block groups are finished")
    for number in range(manifest.done - 1, len(groups)):
        run.tell.group_started(number, len(groups), groups[number].names)
        chains, record, written = _do_group(run, groups[number], calls, number, chains)
        manifest.commit(chains if number + 1 < len(groups) else None, record.to_dict(), written)
        run.tell.group_done(number, len(groups), record)

    result = _record(run, settings, manifest)
    for form in run.formats:
        default = run.job.rules.default
        names = manifest.written[form.exporter.name]
        finish_checkpoint(form.exporter, form.folder, form.writer, run.source, run.skeleton, run.schemes, settings, default, result, names)
    manifest.remove()
    return result


def _check_partials(run: _Run, manifest: Manifest) -> None:
    """Raise `UserError` when files that an earlier part of the run had begun are gone."""
    for form in run.formats:
        if form.writer.fresh:
            raise UserError(
                f"{form.folder} has lost files of the unfinished run ({len(form.writer.fresh)} tensors); start anew with --overwrite"
            )


def locate(model: str) -> Path:
    """A model directory as it is, or a hub id as its downloaded snapshot. Raises `UserError` when neither can be had."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise UserError(f"model {model!r} is not a directory; give a transformers model directory or a hub id such as org/name")
    try:
        allowed = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py"]
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=allowed))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"model {model!r} is neither a directory here nor a model that the hub gives ({reason}); check the path") from error


def _check_formats(exporters: Sequence[Exporter], sites: Sequence[Site], schemes: Mapping[str, Scheme | None]) -> None:
    for exporter in exporters:
        for site in sites:
            scheme = schemes[site.name]
            if scheme is not None:
                exporter.check(site, scheme)


def _common_dtype(skeleton: Skeleton) -> torch.dtype:
    """The dtype of the weights to quantize; float32 when they are of several. Raises `UserError` when one cannot be quantized."""
    dtypes = {site.dtype for site in skeleton.sites}
    unusable = [str(dtype) for dtype in dtypes if dtype not in (torch.bfloat16, torch.float16, torch.float32)]
    if unusable:
        raise UserError(
            f"weights of dtype {', '.join(unusable)} cannot be quantized; convert the checkpoint to bfloat16, float16 or float32"
        )
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _compute_dtype(job: Job, skeleton: Skeleton, device: torch.device, tell: Progress) -> torch.dtype:
    source = _common_dtype(skeleton)
    if job.tune.iters == 0:
        return torch.float32  # nothing is run: weights are rounded as they are in the file
    wish = None if job.device.compute_dtype == "auto" else torch_dtype(job.device.compute_dtype)
    chosen = pick_compute_dtype(wish, source, device)
    if torch.promote_types(source, chosen) != chosen:
        name = str(chosen).removeprefix("torch.")
        tell.note(f"--compute_dtype {name} rounds the weights, which are {str(source).removeprefix('torch.')}, before they are quantized")
    return chosen


def _calibration_rows(job: Job, source: Path, skeleton: Skeleton, tell: Progress) -> TokenRows:
    tokenizer = load_tokenizer(source, job.trust_remote_code)
    rows = load_calibration(
        job.data.dataset,  # type: ignore[arg-type]
        tokenizer,
        nsamples=job.data.nsamples,
        seqlen=job.data.seqlen,
        seed=job.tune.seed,
        max_length=max_length(skeleton.config),
        vocab_size=skeleton.config.get_text_config().vocab_size,
    )
    for note in rows.notes:
        tell.note(note)
    return rows


def _settings(
    job: Job,
    source: Path,
    checkpoint: Checkpoint,
    schemes: Mapping[str, Scheme | None],
    rows: TokenRows | None,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, object]:
    """Everything that decides the bytes of the result, as plain values: the fingerprint of a run."""
    return {
        "model": {"weights": checkpoint.fingerprint(), "files": _digest(source, job.trust_remote_code)},
        "schemes": {name: scheme.to_dict() if scheme else None for name, scheme in schemes.items()},
        "tune": as_dict(job.tune),
        "data": {"rows": list(rows.tokens.shape), "sha256": rows.fingerprint, "from": rows.source} if rows else None,
        "formats": list(job.output.formats),
        "max_shard_size": job.output.max_shard_size,
        "compute_dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "threads (OMP_NUM_THREADS)": torch.get_num_threads() if device.type == "cpu" else None,
        "versions": versions(),
    }


def _digest(source: Path, trust_remote_code: bool) -> str:
    """sha256 over config.json and, where it is run, the Python code beside it."""
    digest = hashlib.sha256()
    for path in [source / "config.json", *(sorted(source.glob("*.py")) if trust_remote_code else ())]:
        data = path.read_bytes()
        digest.update(f"{path.name} {len(data)} ".encode() + data)
    return digest.hexdigest()


def _groups(skeleton: Skeleton, schemes: Mapping[str, Scheme | None], nblocks: int) -> tuple[_Group, ...]:
    of_block: list[list[str]] = [[] for _ in skeleton.block_names]
    for name, tensor in skeleton.names.items():
        for number, block in enumerate(skeleton.block_names):
            if name.startswith(block + "."):
                of_block[number].append(tensor)
    groups = []
    for start in range(0, len(of_block), nblocks):
        numbers = tuple(range(start, min(start + nblocks, len(of_block))))
        tensors = tuple(tensor for number in numbers for tensor in of_block[number])
        groups.append(_Group(tuple(skeleton.block_names[number] for number in numbers), numbers, tensors))
    head = next((site for site in skeleton.sites if site.is_head and schemes[site.name]), None)
    if head is not None:
        tied = head.parameter in skeleton.tied
        groups.append(_Group((head.name,), (), () if tied else (head.checkpoint_name,)))
    return tuple(groups)


def _outside(skeleton: Skeleton, groups: Sequence[_Group]) -> tuple[str, ...]:
    inside = {tensor for group in groups for tensor in group.tensors}
    return tuple(name for name in skeleton.checkpoint.names if name not in inside)


def output_specs(exporter: Exporter, skeleton: Skeleton, schemes: Mapping[str, Scheme | None]) -> dict[str, TensorSpec]:
    """Every tensor of the finished checkpoint in order: the source's, with each quantized weight replaced by its packed tensors."""
    replaced = {site.checkpoint_name: site for site in skeleton.sites if schemes[site.name] and site.parameter not in skeleton.tied}
    specs: dict[str, TensorSpec] = {}
    for name, spec in skeleton.checkpoint.specs.items():
        site = replaced.get(name)
        specs.update({name: spec} if site is None else _packed_specs(exporter, site, schemes))
    for site in skeleton.sites:
        if schemes[site.name] and site.parameter in skeleton.tied:
            specs.update(_packed_specs(exporter, site, schemes))
    return specs


def _packed_specs(exporter: Exporter, site: Site, schemes: Mapping[str, Scheme | None]) -> dict[str, TensorSpec]:
    scheme = schemes[site.name]
    assert scheme is not None
    return exporter.tensor_specs(site, scheme)


def _open_formats(
    output: OutputConfig, exporters: Sequence[Exporter], skeleton: Skeleton, schemes: Mapping[str, Scheme | None]
) -> tuple[_Format, ...]:
    formats = []
    for exporter in exporters:
        folder = output.output_dir if len(exporters) == 1 else output.output_dir / exporter.name
        specs = output_specs(exporter, skeleton, schemes)
        try:
            formats.append(_Format(exporter, folder, CheckpointWriter(folder, specs, output.max_shard_size)))
        except UserError:
            for form in formats:
                if form.writer.fresh == frozenset(form.writer.specs):  # reserved by this run just now: give the disk back
                    remove_checkpoint(form.folder)
            raise
    return tuple(formats)


def _first_inputs(run: _Run, manifest: Manifest, groups: int) -> tuple[Chains | None, tuple[BlockCall, ...]]:
    """Inputs of the next block group (from the manifest, or the embeddings) and how blocks are called; nothing without text."""
    if run.rows is None or manifest.done > groups:
        return None, ()
    embedded = embed(run.skeleton, run.rows.tokens, run.rows.mask, run.dtype, run.device)
    if manifest.done == 0:
        return Chains(embedded.hidden, embedded.hidden), embedded.calls
    return manifest.chains(), embedded.calls


def _do_group(
    run: _Run, group: _Group, calls: Sequence[BlockCall], number: int, chains: Chains | None
) -> tuple[Chains | None, BlockRecord, dict[str, list[str]]]:
    """Materialize, tune, pack and write one group. Returns the next group's inputs, the record, and the tensors written."""
    clock, result = _Clock(), None
    with run.skeleton.materialized(group.names, run.dtype, run.device):
        clock.lap("load")
        blocks = _blocks(run, group, calls)
        if chains is None or run.rows is None:
            quantized: Mapping[str, QuantizedWeight] = round_to_nearest(blocks)
        else:
            chains, result = _tune_group(run, blocks, group, number, chains, run.rows, clock)
            quantized = result.quantized
            for note in result.notes:
                run.tell.note(note)
        clock.lap("tune")
    written = _write_group(group.tensors, run, quantized, clock)
    release_host_memory()
    return chains, _block_record(group, result, quantized, clock, run.peak()), written


def _blocks(run: _Run, group: _Group, calls: Sequence[BlockCall]) -> tuple[Block, ...]:
    blocks = []
    for index, name in enumerate(group.names):
        sites = []
        for site in run.skeleton.sites:
            scheme = run.schemes[site.name]
            if scheme is not None and (site.name == name or site.name.startswith(name + ".")):
                sites.append((site, scheme.weight))
        call = calls[group.blocks[index]] if calls and group.blocks else BlockCall((), {}, None, False)
        blocks.append(Block(name, run.skeleton.model.get_submodule(name), call, tuple(sites)))
    return tuple(blocks)


def _tune_group(
    run: _Run, blocks: Sequence[Block], group: _Group, number: int, chains: Chains, rows: TokenRows, clock: "_Clock"
) -> tuple[Chains | None, GroupResult]:
    config, chained = run.job.tune, run.job.tune.quantized_inputs
    if group.blocks:
        # The float chain is overwritten where nothing else needs it: two chains and one set of outputs live, not four.
        free = chained and chains.float_inputs is not chains.quantized_inputs
        targets = run_all(blocks, chains.float_inputs, config.batch_size, run.device, out=chains.float_inputs if free else None)
        samples = Samples(chains.quantized_inputs if chained else chains.float_inputs, targets, rows.mask)
    else:
        inputs = [
            head_inputs(run.skeleton, rows.tokens, rows.mask, hidden, run.dtype, run.device)
            for hidden in (chains.quantized_inputs, chains.float_inputs)
        ]
        samples = Samples(inputs[0] if chained else inputs[1], None, rows.mask, inputs[1])
    clock.lap("reference")
    result = tune_block(
        blocks,
        samples,
        config,
        device=run.device,
        # One generator a group, seeded by its number: a resumed run draws what the uninterrupted one would.
        generator=torch.Generator().manual_seed(config.seed * 1_000_003 + number),
        micro_batch=config.batch_size if group.blocks else 1,  # logits are a vocabulary wide
        on_step=lambda iteration, loss: run.tell.step(iteration, config.iters, loss),
    )
    if samples.targets is None or result.outputs is None:
        return None, result
    return Chains(samples.targets, result.outputs if chained else samples.targets), result


def _write_group(tensors: Sequence[str], run: _Run, quantized: Mapping[str, QuantizedWeight], clock: "_Clock") -> dict[str, list[str]]:
    """Write a group's tensors into every format: quantized weights packed, all others as the source's own bytes. Returns their names."""
    skeleton = run.skeleton
    written: dict[str, list[str]] = {form.exporter.name: [] for form in run.formats}

    def write(form: _Format, name: str, tensor: Tensor) -> None:
        form.writer.write(name, tensor)
        written[form.exporter.name].append(name)

    replaced = {site.checkpoint_name for site in skeleton.sites if site.name in quantized and site.parameter not in skeleton.tied}
    for name in tensors:
        if name not in replaced:
            tensor = skeleton.checkpoint.read(name)
            for form in run.formats:
                write(form, name, tensor)
    clock.lap("write")
    for site in skeleton.sites:
        for form in run.formats if site.name in quantized else ():
            packed = form.exporter.pack(site, quantized[site.name])
            clock.lap("pack")
            for name, tensor in packed.items():
                write(form, name, tensor)
            clock.lap("write")
    for form in run.formats:
        form.writer.flush()
    clock.lap("write")
    return written


def _block_record(
    group: _Group, result: GroupResult | None, quantized: Mapping[str, QuantizedWeight], clock: "_Clock", peak: int
) -> BlockRecord:
    if not quantized:
        kept = "float"
    else:
        kept = result.kept if result else "untuned"
    return BlockRecord(
        blocks=group.names,
        rtn_loss=result.rtn_loss if result else None,
        tuned_loss=result.tuned_loss if result else None,
        kept=kept,
        best_iteration=result.best_iteration if result else None,
        losses=result.losses if result else (),
        seconds=dict(clock.seconds),
        peak_bytes=peak,
        notes=result.notes if result else (),
    )


class _Clock:
    """Wall seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = round(self.seconds.get(phase, 0.0) + now - self.last, 3)
        self.last = now


def _record(run: _Run, settings: Mapping[str, object], manifest: Manifest) -> dict[str, object]:
    skeleton, schemes, rows = run.skeleton, run.schemes, run.rows
    quantized = [site for site in skeleton.sites if schemes[site.name]]
    weights = sum(site.shape[0] * site.shape[1] for site in quantized)
    sizes = {}
    for form in run.formats:
        packed = sum(spec.nbytes for site in quantized for spec in _packed_specs(form.exporter, site, schemes).values())
        sizes[form.exporter.name] = {"bytes": form.writer.total_bytes, "bits_per_weight": round(packed * 8 / weights, 4)}
    return {
        "model": run.job.label or run.job.model,
        "architecture": type(skeleton.model).__name__,
        "settings": {key: value for key, value in settings.items() if key not in ("schemes", "versions")},
        "versions": settings["versions"],
        "source_bytes": skeleton.checkpoint.nbytes,
        "formats": sizes,
        "quantized_weights": weights,
        "sites": [_site_record(site, schemes[site.name]) for site in skeleton.sites],
        "calibration_notes": list(rows.notes) if rows else [],
        "blocks": manifest.blocks,
        "totals": {"seconds": total_seconds(manifest.blocks), "peak_bytes": max(_peaks(manifest), default=0)},
    }


def _peaks(manifest: Manifest) -> list[int]:
    return [block["peak_bytes"] for block in manifest.blocks if isinstance(block["peak_bytes"], int)]


def _site_record(site: Site, scheme: Scheme | None) -> dict[str, object]:
    return {"name": site.name, "shape": list(site.shape), "scheme": scheme.to_dict() if scheme else None}
