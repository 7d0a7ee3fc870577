"""The multiple-choice knapsack problem, exactly: one option for each group, least cost, within a budget.

Dynamic programming over the groups. Kept are sums that no other beats in both bits and cost, and whose cost can still end below that of a
choice that is known: a Lagrange multiplier bounds what the other groups will add. 500 layers of a few sizes take half a second. What we
gave up: a bound for the worst case; 500 layers of 500 random sizes may take some seconds.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import Generic, TypeVar

from evenround.errors import UserError

Group = TypeVar("Group", bound=Hashable)

BEAM = 500
"""States followed at first, to find a choice whose cost is a good bound for the exact search."""


@dataclass(frozen=True, slots=True)
class _Problem(Generic[Group]):
    costs: Mapping[Group, Sequence[float]]
    bits: Mapping[Group, Sequence[int]]
    allowed: Mapping[Group, Sequence[int]]
    """Numbers of the options that are not forbidden."""
    budget: int

    def total(self, choice: Mapping[Group, int]) -> tuple[int, float]:
        """(bits, cost)."""
        return sum(self.bits[group][at] for group, at in choice.items()), sum(self.costs[group][at] for group, at in choice.items())

    def at_price(self, rate: float) -> dict[Group, int]:
        """The cheapest options if a bit costs `rate`; of equal ones that with fewer bits."""

        def price(group: Group, at: int) -> tuple[float, int]:
            return self.costs[group][at] + rate * self.bits[group][at], self.bits[group][at]

        return {group: min(self.allowed[group], key=lambda at, group=group: price(group, at)) for group in self.costs}  # type: ignore[misc]

    def multiplier(self) -> float:
        """A price of a bit, 0 or more, under which the cheapest options about use up the budget, and never exceed it."""
        if self.total(self.at_price(0.0))[0] <= self.budget:
            return 0.0
        low, high = 0.0, 1e-12
        while self.total(self.at_price(high))[0] > self.budget:
            low, high = high, high * 16
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if self.total(self.at_price(middle))[0] > self.budget else (low, middle)
        return high

    def filled(self, choice: dict[Group, int]) -> dict[Group, int]:
        """`choice`, and what it leaves of the budget spent where a bit gains most."""
        choice, left = dict(choice), self.budget - self.total(choice)[0]
        steps = []
        for number, group in enumerate(self.costs):
            bits, cost = self.bits[group][choice[group]], self.costs[group][choice[group]]
            for at in self.allowed[group]:
                if self.bits[group][at] > bits and self.costs[group][at] < cost:
                    steps.append(((self.costs[group][at] - cost) / (self.bits[group][at] - bits), number, group, at))
        for _, _, group, at in sorted(steps, key=lambda step: step[:2]):
            more = self.bits[group][at] - self.bits[group][choice[group]]
            if 0 < more <= left and self.costs[group][at] < self.costs[group][choice[group]]:
                choice[group], left = at, left - more
        return choice


@dataclass(frozen=True, slots=True)
class _State:
    """Options for the groups so far: their sums, and how they came about."""

    bits: int
    cost: float
    option: int
    before: "_State | None"


def choose(costs: Mapping[Group, Sequence[float]], bits: Mapping[Group, Sequence[int]], budget: int) -> dict[Group, int]:
    """For each group the number of its option, such that the sum of `costs` is least while that of `bits` is at most `budget`. Exact.

    An infinite cost forbids an option. Of equal sums the one with fewer bits is taken. Raises `UserError`, with the least that would do,
    when no choice keeps the budget.
    """
    order = sorted(costs, key=lambda group: max(bits[group]) - min(bits[group]), reverse=True)  # the smallest fill what is left at the end
    allowed = {group: [at for at, cost in enumerate(costs[group]) if cost < inf] for group in order}
    assert all(allowed.values()) and not any(isnan(cost) for group in costs for cost in costs[group])
    least = sum(min(bits[group][at] for at in allowed[group]) for group in costs)
    if least > budget:
        raise UserError(f"a budget of {budget} bits is too small: the smallest options take {least}")
    problem = _Problem(costs, bits, allowed, budget)
    rate = problem.multiplier()
    known = problem.total(problem.filled(problem.at_price(rate)))[1]
    near = _search(problem, rate, known, BEAM)
    state = _search(problem, rate, min(known, near.cost if near else known), None)
    assert state is not None
    chosen = list[int]()
    while state.before is not None:
        chosen.append(state.option)
        state = state.before
    found = dict(zip(order, reversed(chosen), strict=True))
    return {group: found[group] for group in costs}


def _search(problem: _Problem[Group], rate: float, known: float, width: int | None) -> _State | None:
    """The best choice that costs no more than `known`, the cost of one that is known. rate: see `multiplier`.

    width: only so many of the most promising states are followed, which may miss the best choice, and every one.
    """
    tails = [(0, 0.0)]  # of all groups after one: least bits, least sum of cost + rate * bits
    for group in reversed(list(problem.allowed)):
        few, cheap = tails[-1]
        few += min(problem.bits[group][at] for at in problem.allowed[group])
        tails.append((few, cheap + min(problem.costs[group][at] + rate * problem.bits[group][at] for at in problem.allowed[group])))
    slack = 1e-9 * (abs(known) + abs(tails[-1][1]) + rate * problem.budget)  # sums in another order are rounded otherwise
    states = [_State(0, 0.0, -1, None)]
    for (group, options), (few, cheap) in zip(problem.allowed.items(), reversed(tails[:-1]), strict=True):
        room, bound = problem.budget - few, known + slack + rate * problem.budget - cheap
        steps = [(at, problem.bits[group][at], problem.costs[group][at]) for at in options]
        new = [_State(state.bits + bits, state.cost + cost, at, state) for state in states for at, bits, cost in steps]
        states = _front([state for state in new if state.bits <= room and state.cost + rate * state.bits <= bound])
        if width is not None and len(states) > width:
            best = sorted(states, key=lambda state: state.cost + rate * state.bits)[:width]
            states = sorted(best, key=lambda state: state.bits)
    return states[-1] if states else None


def _front(states: list[_State]) -> list[_State]:
    """Those that no other beats in both, by rising bits and falling cost."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda state: (state.bits, state.cost)):
        if not kept or state.cost < kept[-1].cost:
            kept.append(state)
    return kept
