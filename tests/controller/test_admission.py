"""Who may take part: refused, marked and held hosts, and nodes that come and go."""

from __future__ import annotations

from typing import Any

from elastic import events
from elastic.controller import requests
from elastic.controller.actions import AdmitHost, MarkHost, RefuseHost, RestNode
from elastic.controller.orders import order_for
from elastic.controller.state import Phase
from elastic.events import Exit, NodeCheck
from elastic.plan import Endpoint
from tests.controller.conftest import Table, config

GB = 1_000_000_000


def check(**changes: Any) -> NodeCheck:
    base = {"memory_free_bytes": 8 * GB, "disk_free_bytes": 8 * GB, "gemm_gflops": 100.0, "link_to": "x"}
    return NodeCheck(**{**base, **changes})


def begun(**changes: Any) -> Table:
    table = Table(config(**changes))
    table.take(events.RunStarted(run="t", attempt=1, generation=0, durable=None))
    return table


def lose(table: Table, *hosts: str, step: int = 3) -> None:
    """`hosts` die, the other members stop."""
    for host in hosts:
        table.take(events.HostGone(host=host, reason="EOF"))
    for rank, host in enumerate(table.state.members):
        if host in table.state.hosts:
            held = tuple(table.holding(step, r, "own" if r == rank else "received") for r in range(4))
            table.trainer(host, "exited", Exit(kind="stopped", step=step), holdings=held)


def go_on(table: Table) -> None:
    table.run_all()
    table.step(table.state.step + 1)


def test_a_refused_host_is_left_out_and_named_in_what_the_run_waits_for() -> None:
    table = begun(hosts_min=2)
    table.report("a/0", check=check())
    decision = table.report("b/0", ready=False, check=check(memory_free_bytes=0))
    why = "0.0 GB of memory are free, wanted 0.3 GB"
    assert any(isinstance(a, RefuseHost) and a.host == "b/0" and why in a.why for a in decision.actions)
    assert f"b/0 is refused: {why}" in decision.reason
    assert table.state.waiting_for.startswith(f"waiting: 1 hosts ready, 1 refused, need 2; b/0: {why}")
    decision = table.report("b/0", ready=True, check=check())
    assert AdmitHost(host="b/0") in decision.actions and table.state.refused == {}


def test_a_wrong_result_keeps_a_ready_host_out_for_good() -> None:
    table = begun(hosts_min=1)
    table.report("a/0", check=check())
    table.report("b/0", check=check(gemm_wrong=1))
    table.take(events.Tick(), after_s=6.0)
    assert table.state.members == ("a/0",)
    go_on(table)
    table.take(events.Tick(), after_s=60.0)
    assert not table.state.draining, "it is not waited for either"


def test_a_slow_host_is_only_marked() -> None:
    table = begun(hosts_min=1, hosts_max=3)
    table.report("a/0", check=check())
    table.report("b/0", check=check())
    decision = table.report("c/0", check=check(gemm_gflops=20.0))
    assert decision.actions[0] == MarkHost(host="c/0", why="slow: 20 GFLOP/s, the other nodes 100")
    assert table.state.members == ("a/0", "b/0", "c/0")


def test_a_slow_host_under_act_takes_part_only_where_there_are_too_few_others() -> None:
    table = begun(hosts_min=2, hosts_max=3, policies={"leave_out_slow": "act"})
    table.report("a/0", check=check())
    table.report("b/0", check=check())
    table.report("c/0", check=check(gemm_gflops=20.0))
    table.take(events.Tick(), after_s=6.0)
    assert table.state.members == ("a/0", "b/0")
    go_on(table)
    lose(table, "b/0", step=1)
    assert table.state.members == ("a/0", "c/0")
    assert table.decision is not None
    assert "c/0 takes part although slow: 20 GFLOP/s, the other nodes 100: too few others" in table.decision.reason


def test_the_policy_set_live_judges_the_hosts_that_are_there() -> None:
    table = begun(hosts_min=2, hosts_max=3, policies={"leave_out_slow": "act"})
    for host in ("a/0", "b/0"):
        table.report(host, check=check())
    table.report("c/0", check=check(gemm_gflops=20.0))
    assert "c/0" in table.state.held
    order = {"key": "policies.leave_out_slow", "value": "off"}
    table.take(requests.event_of("set", order, "ann", "it is fine", table.state, table.config))
    assert "c/0" not in table.state.held and "c/0" not in table.state.marked


def test_the_same_check_told_again_is_no_news() -> None:
    table = begun(hosts_min=1)
    table.report("a/0", ready=False, check=check(memory_free_bytes=0))
    decision = table.report("a/0", ready=False, check=check(memory_free_bytes=0), warm=False)
    assert not decision.actions and "refused:" not in decision.reason


def test_the_first_loss_of_a_node_costs_nothing(table: Table) -> None:
    lose(table, "b/0", "b/1")
    assert table.state.losses["b"].count == 1, "two hosts of a node in one generation are one loss"
    go_on(table)
    table.report("b/2")
    assert table.state.draining


