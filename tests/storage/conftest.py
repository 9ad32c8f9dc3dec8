"""One SeaweedFS for the tier; a proxy and an empty prefix for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import s3fs

from elastic.config_sections import StorageOptions
from elastic.storage.object_store import ObjectStore
from tests.storage.servers import KEY, SECRET, Proxy, Seaweed, credentials

_numbers = itertools.count()


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    server = Seaweed(tmp_path_factory.mktemp("weed"))
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in credentials().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def proxy(seaweed: Seaweed) -> Iterator[Proxy]:
    found = Proxy(seaweed.endpoint)
    yield found
    found.close()


@pytest.fixture(scope="session")
def bucket(seaweed: Seaweed) -> str:
    """One for all tests: each bucket of SeaweedFS takes volumes of its own."""
    fs = s3fs.S3FileSystem(key=KEY, secret=SECRET, endpoint_url=seaweed.endpoint, skip_instance_cache=True)
    fs.mkdir("elastic-tests")
    return "elastic-tests"


@pytest.fixture
def url(bucket: str) -> str:
    """Of a run that nobody else has."""
    return f"s3://{bucket}/prefix/run-{next(_numbers)}"


@pytest.fixture
def options(proxy: Proxy) -> StorageOptions:
    return StorageOptions(endpoint=proxy.endpoint, region="us-east-1", deadline_s=10.0)


@pytest.fixture
def store(url: str, options: StorageOptions) -> ObjectStore:
    return ObjectStore(url, options)
