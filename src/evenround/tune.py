"""Tune the rounding of one group of decoder blocks: the seam between the driver and the mathematics.

`tune_block` is pure: blocks and calibration tensors in, quantized weights, next inputs and a record out. The blocks are never edited;
quantized weights are passed through `torch.func.functional_call`, so the same block also gives the float reference.

SignRound (arXiv 2309.05516): minimize the squared error between the float block's output and the quantized block's, over a rounding offset
V per weight and two clip factors per group, by the sign of the gradient with a step size that decays linearly to 0.

Cost of one step against a plain forward and backward: one QDQ per weight each way, whatever the number of micro-batches, because these
accumulate the gradient of the quantized weight and the QDQ backward runs once per step.
State per weight while a step runs: V 4 bytes, quantized weight and its gradient 2 x the compute dtype, momentum 4 bytes where it is used,
and a 1 byte code for the best iterate (V itself need not be kept: codes and scales are all that is exported).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call

from evenround.calls import BlockCall
from evenround.config import TuneConfig
from evenround.errors import UserError
from evenround.model import Site
from evenround.numerics.integer import IntegerQDQ, QuantizedWeight, chunks, from_groups, group_range, quantize, to_groups
from evenround.scheme import WeightScheme


@dataclass(frozen=True, slots=True)
class Block:
    """A materialized decoder block and how to call it."""

    name: str
    module: nn.Module
    call: BlockCall
    sites: tuple[tuple[Site, WeightScheme], ...]
    """The weights to quantize in it."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The calibration samples as a block group sees them, all on the host."""

    inputs: Tensor
    """`[samples, tokens, hidden]`: what the quantized group is fed."""
    targets: Tensor | None
    """`[samples, tokens, hidden]`: what the float group gives; None: computed from `float_inputs` when needed (the output head, whose
    outputs are a vocabulary wide)."""
    mask: Tensor | None
    """bool `[samples, tokens]`, False where padded; None: every token counts."""
    float_inputs: Tensor | None = None
    """`[samples, tokens, hidden]`, only when `targets` is None."""

    def target(self, blocks: "Sequence[Block]", part: Tensor, device: torch.device) -> Tensor:
        """What the float group gives for the samples numbered `part` `[batch]`: `[batch, tokens, out]`."""
        if self.targets is not None:
            return self.targets[part].to(device)
        assert self.float_inputs is not None
        with torch.no_grad():
            return run_group(blocks, self.float_inputs[part].to(device), part)

    def counted(self, chosen: Tensor | None = None) -> int:
        """Tokens that count among the samples `chosen` (None: all)."""
        if self.mask is None:
            return self.inputs.shape[1] * (len(self.inputs) if chosen is None else len(chosen))
        return int((self.mask if chosen is None else self.mask[chosen]).sum())


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What tuning a block group gave."""

    quantized: Mapping[str, QuantizedWeight]
    """Site name → weight."""
    outputs: Tensor | None
    """`[samples, tokens, hidden]` of the quantized group on its inputs: the next group's quantized inputs; None after the output head."""
    rtn_loss: float
    """Mean squared error over all samples with untuned rounding."""
    tuned_loss: float | None
    """The same with the tuned rounding; None when nothing was tuned."""
    kept: str
    """`tuned` or `untuned`."""
    best_iteration: int | None
    losses: tuple[float, ...]
    """Mini-batch loss of each step."""
    notes: tuple[str, ...]


Weights = Mapping[str, Tensor]
"""Site name → weight `[out, in]` in the compute dtype, to take the place of the block's own."""


def run_group(blocks: Sequence[Block], hidden: Tensor, samples: Tensor, weights: Weights | None = None) -> Tensor:
    """Output `[batch, tokens, hidden]` of the blocks one after another, on hidden states of the samples numbered `samples` `[batch]`."""
    for block in blocks:
        hidden = block.call.run(_callable(block, weights), hidden, samples)
    return hidden


