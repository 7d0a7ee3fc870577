"""A model as a meta skeleton, its decoder blocks, the weights to quantize in them, and one block at a time in memory.

The skeleton is built from config.json alone: every parameter lives on the meta device, buffers that the constructor computes (rotary
frequencies) are real. `Skeleton.materialized` fills the parameters under some modules from the checkpoint and empties them on exit, so host
memory holds one block group whatever the model's depth.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from evenround.checkpoint import Checkpoint, TensorSpec
from evenround.errors import UserError

Reader = Callable[[str], Tensor]
"""Name of a tensor of the checkpoint → the tensor, in host memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """One weight to quantize, seen as `[out, in]`."""

    name: str
    """Fully qualified module name, e.g. `model.layers.0.self_attn.q_proj`."""
    checkpoint_name: str
    """Its tensor in the source checkpoint."""
    shape: tuple[int, int]
    """(out, in)."""
    transposed: bool
    """Stored `[in, out]` in module and checkpoint (GPT-2's Conv1D)."""
    block: int | None
    """Number of its decoder block; None for the output head."""
    is_head: bool
    dtype: torch.dtype
    """In the source checkpoint."""
    has_bias: bool

    @property
    def parameter(self) -> str:
        """Fully qualified parameter name in the module tree."""
        return self.name + ".weight"


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A causal language model without weights, tied to the checkpoint that has them."""

    model: transformers.PreTrainedModel
    config: transformers.PretrainedConfig
    checkpoint: Checkpoint
    names: Mapping[str, str]
    """Parameter or persistent buffer of the module tree → tensor of the checkpoint."""
    tied: Mapping[str, str]
    """Tied parameter without a tensor of its own → the parameter that it shares."""
    block_names: tuple[str, ...]
    sites: tuple[Site, ...]
    """Every quantizable weight of every block in order, then the output head."""

    def block(self, number: int) -> nn.Module:
        """Decoder block `number`."""
        return self.model.get_submodule(self.block_names[number])

    @property
    def unknown_tensors(self) -> tuple[str, ...]:
        """Tensors of the checkpoint that the model class does not know; exports copy them through."""
        known = set(self.names.values())
        return tuple(name for name in self.checkpoint.names if name not in known)

    @contextlib.contextmanager
    def materialized(
        self,
        prefixes: Sequence[str],
        dtype: torch.dtype,
        home: Callable[[str], torch.device] = lambda name: torch.device("cpu"),
        read: Reader | None = None,
    ) -> Iterator[None]:
        """Parameters and persistent buffers under `prefixes` hold the checkpoint's values in `dtype`, until the context ends.

        home: name in the module tree → device. read: gives a tensor of the checkpoint; a plan reads none and makes them up.
        Raises `UserError` naming the tensor when the checkpoint lacks one or its shape is not the model's.
        """
        read = read or self.read
        filled: list[tuple[nn.Module, str, Tensor | nn.Parameter, bool]] = []
        try:
            by_tensor: dict[str, nn.Parameter] = {}
            for full_name in [name for name in self.model.state_dict() if any(under(name, prefix) for prefix in prefixes)]:
                path, _, leaf = full_name.rpartition(".")
                owner = self.model.get_submodule(path)
                is_parameter = leaf in owner._parameters
                before = owner._parameters[leaf] if is_parameter else owner._buffers[leaf]
                assert before is not None
                tensor_name = self._tensor_name(full_name)
                if tensor_name not in by_tensor:
                    by_tensor[tensor_name] = self._load(read, tensor_name, full_name, before, dtype, home(full_name))
                filled.append((owner, leaf, before, is_parameter))
                if is_parameter:
                    owner._parameters[leaf] = by_tensor[tensor_name]
                else:
                    owner._buffers[leaf] = by_tensor[tensor_name].data.to(before.dtype)
            filled += self._move_computed_buffers(prefixes, {(id(owner), leaf) for owner, leaf, _, _ in filled}, home)
            yield
        finally:
            for owner, leaf, before, is_parameter in filled:
                (owner._parameters if is_parameter else owner._buffers)[leaf] = before  # type: ignore[assignment]

    def _move_computed_buffers(
        self, prefixes: Sequence[str], done: Collection[tuple[int, str]], home: Callable[[str], torch.device]
    ) -> list[tuple[nn.Module, str, Tensor | nn.Parameter, bool]]:
        """Buffers that no checkpoint holds (causal masks, frequencies) go where the weights are; returns what to put back."""
        moved: list[tuple[nn.Module, str, Tensor | nn.Parameter, bool]] = []
        for path, owner in self.model.named_modules():
            for leaf, buffer in list(owner._buffers.items()):
                name = f"{path}.{leaf}".removeprefix(".")
                if buffer is not None and (id(owner), leaf) not in done and any(under(name, prefix) for prefix in prefixes):
                    moved.append((owner, leaf, buffer, False))
                    owner._buffers[leaf] = buffer.to(home(name))
        return moved

    def _tensor_name(self, full_name: str) -> str:
        name = self.names.get(self.tied.get(full_name, full_name))
        if name is None:
            raise _no_tensor(full_name)
        return name

    def read(self, name: str) -> Tensor:
        """A tensor of the checkpoint. Raises `UserError` when it holds NaN or infinite values."""
        tensor = self.checkpoint.read(name)
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            raise UserError(f"{name} holds {bad} NaN or infinite value(s): the checkpoint is damaged; get it anew")
        return tensor

    @staticmethod
    def _load(read: "Reader", tensor_name: str, full_name: str, like: Tensor, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
        tensor = read(tensor_name)
        if tensor.shape != like.shape:
            raise UserError(f"{tensor_name} has shape {list(tensor.shape)}, but config.json makes {full_name} {list(like.shape)}")
        return nn.Parameter(tensor.to(device=device, dtype=dtype) if tensor.is_floating_point() else tensor.to(device), requires_grad=False)


def _no_tensor(name: str) -> UserError:
    save = "save_pretrained('NEW_DIR', save_original_format=False)"
    return UserError(
        f"the checkpoint has no tensor for {name}; it is incomplete, or not of the architecture in config.json, or transformers renames "
        f"its tensors as it loads them: then load it with transformers, write it with {save} and quantize NEW_DIR"
    )


def under(name: str, prefix: str) -> bool:
    """Whether `name` is `prefix` or lies below it in the module tree."""
    return prefix in ("", name) or name.startswith(prefix + ".")


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters registered inside go to the meta device; buffers stay real, because constructors compute their values."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.data.to("meta"), requires_grad=False)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def load_config(source: Path, trust_remote_code: bool = False) -> transformers.PretrainedConfig:
    """config.json of a model directory. Raises `UserError` when it is missing, unreadable or of an unknown architecture."""
    if not (source / "config.json").is_file():
        raise UserError(f"{source} has no config.json: give a transformers model directory")
    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # each configuration class checks its fields in its own way, or not at all
        raise UserError(f"{source / 'config.json'} cannot be used: {first_line(error)}") from error
    return config


def first_line(error: Exception) -> str:
    """What an exception says, on one line; its type when it says little."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2]) if lines and lines[0].endswith(":") else (lines or [""])[0]
    return text if isinstance(error, ValueError | OSError) and text else f"{type(error).__name__}: {text}"


