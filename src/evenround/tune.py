"""Tune the rounding of one group of decoder blocks: the seam between the driver and the mathematics.

`tune_block` is pure: blocks and calibration tensors in, quantized weights, next inputs and a record out. The blocks are never edited.

SignRound (arXiv 2309.05516): minimize the squared error between the float block's output and the quantized block's, over a rounding offset
V per weight and two clip factors per group, by the sign of the gradient with a step size that decays linearly to 0.

Cost of one step against a plain forward and backward: one QDQ per weight each way, whatever the number of micro-batches, because these
accumulate the gradient of the quantized weight and the gradients of V come from it once per step.
State per weight while a step runs: V 4 bytes, momentum 4 bytes where it is used, quantized weight and its gradient 2 x the compute dtype on
each replica; when the parameters move, 4 bytes for the gradient of one weight's V at a time. Codes of results are kept on the host.
What is allocated never depends on values, so that the same code over tensors without values tells the memory of a run to the byte.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from evenround.blocks import Block, Group, Intake, Weights
from evenround.chains import HOST, Chain
from evenround.config import TuneConfig
from evenround.errors import UserError
from evenround.model import Site
from evenround.numerics.grouping import chunks
from evenround.numerics.quantized import QuantizedWeight
from evenround.scheme import Scheme
from evenround.states import REHEARSED, Seen, SiteState, Start, Watch, initial_state, quantized_inputs, start_values, untuned


@dataclass(frozen=True, slots=True)
class Samples:
    """The calibration samples as a block group sees them."""

    inputs: Chain
    """What the quantized group is fed."""
    targets: Chain | None
    """What the float group gives; None: computed from `float_inputs` when needed (the output head, whose outputs are a vocabulary wide)."""
    mask: Tensor | None
    """bool `[samples, tokens]` on the host, False where padded; None: every token counts."""
    float_inputs: Chain | None = None
    """Only when `targets` is None."""
    float_weights: Sequence[Weights] = ()
    """Of each replica, only when `targets` is None."""

    def target(self, group: Group, part: Sequence[int], replica: int) -> Tensor:
        """What the float group gives for the samples `part`, where the group's output comes out: `[batch, tokens, out]`."""
        if self.targets is not None:
            with group.place.label("transfers"):
                return self.targets.read(part, group.last_device(replica))
        assert self.float_inputs is not None
        with torch.no_grad():
            hidden = self.float_inputs.read(part, group.first_device(replica))
            return group.forward(hidden, part, replica, self.float_weights[replica])

    def counted(self, chosen: Sequence[int] | None = None) -> int:
        """Tokens that count among the samples `chosen` (None: all)."""
        if self.mask is None:
            return self.inputs.shape[1] * (len(self.inputs) if chosen is None else len(chosen))
        return int(sum(self.mask[number].sum() for number in (range(len(self.mask)) if chosen is None else chosen)))


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What tuning a block group gave."""

    quantized: Mapping[str, QuantizedWeight]
    """Site name → weight, on the host."""
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


def mask_of(mask: Tensor | None, part: Sequence[int], device: torch.device) -> Tensor | None:
    """bool `[batch, tokens]` of the samples `part`."""
    return None if mask is None else torch.stack([mask[number] for number in part]).to(device)


Window = list[tuple[int, Sequence[int]]]
"""(replica, samples) of micro-batches that are in flight together."""


def _windows(group: Group, parts_of: Sequence[Sequence[Sequence[int]]]) -> Iterator[Window]:
    """`parts_of`: for each replica its micro-batches in order; `in_flight` of each replica at a time."""
    in_flight = group.place.layout.in_flight
    for start in range(0, max(len(parts) for parts in parts_of), in_flight):
        rows = itertools.zip_longest(*(parts[start : start + in_flight] for parts in parts_of))
        yield [(replica, part) for row in rows for replica, part in enumerate(row) if part is not None]


def all_samples(group: Group, count: int, rehearse: bool) -> Iterator[Window]:
    """All samples 0 … count - 1, a micro-batch for each replica at a time."""
    parts, replicas = _split(range(count), group.place.layout.micro_batch), len(group.replicas)
    windows = (list(enumerate(parts[start : start + replicas])) for start in range(0, len(parts), replicas))
    return itertools.islice(windows, REHEARSED) if rehearse else windows


def _split(samples: Sequence[int], size: int) -> list[Sequence[int]]:
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def squared_error(output: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    """Sum of squared differences in float32 over the tokens that count; `[batch, tokens, hidden]`, mask bool `[batch, tokens]`."""
    difference = output.float() - target.float()
    if mask is not None:
        difference = difference * mask.unsqueeze(-1)
    return difference.square().sum()


def float_outputs(
    group: Group, inputs: Chain, out: Chain | None, config: TuneConfig, mask: Tensor | None = None, rehearse: bool = False
) -> dict[str, Seen]:
    """`out`, which may be `inputs` itself, becomes what the float group gives; returns what entered the sites that need to know.

    mask: bool `[samples, tokens]` on the host, False where padded. Raises `UserError` naming a sample that is not finite.
    """
    weights, watch = group.float_weights(), Watch(group, config)
    with torch.no_grad():
        for window in all_samples(group, len(inputs), rehearse):
            finite = []
            for replica, part in window:
                hidden = _read(group, inputs, part, replica)
                seen = watch.intake(replica, mask_of(mask, part, hidden.device))
                output = group.forward(hidden, part, replica, weights[replica], seen)
                finite += [_finite(hidden), _finite(output)]
                if out is not None:
                    out.write(part, output)
            _check_finite(("input", "float output"), group, finite, window, inputs.dtype)
    return watch.total()


def _read(group: Group, chain: Chain, part: Sequence[int], replica: int) -> Tensor:
    with group.place.label("transfers"):
        return chain.read(part, group.first_device(replica))


def _finite(values: Tensor) -> Tensor:
    """bool `[batch]`: whether all values of a sample are finite."""
    return torch.isfinite(values).flatten(1).all(1)


def _check_finite(kinds: Sequence[str], group: Group, finite: Sequence[Tensor], window: Window, dtype: torch.dtype) -> None:
    """`finite`: for each micro-batch of the window, for each of `kinds`, `[batch]`. Asked when all replicas have been given work."""
    for number, good in enumerate(finite):
        if not good.all():
            samples = window[number // len(kinds)][1]
            bad = next(sample for sample, fine in zip(samples, good.tolist(), strict=True) if not fine)
            raise UserError(
                f"the {kinds[number % len(kinds)]} of {group.name} for calibration sample {bad} is NaN or infinite in {dtype}: "
                "try --compute_dtype float32, or look at the weights of the block before it"
            )


class Draw:
    """Sample numbers for each step: a permutation used up in order, drawn anew when fewer than a step's worth remain."""

    def __init__(self, count: int, step: int, generator: torch.Generator) -> None:
        self.count, self.step, self.generator = count, min(step, count), generator
        self.order: list[int] = []

    def __call__(self) -> Sequence[int]:
        if len(self.order) < self.step:
            self.order = torch.randperm(self.count, generator=self.generator).tolist()
        chosen, self.order = self.order[: self.step], self.order[self.step :]
        return chosen


