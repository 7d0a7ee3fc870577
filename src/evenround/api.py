"""The Python front door: `quantize(...)`, `plan(...)`, and `AutoRound(...)` for those who come from auto-round.

All build the same `Job` as the command line; there is no other way in.
"""

import functools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

import transformers
from torch import nn

from evenround.checkpoint import parse_size
from evenround.config import RECIPES, ComputeDtype, DataConfig, DeviceConfig, DeviceWish, OutputConfig, tune_config
from evenround.errors import UserError
from evenround.job import Job, Progress, plan_job
from evenround.pipeline import run
from evenround.scheme import Override, Scheme, SchemeRules, parse_layer_config, preset


def scheme_from(scheme: str | Scheme, *, bits: int | None = None, group_size: int | None = None, sym: bool | None = None) -> Scheme:
    """A preset name or a Scheme, with single fields set on top."""
    base = scheme if isinstance(scheme, Scheme) else preset(scheme)
    fields = {"bits": bits, "group_size": group_size, "sym": sym}
    return Scheme.from_dict({key: value for key, value in fields.items() if value is not None}, base)


def request(
    model: str | Path,
    output_dir: str | Path = "./tmp_autoround",
    *,
    scheme: str | Scheme = "W4A16",
    bits: int | None = None,
    group_size: int | None = None,
    sym: bool | None = None,
    layer_config: str | Mapping[str, Override] | None = None,
    ignore_layers: str | Sequence[str] = (),
    quant_lm_head: bool = False,
    recipe: str = "default",
    iters: int | None = None,
    nsamples: int | None = None,
    seqlen: int = 2048,
    batch_size: int = 8,
    gradient_accumulate_steps: int = 1,
    lr: float | None = None,
    minmax_lr: float | None = None,
    momentum: float | None = None,
    keep: Literal["best", "last"] | None = None,
    enable_minmax_tuning: bool = True,
    enable_quanted_input: bool = True,
    nblocks: int = 1,
    dataset: object = None,
    seed: int = 42,
    format: str | Sequence[str] = "auto_round",
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    device_map: DeviceWish = "auto",
    compute_dtype: ComputeDtype = "auto",
    placement: str | Mapping[str, int | str] = "auto",
    low_gpu_mem_usage: bool = False,
    output_device: str | None = None,
    enable_torch_compile: bool = False,
    trust_remote_code: bool = False,
    label: str | None = None,
    progress: Progress | None = None,
) -> tuple[Job, Progress | None]:
    """What `quantize` and `plan` are asked for.

    Arguments are auto-round's; `recipe` gives those that are None (`auto-round`: upstream's own optimizer). `placement` forces a strategy,
    or maps modules to numbers of devices. Raises `UserError` for any wrong input, with what to do next.
    """
    job = Job(
        model=str(model),
        label=label,
        rules=SchemeRules(
            default=scheme_from(scheme, bits=bits, group_size=group_size, sym=sym),
            ignore_layers=_names(ignore_layers),
            layer_config=parse_layer_config(layer_config) if isinstance(layer_config, str) else dict(layer_config or {}),
            quant_lm_head=quant_lm_head,
        ),
        tune=tune_config(
            recipe,
            iters=iters,
            lr=lr,
            minmax_lr=minmax_lr,
            momentum=momentum,
            keep=keep,
            batch_size=batch_size,
            gradient_accumulate_steps=gradient_accumulate_steps,
            minmax_tuning=enable_minmax_tuning,
            quantized_inputs=enable_quanted_input,
            nblocks=nblocks,
            seed=seed,
        ),
        data=DataConfig(dataset=dataset, nsamples=RECIPES[recipe].nsamples if nsamples is None else nsamples, seqlen=seqlen),
        output=_output(output_dir, format, max_shard_size, overwrite),
        device=DeviceConfig(
            device=device_map,
            compute_dtype=compute_dtype,
            placement=placement if isinstance(placement, str) else json.dumps(dict(placement)),
            low_gpu_mem_usage=low_gpu_mem_usage,
            output_device=output_device,
            enable_torch_compile=enable_torch_compile,
        ),
        trust_remote_code=trust_remote_code,
    )
    return job, progress


def _output(output_dir: str | Path, format: str | Sequence[str], max_shard_size: int | str, overwrite: bool) -> OutputConfig:
    return OutputConfig(output_dir=Path(output_dir), formats=_names(format), max_shard_size=parse_size(max_shard_size), overwrite=overwrite)


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _asked(
    ask: Callable[Arguments, tuple[Job, Progress | None]], do: Callable[[Job, Progress | None], Result], name: str, text: str
) -> Callable[Arguments, Result]:
    """`do` what `ask` was asked for, with the arguments of `ask`."""

    @functools.wraps(ask)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return do(*ask(*args, **kwargs))

    call.__name__ = call.__qualname__ = name
    call.__doc__ = text
    return call


