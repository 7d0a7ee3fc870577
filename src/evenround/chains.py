"""What one block group hands to the next: hidden states of every calibration sample, wherever there is room for them.

A `Chain` is `[samples, tokens, hidden]` cut into runs of consecutive samples, each in the memory of one device, in host memory, or in a
file mapped into it. Readers and writers name samples by number and never see where they lie. Rows are copied one by one into a tensor made
for them, so that memory does not depend on which samples are drawn: that is what lets a plan know it.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from evenround.errors import UserError, readable_bytes

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Home:
    """Where `rows` consecutive samples are kept."""

    device: torch.device
    rows: int
    folder: Path | None = None
    """In a file in this folder (without a name, gone with the tensor), mapped into host memory; `device` is the host's then."""


@dataclass(frozen=True, slots=True)
class Chain:
    """`[samples, tokens, hidden]`."""

    parts: tuple[Tensor, ...]
    """Consecutive samples, `[rows, tokens, hidden]` each."""

    @staticmethod
    def empty(shape: Sequence[int], dtype: torch.dtype, homes: Sequence[Home]) -> "Chain":
        """`shape` `[samples, tokens, hidden]`, values undefined; the homes' rows add up to the samples."""
        assert sum(home.rows for home in homes) == shape[0], (shape, homes)
        return Chain(tuple(_empty((home.rows, *shape[1:]), dtype, home) for home in homes if home.rows))

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(len(part) for part in self.parts), *self.parts[0].shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __len__(self) -> int:
        return self.shape[0]

    def row(self, number: int) -> Tensor:
        """Sample `number`, `[tokens, hidden]`, where it lies."""
        for part in self.parts:
            if number < len(part):
                return part[number]
            number -= len(part)
        raise IndexError(number)

    def read(self, numbers: Sequence[int], device: torch.device) -> Tensor:
        """The samples `numbers` on `device`: a new tensor `[len(numbers), tokens, hidden]`."""
        rows = torch.empty((len(numbers), *self.shape[1:]), dtype=self.dtype, device=device)
        for at, number in enumerate(numbers):
            rows[at].copy_(self.row(number))
        return rows

    def write(self, numbers: Sequence[int], values: Tensor) -> None:
        """Samples `numbers` become `values` `[len(numbers), tokens, hidden]`, which may be on another device."""
        for at, number in enumerate(numbers):
            self.row(number).copy_(values[at])

    def on_host(self, rows: int = 8) -> Iterator[Tensor]:
        """All samples in order as host tensors `[≤ rows, tokens, hidden]`."""
        for start in range(0, len(self), rows):
            yield self.read(range(start, min(start + rows, len(self))), HOST)


@dataclass(frozen=True, slots=True)
class Chains:
    """Inputs of the next block group."""

    float_inputs: Chain
    """What the float blocks give."""
    quantized_inputs: Chain
    """What the quantized blocks give; the same chain as `float_inputs` when they are not chained."""

    @property
    def tensors(self) -> dict[str, Chain]:
        """By name; the same chain once."""
        same = self.quantized_inputs is self.float_inputs
        return {"float": self.float_inputs} if same else {"float": self.float_inputs, "quantized": self.quantized_inputs}


def _empty(shape: Sequence[int], dtype: torch.dtype, home: Home) -> Tensor:
    if home.folder is None:
        return torch.empty(shape, dtype=dtype, device=home.device)
    count = torch.Size(shape).numel()
    try:
        handle, path = tempfile.mkstemp(prefix="chain-", dir=home.folder)
        try:
            os.posix_fallocate(handle, 0, max(1, count * dtype.itemsize))  # a full disk shows here, not as a bus error within a block
            return torch.from_file(path, shared=True, size=count, dtype=dtype).reshape(*shape)
        finally:
            os.close(handle)
            os.unlink(path)
    except OSError as error:
        needed = readable_bytes(count * dtype.itemsize)
        raise UserError(
            f"{home.folder}: the inputs of a block group need {needed} there, which cannot be had ({error.strerror}); free some space, "
            "choose another --output_dir, or use smaller --nsamples or --seqlen"
        ) from error