@dataclass(frozen=True, slots=True)
class Pending:
    """A site whose quantized weight W' has its gradient, but whose tuning parameters have not moved yet."""

    state: SiteState
    gradients: list[Tensor]
    """Of the loss by W' `[out, in]`, in the compute dtype, one of each replica that has one."""

    def total(self, device: torch.device) -> Tensor:
        """The sum over replicas, in their order."""
        total = self.gradients[0].to(device)
        for gradient in self.gradients[1:]:
            total.add_(gradient.to(device))
        return total


def step(group: Group, states: Sequence[SiteState], samples: Samples, chosen: Sequence[int]) -> tuple[float, list[Pending]]:
    """Loss of the current parameters on the samples `chosen`, and the gradients of the quantized weights.

    The layout's `micro_batch` samples go through a replica at a time, replica after replica; gradients of the quantized weights add up, so
    it changes memory, not mathematics.
    """
    leaves = tuned_weights(group, states, samples.inputs.dtype)
    intakes = quantized_inputs(group, {state.site.name: state.start.input_scale for state in states})
    tokens, loss = max(1, samples.counted(chosen)), 0.0
    for window in _windows(group, _shares(chosen, group.place.layout.micro_batch, len(group.replicas))):
        errors = [micro_batch_error(group, samples, part, replica, leaves[replica], tokens, intakes) for replica, part in window]
        values = []
        for error in errors:
            error.backward()  # type: ignore[no-untyped-call]
            values.append(error.detach())
        del errors, error
        loss += sum(float(value) for value in values)
    pending = []
    for state in states:
        gradients = [leaf.grad for leaf in (replica[state.site.name] for replica in leaves) if leaf.grad is not None]
        if gradients:  # a weight that no sample reaches has none
            pending.append(Pending(state, gradients))
    return loss, pending


