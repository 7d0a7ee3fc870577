"""A scheme for each layer under a mean number of bits: measured sensitivity, then an exact choice.

Cost of a layer under a scheme: by how many nats a token the model's predictions will move, to second order. With y what the layer gives,
δ what quantizing it changes there, and g the gradient with respect to y of the model's negative log likelihood of tokens that the model
itself draws, KL(model ‖ quantized) ≈ ½ Σ (g·δ)² over the tokens: the Fisher information of y, tried on the very δ. Changes at different
tokens and in different layers are taken as uncorrelated. On a model small enough to try every layer by itself, these costs are its KL to
12 % (spread of the logarithm), and choices are those by the KL itself (docs/log.md).

One block is in memory at a time: inputs of every block are kept from a pass forward, then gradients go backward through one block after
another, each computed again. What we gave up: what searched scales and tuning win back (costs are of plain rounding), and what layers'
errors do to each other.

Layers that servers run as one (`rules.fused_groups`, all experts of a layer) get one scheme. The choice is the exact minimum of the sum of
costs, never above the target.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenround.calls import BlockCall, embed, outside_blocks, recording
from evenround.chains import HOST, Chain, Home
from evenround.errors import UserError
from evenround.knapsack import choose
from evenround.model import Site, Skeleton, under
from evenround.numerics.activations import fake_quantize, input_scale
from evenround.numerics.weights import quantize
from evenround.rules import SchemeRules, fused_groups, resolve_schemes, select
from evenround.scheme import FLOAT_NAMES, FLOATING, Scheme, preset

SAMPLES, TOKENS = 16, 256
"""Rows, and tokens of each, that sensitivity is measured on."""

Option = Scheme | None
"""None: floating point, 16 bits, no cost."""

Costs = Mapping[str, tuple[float, ...]]
"""Site → for each option, nats a token by which predictions will move; infinite where the site cannot have the option."""

StoreChain = Callable[[tuple[int, ...]], Chain]
"""Makes a chain of a shape `[samples, tokens, hidden]`."""


def parse_options(text: str) -> tuple[Option, ...]:
    """`--options`: scheme names with commas between them; BF16 stands for floating point. Raises `UserError` for fewer than two."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    options = tuple(None if name.upper() in FLOAT_NAMES else preset(name, "--options") for name in names)
    if len(set(options)) != len(options):
        raise UserError(f"options {text!r} (--options) name a scheme twice; leave one out")
    if len(options) < 2:
        raise UserError(f"options {text!r} (--options) leave nothing to choose; give at least two schemes, such as W2A16,W4A16")
    return options


