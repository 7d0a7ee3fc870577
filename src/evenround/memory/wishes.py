"""The grammar of devices: from a wish such as `cuda:0=70GiB,cuda:1` to numbered devices, before any driver is asked for memory.

Why this way: one grammar for text, numbers, lists and maps, so a wish means the same from the command line and from Python, and a wish that
can be read in two ways is refused. What stands before a ":" decides: a type of device there makes a list of devices, anything else is a
layer's name. What we gave up: capacities and simulated devices in maps of layers, lists that mix kinds of devices.
"""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from evenround.checkpoint import parse_size
from evenround.errors import UserError, nearest

ACCELERATORS = ("cuda", "xpu", "mps", "hpu", "mtia")
"""Types that can be planned for wherever one is; a machine's own accelerator is known besides, whatever its type."""
MOST_DEVICES = 128
"""torch numbers devices in 8 bits with a sign."""
_ALIASES = ("gpu", "nvidia", "amd", "rocm", "hip")
_FORMS = "use auto, cpu, an accelerator such as cuda:0, or its number, several with commas between"
_JSON = 'a JSON object such as {"mlp.down_proj": 1}'
_HEAD = re.compile(r"(?:([a-z]\w*)\s*(?:(:)\s*|(?==)|$))?(.*)", re.IGNORECASE | re.DOTALL)
_ONE = re.compile(r"(\d{1,9})?\s*(?:=\s*(.*))?", re.DOTALL)
_MANY = re.compile(r"(\d{1,9})\s*x\s*(.*)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Item:
    """A device as wished for: not yet known to be here."""

    kind: str
    number: int = 0
    capacity: int | None = None

    @property
    def name(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.number}"


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads one wish on a machine that has `count` accelerators of type `own`."""

    place: str
    """Flag and wish, which every error begins with."""
    planning: bool
    own: str | None
    count: int

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(("auto", "cpu", "sim", *ACCELERATORS, self.own or "cuda")))

    def fail(self, text: str) -> UserError:
        return UserError(f"{self.place}: {text}")

    def unknown(self, kind: str) -> UserError:
        """The error for a type of device that is not known, with the nearest one."""
        alike = f"; did you mean {self.own or 'cuda'!r}?" if kind in _ALIASES else nearest(kind, self.kinds)
        return self.fail(f"unknown type of device {kind!r}{alike or '.'} Types: {', '.join(self.kinds)}; a layer's rule is written mlp:0")

    def text(self, value: object) -> str:
        """One device's value as text."""
        if isinstance(value, bool) or not isinstance(value, str | int | torch.device):
            raise self.fail(f"{value!r} is not a device; give text, a number or a torch.device")
        return str(value).strip()

    def read(self, wish: object) -> tuple[list[Item], dict[str, int]]:
        """Devices and the rules for layers, as indices of them."""
        if isinstance(wish, Mapping):
            return self.rules(list(wish.items()))
        if isinstance(wish, Sequence) and not isinstance(wish, str | bytes):
            text = ",".join(self.text(entry) for entry in wish)
        else:
            text = self.text(wish)
        if not text:
            raise self.fail(f"is empty; {_FORMS}")
        if text.startswith("{"):
            try:
                pairs = json.loads(text, object_pairs_hook=list)
            except (ValueError, RecursionError) as error:
                raise self.fail(f"not {_JSON}: {error}") from None
            return self.rules(pairs)
        parts = [part.strip() for part in text.split(",")]
        if "" in parts:
            raise self.fail("there is nothing before or after a comma; leave that comma out")
        rules = [self.rule(part) for part in parts]
        if not any(rules):
            return self.devices(parts), {}
        for part, rule in zip(parts, rules, strict=True):
            if rule is None:
                raise self.fail(f"{part!r} is not layer:device as the others are; a regex that holds a comma is given in {_JSON}")
        return self.rules([rule for rule in rules if rule])

    def rule(self, part: str) -> tuple[str, str] | None:
        """`mlp:1` → its two sides; None for devices. A name that looks like a misspelt type is refused."""
        at = _outside_brackets(part, ":=")
        at = part.find(":") if at < 0 else at
        name = part[:at].strip()
        if at < 0 or part[at] == "=" or name.lower() in self.kinds:
            return None
        if name.lower() in _ALIASES or difflib.get_close_matches(name.lower(), ("cpu", "cuda", "xpu"), n=1, cutoff=0.65):
            raise UserError(f"{self.unknown(name.lower())}, and where its name looks like a type, in {_JSON}")
        return name, part[at + 1 :].strip()

    def rules(self, pairs: Sequence[tuple[object, object]]) -> tuple[list[Item], dict[str, int]]:
        """Devices of a map of layers, and the map as indices of them."""
        targets: dict[str, Item] = {}
        for key, value in pairs:
            if not isinstance(key, str):
                raise self.fail(f"the key {key!r} is not text; a map goes from layers' names to devices, capacities are written 0=24GiB")
            name = key.strip()
            if not name:
                raise self.fail(f"a layer's name is missing before {value!r}; write mlp.down_proj:1")
            if name in targets:
                raise self.fail(f"{name!r} has two devices; give it one")
            try:
                re.compile(name)
            except (re.error, OverflowError, RecursionError) as error:
                raise self.fail(f"{name!r} is not a regex ({error}); one that holds a comma is given in {_JSON}") from None
            targets[name] = self.target(name, value)
        if not targets:
            raise self.fail(f"is a map without rules; give {_JSON}, or {_FORMS.removeprefix('use ')}")
        self.check_kinds({item.kind for item in targets.values()} - {"cpu"})
        items = sorted(set(targets.values()), key=lambda item: (item.kind == "cpu", item.number))
        return items, {name: items.index(item) for name, item in targets.items()}

    def target(self, name: str, value: object) -> Item:
        """The device of one rule."""
        text = self.text(value)
        if not text:
            raise self.fail(f"{name!r} has no device after it; write {name}:0")
        if re.match(r"sim\b", text, re.IGNORECASE):
            raise self.fail(f"{name!r} cannot be put on {text!r}: a map names accelerators or cpu, not simulated devices")
        if "=" in text or _MANY.fullmatch(text.rpartition(":")[2].strip()):
            raise self.fail(f"{name!r} has {text!r}: a map's devices take no capacity; write one device, such as cuda:0")
        return self.one(text, None)

    def devices(self, parts: list[str]) -> list[Item]:
        """The devices of a list, each once, of one kind."""
        items = self.whole(parts[0]) if len(parts) == 1 else []
        carried = None
        for part in parts if not items else ():
            items.append(self.one(part, carried))
            carried = None if items[-1].kind == "cpu" else items[-1].kind
        names = [item.name for item in items]
        for name in names:
            if names.count(name) > 1:
                raise self.fail(f"names {name} twice; name each device once")
        self.check_kinds({item.kind for item in items})
        if items[0].kind == "sim" and sorted(item.number for item in items) != list(range(len(items))):
            raise self.fail(f"{len(items)} simulated devices must be numbered 0 to {len(items) - 1}, as in sim:0=1GiB,1=2GiB")
        return items

    def check_kinds(self, kinds: set[str]) -> None:
        """Refuse devices that do not work together."""
        if len(kinds) < 2:
            return
        if "sim" in kinds:
            raise self.fail("mixes simulated and real devices; name one sort")
        if "cpu" in kinds:
            raise self.fail("the CPU works beside accelerators only for layers that a map puts there, such as mlp:cpu; name one of them")
        raise self.fail(f"mixes {' and '.join(sorted(kinds))}, which do not work together; name devices of one type")

    def head(self, part: str) -> tuple[str | None, str]:
        """`cuda:0=70GiB` → `cuda` and `0=70GiB`; the type is None where there is none."""
        found = _HEAD.fullmatch(part)
        assert found is not None  # it matches any text
        kind, colon, body = found.group(1), found.group(2), found.group(3).strip()
        if kind is not None and kind.lower() not in self.kinds:
            raise self.unknown(kind.lower())
        if colon and (not body or body.startswith("=")):
            raise self.fail(f"{part!r} is not understood: a number is missing after the ':'; write {kind.lower()}:0")
        return kind and kind.lower(), body

    def whole(self, part: str) -> list[Item]:
        """Devices of the forms that stand alone: `auto`, `4x80GiB`, `sim:256MiB`. Empty for any other form."""
        kind, body = self.head(part)
        if kind == "auto" and not body:
            return [Item(self.own, number) for number in range(self.count)] if self.own else [Item("cpu")]
        many = _MANY.fullmatch(body)
        if many and kind not in ("auto", "cpu"):
            count = int(many.group(1))
            if not 1 <= count <= MOST_DEVICES:
                raise self.fail(f"there can be 1 to {MOST_DEVICES} devices, not {count}")
            capacity = self.capacity(part, many.group(2))
            return [Item(kind or self.own or "cuda", number, capacity) for number in range(count)]
        if kind == "sim" and body and "=" not in body and not re.fullmatch(r"\d{1,3}", body):
            return [Item("sim", 0, self.capacity(part, body))]
        return []

    def one(self, part: str, carried: str | None) -> Item:
        """One numbered device, or the CPU; `carried` is the type of the one before it, which holds for bare numbers."""
        kind, body = self.head(part)
        found = _ONE.fullmatch(body)
        if kind == "auto":
            raise self.fail("auto stands alone, without numbers, capacities and other devices")
        if body.startswith("-"):
            raise self.fail(f"{part!r}: devices are numbered from 0")
        if _MANY.fullmatch(body):
            raise self.fail(f"{part!r} stands alone, for accelerators; else give each device its own, such as 0=80GiB,1=24GiB or cpu=8GiB")
        if found is None or (kind is None and found.group(1) is None):
            raise self.fail(f"{part!r} is not understood; {_FORMS}")
        kind = kind or carried or self.own or "cuda"
        if kind == "cpu" and found.group(1) is not None:
            raise self.fail(f"{part!r}: there is one CPU, without a number; write cpu")
        number = int(found.group(1) or 0)
        capacity = None if found.group(2) is None else self.capacity(part, found.group(2))
        if kind == "sim" and capacity is None:
            raise self.fail(f"{part!r} has no capacity; write sim:256MiB, sim:4x256MiB or sim:0=1GiB,1=2GiB")
        if number >= MOST_DEVICES:
            raise self.fail(f"{part!r}: devices are numbered from 0 to {MOST_DEVICES - 1}")
        return Item(kind, number, capacity)

    def capacity(self, part: str, text: str) -> int:
        """Bytes. A small number without a unit is refused: `4x80` means gigabytes and would be read as bytes."""
        if not text:
            raise self.fail(f"{part!r} ends where a capacity should follow; add one, such as 80GiB")
        size = parse_size(text, self.place)
        if size < 1024 and not text[-1].isalpha():
            raise self.fail(f"{part!r}: the capacity {text} has no unit; write {text}GiB")
        return size

    def require(self, item: Item) -> None:
        """Raise `UserError` unless this real device is here."""
        if item.kind == "cpu" or (item.kind == self.own and item.number < self.count):
            return
        last = f" to {self.own}:{self.count - 1}" if self.count > 1 else ""
        there = f"{self.own}:0{last}" if self.own else "only the CPU"
        plan = ", or give the capacity of each, such as 4x80GiB, to plan for devices that are not here" if self.planning else ""
        raise self.fail(f"there is no {item.name} here ({there}); use auto for what is here{plan}")


def _outside_brackets(text: str, marks: str) -> int:
    """Where the first of `marks` stands that is neither inside brackets, as in the regex `(?:up|gate)`, nor escaped; -1: nowhere."""
    depth, escaped = 0, False
    for place, sign in enumerate(text):
        if escaped or sign == "\\":
            escaped = not escaped
        elif sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        elif sign in marks and depth <= 0:
            return place
    return -1
