"""The mover's uploads to a real S3 service: one at a time, and each failure told with its reason."""

from __future__ import annotations

import threading
from typing import Any

from elastic.checkpoint.arena import State
from elastic.config_sections import StorageOptions
from elastic.storage.object_store import ObjectStore
from tests.checkpoint.hosts import LIMIT_S, Host, key, random_bytes
from tests.storage.servers import Proxy, Request


def upload(step: int) -> dict[str, Any]:
    return {"generation": 1, "step": step}


def test_uploads_are_made_one_after_the_other(url: str, options: StorageOptions, proxy: Proxy) -> None:
    begun, gate = threading.Event(), threading.Event()

    def hold_first(request: Request) -> str:
        begun.set()
        assert gate.wait(LIMIT_S)
        return ""

    host = Host(url, options=options.model_dump())
    try:
        host.order(partner=None)
        for step in (1, 2):
            buffer = host.write(key(1, step), random_bytes(1 << 20))
            host.until(lambda buffer=buffer: buffer.state == State.SEALED, "the seal")
        proxy.rule = hold_first
        host.tell(upload=upload(1))
        assert begun.wait(LIMIT_S)
        for step in (1, 2, 1, 2):
            host.tell(upload=upload(step))
        host.tell(seal=True)
        host.hear("sealed")  # so the mover has read them all
        gate.set()
        told = [host.hear("uploaded")["uploaded"]["object"] for _ in range(2)]
        assert [name.split("/")[1] for name in told] == ["7-1-1", "7-1-2"]
        puts = [
            request.path.split("?")[0].rpartition("data/")[2] for request in proxy.requests if request.method == "PUT"
        ]
        assert puts == ["7-1-1/0.bin", "7-1-1/0.json", "7-1-2/0.bin", "7-1-2/0.json"]
    finally:
        gate.set()
        host.close()


def test_a_failed_upload_is_told_and_the_next_one_works(url: str, options: StorageOptions, proxy: Proxy) -> None:
    host = Host(url, options={**options.model_dump(), "deadline_s": 0.5})
    try:
        host.order(partner=None)
        buffer = host.write(key(1, 1), random_bytes(1 << 20))
        host.until(lambda: buffer.state == State.SEALED, "the seal")
        proxy.rule = lambda request: "503 SlowDown"
        host.tell(upload=upload(1))
        told = host.hear("failed")
        assert told["failed"] == "upload" and told["key"] == upload(1) and "SlowDown" in told["reason"]
        proxy.rule = lambda request: ""
        host.tell(upload=upload(1))
        told = host.hear("uploaded")["uploaded"]
        assert len(ObjectStore(url, options).get(told["object"])) == told["nbytes"]
    finally:
        host.close()
