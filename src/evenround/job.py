"""What a user asks for, as one value, and what a job tells while it is done; the plan of a job, which needs no more than config.json."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from evenround.calibration import TokenRows
from evenround.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from evenround.config import DataConfig, DeviceConfig, MixConfig, OutputConfig, TuneConfig, torch_dtype
from evenround.errors import UserError
from evenround.export import Exporter, get_exporter
from evenround.memory.devices import parse_devices, pick_compute_dtype
from evenround.mixed import Measurement, Mixture, mixed_schemes, parse_options
from evenround.model import Site, Skeleton, max_length, skeleton_from, skeleton_from_config
from evenround.outlook import outlook
from evenround.output import check_formats, output_specs
from evenround.plan import Plan
from evenround.record import BlockRecord
from evenround.rules import SchemeRules, resolve_schemes, split_layers
from evenround.scheme import Scheme
from evenround.states import needs_text


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
    mix: MixConfig | None = None
    """Schemes are chosen, in place of the rules' default."""
    trust_remote_code: bool = False


class Progress(Protocol):
    """What a run tells while it goes."""

    def schemes(self, sites: Sequence[Site], schemes: Mapping[str, Scheme | None]) -> None:
        """The table of schemes, before any weight is read."""

    def plan(self, plan: Plan) -> None:
        """What goes where, before any weight is read."""

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
    def plan(self, plan: Plan) -> None: ...
    def note(self, text: str) -> None: ...
    def group_started(self, number: int, count: int, names: Sequence[str]) -> None: ...
    def step(self, iteration: int, iters: int, loss: float) -> None: ...
    def group_done(self, number: int, count: int, record: BlockRecord) -> None: ...


