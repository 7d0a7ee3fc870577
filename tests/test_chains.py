"""Chained inputs: what is written is read, wherever it lies, and files of chains are never left behind."""

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenround import UserError
from evenround.chains import HOST, Chain, Chains, Home
from evenround.manifest import Manifest
from evenround.memory.simulate import SimulatedDevices
from small_jobs import GIB

HYPOTHESIS = {"deadline": None, "derandomize": True, "database": None}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chains")


@given(st.data())
@settings(max_examples=60, **HYPOTHESIS)  # type: ignore[arg-type]
def test_any_samples_written_anywhere_are_read_back(folder: Path, data: st.DataObject) -> None:
    """Against one plain tensor that is written alike."""
    with SimulatedDevices([GIB, GIB]) as devices:
        kinds = st.sampled_from([HOST, torch.device("cpu", 0), torch.device("cpu", 1), "disk"])
        places = data.draw(
            st.lists(st.tuples(kinds, st.integers(0, 4)), min_size=1, max_size=4).filter(lambda all_: any(n for _, n in all_))
        )
        homes = [Home(HOST, rows, folder) if place == "disk" else Home(place, rows) for place, rows in places]  # type: ignore[arg-type]
        samples, dtype = sum(rows for _, rows in places), data.draw(st.sampled_from(DTYPES))
        plain = torch.randn(samples, 3, 5, generator=torch.Generator().manual_seed(samples)).to(dtype)
        chain = Chain.empty((samples, 3, 5), dtype, homes)
        assert chain.shape == (samples, 3, 5) and len(chain) == samples and chain.dtype == dtype and chain.nbytes == plain.nbytes
        on_devices = sum(rows for place, rows in places if place not in (HOST, "disk"))
        assert sum(devices.used) == on_devices * 3 * 5 * dtype.itemsize
        chain.write(range(samples), plain)
        for _ in range(3):
            numbers = data.draw(st.lists(st.integers(0, samples - 1), min_size=1, max_size=6))
            where = data.draw(st.sampled_from([HOST, torch.device("cpu", 0), torch.device("cpu", 1)]))
            read = chain.read(numbers, where)
            assert read.device == where and torch.equal(read.cpu(), plain[numbers])
            fresh = list(dict.fromkeys(numbers))
            values = torch.randn(len(fresh), 3, 5).to(dtype)
            chain.write(fresh, values.to(where))
            plain[fresh] = values
        rows = data.draw(st.integers(1, 5))
        parts = list(chain.on_host(rows))
        assert torch.equal(torch.cat(parts), plain) and max(len(part) for part in parts) <= rows
        assert all(part.device == HOST for part in parts)
        with pytest.raises(IndexError):
            chain.row(samples)
    assert not list(folder.iterdir())  # files on disk have no name


def test_what_is_read_is_a_tensor_of_its_own_of_a_size_that_does_not_depend_on_the_samples() -> None:
    with SimulatedDevices([GIB, GIB]) as devices:
        chain = Chain.empty((6, 4, 2), torch.float32, [Home(torch.device("cpu", 0), 3), Home(torch.device("cpu", 1), 3)])
        chain.write(range(6), torch.zeros(6, 4, 2))
        before = devices.used
        for numbers in ([0, 1], [0, 5], [4, 4]):
            devices.reset_peak()
            read = chain.read(numbers, torch.device("cpu", 0))
            assert devices.used == (before[0] + 2 * 4 * 2 * 4, before[1]) and devices.peak == devices.used
            read.fill_(1)
            assert float(chain.read([numbers[0]], HOST).sum()) == 0
            del read


def test_a_file_is_without_a_name_at_once_and_gives_its_memory_back(tmp_path: Path) -> None:
    chain = Chain.empty((4, 8, 16), torch.bfloat16, [Home(HOST, 4, tmp_path)])
    assert not list(tmp_path.iterdir()) and chain.parts[0].device == HOST
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert len(mapped) == 1 and "(deleted)" in mapped[0]
    chain.write([3], torch.ones(1, 8, 16, dtype=torch.bfloat16))
    assert float(chain.read([3], HOST).sum()) == 128
    del chain
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_full_disk_is_told_before_anything_is_written_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, offset: int, length: int) -> None:
        assert length == 4 * 8 * 16 * 2
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError) as caught:
        Chain.empty((4, 8, 16), torch.bfloat16, [Home(HOST, 4, tmp_path)])
    assert str(tmp_path) in str(caught.value) and "1.0 KiB" in str(caught.value) and "No space left" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gone"):
        Chain.empty((4, 8, 16), torch.bfloat16, [Home(HOST, 4, tmp_path / "gone")])


def test_the_same_chain_counts_once() -> None:
    one, other = (Chain.empty((2, 3, 4), torch.float32, [Home(HOST, 2)]) for _ in range(2))
    assert Chains(one, one).tensors == {"float": one} and Chains(one, other).tensors == {"float": one, "quantized": other}


def test_homes_without_rows_take_nothing() -> None:
    chain = Chain.empty((2, 3, 4), torch.float32, [Home(HOST, 0), Home(HOST, 2), Home(HOST, 0)])
    assert len(chain.parts) == 1


@pytest.mark.parametrize("two", [False, True], ids=["one chain", "two chains"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chains_go_on_in_other_places_than_they_were_saved_from(dtype: torch.dtype, two: bool, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(7, 3, 5, generator=generator).to(dtype) for _ in range(2)]
    with SimulatedDevices([GIB, GIB]) as devices:
        first, second = torch.device("cpu", 0), torch.device("cpu", 1)
        saved_from = [Home(first, 2), Home(second, 5)]
        made = [Chain.empty((7, 3, 5), dtype, saved_from) for _ in values]
        for chain, rows in zip(made, values, strict=True):
            chain.write(range(7), rows)
        manifest = Manifest(tmp_path / ".evenround", {})
        manifest.commit(Chains(made[0], made[two]), None)
        del made, chain
        assert devices.used == (0, 0)
        for homes in ([Home(second, 7)], [Home(HOST, 7)], [Home(first, 6), Home(HOST, 1)], [Home(HOST, 7, tmp_path)], saved_from):
            loaded = Manifest.open(tmp_path, {}).chains(lambda samples, homes=homes: homes)
            assert torch.equal(torch.cat(list(loaded.float_inputs.on_host())), values[0])
            assert torch.equal(torch.cat(list(loaded.quantized_inputs.on_host())), values[two])
            assert (loaded.quantized_inputs is loaded.float_inputs) == (not two)
            rows = [sum(home.rows for home in homes if home.device == device) for device in (first, second)]
            assert devices.used == tuple((1 + two) * count * 3 * 5 * dtype.itemsize for count in rows)
            del loaded
    assert [path.name for path in tmp_path.iterdir()] == [".evenround"]