def max_length(config: transformers.PretrainedConfig) -> int | None:
    """Tokens that a model takes at most, as its config says; None when it does not say."""
    text = config.get_text_config()
    name = text.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    found = text.to_dict().get(name)
    return found if isinstance(found, int) and found > 1 else None


def skeleton_from(source: Path, checkpoint: Checkpoint, trust_remote_code: bool = False) -> Skeleton:
    """Build the skeleton of the model in `source`. Reads config.json and safetensors headers, no weights."""
    model = _without_weights(source, trust_remote_code)
    names, tied = map_names(model, checkpoint)
    block_names = find_blocks(model)
    sites = find_sites(model, checkpoint, names, block_names)
    return Skeleton(model=model, config=model.config, checkpoint=checkpoint, names=names, tied=tied, block_names=block_names, sites=sites)


def skeleton_from_config(source: Path, trust_remote_code: bool = False) -> Skeleton:
    """The skeleton of a model of which only config.json is there, with a checkpoint that has the tensors' specs and no values."""
    config = load_config(source, trust_remote_code)
    dtype = config.get_text_config().dtype or config.dtype or torch.bfloat16  # building the model in float32 changes its config
    model = _without_weights(source, trust_remote_code)
    tied = model.all_tied_weights_keys
    specs = {name: TensorSpec(dtype, tuple(tensor.shape)) for name, tensor in model.state_dict().items() if name not in tied}
    checkpoint = Checkpoint(directory=source, specs=specs, shards=(), homes={})
    names, shared = map_names(model, checkpoint)
    block_names = find_blocks(model)
    sites = find_sites(model, checkpoint, names, block_names)
    return Skeleton(model=model, config=model.config, checkpoint=checkpoint, names=names, tied=shared, block_names=block_names, sites=sites)


