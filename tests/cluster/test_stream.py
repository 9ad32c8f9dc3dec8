"""The stream over real sockets: order of frames, tokens, replacement, loss, reconnection, a reader that sleeps."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from elastic.cluster.stream import PENDING_BYTES_MAX, Client, Server
from elastic.events import HostGone, Order, Report
from elastic.plan import Endpoint

AT = Endpoint(address="127.0.0.1", port=1)
LIMIT_S = 10.0


def report(host: str, seq: int, pids: dict[str, int] | None = None) -> Report:
    return Report(
        host=host, seq=seq, node="n", domain="d", slot=0, ready=True, warm=False, mover=AT, store=AT, pids=pids or {}
    )


def order(host: str, seq: int) -> Order:
    return Order(host=host, seq=seq, attempt=1, generation=1)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server("secret")
    yield server
    server.close()


def client_of(server: Server, token: str = "secret") -> Client:
    return Client(server.endpoint.address, server.endpoint.port, token)


def collect(
    server: Server, enough: Callable[[list[Report | HostGone]], bool], *clients: Client
) -> list[Report | HostGone]:
    facts: list[Report | HostGone] = []
    deadline_s = time.monotonic() + LIMIT_S
    while not enough(facts):
        assert time.monotonic() < deadline_s, facts
        for client in clients:
            client.receive()
        facts += server.receive(0.01)
    return facts


def connect(server: Server, client: Client) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not client.connected:
        assert time.monotonic() < deadline_s
        client.receive()
        server.receive(0.0)


def orders_of(client: Client, count: int) -> list[Order]:
    got: list[Order] = []
    deadline_s = time.monotonic() + LIMIT_S
    while len(got) < count:
        assert time.monotonic() < deadline_s, got
        select.select([client], [], [], 0.05)
        got += client.receive()
    return got


def test_reports_go_up_and_orders_come_down(server: Server) -> None:
    client = client_of(server)
    connect(server, client)
    assert client.send(report("a", 1))
    assert collect(server, lambda facts: bool(facts), client) == [report("a", 1)]
    server.send("a", order("a", 1))
    server.send("a", order("a", 2))
    server.send("nobody", order("nobody", 3))
    assert orders_of(client, 2) == [order("a", 1), order("a", 2)]
    client.close()
    gone = collect(server, lambda facts: bool(facts))
    assert gone == [HostGone(host="a", reason="stream closed: end of file")]


def test_a_wrong_token_is_shut_out(server: Server) -> None:
    client = client_of(server, "guess")
    connect(server, client)
    client.send(report("a", 1))
    deadline_s = time.monotonic() + LIMIT_S
    while client.connected:
        assert time.monotonic() < deadline_s
        assert server.receive(0.01) == []
        client.receive()


def test_a_large_report_may_follow_the_token_at_once(server: Server) -> None:
    big = report("a", 1, {f"process-{i}": i for i in range(50_000)})
    client = client_of(server)
    connect(server, client)
    client.send(big)
    assert collect(server, lambda facts: bool(facts), client) == [big]


def test_a_later_connection_replaces_the_older_silently(server: Server) -> None:
    old, new = client_of(server), client_of(server)
    connect(server, old)
    old.send(report("a", 1))
    collect(server, lambda facts: bool(facts), old)
    connect(server, new)
    new.send(report("a", 2))
    assert collect(server, lambda facts: bool(facts), new) == [report("a", 2)]
    server.send("a", order("a", 7))
    assert orders_of(new, 1) == [order("a", 7)]
    assert server.receive(0.0) == []


def test_a_host_that_comes_back_under_a_new_name_leaves_the_old_one(server: Server) -> None:
    client = client_of(server)
    connect(server, client)
    client.send(report("a.1", 1))
    collect(server, lambda facts: bool(facts), client)
    client.send(report("a.2", 1))
    collect(server, lambda facts: bool(facts), client)
    server.send("a.1", order("a.1", 1))
    server.send("a.2", order("a.2", 2))
    assert orders_of(client, 1) == [order("a.2", 2)]


def test_drop_closes_without_a_fact_and_the_client_comes_back(server: Server) -> None:
    client = client_of(server)
    connect(server, client)
    client.send(report("a", 1))
    collect(server, lambda facts: bool(facts), client)
    server.drop("a")
    deadline_s = time.monotonic() + LIMIT_S
    while client.connected:
        assert time.monotonic() < deadline_s
        client.receive()
    connect(server, client)
    client.send(report("a", 2))
    assert collect(server, lambda facts: bool(facts), client) == [report("a", 2)]


def test_the_client_finds_a_coordinator_that_restarts_on_its_address() -> None:
    first = Server("secret")
    client = client_of(first)
    connect(first, client)
    port = first.endpoint.port
    first.close()
    deadline_s = time.monotonic() + LIMIT_S
    while client.connected:
        assert time.monotonic() < deadline_s
        client.receive()
    assert not client.send(report("a", 1))
    second = Server("secret", port=port)
    connect(second, client)
    client.send(report("a", 2))
    assert collect(second, lambda facts: bool(facts), client) == [report("a", 2)]
    second.close()


def test_a_host_that_reads_nothing_costs_bounded_memory(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    client = client_of(server)
    connect(server, client)
    client.send(report("a", 1))
    collect(server, lambda facts: bool(facts), client)
    for seq in range(120_000):
        server.send("a", order("a", seq))
    pending = server._hosts["a"].frames.pending
    assert 0 < len(pending) <= PENDING_BYTES_MAX
    assert [record.getMessage()[:21] for record in caplog.records] == ["a reads too slowly, o"]
    got = [taken.seq for taken in orders_of(client, 1)]
    assert got == sorted(got)


def test_wake_interrupts_a_wait(server: Server) -> None:
    threading.Timer(0.05, server.wake).start()
    began_s = time.monotonic()
    assert server.receive(LIMIT_S) == []
    assert time.monotonic() - began_s < LIMIT_S


def test_garbage_is_closed(server: Server) -> None:
    with socket.create_connection((server.endpoint.address, server.endpoint.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        stranger.settimeout(0.01)
        deadline_s = time.monotonic() + LIMIT_S
        while True:
            assert time.monotonic() < deadline_s
            server.receive(0.0)
            try:
                if stranger.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionResetError:
                break


def test_many_connections(server: Server) -> None:
    clients = [client_of(server) for _ in range(300)]
    for client in clients:
        client.receive()
    for index, client in enumerate(clients):
        connect(server, client)
        client.send(report(f"h{index}", 1))
    facts = collect(server, lambda facts: len(facts) >= 300, *clients)
    assert {fact.host for fact in facts} == {f"h{index}" for index in range(300)}
    for client in clients:
        client.close()
