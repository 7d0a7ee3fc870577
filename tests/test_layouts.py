"""Layouts: auto-round's allocator to the letter, cuts and chains as even as can be, and what is tried in which order."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenround.config import TuneConfig
from evenround.layouts import Bounds, Drafter, Wish, greedy, relative_seconds, wishes
from evenround.memory.place import ON_HOST, Layout
from evenround.rehearsal import Profile, Rehearsed, profile, samples_of_step
from small_jobs import TUNE, Small

GB = 1e9


def test_greedy_gives_the_worked_example_of_auto_round() -> None:
    """Mission §2: 30, 40 and 40 GB; bytes needed are mem_per_param (2) times those listed."""
    sizes = {"q": 4, "k": 1, "v": 1, "o": 4, "gate": 11, "up": 11, "down": 11}
    placed = greedy({name: 2 * size * GB for name, size in sizes.items()}, [30 * GB, 40 * GB, 40 * GB])
    assert placed == {"gate": 2, "up": 1, "down": 0, "q": 2, "o": 2, "k": 1, "v": 1}


def test_greedy_prefers_a_neighbours_device_and_room_to_either() -> None:
    # "a" and "b" are the largest: b on 0, a on 1. "c" stands beside b: scores are 3/1 + 1 = 4 on device 0, 3.5/1 on device 1.
    assert greedy({"a": 10, "b": 9, "c": 1}, [12, 13.5]) == {"a": 1, "b": 0, "c": 0}
    assert greedy({"b": 9, "a": 10, "c": 1}, [12, 13.5]) == {"a": 1, "b": 0, "c": 1}  # beside a now
    # Nobody has room for c: it goes where most is free, although b, its neighbour, is elsewhere.
    assert greedy({"a": 10, "b": 9, "c": 5}, [12, 14]) == {"a": 1, "b": 0, "c": 1}


def test_greedy_with_fewer_layers_than_devices_fills_from_the_last() -> None:
    assert greedy({"a": 3, "b": 5}, [9, 9, 9]) == {"b": 2, "a": 1}
    assert greedy({}, [9]) == {}


# Cuts. A group of one block whose modules cost what the test says; brute force over all contiguous cuts is the reference.

SINGLE = Wish(strategy="split", micro_batch=1)


def made_up(costs: Sequence[int], chain: int = 0) -> Profile:
    """Modules u0, u1, … that keep so many bytes of one sample, and nothing else."""
    kept = {f"u{at}": cost for at, cost in enumerate(costs)}
    return Profile(tuple(kept), kept, {}, {}, {}, {}, chain)


@pytest.fixture(scope="module")
def group() -> Rehearsed:
    return Small().rehearsed()


def fullest(cut: Sequence[int], costs: Sequence[int], extra: Sequence[float], shares: Sequence[float]) -> float:
    """How full the fullest device is for its capacity, if device i has the units from cut[i] up to cut[i + 1]."""
    return max((sum(costs[cut[at] : cut[at + 1]]) + extra[at]) / shares[at] for at in range(len(shares)))


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=7),
    st.lists(st.tuples(st.integers(1, 8), st.integers(-5, 30)), min_size=2, max_size=4),
)
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_no_contiguous_cut_is_more_even(costs: list[int], devices: list[tuple[int, int]]) -> None:
    group = _group()
    capacities, extra = [size * 100 for size, _ in devices], [float(value) for _, value in devices]
    shares = [capacity / max(capacities) for capacity in capacities]
    layout = Drafter(group, made_up(costs), capacities, Bounds()).layout(SINGLE, extra)
    (places,) = layout.replicas
    ordered = [places[f"u{at}"] for at in range(len(costs))]
    assert ordered == sorted(ordered) and places[""] == 0
    got = max(
        (sum(cost for cost, on in zip(costs, ordered, strict=True) if on == at) + extra[at]) / shares[at] for at in range(len(shares))
    )
    inner = itertools.combinations_with_replacement(range(len(costs) + 1), len(devices) - 1)
    best = min(fullest((0, *cut, len(costs)), costs, extra, shares) for cut in inner)
    assert got == pytest.approx(best, abs=1e-6)


_CACHE: list[Rehearsed] = []


def _group() -> Rehearsed:
    """Hypothesis and fixtures of a function do not go together."""
    if not _CACHE:
        _CACHE.append(Small().rehearsed())
    return _CACHE[0]


def test_a_cut_counts_everything_that_a_module_holds(group: Rehearsed) -> None:
    parts = Profile(("a", "b"), {"a": 10, "b": 10}, {"a": 100}, {"a": 200}, {"a": 40}, {"b": 300}, 7)
    drafter = Drafter(group, parts, [1000, 1000], Bounds())
    wish = Wish(strategy="split", micro_batch=3)
    assert drafter.costs_of(drafter.layout(wish), wish) == [3 * 10 + 100 + 200 + 40, 3 * 10 + 300]
    on_host = replace(wish, state_on_host=True)
    layout = drafter.layout(on_host)
    assert drafter.costs_of(layout, on_host) == [3 * 10 + 40, 3 * 10 + 300] and layout.owners == {"a": ON_HOST}
    flights = replace(wish, strategy="pipeline", in_flight=2)
    assert drafter.costs_of(drafter.layout(flights), flights) == [6 * 10 + 340, 6 * 10 + 300]
    recomputed = replace(wish, recompute=True)
    assert drafter.costs_of(drafter.layout(recomputed), recomputed) == [340, 300]  # neither is a block, whose input would be kept


def test_everything_is_on_one_device_if_that_is_wished_and_it_is_the_largest(group: Rehearsed) -> None:
    drafter = Drafter(group, made_up([5, 5]), [10, 30, 30], Bounds())
    assert drafter.layout(Wish(strategy="single", micro_batch=2)).replicas == ({"": 1},) and drafter.largest == 1
    assert drafter.layout(Wish(strategy="share", replicas=3, micro_batch=2)).replicas == ({"": 0}, {"": 1}, {"": 2})


def test_weights_of_replicas_are_dealt_out_by_size_for_the_capacity(group: Rehearsed) -> None:
    parts = Profile(tuple("abcd"), {}, {"a": 4, "b": 3, "c": 2, "d": 1}, {"a": 4, "b": 3, "c": 2, "d": 1}, {}, {}, 0)
    owners = Drafter(group, parts, [100, 100], Bounds()).layout(Wish(strategy="share", replicas=2, micro_batch=1)).owners
    assert owners == {"a": 0, "b": 1, "c": 1, "d": 0}
    owners = Drafter(group, parts, [100, 300], Bounds()).layout(Wish(strategy="share", replicas=2, micro_batch=1)).owners
    assert owners == {"a": 1, "b": 1, "c": 0, "d": 1}  # 8/1, 14/1, 4/(1/3) = 12 against 18, 16 against 18


def test_a_share_of_splits_has_a_cut_of_its_own_for_each_replica(group: Rehearsed) -> None:
    layout = Drafter(group, made_up([4, 4]), [100] * 4, Bounds()).layout(Wish(strategy="split", replicas=2, micro_batch=1))
    assert layout.replicas == ({"": 0, "u0": 0, "u1": 1}, {"": 2, "u0": 2, "u1": 3})


def test_an_explicit_map_is_taken_as_it_is(group: Rehearsed) -> None:
    drafter = Drafter(group, made_up([4, 4]), [100] * 2, Bounds(strategy="map", placed={"u1": 1}))
    assert drafter.layout(Wish(strategy="map", micro_batch=2)).replicas == ({"": 0, "u1": 1},)
    drafter = Drafter(group, made_up([4, 4]), [100] * 2, Bounds(strategy="map", placed={"": ON_HOST, "u1": 1}))
    assert drafter.layout(Wish(strategy="map", micro_batch=2)).replicas == ({"": ON_HOST, "u1": 1},)


@given(
    st.integers(1, 6),
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 60)), min_size=1, max_size=3),
)
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_no_other_distribution_of_the_samples_is_more_even(size: int, samples: int, devices: list[tuple[int, int]]) -> None:
    group = replace(_group(), shape=(samples, 12, 64))
    capacities, needed = [share * 50 for share, _ in devices], [bytes_ for _, bytes_ in devices]
    shares = [capacity / max(capacities) for capacity in capacities]
    layout = Layout(strategy="split", replicas=({"": 0},), owners={}, micro_batch=1, chains="host")
    made = Drafter(group, made_up([1], size), capacities, Bounds()).with_chains(layout, needed)
    assert (
        made.chains == "device" and sum(made.chain_rows) == samples and min(made.chain_rows) >= 0 and len(made.chain_rows) == len(devices)
    )
    rest = itertools.product(range(samples + 1), repeat=len(devices))

    def worst(rows: Sequence[int]) -> float:
        return max((need + 3 * size * row) / share for need, row, share in zip(needed, rows, shares, strict=True))

    assert worst(made.chain_rows) == pytest.approx(min(worst(rows) for rows in rest if sum(rows) == samples), abs=1e-6)


def test_on_one_of_several_devices_the_samples_stay_there(group: Rehearsed) -> None:
    layout = Layout(strategy="single", replicas=({"": 1},), owners={}, micro_batch=1, chains="host")
    made = Drafter(group, made_up([1], 5), [10, 20, 20], Bounds()).with_chains(layout, [0, 100, 0])
    assert made.chain_rows == (0, group.shape[0], 0)


# What is tried.


def rehearsed(nblocks: int = 1, **changes: object) -> Rehearsed:
    return Small(samples=16, tune=replace(TUNE, **{"nblocks": nblocks, "batch_size": 8, **changes})).rehearsed()  # type: ignore[arg-type]


def strategies(found: Sequence[Wish]) -> set[tuple[str, int]]:
    return {(wish.strategy, wish.replicas) for wish in found}


def test_one_device_is_tried_with_less_and_less_at_once_then_elsewhere() -> None:
    found = wishes(rehearsed(), 1, Bounds())
    expected = itertools.product((8, 4, 2, 1), (True, False), (False, True))
    assert {(wish.micro_batch, wish.chains_on_device, wish.state_on_host) for wish in found} == set(expected) and len(found) == 16
    assert strategies(found) == {("single", 1)} and not any(wish.recompute for wish in found)
    assert {wish.recompute for wish in wishes(rehearsed(2), 1, Bounds())} == {False, True}
    assert {wish.micro_batch for wish in wishes(rehearsed(batch_size=5), 1, Bounds())} == {5, 3, 2, 1}


def test_several_devices_are_tried_in_every_way() -> None:
    assert strategies(wishes(rehearsed(), 2, Bounds())) == {("single", 1), ("share", 2), ("split", 1), ("pipeline", 1)}
    assert strategies(wishes(rehearsed(), 4, Bounds())) == {("single", 1), ("share", 4), ("split", 1), ("split", 2), ("pipeline", 1)}
    assert strategies(wishes(rehearsed(batch_size=3), 4, Bounds())) >= {("share", 3)}  # no more replicas than samples
    for strategy in ("single", "share", "split", "pipeline"):
        assert {wish.strategy for wish in wishes(rehearsed(), 4, Bounds(strategy=strategy))} == {strategy}
    shares = {wish.micro_batch for wish in wishes(rehearsed(), 4, Bounds(strategy="share"))}
    assert shares == {2, 1}  # of 8 samples a step


def test_a_pipeline_has_several_micro_batches_in_flight() -> None:
    found = wishes(rehearsed(2), 2, Bounds(strategy="pipeline"))
    flights = {(wish.micro_batch, wish.in_flight) for wish in found}
    assert flights == {(4, 2), (2, 4), (1, 8), (2, 2), (1, 2)}  # the whole step of 8, or as many as there are devices


def test_the_output_head_sees_one_sample_at_a_time_and_is_never_cut() -> None:
    small = Small(samples=16, head=True, tune=replace(TUNE, batch_size=8))
    found = wishes(small.rehearsed(len(small.jobs()) - 1), 4, Bounds())
    assert {wish.micro_batch for wish in found} == {1} and {wish.strategy for wish in found} == {"single", "share"}


def test_limits_are_kept() -> None:
    group = rehearsed()
    assert {wish.chains_on_device for wish in wishes(group, 2, Bounds(chains_on_device=False))} == {False}
    host = wishes(group, 1, Bounds(host_device=True))
    assert {wish.state_on_host for wish in host} == {False}  # it is there anyway
    assert {(wish.micro_batch, wish.replicas) for wish in wishes(group, 2, Bounds(order=(4, 1)))} == {(4, 1)}
    assert {(wish.micro_batch, wish.replicas) for wish in wishes(group, 2, Bounds(order=(4, 2)))} == {(4, 2)}
    assert {wish.micro_batch for wish in wishes(group, 2, Bounds(order=(7, 1)))} >= {8, 1}  # what cannot be had does not count
    placed = wishes(group, 3, Bounds(strategy="map", placed={"mlp": 1}))
    assert strategies(placed) == {("map", 1)}


def test_without_text_there_is_one_way() -> None:
    group = Small(tune=TuneConfig(iters=0)).rehearsed()
    assert wishes(group, 4, Bounds()) == [Wish(strategy="single", micro_batch=1, chains_on_device=False)]


def test_what_a_step_sees() -> None:
    assert samples_of_step(rehearsed(gradient_accumulate_steps=2)) == 16
    assert samples_of_step(rehearsed(gradient_accumulate_steps=3)) == 16  # there are no more


# Which is faster.


@pytest.fixture(scope="module")
def eight() -> tuple[Rehearsed, Profile]:
    """Four joint blocks with the costs of an 8B model: 4096 wide, 2048 tokens, 8 samples a step."""
    group = Small(samples=128, tune=replace(TUNE, nblocks=3, batch_size=8)).rehearsed()
    small = profile(group)
    weights = {name: 2 * 50 * 10**6 for name in small.weights}
    return replace(group, shape=(128, 2048, 4096)), replace(small, weights=weights, chain=2048 * 4096 * 4)


def test_what_costs_time_is_known_to(eight: tuple[Rehearsed, Profile]) -> None:
    def seconds(wish: Wish, count: int = 4) -> float:
        return relative_seconds(wish, *eight, count, Bounds())

    for wish in (
        Wish(strategy="single", micro_batch=8),
        Wish(strategy="split", micro_batch=4),
        Wish(strategy="pipeline", micro_batch=2, in_flight=4),
        Wish(strategy="share", replicas=4, micro_batch=2),
    ):
        assert seconds(replace(wish, recompute=True)) > seconds(wish)
        assert seconds(replace(wish, state_on_host=True)) > seconds(wish)
        assert seconds(replace(wish, chains_on_device=False)) > seconds(wish)
        assert seconds(replace(wish, micro_batch=1)) >= seconds(wish)
    single, split = Wish(strategy="single", micro_batch=8), Wish(strategy="split", micro_batch=8)
    pipeline, share = Wish(strategy="pipeline", micro_batch=2, in_flight=4), Wish(strategy="share", replicas=4, micro_batch=2)
    assert seconds(pipeline) < seconds(split)
    assert seconds(replace(share, micro_batch=1)) > seconds(single)  # 8 samples are not worth three more copies of the weights
    many = replace(eight[0], job=replace(eight[0].job, tune=replace(TUNE, batch_size=128)))
    assert relative_seconds(share, many, eight[1], 4, Bounds()) < relative_seconds(single, many, eight[1], 4, Bounds())
    assert seconds(replace(pipeline, micro_batch=1, in_flight=8)) < seconds(replace(pipeline, micro_batch=4, in_flight=2))
    halves = replace(split, replicas=2, micro_batch=4)
    assert seconds(halves) < seconds(split)
    assert all(math.isfinite(seconds(wish)) for wish in wishes(eight[0], 4, Bounds()))


def test_what_cannot_fit_is_seen_without_a_rehearsal(group: Rehearsed) -> None:
    parts = Profile(("a", "b"), {"a": 100, "b": 50}, {"a": 1000}, {"a": 2000}, {"a": 400}, {"b": 10}, 8)
    drafter = Drafter(group, parts, [10_000, 10_000], Bounds())
    single = Wish(strategy="single", micro_batch=3)
    chains = 3 * group.shape[0] * 8
    assert drafter.least_bytes(single) == 3 * 150 + 400 / 2 + 10 + 3000 + chains
    assert drafter.least_bytes(replace(single, chains_on_device=False, state_on_host=True)) == 3 * 150 + 210
    assert drafter.least_bytes(Wish(strategy="split", micro_batch=3)) == (3 * 150 + 210 + 3000 + chains) / 2
    shared = Wish(strategy="share", replicas=2, micro_batch=3, recompute=True)
    assert drafter.least_bytes(shared) == (2 * (3 * 8 + 210) + 3000 + chains) / 2


@pytest.mark.parametrize(
    ("wish", "label"),
    [
        (Wish(strategy="single", micro_batch=8), "single, 8 samples at once"),
        (Wish(strategy="share", replicas=4, micro_batch=2), "share, 2 samples at once"),
        (Wish(strategy="split", replicas=2, micro_batch=2), "share of 2 splits, 2 samples at once"),
        (
            Wish(strategy="pipeline", micro_batch=1, in_flight=8, recompute=True, chains_on_device=False, state_on_host=True),
            "pipeline, 1 samples at once x 8 in flight, recompute, inputs on the host, tuning state on the host",
        ),
    ],
)
def test_labels(wish: Wish, label: str) -> None:
    assert wish.label == label


def test_a_profile_tells_what_each_module_costs() -> None:
    """llama: hidden 64, 96 between, 4 heads of 16, 2 of keys and values; 12 tokens, float32."""
    found = profile(Small().rehearsed())
    name = "model.layers.0"
    assert found.weights[f"{name}.mlp.down_proj"] == 64 * 96 * 4 and found.weights[f"{name}.self_attn.k_proj"] == 32 * 64 * 4
    assert found.replica == {site: 2 * size for site, size in found.weights.items()} and len(found.weights) == 7
    groups = 64 * 96 // 32
    # V and its average 4 bytes a weight each; two clips, their averages, lowest and highest value of each group.
    assert found.state[f"{name}.mlp.down_proj"] == 2 * 64 * 96 * 4 + 6 * groups * 4
    assert found.others == {f"{name}.input_layernorm": 64 * 4, f"{name}.post_attention_layernorm": 64 * 4}
    assert found.chain == 12 * 64 * 4
    assert found.kept[f"{name}.mlp.up_proj"] == 12 * 96 * 4 == found.kept[f"{name}.mlp.gate_proj"]
    order = [path.removeprefix(name + ".") for path in found.kept]
    assert order.index("input_layernorm") < order.index("self_attn.v_proj") < order.index("mlp.gate_proj") < order.index("mlp.up_proj")
