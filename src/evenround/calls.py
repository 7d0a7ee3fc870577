"""How decoder blocks are called, what enters the first one, and what enters the output head.

How each block is called is *observed*, not assumed: the base model's own forward runs once with every block replaced by a recorder that
hands its input on. Masks, rotary embeddings and per-layer switches (sliding against full attention, local rope) are then right for any
architecture whose block arguments do not depend on other blocks' outputs. What we give up: architectures with such cross-block arguments.
"""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from evenround.chains import HOST, Chain
from evenround.errors import UserError
from evenround.model import Reader, Skeleton, under


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor among a block's arguments. `rows_per_sample` 0: the same for every batch; else dim 0 grows with the batch."""

    values: Tensor
    rows_per_sample: int
    distinct: bool
    """True: `values` has `rows_per_sample` rows for each calibration sample; False: all samples share these rows."""
    stands_for_all: bool = False
    """`values` has rows of a few samples only, any of which does for any sample: where shapes count and values do not."""

    def select(self, samples: Sequence[int], device: torch.device) -> Tensor:
        if self.rows_per_sample == 0:
            return self.values.to(device)
        if not self.distinct:
            return self.values.to(device).repeat(len(samples), *[1] * (self.values.ndim - 1))
        rows = self.values.split(self.rows_per_sample)
        return torch.cat([rows[0 if self.stands_for_all else number] for number in samples]).to(device)