def locate(model: str, weights: bool = True) -> Path:
    """A model directory as it is, or a hub id as its downloaded snapshot. Raises `UserError` when neither can be had."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise UserError(f"model {model!r} is not a directory; give a transformers model directory or a hub id such as org/name")
    try:
        allowed = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py"] if weights else ["config.json", "*.py"]
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=allowed))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"model {model!r} is neither a directory here nor a model that the hub gives ({reason}); check the path") from error


def _common_dtype(skeleton: Skeleton) -> torch.dtype:
    """The dtype of the weights to quantize; float32 when they are of several. Raises `UserError` when one cannot be quantized."""
    dtypes = {site.dtype for site in skeleton.sites}
    unusable = [str(dtype) for dtype in dtypes if dtype not in (torch.bfloat16, torch.float16, torch.float32)]
    if unusable:
        raise UserError(
            f"weights of dtype {', '.join(unusable)} cannot be quantized; convert the checkpoint to bfloat16, float16 or float32"
        )
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def compute_dtype(job: Job, skeleton: Skeleton, schemes: Mapping[str, Scheme | None], device: torch.device, tell: Progress) -> torch.dtype:
    """What the job computes in on `device`."""
    _common_dtype(skeleton)
    if not needs_text(schemes.values(), job.tune):
        return torch.float32  # nothing is run: weights are rounded as they are in the file
    return measuring_dtype(job, skeleton, device, tell)


def measuring_dtype(job: Job, skeleton: Skeleton, device: torch.device, tell: Progress) -> torch.dtype:
    """What the model is run in on `device`."""
    source = _common_dtype(skeleton)
    wish = None if job.device.compute_dtype == "auto" else torch_dtype(job.device.compute_dtype)
    chosen = pick_compute_dtype(wish, source, device)
    if torch.promote_types(source, chosen) != chosen:
        name = str(chosen).removeprefix("torch.")
        tell.note(f"--compute_dtype {name} rounds the weights, which are {str(source).removeprefix('torch.')}, before they are quantized")
    return chosen


Schemes = Mapping[str, Scheme | None]


def cautions(exporters: Sequence[Exporter], schemes: Schemes) -> list[str]:
    """What the user should know of these schemes in these formats, before anything is done."""
    notes = [note for exporter in exporters for note in exporter.cautions(schemes)]
    split = split_layers(schemes)
    if split:
        more = f", and {len(split) - 1} more such groups" if len(split) > 1 else ""
        notes.append(
            f"{', '.join(split[0])} have different schemes{more}: transformers loads that; servers that run them as one layer, "
            "such as vLLM, do not. Give them the same scheme, or leave all of them out"
        )
    return notes


def formats_and_schemes(job: Job, skeleton: Skeleton, schemes: Schemes | None = None) -> tuple[list[Exporter], Schemes]:
    """The job's formats, and the scheme of every site. Raises `UserError` for what a format cannot hold.

    schemes: chosen ones, in place of those that the rules give.
    """
    exporters = [get_exporter(name) for name in job.output.formats]
    if schemes is None:
        schemes = resolve_schemes(skeleton.sites, job.rules, ragged_groups=all(exporter.allows_ragged for exporter in exporters))
    exporters = [exporter.for_schemes(schemes) for exporter in exporters]
    check_formats(exporters, skeleton.sites, schemes)
    if job.device.enable_torch_compile and all(scheme.activation.quantized for scheme in schemes.values() if scheme):
        raise UserError("--enable_torch_compile would change nothing: blocks with quantized activations run uncompiled; leave it out")
    return exporters, schemes


def check_options(job: Job, mix: MixConfig, skeleton: Skeleton) -> tuple[Scheme | None, ...]:
    """The schemes to choose from. Raises `UserError` for one that no layer can have in the job's formats, and for those that one checkpoint
    cannot hold together, before anything is measured."""
    options = parse_options(mix.options)
    if not (math.isfinite(mix.avg_bits) and mix.avg_bits > 0):
        raise UserError(f"avg_bits {mix.avg_bits} (--avg_bits) must be a positive number, such as 3.5")
    sites = [site for site in skeleton.sites if not site.is_head]
    for exporter in [get_exporter(name) for name in job.output.formats]:
        table: dict[str, Scheme | None] = {}
        for number, option in enumerate(options):
            if option is None:
                continue
            fitting, reason = [], ""
            for site in sites:
                try:
                    exporter.check(site, option)
                    fitting.append(site)
                except UserError as error:
                    reason = reason or str(error)
            if not fitting:
                raise UserError(f"{mix.options.split(',')[number].strip()!r} (--options): {reason}")
            table |= {site.name: option for site in fitting[number :: len(options)]}
        exporter.for_schemes(table)
    return options


def mixture_of(job: Job, mix: MixConfig, skeleton: Skeleton, rows: TokenRows, dtype: torch.dtype, device: torch.device) -> Mixture:
    """The schemes that `mix` asks for, from what quantizing each layer would cost on a part of the calibration text."""
    exporters = [get_exporter(name) for name in job.output.formats]

    def check(site: Site, scheme: Scheme) -> None:
        for exporter in exporters:
            exporter.check(site, scheme)

    measurement = Measurement(tokens=rows.tokens, mask=rows.mask, dtype=dtype, device=device, store=None, seed=job.tune.seed)
    ragged = all(exporter.allows_ragged for exporter in exporters)
    options = check_options(job, mix, skeleton)
    return mixed_schemes(skeleton, job.rules, options, mix.avg_bits, measurement, ragged_groups=ragged, check=check)


def costliest(mix: MixConfig) -> Scheme:
    """The option that takes most bits: what a plan assumes of every layer."""
    schemes = [option for option in parse_options(mix.options) if option is not None]
    return max(schemes, key=lambda scheme: (scheme.activation.quantized, scheme.weight.bits))


def plan_job(job: Job, progress: Progress | None = None) -> Plan:
    """The plan of a job whose model may be no more than a config.json; nothing is written.

    Text is not read: `nsamples` rows of `seqlen` tokens (or of as many as the model takes) without padding are assumed.
    """
    machine = parse_devices(job.device.device, planning=True)
    skeleton = _skeleton(job)
    if job.mix is not None:
        check_options(job, job.mix, skeleton)
        job = dataclasses.replace(job, rules=dataclasses.replace(job.rules, default=costliest(job.mix)))
        text = "schemes are chosen by measuring; planned as if every layer had {}, and without the memory of the measurement"
        (progress or Silent()).note(text.format(job.rules.default.label))
    exporters, schemes = formats_and_schemes(job, skeleton)
    first = machine.devices[0]
    dtype = compute_dtype(job, skeleton, schemes, first.where or torch.device(first.kind), progress or Silent())
    disk = sum(spec.nbytes for exporter in exporters for spec in output_specs(exporter, skeleton, schemes).values())
    length = min(job.data.seqlen, max_length(skeleton.config) or job.data.seqlen)
    rows = (torch.arange(length) + torch.arange(job.data.nsamples)[:, None]) % skeleton.config.get_text_config().vocab_size
    tokens = rows if needs_text(schemes.values(), job.tune) else None
    plan = outlook(skeleton, schemes, job.tune, tokens, None, dtype, machine, job.device, disk)
    (progress or Silent()).plan(plan)
    return plan


def _skeleton(job: Job) -> Skeleton:
    path = Path(job.model).expanduser()
    source = path.parent if path.name == "config.json" else locate(job.model, weights=False)
    if any((source / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
        return skeleton_from(source, Checkpoint.open(source), job.trust_remote_code)
    return skeleton_from_config(source, job.trust_remote_code)