def _callable(block: Block, weights: Weights | None) -> Callable[..., object]:
    if weights is None:
        return block.module
    swapped = {
        site.parameter.removeprefix(block.name + "."): weights[site.name].t() if site.transposed else weights[site.name]
        for site, _ in block.sites
    }
    return lambda *args, **kwargs: functional_call(block.module, swapped, args, kwargs)


def run_all(
    blocks: Sequence[Block],
    inputs: Tensor,
    batch_size: int,
    device: torch.device,
    weights: Weights | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`run_group` over all samples `[samples, tokens, hidden]`, `batch_size` at a time; `out` may be `inputs` itself."""
    result = torch.empty_like(inputs) if out is None else out
    with torch.no_grad():
        for samples in torch.arange(len(inputs)).split(batch_size):
            at = slice(int(samples[0]), int(samples[-1]) + 1)
            result[at] = run_group(blocks, inputs[at].to(device), samples, weights)
    return result


def squared_error(output: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    """Sum of squared differences in float32 over the tokens that count; `[batch, tokens, hidden]`, mask bool `[batch, tokens]`."""
    difference = output.float() - target.float()
    if mask is not None:
        difference = difference * mask.unsqueeze(-1)
    return difference.square().sum()


@dataclass(slots=True)
class SiteState:
    """Tuning state of one site. `rows`, `offset`: `[groups, size]`; clips, `low`, `high`: float32 `[groups, 1]`."""

    site: Site
    scheme: WeightScheme
    weight: Tensor
    rows: Tensor
    low: Tensor
    high: Tensor
    offset: Tensor
    min_clip: Tensor
    max_clip: Tensor
    averages: list[Tensor] = field(default_factory=list)

    def quantize_dequantize(self, dtype: torch.dtype) -> Tensor:
        """W' `[out, in]`, with gradients to the tuning parameters."""
        rows = IntegerQDQ.apply(self.rows, self.offset, self.min_clip, self.max_clip, self.low, self.high, self.scheme, dtype)
        return from_groups(rows, self.site.shape)

    def export(self) -> QuantizedWeight:
        return quantize(self.weight, self.scheme, self.offset.detach(), self.min_clip.detach(), self.max_clip.detach())

    @property
    def parameters(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.offset, self.min_clip, self.max_clip


def _weight_of(block: Block, site: Site) -> Tensor:
    weight = block.module.get_parameter(site.parameter.removeprefix(block.name + "."))
    return (weight.t().contiguous() if site.transposed else weight).detach()


def initial_state(block: Block, site: Site, scheme: WeightScheme, minmax_tuning: bool) -> SiteState:
    """Untuned: V = 0, both clip factors 1 (and not tuned unless `minmax_tuning`)."""
    weight = _weight_of(block, site)
    rows = to_groups(weight, scheme.group_size)
    low, high = group_range(rows)
    offset = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device, requires_grad=True)
    min_clip, max_clip = (torch.ones_like(low).requires_grad_(minmax_tuning) for _ in range(2))
    return SiteState(site, scheme, weight, rows, low, high, offset, min_clip, max_clip)


def round_to_nearest(blocks: Sequence[Block]) -> dict[str, QuantizedWeight]:
    """Every site of the blocks by plain rounding. Raises `UserError` naming the layer whose scale does not fit float16."""
    result = {}
    for block in blocks:
        for site, scheme in block.sites:
            try:
                result[site.name] = quantize(_weight_of(block, site), scheme)
            except OverflowError as error:
                raise UserError(f"{site.name}: {error}; leave it out with --ignore_layers") from None
    return result


class _Draw:
    """Sample numbers for each step: a permutation used up in order, drawn anew when fewer than a step's worth remain."""

    def __init__(self, count: int, step: int, generator: torch.Generator) -> None:
        self.count, self.step, self.generator = count, min(step, count), generator
        self.order = torch.empty(0, dtype=torch.long)

    def next(self) -> Tensor:
        if len(self.order) < self.step:
            self.order = torch.randperm(self.count, generator=self.generator)
        chosen, self.order = self.order[: self.step], self.order[self.step :]
        return chosen


@dataclass(slots=True)
class Pending:
    """A site whose quantized weight W' has its gradient, but whose tuning parameters do not yet."""

    state: SiteState
    weight: Tensor
    """W' `[out, in]`, with the graph back to the tuning parameters."""
    gradient: Tensor
    """Of the loss by W', in the compute dtype."""

    def backward(self) -> None:
        """Gradients of the tuning parameters, in their `.grad`; the graph is used up."""
        self.weight.backward(self.gradient)  # type: ignore[no-untyped-call]


def step(
    blocks: Sequence[Block], states: Sequence[SiteState], samples: Samples, chosen: Tensor, micro_batch: int, device: torch.device
) -> tuple[float, list[Pending]]:
    """Loss of the current parameters on the samples `chosen`, and the gradients of the quantized weights.

    `micro_batch` samples go through the blocks at a time; gradients of the quantized weights add up, so it changes memory, not mathematics.
    """
    dtype = samples.inputs.dtype
    quantized = {state.site.name: state.quantize_dequantize(dtype) for state in states}
    leaves = {name: weight.detach().requires_grad_() for name, weight in quantized.items()}
    tokens = max(1, samples.counted(chosen))
    loss = 0.0
    for part in chosen.split(micro_batch):
        mask = None if samples.mask is None else samples.mask[part].to(device)
        output = run_group(blocks, samples.inputs[part].to(device), part, leaves)
        error = squared_error(output, samples.target(blocks, part, device), mask) / (tokens * output.shape[-1])
        error.backward()  # type: ignore[no-untyped-call]
        loss += float(error.detach())
    pending = []
    for state in states:
        gradient = leaves[state.site.name].grad
        if gradient is not None:  # a weight that no sample reaches has none
            pending.append(Pending(state, quantized[state.site.name], gradient))
    return loss, pending


def follow_sign(pending: list[Pending], config: TuneConfig, fraction: float) -> None:
    """One update: each parameter moves by its step size times `fraction`, against the sign of its (averaged) gradient.

    Empties `pending` site by site, so that the 4-byte gradient of V exists for one weight matrix at a time.
    """
    while pending:
        site = pending.pop()
        site.backward()
        _update(site.state, config, fraction)


def _update(state: SiteState, config: TuneConfig, fraction: float) -> None:
    with torch.no_grad():
        if config.momentum and not state.averages:
            state.averages = [torch.zeros_like(parameter) for parameter in state.parameters]
        for index, parameter in enumerate(state.parameters):
            if parameter.grad is None:
                continue
            size = (config.step_size if index == 0 else config.clip_step_size) * fraction
            _move(parameter, parameter.grad, state.averages[index] if config.momentum else None, config.momentum, size)
            if index > 0:
                parameter.clamp_(0, 1)
            parameter.grad = None


def _move(parameter: Tensor, gradient: Tensor, average: Tensor | None, momentum: float, size: float) -> None:
    """parameter -= size * sign(gradient), or of `average`, the decaying mean of gradients that were scaled to a mean magnitude of 1.

    Scaled, because gradients shrink as tuning proceeds while their direction does not lose meaning (unscaled: KL 3 % higher at 2 bits).
    """
    scale = 1.0 if average is None else (1 - momentum) / (torch.linalg.vector_norm(gradient, ord=1) / gradient.numel() + 1e-30)
    for at in chunks(parameter):
        direction = gradient[at]
        if average is not None:
            direction = average[at].mul_(momentum).add_(direction * scale)
        parameter[at].sub_(torch.sign(direction), alpha=size)


def tune_block(
    blocks: Sequence[Block],
    samples: Samples,
    config: TuneConfig,
    *,
    device: torch.device,
    generator: torch.Generator,
    micro_batch: int | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> GroupResult:
    """Quantize the sites of `blocks` so that the group's output on `samples.inputs` stays close to `samples.targets`.

    blocks: materialized, in execution order; left as they were.
    generator: draws the samples of each step.
    micro_batch: samples at once, default `config.batch_size`; does not change the mathematics.
    on_step: called with (iteration, mini-batch loss).
    Raises `UserError` naming the block when inputs or float outputs are not finite.
    """
    _check_finite(blocks, samples)
    batch = micro_batch or config.batch_size
    untuned = round_to_nearest(blocks)
    done = config.iters == 0 or not untuned
    rtn_loss, rtn_outputs = _judge(blocks, untuned, samples, batch, device, keep=done)
    if done:
        return GroupResult(untuned, rtn_outputs, rtn_loss, None, "untuned", None, (), ())
    states = [initial_state(block, site, scheme, config.minmax_tuning) for block in blocks for site, scheme in block.sites]
    draw = _Draw(len(samples.inputs), config.batch_size * config.gradient_accumulate_steps, generator)
    losses: list[float] = []
    best_loss, best_iteration, best = math.inf, 0, untuned
    for iteration in range(config.iters):
        loss, pending = step(blocks, states, samples, draw.next(), batch, device)
        losses.append(loss)
        if on_step:
            on_step(iteration, loss)
        if not math.isfinite(loss):
            note = f"loss {loss} at iteration {iteration} of {blocks[0].name}: untuned rounding kept"
            return _untuned(blocks, untuned, samples, batch, device, rtn_loss, losses, note)
        if config.keep == "best" and loss < best_loss:
            best_loss, best_iteration = loss, iteration
            best = {state.site.name: state.export() for state in states}
        follow_sign(pending, config, 1 - iteration / config.iters)
    if config.keep == "last":
        best_iteration, best = config.iters, {state.site.name: state.export() for state in states}
    del states
    tuned_loss, outputs = _judge(blocks, best, samples, batch, device)
    if not tuned_loss < rtn_loss:
        note = f"tuning did not help {blocks[0].name} ({tuned_loss:.4g} against {rtn_loss:.4g}): untuned rounding kept"
        result = _untuned(blocks, untuned, samples, batch, device, rtn_loss, losses, note)
        return GroupResult(result.quantized, result.outputs, rtn_loss, tuned_loss, "untuned", best_iteration, tuple(losses), result.notes)
    return GroupResult(best, outputs, rtn_loss, tuned_loss, "tuned", best_iteration, tuple(losses), ())


def _untuned(
    blocks: Sequence[Block],
    untuned: dict[str, QuantizedWeight],
    samples: Samples,
    batch: int,
    device: torch.device,
    rtn_loss: float,
    losses: list[float],
    note: str,
) -> GroupResult:
    _, outputs = _judge(blocks, untuned, samples, batch, device)
    return GroupResult(untuned, outputs, rtn_loss, None, "untuned", None, tuple(losses), (note,))


def _judge(
    blocks: Sequence[Block],
    quantized: Mapping[str, QuantizedWeight],
    samples: Samples,
    batch: int,
    device: torch.device,
    *,
    keep: bool = True,
) -> tuple[float, Tensor | None]:
    """Mean squared error over all samples with these quantized weights; if `keep`, the outputs `[samples, tokens, hidden]` to chain on."""
    weights = {name: weight.dequantize(samples.inputs.dtype) for name, weight in quantized.items()}
    outputs = torch.empty_like(samples.targets) if keep and samples.targets is not None else None
    total, width = 0.0, 1
    with torch.no_grad():
        for part in torch.arange(len(samples.inputs)).split(batch):
            output = run_group(blocks, samples.inputs[part].to(device), part, weights)
            mask = None if samples.mask is None else samples.mask[part].to(device)
            total += float(squared_error(output, samples.target(blocks, part, device), mask))
            width = output.shape[-1]
            if outputs is not None:
                outputs[part] = output.to(outputs.device)
    return total / max(1, samples.counted() * width), outputs


def _check_finite(blocks: Sequence[Block], samples: Samples) -> None:
    for what, tensor in (("input", samples.inputs), ("float output", samples.targets)):
        for number, sample in enumerate([] if tensor is None else tensor):
            if not torch.isfinite(sample).all():
                raise UserError(
                    f"the {what} of {blocks[0].name} for calibration sample {number} is NaN or infinite in {sample.dtype}: "
                    "try --compute_dtype float32, or look at the weights of the block before it"
                )
