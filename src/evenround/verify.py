"""Reading a checkpoint back, tensor by tensor, to say what is wrong with it before anyone serves it.

Without the original: files and headers; every tensor that the model class expects is there, once, in its shape and as floating point;
quantization_config and tensors agree; scales, codes and weights are finite, scales not zero, zero points in range, padding bits clear;
NVFP4 layers that servers run as one have one global scale; sizes and schemes are those of the run record. What cannot be known without the
original: whether codes, scales and weights that are possible are also the right ones. A flipped bit in a code or two layers changed places
look like any other weights.

With the original: weights that were not quantized are its own, byte for byte; quantized ones are within the two bounds of
`evenround.distance`. That finds damaged codes and weights in the wrong place. The bound on single codes is asked only of `auto_round` files
and of those with a run record: others may come from methods that move weights before rounding them (GPTQ, AWQ). `fake` files hold no codes;
there only the bound on whole layers is left.

One layer is in memory at a time; the loss on a short text is computed block by block.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn

from evenround.checkpoint import INDEX_FILE, Checkpoint
from evenround.data import evaluation_text
from evenround.distance import LayerError, far_codes, layer_error
from evenround.errors import UserError, nearest
from evenround.evaluate import max_length, streamed_loss, text_rows
from evenround.export import (
    EXPORTERS,
    INPUT_LEAVES,
    StoredInput,
    StoredWeight,
    format_of,
    is_packed,
    read_inputs,
    read_schemes,
    tensor_prefix,
)
from evenround.loading import (
    check_folder,
    empty_model,
    linear_modules,
    load_tokenizer,
    quantize_inputs,
    read_config,
    skeleton_of,
    tensor_candidates,
    unpacked_checkpoint,
)
from evenround.model import Site, Skeleton, skeleton_from
from evenround.numerics.elements import E4M3, element_of
from evenround.numerics.quantized import QuantizedWeight
from evenround.record import RECORD, read_record
from evenround.rules import fused_groups
from evenround.scheme import Scheme

DOWNLOAD = "copy or download the checkpoint again, or quantize again"
AGAIN = "quantize again, or copy it again"
RESTORE = "restore config.json and the record, or quantize again"

LOSS_TOKENS = 512
PIECE = 1 << 24
"""Elements read at once of tensors that are only compared."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong. `place`: file, tensor or layer; `fix`: what to do."""

    place: str
    what: str
    fix: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """What `verify` found."""

    checkpoint: str
    findings: tuple[Finding, ...]
    layers: tuple[LayerError, ...] = ()
    """Only with a reference."""
    loss: float | None = None
    """Mean negative log likelihood per token on a short text; None when the checkpoint is broken or has no tokenizer."""
    reference_loss: float | None = None
    tensors: int = 0
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Nothing is wrong."""
        return not self.findings

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {"ok": self.ok, **asdict(self)}


def verify(checkpoint: Path, reference: Path | None = None, text: str | None = None, trust_remote_code: bool = False) -> Verification:
    """Check the checkpoint in directory `checkpoint`, against its original in `reference` if given; `text` for the loss (default: shipped).

    What is wrong with the checkpoint is returned, never raised. Raises `UserError` for a reference that cannot be used, and for a path that
    is no checkpoint at all: not a directory, an unfinished run, a run with a folder for each format.
    """
    check_folder(checkpoint)
    if reference:
        check_folder(reference, "--reference")
    original = skeleton_from(reference, Checkpoint.open(reference), trust_remote_code) if reference else None
    broken: list[Finding] = []
    files = _attempt(broken, str(checkpoint), lambda: Checkpoint.open(checkpoint))
    config = _attempt(broken, str(checkpoint / "config.json"), lambda: read_config(checkpoint))
    model = _attempt(broken, str(checkpoint / "config.json"), lambda: empty_model(checkpoint, trust_remote_code)) if config else None
    if files is None or config is None or model is None:
        return Verification(checkpoint=str(checkpoint), findings=tuple(broken), tensors=len(files.specs) if files else 0)
    modules = linear_modules(model, files.names)
    stored = _attempt(broken, "quantization_config", lambda: read_schemes(config, files.specs, files.read, modules))
    there = stored or {}
    inputs = _attempt(broken, "quantization_config", lambda: read_inputs(config, files.specs, modules, there)) if stored is not None else {}
    record = _attempt(broken, str(checkpoint / RECORD), lambda: read_record(checkpoint))
    strange: list[Finding] = []
    if original and (other := _difference(model, original.model)):
        strange.append(Finding(str(reference), f"is not the same model: {other}", "give the original of this checkpoint as --reference"))
        original = None
    seen = _Seen(files, config, model, there, inputs or {}, _Plan.of(record, broken), original)
    broken += [*_check_names(seen), *(_check_plan(seen) if stored is not None else ())]
    broken += [*_check_inputs(seen), *_check_fused(seen)]
    layers = [_check_layer(seen, weight, broken, strange) for weight in seen.stored.values()]
    layers += [_check_tensor(seen, name, broken, strange) for name in files.names]
    losses, notes = ([None, None], []) if broken else _losses(seen, text, trust_remote_code)
    return Verification(
        checkpoint=str(checkpoint),
        findings=(*broken, *strange),
        layers=tuple(layer for layer in layers if layer),
        loss=losses[0],
        reference_loss=losses[1],
        tensors=len(files.specs),
        notes=tuple(notes),
    )


def _difference(model: nn.Module, original: nn.Module) -> str:
    """How the original is another model than the checkpoint's config.json describes; empty when it is the same."""
    if type(model).__name__ != type(original).__name__:
        return f"it is {type(original).__name__}, the checkpoint {type(model).__name__}"
    ours, theirs = ({name: list(tensor.shape) for name, tensor in each.state_dict().items()} for each in (model, original))
    other = [name for name in dict.fromkeys((*ours, *theirs)) if ours.get(name) != theirs.get(name)]
    if not other:
        return ""
    its, here = (f"of shape {each[other[0]]}" if other[0] in each else "missing" for each in (theirs, ours))
    return f"its {other[0]} is {its}, the checkpoint's is {here} ({len(other)} tensors differ)"