def test_a_node_that_flaps_rests_ever_longer(table: Table) -> None:
    lose(table, "b/0", "b/1")
    for losses, wait_s in ((2, 5.0), (3, 10.0), (4, 20.0)):
        go_on(table)
        new = f"b/{losses}"
        table.report(new)
        table.take(events.Tick(), after_s=wait_s)  # its rest of the last time is over
        table.exit_all("paused", table.state.step)
        assert new in table.state.members
        go_on(table)
        decision = table.take(events.HostGone(host=new, reason="EOF"))
        assert RestNode(node="b", losses=losses, until_s=table.now_s + wait_s) in decision.actions
        assert f"node b was lost {losses} times, may join again in {wait_s:.0f} s" in decision.reason
        lose(table, step=table.state.step)
    go_on(table)
    table.report("b/9")
    assert table.state.held == {"b/9": "node b was lost 4 times"} and not table.state.draining
    table.take(events.Tick(), after_s=19.0)
    assert not table.state.draining
    decision = table.take(events.Tick(), after_s=1.1)
    assert "node b may join again" in decision.reason and table.state.draining


def test_a_resting_node_takes_part_at_once_where_there_are_too_few_without_it() -> None:
    table = begun(hosts_min=2, hosts_max=2)
    table.join("a/0", "b/0")
    go_on(table)
    for number in (1, 2):
        lose(table, table.state.members[1], step=1)
        assert table.state.phase is Phase.WAITING
        table.report(f"b/{number}")
        assert table.state.phase is Phase.STARTING
        go_on(table)
    lose(table, "b/2", step=1)
    decision = table.report("b/3")
    assert "b/3 takes part although node b was lost 3 times: too few others" in decision.reason


def test_losses_are_forgotten_after_a_long_membership() -> None:
    table = begun(hosts_min=1, hosts_max=2, admission={"forget_s": 100.0})
    table.join("a/0", "b/0")
    go_on(table)
    lose(table, "b/0", step=1)
    go_on(table)
    table.report("b/1")
    table.exit_all("paused", table.state.step)
    go_on(table)
    assert table.state.losses["b"].joined_s is not None
    table.take(events.Tick(), after_s=50.0)
    assert "b" in table.state.losses
    decision = table.take(events.Tick(), after_s=51.0)
    assert not table.state.losses and "node b has stayed for 100 s" in decision.reason


def test_a_killed_trainer_is_no_loss_of_its_node(table: Table) -> None:
    for _ in range(3):
        table.trainer("b/0", "exited", Exit(kind="lost", step=3, signal=9), holdings=(table.holding(3, 2),))
        for rank, host in enumerate(table.state.members):
            if host != "b/0":
                table.trainer(host, "exited", Exit(kind="stopped", step=3), holdings=(table.holding(3, rank),))
        table.run_all()
    assert table.state.generation == 4 and not table.state.losses


def test_survivors_of_a_node_that_flaps_stay(table: Table) -> None:
    """One slot of b dies again and again; the other one trains on."""
    lose(table, "b/1")
    for number in (2, 3):
        go_on(table)
        table.report(f"b/{number}")
        table.exit_all("paused", table.state.step)
        go_on(table)
        lose(table, f"b/{number}", step=table.state.step)
        if number == 2:
            table.take(events.Tick(), after_s=5.1)
    assert table.state.losses["b"].until_s and "b/0" in table.state.members


def test_a_silent_node_counts_as_lost(table: Table) -> None:
    table.take(events.HostSilent(host="b/0", silent_s=9.0, stalled_s=9.0))
    assert table.state.losses["b"].count == 1


def test_disabled_there_is_neither_refusal_nor_rest() -> None:
    table = begun(hosts_min=1, admission={"enabled": False})
    table.report("a/0", check=check(gemm_wrong=1))
    table.take(events.Tick(), after_s=6.0)
    assert table.state.members == ("a/0",)
    go_on(table)
    table.take(events.HostGone(host="a/0", reason="EOF"))
    assert not table.state.losses


def test_a_host_under_check_is_told_neighbours_on_other_nodes(table: Table) -> None:
    table.report("c/0", ready=False)
    names = [member.host for member in order_for(table.state, "c/0").neighbours]
    assert names == ["a/0", "a/1", "b/0"]
    table.report("b/2", ready=False)
    assert [m.host for m in order_for(table.state, "b/2").neighbours] == ["a/0", "a/1", "c/0"], "not b's own"
    table.report("c/0", ready=True, check=check(link_to="a/0"))
    assert not order_for(table.state, "c/0").neighbours, "one answer is enough"
    table.report("c/0", ready=True, check=check(link_to="", unreached={"a/0": "timed out"}))
    assert order_for(table.state, "c/0").neighbours, "it tries again"


def test_a_host_without_a_network_yet_is_nobodys_neighbour() -> None:
    table = begun(hosts_min=2)
    table.report("a/0", ready=False, mover=Endpoint(address="a", port=0))
    table.report("b/0", ready=False)
    assert order_for(table.state, "b/0").neighbours == ()
