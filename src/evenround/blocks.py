"""Decoder blocks on their devices: one forward pass of a block group, on any replica, with any weights in place of the blocks' own.

The blocks are never edited: weights are passed through `torch.func.functional_call`, so the same block gives the float reference, too, and
a replica of a block is nothing but other tensors for its parameters.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from evenround.calls import BlockCall
from evenround.memory.foreign import suspended
from evenround.memory.place import Placement
from evenround.memory.simulate import Category
from evenround.model import Site, structure
from evenround.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Block:
    """A materialized decoder block and how to call it."""

    name: str
    module: nn.Module
    call: BlockCall
    sites: tuple[tuple[Site, Scheme], ...]
    """The weights to quantize in it."""

    def weight(self, site: Site) -> Tensor:
        """The float weight `[out, in]` where it is kept."""
        parameter = self.module.get_parameter(site.parameter.removeprefix(self.name + ".")).detach()
        return parameter.t().contiguous() if site.transposed else parameter


Weights = Mapping[str, Tensor]
"""Site name → weight `[out, in]` in the compute dtype, on the device where the site runs, to take the place of the block's own."""


Intake = Callable[[Tensor], Tensor | None]
"""Called with what enters a site, `[…, in]`; what it returns enters instead, unless None."""

Function = Callable[[dict[str, Tensor], tuple[object, ...], dict[str, object]], object]
"""Calls a block with tensors in place of its parameters and buffers: (by name, positional, keyword arguments)."""

Compiled = MutableMapping[object, Function]
"""Structure of a block → its compiled function, for all blocks of that structure."""


@dataclass(frozen=True, slots=True)
class _Replica:
    calls: tuple[BlockCall, ...]
    others: tuple[Mapping[str, Tensor], ...]
    """For each block: its parameters and buffers that are not sites, where they are not the block's own."""


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive blocks, in execution order, on the devices of a placement. Made by `on_devices`."""

    blocks: tuple[Block, ...]
    place: Placement
    replicas: tuple[_Replica, ...]
    functions: tuple[Function, ...]
    """What calls each block."""

    @property
    def name(self) -> str:
        return self.blocks[0].name

    @property
    def sites(self) -> list[tuple[Block, Site, Scheme]]:
        return [(block, site, scheme) for block in self.blocks for site, scheme in block.sites]

    def first_device(self, replica: int) -> torch.device:
        """Where hidden states enter."""
        return self.place.device(self.blocks[0].name, replica)

    def last_device(self, replica: int) -> torch.device:
        """Where hidden states come out."""
        return self.place.device(self.blocks[-1].name, replica)

    def forward(
        self, hidden: Tensor, samples: Sequence[int], replica: int, weights: Weights, intakes: Mapping[str, Intake] = MappingProxyType({})
    ) -> Tensor:
        """Output `[batch, tokens, hidden]` of the group for hidden states of the calibration samples `samples`.

        intakes: site name → what sees, or changes, its inputs.
        """
        for number, block in enumerate(self.blocks):
            hidden = hidden.to(self.place.device(block.name, replica))
            run = self._runner(number, samples, replica, weights, intakes)
            if self.place.layout.recompute and torch.is_grad_enabled():
                hidden = checkpoint(run, hidden, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = run(hidden)
        return hidden

    def _runner(
        self, number: int, samples: Sequence[int], replica: int, weights: Weights, intakes: Mapping[str, Intake]
    ) -> Callable[[Tensor], Tensor]:
        block, mine = self.blocks[number], self.replicas[replica]
        swapped, hooked = dict(mine.others[number]), dict[str, Intake]()
        for site, _ in block.sites:
            if site.name in intakes:
                hooked[site.name.removeprefix(block.name).removeprefix(".")] = intakes[site.name]
            weight = weights[site.name]
            swapped[site.parameter.removeprefix(block.name + ".")] = weight.t() if site.transposed else weight

        # Compiled code does not notice hooks that come and go.
        function = plain_function(block) if hooked else self.functions[number]

        def call(*args: object, **kwargs: object) -> object:
            with _hooks(block.module, hooked):
                return function(swapped, args, kwargs)

        def run(hidden: Tensor) -> Tensor:
            label: Category = "saved activations" if torch.is_grad_enabled() else "other"
            with self.place.running(replica), self.place.label(label):
                return mine.calls[number].run(call, hidden, samples)

        return run

    def spread(self, weights: Callable[[Block, Site, Scheme], Tensor]) -> list[dict[str, Tensor]]:
        """For each replica, `weights(block, site, scheme)` `[out, in]` of every site, where the site runs."""
        replicas: list[dict[str, Tensor]] = [{} for _ in self.replicas]
        for block, site, scheme in self.sites:
            weight = weights(block, site, scheme)
            for replica, there in enumerate(replicas):
                there[site.name] = weight.to(self.place.device(site.name, replica))
        return replicas

    def float_weights(self) -> list[dict[str, Tensor]]:
        """The blocks' own weights for each replica: copies only where the site does not run where it is kept."""
        with self.place.label("weights"):
            return self.spread(lambda block, site, scheme: block.weight(site))