def _without_weights(source: Path, trust_remote_code: bool) -> transformers.PreTrainedModel:
    config = load_config(source, trust_remote_code)
    if config.to_dict().get("quantization_config"):
        method = config.to_dict()["quantization_config"].get("quant_method", "unknown")
        raise UserError(f"{source} is quantized already (quant_method {method!r}); start from the floating point model")
    try:
        with parameters_on_meta():
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    except Exception as error:  # sizes that make no sense fail wherever a constructor meets them
        raise UserError(f"{source}: {first_line(error)}; only causal language models with a sound config.json can be quantized") from error
    model.eval()
    return model


def map_names(model: transformers.PreTrainedModel, checkpoint: Checkpoint) -> tuple[dict[str, str], dict[str, str]]:
    """Module tree ↔ checkpoint: the same name, or with the base model's prefix added or taken away (GPT-2 files lack `transformer.`)."""
    prefix = model.base_model_prefix + "."
    there = set(checkpoint.names)
    tied = dict(model.all_tied_weights_keys)
    names: dict[str, str] = {}
    for name in model.state_dict():
        candidates = (name, name.removeprefix(prefix), prefix + name)
        found = next((candidate for candidate in candidates if candidate in there), None)
        if found is not None:
            names[name] = found
    return names, {target: source for target, source in tied.items() if target not in names and source in names}


def find_blocks(model: transformers.PreTrainedModel) -> tuple[str, ...]:
    """Names of the decoder blocks: the longest ModuleList of the modules that transformers must not split over devices."""
    no_split = set(model._no_split_modules or ())  # type: ignore[union-attr, arg-type]
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)]
    decoder = [(name, blocks) for name, blocks in lists if type(blocks[0]).__name__ in no_split] or lists
    if not decoder:
        raise UserError(f"{type(model).__name__} has no list of decoder blocks to tune one after another")
    name, blocks = max(decoder, key=lambda item: len(item[1]))
    return tuple(f"{name}.{number}" for number in range(len(blocks)))


def find_sites(
    model: transformers.PreTrainedModel, checkpoint: Checkpoint, names: Mapping[str, str], block_names: Sequence[str]
) -> tuple[Site, ...]:
    """Every linear weight of the blocks in order, then the head. Raises `UserError` for fused experts and for weights not in the file."""
    sites = []
    for number, block_name in enumerate(block_names):
        block = model.get_submodule(block_name)
        kernels = {f"{name}.weight" for name, module in block.named_modules() if isinstance(module, nn.Conv1d)}  # short convolutions stay
        for name, parameter in block.named_parameters():
            if parameter.ndim > 2 and name not in kernels:
                raise UserError(
                    f"{block_name}.{name} has {parameter.ndim} dimensions {list(parameter.shape)}: such weights (fused experts of "
                    "mixture-of-experts models, recurrent layers) are not supported yet"
                )
        for name, module in block.named_modules(prefix=block_name):
            if isinstance(module, (nn.Linear, Conv1D)):
                sites.append(_site(name, module, checkpoint, names, number))
    head = model.get_output_embeddings()  # type: ignore[operator]
    if isinstance(head, nn.Linear):
        name = next(name for name, module in model.named_modules() if module is head)
        sites.append(_site(name, head, checkpoint, {**names, **_tied_head(model, name, names)}, None))
    return tuple(sites)


def _tied_head(model: transformers.PreTrainedModel, head: str, names: Mapping[str, str]) -> dict[str, str]:
    parameter = head + ".weight"
    source = model.all_tied_weights_keys.get(parameter)  # type: ignore[union-attr, operator]
    return {} if parameter in names or source not in names else {parameter: names[source]}


def _site(name: str, module: nn.Linear | Conv1D, checkpoint: Checkpoint, names: Mapping[str, str], block: int | None) -> Site:
    parameter = name + ".weight"
    if parameter not in names:
        raise _no_tensor(parameter)
    transposed = isinstance(module, Conv1D)
    rows, columns = module.weight.shape
    return Site(
        name=name,
        checkpoint_name=names[parameter],
        shape=(columns, rows) if transposed else (rows, columns),
        transposed=transposed,
        block=block,
        is_head=block is None,
        dtype=checkpoint.specs[names[parameter]].dtype,
        has_bias=module.bias is not None,
    )


def structure(root: nn.Module) -> object:
    """Types, shapes and settings of a module and all below it; equal for blocks that only their number tells apart."""
    found = []
    for path, module in root.named_modules():
        settings = {key: value for key, value in vars(module).items() if not key.startswith("_") and key not in ("layer_idx", "training")}
        plain = tuple((key, value) for key, value in settings.items() if isinstance(value, bool | int | float | str | None))
        tensors = [*module._parameters.items(), *module._buffers.items()]
        shapes = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors if tensor is not None)
        found.append((path, type(module).__name__, plain, shapes))
    return tuple(found)
