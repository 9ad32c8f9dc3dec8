"""Text -> token ids: bytes as they are, or a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from elastic.config import ConfigError
from elastic.config_sections import Data
from elastic.data.shards import UsedTokenizer, Values, dtype_of

BYTES = "bytes"
END_OF_DOCUMENT = 256
BYTES_TOKENIZER = UsedTokenizer(
    name=BYTES,
    sha256=hashlib.sha256(b"bytes 0 to 255, 256 ends a document").hexdigest(),
    vocab_size=257,
    end_of_document=END_OF_DOCUMENT,
)
ENDS = ("<|endoftext|>", "</s>", "<eos>")


class Tokenizer(Protocol):
    """`used`: what the manifest says of it."""

    used: UsedTokenizer

    def encode(self, texts: Sequence[bytes]) -> list[Values]:
        """The tokens of each UTF-8 text, without special ones around them and without the end of document."""

    def decode(self, tokens: Values) -> str:
        """For a person to read."""


def open_tokenizer(data: Data) -> Tokenizer:
    """What `data.tokenizer` names. ConfigError: no such file, no tokenizer, the end of document is not known."""
    if data.tokenizer != BYTES:
        return open_file(data.tokenizer, data.end_of_document)
    if data.end_of_document:
        raise ConfigError(
            f"data.end_of_document {data.end_of_document!r}: the bytes tokenizer has its own, {END_OF_DOCUMENT}; "
            "leave it out, or name a tokenizer.json in data.tokenizer"
        )
    return BytesTokenizer()


def open_file(path: str, end_of_document: str | int = "") -> FileTokenizer:
    """`end_of_document`: the token or its id; empty: found. Read each time, parsed when it has changed."""
    return _opened(path, read_file(path), end_of_document)


@lru_cache(maxsize=2)
def _opened(path: str, content: bytes, end_of_document: str | int) -> FileTokenizer:
    return FileTokenizer(path, content, end_of_document)


def sha256_of(tokenizer: str) -> str:
    """What identifies it. ConfigError: the file can't be read."""
    return BYTES_TOKENIZER.sha256 if tokenizer == BYTES else hashlib.sha256(read_file(tokenizer)).hexdigest()


def read_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"data.tokenizer {path}: {error.strerror}; give the path of a tokenizer.json, or 'bytes'"
        ) from error


class BytesTokenizer:
    """Tokens 0 to 255 are the bytes, 256 ends a document."""

    used = BYTES_TOKENIZER

    def encode(self, texts: Sequence[bytes]) -> list[Values]:
        return [np.frombuffer(text, dtype=np.uint8).astype(np.uint16) for text in texts]

    def decode(self, tokens: Values) -> str:
        return tokens[tokens < END_OF_DOCUMENT].astype(np.uint8).tobytes().decode(errors="replace")


class FileTokenizer:
    """A `tokenizer.json`, without the truncation and padding that it may ask for."""

    def __init__(self, path: str, content: bytes, end_of_document: str | int) -> None:
        self._tokenizer = _parse(path, content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        if not vocabulary:
            raise ConfigError(f"data.tokenizer {path} has no token; give a trained tokenizer.json")
        self.used = UsedTokenizer(
            name=Path(path).name,
            sha256=hashlib.sha256(content).hexdigest(),
            vocab_size=max(vocabulary.values()) + 1,
            end_of_document=_end(path, vocabulary, end_of_document),
        )
        self._dtype = np.dtype(dtype_of(self.used.vocab_size))

    def encode(self, texts: Sequence[bytes]) -> list[Values]:
        decoded = [text.decode(errors="replace") for text in texts]
        encodings = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def decode(self, tokens: Values) -> str:
        return str(self._tokenizer.decode(tokens.tolist()))


def _parse(path: str, content: bytes) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError(
            f"data.tokenizer {path} needs the package tokenizers, which is not installed on this machine; "
            'install it with: pip install "elastic[hf]"'
        ) from error
    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the package raises nothing narrower
        raise ConfigError(
            f"data.tokenizer {path} is no tokenizer.json ({error}); give the file of that name from a Hugging Face "
            "model, or 'bytes'"
        ) from error


def _end(path: str, vocabulary: dict[str, int], wanted: str | int) -> int:
    """The token that ends a document."""
    if isinstance(wanted, int):
        return wanted
    if wanted:
        if wanted not in vocabulary:
            raise ConfigError(f"data.end_of_document {wanted!r} is no token of {path}; give one that is")
        return vocabulary[wanted]
    found = [token for token in ENDS if token in vocabulary]
    if len(found) != 1:
        raise ConfigError(
            f"{path} has {' and '.join(found) or 'none'} of the usual ends of a document ({' '.join(ENDS)}); "
            "name the token in data.end_of_document"
        )
    return vocabulary[found[0]]