def _attempt(findings: list[Finding], place: str, action: Callable[[], T]) -> T | None:
    try:
        return action()
    except UserError as error:
        what, _, fix = str(error).partition("; ")
        findings.append(Finding(place, what, AGAIN if fix == "download it again" else fix or DOWNLOAD))
        return None


@dataclass(frozen=True, slots=True)
class _Plan:
    """The run record: which sites have which scheme, how many bytes each format takes, which blocks were not tuned."""

    sites: Mapping[str, tuple[tuple[int, ...], Scheme | None]]
    bytes: Mapping[str, int]
    untuned: tuple[str, ...]
    travel: float
    """How far V can have gone: the sum of its steps, which fall linearly to 0."""

    @staticmethod
    def of(record: Mapping[str, Any] | None, findings: list[Finding]) -> "_Plan | None":
        if record is None:
            return None
        try:
            schemes = {str(site["name"]): Scheme.from_dict(site["scheme"]) if site["scheme"] else None for site in record["sites"]}
            shapes = {str(site["name"]): tuple(site["shape"]) for site in record["sites"]}
            sizes = {name: int(sizes["bytes"]) for name, sizes in record["formats"].items()}
            untuned = [name for block in record["blocks"] if block["kept"] == "untuned" for name in block["blocks"]]
            tune = record["settings"]["tune"]
            travel = float(tune["lr"] or 1 / max(1, tune["iters"])) * (tune["iters"] + 1) / 2
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            findings.append(Finding(RECORD, f"is damaged: {error!r}", "delete it to go without, or quantize again"))
            return None
        return _Plan({name: (shapes[name], scheme) for name, scheme in schemes.items()}, sizes, tuple(untuned), travel)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Everything that was opened."""

    files: Checkpoint
    config: Mapping[str, Any]
    model: nn.Module
    stored: Mapping[str, StoredWeight]
    inputs: Mapping[str, StoredInput]
    plan: _Plan | None
    original: Skeleton | None

    @property
    def format(self) -> str:
        try:
            return format_of(self.config)
        except UserError:  # told already
            return ""

    @property
    def sites(self) -> tuple[Site, ...]:
        """The original's."""
        return self.original.sites if self.original else ()

    def rounded(self, tensor: str) -> tuple[Site, Scheme] | None:
        """The original's site whose weight in a `fake` checkpoint is `tensor`, if the run quantized it."""
        for site in self.sites if self.plan and self.format == "fake" else ():
            scheme = self.plan.sites.get(site.name, ((), None))[1] if self.plan else None
            if scheme and tensor_prefix(site) + ".weight" == tensor:
                return site, scheme
        return None


