"""A prepared directory goes to storage whole, checked on the way, its manifest last; a job finds it there."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.config import Config, ConfigError
from elastic.config_sections import Data, Model
from elastic.data.prepare import check_input, prepare_for
from elastic.data.shards import DataError, read_manifest
from elastic.data.upload import damages_behind, upload
from elastic.data.verify import described
from elastic.storage.store import DirectoryStore
from tests.data.behind import behind, copied
from tests.data.inputs import prepared_of, quiet, rows, write_jsonl


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "a.jsonl", rows(200))
    return prepared_of(tmp_path / "a.jsonl", tmp_path / "prepared", shard_bytes=4096)


def test_what_is_uploaded_is_the_same_corpus(prepared: Path, tmp_path: Path) -> None:
    to = behind(tmp_path / "there", tmp_path / "cache")
    assert upload(prepared, to, progress=quiet) == f"{to}/manifest.json"
    assert read_manifest(to) == read_manifest(prepared) and not list(damages_behind(to, read_manifest(to)))
    assert described(to, 2) == described(prepared, 2)
    config = Config(data=Data(prepared=str(to)), model=Model(vocab_size=257))
    check_input(config)
    assert prepare_for(config, progress=quiet) == [f"{to}/manifest.json"]
    with pytest.raises(ConfigError, match=r"model\.vocab_size 100 is below"):
        check_input(config.model_copy(update={"model": Model(vocab_size=100)}))
    nothing = config.model_copy(update={"data": Data(prepared=f"file://{tmp_path}/no")})
    with pytest.raises(DataError, match="into a directory, then `elastic data upload` it there"):
        prepare_for(nothing, progress=quiet)


def test_what_is_there_is_not_sent_again(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to, put, sent = behind(tmp_path / "there", tmp_path / "cache"), DirectoryStore.put, []

    def counted(store: DirectoryStore, key: str, data: bytes) -> None:
        sent.append(key)
        if key == "manifest.json" and len(sent) < 100:
            raise KeyboardInterrupt
        put(store, key, data)

    monkeypatch.setattr(DirectoryStore, "put", counted)
    with pytest.raises(KeyboardInterrupt):
        upload(prepared, to, progress=quiet)
    assert len(sent) > 4 and sent[-1] == "manifest.json" and not (tmp_path / "there/manifest.json").exists()
    sent[:] = [""] * 100
    upload(prepared, to, progress=quiet)
    assert sent[100:] == ["manifest.json"]


def test_damage_is_not_uploaded_and_another_corpus_not_replaced(prepared: Path, tmp_path: Path) -> None:
    to = behind(tmp_path / "there", tmp_path / "cache")
    damaged = copied(prepared, tmp_path / "damaged")
    shard = read_manifest(damaged).splits["train"][-1]
    content = bytearray((damaged / shard.file).read_bytes())
    content[100] ^= 1
    (damaged / shard.file).write_bytes(content)
    with pytest.raises(DataError, match=f"{shard.file} is damaged, nothing of it is uploaded"):
        upload(damaged, to, progress=quiet)
    with pytest.raises(DataError, match=r"manifest\.json is missing"):
        read_manifest(to)
    upload(prepared, to, progress=quiet)
    write_jsonl(tmp_path / "b.jsonl", rows(90))
    other = prepared_of(tmp_path / "b.jsonl", tmp_path / "other")
    with pytest.raises(ConfigError, match="holds another corpus"):
        upload(other, to, progress=quiet)
    (tmp_path / "there" / shard.file).write_bytes(content)
    (tmp_path / "there" / read_manifest(to).splits["train"][0].sidecar).unlink()
    told = list(damages_behind(to, read_manifest(to)))
    assert len(told) == 3 and "is missing, or not the one" in told[0] and f"{shard.file}: bytes 0 to" in told[1]
