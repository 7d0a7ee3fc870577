"""Checkpoints as models again, packed ones by our own unpackers.

`UnpackedCheckpoint` looks like a floating point checkpoint whose quantized weights are multiplied out as they are read, so a skeleton over
it, and whatever else reads plain weights, works on packed files, and no other quantizer's package is needed. Float checkpoints are loaded
by transformers, which knows every architecture's renamings. Where a checkpoint quantizes activations, hooks on its linear layers round what
enters them, with the arithmetic that tuning used (`numerics.activations`).

What we gave up: packed models save neither memory nor time here; packed tensors of fused experts are not read yet.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from evenround.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, TensorSpec
from evenround.errors import UserError
from evenround.export import INPUT_LEAVES, StoredInput, StoredWeight, read_inputs, read_schemes
from evenround.manifest import FOLDER
from evenround.model import Skeleton, find_blocks, find_sites, first_line, load_config, map_names, parameters_on_meta, skeleton_from
from evenround.numerics.activations import fake_quantize
from evenround.scheme import ActivationScheme
from evenround.tensorfile import file_size, load_json, read_range

TOKENIZER_FILES = ("*token*", "vocab*", "*.model")


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpackedCheckpoint(Checkpoint):
    """A packed checkpoint that reads like a float one. `specs`, `names` and `read` speak of weights, `homes` and `shards` of the files."""

    packed: Mapping[str, StoredWeight]
    """Tensor name that the weight would have in a float checkpoint → where it lies."""
    transposed: frozenset[str]
    """Those of them that a float checkpoint stores `[in, out]`."""

    def read(self, name: str) -> Tensor:
        """As `Checkpoint.read`; a packed weight comes as float32."""
        if name not in self.packed:
            return Checkpoint.read(self, name)
        weight = self.packed[name].unpack(lambda tensor: Checkpoint.read(self, tensor)).dequantize()
        return weight.t().contiguous() if name in self.transposed else weight


def check_folder(path: Path, flag: str = "") -> None:
    """Raise `UserError` unless `path` is a directory that may be a checkpoint; `flag`: where the path came from, for the message."""
    place = f"{flag} {path}".strip()
    if not path.is_dir():
        raise UserError(f"{place} is not a directory; give a checkpoint directory")
    if any((path / name).is_file() for name in ("config.json", SINGLE_FILE, INDEX_FILE)):
        return
    if (path / FOLDER).is_dir() or ((path.parent / FOLDER).is_dir() and any(path.glob("*.partial"))):
        raise UserError(f"{place} holds an unfinished run; run the command that began it again to finish it")
    folders = sorted(str(folder) for folder in path.iterdir() if (folder / "config.json").is_file())
    if folders:
        raise UserError(f"{place} is no checkpoint itself; give one of the folders in it: {', '.join(folders)}")


def read_config(path: Path) -> dict[str, Any]:
    """config.json in directory `path`, as it stands there. Raises `UserError`."""
    file = path / "config.json"
    config = load_json(file, read_range(file, 0, file_size(file)))
    section = config.get("quantization_config")
    if section is not None and not (isinstance(section, dict) and isinstance(section.get("quant_method"), str)):
        raise UserError(f"{file}: quantization_config must be an object with a quant_method; restore the file")
    return config


def quant_method(config: Mapping[str, Any]) -> str | None:
    """The `quant_method` in a config.json; None when it has no quantization_config."""
    section = config.get("quantization_config")
    return str(section.get("quant_method")) if isinstance(section, Mapping) else None


def empty_model(path: Path, trust_remote_code: bool = False) -> nn.Module:
    """The model of config.json in directory `path` in floating point, whatever its weights are stored in; parameters on the meta device."""
    config = load_config(path, trust_remote_code)
    vars(config).pop("quantization_config", None)
    try:
        with parameters_on_meta():
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    except Exception as error:  # sizes that make no sense fail wherever a constructor meets them
        raise UserError(f"{path}: {first_line(error)}; only causal language models can be loaded") from error
    return model.eval()  # type: ignore[no-any-return]


def tensor_candidates(name: str, model: nn.Module) -> tuple[str, ...]:
    """Names that a checkpoint may give the model's `name`: with and without the base model's prefix (GPT-2 files lack `transformer.`)."""
    prefix = f"{model.base_model_prefix}."
    return tuple(dict.fromkeys((name, name.removeprefix(prefix), prefix + name)))


def linear_modules(model: nn.Module, tensors: Collection[str]) -> dict[str, str]:
    """`{tensor name prefix: module name}` of the model's linear layers; a layer without tensors goes by its own name."""
    prefixes = {name.rpartition(".")[0] for name in tensors}
    modules = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            found = [candidate for candidate in tensor_candidates(name, model) if candidate in prefixes]
            modules.update(dict.fromkeys(found or [name], name))
    return modules


