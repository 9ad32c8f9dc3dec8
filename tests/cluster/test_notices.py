"""A node whose end is announced is drained once, and a checkpoint is asked for."""

from __future__ import annotations

import threading

from elastic.cluster.notices import Notices
from elastic.controller.requests import RequestError

NEVER_S = 3600.0
LIMIT_S = 30.0
END_MS = 1_700_000_000_000  # 22:13:20 UTC


class Orders:
    def __init__(self) -> None:
        self.got: list[tuple[str, str, str, dict[str, str]]] = []
        self.refuse: set[str] = set()

    def __call__(self, kind: str, who: str, why: str, given: dict[str, str]) -> str:
        if given.get("node") in self.refuse:
            raise RequestError("no nodes of run r are called that")
        self.got.append((kind, who, why, given))
        return "done"


def test_each_notice_is_taken_once() -> None:
    orders, draining = Orders(), {"a": END_MS, "b": 0}
    notices = Notices(orders, draining.copy, poll_s=NEVER_S)
    notices.look()
    notices.look()
    assert orders.got == [
        ("drain", "Ray", "its end is announced for 22:13:20 UTC", {"node": "a"}),
        ("checkpoint", "Ray", "node a leaves", {}),
        ("drain", "Ray", "its end is announced", {"node": "b"}),
        ("checkpoint", "Ray", "node b leaves", {}),
    ]


def test_a_node_without_hosts_of_the_run_is_looked_at_again_and_one_that_came_back_too() -> None:
    orders, draining = Orders(), {"a": END_MS}
    orders.refuse = {"a"}
    notices = Notices(orders, draining.copy, poll_s=NEVER_S)
    notices.look()
    assert orders.got == []
    orders.refuse.clear()
    notices.look()
    assert [kind for kind, *_ in orders.got] == ["drain", "checkpoint"]
    draining.clear()
    notices.look()
    draining["a"] = END_MS + 1000
    notices.look()
    assert [kind for kind, *_ in orders.got] == ["drain", "checkpoint"] * 2


def test_a_cluster_that_does_not_answer_is_asked_again() -> None:
    answered, asked = threading.Event(), []

    def draining() -> dict[str, int]:
        asked.append(None)
        if len(asked) < 3:
            raise ConnectionError("the head is away")
        answered.set()
        return {}

    Notices(Orders(), draining, poll_s=0.01)
    assert answered.wait(LIMIT_S)
