"""Durable storage behind an fsspec URL: s3:// through s3fs, gs:// and az:// where their packages are installed.

One retry loop for every request, here and nowhere below: with jitter, until a deadline, only for what another try may
change. What it gives up on is one sentence with the service's own code.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from elastic.config_sections import StorageOptions
from elastic.storage import s3_bytes
from elastic.storage.bandwidth import Bandwidth
from elastic.storage.errors import ObjectMissing, StorageError, StorageUnavailable
from elastic.storage.s3_bytes import PART_BYTES, PARTS_AT_ONCE
from elastic.storage.store import check_key

RETRY_S = (0.1, 5.0)
CONNECT_S, ANSWER_S = 5, 30

_AGAIN = frozenset(
    (
        "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded",
        "ServiceUnavailable", "InternalError", "RequestTimeout", "OperationAborted", "ConditionalRequestConflict",
        "IncompleteBody", "BadDigest", "408", "409", "429", "500", "502", "503", "504",
    )
)  # fmt: skip
_NEW_CREDENTIALS = frozenset(["ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"])
_MISSING = frozenset(("NoSuchKey", "404"))
_EXISTS = frozenset(("PreconditionFailed", "412"))
_HELP = {
    "NoSuchBucket": "there is no such bucket; create it, or correct `storage`",
    "AccessDenied": "these credentials may not do this; they need to list, get, put and delete there",
    "403": "these credentials may not do this; they need to list, get, put and delete there",
    "InvalidAccessKeyId": "the service does not know this access key; check the credentials",
    "SignatureDoesNotMatch": "the secret key is wrong, or something on the way changes requests",
    "RequestTimeTooSkewed": "the clock of this machine is off; set it",
    "PermanentRedirect": "the bucket is in another region; set the region or the endpoint",
    "AuthorizationHeaderMalformed": "the bucket is in another region; set the region",
    "ExpiredToken": "the credentials have expired and the chain gave no newer ones",
    "NotImplemented": "the service does not know this request",
}

_CLIENTS = ("botocore", "urllib3", "aiobotocore", "aiohttp")

_log = logging.getLogger(__name__)
T = TypeVar("T")


class ObjectStore:
    """The `Store` of one URL, for any number of threads. Made without a connection, so that it may be carried over a
    fork; opened at first use."""

    def __init__(self, url: str, options: StorageOptions | None = None) -> None:
        """StorageError: no filesystem for this kind of URL."""
        self._url = url.rstrip("/")
        self._scheme = urlsplit(url).scheme
        self._options = options or StorageOptions()
        self._deadline_s = self._options.deadline_s
        self._limit = Bandwidth(1e6 * self._options.upload_mbs_max)
        self._lock = threading.Lock()
        self._opened: tuple[int, Any, str] | None = None
        _filesystem_class(self._scheme)

    def put(self, key: str, data: bytes | memoryview) -> None:
        path, view = self._path(key), memoryview(data)
        self._request(f"write {key}", lambda fs: self._write(fs, path, view))
        if self._is_s3 and not _in_parts(view):
            return  # one PUT is stored whole or refused: it tells its length
        size = self._request(f"look at {key}", lambda fs: fs.info(path, refresh=True)["size"])
        if size != len(view):
            raise StorageError(f"{self._url}/{key} has {size} bytes after {len(view)} were written; is it full?")

    def put_if_absent(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        if self._request(f"create {key}", lambda fs: _create(fs, path, bytes(data))):
            return True
        # The answer to an earlier try of ours may have been lost: then what is there is what we wrote.
        return self.get(key) == data

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """On S3 more than PART_BYTES come in parts, several at once; what is less is one request."""
        path = self._path(key)
        if stop is not None and stop <= start:
            return b""
        if not self._is_s3:
            limits = {} if start == 0 and stop is None else {"start": start, "end": stop}
            return self._request(f"read {key}", lambda fs: bytes(fs.cat_file(path, **limits)))

        def part(at: int) -> tuple[bytes, int]:
            end = at + PART_BYTES if stop is None else min(at + PART_BYTES, stop)
            return self._request(f"read {key}", lambda fs: _read(fs, path, at, end))

        if stop is not None and stop - start > PART_BYTES:
            return b"".join(data for data, _ in s3_bytes.in_parallel(part, range(start, stop, PART_BYTES)))
        first, size = part(start)
        if stop is not None or size <= start + PART_BYTES:
            return first
        rest = s3_bytes.in_parallel(part, range(start + PART_BYTES, size, PART_BYTES))
        return b"".join((first, *(data for data, _ in rest)))

    def list(self, prefix: str) -> dict[str, int]:
        found = self._request(f"list {prefix}", lambda fs: self._find(fs, prefix))
        return dict(sorted(found.items()))

    def delete(self, key: str) -> None:
        path = self._path(key)
        self._request(f"delete {key}", lambda fs: _delete(fs, path))

    def unfinished(self, before_s: float, *, delete: bool) -> Sequence[str]:
        """Keys whose upload in parts began before `before_s` (Unix time) and never ended; `delete` aborts them. Their
        parts are in no list and cost money until then."""
        root = self._root()
        found = self._request("list unfinished uploads", lambda fs: _unfinished(fs, root, before_s))
        for at in found if delete else ():
            self._request(f"abort the upload of {at['Key']}", partial(_abort, upload=at))
        prefix = f"{root.partition('/')[2]}/"
        return [at["Key"].removeprefix(prefix) for at in found]

    @property
    def _is_s3(self) -> bool:
        return self._scheme in ("s3", "s3a")

    def _write(self, fs: Any, path: str, data: memoryview) -> None:
        if self._is_s3 and _in_parts(data):
            s3_bytes.write_parts(fs.blocking, path, data, self._part)
            return
        self._limit.take(len(data))
        if self._is_s3:
            s3_bytes.write(fs.blocking, path, data)
        else:
            fs.pipe_file(path, bytes(data))

    def _part(self, what: str, nbytes: int, send: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        self._limit.take(nbytes)
        return self._request(f"write {what}", lambda fs: send(fs.blocking))

    def _find(self, fs: Any, prefix: str) -> dict[str, int]:
        root = self._root()
        folder, _, name = prefix.rpartition("/")
        top = f"{root}/{folder}" if folder else root
        try:
            entries = fs.find(top, detail=True, prefix=name) if name else fs.find(top, detail=True)
        except FileNotFoundError as error:
            if _code(error) == "NoSuchBucket":
                raise
            return {}
        keys = {path[len(root) + 1 :]: int(entry["size"]) for path, entry in entries.items()}
        # A service with real folders lists those that were emptied; they are no objects.
        return {key: size for key, size in keys.items() if key.startswith(prefix) and key and not key.endswith("/")}

    def _path(self, key: str) -> str:
        check_key(key)
        return f"{self._root()}/{key}"

    def _root(self) -> str:
        return self._filesystem()[1]

    def _filesystem(self) -> tuple[Any, str]:
        """This process's own: its thread and its sockets do not survive a fork."""
        with self._lock:
            if self._opened is None or self._opened[0] != os.getpid():
                fs, root = open_filesystem(self._url, self._options)
                self._opened = (os.getpid(), fs, root)
            return self._opened[1:]

    def _renew(self) -> None:
        """A new filesystem asks the chain of credentials anew."""
        with self._lock:
            self._opened = None

    def _request(self, what: str, call: Callable[[Any], T]) -> T:
        """ObjectMissing; StorageError: another try is useless; StorageUnavailable: the deadline has passed."""
        deadline_s, wait_s, tries = time.monotonic() + self._deadline_s, RETRY_S[0], 0
        while True:
            tries += 1
            try:
                return call(self._filesystem()[0])
            except StorageError:
                raise
            except Exception as error:  # of whatever library is below
                code = _code(error)
                if code in _MISSING or (isinstance(error, FileNotFoundError) and code != "NoSuchBucket"):
                    raise ObjectMissing(f"{self._url}: can't {what}: it does not exist") from error
                left_s = deadline_s - time.monotonic()
                if not _may_pass(error, code):
                    raise StorageError(self._sentence(what, error, code, tries)) from error
                if left_s <= 0:
                    raise StorageUnavailable(self._sentence(what, error, code, tries)) from error
                if code in _NEW_CREDENTIALS:
                    self._renew()
                _log.debug("try %d to %s: %s", tries, what, error)
            time.sleep(min(left_s, random.uniform(wait_s / 2, wait_s)))
            wait_s = min(2 * wait_s, RETRY_S[1])

    def _sentence(self, what: str, error: Exception, code: str, tries: int) -> str:
        told = _answer_of(error).get("Message") or str(error) or type(error).__name__
        help_ = _HELP.get(code, "is the endpoint right and reachable?" if _may_pass(error, code) else "")
        often = f" ({tries} tries in {self._deadline_s:.0f} s)" if tries > 1 else ""
        named = f"{code}: " if code and code not in told else ""
        return f"{self._url}: can't {what}{often}: {named}{told}".rstrip(".") + (f"; {help_}" if help_ else "")


