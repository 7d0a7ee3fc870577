"""The driver: from a model directory to quantized checkpoints, one block group at a time.

Read `run` from top to bottom; everything else is a function it calls. Finished blocks are written at once and never read again. Host memory
holds one block group and the two input chains, whatever the model's depth.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from evenround.blocks import Function
from evenround.calibration import TokenRows, load_calibration
from evenround.calls import embed
from evenround.chains import HOST, Chain, Chains
from evenround.checkpoint import Checkpoint, CheckpointWriter, remove_checkpoint
from evenround.config import MixConfig, OutputConfig, as_dict
from evenround.errors import UserError
from evenround.export import Exporter
from evenround.group import GroupJob, Work, homes, round_group, tune_group
from evenround.job import Job, Progress, Silent, cautions, compute_dtype, formats_and_schemes, locate, measuring_dtype, mixture_of
from evenround.loading import load_tokenizer
from evenround.manifest import Manifest, require_space
from evenround.memory.devices import Machine, parse_devices, release_host_memory
from evenround.memory.place import Layout, Placement
from evenround.memory.stage import Stage, stage
from evenround.mixed import Mixture
from evenround.model import Site, Skeleton, max_length, skeleton_from
from evenround.numerics.quantized import QuantizedWeight
from evenround.outlook import group_jobs, outlook, replan
from evenround.output import clear, exclusive, finish_checkpoint, output_specs, packed_specs, prepare
from evenround.plan import Plan, describe, refusal
from evenround.record import BlockRecord, total_seconds, versions
from evenround.scheme import Scheme
from evenround.states import needs_text
from evenround.tune import Draw, GroupResult


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
    mixture: Mixture | None
    """By which the schemes were chosen."""
    rows: TokenRows | None
    formats: tuple[_Format, ...]
    machine: Machine
    stage: Stage
    dtype: torch.dtype
    plan: Plan
    tell: Progress


def run(job: Job, progress: Progress | None = None) -> dict[str, object]:
    """Quantize; returns the run record.

    Raises `UserError` for wrong input, always before finished work would be lost, and `torch.OutOfMemoryError` when the device is too
    small: the same job on a larger one goes on where it stopped.
    """
    machine = parse_devices(job.device.device)
    if machine.simulated and job.device.enable_torch_compile:
        raise UserError("--enable_torch_compile: simulated devices see single operations, which compiled code has not; leave it out")
    with stage(machine) as devices:
        return _quantize(job, progress or Silent(), machine, devices)


def _quantize(job: Job, tell: Progress, machine: Machine, devices: Stage) -> dict[str, object]:
    source = locate(job.model)
    checkpoint = Checkpoint.open(source)
    skeleton = skeleton_from(source, checkpoint, job.trust_remote_code)
    mixture, rows = None, None
    if job.mix is not None:
        rows = _calibration_rows(job, source, skeleton, tell)
        mixture = _mixture(job, job.mix, skeleton, rows, devices, tell)
    exporters, schemes = formats_and_schemes(job, skeleton, mixture.schemes if mixture else None)
    tell.schemes(skeleton.sites, schemes)
    for note in cautions(exporters, schemes):
        tell.note(note)

    dtype = compute_dtype(job, skeleton, schemes, devices.where[0], tell)
    if not needs_text(schemes.values(), job.tune):
        rows = None
    elif rows is None:
        rows = _calibration_rows(job, source, skeleton, tell)
    settings = _settings(job, source, checkpoint, schemes, rows, dtype, devices.where[0])
    with exclusive(job.output.output_dir):
        finished = prepare(job.output, source, settings)
        if finished is not None:
            tell.note(f"{job.output.output_dir} holds the finished result of this very command already (--overwrite starts anew)")
            return finished
        fresh = job.output.overwrite
        manifest = Manifest.new(job.output.output_dir, settings) if fresh else Manifest.open(job.output.output_dir, settings)
        plan = _plan(job, exporters, skeleton, schemes, rows, dtype, machine, manifest, tell)
        if fresh:
            clear(job.output)  # now that nothing is left that could refuse the job
        formats = _open_formats(job.output, exporters, skeleton, schemes)
        run = _Run(job, source, skeleton, schemes, mixture, rows, formats, machine, devices, dtype, plan, tell)
        return _work(run, settings, manifest)


def _mixture(job: Job, mix: MixConfig, skeleton: Skeleton, rows: TokenRows, devices: Stage, tell: Progress) -> Mixture:
    """Measured on the first device, or on the host if that is too small."""
    dtype = measuring_dtype(job, skeleton, devices.where[0], tell)
    try:
        return mixture_of(job, mix, skeleton, rows, dtype, devices.where[0])
    except torch.OutOfMemoryError as error:
        reason = str(error)
    release_host_memory()
    tell.note(f"what layers cost is measured on the host, as the first device ran out of memory ({reason})")
    return mixture_of(job, mix, skeleton, rows, dtype, HOST)


def _plan(
    job: Job,
    exporters: Sequence[Exporter],
    skeleton: Skeleton,
    schemes: Mapping[str, Scheme | None],
    rows: TokenRows | None,
    dtype: torch.dtype,
    machine: Machine,
    manifest: Manifest,
    tell: Progress,
) -> Plan:
    """Raises `NothingFits`, before a weight is read; a CPU may swap and is only warned."""
    disk = sum(spec.nbytes for exporter in exporters for spec in output_specs(exporter, skeleton, schemes).values())
    tokens, mask = (rows.tokens, rows.mask) if rows else (None, None)
    plan = outlook(skeleton, schemes, job.tune, tokens, mask, dtype, machine, job.device, disk, manifest.orders)
    manifest.orders = manifest.orders or plan.orders
    tell.plan(plan)
    if not plan.fits:
        error = refusal(plan)
        if machine.devices[0].kind != "cpu":
            raise error
        tell.note(f"{error}; going on, as memory may be swapped")
    return plan


def _work(run: _Run, settings: Mapping[str, object], manifest: Manifest) -> dict[str, object]:
    """From the embeddings, or from where an earlier run stopped, to finished checkpoints."""
    groups = _groups(run.skeleton, run.schemes, run.job.tune.nblocks)
    state, jobs = _first_state(run, manifest, groups)
    if state.chains is not None:
        require_space(manifest.folder.parent, state.chains)
    if manifest.done == 0:
        manifest.commit(state.chains, None, _write_group(_outside(run.skeleton, groups), run, {}, _Clock()))
    else:
        _check_partials(run, manifest)
        run.tell.note(f"going on where the last run stopped: {manifest.done - 1} of {len(groups)} block groups are finished")
    for number in range(manifest.done - 1, len(groups)):
        run.tell.group_started(number, len(groups), groups[number].names)
        record, written = _do_group(run, groups[number], jobs[number:], manifest, state)
        manifest.commit(state.chains if number + 1 < len(groups) else None, record.to_dict(), written)
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
        "mix": as_dict(job.mix) if job.mix else None,
        "data": {"rows": list(rows.tokens.shape), "sha256": rows.fingerprint, "from": rows.source} if rows else None,
        "formats": list(job.output.formats),
        "max_shard_size": job.output.max_shard_size,
        "compute_dtype": str(dtype).removeprefix("torch."),
        "compiled": job.device.enable_torch_compile,
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


@dataclass(slots=True)
class _State:
    """What changes from group to group. The only holder of the chains, which may fill the devices: dropped here, they are gone."""

    plan: Plan
    chains: Chains | None = None
    """Inputs of the next group; None without text, and after the last."""
    layout: Layout | None = None
    """By which the chains lie where they lie."""

    def at(self, run: _Run, layout: Layout, manifest: Manifest) -> Chains | None:
        """The chains where `layout` wants them: read back from the disk if they are elsewhere, so that they are never there twice."""
        before, self.layout = self.layout, layout
        if before is not None and (before.chains, before.chain_rows) != (layout.chains, layout.chain_rows):
            self.chains = None
        if self.chains is None:
            self.load(run, layout, manifest)
        return self.chains

    def load(self, run: _Run, layout: Layout, manifest: Manifest) -> None:
        """Read the chains from the disk to where `layout` wants them."""
        self.layout = layout
        if run.rows is not None:
            with run.stage.label("chained inputs"):
                self.chains = manifest.chains(lambda samples: homes(layout, run.stage.where, samples, manifest.folder))


def _first_state(run: _Run, manifest: Manifest, groups: Sequence[_Group]) -> tuple[_State, list[GroupJob]]:
    """With the inputs of the next block group (from the manifest, or the embeddings); and what is to do with each group."""
    rows, compiled = run.rows, dict[object, Function]() if run.job.device.enable_torch_compile else None
    common, state = (run.skeleton, run.schemes, run.job.tune), _State(run.plan)
    if rows is None or manifest.done > len(groups):
        return state, group_jobs(*common, (), run.dtype, None)
    state.layout = run.plan.layout(groups[max(0, manifest.done - 1)].names)

    def store(shape: tuple[int, ...]) -> Chain:
        assert state.layout is not None
        manifest.folder.mkdir(parents=True, exist_ok=True)
        with run.stage.label("chained inputs"):
            return Chain.empty(shape, run.dtype, homes(state.layout, run.stage.where, shape[0], manifest.folder))

    embedded = embed(run.skeleton, rows.tokens, rows.mask, run.dtype, store if manifest.done == 0 else None)
    if embedded.hidden is not None:
        state.chains = Chains(embedded.hidden, embedded.hidden)
    else:
        state.load(run, state.layout, manifest)
    return state, group_jobs(*common, embedded.calls, run.dtype, rows.mask, rows.tokens, compiled)


def _do_group(
    run: _Run, group: _Group, jobs: Sequence[GroupJob], manifest: Manifest, state: _State
) -> tuple[BlockRecord, dict[str, list[str]]]:
    """Materialize, tune, pack and write the first of `jobs`; under another layout if a device has become smaller than it was.

    Returns the record and the tensors written; the next group's inputs are in `state`.
    """
    clock, notes = _Clock(), list[str]()
    while True:
        layout, planned = state.plan.layout(group.names), state.plan.usage(group.names).peaks
        try:
            state.at(run, layout, manifest)
            run.stage.reset_peaks()
            result, quantized = _tune(run, jobs[0], layout, manifest, state, clock)
            break
        except torch.OutOfMemoryError as error:
            reason = str(error)
        state.chains = None  # frees what is on the devices; it is read back from the disk
        note = _smaller(run, jobs, state, reason)
        notes.append(note)
        run.tell.note(note)
    if manifest.orders.get(group.names[0], layout.order) != layout.order:
        notes.append(f"{group.names[0]}: {OTHER_ORDER}")
        run.tell.note(notes[-1])
    peaks = run.stage.peaks()
    written = _write_group(group.tensors, run, quantized, clock)
    release_host_memory()
    for note in result.notes if result else ():
        run.tell.note(note)
    return _block_record(group, layout, result, quantized, clock, planned, peaks, notes), written


def _tune(
    run: _Run, job: GroupJob, layout: Layout, manifest: Manifest, state: _State, clock: "_Clock"
) -> tuple[GroupResult | None, Mapping[str, QuantizedWeight]]:
    config, number = run.job.tune, manifest.done - 1
    place = Placement(layout, run.stage.where, run.stage.label)
    if state.chains is None:
        work = Work(draw=lambda: (), read=run.skeleton.read, lap=clock.lap)
        return None, round_group(job, place, work)
    # One generator a group, seeded by its number: a resumed run draws what the uninterrupted one would.
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + number)
    work = Work(
        draw=Draw(len(state.chains.float_inputs), config.batch_size * config.gradient_accumulate_steps, generator),
        read=run.skeleton.read,
        folder=manifest.folder,
        on_step=lambda iteration, loss: run.tell.step(iteration, config.iters, loss),
        lap=clock.lap,
    )
    state.chains, result = tune_group(job, place, state.chains, work)
    return result, result.quantized


def _smaller(run: _Run, jobs: Sequence[GroupJob], state: _State, reason: str) -> str:
    """Makes a plan of the rest for what the devices hold now; a note. Raises `OutOfMemoryError` when nothing fits any more."""
    release_host_memory()
    found = replan(jobs, run.plan.shape, run.stage.measured(), run.machine, run.job.device, state.plan.orders)
    if not found.fits:
        raise torch.OutOfMemoryError(f"{reason}; and nothing else fits: {refusal(found)}")
    state.plan = found
    first = jobs[0].names
    return f"{first[0]} ran out of memory ({reason}); it went on as {describe(found.layout(first))}"


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
        scheme = run.schemes[site.name]
        if scheme is None or site.name not in quantized:
            continue
        for form in run.formats:
            packed = form.exporter.pack(site, quantized[site.name], scheme)
            clock.lap("pack")
            for name, tensor in packed.items():
                write(form, name, tensor)
            clock.lap("write")
    for form in run.formats:
        form.writer.flush()
    clock.lap("write")
    return written


def _block_record(
    group: _Group,
    layout: Layout,
    result: GroupResult | None,
    quantized: Mapping[str, QuantizedWeight],
    clock: "_Clock",
    planned: tuple[int, ...],
    peaks: tuple[int, ...],
    notes: Sequence[str],
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
        strategy=describe(layout),
        planned_bytes=planned,
        peak_bytes=peaks,
        notes=(*notes, *(result.notes if result else ())),
    )


OTHER_ORDER = "sums over samples are in another order than they would have been, so that the last bits may differ"


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
        packed = sum(spec.nbytes for site in quantized for spec in packed_specs(form.exporter, site, schemes).values())
        sizes[form.exporter.name] = {"bytes": form.writer.total_bytes, "bits_per_weight": round(packed * 8 / weights, 4)}
    return {
        "model": run.job.label or run.job.model,
        "architecture": type(skeleton.model).__name__,
        "settings": {key: value for key, value in settings.items() if key not in ("schemes", "versions")},
        "versions": settings["versions"],
        "source_bytes": skeleton.checkpoint.nbytes,
        "formats": sizes,
        "quantized_weights": weights,
        "mixture": run.mixture.to_dict() if run.mixture else None,
        "sites": [_site_record(site, schemes[site.name]) for site in skeleton.sites],
        "calibration_notes": list(rows.notes) if rows else [],
        "plan": run.plan.to_dict(),
        "blocks": manifest.blocks,
        "totals": {"seconds": total_seconds(manifest.blocks), "peak_bytes": max(_peaks(manifest), default=0)},
    }


def _peaks(manifest: Manifest) -> list[int]:
    return [peak for block in manifest.blocks if isinstance(block["peak_bytes"], list) for peak in block["peak_bytes"]]


def _site_record(site: Site, scheme: Scheme | None) -> dict[str, object]:
    return {"name": site.name, "shape": list(site.shape), "scheme": scheme.to_dict() if scheme else None}
