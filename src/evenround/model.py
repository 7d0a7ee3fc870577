"""A model as a meta skeleton, its decoder blocks, the weights to quantize in them, and one block at a time in memory.

The skeleton is built from config.json alone: every parameter lives on the meta device, buffers that the constructor computes (rotary
frequencies) are real. `Skeleton.materialized` fills the parameters under some modules from the checkpoint and empties them on exit, so host
memory holds one block group whatever the model's depth.

How each block is called is *observed*, not assumed: the base model's own forward runs once with every block replaced by a recorder that
hands its input on. Masks, rotary embeddings and per-layer switches (sliding against full attention, local rope) are then right for any
architecture whose block arguments do not depend on other blocks' outputs. What we give up: architectures with such cross-block arguments.
"""

import contextlib
import copy
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.pytorch_utils import Conv1D

from evenround.checkpoint import Checkpoint
from evenround.errors import UserError


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
    def materialized(self, prefixes: Sequence[str], dtype: torch.dtype, device: torch.device | str = "cpu") -> Iterator[None]:
        """Parameters and persistent buffers under `prefixes` hold the checkpoint's values in `dtype`, until the context ends.

        Raises `UserError` naming the tensor when the checkpoint lacks one or its shape is not the model's.
        """
        filled: list[tuple[nn.Module, str, Tensor | nn.Parameter, bool]] = []
        try:
            by_tensor: dict[str, nn.Parameter] = {}
            for full_name in [name for name in self.model.state_dict() if any(_under(name, prefix) for prefix in prefixes)]:
                path, _, leaf = full_name.rpartition(".")
                owner = self.model.get_submodule(path)
                is_parameter = leaf in owner._parameters
                before = owner._parameters[leaf] if is_parameter else owner._buffers[leaf]
                assert before is not None
                tensor_name = self._tensor_name(full_name)
                if tensor_name not in by_tensor:
                    by_tensor[tensor_name] = self._read(tensor_name, full_name, before, dtype, device)
                filled.append((owner, leaf, before, is_parameter))
                if is_parameter:
                    owner._parameters[leaf] = by_tensor[tensor_name]
                else:
                    owner._buffers[leaf] = by_tensor[tensor_name].data.to(before.dtype)
            filled += self._move_computed_buffers(prefixes, {(id(owner), leaf) for owner, leaf, _, _ in filled}, device)
            yield
        finally:
            for owner, leaf, before, is_parameter in filled:
                (owner._parameters if is_parameter else owner._buffers)[leaf] = before  # type: ignore[assignment]

    def _move_computed_buffers(
        self, prefixes: Sequence[str], done: Collection[tuple[int, str]], device: torch.device | str
    ) -> list[tuple[nn.Module, str, Tensor | nn.Parameter, bool]]:
        """Buffers that no checkpoint holds (causal masks, frequencies) go where the weights are; returns what to put back."""
        moved: list[tuple[nn.Module, str, Tensor | nn.Parameter, bool]] = []
        for path, owner in self.model.named_modules():
            for leaf, buffer in list(owner._buffers.items()):
                name = f"{path}.{leaf}".removeprefix(".")
                if buffer is not None and (id(owner), leaf) not in done and any(_under(name, prefix) for prefix in prefixes):
                    moved.append((owner, leaf, buffer, False))
                    owner._buffers[leaf] = buffer.to(device)
        return moved

    def _tensor_name(self, full_name: str) -> str:
        name = self.names.get(self.tied.get(full_name, full_name))
        if name is None:
            raise _no_tensor(full_name)
        return name

    def _read(self, tensor_name: str, full_name: str, like: Tensor, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
        tensor = self.checkpoint.read(tensor_name)
        if tensor.shape != like.shape:
            raise UserError(f"{tensor_name} has shape {list(tensor.shape)}, but config.json makes {full_name} {list(like.shape)}")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            raise UserError(f"{tensor_name} holds {bad} NaN or infinite value(s): the checkpoint is damaged; get it anew")
        return nn.Parameter(tensor.to(device=device, dtype=dtype) if tensor.is_floating_point() else tensor.to(device), requires_grad=False)


def _no_tensor(name: str) -> UserError:
    save = "save_pretrained('NEW_DIR', save_original_format=False)"
    return UserError(
        f"the checkpoint has no tensor for {name}; it is incomplete, or not of the architecture in config.json, or transformers renames "
        f"its tensors as it loads them: then load it with transformers, write it with {save} and quantize NEW_DIR"
    )


def _under(name: str, prefix: str) -> bool:
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
    names, tied = map_names(model, checkpoint)
    block_names = find_blocks(model)
    sites = find_sites(model, checkpoint, names, block_names)
    return Skeleton(model=model, config=config, checkpoint=checkpoint, names=names, tied=tied, block_names=block_names, sites=sites)


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


# ---------------------------------------------------------------------------------------------------------------------------------------
# How blocks are called


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor among a block's arguments. `rows_per_sample` 0: the same for every batch; else dim 0 grows with the batch."""

    values: Tensor
    rows_per_sample: int
    distinct: bool
    """True: `values` has `rows_per_sample` rows for each calibration sample; False: all samples share these rows."""

    def select(self, samples: Tensor, device: torch.device) -> Tensor:
        if self.rows_per_sample == 0:
            return self.values.to(device)
        if not self.distinct:
            return self.values.to(device).repeat(len(samples), *[1] * (self.values.ndim - 1))
        rows = self.values.unflatten(0, (-1, self.rows_per_sample))[samples.to(self.values.device)]
        return rows.flatten(0, 1).to(device)


@dataclass(frozen=True, slots=True)
class BlockCall:
    """How one decoder block is called, apart from its weights and hidden states."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    hidden_key: str | None
    """Name of the hidden-states argument when it is passed by name; None: the first positional."""
    returns_tuple: bool

    def run(self, block: Callable[..., object], hidden: Tensor, samples: Tensor) -> Tensor:
        """Output `[batch, tokens, hidden]` of `block` for hidden states of the calibration samples numbered `samples` `[batch]`."""

        def fill(leaf: object) -> object:
            return leaf.select(samples, hidden.device) if isinstance(leaf, _Leaf) else leaf

        args, kwargs = pytree.tree_map(fill, (self.args, dict(self.kwargs)), is_leaf=lambda node: isinstance(node, _Leaf))
        output = _call_block(block, hidden, self.hidden_key, args, kwargs)
        return output[0] if self.returns_tuple else output  # type: ignore[index, return-value]


@dataclass(slots=True)
class _Recorded:
    hidden: Tensor
    args: tuple[object, ...]
    kwargs: dict[str, object]
    hidden_key: str | None
    returns_tuple: bool


@contextlib.contextmanager
def recording(skeleton: Skeleton, replace: Tensor | None = None) -> Iterator[list[_Recorded]]:
    """Blocks record their arguments and hand their input on; with `replace`, the last block gives that instead."""
    records: list[_Recorded] = []
    last = len(skeleton.block_names) - 1
    blocks = [skeleton.block(number) for number in range(last + 1)]

    def recorder(number: int, block: nn.Module, forward: Callable[..., object]) -> Callable[..., object]:
        def record(*args: object, **kwargs: object) -> object:
            key = None if args else "hidden_states"
            hidden = args[0] if args else kwargs.pop("hidden_states")
            assert isinstance(hidden, Tensor)
            rest = args[1:]
            known = bool(records) and not _handed_on((args, kwargs))  # where blocks hand state on, each is asked whether it needs any
            as_tuple = records[0].returns_tuple if known else _gives_tuple(block, forward, rest, kwargs, hidden, key)
            records.append(_Recorded(hidden, rest, kwargs, key, as_tuple))
            output = replace if replace is not None and number == last else hidden
            return (output,) if as_tuple else output

        return record

    try:
        for number, block in enumerate(blocks):
            block.forward = recorder(number, block, block.forward)
        yield records
    finally:
        for block in blocks:
            del block.forward


def _gives_tuple(block: nn.Module, forward: Callable[..., object], args: tuple, kwargs: dict, hidden: Tensor, key: str | None) -> bool:
    """Run the block's own forward on meta tensors, to see whether it returns a tensor or a tuple."""

    def to_meta(leaf: object) -> object:
        return leaf.to("meta") if isinstance(leaf, Tensor) else leaf

    with _buffers_on_meta(block), torch.no_grad():
        meta_args, meta_kwargs = pytree.tree_map(to_meta, (args, kwargs))
        return isinstance(_call_block(forward, hidden.to("meta"), key, meta_args, meta_kwargs), tuple | list)


def _handed_on(arguments: object) -> list[MutableMapping]:
    """Mappings among a block's arguments through which blocks hand each other state, such as keys and values that layers share."""
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, MutableMapping)]