def _filesystem_class(scheme: str) -> Any:
    import fsspec

    try:
        return fsspec.get_filesystem_class(scheme)
    except (ValueError, ImportError) as error:
        raise StorageError(
            f"storage {scheme}://: {error}; wanted a directory's path, file://, s3:// or a scheme whose fsspec package "
            "is installed"
        ) from error


def open_filesystem(url: str, options: StorageOptions, *, tries: int = 1) -> tuple[Any, str]:
    """A filesystem of its own, and the path in it. `tries` of each request, where nobody above tries again."""
    import fsspec

    if not url.startswith(("s3://", "s3a://")):
        fs, root = fsspec.url_to_fs(url, skip_instance_cache=True)
        return fs, root.rstrip("/")
    fs, root = fsspec.url_to_fs(
        url,
        skip_instance_cache=True,
        use_listings_cache=False,
        endpoint_url=options.endpoint,
        client_kwargs={"region_name": options.region} if options.region else {},
        config_kwargs={
            "connect_timeout": CONNECT_S,
            "read_timeout": ANSWER_S,
            "retries": {"total_max_attempts": tries},
            "max_pool_connections": 2 * PARTS_AT_ONCE,
            "request_checksum_calculation": options.checksums,
            "response_checksum_validation": options.checksums,
            # Bodies are not hashed for the signature: TLS protects them on the way, and blocks have their own CRCs.
            "s3": {"payload_signing_enabled": False},
        },
    )
    fs.retries = tries
    fs.blocking = s3_bytes.client_like(fs)
    return fs, root.rstrip("/")


