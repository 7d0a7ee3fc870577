"""Documents to calibrate on: the `--dataset` grammar, and the readers of files, hub datasets and data in memory.

What: every source becomes a list of `(place, document)`; `place` (file and line, list index, split and row) is what a message about the
document names.

Why this way: one function, `document`, knows all the forms a document comes in, wherever it comes from. The hub is asked once, with a
deadline, before the `datasets` package is let loose, which would retry for half a minute without a network.

What we gave up: of a hub dataset at most the first 10 000 documents of a split are drawn from; one of more than 2 GiB is streamed, so that
a few rows do not cost a terabyte. Without a network, a cached dataset is read only when HF_HUB_OFFLINE=1 says so.
"""

import json
import queue
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from os.path import expanduser
from pathlib import Path

import huggingface_hub
import numpy as np
import torch
from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError
from torch import Tensor

from evenround.data import calibration_text
from evenround.errors import UserError, nearest, readable_bytes

DEFAULT_DATASET = "NeelNanda/pile-10k"
DEMO = "demo"
SUFFIXES = (".txt", ".json", ".jsonl")
KNOWN_HUB = (DEFAULT_DATASET, "HuggingFaceFW/fineweb-edu", "HuggingFaceH4/ultrachat_200k", "openbmb/Ultra-FineWeb")
OTHER_SUFFIXES = (
    ".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".7z", ".csv", ".tsv", ".parquet", ".arrow", ".ndjson", ".md", ".rst", ".log",
    ".text", ".html", ".htm", ".xml", ".yaml", ".yml", ".pdf", ".doc", ".docx", ".py", ".npy", ".npz", ".pt", ".bin", ".safetensors",
)  # fmt: skip
"""Ends of names that are files too, though not read: a mistyped one must not be looked for on the hub."""
OPTIONS = ("split", "num", "concat", "apply_chat_template", "system_prompt")
DOCUMENT_KEYS = ("input_ids", "text", "messages", "conversations", "content", "code")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f]")
"""Characters that no text holds: all controls but tab, line feed, form feed and carriage return."""
INSTEAD = "pass a local .txt, .json or .jsonl file (--dataset FILE), or --dataset demo for the text that ships with the package"
HUB_DOCUMENTS = 10_000
HUB_DOWNLOAD = 2 << 30
HUB_DEADLINE = 5.0

Message = dict[str, object]
Document = str | list[Message] | list[Tensor]
"""Text; chat messages; rows of token ids (1-D int64 each)."""
Placed = tuple[str, Document]


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """One member of `--dataset a,b`: `name[:split=x+y][:num=N][:concat=True][:apply_chat_template[=false]][:system_prompt="…"]`."""

    name: str
    split: tuple[str, ...] = ()
    """Hub splits; empty: `train`, or the first one."""
    num: int | None = None
    """At most this many rows from here; None: an even share of what the others leave."""
    concat: bool = False
    """True: all documents are one stream; False: a long document starts a row of its own."""
    apply_chat_template: bool | None = None
    """None: for chat messages yes, for plain text only with a system prompt."""
    system_prompt: str | None = None


def parse_dataset(text: str) -> tuple[DatasetSpec, ...]:
    """The members of a `--dataset` value. Commas and colons within double quotes, or in the path of a file that exists, do not separate."""
    if exists(text):
        return (DatasetSpec(name=text),)
    if text.count('"') % 2:
        raise UserError(f'--dataset {text!r} has an unmatched double quote; write system_prompt="…"')
    parts, specs, at = _split_outside_quotes(text, ","), [], 0
    while at < len(parts):
        stop = len(parts)
        while stop > at + 1:  # a path with commas: the longest run of parts that names an existing file
            name = _name_and_options(",".join(parts[at:stop]))[0]
            if name.count(",") == stop - at - 1 and exists(name):
                break
            stop -= 1
        specs.append(_parse_member(",".join(parts[at:stop])))
        at = stop
    return tuple(specs)