def _call_block(block: Callable[..., object], hidden: Tensor, key: str | None, args: tuple, kwargs: dict) -> object:
    """Call a block. Mappings that it is given are new in each call, since an old one would hold what another batch left there.

    Raises `UserError` for a block that looks for something in one.
    """
    handed_on = _handed_on((args, kwargs))
    if not handed_on:
        return block(*args, **kwargs, **{key: hidden}) if key else block(hidden, *args, **kwargs)
    args, kwargs = pytree.tree_map(lambda leaf: copy.copy(leaf) if isinstance(leaf, MutableMapping) else leaf, (args, kwargs))
    try:
        return block(*args, **kwargs, **{key: hidden}) if key else block(hidden, *args, **kwargs)
    except KeyError as error:
        raise UserError(
            f"layers of this model use what earlier layers leave in a {type(handed_on[0]).__name__} ({error}), as where keys and values "
            "are shared: tuning them one after another is not supported yet"
        ) from error


@contextlib.contextmanager
def _buffers_on_meta(block: nn.Module) -> Iterator[None]:
    kept = [(module, name, buffer) for module in block.modules() for name, buffer in module._buffers.items() if buffer is not None]
    try:
        for module, name, buffer in kept:
            module._buffers[name] = buffer.to("meta")
        yield
    finally:
        for module, name, buffer in kept:
            module._buffers[name] = buffer