def tuned_weights(group: Group, states: Sequence[SiteState], dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """W' of every site for each replica, as leaves that gradients gather in."""
    by_site = {state.site.name: state for state in states}

    def quantized(block: Block, site: Site, scheme: Scheme) -> Tensor:
        return by_site[site.name].on(group.place.work(site.name)).quantize_dequantize(dtype)

    with group.place.label("tuning state"):
        leaves = group.spread(quantized)
    for replica in leaves:
        for weight in replica.values():
            weight.requires_grad_()
    return leaves


def _shares(chosen: Sequence[int], micro_batch: int, replicas: int) -> list[list[Sequence[int]]]:
    """For each replica its micro-batches: consecutive ones, as even as can be."""
    parts, shares = iter(_split(chosen, micro_batch)), []
    each, extra = divmod(math.ceil(len(chosen) / micro_batch), replicas)
    for replica in range(replicas):
        shares.append(list(itertools.islice(parts, each + (replica < extra))))
    return shares


def micro_batch_error(
    group: Group,
    samples: Samples,
    part: Sequence[int],
    replica: int,
    leaves: Weights,
    tokens: int,
    intakes: Mapping[str, Intake] = MappingProxyType({}),
) -> Tensor:
    """This micro-batch's part of the mean squared error, with its graph."""
    hidden = _read(group, samples.inputs, part, replica)
    with group.place.label("saved activations"):
        output = group.forward(hidden, part, replica, leaves, intakes)
        mask = mask_of(samples.mask, part, output.device)
        return squared_error(output, samples.target(group, part, replica), mask) / (tokens * output.shape[-1])


def follow_sign(group: Group, pending: list[Pending], config: TuneConfig, fraction: float) -> None:
    """One update: each parameter moves by its step size times `fraction`, against the sign of its (averaged) gradient.

    Empties `pending` site by site, so that the 4-byte gradient of V exists for one weight matrix at a time.
    """
    while pending:
        _follow(group, pending.pop(), config, fraction)


def _follow(group: Group, site: Pending, config: TuneConfig, fraction: float) -> None:
    device = group.place.work(site.state.site.name)
    with group.place.label("tuning state"):
        state = site.state.on(device)
    with group.place.label("gradients"):
        gradients = state.gradients(site.total(device), config.minmax_tuning)
    if state.scheme.activation.bits <= 4:
        fraction *= config.coarse_inputs
    for index, gradient in enumerate(gradients):
        parameter = state.parameters[index]
        size = (config.step_size if index == 0 else config.clip_step_size) * fraction
        _move(parameter, gradient, state.averages[index] if config.momentum else None, config.momentum, size)
        if index > 0:
            parameter.clamp_(0, config.clip_limit)
    site.state.take(state)


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
    group: Group,
    samples: Samples,
    config: TuneConfig,
    draw: Callable[[], Sequence[int]],
    *,
    seen: Mapping[str, Seen],
    outputs: Chain | None = None,
    rehearse: bool = False,
    on_step: Callable[[int, float], None] | None = None,
) -> GroupResult:
    """Quantize the sites of the group so that its output on `samples.inputs` stays close to `samples.targets`.

    group: its blocks are left as they were.
    draw: the samples of each step.
    seen: what entered the sites, from `float_outputs`.
    outputs: becomes what the quantized group gives, the next group's inputs.
    rehearse: make two rounds of every loop, as many as it takes to see all memory that a run uses; the result means nothing.
    on_step: called with (iteration, mini-batch loss).
    Raises `UserError` naming the block when inputs are not finite.
    """
    starts = start_values(group, config, seen, rehearse)
    plain = untuned(group, starts, HOST)
    tunes = config.iters > 0 and bool(plain)
    rtn_loss = _judge(group, plain, samples, None if tunes else outputs, rehearse, check=True)
    if not tunes:
        return GroupResult(plain, rtn_loss, None, "untuned", None, (), ())
    with group.place.label("tuning state"):
        states = initial_states(group, starts, config)
    del starts
    losses: list[float] = []
    best_loss, best_iteration, best = math.inf, 0, plain
    for iteration in range(1 if rehearse else config.iters):  # a step leaves nothing behind that the next would not replace
        loss, pending = step(group, states, samples, draw())
        losses.append(loss)
        if on_step:
            on_step(iteration, loss)
        if not math.isfinite(loss):
            del states, pending
            note = f"loss {loss} at iteration {iteration} of {group.name}: untuned rounding kept"
            _judge(group, plain, samples, outputs, rehearse)
            return GroupResult(plain, rtn_loss, None, "untuned", None, tuple(losses), (note,))
        if config.keep == "best" and loss < best_loss:
            best_loss, best_iteration, best = loss, iteration, _exported(group, states)
        follow_sign(group, pending, config, 1 - iteration / config.iters)
    if config.keep == "last":
        best_iteration, best = config.iters, _exported(group, states)
    del states
    tuned_loss = _judge(group, best, samples, outputs, rehearse)
    result = GroupResult(best, rtn_loss, tuned_loss, "tuned", best_iteration, tuple(losses), ())
    if tuned_loss < rtn_loss or rehearse:  # what follows takes the memory of what went before
        return result
    note = f"tuning did not help {group.name} ({tuned_loss:.4g} against {rtn_loss:.4g}): untuned rounding kept"
    _judge(group, plain, samples, outputs, rehearse)
    return replace(result, quantized=plain, kept="untuned", notes=(note,))