def _parse_member(text: str) -> DatasetSpec:
    name, options = _name_and_options(text.strip())
    if not name:
        raise UserError(f"--dataset has an empty name in {text!r}; {INSTEAD}")
    spec = DatasetSpec(name=next((known for known in KNOWN_HUB if known.endswith("/" + name) and not exists(name)), name))
    for option in options:
        key, equals, value = option.partition("=")
        key, value = key.strip(), value.strip()
        if len(value) > 1 and value[0] == value[-1] == '"':
            value = value[1:-1]
        if key not in OPTIONS:
            raise UserError(f"--dataset {name!r}: unknown key {key!r}{nearest(key, OPTIONS)} (known: {', '.join(OPTIONS)})")
        if key in ("concat", "apply_chat_template"):
            on = {"": True, "true": True, "1": True, "false": False, "0": False}.get(value.lower())
            if on is None:
                raise UserError(f"--dataset {name!r}: {key}={value!r} is neither true nor false")
            spec = replace(spec, concat=on) if key == "concat" else replace(spec, apply_chat_template=on)
        elif not value:
            raise UserError(f"--dataset {name!r}: {key} has no value; write {key}=…")
        elif key == "num":
            if not value.isdecimal() or int(value) < 1:
                raise UserError(f"--dataset {name!r}: num={value!r} is not a positive number of rows")
            spec = replace(spec, num=int(value))
        else:
            spec = replace(spec, system_prompt=value) if key == "system_prompt" else replace(spec, split=tuple(value.split("+")))
    return spec


def _name_and_options(text: str) -> tuple[str, list[str]]:
    parts = _split_outside_quotes(text, ":")
    for stop in range(len(parts), 0, -1):  # a path with colons that exists, else all up to the first part that looks like an option
        if exists(":".join(parts[:stop])):
            return ":".join(parts[:stop]), parts[stop:]
    options = (at for at, part in enumerate(parts) if at and (re.match(r"\s*\w*\s*=", part) or not re.search(r"[\\/.]", part)))
    stop = next(options, len(parts))
    return ":".join(parts[:stop]), parts[stop:]


def _split_outside_quotes(text: str, separator: str) -> list[str]:
    return re.split(rf'{separator}(?=(?:[^"]*"[^"]*")*[^"]*$)', text)


def exists(name: str) -> bool:
    """Whether `name` is a path of this machine."""
    try:
        return bool(name) and Path(expanduser(name)).exists()
    except (OSError, ValueError):  # too long for a name, a zero byte
        return False


def read_documents(spec: DatasetSpec, *, is_path: bool = False) -> tuple[str | list[Placed], list[str]]:
    """The text of a `.txt` file, or the documents of anything else; and notes. `is_path`: the name is a path even if nothing is there."""
    name = spec.name
    is_path = is_path or name == DEMO or exists(name) or Path(name).suffix.lower() in (*SUFFIXES, *OTHER_SUFFIXES)
    if not is_path and re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        return _hub_documents(spec)
    if spec.split:
        raise UserError(f"--dataset {name!r}: a file has no splits; leave out split={'+'.join(spec.split)}")
    path = calibration_text() if name == DEMO else _local_file(name)
    text = _read_text(path, name)
    if path.suffix.lower() != ".txt":
        return _json_documents(text, name, lines=path.suffix.lower() == ".jsonl")
    if spec.apply_chat_template or spec.system_prompt is not None:
        raise UserError(f"--dataset {name!r}: chat templates need documents; use .json or .jsonl, or leave out the chat options")
    return text, []


def memory_documents(data: Tensor | Mapping[str, object] | Sequence[object]) -> tuple[list[Placed], list[str]]:
    """The documents of data in memory, and notes."""
    if isinstance(data, Tensor | np.ndarray | Mapping):
        return _documents([("dataset", data)], "dataset")
    if isinstance(data, list | tuple):
        return _documents([(f"dataset[{at}]", value) for at, value in enumerate(data)], "dataset")
    raise UserError(f"dataset of type {type(data).__name__} is not read; pass a list (of a data loader: list(loader)), a tensor or a name")