def unpacked_checkpoint(checkpoint: Checkpoint, model: nn.Module, stored: Mapping[str, StoredWeight]) -> UnpackedCheckpoint:
    """`checkpoint` seen as a float one of `model`. Raises `UserError` when a packed weight is not one of the model's linear layers."""
    modules = dict(model.named_modules())
    replaced = {tensor for weight in stored.values() for tensor in weight.tensors}
    specs = {name: spec for name, spec in checkpoint.specs.items() if name not in replaced and name.rpartition(".")[2] not in INPUT_LEAVES}
    packed, transposed = {}, set()
    for name, weight in stored.items():
        module = modules.get(name)
        if not isinstance(module, nn.Linear | Conv1D):
            raise UserError(f"{weight.prefix} is packed, but {name} is no linear layer of {type(model).__name__}; check config.json")
        turned = isinstance(module, Conv1D)
        shape = weight.shape[::-1] if turned else weight.shape
        if shape != tuple(module.weight.shape):
            raise UserError(f"{weight.prefix} holds a weight {list(shape)}, but config.json makes {name} {list(module.weight.shape)}")
        tensor = weight.prefix + ".weight"
        specs[tensor], packed[tensor] = TensorSpec(torch.float32, shape), weight
        if turned:
            transposed.add(tensor)
    return UnpackedCheckpoint(
        directory=checkpoint.directory,
        specs=MappingProxyType(specs),
        shards=checkpoint.shards,
        homes=checkpoint.homes,
        packed=MappingProxyType(packed),
        transposed=frozenset(transposed),
    )


def quantize_inputs(model: nn.Module, inputs: Mapping[str, StoredInput], read: Callable[[str], Tensor]) -> None:
    """From now on the modules that `inputs` names round what enters them. `read` gives the checkpoint's tensors: their calibrated scales.

    Per-tensor dynamic scales are those of the batch at hand, as in every reader.
    """
    for name, wanted in inputs.items():
        model.get_submodule(name).register_forward_pre_hook(_rounding(wanted.scheme, wanted.scale(read)))


def _rounding(scheme: ActivationScheme, scale: Tensor | None) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    def round_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        values, *rest = args
        return fake_quantize(values, scheme, None if scale is None else scale.to(values.device)), *rest

    return round_input


def skeleton_of(model: nn.Module, checkpoint: Checkpoint) -> Skeleton:
    """The skeleton of `model` (from `empty_model`) over float or unpacked weights. Raises `UserError` for missing tensors."""
    names, tied = map_names(model, checkpoint)
    blocks = find_blocks(model)
    sites = find_sites(model, checkpoint, names, blocks)
    config: transformers.PretrainedConfig = model.config  # type: ignore[assignment]
    return Skeleton(model=model, config=config, checkpoint=checkpoint, names=names, tied=tied, block_names=blocks, sites=sites)


def open_model(path: Path, trust_remote_code: bool = False) -> Skeleton:
    """The skeleton of a checkpoint, packed or not, with quantized activations where it has them; reads headers and scales of inputs only.

    Raises `UserError`.
    """
    config, checkpoint = read_config(path), Checkpoint.open(path)
    if not config.get("quantization_config"):
        return skeleton_from(path, checkpoint, trust_remote_code)
    model = empty_model(path, trust_remote_code)
    modules = linear_modules(model, checkpoint.names)
    stored = read_schemes(config, checkpoint.specs, checkpoint.read, modules)
    quantize_inputs(model, read_inputs(config, checkpoint.specs, modules, stored), checkpoint.read)
    return skeleton_of(model, unpacked_checkpoint(checkpoint, model, stored))


def load_model(
    path: Path, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False
) -> tuple[nn.Module, PreTrainedTokenizerBase | None]:
    """The model of a checkpoint directory in `dtype` on the CPU, in evaluation mode, and its tokenizer if it has one.

    Raises `UserError` for a broken or incomplete checkpoint and for quantization methods that cannot be read.
    """
    if read_config(path).get("quantization_config"):
        model = _filled(open_model(path, trust_remote_code), dtype)
        if (path / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    else:
        model = _load_float(path, dtype, trust_remote_code)
    return model.requires_grad_(False).eval(), load_tokenizer(path, trust_remote_code)


def load_tokenizer(path: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """The tokenizer in directory `path`, or None when it has no tokenizer files (transformers would make an empty one up).

    Raises `UserError` with the reason when it has some and they cannot be loaded.
    """
    files = [file.name for file in path.iterdir() if any(fnmatch(file.name, pattern) for pattern in TOKENIZER_FILES)]
    if not files:
        return None
    try:
        with _quiet():
            return transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)  # type: ignore[no-any-return]
    except Exception as error:  # broken files fail wherever a reader meets them, tokenizers with a bare Exception
        told = type(error) is Exception or isinstance(error, ValueError | OSError | ImportError)
        reason = " ".join(f"{'' if told else type(error).__name__ + ': '}{error}".split())
        fix = "copy the original's tokenizer files there"
        if "tokenizer.json" not in files and any(file.endswith(".model") for file in files):
            fix = "a .model file needs `pip install sentencepiece protobuf`, or copy a tokenizer.json there"
        raise UserError(f"the tokenizer in {path} cannot be loaded: {reason[:500]}; {fix}") from error


def _load_float(path: Path, dtype: torch.dtype, trust_remote_code: bool) -> nn.Module:
    Checkpoint.open(path)
    load_config(path, trust_remote_code)
    try:
        with _quiet():
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
            )
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        raise UserError(f"{path} cannot be loaded: {str(error).strip().splitlines()[0]}; check config.json") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(f"{path} has no tensor for {', '.join(missing[:5])}; it is incomplete, or not of the architecture in config.json")
    return model  # type: ignore[no-any-return]


def _filled(skeleton: Skeleton, dtype: torch.dtype) -> nn.Module:
    """The skeleton's model with all its weights in `dtype`, for good."""
    with skeleton.materialized([""], dtype):
        kept = [(module, dict(module._parameters), dict(module._buffers)) for module in skeleton.model.modules()]
    for module, parameters, buffers in kept:
        module._parameters.update(parameters)
        module._buffers.update(buffers)
    return skeleton.model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers without progress bars and with errors only."""
    verbosity, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()