def serving_groups(names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """`fused_groups`, and all experts of a layer together: servers run them as one layer with one scheme. In order of their first names."""
    merged: dict[str, list[str]] = {}
    for group in fused_groups(names):
        experts = re.match(r"(.*\bexperts)\.\d+\.", group[0])
        merged.setdefault(experts.group(1) if experts else group[0], []).extend(group)
    return tuple(map(tuple, merged.values()))


def option_bits(option: Option, shape: tuple[int, int]) -> int:
    """Bits that a weight `[out, in]` takes with its scales."""
    return FLOATING * shape[0] * shape[1] if option is None else option.weight.stored_bits(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """What was chosen, and why."""

    schemes: Mapping[str, Scheme | None]
    """Every site's, as `rules.resolve_schemes` gives them."""
    mean_bits: float
    """Of all sites but an output head that is left alone; scales count, and what the user fixed."""
    costs: Costs
    """Of the sites that a scheme was chosen for."""
    chosen: Mapping[str, int]
    """Of each of these sites, the number of its option."""
    options: tuple[Option, ...]

    @property
    def cost(self) -> float:
        """Nats a token by which plain rounding under the chosen schemes moves predictions, as far as costs add up."""
        return math.fsum(self.costs[name][at] for name, at in self.chosen.items())

    def to_dict(self) -> dict[str, object]:
        """For the run record: plain values. Costs that are infinite are None."""
        sites = {
            name: {"option": at, "costs": [cost if math.isfinite(cost) else None for cost in self.costs[name]]}
            for name, at in self.chosen.items()
        }
        labels = [option.label if option else "floating point" for option in self.options]
        return {"options": labels, "mean_bits": self.mean_bits, "cost": self.cost, "sites": sites}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """On what, and how, sensitivity is measured."""

    tokens: Tensor
    """int64 `[samples, tokens]`; the first `SAMPLES` rows and `TOKENS` of each are used."""
    mask: Tensor | None
    """bool, False where padded; None: every token counts."""
    dtype: torch.dtype
    """Compute dtype."""
    device: torch.device = HOST
    """Holds one block, its weights under every option, and one sample's way through it with gradients."""
    store: StoreChain | None = None
    """For the inputs of every block, which are all kept, and one chain more; None: host memory."""
    seed: int = 42

    def chain(self, shape: tuple[int, ...]) -> Chain:
        """A chain of that shape."""
        return self.store(shape) if self.store else Chain.empty(shape, self.dtype, (Home(HOST, shape[0]),))


def mixed_schemes(
    skeleton: Skeleton,
    rules: SchemeRules,
    options: Sequence[Option],
    avg_bits: float,
    measurement: Measurement,
    *,
    ragged_groups: bool = False,
    check: Callable[[Site, Scheme], None] | None = None,
    on_block: Callable[[str], None] | None = None,
) -> Mixture:
    """The scheme of every site: what `rules` say of those that layer_config or ignore_layers name, an option for all others.

    The mean of `WeightScheme.stored_bits` over all sites, 16 for those in floating point, is at most `avg_bits`. Sites that the user named
    count with what they got; an output head counts if `rules.quant_lm_head`. Of layers that servers run as one, those that are named keep
    their scheme and the others have one among them.

    check: raises `UserError` for a scheme that a site cannot have, such as one that a format cannot hold; such options, and groups that do
    not divide a width unless `ragged_groups`, are left out for this site and those that are run with it. on_block: called with the name of
    every block that has been gone through, forward and backward.
    Raises `UserError` when nothing is left to choose, and for an `avg_bits` that no choice keeps.
    """
    if not math.isfinite(avg_bits):
        raise UserError(f"avg_bits {avg_bits} (--avg_bits) must be a number, such as 3.5")
    options = tuple(options)
    default = next(option for option in options if option is not None)
    rules = replace(rules, default=default)
    free, fixed = _free_sites(skeleton, rules)
    fits = {site.name: [_fits(site, option, ragged_groups, check) for option in options] for site in free}
    groups, bits = _group_bits(free, options, fits)
    elements = sum(math.prod(site.shape) for site in [*free, *fixed])
    spent = sum(option_bits(scheme, site.shape) for site, scheme in fixed.items())
    budget = math.floor(Fraction(str(avg_bits)) * elements) - spent
    least = sum(min(size for size in bits[group] if size is not None) for group in groups)
    if least > budget:
        enough = f"{math.ceil(Fraction((spent + least) * 10_000, elements)) / 10_000:g}"
        raise UserError(f"avg_bits {avg_bits} (--avg_bits) cannot be kept: {enough} is the least{_because(fixed, elements, spent)}")
    measured = sensitivities(skeleton, free, options, measurement, on_block)
    costs = {name: tuple(cost if fit else math.inf for cost, fit in zip(row, fits[name], strict=True)) for name, row in measured.items()}
    sizes = {group: [size or 0 for size in bits[group]] for group in groups}  # what has no size has an infinite cost
    chosen = choose(
        {group: [sum(column) for column in zip(*(costs[name] for name in group), strict=True)] for group in groups}, sizes, budget
    )
    numbers = {name: at for group, at in chosen.items() for name in group}
    table = {site.name: scheme for site, scheme in fixed.items()} | {name: options[at] for name, at in numbers.items()}
    schemes = {site.name: table.get(site.name) for site in skeleton.sites}
    if not any(schemes.values()):
        raise UserError(f"avg_bits {avg_bits} (--avg_bits) leaves every layer in floating point: there is nothing to quantize; give fewer")
    total = spent + sum(sizes[group][at] for group, at in chosen.items())
    return Mixture(schemes=MappingProxyType(schemes), mean_bits=total / elements, costs=costs, chosen=numbers, options=options)


def _group_bits(
    free: Sequence[Site], options: Sequence[Option], fits: Mapping[str, Sequence[bool]]
) -> tuple[tuple[tuple[str, ...], ...], dict[tuple[str, ...], list[int | None]]]:
    """Layers that have one scheme, and the bits they take under each option; None: not all of them can have it."""
    shapes = {site.name: site.shape for site in free}
    bits: dict[tuple[str, ...], list[int | None]] = {}
    for group in serving_groups(list(shapes)):
        bits[group] = [
            sum(option_bits(option, shapes[name]) for name in group) if all(fits[name][at] for name in group) else None
            for at, option in enumerate(options)
        ]
        if all(size is None for size in bits[group]):
            raise UserError(
                f"{', '.join(group)}: none of the schemes of --options fits; name the layer in --layer_config, or leave it out with "
                "--ignore_layers"
            )
    return tuple(bits), bits


def _free_sites(skeleton: Skeleton, rules: SchemeRules) -> tuple[list[Site], dict[Site, Scheme | None]]:
    """Sites to choose for, and those that the user spoke of; an output head that is left alone is in neither."""
    names = [site.name for site in skeleton.sites]
    resolved = resolve_schemes(skeleton.sites, rules, ragged_groups=True)
    named = {name for pattern in (*rules.layer_config, *rules.ignore_layers) for name in select(pattern, names)}
    counted = [site for site in skeleton.sites if rules.quant_lm_head or not site.is_head]
    free = [site for site in counted if site.name not in named]
    if not free:
        raise UserError("--layer_config and --ignore_layers name every layer: nothing is left for --avg_bits to choose; leave it out")
    return free, {site: resolved[site.name] for site in counted if site.name in named}


def _fits(site: Site, option: Option, ragged_groups: bool, check: Callable[[Site, Scheme], None] | None) -> bool:
    if option is None:
        return True
    try:
        resolve_schemes([site], SchemeRules(default=option, quant_lm_head=site.is_head), ragged_groups=ragged_groups)
        if check is not None:
            check(site, option)
    except UserError:
        return False
    return True


def _because(fixed: Mapping[Site, Scheme | None], elements: int, spent: int) -> str:
    if not fixed:
        return " that --options give, scales counted"
    share = sum(math.prod(site.shape) for site in fixed) / elements
    mean = spent / sum(math.prod(site.shape) for site in fixed)
    return f", as --layer_config and --ignore_layers fix {share:.0%} of the weights at {mean:.3g} bits"


# --- Sensitivity


@dataclass(frozen=True, slots=True)
class _Change:
    """What an option does to a site."""

    scheme: Scheme
    difference: Tensor
    """W' - W, `[out, in]`."""
    rounded: Tensor | None
    """W', where inputs are quantized."""
    scale: Tensor | None
    """Of inputs, where it is static."""

    def moved(self, inputs: Tensor) -> Tensor:
        """By how much the output for `inputs` `[…, in]` changes."""
        moved = functional.linear(inputs, self.difference)
        if self.rounded is not None:
            moved += functional.linear(fake_quantize(inputs, self.scheme.activation, self.scale) - inputs, self.rounded)
        return moved


@dataclass(frozen=True, slots=True)
class _Meter:
    """Adds up the costs of a site."""

    module: nn.Module
    changes: tuple[_Change | None, ...]
    """What each option does to it."""
    sums: tuple[Tensor, ...]
    """Of each option Σ (g·δ)² over tokens, float32."""

    def add(self, inputs: Tensor, gradient: Tensor) -> None:
        """inputs: `[…, in]`; gradient: of the loss with respect to what the site gave for them, `[…, out]`."""
        for change, total in zip(self.changes, self.sums, strict=True):
            if change is not None:
                total += (gradient.float() * change.moved(inputs).float()).sum(-1).square().sum()


def sensitivities(
    skeleton: Skeleton,
    sites: Sequence[Site],
    options: Sequence[Option],
    measurement: Measurement,
    on_block: Callable[[str], None] | None = None,
) -> dict[str, tuple[float, ...]]:
    """What each of `sites` would cost under each of `options`, in nats a token: see the module's head. Zero for floating point.

    Weights are rounded plainly, `nv`'s with global scales of their own. Inputs of static activation schemes are scaled by the largest of
    these samples.
    Host memory: the inputs of every block (`measurement.store`). Raises `UserError` for values that are not finite, and for sites that
    no token reaches.
    """
    chosen = replace(
        measurement,
        tokens=measurement.tokens[:SAMPLES, :TOKENS],
        mask=None if measurement.mask is None else measurement.mask[:SAMPLES, :TOKENS],
    )
    run = _Run(skeleton, tuple(sites), tuple(options), chosen, on_block or (lambda name: None))
    with torch.no_grad():
        entering, calls, seen = _forward(run)
    costs = _backward(run, entering, calls, seen)
    for group in serving_groups([site.name for site in sites]):
        if not any(name in costs for name in group):
            raise UserError(
                f"no token of the calibration text reaches {', '.join(group)}, so that no scheme can be chosen for it; give more text, or "
                "name it in --layer_config"
            )
    return {site.name: costs.get(site.name, (0.0,) * len(options)) for site in sites}  # an expert that no token chose


@dataclass(frozen=True, slots=True)
class _Run:
    skeleton: Skeleton
    sites: tuple[Site, ...]
    options: tuple[Option, ...]
    how: Measurement
    on_block: Callable[[str], None]

    def sites_in(self, name: str) -> list[Site]:
        return [site for site in self.sites if under(site.name, name)]

    @property
    def counted(self) -> int:
        return self.how.tokens.numel() if self.how.mask is None else int(self.how.mask.sum())

    def mask_of(self, row: int, values: Tensor) -> Tensor | None:
        """bool `[1, tokens, 1]` for values `[1, tokens, …]`."""
        if self.how.mask is None or values.shape[:2] != (1, self.how.mask.shape[1]):
            return None
        return self.how.mask[row : row + 1].to(values.device).unsqueeze(-1)

    @contextlib.contextmanager
    def loaded(self, names: Sequence[str]) -> Iterator[None]:
        with self.skeleton.materialized(names, self.how.dtype, lambda name: self.how.device):
            yield


def _forward(run: _Run) -> tuple[list[Chain], tuple[BlockCall, ...], dict[str, Tensor]]:
    """Inputs of every block, at last what the last one gives; how blocks are called; the largest magnitude that entered each site."""
    how, skeleton = run.how, run.skeleton
    embedded = embed(skeleton, how.tokens, how.mask, how.dtype, how.chain)
    assert embedded.hidden is not None
    entering, seen = [embedded.hidden], dict[str, Tensor]()
    for name, call in zip(skeleton.block_names, embedded.calls, strict=True):
        inputs, outputs = entering[-1], how.chain(embedded.hidden.shape)
        block = skeleton.model.get_submodule(name)
        with run.loaded([name]):
            there = call.on(how.device, {})
            for row in range(len(inputs)):
                with _watching(run, name, row, seen):
                    result = there.run(block, inputs.read([row], how.device), [row])
                if not torch.isfinite(result).all():
                    raise UserError(
                        f"the float output of {name} for calibration sample {row} is NaN or infinite in {how.dtype}: try "
                        "--compute_dtype float32, or look at the weights of the block before it"
                    )
                outputs.write([row], result)
        entering.append(outputs)
        run.on_block(name)
    return entering, embedded.calls, seen


@contextlib.contextmanager
def _watching(run: _Run, name: str, row: int, seen: dict[str, Tensor]) -> Iterator[None]:
    """Notes the largest magnitude of what enters the sites under `name`."""

    def watcher(site: Site) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def watch(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            values = args[0]
            mask = run.mask_of(row, values)
            rows = (values if mask is None else values * mask).reshape(-1, values.shape[-1]).float()
            if not len(rows):
                return
            largest = rows.abs().amax()
            seen[site.name] = torch.maximum(seen[site.name], largest) if site.name in seen else largest

        return watch

    handles = [run.skeleton.model.get_submodule(site.name).register_forward_pre_hook(watcher(site)) for site in run.sites_in(name)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _backward(run: _Run, entering: list[Chain], calls: tuple[BlockCall, ...], seen: dict[str, Tensor]) -> dict[str, tuple[float, ...]]:
    """Costs, from the head to the first block. `entering` is used up."""
    gradients = entering.pop()
    costs = _head_backward(run, gradients, seen)
    for name, call in reversed(list(zip(run.skeleton.block_names, calls, strict=True))):
        costs |= _block_backward(run, name, call, entering.pop(), gradients, seen)
        run.on_block(name)
    return costs


def _block_backward(
    run: _Run, name: str, call: BlockCall, inputs: Chain, gradients: Chain, seen: Mapping[str, Tensor]
) -> dict[str, tuple[float, ...]]:
    """`gradients`, with respect to what the block gives, become those with respect to its inputs. Costs of its sites."""
    device, block = run.how.device, run.skeleton.model.get_submodule(name)
    with run.loaded([name]):
        call, meters = call.on(device, {}), _meters(run, name, seen)
        for row in range(len(inputs)):
            hidden = inputs.read([row], device).requires_grad_()
            with _metering(meters), torch.enable_grad():
                call.run(block, hidden.clone(), [row]).backward(gradients.read([row], device))  # type: ignore[no-untyped-call]
            assert hidden.grad is not None
            gradients.write([row], hidden.grad)
        return _read_meters(run, meters)


def _head_backward(run: _Run, hidden: Chain, seen: dict[str, Tensor]) -> dict[str, tuple[float, ...]]:
    """`hidden`, what the last block gives, becomes the gradient of the loss with respect to it. Costs of the output head, if asked."""
    how, skeleton = run.how, run.skeleton
    generator = torch.Generator().manual_seed(how.seed)
    head = skeleton.sites[-1].name  # of an architecture without one that can be quantized: some other site, which is not asked for here
    asked = skeleton.sites[-1].is_head and bool(run.sites_in(head))
    with run.loaded([*outside_blocks(skeleton), head]):
        if asked:
            with torch.no_grad():
                for row in range(len(hidden)):
                    with _watching(run, head, row, seen):
                        _logits(run, row, hidden.read([row], how.device))
        meters = _meters(run, head, seen) if asked else {}
        for row in range(len(hidden)):
            last = hidden.read([row], how.device).requires_grad_()
            with _metering(meters), torch.enable_grad():
                predicted = functional.log_softmax(_logits(run, row, last.clone()).float(), dim=-1)[0]
                if not torch.isfinite(predicted).all():
                    raise UserError(
                        f"predictions for calibration sample {row} are NaN or infinite in {how.dtype}: try --compute_dtype float32"
                    )
                drawn = torch.multinomial(predicted.detach().exp().to(HOST), 1, generator=generator).to(how.device)
                loss = -predicted.gather(-1, drawn)
                if how.mask is not None:
                    loss = loss * how.mask[row].to(how.device).unsqueeze(-1)
                loss.sum().backward()  # type: ignore[no-untyped-call]
            assert last.grad is not None
            hidden.write([row], last.grad)
        return _read_meters(run, meters)


def _logits(run: _Run, row: int, last: Tensor) -> Tensor:
    """`[1, tokens, vocabulary]` of sample `row`, of which the last block gives `last`."""
    tokens, mask = run.how.tokens[row : row + 1].to(run.how.device), run.how.mask
    attention = None if mask is None else mask[row : row + 1].to(run.how.device, torch.long)
    with recording(run.skeleton, replace=last):
        found: Tensor = run.skeleton.model(input_ids=tokens, attention_mask=attention, use_cache=False).logits
    return found


def _meters(run: _Run, name: str, seen: Mapping[str, Tensor]) -> dict[str, _Meter]:
    """A meter for each site under `name` that tokens reached; the module's weights are there."""
    meters = {}
    for site in run.sites_in(name):
        if site.name not in seen:
            continue
        module = run.skeleton.model.get_submodule(site.name)
        parameter = module.get_parameter("weight").detach()
        weight = parameter.t().contiguous() if site.transposed else parameter
        changes = tuple(None if option is None else _change(weight, site, option, seen[site.name]) for option in run.options)
        meters[site.name] = _Meter(module, changes, tuple(torch.zeros((), device=weight.device) for _ in changes))
    return meters


def _change(weight: Tensor, site: Site, option: Scheme, magnitude: Tensor) -> _Change:
    """weight: `[out, in]`; magnitude: the largest of its inputs."""
    inputs = option.activation
    try:
        rounded = quantize(weight, option.weight).dequantize()
    except OverflowError as error:
        raise UserError(f"{site.name}: {error}; leave it out with --ignore_layers") from None
    return _Change(
        scheme=option,
        difference=(rounded - weight).to(weight.dtype),
        rounded=rounded.to(weight.dtype) if inputs.quantized else None,
        scale=input_scale(magnitude, inputs) if inputs.calibrated else None,
    )


@contextlib.contextmanager
def _metering(meters: Mapping[str, _Meter]) -> Iterator[None]:
    """Meters see what enters their modules, and the gradient of what these give."""

    def watcher(meter: _Meter) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def watch(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            if output.numel() and output.requires_grad:
                inputs = args[0].detach()
                output.register_hook(lambda gradient: meter.add(inputs, gradient))  # type: ignore[no-untyped-call]

        return watch

    handles = [meter.module.register_forward_hook(watcher(meter)) for meter in meters.values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _read_meters(run: _Run, meters: Mapping[str, _Meter]) -> dict[str, tuple[float, ...]]:
    costs = {name: tuple(float(total) / (2 * run.counted) for total in meter.sums) for name, meter in meters.items()}
    for name, found in costs.items():
        if not all(map(math.isfinite, found)):
            raise UserError(
                f"what quantizing {name} costs is NaN or infinite in {run.how.dtype}: try --compute_dtype float32, or name the layer in "
                "--layer_config"
            )
    return costs