def _documents(values: Sequence[tuple[str, object]], source: str) -> tuple[list[Placed], list[str]]:
    """The documents of `(place, value)`, and a note when they are under a key that nobody agreed on."""
    records = [value for _, value in values if isinstance(value, Mapping) and len(value) == 1]
    guessed = list(dict.fromkeys(repr(key) for record in records for key in record if key not in DOCUMENT_KEYS))
    known = ", ".join(DOCUMENT_KEYS)
    note = f"{source}: the documents are taken from key {', '.join(guessed[:5])}, the only one; known keys are {known}"
    return [(place, document(value, place)) for place, value in values], [note] if guessed else []


def _local_file(name: str) -> Path:
    path = Path(expanduser(name))
    if not exists(name):
        is_folder = exists(str(path.parent)) and path.parent.is_dir()
        beside = [entry.name for entry in path.parent.iterdir() if entry.is_file()] if is_folder else []
        raise UserError(f"--dataset {name!r}: no such file{nearest(path.name, beside)}")
    if path.is_dir():
        inside = sorted(entry.name for entry in path.iterdir() if entry.suffix.lower() in SUFFIXES)
        shown = ", ".join(inside[:5]) or "it holds no .txt, .json or .jsonl"
        raise UserError(f"--dataset {name!r} is a directory; give one file: {shown}")
    if path.suffix.lower() not in SUFFIXES:
        kind = path.suffix or "a file without extension"
        raise UserError(f"--dataset {name!r}: {kind} is not read; give plain text as .txt, documents as .json or .jsonl")
    return path