quantize = _asked(
    request,
    run,
    "quantize",
    """Quantize the model in directory `model` (or of that hub id) into `output_dir`; returns the run record.

    Arguments are those of `request`. Running the same call again after an interruption goes on; other settings are refused unless
    `overwrite`. Raises `UserError` for any wrong input, with what to do next, and when no plan fits the devices.
    """,
)

plan = _asked(
    request,
    plan_job,
    "plan",
    """The memory plan of `quantize` with the same arguments: what goes where, to the byte.

    Reads config.json (`model` may be one) and headers of weights, if there are any; writes nothing.

    `device_map` may name devices that are not here, with their memory: `4x80GiB`, `cuda:0=70GiB,cuda:1=24GiB`.
    """,
)


def _names(value: str | Sequence[str]) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(part.strip() for part in parts if part.strip())


class AutoRound:
    """auto-round's constructor and `quantize_and_save`, on Evenround's core.

    `model`: a directory or hub id, or a float transformers model in memory, which is saved to a temporary directory first (the job itself
    streams from disk). Unknown arguments raise `TypeError`; auto-round drops them.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        tokenizer: transformers.PreTrainedTokenizerBase | None = None,
        scheme: str | Scheme = "W4A16",
        *,
        bits: int | None = None,
        group_size: int | None = None,
        sym: bool | None = None,
        layer_config: str | Mapping[str, Override] | None = None,
        ignore_layers: str | Sequence[str] = (),
        quant_lm_head: bool = False,
        dataset: object = None,
        recipe: str = "default",
        iters: int | None = None,
        seqlen: int = 2048,
        nsamples: int | None = None,
        batch_size: int = 8,
        gradient_accumulate_steps: int = 1,
        lr: float | None = None,
        minmax_lr: float | None = None,
        momentum: float | None = None,
        keep: Literal["best", "last"] | None = None,
        enable_minmax_tuning: bool = True,
        enable_quanted_input: bool = True,
        nblocks: int = 1,
        device_map: DeviceWish = "auto",
        placement: str | Mapping[str, int | str] = "auto",
        low_gpu_mem_usage: bool = False,
        output_device: str | None = None,
        enable_torch_compile: bool = False,
        seed: int = 42,
        trust_remote_code: bool = False,
    ) -> None:
        if isinstance(model, nn.Module) and tokenizer is None:
            raise UserError("AutoRound(model=<module>) needs tokenizer=: the checkpoint is saved with it")
        self._model, self._tokenizer = model, tokenizer
        self._quantize = functools.partial(
            quantize,
            scheme=scheme,
            bits=bits,
            group_size=group_size,
            sym=sym,
            layer_config=layer_config,
            ignore_layers=ignore_layers,
            quant_lm_head=quant_lm_head,
            dataset=dataset,
            recipe=recipe,
            iters=iters,
            seqlen=seqlen,
            nsamples=nsamples,
            batch_size=batch_size,
            gradient_accumulate_steps=gradient_accumulate_steps,
            lr=lr,
            minmax_lr=minmax_lr,
            momentum=momentum,
            keep=keep,
            enable_minmax_tuning=enable_minmax_tuning,
            enable_quanted_input=enable_quanted_input,
            nblocks=nblocks,
            device_map=device_map,
            placement=placement if isinstance(placement, str) else json.dumps(dict(placement)),
            low_gpu_mem_usage=low_gpu_mem_usage,
            output_device=output_device,
            enable_torch_compile=enable_torch_compile,
            seed=seed,
            trust_remote_code=trust_remote_code,
        )

    def quantize_and_save(
        self,
        output_dir: str | Path = "tmp_autoround",
        format: str | Sequence[str] = "auto_round",
        *,
        max_shard_size: int | str = "5GB",
        overwrite: bool = False,
    ) -> dict[str, object]:
        """Quantize and write `output_dir` (one folder a format if there are several); returns the run record."""
        run_on = functools.partial(self._quantize, output_dir=output_dir, format=format, max_shard_size=max_shard_size, overwrite=overwrite)
        model = self._model
        if not isinstance(model, nn.Module):
            return run_on(model)
        with tempfile.TemporaryDirectory(prefix="evenround-") as folder:
            model.save_pretrained(folder)  # type: ignore[operator]
            assert self._tokenizer is not None
            self._tokenizer.save_pretrained(folder)
            return run_on(folder, label=model.config.name_or_path or type(model).__name__)  # type: ignore[union-attr]
