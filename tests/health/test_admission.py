"""Verdicts on a node's check: each limit by itself, blame for a broken link, what counts as slow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.config_sections import Admission
from elastic.events import NodeCheck
from elastic.health.admission import cut_off, fits, oddities, refusal, rest_s, slow

GB = 1_000_000_000
LIMITS = Admission()
GOOD = NodeCheck(
    memory_free_bytes=8 * GB, memory_wanted_bytes=GB, disk_free_bytes=8 * GB, gpus=1, gemm_gflops=100.0, copy_gbs=10.0,
    link_to="b/0", link_ms=0.2, link_mbs=900.0,
)  # fmt: skip


def test_a_good_check_is_no_reason() -> None:
    assert refusal(GOOD, LIMITS, use_gpu=True) == "" and not list(oddities(GOOD, LIMITS))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"memory_free_bytes": GB}, "1.0 GB of memory are free, wanted 1.3 GB"),
        ({"disk_free_bytes": 0}, "0.00 GB are free where its logs go, wanted 0.27 GB"),
        ({"gpus": 0}, "no GPU is visible although use_gpu is set"),
        ({"gemm_wrong": 3}, "3 rows of a matrix product of known result are wrong"),
        ({"copy_wrong": 1}, "1 numbers changed while they were copied"),
        ({"storage_wrong": "s3://b/p: NoSuchBucket"}, "its storage: s3://b/p: NoSuchBucket"),
        ({"failed": "its device cuda:0 can't be used: ECC error"}, "ECC error"),
    ],
)
def test_each_fault_is_refused_with_its_sentence(changes: dict[str, object], sentence: str) -> None:
    assert sentence in refusal(replace(GOOD, **changes), LIMITS, use_gpu=True)  # type: ignore[arg-type]


def test_without_room_nothing_was_examined_so_nothing_else_is_told() -> None:
    short = NodeCheck(memory_free_bytes=0, memory_wanted_bytes=GB, disk_free_bytes=8 * GB)
    assert "GPU" not in refusal(short, LIMITS, use_gpu=True)


def test_a_gpu_is_wanted_only_where_it_is_used() -> None:
    assert fits(replace(GOOD, gpus=0), use_gpu=False)


def test_the_end_that_reaches_nobody_is_blamed() -> None:
    alone = replace(GOOD, link_to="", unreached={"a/0": "timed out"})
    assert cut_off({"a/0": GOOD, "b/0": alone}, frozenset()) == {
        "b/0": "it can't reach a/0: timed out; see to its network"
    }


def test_of_two_that_only_miss_each_other_one_goes_on() -> None:
    first = replace(GOOD, link_to="", unreached={"b/0": "x"})
    second = replace(GOOD, link_to="", unreached={"a/0": "x"})
    assert list(cut_off({"a/0": first, "b/0": second}, frozenset())) == ["b/0"]
    assert list(cut_off({"a/0": first, "b/0": second}, frozenset(["b/0"]))) == ["a/0"], "who trains is believed"


def test_a_neighbour_that_is_gone_is_no_evidence() -> None:
    assert cut_off({"b/0": replace(GOOD, link_to="", unreached={"a/0": "refused"})}, frozenset()) == {}


def test_slow_is_measured_against_the_other_nodes() -> None:
    checks = {"a/0": GOOD, "a/1": GOOD, "b/0": replace(GOOD, gemm_gflops=40.0), "c/0": replace(GOOD, gemm_gflops=90.0)}
    nodes = {host: host[0] for host in checks}
    assert slow(checks, nodes, 0.5) == {"b/0": "slow: 40 GFLOP/s, the other nodes 95"}
    assert slow(checks, nodes, 0.4) == {}


def test_one_node_has_nothing_to_be_compared_with() -> None:
    checks = {"a/0": GOOD, "a/1": replace(GOOD, gemm_gflops=1.0, link_mbs=0.0)}
    assert slow(checks, dict.fromkeys(checks, "a"), 0.5) == {}


def test_an_exchange_within_a_node_is_not_compared_with_the_network() -> None:
    checks = {"a/0": replace(GOOD, link_to="a/1", link_mbs=9000.0), "b/0": replace(GOOD, link_to="a/0")}
    assert slow(checks, {"a/0": "a", "b/0": "b"}, 0.5) == {}
    checks["c/0"] = replace(GOOD, link_to="b/0", link_mbs=90.0)
    assert list(slow(checks, {host: host[0] for host in checks}, 0.5)) == ["c/0"]


def test_a_clock_that_is_off_and_a_neighbour_that_is_missing_are_odd() -> None:
    odd = replace(GOOD, clock_ahead_s=-7.25, unreached={"c/0": "timed out"})
    assert list(oddities(odd, LIMITS)) == ["its clock is 7.2 s behind the coordinator's", "it could not reach c/0"]


def test_rests_grow_to_a_limit() -> None:
    assert [rest_s(n, LIMITS) for n in (1, 2, 3, 4, 9, 10_000)] == [0.0, 5.0, 10.0, 20.0, 600.0, 600.0]


@given(st.dictionaries(st.sampled_from("abcdef"), st.sets(st.sampled_from("abcdef"), max_size=3), min_size=1))
def test_a_broken_network_never_shuts_everybody_out(missed: dict[str, set[str]]) -> None:
    checks = {host: NodeCheck(unreached=dict.fromkeys(others - {host}, "x")) for host, others in missed.items()}
    refused = cut_off(checks, frozenset())
    passed = checks.keys() - refused.keys()
    assert passed
    for host in passed:
        assert not checks[host].unreached.keys() & {p for p in passed if p < host}, "two that go on reached each other"