def _check_names(seen: _Seen) -> Iterator[Finding]:
    """Every tensor that the model class expects is there once, packed or plain, with its shape."""
    specs, model = seen.files.specs, seen.model
    packed = {name.rpartition(".")[0] for name, spec in specs.items() if is_packed(name, spec)}
    modules = linear_modules(model, specs)
    for prefix in sorted(packed - modules.keys()):
        yield Finding(prefix, f"is packed, but no linear layer of {type(model).__name__} has that name", "check config.json and the names")
    if packed and not seen.config.get("quantization_config"):
        yield Finding("config.json", "has no quantization_config, but there are packed tensors", "restore config.json, or quantize again")
    tied: Mapping[str, str] = model.all_tied_weights_keys  # type: ignore[assignment]
    expected = model.state_dict()
    known = {candidate for name in expected for candidate in tensor_candidates(name, model)}
    unknown = [name for name, spec in specs.items() if name not in known and not is_packed(name, spec)]
    for name, like in expected.items():
        there = [each for each in tensor_candidates(name, model) if each in specs and not is_packed(each, specs[each])]
        codes = [candidate for candidate in tensor_candidates(name.removesuffix(".weight"), model) if candidate in packed]
        if codes and there:
            yield Finding(there[0], "is there twice, packed and as a plain weight", "quantize again; loaders may take the stale one")
        elif len(there) + len(codes) > 1:
            yield Finding(name, f"is there under several names: {', '.join(there or codes)}", DOWNLOAD)
        elif not there and not codes and tied.get(name) not in expected:
            yield Finding(name, f"is missing{nearest(name, unknown)}", DOWNLOAD)
        for tensor in there:
            if specs[tensor].shape != tuple(like.shape):
                shapes = f"{list(specs[tensor].shape)}, but config.json makes it {list(like.shape)}"
                yield Finding(tensor, f"has shape {shapes}", "restore config.json, or " + DOWNLOAD)
            if like.is_floating_point() and specs[tensor].dtype.itemsize < 2:
                yield Finding(tensor, f"is {specs[tensor].dtype}; float16, bfloat16 or float32 is needed", DOWNLOAD)
    for name in seen.original.unknown_tensors if seen.original else ():
        if name not in specs:
            yield Finding(name, "is in the original and not here", DOWNLOAD)


