"""What every checkpoint format offers: packing of one weight, its config.json entry, and the way back.

A format is a value with pure methods. A weight's tensors depend on its own scheme, and in `auto_round` also on the other layers' (one
packing holds for a whole checkpoint), so `for_schemes` fixes that once for the run's table. The way back works for files that others wrote
in the same layouts: `read_schemes` trusts neither config nor tensors alone, it requires that they agree. What we gave up: formats whose
tensors hold several weights at once.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from evenround.checkpoint import TensorSpec
from evenround.errors import UserError
from evenround.model import Site
from evenround.numerics.integer import QuantizedWeight
from evenround.scheme import PER_CHANNEL, PER_TENSOR, Scheme, WeightScheme

Reader = Callable[[str], Tensor]
"""Tensor name → tensor."""


class Exporter(Protocol):
    """One checkpoint format."""

    @property
    def name(self) -> str:
        """The format's name, as `--format` takes it."""
        ...

    @property
    def allows_ragged(self) -> bool:
        """Whether a last group shorter than the group size can be held."""
        ...

    def for_schemes(self, schemes: Mapping[str, Scheme | None]) -> "Exporter":
        """This format for a checkpoint with this table. Call it once per run, before `tensor_specs` and `pack`."""
        ...

    def check(self, site: Site, scheme: Scheme) -> None:
        """Raise `UserError`, naming the layer and what would do, if readers of this format cannot load `scheme` at `site`."""
        ...

    def cautions(self, schemes: Mapping[str, Scheme | None]) -> tuple[str, ...]:
        """Sentences that a user of a checkpoint with this table should know: readers that need more, or cannot load it."""
        ...

    def stored(self, scheme: Scheme) -> Scheme:
        """The scheme under which the file declares `scheme`: the same values, possibly other words (see each format)."""
        ...

    def tensor_specs(self, site: Site, scheme: Scheme) -> dict[str, TensorSpec]:
        """The tensors that replace `site.checkpoint_name`, in writing order. A bias is copied by the caller."""
        ...

    def pack(self, site: Site, quantized: QuantizedWeight) -> dict[str, Tensor]:
        """Those tensors."""
        ...

    def unpack(self, prefix: str, read: Reader, scheme: WeightScheme, shape: tuple[int, int]) -> QuantizedWeight:
        """The weight `[out, in]` whose tensors are named `prefix.…`. `scheme` as the file declares it."""
        ...

    def quantization_config(
        self,
        schemes: Mapping[str, Scheme | None],
        sites: Sequence[Site],
        settings: Mapping[str, object],
        default: Scheme,
        unquantized: Sequence[str] = (),
    ) -> dict[str, object] | None:
        """config.json's `quantization_config`, or None when there is none to write.

        `settings`: what the run record calls settings; formats copy the few that their readers know. `default`: the run's default scheme.
        `unquantized`: names of the model's linear layers that are not sites (a vision tower's).
        """
        ...

    def read_schemes(
        self, config: Mapping[str, object], specs: Mapping[str, TensorSpec], read: Reader, modules: Mapping[str, str] | None = None
    ) -> dict[str, "StoredWeight"]:
        """Every quantized weight of a checkpoint with this `quantization_config` and these tensors, by module name.

        `read` is called for tiny tensors only. `modules`: `{tensor name prefix: module name}` of the model's linear layers; with it, names
        in config and file may differ by a prefix, and every linear layer must be either packed or excluded. Raises `UserError` where config
        and tensors disagree.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeight:
    """Where a quantized weight lies in a checkpoint, and how to get it out."""

    name: str
    """Module name."""
    prefix: str
    """Its tensors are named `prefix.…`."""
    scheme: WeightScheme
    """As the file declares it."""
    shape: tuple[int, int]
    """(out, in)."""
    format: Exporter

    def unpack(self, read: Reader) -> QuantizedWeight:
        """The weight itself; `read` must give this checkpoint's tensors."""
        return self.format.unpack(self.prefix, read, self.scheme, self.shape)