@contextlib.contextmanager
def _hooks(root: nn.Module, intakes: Mapping[str, Intake]) -> Iterator[None]:
    """Inputs of these modules below `root` pass through their intake; after the transfers of the placement, whose hooks came first."""

    def hook(intake: Intake) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
        def enter(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            found = intake(args[0])
            return args if found is None else (found, *args[1:])

        return enter

    handles = [root.get_submodule(path).register_forward_pre_hook(hook(intake)) for path, intake in intakes.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def plain_function(block: Block) -> Function:
    """Calls the block, uncompiled."""

    def call(swapped: dict[str, Tensor], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        return functional_call(block.module, swapped, args, kwargs)

    return call


@contextlib.contextmanager
def on_devices(blocks: Sequence[Block], place: Placement, compiled: Compiled | None = None) -> Iterator[Group]:
    """The blocks as a group on the devices of `place`; transfers between modules are off again when the context ends.

    Other libraries' offloading and hooks are suspended inside (`memory.foreign`), and back afterwards, also when an exception passes.

    compiled: run blocks through `torch.compile`, and keep what was compiled here.
    """
    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.enter_context(suspended(block.module))
        replicas = _replicas(blocks, place, compiled is not None)
        stack.enter_context(place.moving({block.name: block.module for block in blocks}))
        yield Group(tuple(blocks), place, replicas, tuple(_function(block, place, compiled) for block in blocks))


def _replicas(blocks: Sequence[Block], place: Placement, everything: bool) -> tuple[_Replica, ...]:
    replicas = []
    for replica in range(len(place.layout.replicas)):
        there: dict[str, dict[int, Tensor]] = {}
        calls = []
        for block in blocks:
            device = place.device(block.name, replica)
            calls.append(block.call.on(device, there.setdefault(str(device), {})))
        with place.label("weights"):
            others = tuple(_others(block, place, replica, everything) for block in blocks)
        replicas.append(_Replica(tuple(calls), others))
    return tuple(replicas)


def _function(block: Block, place: Placement, compiled: Compiled | None) -> Function:
    call = plain_function(block)
    if compiled is None:
        return call
    # All tensors are passed, so one block's code serves every block of its structure; transfers are its own where it is cut.
    key = block.name if place.cuts(block.name, block.module) else structure(block.module)
    if key not in compiled:
        # dynamo counts what it compiles by code object, and gives up after 8: each structure gets one of its own.
        call.__code__ = call.__code__.replace(co_name=f"block_structure_{len(compiled)}")  # type: ignore[attr-defined]
        compiled[key] = torch.compile(call, dynamic=False)
    return compiled[key]


def _others(block: Block, place: Placement, replica: int, everything: bool) -> dict[str, Tensor]:
    """Parameters and buffers that are not sites, where `replica` wants them; none for replica 0 unless `everything` is asked for."""
    if replica == 0 and not everything:
        return {}  # loaded to where replica 0 wants them
    sites = {site.parameter.removeprefix(block.name + ".") for site, _ in block.sites}
    found = {}
    for kind in (block.module.named_parameters(), block.module.named_buffers()):
        for name, tensor in kind:
            if name not in sites:
                found[name] = tensor.detach().to(place.device(f"{block.name}.{name}".rpartition(".")[0], replica))
    return found
