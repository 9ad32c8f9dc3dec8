"""A Hugging Face tokenizer.json: its own tokens, its end of document, its vocabulary; a sentence where it can't be."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from elastic.config import Config, ConfigError
from elastic.config_sections import Batch, Model
from elastic.data.prepare import check_input, prepare, prepare_for
from elastic.data.shards import Corpus, read_manifest
from elastic.data.tokenizer import open_file
from elastic.data.verify import damages, described
from tests.data.inputs import as_texts, data_of, documents, prepared_of, quiet, rows, texts, write_jsonl


def train(path: Path, *special: str, vocab_size: int = 400) -> str:
    """A small byte-level BPE in `path`."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(200), trainer)
    # What a model's file may ask for, and would cut documents short.
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json", "<|endoftext|>", "<|user|>")


def test_documents_are_its_tokens_whole_and_ended(tmp_path: Path, tokenizer: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", rows(80))
    prepared = prepared_of(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=tokenizer)
    manifest = read_manifest(prepared)
    own = tokenizers.Tokenizer.from_file(tokenizer)
    own.no_truncation()
    own.no_padding()
    end = own.token_to_id("<|endoftext|>")
    assert manifest.tokenizer.name == "tokenizer.json" and manifest.tokenizer.end_of_document == end
    assert manifest.tokenizer.vocab_size == own.get_vocab_size() and manifest.dtype == "uint16"
    assert manifest.tokenizer.sha256 == hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest()
    found = documents(prepared, "train") + documents(prepared, "held_out")
    wanted = {tuple([*own.encode(text, add_special_tokens=False).ids, end]) for text in texts(80)}
    assert {tuple(document.tolist()) for document in found} == wanted and len(found) == 80
    assert not list(damages(prepared, manifest))
    assert any(f"{texts(1)[0][:10]}" in line for line in described(prepared, 80))


def test_splits_are_the_same_as_with_bytes(tmp_path: Path, tokenizer: str) -> None:
    """The side of a document is a matter of its text."""
    write_jsonl(tmp_path / "a.jsonl", rows(80))
    held_out = as_texts(prepared_of(tmp_path / "a.jsonl", tmp_path / "bytes"), "held_out")
    prepared = prepared_of(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=tokenizer)
    opened = open_file(tokenizer)
    assert [opened.decode(document[:-1]) for document in documents(prepared, "held_out")] == held_out


def test_instructions_are_masked_by_token(tmp_path: Path, tokenizer: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"<|user|>word {n}", "completion": "word é"} for n in range(60)])
    prepared = prepared_of(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=tokenizer)
    opened = open_file(tokenizer)
    completion = opened.encode([b"word \xc3\xa9"])[0].tolist()
    for tokens, mask in zip(documents(prepared, "train"), documents(prepared, "train", "loss_mask")):
        assert tokens[mask == 1].tolist() == [*completion, opened.used.end_of_document]


def test_a_large_vocabulary_takes_uint32(tmp_path: Path) -> None:
    vocabulary = {f"w{number}": number for number in range(70_000)} | {"</s>": 70_000, "[UNK]": 70_001}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "words.json"))
    write_jsonl(tmp_path / "a.jsonl", [{"text": f"w{n * 1111 % 70_000} w69999"} for n in range(60)])
    prepared = prepared_of(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=str(tmp_path / "words.json"))
    corpus = Corpus.open(prepared, "train")
    assert corpus.dtype == np.uint32 and corpus.vocab_size == 70_002
    assert corpus.window(0, 2)[1:].tolist() == [69_999, 70_000]
    assert not list(damages(prepared, read_manifest(prepared)))


def test_another_tokenizer_is_another_corpus(tmp_path: Path, tokenizer: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", rows(60))
    data = data_of(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=str(tmp_path / "t.json"))
    fingerprints = set()
    for vocab_size in (300, 350):
        train(tmp_path / "t.json", "</s>", vocab_size=vocab_size)
        fingerprints.add(read_manifest(prepare(data, progress=quiet).parent).fingerprint)
    assert len(fingerprints) == 2


@pytest.mark.parametrize(
    ("special", "wanted", "told"),
    [
        ((), "", "has none of the usual ends of a document"),
        (("</s>", "<eos>"), "", "has </s> and <eos> of the usual ends of a document"),
        (("</s>",), "<end>", "data.end_of_document '<end>' is no token of"),
    ],
)
def test_an_unknown_end_of_document_is_said(tmp_path: Path, special: tuple[str, ...], wanted: str, told: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", rows(60))
    data = data_of(
        tmp_path / "a.jsonl", tmp_path / "out", tokenizer=train(tmp_path / "t.json", *special), end_of_document=wanted
    )
    with pytest.raises(ConfigError, match=told):
        prepare(data, progress=quiet)
    assert not (tmp_path / "out").exists()


def test_the_end_of_document_may_be_chosen(tmp_path: Path) -> None:
    path = train(tmp_path / "t.json", "</s>", "<eos>")
    assert open_file(path, "<eos>").used.end_of_document == 1


@pytest.mark.parametrize("content", ["", "no JSON", "{}", '{"version": "1.0", "model": {"type": "BPE"}}'])
def test_what_is_no_tokenizer_is_said(tmp_path: Path, content: str) -> None:
    (tmp_path / "t.json").write_text(content)
    write_jsonl(tmp_path / "a.jsonl", rows(60))
    with pytest.raises(ConfigError, match=r"t\.json is no tokenizer\.json \(.*; give the file of that name"):
        prepare(data_of(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=str(tmp_path / "t.json")), progress=quiet)
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_said(tmp_path: Path, tokenizer: str) -> None:
    """Where Python finds no such package, as on a machine without the extra."""
    code = (
        "import sys; sys.modules['tokenizers'] = None\n"
        "from elastic.config import ConfigError\n"
        "from elastic.data.tokenizer import open_file\n"
        "try: open_file(sys.argv[1])\n"
        "except ConfigError as error: print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, tokenizer], capture_output=True, text=True, timeout=60)
    assert "needs the package tokenizers, which is not installed on this machine; install it with: pip" in ran.stdout


def test_a_model_with_too_small_a_vocabulary_is_refused_before_anything_is_prepared(
    tmp_path: Path, tokenizer: str
) -> None:
    write_jsonl(tmp_path / "a.jsonl", rows(60))
    data = data_of(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=tokenizer)
    config = Config(data=data, batch=Batch(global_samples=1))
    told = r"model.vocab_size 257 is below the 400 tokens of the corpus's tokenizer \(tokenizer.json\); set"
    for refused in (lambda: check_input(config), lambda: prepare_for(config, progress=quiet)):
        with pytest.raises(ConfigError, match=told):
            refused()
    assert not (tmp_path / "out").exists()
    prepare_for(config.model_copy(update={"model": Model(vocab_size=400, seq_len=8)}), progress=quiet)
    with pytest.raises(ConfigError, match=told):
        prepare_for(config, progress=quiet)
    prepare_for(config.model_copy(update={"task": "my.py:Task", "model": Model(seq_len=8)}), progress=quiet)