def _check_plan(seen: _Seen) -> Iterator[Finding]:
    """Schemes and sizes are those of the run record."""
    plan, path = seen.plan, seen.files.directory
    if plan is None:
        return
    index = path / INDEX_FILE
    size = sum(shard.size for shard in seen.files.shards) + (index.stat().st_size if index.exists() and len(seen.files.shards) > 1 else 0)
    if seen.format not in plan.bytes:
        yield Finding(RECORD, f"is of a run that wrote {', '.join(plan.bytes)}; this is {seen.format}", RESTORE)
    elif size != plan.bytes[seen.format]:
        yield Finding(str(path), f"has {size} bytes of tensors and headers, the record says {plan.bytes[seen.format]}", DOWNLOAD)
    if seen.format == "fake":
        yield from _check_planned_inputs(seen, plan)
        return
    for name in sorted(plan.sites.keys() | seen.stored.keys()) if seen.format else ():
        shape, scheme = plan.sites.get(name, ((), None))
        planned = EXPORTERS[seen.format].stored(scheme) if scheme else None
        found = seen.stored[name].scheme if name in seen.stored else None
        if planned != found:
            labels = [label.label if label else "not quantized" for label in (found, planned)]
            yield Finding(name, f"is {labels[0]} here, the record says {labels[1]}", RESTORE)
        elif found is not None and seen.stored[name].shape != shape:
            yield Finding(name, f"has shape {list(seen.stored[name].shape)}, the record says {list(shape)}", DOWNLOAD)


def _check_planned_inputs(seen: _Seen, plan: _Plan) -> Iterator[Finding]:
    """`fake`: activations are quantized as the run record says."""
    for name, (_, scheme) in plan.sites.items():
        planned = scheme.activation if scheme and scheme.activation.quantized else None
        found = seen.inputs[name].scheme if name in seen.inputs else None
        if planned != found:
            labels = [each.label if each else "not quantized" for each in (found, planned)]
            yield Finding(name, f"has inputs {labels[0]} here, the record says {labels[1]}", RESTORE)


def _check_inputs(seen: _Seen) -> Iterator[Finding]:
    """Calibrated scales of inputs are positive numbers."""
    for stored in seen.inputs.values():
        scale = stored.scale(seen.files.read)
        if stored.tensor is not None and scale is not None and not (torch.isfinite(scale).all() and (scale > 0).all()):
            yield Finding(stored.tensor, f"is {float(scale):g}, no positive number", DOWNLOAD)


def _check_fused(seen: _Seen) -> Iterator[Finding]:
    """NVFP4: layers that servers run as one (q, k and v; gate and up) have the same global scale."""
    wholes = {name: weight for name, weight in seen.stored.items() if weight.scheme.weight.dtype == "nv_fp"}
    for group in fused_groups(tuple(wholes)):
        scales = {name: float(seen.files.read(f"{wholes[name].prefix}.weight_global_scale")) for name in group}
        if len(set(scales.values())) > 1:
            told = ", ".join(f"{name.rpartition('.')[2]} {scale:g}" for name, scale in scales.items())
            yield Finding(group[0], f"has another weight_global_scale than layers that servers run with it as one: {told}", AGAIN)


def _check_layer(seen: _Seen, weight: StoredWeight, broken: list[Finding], strange: list[Finding]) -> LayerError | None:
    """Values of one packed weight, and its distance from the original."""
    quantized = _attempt(broken, weight.name, lambda: weight.unpack(seen.files.read))
    if quantized is None:
        return None
    before = len(broken)
    broken += _check_values(weight, quantized)
    if weight.prefix + ".weight_packed" in seen.files.specs:
        broken += _check_padding(seen, weight)
    site = next((site for site in seen.sites if site.name == weight.name), None)
    if seen.original is None or site is None or len(broken) > before:
        return None
    original = _read_original(seen.original, site)
    if original.shape != quantized.codes.shape:
        strange.append(Finding(weight.name, f"has shape {list(weight.shape)}, the original {list(original.shape)}", DOWNLOAD))
        return None
    layer = layer_error(weight.name, weight.scheme.weight, quantized.dequantize(), original)
    far = 0
    if seen.format == "auto_round" or seen.plan is not None:
        travel, exact = _travel(seen.plan, weight.name), site.dtype == torch.bfloat16
        far = far_codes(quantized, original, travel=travel, exact=exact, whole_steps=seen.plan is not None)
    strange += _judge(layer, far)
    return layer


