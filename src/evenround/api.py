"""The Python front door: `quantize(...)`, `plan(...)`, and `AutoRound(...)` for those who come from auto-round.

All build the same `Job` as the command line; there is no other way in.
"""

import functools
import inspect
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import transformers
from torch import nn

from evenround.checkpoint import parse_size
from evenround.config import RECIPES, ComputeDtype, DataConfig, DeviceConfig, DeviceWish, OutputConfig, mix_config, tune_config
from evenround.errors import UserError, nearest
from evenround.job import Job, Progress, plan_job
from evenround.pipeline import run
from evenround.rules import Override, SchemeRules, parse_layer_config
from evenround.scheme import DEFAULT, FLOATING, Scheme, preset


def scheme_from(scheme: str | Scheme, fields: Mapping[str, object]) -> Scheme:
    """A preset name or a Scheme, with the fields that are not None (auto-round's names) set on top."""
    base = scheme if isinstance(scheme, Scheme) else preset(scheme)
    given = {key: value for key, value in fields.items() if value is not None}
    if given.get("act_bits") == FLOATING and any(key.startswith("act_") and key != "act_bits" for key in given):
        raise UserError("--act_bits 16 leaves activations alone, and other --act_ flags say how they are quantized; leave these out")
    return Scheme.from_dict(given, base)


def request(
    model: str | Path,
    output_dir: str | Path = "./tmp_autoround",
    *,
    scheme: str | Scheme | None = None,
    bits: int | None = None,
    group_size: int | str | tuple[int, int] | None = None,
    sym: bool | None = None,
    data_type: str | None = None,
    act_bits: int | None = None,
    act_group_size: int | None = None,
    act_sym: bool | None = None,
    act_data_type: str | None = None,
    act_dynamic: bool | None = None,
    avg_bits: float | None = None,
    options: str | Sequence[str] | None = None,
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
    opt_rtn: bool | None = None,
    enable_alg_ext: bool = False,
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

    Arguments are auto-round's; `scheme` is W4A16 unless `avg_bits` and `options` are given; `recipe` gives those that are None
    (`auto-round`: upstream's own optimizer). `placement` forces a strategy, or maps modules to numbers of devices. Raises `UserError` for
    any wrong input, with what to do next.
    """
    fields = {
        "bits": bits,
        "group_size": group_size,
        "sym": sym,
        "data_type": data_type,
        "act_bits": act_bits,
        "act_group_size": act_group_size,
        "act_sym": act_sym,
        "act_data_type": act_data_type,
        "act_dynamic": act_dynamic,
    }
    job = Job(
        model=str(model),
        label=label,
        rules=SchemeRules(
            default=scheme_from(scheme or DEFAULT, fields),
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
            opt_rtn=opt_rtn,
            enable_alg_ext=enable_alg_ext,
            nblocks=nblocks,
            seed=seed,
        ),
        mix=mix_config(avg_bits, options, {"scheme": scheme, **fields}),
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
    streams from disk). `settings`: arguments of `request`; unknown ones raise `TypeError`, auto-round drops them.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        tokenizer: transformers.PreTrainedTokenizerBase | None = None,
        scheme: str | Scheme | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(model, nn.Module) and tokenizer is None:
            raise UserError("AutoRound(model=<module>) needs tokenizer=: the checkpoint is saved with it")
        allowed = inspect.signature(request).parameters.keys() - AT_SAVING
        for name in settings:
            if name not in allowed:
                raise TypeError(f"AutoRound() has no argument {name!r}{nearest(name, sorted(allowed))}")
        self._model, self._tokenizer = model, tokenizer
        self._settings = {"scheme": scheme, **settings}

    def quantize_and_save(
        self,
        output_dir: str | Path = "tmp_autoround",
        format: str | Sequence[str] = "auto_round",
        *,
        max_shard_size: int | str = "5GB",
        overwrite: bool = False,
    ) -> dict[str, object]:
        """Quantize and write `output_dir` (one folder a format if there are several); returns the run record."""
        where: dict[str, Any] = {"format": format, "max_shard_size": max_shard_size, "overwrite": overwrite}
        model = self._model
        if not isinstance(model, nn.Module):
            return quantize(model, output_dir, **self._settings, **where)
        with tempfile.TemporaryDirectory(prefix="evenround-") as folder:
            model.save_pretrained(folder)  # type: ignore[operator]
            assert self._tokenizer is not None
            self._tokenizer.save_pretrained(folder)
            label = str(model.config.name_or_path or type(model).__name__)  # type: ignore[union-attr]
            return quantize(folder, output_dir, **self._settings, **where, label=label)


AT_SAVING = {"model", "scheme", "output_dir", "format", "max_shard_size", "overwrite", "label", "progress"}
"""Arguments of `request` that are not settings of `AutoRound`."""