def _read_text(path: Path, name: str) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UserError(f"--dataset {name!r}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except OSError as error:
        raise UserError(f"--dataset {name!r} cannot be read: {error.strerror}") from None
    if control := CONTROL.search(text):
        what = f"holds control characters ({control[0]!r} at character {control.start()})"
        raise UserError(f"--dataset {name!r} {what}: it is no text; save it as plain text in UTF-8")
    if not text.strip():
        raise UserError(f"--dataset {name!r} is empty ({readable_bytes(len(text))} of white space); {INSTEAD}")
    return text


def _json_documents(text: str, name: str, *, lines: bool) -> tuple[list[Placed], list[str]]:
    pieces = list(enumerate(text.split("\n"), start=1)) if lines else [(1, text)]
    values: list[tuple[str, object]] = []
    for line, piece in pieces:
        try:
            values += [(f"{name}:{line}", json.loads(piece))] if piece.strip() else []
        except json.JSONDecodeError as error:
            hint = "; one JSON value a line belongs in a .jsonl file" if not lines and error.msg == "Extra data" else ""
            raise UserError(f"--dataset {name}:{line + error.lineno - 1}: {error.msg} (column {error.colno}){hint}") from None
    if not lines:
        value = values[0][1]
        if isinstance(value, dict) and len(value) == 1:
            key, member = next(iter(value.items()))
            value = member if isinstance(member, list) and key not in ("messages", "conversations", "input_ids") else value
        values = [(f"{name}[{at}]", member) for at, member in enumerate(value)] if isinstance(value, list) else [(name, value)]
    return _documents(values, f"--dataset {name!r}")


def document(value: object, place: str) -> Document:
    """One document of any accepted form; UserError names `place`."""
    if isinstance(value, Mapping):
        if "role" in value and set(value) <= {"role", "content", "name"}:
            raise UserError(f"{place} is a chat message of its own; wrap the messages of a chat in a list")
        key = next((key for key in DOCUMENT_KEYS if key in value), next(iter(value), None) if len(value) == 1 else None)
        if key is None:
            raise UserError(f"{place}: keys {sorted(map(str, value))} are not a document; give one of {', '.join(DOCUMENT_KEYS)}")
        if key == "input_ids":
            return _token_rows(value[key], value.get("attention_mask"), place)
        return document(value[key], place)
    if isinstance(value, str):
        return value
    if isinstance(value, Tensor | np.ndarray):
        return _token_rows(value, None, place)
    if isinstance(value, Sequence) and value and all(isinstance(member, Mapping) for member in value):
        return [_message(member, place) for member in value]
    if isinstance(value, Sequence) and value and all(isinstance(member, int) for member in value):
        return _token_rows(value, None, place)
    raise UserError(f"{place}: {type(value).__name__} is not a document; give a text, a list of chat messages, or token ids")


def _message(member: Mapping[str, object], place: str) -> Message:
    if "from" in member and "value" in member:
        names = {"human": "user", "gpt": "assistant"}
        return {"role": names.get(str(member["from"]), member["from"]), "content": member["value"]}
    if "role" not in member:
        raise UserError(f"{place}: a chat message has keys {sorted(map(str, member))}; give role and content (or from and value)")
    return dict(member)


def _token_rows(ids: object, mask: object, place: str) -> list[Tensor]:
    """1-D rows of what the mask lets through."""
    try:
        rows, kept = torch.as_tensor(ids), None if mask is None else torch.as_tensor(mask).bool()
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{place}: the token ids or the mask are not a rectangle of integers") from None
    if rows.is_floating_point() or rows.dtype == torch.bool or rows.ndim not in (1, 2) or (kept is not None and kept.shape != rows.shape):
        shown = f"{rows.dtype} {list(rows.shape)}" + ("" if kept is None else f" with mask {list(kept.shape)}")
        raise UserError(f"{place}: token ids are {shown}; give integers [seqlen] or [rows, seqlen], a mask of the same shape")
    if not rows.numel():
        raise UserError(f"{place} has no token ids; leave it out")
    rows = rows.to("cpu", torch.int64)
    kept = torch.ones_like(rows, dtype=torch.bool) if kept is None else kept.cpu()
    return [row[keep] for row, keep in zip(rows.reshape(-1, rows.shape[-1]), kept.reshape(-1, rows.shape[-1]), strict=True)]


def _hub_documents(spec: DatasetSpec) -> tuple[list[Placed], list[str]]:
    """At most the first 10 000 documents of each split, from the hub or, with HF_HUB_OFFLINE=1, from the local cache; and notes."""
    size = _probe_hub(spec.name)
    try:
        import datasets
    except ImportError:
        raise UserError(f"--dataset {spec.name!r} needs the package 'datasets' (pip install datasets); or {INSTEAD}") from None
    try:
        splits = datasets.load_dataset(spec.name, streaming=size > HUB_DOWNLOAD)
        names = spec.split or (("train",) if "train" in splits else tuple(splits)[:1])
        for name in names:
            if name not in splits:
                raise UserError(f"--dataset {spec.name!r} has no split {name!r}{nearest(name, splits)} (it has {', '.join(splits)})")
        found = [(f"{spec.name}:{name}[{at}]", row) for name in names for at, row in enumerate(islice(splits[name], HUB_DOCUMENTS))]
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"--dataset {spec.name!r} cannot be loaded: {error}; {INSTEAD}") from error
    return _documents(found, f"--dataset {spec.name!r}")


def _probe_hub(name: str) -> int:
    """Bytes of the dataset: one request with a deadline, as loading would retry for half a minute. 0 when the hub is switched off."""
    answer: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            info = huggingface_hub.HfApi().dataset_info(name, files_metadata=True, timeout=HUB_DEADLINE)
            answer.put(sum(entry.size or 0 for entry in info.siblings or ()))
        except Exception as error:
            answer.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        result = answer.get(timeout=2 * HUB_DEADLINE)
    except queue.Empty:
        result = TimeoutError(f"no answer in {2 * HUB_DEADLINE:.0f} s")
    if isinstance(result, RepositoryNotFoundError):
        hint = nearest(name, (*KNOWN_HUB, DEMO))
        raise UserError(f"--dataset {name!r} is neither a file nor a hub dataset that you may read{hint}; or {INSTEAD}")
    if isinstance(result, OfflineModeIsEnabled):
        return 0
    if isinstance(result, Exception):
        cached = "if it is in the hub's cache, set HF_HUB_OFFLINE=1"
        raise UserError(f"--dataset {name!r} is no file, and the hub cannot be reached ({result}); {INSTEAD}; {cached}")
    return result
