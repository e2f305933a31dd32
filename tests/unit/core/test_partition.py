"""Shares of instances against the plain rule they are defined by."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.orchestrate import shares

DEMANDS = st.dictionaries(st.integers(0, 9), st.integers(0, 500), max_size=5)


def one_each_then_the_largest_gap(demand: dict[int, int], num_instances: int) -> dict[int, int]:
    """One instance per version with requests, then one at a time to the largest quota - given."""
    wanted = {v: n for v, n in sorted(demand.items()) if n}
    given_out = {v: int(place < num_instances) for place, v in enumerate(wanted)}
    total = sum(wanted.values())
    for _ in range(num_instances - len(wanted)):
        if wanted:
            gaps = {v: num_instances * n / total - given_out[v] for v, n in wanted.items()}
            given_out[max(gaps, key=lambda v: (gaps[v], -v))] += 1
    return given_out


@given(DEMANDS, st.integers(1, 64))
def test_shares_follow_the_plain_rule(demand: dict[int, int], num_instances: int) -> None:
    assert shares(demand, num_instances) == one_each_then_the_largest_gap(demand, num_instances)


@given(DEMANDS, st.integers(1, 64))
def test_every_instance_is_given_out_and_no_version_is_forgotten(
    demand: dict[int, int], num_instances: int
) -> None:
    given_out = shares(demand, num_instances)
    assert sum(given_out.values()) == (num_instances if given_out else 0)
    if num_instances >= len(given_out):
        assert all(given_out[v] >= 1 for v, n in demand.items() if n)


def test_when_versions_outnumber_instances_the_newest_waits() -> None:
    assert shares({3: 5, 4: 50, 5: 500}, 2) == {3: 1, 4: 1, 5: 0}
