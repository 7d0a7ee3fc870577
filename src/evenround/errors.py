"""Errors for the person at the keyboard.

Every message names the value that is wrong, the place it came from (flag, file, layer) and what to do instead. Anything that is not a
`UserError` is a bug of ours and keeps its traceback.
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A wrong input, with a message that says what to do next. The CLI prints it without a traceback and exits with code 2."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """A hint such as `; did you mean 'W4A16'?` for the closest of `choices`, or an empty string when none is close."""
    by_folded = {choice.lower().replace("_", "-"): choice for choice in choices}
    close = difflib.get_close_matches(name.lower().replace("_", "-"), list(by_folded), n=1, cutoff=0.5)
    return f"; did you mean {by_folded[close[0]]!r}?" if close else ""


def readable_bytes(count: float) -> str:
    """`1536` → `1.5 KiB`: binary units with one decimal, for messages and tables."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(abs(count), 1) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
