"""Bit packing against slow, obvious reference code and against compressed-tensors' own packer."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenround.numerics import packing
from evenround.numerics.packing import loose_words, pack_awq, pack_bits, packed_words, unpack_awq, unpack_bits, unpack_loose

BITS = st.integers(2, 8)


def reference_words(codes: list[int], bits: int) -> list[int]:
    """One row, bit by bit, with Python integers."""
    text = sum(code << index * bits for index, code in enumerate(codes))
    words = [text >> 32 * word & 0xFFFFFFFF for word in range(packed_words(len(codes), bits))]
    return [word - (1 << 32) if word >> 31 else word for word in words]


def random_codes(shape: tuple[int, ...], bits: int, seed: int) -> Tensor:
    return torch.randint(0, 1 << bits, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@settings(deadline=None)
@given(bits=BITS, codes=st.lists(st.integers(0, 255), max_size=130))
def test_a_row_is_one_little_endian_bit_string(bits: int, codes: list[int]) -> None:
    codes = [code & (1 << bits) - 1 for code in codes]
    words = pack_bits(torch.tensor(codes, dtype=torch.uint8), bits)
    assert words.dtype == torch.int32
    assert words.tolist() == reference_words(codes, bits)
    assert unpack_bits(words, bits, len(codes)).tolist() == codes


@settings(deadline=None)
@given(bits=BITS, shape=st.lists(st.integers(0, 37), min_size=1, max_size=3), axis=st.integers(0, 2), seed=st.integers(0, 99))
def test_round_trip_along_any_axis(bits: int, shape: list[int], axis: int, seed: int) -> None:
    axis %= len(shape)
    codes = random_codes(tuple(shape), bits, seed)
    words = pack_bits(codes, bits, axis)
    assert list(words.shape) == [*shape[:axis], packed_words(shape[axis], bits), *shape[axis + 1 :]]
    assert words.is_contiguous()
    assert torch.equal(unpack_bits(words, bits, shape[axis], axis), codes)


@settings(deadline=None)
@given(bits=BITS, rows=st.integers(1, 9), columns=st.integers(1, 70), axis=st.integers(0, 1), seed=st.integers(0, 99))
def test_same_bytes_as_compressed_tensors(bits: int, rows: int, columns: int, axis: int, seed: int) -> None:
    codes = random_codes((rows, columns), bits, seed)
    signed = (codes.to(torch.int16) - (1 << bits - 1)).to(torch.int8)
    assert torch.equal(pack_bits(codes, bits, axis), pack_to_int32(signed, bits, packed_dim=axis))


@pytest.mark.parametrize("bits", range(2, 9))
def test_slices_join_seamlessly(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = random_codes((11, 45), bits, 0)
    whole = pack_bits(codes, bits)
    monkeypatch.setattr(packing, "_SLICE", 100)
    assert torch.equal(pack_bits(codes, bits), whole)
    assert torch.equal(unpack_bits(whole, bits, 45), codes)


@settings(deadline=None)
@given(bits=BITS, codes=st.lists(st.integers(0, 255), max_size=70))
def test_loose_layout_leaves_high_bits_unused(bits: int, codes: list[int]) -> None:
    codes = [code & (1 << bits) - 1 for code in codes]
    per_word = 32 // bits
    words = torch.zeros(loose_words(len(codes), bits), dtype=torch.int64)
    for index, code in enumerate(codes):
        words[index // per_word] |= code << index % per_word * bits
    assert unpack_loose(words.to(torch.int32), bits, len(codes)).tolist() == codes


@settings(deadline=None)
@given(rows=st.integers(1, 5), words=st.integers(1, 5), seed=st.integers(0, 99))
def test_awq_nibble_order(rows: int, words: int, seed: int) -> None:
    codes = random_codes((rows, words * 8), 4, seed)
    packed = pack_awq(codes)
    for row in range(rows):
        for word in range(words):
            value = int(packed[row, word]) & 0xFFFFFFFF
            for column, nibble in enumerate((0, 4, 1, 5, 2, 6, 3, 7)):
                assert value >> 4 * nibble & 15 == codes[row, 8 * word + column]
    assert torch.equal(unpack_awq(packed), codes)


def test_non_contiguous_input() -> None:
    codes = random_codes((64, 40), 5, 0)
    assert torch.equal(pack_bits(codes.t(), 5), pack_bits(codes.t().contiguous(), 5))


def test_misuse_is_named() -> None:
    codes = torch.zeros(8, dtype=torch.uint8)
    words = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="codes are torch.int32, not torch.uint8"):
        pack_bits(codes.int(), 4)
    with pytest.raises(ValueError, match="9 bits are not 2 to 8"):
        pack_bits(codes, 9)
    with pytest.raises(ValueError, match="code 16 does not fit 4 bits"):
        pack_bits(codes + 16, 4)
    with pytest.raises(ValueError, match="1 bits are not 2 to 8"):
        unpack_bits(words, 1, 8)
    with pytest.raises(ValueError, match="words are torch.int64, not torch.int32"):
        unpack_bits(words.long(), 4, 8)
    with pytest.raises(ValueError, match="1 words cannot hold 9 codes of 4 bits, which take 2"):
        unpack_bits(words, 4, 9)
    with pytest.raises(ValueError, match="1 words cannot hold 11 codes of 3 bits, which take 2"):
        unpack_loose(words, 3, 11)
    with pytest.raises(ValueError, match="12 columns are not a multiple of 8"):
        pack_awq(torch.zeros(2, 12, dtype=torch.uint8))
