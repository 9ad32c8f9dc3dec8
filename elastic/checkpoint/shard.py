"""One rank's shard of one snapshot, without its data: identity, block table, CRCs; how it is told and verified.

The same facts travel two ways: as a small header with raw bytes behind it between movers, and as the JSON
object that lies beside the data in storage, which carries its own hash.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic.checkpoint.arena import Buffer
from elastic.checkpoint.blocks import SUB_BLOCK, Block, Table, decode_bytes, sub_blocks
from elastic.checkpoint.errors import CheckpointError, TooNew
from elastic.events import Uploaded
from elastic.plan import SnapshotKey, shard_object
from elastic.schema import refusal
from elastic.storage.store import Store

SCHEMA = 1
BLOCKS_TOLD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """`table` is the JSON of `blocks.encode`; `crcs[i]` is zlib.crc32 of data[i * SUB_BLOCK : (i + 1) * SUB_BLOCK]."""

    key: SnapshotKey
    rank: int
    world: int
    nbytes: int
    table: bytes
    crcs: npt.NDArray[np.uint32]

    def blocks(self) -> Table:
        blocks = decode_bytes(self.table)
        for block in blocks:
            if block.at + block.nbytes > self.nbytes:
                raise CheckpointError(f"{block} lies beyond the {self.nbytes} bytes of rank {self.rank}'s shard")
        return blocks

    def facts(self) -> bytes:
        """What follows `header` on the wire."""
        return self.table + self.crcs.astype("<u4").tobytes()

    def header(self) -> dict[str, Any]:
        return {
            "key": [self.key.generation, self.key.step],
            "rank": self.rank,
            "world": self.world,
            "nbytes": self.nbytes,
            "table_nbytes": len(self.table),
            "facts_crc": zlib.crc32(self.facts()),
        }

    def verify(self, data: npt.NDArray[np.uint8], spans: Iterable[tuple[int, int]], *, where: str, at: int = 0) -> None:
        """CheckpointError names the first sub-block within `spans` (each begins on one) whose CRC differs.

        `data` begins at byte `at` of the shard.
        """
        for start, stop in spans:
            for first in range(start, stop, SUB_BLOCK):
                got = zlib.crc32(data[first - at : min(first + SUB_BLOCK, stop) - at].data)
                if got != self.crcs[first // SUB_BLOCK]:
                    raise CheckpointError(self.damage(first // SUB_BLOCK, where=where))

    def damage(self, sub_block: int, *, where: str, blocks_told: int | None = BLOCKS_TOLD) -> str:
        """One sentence; `blocks_told` of what lies there are named, None: all."""
        start, stop = sub_block * SUB_BLOCK, min((sub_block + 1) * SUB_BLOCK, self.nbytes)
        hit = [block for block in self.blocks() if block.at < stop and block.at + block.nbytes > start]
        shown = hit[:blocks_told]
        told = ", ".join(map(_told, shown)) or "padding"
        more = f" and {len(hit) - len(shown)} more blocks" if len(hit) > len(shown) else ""
        one_of = "one of " if len(hit) > 1 else ""
        return (
            f"{where}: bytes {start} to {stop} of rank {self.rank}'s shard of {self.key} fail their CRC "
            f"({one_of}{told}{more}); use another copy or an older checkpoint"
        )


def _told(block: Block) -> str:
    """Name and box: "model.w[0:8, 16:32]"."""
    box = ", ".join(f"{at}:{at + size}" for at, size in zip(block.offsets, block.sizes))
    return f"{block.name}[{box}]"


def of_buffer(buffer: Buffer) -> Shard:
    """What a sealed buffer holds. CheckpointError: its table or CRCs changed since they were sealed."""
    shard = Shard(
        key=buffer.key,
        rank=buffer.rank,
        world=buffer.world,
        nbytes=buffer.nbytes,
        table=buffer.table(),
        crcs=buffer.crcs.copy(),
    )
    if zlib.crc32(shard.facts()) != buffer.facts_crc:
        raise CheckpointError(f"the table of rank {shard.rank}'s shard of {shard.key} changed after it was sealed")
    return shard


def of_header(header: dict[str, Any], facts: bytes) -> Shard:
    """The inverse of `header` and `facts`. CheckpointError: they do not fit each other."""
    table_nbytes = header["table_nbytes"]
    if zlib.crc32(facts) != header["facts_crc"] or len(facts) != facts_nbytes(header):
        raise CheckpointError(f"the table of rank {header['rank']}'s shard arrived damaged; it will be sent again")
    return Shard(
        key=key_of(header["key"]),
        rank=header["rank"],
        world=header["world"],
        nbytes=header["nbytes"],
        table=facts[:table_nbytes],
        crcs=np.frombuffer(facts, dtype="<u4", offset=table_nbytes),
    )


def facts_nbytes(header: dict[str, Any]) -> int:
    return int(header["table_nbytes"]) + 4 * sub_blocks(header["nbytes"])


def is_small(header: dict[str, Any]) -> bool:
    """Whether to send it whole, unasked: that may be in vain, and saves two round trips."""
    return int(header["nbytes"]) <= SUB_BLOCK and facts_nbytes(header) <= SUB_BLOCK


def key_of(raw: Any) -> SnapshotKey:
    generation, step = raw
    return SnapshotKey(generation=int(generation), step=int(step))


def table_object(data_object: str) -> str:
    """The key of the JSON object that describes the data object `data/....bin`."""
    return data_object.removesuffix(".bin") + ".json"


def to_object(shard: Shard) -> bytes:
    body = {
        "schema": SCHEMA,
        "key": [shard.key.generation, shard.key.step],
        "rank": shard.rank,
        "world": shard.world,
        "nbytes": shard.nbytes,
        "sub_block": SUB_BLOCK,
        "crcs": shard.crcs.tolist(),
        "blocks": json.loads(shard.table),
    }
    return sign(body)


def of_object(raw: bytes, *, name: str) -> Shard:
    """The inverse of `to_object`. CheckpointError: damaged, or written by another version."""
    body = check(raw, name=name)
    check_schema(body, SCHEMA, name=name)
    if body["sub_block"] != SUB_BLOCK:
        raise CheckpointError(
            f"{name} has sub-blocks of {body['sub_block']} bytes, this elastic reads {SUB_BLOCK}; "
            "use the one that wrote it"
        )
    shard = Shard(
        key=key_of(body["key"]),
        rank=body["rank"],
        world=body["world"],
        nbytes=body["nbytes"],
        table=json.dumps(body["blocks"], separators=(",", ":")).encode(),
        crcs=np.array(body["crcs"], dtype=np.uint32),
    )
    if len(shard.crcs) != sub_blocks(shard.nbytes):
        raise CheckpointError(f"{name} has {len(shard.crcs)} CRCs for {shard.nbytes} bytes")
    return shard


def put_shard(store: Store, buffer: Buffer, key: SnapshotKey, *, sequence: int, attempt: int) -> Uploaded:
    """Write what the sealed `buffer` holds: data first, then the table that makes it readable.

    CheckpointError: also where the buffer does not hold write `sequence`, of `key`, any more; nothing readable is left.
    """
    shard, name = of_buffer(buffer), shard_object(attempt, key, buffer.rank)
    shard.verify(buffer.data, [(0, shard.nbytes)], where="own arena")
    store.put(name, buffer.view)
    if buffer.sequence != sequence or shard.key != key:
        raise CheckpointError("the buffer was reused while it was written")
    store.put(table_object(name), to_object(shard))
    return Uploaded(key=key, rank=shard.rank, object=name, nbytes=shard.nbytes)


def sign(body: dict[str, Any]) -> bytes:
    """JSON that carries the SHA-256 of itself, so that a damaged one is never believed."""
    return _canonical({**body, "sha256": hashlib.sha256(_canonical(body)).hexdigest()})


def check(raw: bytes, *, name: str) -> dict[str, Any]:
    """The inverse of `sign`, hash included. CheckpointError: not JSON, or not the very bytes that were signed."""
    try:
        body = json.loads(raw)
        claimed = body.pop("sha256")
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{name} is no signed JSON object ({type(error).__name__}: {error})") from error
    if sign(body) != raw:
        raise CheckpointError(f"{name} does not match its own hash: it is damaged")
    return {**body, "sha256": claimed}


def check_schema(body: Mapping[str, Any], reads: int, *, name: str) -> None:
    """TooNew, or CheckpointError: `body` is of another schema than this code reads."""
    got = body.get("schema")
    if why := refusal(name, got, reads):
        raise (TooNew if isinstance(got, int) and got > reads else CheckpointError)(why)


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