def tensor_prefix(site: Site) -> str:
    """What packed tensors' names start with: the weight's own name in the checkpoint, or the module's for a head tied to the embedding."""
    return site.name if is_tied_head(site) else site.checkpoint_name.removesuffix(".weight")


def are_strings(value: object) -> TypeGuard[list[str]]:
    """Whether `value`, out of a JSON file, is a list of strings."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def is_tied_head(site: Site) -> bool:
    """Whether `site` is an output head whose values are the embedding's tensor."""
    own = site.checkpoint_name.removesuffix(".weight")
    return site.is_head and own.rpartition(".")[2] != site.name.rpartition(".")[2]


def check_groups(site: Site, scheme: WeightScheme) -> None:
    """Raise `UserError` unless the groups divide the width of `site`."""
    width = site.shape[1]
    if scheme.group_size not in (PER_CHANNEL, PER_TENSOR) and width % scheme.group_size:
        raise UserError(
            f"{site.name}: group_size {scheme.group_size} (--group_size) does not divide its width {width}, and no reader of this format "
            "loads a ragged last group; choose a divisor, -1 (per output channel), or leave the layer out with --ignore_layers"
        )


def check_table(schemes: Mapping[str, Scheme | None], sites: Iterable[Site]) -> None:
    """Raise `ValueError` unless `schemes` has exactly the names of `sites`."""
    names = {site.name for site in sites}
    if names != set(schemes):
        raise ValueError(f"scheme table and sites differ: {sorted(names ^ set(schemes))[:3]}")


def packed_modules(specs: Iterable[str], leaf: str, modules: Mapping[str, str] | None) -> dict[str, str]:
    """`{tensor name prefix: module name}` of every weight stored under `prefix.leaf`."""
    prefixes = [name.removesuffix("." + leaf) for name in specs if name.endswith("." + leaf)]
    return {prefix: (modules or {}).get(prefix, prefix) for prefix in prefixes}


def expect_tensor(specs: Mapping[str, TensorSpec], name: str, dtypes: Sequence[torch.dtype], shape: tuple[int, ...] | None) -> TensorSpec:
    """The spec of `name`; raises `UserError` when it is missing or not of one of `dtypes` and of `shape`."""
    spec = specs.get(name)
    if spec is None:
        raise UserError(f"the checkpoint has no {name}, which quantization_config (config.json) calls for; it is incomplete")
    if spec.dtype not in dtypes:
        wanted = " or ".join(map(str, dtypes))
        raise UserError(f"{name} is {spec.dtype}, but the format in quantization_config (config.json) stores {wanted}")
    if shape is not None and tuple(spec.shape) != shape:
        raise UserError(f"{name} has shape {list(spec.shape)}, but quantization_config (config.json) makes it {list(shape)}")
    return spec


def scheme_from_config(place: str, bits: object, group_size: object, symmetric: object) -> WeightScheme:
    """A `WeightScheme` from values found in config.json; raises `UserError` naming the place."""
    try:
        return WeightScheme(bits=bits, group_size=group_size, symmetric=symmetric)  # type: ignore[arg-type]
    except UserError as error:
        raise UserError(f"quantization_config (config.json), {place}: {error}") from None


def compile_pattern(pattern: str, place: str) -> re.Pattern[str]:
    """`pattern` compiled; raises `UserError` naming the place in config.json."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f"quantization_config (config.json), {place}: {pattern!r} is no regular expression: {error}") from None


def no_packed_weights(leaf: str, format_name: str) -> UserError:
    """The error for a config that promises packed weights in a checkpoint without any."""
    return UserError(f"quantization_config (config.json) says {format_name}, but the checkpoint has no tensor named ….{leaf}")


def disagreement(name: str, what: str) -> UserError:
    """The error for a module about which config and tensors differ."""
    return UserError(f"quantization_config (config.json) and tensors disagree: {name} {what}")


SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Scales are written as float16; these are read."""