def initial_states(group: Group, starts: Mapping[str, Start], config: TuneConfig) -> list[SiteState]:
    """Every site's, where it is kept."""
    momentum = config.momentum > 0
    return [initial_state(block.weight(site), site, scheme, starts[site.name], momentum) for block, site, scheme in group.sites]


def _exported(group: Group, states: Sequence[SiteState]) -> dict[str, QuantizedWeight]:
    """The current iterate, on the host."""
    return {state.site.name: state.on(group.place.work(state.site.name)).export().to(HOST) for state in states}


def _judge(
    group: Group, quantized: Mapping[str, QuantizedWeight], samples: Samples, outputs: Chain | None, rehearse: bool, check: bool = False
) -> float:
    """Mean squared error over all samples with these weights; `outputs` becomes what they give. `check`: that inputs are finite."""
    dtype, place = samples.inputs.dtype, group.place

    def weight_of(block: Block, site: Site, scheme: Scheme) -> Tensor:
        return quantized[site.name].to(place.work(site.name)).dequantize(dtype)

    with place.label("weights"):
        weights = group.spread(weight_of)
    intakes = quantized_inputs(group, {name: weight.input_scale for name, weight in quantized.items()})
    total, width = 0.0, 1
    with torch.no_grad():
        for window in all_samples(group, len(samples.inputs), rehearse):
            errors, finite = [], []
            for replica, part in window:
                hidden = _read(group, samples.inputs, part, replica)
                if check:
                    finite.append(_finite(hidden))
                output = group.forward(hidden, part, replica, weights[replica], intakes)
                errors.append(squared_error(output, samples.target(group, part, replica), mask_of(samples.mask, part, output.device)))
                if outputs is not None:
                    outputs.write(part, output)
                width = output.shape[-1]
            _check_finite(("input",), group, finite, window, dtype)
            total += sum(float(error) for error in errors)
    return total / max(1, samples.counted() * width)
