"""Hints and sizes in messages."""

import pytest

from evenround.errors import UserError, nearest, readable_bytes


def test_a_user_error_is_a_value_error() -> None:
    assert issubclass(UserError, ValueError)


@pytest.mark.parametrize(
    ("name", "choices", "hint"),
    [
        ("W4A61", ("W4A16", "W8A16"), "; did you mean 'W4A16'?"),
        ("w4a16", ("W4A16", "W8A16"), "; did you mean 'W4A16'?"),
        ("--group-sise", ("--group_size", "--bits"), "; did you mean '--group_size'?"),
        ("nothing alike", ("W4A16", "W8A16"), ""),
        ("anything", (), ""),
    ],
)
def test_nearest(name: str, choices: tuple[str, ...], hint: str) -> None:
    assert nearest(name, choices) == hint


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (-(3 * 1024**2), "-3.0 MiB"),
        (5 * 1024**3, "5.0 GiB"),
        (2048 * 1024**4, "2048.0 TiB"),
    ],
)
def test_readable_bytes(count: int, text: str) -> None:
    assert readable_bytes(count) == text