@dataclass(frozen=True, slots=True)
class Embedded:
    """What enters block 0, and how every block is called."""

    hidden: Tensor
    """`[samples, tokens, hidden]` in the compute dtype, on the host."""
    calls: tuple[BlockCall, ...]


EMBED_BATCH = 8
"""Samples embedded at once: bounds the memory of masks and embeddings, does not touch results."""


def outside_blocks(skeleton: Skeleton) -> list[str]:
    """Modules with own parameters or buffers outside of the blocks and the output head (embeddings, final norm).

    Of a module that holds the blocks, too, the names of its own parameters and buffers: its own name would stand for all blocks.
    """
    head = skeleton.sites[-1].name if skeleton.sites[-1].is_head else None
    inside = skeleton.block_names
    found = []
    for name, module in skeleton.model.named_modules():
        leaves = [leaf for leaf, tensor in itertools.chain(module._parameters.items(), module._buffers.items()) if tensor is not None]
        if not leaves or name == head or any(_under(name, block) for block in inside):
            continue
        holds_blocks = any(_under(block, name) for block in inside)
        found += [f"{name}.{leaf}".removeprefix(".") for leaf in leaves] if holds_blocks else [name]
    return found


def embed(skeleton: Skeleton, tokens: Tensor, mask: Tensor | None, dtype: torch.dtype, device: torch.device | str) -> Embedded:
    """Hidden states before block 0 for `tokens` `[samples, tokens]` (`mask`: bool, False where padded), and the calls of all blocks.

    Batches of one and of two samples are compared, to learn which arguments grow with the batch, and two samples with each other, to learn
    which depend on the tokens (per-layer embeddings). With a mask, the sample with most padding leads every batch and its rows are dropped:
    transformers leaves the mask out of a batch that has no padding. Raises `UserError` for arguments that depend on tokens in other ways.
    """
    base = skeleton.model.base_model
    lead = int(mask.sum(1).argmin()) if mask is not None else None

    def forward(rows: list[int]) -> list[_Recorded]:
        numbers = rows if lead is None else [lead, *rows]
        with recording(skeleton) as records:
            attention = None if mask is None else mask[numbers].to(device=device, dtype=torch.long)
            base(input_ids=tokens[numbers].to(device), attention_mask=attention, use_cache=False)  # type: ignore[operator]
        return records

    with skeleton.materialized(outside_blocks(skeleton), dtype, device), torch.no_grad():
        one, two = (forward([0]), forward([0, 0])) if lead is None else (forward([]), forward([0]))
        grows = [_growing(a, b) for a, b in zip(one, two, strict=True)]
        other = one if lead is not None or len(tokens) == 1 else forward([len(tokens) - 1])
        of_tokens = any(_depend_on_tokens(*pair) for pair in zip(skeleton.block_names, one, other, grows, strict=True))
        hidden = torch.empty(len(tokens), *one[0].hidden.shape[1:], dtype=dtype)
        parts: list[list[_Recorded]] = []
        for start in range(0, len(tokens), EMBED_BATCH):
            rows = list(range(start, min(start + EMBED_BATCH, len(tokens))))
            records = forward(rows)
            hidden[rows] = records[0].hidden[-len(rows) :].to("cpu")
            if mask is not None or of_tokens:
                for record in records:
                    record.hidden = record.hidden[:0].clone()  # of these only the arguments are wanted
                parts.append(records)
    interned: dict[tuple[int, int], _Leaf] = {}
    calls = [_call(number, one[number], grows[number], parts, interned, lead is not None) for number in range(len(one))]
    return Embedded(hidden=hidden, calls=tuple(calls))


