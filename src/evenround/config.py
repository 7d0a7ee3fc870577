"""Settings as small frozen dataclasses; rules between fields live in `__post_init__` and name the flag and the fix."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch

from evenround.errors import UserError, nearest


def _at_least(flag: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{flag} {value!r} must be a whole number of at least {least}")


def _positive(flag: str, value: float | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf")):
        raise UserError(f"{flag} {value!r} must be a positive number")


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneConfig:
    """How a block is tuned."""

    iters: int = 200
    """Optimizer steps per block group; 0 rounds to nearest."""
    batch_size: int = 8
    """Samples of one micro-step."""
    gradient_accumulate_steps: int = 1
    """Micro-steps per optimizer step: one step sees batch_size * gradient_accumulate_steps samples."""
    lr: float | None = None
    """Step size of V; None: 1 / iters."""
    minmax_lr: float | None = None
    """Step size of the clip factors; None: lr."""
    coarse_inputs: float = 1.0
    """Factor of both step sizes for layers whose inputs are quantized to 4 bits."""
    momentum: float = 0.0
    """Decay of the averaged gradient whose sign is followed; 0: the sign of each step's own gradient."""
    minmax_tuning: bool = True
    """Tune the clip factors of each group besides V."""
    search_scales: bool = False
    """Begin with scales that a search finds best for the inputs seen, instead of the range of the weights."""
    clip_limit: float = 1.0
    """Largest value of the clip factors."""
    keep: Literal["best", "last"] = "best"
    """Which iterate is kept: the one with the lowest mini-batch loss (auto-round's), or the last."""
    quantized_inputs: bool = True
    """Feed each block what the quantized blocks before it give, not what the float ones give."""
    nblocks: int = 1
    """Consecutive blocks tuned together."""
    seed: int = 42

    def __post_init__(self) -> None:
        _at_least("--iters", self.iters, 0)
        _at_least("--batch_size", self.batch_size, 1)
        _at_least("--gradient_accumulate_steps", self.gradient_accumulate_steps, 1)
        _at_least("--nblocks", self.nblocks, 1)
        _at_least("--seed", self.seed, 0)
        if self.seed >= 2**32:
            raise UserError(f"--seed {self.seed} must be below {2**32}")
        _positive("--lr", self.lr)
        _positive("--minmax_lr", self.minmax_lr)
        if isinstance(self.momentum, bool) or not isinstance(self.momentum, int | float) or not 0 <= self.momentum < 1:
            raise UserError(f"--momentum {self.momentum!r} must be a number of at least 0 and below 1")
        _positive("clip_limit", self.clip_limit)
        _positive("coarse_inputs", self.coarse_inputs)
        if self.keep not in ("best", "last"):
            raise UserError(f"keep {self.keep!r} must be 'best' or 'last' (--keep)")

    @property
    def step_size(self) -> float:
        """Step size of V at iteration 0."""
        return self.lr if self.lr is not None else 1 / max(1, self.iters)

    @property
    def clip_step_size(self) -> float:
        """Step size of the clip factors at iteration 0."""
        return self.minmax_lr if self.minmax_lr is not None else self.step_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Values for what the user did not set."""

    iters: int = 200
    nsamples: int = 128
    largest_lr: float = 0.01
    """The step size of V is 1 / iters, but not above this: a short run with larger steps ends worse than it began."""
    minmax_share: float = 0.5
    """Step size of the clip factors as a share of that of V."""
    coarse_inputs: float = 2.0
    """Factor of step sizes for layers whose inputs have 4 bits, unless a step size is given: inputs are noisy, and weights that make up for
    it move far."""
    momentum: float = 0.8
    keep: Literal["best", "last"] = "last"
    search_scales: bool = True
    """Begin with searched scales, when there are steps."""
    clip_limit: float = 2.0
    opt_rtn: bool = True
    """Search for scales when there are no steps."""


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "default": Recipe(),
        "best": Recipe(iters=1000, nsamples=512),
        "light": Recipe(iters=50),
        "rtn": Recipe(iters=0, opt_rtn=False),
        "opt-rtn": Recipe(iters=0),
        "auto-round": Recipe(
            largest_lr=1.0, minmax_share=1.0, coarse_inputs=1.0, momentum=0.0, keep="best", search_scales=False, clip_limit=1.0
        ),
    }
)
"""auto-round's recipes by name, with our optimizer settings (docs/log.md: why); `auto-round` is upstream's default to the letter."""


def tune_config(
    recipe: str,
    *,
    iters: int | None,
    lr: float | None,
    minmax_lr: float | None,
    momentum: float | None,
    keep: Literal["best", "last"] | None,
    batch_size: int,
    gradient_accumulate_steps: int,
    minmax_tuning: bool,
    quantized_inputs: bool,
    opt_rtn: bool | None,
    enable_alg_ext: bool,
    nblocks: int,
    seed: int,
) -> TuneConfig:
    """A recipe with the user's values (where not None) on top. Raises `UserError` for an unknown recipe, with the nearest name."""
    if recipe not in RECIPES:
        raise UserError(f"no recipe {recipe!r} (--recipe){nearest(recipe, RECIPES) or '.'} Recipes: {', '.join(RECIPES)}")
    base = RECIPES[recipe]
    steps = base.iters if iters is None else iters
    if opt_rtn is not None and steps:
        flag = f"--{'enable' if opt_rtn else 'disable'}_opt_rtn"
        raise UserError(f"{flag} is for --iters 0 and would change nothing with {steps}; leave it out")
    if enable_alg_ext and not steps:
        raise UserError("--enable_alg_ext is for tuning and would change nothing with --iters 0; leave it out")
    search = base.search_scales or enable_alg_ext if steps else (base.opt_rtn if opt_rtn is None else opt_rtn)
    size = min(1 / max(1, steps), base.largest_lr) if lr is None else lr
    return TuneConfig(
        iters=steps,
        batch_size=batch_size,
        gradient_accumulate_steps=gradient_accumulate_steps,
        lr=size,
        minmax_lr=size * base.minmax_share if minmax_lr is None else minmax_lr,
        coarse_inputs=base.coarse_inputs if lr is None else 1.0,
        momentum=base.momentum if momentum is None else momentum,
        minmax_tuning=minmax_tuning,
        search_scales=search,
        clip_limit=max(base.clip_limit, 2.0) if enable_alg_ext else base.clip_limit,
        keep=base.keep if keep is None else keep,
        quantized_inputs=quantized_inputs,
        nblocks=nblocks,
        seed=seed,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MixConfig:
    """Schemes chosen for each layer under a mean number of bits."""

    avg_bits: float
    """Mean bits of a weight, scales counted, that is never exceeded."""
    options: str
    """Names of the schemes to choose from, with commas between them."""


def mix_config(avg_bits: float | None, options: str | Sequence[str] | None, given: Mapping[str, object]) -> MixConfig | None:
    """What `avg_bits` and `options` ask for; None where neither is there. `given`: the one scheme that was asked for, which contradicts."""
    if avg_bits is None and options is None:
        return None
    if avg_bits is None or options is None:
        raise UserError("--avg_bits and --options go together: a mean number of bits, and the schemes to choose from, such as W2A16,W4A16")
    for name, value in given.items():
        if value is not None:
            flag = {"sym": "--asym", "act_sym": "--act_asym", "act_dynamic": "--disable_act_dynamic"}.get(name, f"--{name} {value}")
            raise UserError(f"{flag} is for one scheme, and --avg_bits chooses among --options; leave it out")
    return MixConfig(avg_bits=avg_bits, options=options if isinstance(options, str) else ",".join(options))


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Which text, and how much of it, is run through the model."""

    dataset: object = None
    """Path, hub name (auto-round's grammar), list of texts or chats, or token tensors; None: NeelNanda/pile-10k."""
    nsamples: int = 128
    seqlen: int = 2048

    def __post_init__(self) -> None:
        _at_least("--nsamples", self.nsamples, 1)
        _at_least("--seqlen", self.seqlen, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputConfig:
    """Where the result goes, in which formats."""

    output_dir: Path
    formats: tuple[str, ...] = ("auto_round",)
    max_shard_size: int = 5 * 10**9
    overwrite: bool = False

    def __post_init__(self) -> None:
        if not self.formats:
            raise UserError("--format is empty; use auto_round, llm_compressor or fake")
        if len(set(self.formats)) != len(self.formats):
            raise UserError(f"--format {','.join(self.formats)} names a format twice")
        _at_least("--max_shard_size", self.max_shard_size, 1)


DeviceWish = str | int | torch.device | Sequence[str | int | torch.device] | Mapping[str, str | int | torch.device]
"""What names devices: see `memory.devices.parse_devices`."""

ComputeDtype = Literal["auto", "float32", "bfloat16", "float16"]
COMPUTE_DTYPES = ("auto", "float32", "bfloat16", "float16")


PLACEMENTS = ("auto", "single", "share", "split", "pipeline", "greedy")
"""Strategies that `--placement` may force; it may also be a map."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceConfig:
    """What computes, and in which precision."""

    device: DeviceWish = "auto"
    compute_dtype: ComputeDtype = "auto"
    placement: str = "auto"
    """One of `PLACEMENTS`, or a JSON object: module → number of a device."""
    low_gpu_mem_usage: bool = False
    """Keep the chained inputs off the devices."""
    output_device: str | None = None
    """`cpu`: only quantized layers are on devices."""
    enable_torch_compile: bool = False

    def __post_init__(self) -> None:
        if self.output_device not in (None, "cpu"):
            raise UserError(f"--output_device {self.output_device!r}: only cpu can be given; where else layers go is for --placement")
        if self.compute_dtype not in COMPUTE_DTYPES:
            hint = nearest(str(self.compute_dtype), COMPUTE_DTYPES)
            raise UserError(f"--compute_dtype {self.compute_dtype!r} is not one of {', '.join(COMPUTE_DTYPES)}{hint}")


def torch_dtype(name: str) -> torch.dtype:
    """`"float32"` → `torch.float32`, for the names of `COMPUTE_DTYPES` but `auto`."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def as_dict(config: object) -> dict[str, object]:
    """A config as plain JSON values, for the record and the fingerprint."""
    fields: dict[str, object] = dataclasses.asdict(config)  # type: ignore[call-overload]
    return {
        key: str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value for key, value in fields.items()
    }
