"""Partners and membership for any shape of cluster."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from elastic.controller.membership import partners
from elastic.plan import Endpoint, Member

NOWHERE = Endpoint(address="", port=0)


def members(*sizes: int) -> list[Member]:
    return [
        Member(host=f"n{node}/{slot}", node=f"n{node}", domain=f"n{node}", mover=NOWHERE, store=NOWHERE)
        for node, size in enumerate(sizes)
        for slot in range(size)
    ]


def test_equal_nodes_pair_up_as_a_permutation() -> None:
    assert partners(members(2, 2), sources_max=1) == {0: 2, 1: 3, 2: 0, 3: 1}


def test_the_last_host_of_a_node_keeps_both_of_the_others() -> None:
    assert partners(members(2, 1), sources_max=2) == {0: 2, 1: 2, 2: 0}


def test_one_node_pairs_its_hosts_and_one_host_has_no_partner() -> None:
    assert partners(members(2), sources_max=2) == {0: 1, 1: 0}
    assert partners(members(1), sources_max=2) == {}


@given(st.lists(st.integers(1, 8), min_size=1, max_size=12), st.integers(1, 4))
def test_partners(sizes: list[int], sources_max: int) -> None:
    chosen = members(*sizes)
    found = partners(chosen, sources_max=sources_max)
    load = Counter(found.values())
    assert all(count <= sources_max for count in load.values())
    assert all(rank != other for rank, other in found.items())
    if len(chosen) > 1:
        assert len(found) == len(chosen), "each rank has a second copy somewhere"
    others = len(chosen) - max(sizes)
    if others * sources_max >= max(sizes) and sources_max >= 2:
        crossed = [rank for rank, other in found.items() if chosen[rank].domain != chosen[other].domain]
        largest = [r for r in range(len(chosen)) if chosen[r].domain == f"n{sizes.index(max(sizes))}"]
        assert set(largest) <= set(crossed), "room in other domains is used"