def _tensors(record: _Recorded) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves((record.args, record.kwargs)) if isinstance(leaf, Tensor)]


def _growing(one: _Recorded, two: _Recorded) -> list[int]:
    """For each tensor argument the rows per sample, or 0 when it does not grow with the batch."""
    rows = []
    for small, large in zip(_tensors(one), _tensors(two), strict=True):
        grown = small.ndim > 0 and large.shape[0] == 2 * small.shape[0] and large.shape[1:] == small.shape[1:]
        rows.append(small.shape[0] if grown else 0)
    return rows


def _depend_on_tokens(name: str, one: _Recorded, other: _Recorded, grows: list[int]) -> bool:
    """Whether a tensor argument of block `name` is another one for another sample."""
    differ = [not torch.equal(a, b) for a, b in zip(_tensors(one), _tensors(other), strict=True)]
    if any(changed and not rows for changed, rows in zip(differ, grows, strict=True)):
        raise UserError(f"{name} is called with an argument that depends on the tokens and has no batch dimension: not supported")
    return any(differ)


def _call(
    number: int, one: _Recorded, grows: list[int], parts: list[list[_Recorded]], interned: dict[tuple[int, int], _Leaf], led: bool
) -> BlockCall:
    position = itertools.count()

    def leaf_for(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        index = next(position)
        rows = grows[index]
        distinct = rows > 0 and bool(parts)
        key = (id(leaf), rows)
        if key not in interned:
            values = torch.cat([_tensors(part[number])[index][rows if led else 0 :].to("cpu") for part in parts]) if distinct else leaf
            interned[key] = _Leaf(values, rows, distinct)
        return interned[key]

    kwargs = {name: value for name, value in one.kwargs.items()}
    args, kwargs = pytree.tree_map(leaf_for, (one.args, kwargs))
    return BlockCall(args=args, kwargs=kwargs, hidden_key=one.hidden_key, returns_tuple=one.returns_tuple)


def head_inputs(
    skeleton: Skeleton, tokens: Tensor, mask: Tensor | None, hidden: Tensor, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """What enters the output head, `[samples, tokens, hidden]`, when the last block gives `hidden` `[samples, tokens, hidden]`."""
    head = skeleton.model.get_submodule(skeleton.sites[-1].name)
    parts: list[Tensor] = []

    def take(entering: Tensor) -> Tensor:
        parts.append(entering.to("cpu"))
        return entering[..., :1]  # in place of logits that nobody needs

    with skeleton.materialized(outside_blocks(skeleton), dtype, device), torch.no_grad():
        head.forward = take
        try:
            for start in range(0, len(tokens), EMBED_BATCH):
                rows = slice(start, start + EMBED_BATCH)
                with recording(skeleton, replace=hidden[rows].to(device)):
                    attention = None if mask is None else mask[rows].to(device=device, dtype=torch.long)
                    skeleton.model(input_ids=tokens[rows].to(device), attention_mask=attention, use_cache=False)
        finally:
            del head.forward
    return torch.cat(parts)