def _in_parts(data: memoryview) -> bool:
    return len(data) >= 2 * PART_BYTES


def _create(fs: Any, path: str, data: bytes) -> bool:
    try:
        fs.pipe_file(path, data, mode="create")
    except FileExistsError:
        return False
    except OSError as error:
        if _code(error) in _EXISTS:
            return False
        raise
    return True


def _read(fs: Any, path: str, start: int, stop: int) -> tuple[bytes, int]:
    """Bytes and the object's size."""
    try:
        return s3_bytes.read(fs.blocking, path, start, stop)
    except Exception as error:
        if _code(error) in ("InvalidRange", "416"):
            return b"", 0
        raise


def _delete(fs: Any, path: str) -> None:
    try:
        fs.rm_file(path)
    except FileNotFoundError as error:
        if _code(error) == "NoSuchBucket":
            raise


def _unfinished(fs: Any, root: str, before_s: float) -> list[dict[str, str]]:
    """Arguments that name each upload."""
    if "s3" not in fs.protocol:
        return []
    bucket, _, prefix = root.partition("/")
    found: list[dict[str, str]] = []
    after: dict[str, str] = {}
    while True:
        page = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/", **after)
        found += [
            {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
            for upload in page.get("Uploads", ())
            if upload["Key"].startswith(f"{prefix}/") and upload["Initiated"].timestamp() < before_s
        ]
        if not page.get("IsTruncated") or not page.get("NextKeyMarker"):  # SeaweedFS never says where to go on
            return found
        after = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def _abort(fs: Any, upload: dict[str, str]) -> None:
    try:
        fs.call_s3("abort_multipart_upload", **upload)
    except OSError as error:
        if _code(error) not in ("NoSuchUpload", "404") and not isinstance(error, FileNotFoundError):
            raise


def _code(error: BaseException) -> str:
    """The service's own code, "" where it gave none."""
    return str(_answer_of(error).get("Code", ""))


def _answer_of(error: BaseException) -> Mapping[str, Any]:
    seen: BaseException | None = error
    while seen is not None:
        response = getattr(seen, "response", None)
        if isinstance(response, Mapping) and response.get("Error", {}).get("Code"):
            told: Mapping[str, Any] = response["Error"]
            return told
        seen = seen.__cause__
    return {}


def is_outage(error: BaseException) -> bool:
    """Whether a filesystem's error says that the service did not answer, or not now."""
    if (code := _code(error)) in _AGAIN:
        return True
    module = type(error).__module__.partition(".")[0]
    is_network = isinstance(error, ConnectionError | TimeoutError | socket.gaierror) or module in _CLIENTS
    return not code and is_network and not (isinstance(error, Exception) and _is_mistake(error))


def _may_pass(error: Exception, code: str) -> bool:
    """Whether another try may go better: throttling, a fault of the service, the network, expired credentials."""
    if code:
        return code in _AGAIN or code in _NEW_CREDENTIALS
    if isinstance(error, PermissionError | FileNotFoundError | FileExistsError | NotImplementedError):
        return False
    if isinstance(error, OSError | TimeoutError | EOFError):
        return error.errno not in (errno.EINVAL, errno.ENOSYS) if isinstance(error, OSError) else True
    return type(error).__module__.partition(".")[0] in _CLIENTS and not _is_mistake(error)


def _is_mistake(error: Exception) -> bool:
    """Of the caller or the configuration."""
    return any(word in type(error).__name__ for word in ("Credential", "ParamValidation", "Region", "Profile"))