@dataclass(frozen=True, slots=True)
class BlockCall:
    """How one decoder block is called, apart from its weights and hidden states."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    hidden_key: str | None
    """Name of the hidden-states argument when it is passed by name; None: the first positional."""
    returns_tuple: bool

    def for_any_sample(self) -> "BlockCall":
        """The call for a plan, which knows the arguments of a few samples."""

        def stand(leaf: object) -> object:
            return replace(leaf, stands_for_all=True) if isinstance(leaf, _Leaf) and leaf.distinct else leaf

        args, kwargs = pytree.tree_map(stand, (self.args, dict(self.kwargs)), is_leaf=lambda node: isinstance(node, _Leaf))
        return BlockCall(args, kwargs, self.hidden_key, self.returns_tuple)

    def on(self, device: torch.device, there: MutableMapping[int, Tensor]) -> "BlockCall":
        """The call with the arguments that all samples share on `device`; `there`: those that are there already, by id of the original."""

        def move(leaf: object) -> object:
            if not isinstance(leaf, _Leaf) or leaf.distinct:
                return leaf
            if id(leaf.values) not in there:
                there[id(leaf.values)] = leaf.values.to(device)
            return _Leaf(there[id(leaf.values)], leaf.rows_per_sample, False)

        args, kwargs = pytree.tree_map(move, (self.args, dict(self.kwargs)), is_leaf=lambda node: isinstance(node, _Leaf))
        return BlockCall(args, kwargs, self.hidden_key, self.returns_tuple)

    @property
    def signature(self) -> object:
        """Equal for calls whose arguments take the same memory."""

        def plain(leaf: object) -> object:
            if isinstance(leaf, _Leaf):
                values = leaf.values
                rows = leaf.rows_per_sample if leaf.distinct else len(values) if values.ndim else 0
                return (rows, tuple(values.shape[1:]), values.dtype, leaf.rows_per_sample, leaf.distinct)
            return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf).__name__

        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)), is_leaf=lambda node: isinstance(node, _Leaf))
        return (*(plain(leaf) for leaf in leaves), tuple(self.kwargs), self.hidden_key, self.returns_tuple)

    def run(self, block: Callable[..., object], hidden: Tensor, samples: Sequence[int]) -> Tensor:
        """Output `[batch, tokens, hidden]` of `block` for hidden states `[batch, tokens, hidden]` of the calibration samples `samples`."""

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
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to("meta", torch.float32 if leaf.is_floating_point() else leaf.dtype)  # as the parameters of a block without weights

    with _buffers_on_meta(block), torch.no_grad():
        meta_args, meta_kwargs = pytree.tree_map(to_meta, (args, kwargs))
        return isinstance(_call_block(forward, hidden.to("meta", torch.float32), key, meta_args, meta_kwargs), tuple | list)


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

    hidden: Chain | None
    """`[samples, tokens, hidden]` in the compute dtype; None if nobody asked for it."""
    width: int
    """Size of the hidden states."""
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
        if not leaves or name == head or any(under(name, block) for block in inside):
            continue
        holds_blocks = any(under(block, name) for block in inside)
        found += [f"{name}.{leaf}".removeprefix(".") for leaf in leaves] if holds_blocks else [name]
    return found


def embed(
    skeleton: Skeleton,
    tokens: Tensor,
    mask: Tensor | None,
    dtype: torch.dtype,
    store: Callable[[tuple[int, ...]], Chain] | None = None,
    read: Reader | None = None,
) -> Embedded:
    """Hidden states before block 0 for `tokens` `[samples, tokens]` (`mask`: bool, False where padded), and the calls of all blocks.

    Computed on the host, where the largest table of a model costs no device memory. `store` makes the chain that the hidden states of the
    given shape go to; `read`: see `Skeleton.materialized`.
    Batches of one and of two samples are compared, to learn which arguments grow with the batch, and two samples with each other, to learn
    which depend on the tokens (per-layer embeddings). With a mask, the sample with most padding leads every batch and its rows are dropped:
    transformers leaves the mask out of a batch that has no padding. Raises `UserError` for arguments that depend on tokens in other ways.
    """
    base = skeleton.model.base_model
    lead = int(mask.sum(1).argmin()) if mask is not None else None

    def forward(rows: list[int]) -> list[_Recorded]:
        numbers = rows if lead is None else [lead, *rows]
        with recording(skeleton) as records:
            attention = None if mask is None else mask[numbers].to(dtype=torch.long)
            base(input_ids=tokens[numbers], attention_mask=attention, use_cache=False)  # type: ignore[operator]
        return records

    with skeleton.materialized(outside_blocks(skeleton), dtype, read=read), torch.no_grad():
        one, two = (forward([0]), forward([0, 0])) if lead is None else (forward([]), forward([0]))
        grows = [_growing(a, b) for a, b in zip(one, two, strict=True)]
        other = one if lead is not None or len(tokens) == 1 else forward([len(tokens) - 1])
        of_tokens = any(_depend_on_tokens(*pair) for pair in zip(skeleton.block_names, one, other, grows, strict=True))
        hidden = store((len(tokens), *one[0].hidden.shape[1:])) if store else None
        parts: list[list[_Recorded]] = []
        for start in range(0, len(tokens), EMBED_BATCH) if store or mask is not None or of_tokens else ():
            rows = list(range(start, min(start + EMBED_BATCH, len(tokens))))
            records = forward(rows)
            if hidden is not None:
                hidden.write(rows, records[0].hidden[-len(rows) :].to(dtype))
            if mask is not None or of_tokens:
                for record in records:
                    record.hidden = record.hidden[:0].clone()  # of these only the arguments are wanted
                parts.append(records)
    interned: dict[tuple[int, int], _Leaf] = {}
    calls = [_call(number, one[number], grows[number], parts, interned, lead is not None) for number in range(len(one))]
    return Embedded(hidden=hidden, width=one[0].hidden.shape[-1], calls=tuple(calls))


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


def to_head_inputs(skeleton: Skeleton, tokens: Tensor, mask: Tensor | None, hidden: Chain, out: Chain, dtype: torch.dtype) -> None:
    """`out`, which may be `hidden`, becomes what enters the output head when the last block gives `hidden`: after the final norm."""
    head = skeleton.model.get_submodule(skeleton.sites[-1].name)
    entered: list[Tensor] = []

    def take(entering: Tensor) -> Tensor:
        entered.append(entering)
        return entering[..., :1]  # in place of logits that nobody needs

    with skeleton.materialized(outside_blocks(skeleton), dtype), torch.no_grad():
        head.forward = take
        try:
            for start in range(0, len(tokens), EMBED_BATCH):
                rows = range(start, min(start + EMBED_BATCH, len(tokens)))
                with recording(skeleton, replace=hidden.read(rows, HOST)):
                    attention = None if mask is None else mask[start : rows.stop].to(dtype=torch.long)
                    skeleton.model(input_ids=tokens[start : rows.stop], attention_mask=attention, use_cache=False)
                out.write(rows, entered.pop())
        finally:
            del head.forward
