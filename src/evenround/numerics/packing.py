"""Dense little-endian bit packing of small unsigned integers into int32 words, and the element orders that checkpoint formats use.

One layout serves every width from 2 to 8 bits: code i of a row occupies bits `i * bits … (i + 1) * bits - 1` of one long bit string, bit k
of which is bit `k % 32` of word `k // 32`. Codes may straddle words; 32 codes fill exactly `bits` words. GPTQ-style files (also their 3-bit
form, which is usually described as a special case) and compressed-tensors 0.18 and later are this layout along different axes.

Eight codes are exactly `bits` bytes, so rows are packed eight codes at a time in an int64 whose low bytes are the result; rows are taken in
slices, so that temporaries stay at a few MiB whatever the weight's size. What we gave up: big-endian hosts (words are viewed as bytes).
"""

import torch
from torch import Tensor

MIN_BITS, MAX_BITS = 2, 8
WORD_BITS = 32

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ: nibble k of a word (from the lowest) holds column AWQ_COLUMNS[k] of the word's eight columns."""

_SLICE = 1 << 20
"""Codes packed or unpacked at once."""


def packed_words(count: int, bits: int) -> int:
    """Number of int32 words that hold `count` codes of `bits` bits (the last word may have unused high bits, which are zero)."""
    return -(-count * bits // WORD_BITS)


def pack_bits(codes: Tensor, bits: int, axis: int = -1) -> Tensor:
    """Pack `codes` (uint8, each below 2^bits) along `axis`.

    Returns contiguous int32 of the same shape but `packed_words(n, bits)` along `axis`. Raises `ValueError` for another dtype, another
    width or a code that does not fit.
    """
    _check_bits(bits)
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes are {codes.dtype}, not torch.uint8")
    if codes.numel() and int(codes.max()) >> bits:
        raise ValueError(f"code {int(codes.max())} does not fit {bits} bits")
    rows = codes.movedim(axis, -1)
    count = rows.shape[-1]
    words = torch.empty((*rows.shape[:-1], packed_words(count, bits)), dtype=torch.int32, device=codes.device)
    if not codes.numel():
        return words.movedim(-1, axis).contiguous()
    flat_rows, flat_words = rows.reshape(-1, count), words.view(-1, words.shape[-1])
    for part in _slices(flat_rows.shape[0], count):
        flat_words[part] = _pack_rows(flat_rows[part], bits)
    return words.movedim(-1, axis).contiguous()


def unpack_bits(words: Tensor, bits: int, count: int, axis: int = -1) -> Tensor:
    """The `count` codes along `axis` that `pack_bits` packed: contiguous uint8, `count` long along `axis`.

    Raises `ValueError` for another dtype, another width, or when `words` is not as long along `axis` as `count` codes need.
    """
    _check_bits(bits)
    rows = _word_rows(words, packed_words(count, bits), count, bits, axis)
    codes = torch.empty((*rows.shape[:-1], count), dtype=torch.uint8, device=words.device)
    if not codes.numel():
        return codes.movedim(-1, axis).contiguous()
    flat_rows, flat_codes = rows.reshape(-1, rows.shape[-1]), codes.view(-1, count)
    for part in _slices(flat_rows.shape[0], count):
        flat_codes[part] = _unpack_rows(flat_rows[part], bits, count)
    return codes.movedim(-1, axis).contiguous()


def loose_words(count: int, bits: int) -> int:
    """Number of words in the loose layout: `32 // bits` codes a word, never straddling."""
    return -(-count // (WORD_BITS // bits))


def unpack_loose(words: Tensor, bits: int, count: int, axis: int = -1) -> Tensor:
    """Read the loose layout of compressed-tensors up to 0.17 (`32 // bits` codes a word, high bits unused); arguments as `unpack_bits`."""
    _check_bits(bits)
    rows = _word_rows(words, loose_words(count, bits), count, bits, axis)
    shifts = torch.arange(0, WORD_BITS - bits + 1, bits, dtype=torch.int32, device=words.device)
    codes = (rows[..., None] >> shifts & (1 << bits) - 1).to(torch.uint8).flatten(-2)[..., :count]
    return codes.movedim(-1, axis).contiguous()


def pack_awq(codes: Tensor) -> Tensor:
    """Pack 4-bit codes `[rows, columns]` along columns in AWQ's nibble order: int32 `[rows, columns / 8]`; columns a multiple of 8."""
    rows, columns = codes.shape
    if columns % 8:
        raise ValueError(f"{columns} columns are not a multiple of 8")
    return pack_bits(codes.view(rows, columns // 8, 8)[..., list(AWQ_COLUMNS)].reshape(rows, columns), 4)


def unpack_awq(words: Tensor) -> Tensor:
    """Inverse of `pack_awq`: uint8 `[rows, 8 * words]`."""
    rows, count = words.shape
    codes = torch.empty((rows, count, 8), dtype=torch.uint8, device=words.device)
    codes[..., list(AWQ_COLUMNS)] = unpack_bits(words, 4, count * 8).view(rows, count, 8)
    return codes.view(rows, count * 8)


def _check_bits(bits: int) -> None:
    if not MIN_BITS <= bits <= MAX_BITS:
        raise ValueError(f"{bits} bits are not {MIN_BITS} to {MAX_BITS}")


def _word_rows(words: Tensor, expected: int, count: int, bits: int, axis: int) -> Tensor:
    if words.dtype != torch.int32:
        raise ValueError(f"words are {words.dtype}, not torch.int32")
    rows = words.movedim(axis, -1)
    if rows.shape[-1] != expected:
        raise ValueError(f"{rows.shape[-1]} words cannot hold {count} codes of {bits} bits, which take {expected}")
    return rows


def _slices(rows: int, count: int) -> list[slice]:
    step = max(1, _SLICE // count)
    return [slice(start, start + step) for start in range(0, rows, step)]


def _pack_rows(codes: Tensor, bits: int) -> Tensor:
    """uint8 `[rows, n]` → int32 `[rows, packed_words(n)]`."""
    rows, count = codes.shape
    words = packed_words(count, bits)
    padded = torch.nn.functional.pad(codes, (0, -count % WORD_BITS)).reshape(rows, -1, 8)
    eights = padded[..., 0].to(torch.int64)
    for position in range(1, 8):
        eights |= padded[..., position].to(torch.int64) << position * bits
    octets = eights.unsqueeze(-1).view(torch.uint8)[..., :bits]
    return octets.reshape(rows, -1).view(torch.int32)[:, :words]


def _unpack_rows(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 `[rows, packed_words(n)]` → uint8 `[rows, n]`."""
    rows = words.shape[0]
    padded = torch.nn.functional.pad(words, (0, -words.shape[1] % bits)).contiguous().view(torch.uint8).view(rows, -1, bits)
    octets = torch.zeros((*padded.shape[:2], 8), dtype=torch.uint8, device=words.device)
    octets[..., :bits] = padded
    eights = octets.view(torch.int64)
    codes = torch.empty((*padded.shape[:2], 8), dtype=torch.uint8, device=words.device)
    for position in range(8):
        codes[..., position] = (eights[..., 0] >> position * bits & (1 << bits) - 1).to(torch.uint8)
    return codes.view(rows, -1)[:, :count]