def _check_values(weight: StoredWeight, quantized: QuantizedWeight) -> Iterator[Finding]:
    """Scales are numbers and not zero, zero points and codes are possible."""
    scheme, scales = weight.scheme.weight, quantized.scales()
    if quantized.scale.dtype == torch.uint8:
        scales = scales.masked_fill(quantized.scale == 255, torch.nan)  # what E8M0 calls NaN
    bad, zero = int((~torch.isfinite(scales)).sum()), int((scales == 0).sum())
    if bad or zero:
        yield Finding(weight.name, f"{bad} scale(s) NaN or infinite, {zero} zero, of {scales.numel()}", DOWNLOAD)
    if scheme.dtype != "int":
        if negative := int((scales < 0).sum()):
            yield Finding(weight.name, f"{negative} of {scales.numel()} scales are negative", DOWNLOAD)
        if element_of(scheme) == E4M3 and (nan := int(((quantized.codes & 0x7F) == 0x7F).sum())):
            yield Finding(weight.name, f"{nan} of {quantized.codes.numel()} codes are NaN", DOWNLOAD)
        return
    assert quantized.zero_point is not None
    highest, middle = 2**scheme.bits - 1, 2 ** (scheme.bits - 1)
    off = int(((quantized.zero_point != middle) if scheme.symmetric else (quantized.zero_point > highest)).sum())
    if off:
        allowed = f"{middle} (symmetric)" if scheme.symmetric else f"0 to {highest}"
        yield Finding(weight.name, f"{off} of {quantized.zero_point.numel()} zero points are not {allowed}", DOWNLOAD)
    if wide := int((quantized.codes > highest).sum()):  # bytes have room for more
        yield Finding(weight.name, f"{wide} of {quantized.codes.numel()} codes are above {highest}", DOWNLOAD)


def _travel(plan: "_Plan | None", name: str) -> float:
    """How far V of layer `name` can have gone. Without a record: what auto-round's largest step size, 2 / iters, allows."""
    if plan is None:
        return 1.01
    return 0.0 if any(f"{name}.".startswith(f"{untuned}.") for untuned in plan.untuned) else plan.travel


def _judge(layer: LayerError, far: int) -> Iterator[Finding]:
    fix = "check that --reference is the original; " + DOWNLOAD
    if not layer.relative_rmse <= layer.bound:
        what = f"relative error {layer.relative_rmse:.3g}, {layer.scheme} allows {layer.bound:.3g}: damaged, or another layer's weights"
        yield Finding(layer.name, what, fix)
    elif far:
        yield Finding(layer.name, f"{far} code(s) are not the original's weights rounded to their grid: damaged", fix)


def _check_padding(seen: _Seen, weight: StoredWeight) -> Iterator[Finding]:
    """Bits after the last code of a row of `weight_packed` and of a column of `weight_zero_point` are zero."""
    for leaf, count, axis in (("weight_packed", weight.shape[1], 1), ("weight_zero_point", weight.shape[0], 0)):
        name = f"{weight.prefix}.{leaf}"
        if name not in seen.files.specs or seen.files.specs[name].dtype != torch.int32:
            continue
        words = seen.files.read(name).movedim(axis, -1)
        used = count * weight.scheme.weight.bits - (words.shape[-1] - 1) * 32
        if 0 < used < 32 and bool((words[..., -1].to(torch.int64) & 0xFFFFFFFF).bitwise_right_shift_(used).any()):
            yield Finding(name, "has bits set after its last code", DOWNLOAD)


