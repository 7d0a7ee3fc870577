"""The run record: `evenround.json` beside the checkpoint, plain JSON that a script can read.

Everything but the values under `seconds`, `peak_bytes` (and the totals of them) and `plan`, which depends on the memory that is free, is
the same in two runs of the same command.
"""

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from evenround.checkpoint import atomic_write_text
from evenround.errors import UserError
from evenround.version import __version__

RECORD = "evenround.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRecord:
    """What happened to one block group."""

    blocks: tuple[str, ...]
    rtn_loss: float | None
    """Mean squared error over all samples with untuned rounding; None when no text was run (iters 0), and in JSON if it is not finite."""
    tuned_loss: float | None
    kept: str
    """`tuned`, `untuned` or `float` (nothing to quantize)."""
    best_iteration: int | None
    losses: tuple[float, ...]
    """Mini-batch loss of each step."""
    seconds: Mapping[str, float]
    """By phase: load, reference, tune, pack, write."""
    strategy: str
    """How it was laid out on devices."""
    planned_bytes: tuple[int, ...]
    """Peak of each device, as planned."""
    peak_bytes: tuple[int, ...]
    """The same as measured; on the CPU itself: what the process held."""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values. Losses that are not finite become None: JSON has no NaN."""
        return json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)  # type: ignore[no-any-return]


def versions() -> dict[str, str]:
    """Versions that decide the bytes of a result."""
    return {
        "evenround": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "platform": f"{sys.platform}-{platform.machine()}",
    }


def write_record(directory: Path, record: Mapping[str, object]) -> None:
    """Write `record` into `directory`, whole or not at all. Raises `UserError` when it cannot be written."""
    atomic_write_text(directory / RECORD, json.dumps(record, indent=1) + "\n")


def read_record(directory: Path) -> dict[str, object] | None:
    """The record in `directory`, or None when there is none. Raises `UserError` when it is damaged."""
    path = directory / RECORD
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); delete it, or quantize anew with --overwrite") from error
    if not isinstance(record, dict):
        raise UserError(f"{path} is damaged (not an object); delete it, or quantize anew with --overwrite")
    return record


def total_seconds(blocks: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """Seconds by phase, summed over block records."""
    totals: dict[str, float] = {}
    for block in blocks:
        for phase, seconds in block["seconds"].items():  # type: ignore[attr-defined]
            totals[phase] = round(totals.get(phase, 0.0) + seconds, 3)
    return totals