def _check_tensor(seen: _Seen, name: str, broken: list[Finding], strange: list[Finding]) -> LayerError | None:
    """A tensor that is not packed: finite, and the original's own bytes, or within bounds of them if a `fake` run quantized it."""
    if is_packed(name, seen.files.specs[name]) or name.rpartition(".")[2] in INPUT_LEAVES:
        return None
    spec, differing, bad = seen.files.specs[name], 0, 0
    rounded = seen.rounded(name)
    theirs = _counterpart(seen, name, strange) if rounded is None else None
    for start, stop in _pieces(seen.files, name):
        piece = _rows(seen.files, name, start, stop)
        bad += int((~torch.isfinite(piece)).sum()) if piece.is_floating_point() else 0
        if theirs is not None and seen.original is not None:
            there = _rows(seen.original.checkpoint, theirs, start, stop).to(spec.dtype)
            differing += int((piece.view(torch.uint8) != there.view(torch.uint8)).sum())
    if bad:
        broken.append(Finding(name, f"{bad} value(s) NaN or infinite", DOWNLOAD))
    elif differing:
        strange.append(Finding(name, f"is not quantized, and {differing} bytes differ from the original's", DOWNLOAD))
    elif rounded is not None and seen.original is not None:
        site, scheme = rounded
        found, wanted = seen.files.read(name).float(), _read_original(seen.original, site)
        found = found.t() if site.transposed else found
        if found.shape == wanted.shape:
            layer = layer_error(site.name, scheme.weight, found, wanted)
            strange += _judge(layer, 0)
            return layer
    return None


def _read_original(original: Skeleton, site: Site) -> Tensor:
    """float32 `[out, in]`."""
    weight = original.checkpoint.read(site.checkpoint_name).float()
    return weight.t().contiguous() if site.transposed else weight


def _counterpart(seen: _Seen, name: str, strange: list[Finding]) -> str | None:
    """The original's tensor that `name` should equal."""
    if seen.original is None:
        return None
    spec, specs = seen.files.specs[name], seen.original.checkpoint.specs
    theirs = next((key for key in tensor_candidates(name, seen.model) if key in specs), None)
    if theirs is None:
        strange.append(Finding(name, "is not in the original", "check --reference; " + DOWNLOAD))
    elif specs[theirs].shape != spec.shape or (specs[theirs].dtype != spec.dtype and seen.plan is not None):
        kinds = f"{spec.dtype} {list(spec.shape)}, the original {specs[theirs].dtype} {list(specs[theirs].shape)}"
        strange.append(Finding(name, f"is {kinds}", "check --reference; " + DOWNLOAD))
        return None
    return theirs


def _pieces(files: Checkpoint, name: str) -> Iterator[tuple[int, int]]:
    """Row ranges of a tensor that are read at once; one that is empty for a scalar."""
    rows, *rest = files.specs[name].shape or (0,)
    step = max(1, PIECE // max(1, math.prod(rest)))
    for start in range(0, max(rows, 1), step):
        yield start, min(start + step, rows)


def _rows(files: Checkpoint, name: str, start: int, stop: int) -> Tensor:
    return files.read_rows(name, start, stop) if files.specs[name].shape else files.read(name).reshape(1)


def _losses(seen: _Seen, text: str | None, trust_remote_code: bool) -> tuple[list[float | None], list[str]]:
    """Loss of the checkpoint and of the original on the beginning of `text`, and notes."""
    content = evaluation_text().read_text(encoding="utf-8")[: 16 * LOSS_TOKENS] if text is None else text
    config: transformers.PretrainedConfig = seen.model.config  # type: ignore[assignment]
    try:
        tokenizer = load_tokenizer(seen.files.directory, trust_remote_code)
        if tokenizer is None:
            raise UserError(f"{seen.files.directory} has no tokenizer files")
        tokens, _ = text_rows(content, "for the loss", tokenizer, min(LOSS_TOKENS, max_length(config) or LOSS_TOKENS), 1)
        if int(tokens.max()) >= config.get_text_config().vocab_size:
            raise UserError(f"the tokenizer in {seen.files.directory} gives tokens that the model does not have")
        quantize_inputs(seen.model, seen.inputs, seen.files.read)
        files = unpacked_checkpoint(seen.files, seen.model, seen.stored) if seen.stored else seen.files
        loss = streamed_loss(skeleton_of(seen.model, files), tokens)
        return [loss, streamed_loss(seen.original, tokens) if seen.original else None], []
    except UserError as error:
        return [None, None], [f"no loss was computed: {error}"]
