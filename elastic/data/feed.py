"""What a run trains on: one corpus or several mixed ones, in one order. Sample number -> id -> tokens.

    number --skips--> number in the full order --mixture--> (source, its sample) --order--> id: epoch, source, window

Every step of it is a pure function of the configuration and the corpora's fingerprints.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from elastic.config import Config, ConfigError
from elastic.config_sections import Data, HeldOutSet
from elastic.data.fetch import Wanted
from elastic.data.mixing import Mixture, Stage, whole_numbers
from elastic.data.order import SOURCES_MAX, Numbers, Order, source_of, window_of
from elastic.data.packed import PackedCorpus
from elastic.data.packing import packed_fingerprint
from elastic.data.remote import Remote, prepared_at
from elastic.data.rows import Rows
from elastic.data.shards import Corpus, DataError, Manifest, Split, read_manifest
from elastic.data.skips import Skips

NO_SKIPS = Skips()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Feed:
    """corpora, orders: one of each source. mixture: None where there is only one."""

    seq_len: int
    corpora: tuple[Corpus, ...]
    orders: tuple[Order, ...]
    mixture: Mixture | None = None
    skips: Skips = NO_SKIPS

    def ids(self, numbers: Numbers) -> Numbers:
        """Ids of the samples with these numbers, in any order. ValueError: an epoch that an id can't name."""
        numbers = self.skips.numbers(numbers)
        if self.mixture is None:
            return self.orders[0].ids(numbers)
        which, inside = self.mixture.places(numbers)
        ids = np.empty(len(numbers), dtype=np.uint64)
        for source in np.unique(which).tolist():
            its = which == source
            ids[its] = self.orders[source].ids(inside[its])
        return ids

    def run(self, start: int, count: int) -> Numbers:
        """Ids of `count` samples from number `start` on."""
        return self.ids(np.arange(start, start + count, dtype=np.uint64))

    def read(self, ids: Numbers) -> Rows:
        """Copies of the windows that these ids name."""
        windows = window_of(ids)
        if len(self.corpora) == 1:
            return self.corpora[0].rows(windows, self.seq_len)
        which = source_of(ids)
        found = {int(at): np.flatnonzero(which == at) for at in np.unique(which)}
        return Rows.joined({at: self.corpora[at].rows(windows[its], self.seq_len) for at, its in found.items()}, found)

    @property
    def remotes(self) -> tuple[Remote, ...]:
        """Where corpora are fetched from; none where all lie in files of this node."""
        return tuple(corpus.remote for corpus in self.corpora if corpus.remote is not None)

    def expect(self, ids: Numbers) -> Wanted:
        """The windows that these ids name are read soon. Does not wait."""
        windows, which, wanted = window_of(ids), source_of(ids), Wanted()
        for at, corpus in enumerate(self.corpora):
            its = windows if len(self.corpora) == 1 else windows[which == at]
            if corpus.remote is not None and len(its):
                wanted = wanted.joined(corpus.expect(its, self.seq_len))
        return wanted

    def used(self, position: int) -> tuple[int, ...]:
        """How many samples of each source the first `position` are."""
        if self.mixture is None:
            return (position,)
        stop = self.skips.number(position)
        used = np.array(self.mixture.used(stop))
        for first, last in self.skips.merged():
            used -= np.subtract(self.mixture.used(min(last, stop)), self.mixture.used(min(first, stop)))
        return tuple(used.tolist())


def open_corpora(data: Data, split: Split) -> dict[str, Corpus]:
    """By the names of the sources, in their order; "" where there is but one."""
    return {name: open_corpus(part.prepared, split, data) for name, part in data.parts().items()}


def open_corpus(prepared: str, split: Split, data: Data) -> Corpus:
    """One of them, or a further one, to be read as `data` says."""
    if data.packing == "best_fit":
        place = directory_of(prepared)
        packed = PackedCorpus.open(place, split)
        packed.place = (place, split)
        return packed
    corpus = Corpus.open(prepared_at(data, prepared), split)
    corpus.is_apart = data.documents == "apart"
    return corpus


def directory_of(prepared: str) -> Path:
    """Of what is packed. ConfigError: it lies behind a URL."""
    if "://" in prepared:
        raise ConfigError(
            f"data.packing best_fit: {prepared} is a URL, wanted a directory that all nodes see: bins can't be read "
            "from object storage; set packing to none (with data.documents apart it can)"
        )
    return Path(prepared)


def feed_of(config: Config, corpora: Mapping[str, Corpus]) -> Feed:
    """DataError: a corpus has no window of this length, or all together fewer than a step takes. ConfigError: see
    `mixture_of`."""
    seq_len, samples = config.model.seq_len, config.batch.global_samples
    for name, corpus in corpora.items():
        check_windows(corpus, seq_len, name)
    if (windows := sum(corpus.windows(seq_len) for corpus in corpora.values())) < samples:
        raise DataError(
            f"what is trained on has {windows} windows of seq_len {seq_len}, a step takes {samples} samples "
            "(batch.global_samples): it would use one twice; give more text, or lower one of them"
        )
    orders = [
        corpus.order(seed=config.seed, seq_len=seq_len, lanes=samples, name=name, source=number)
        for number, (name, corpus) in enumerate(corpora.items())
    ]
    return Feed(
        seq_len=seq_len,
        corpora=tuple(corpora.values()),
        orders=tuple(orders),
        mixture=mixture_of(config),
        skips=skips_of(config.data),
    )


def mixture_of(config: Config) -> Mixture | None:
    """None without sources. ConfigError: weights that can't be dealt out."""
    names = [*config.data.parts()]
    if names == [""]:
        return None
    if len(names) > SOURCES_MAX:
        raise ConfigError(f"data.sources has {len(names)} sources, at most {SOURCES_MAX}")
    weights = {source.name: source.weight for source in config.data.sources}
    stages = [Stage(first=0, weights=whole_numbers([weights[name] for name in names]))]
    for change in config.data.weights:
        first = change.from_step * config.batch.global_samples
        stages.append(Stage(first=first, weights=whole_numbers([change.weights.get(name, 0.0) for name in names])))
    try:
        return Mixture(seed=config.seed, stages=tuple(stages))
    except ValueError as error:
        raise ConfigError(f"data.sources, data.weights: {error}") from None


def skips_of(data: Data) -> Skips:
    return Skips(ranges=tuple((one.first, one.stop) for one in data.skip))


def check_windows(corpus: Corpus, seq_len: int, name: str = "") -> None:
    """DataError: there is none."""
    if not corpus.windows(seq_len):
        raise DataError(
            f"{f'source {name}' if name else 'the corpus'} has {corpus.tokens} tokens, one window of seq_len {seq_len} "
            f"needs {seq_len + 1}; give it more text or make model.seq_len smaller"
        )


def read_manifests(data: Data, sets: Sequence[HeldOutSet] = ()) -> dict[str, Manifest]:
    """Of each source. `sets`: to be evaluated beside them. DataError: one is not prepared. ConfigError: their
    tokens don't mean the same."""
    found = {name: read_manifest(prepared_at(part)) for name, part in data.parts().items()}
    first = next(iter(found))
    evaluated = {f"evaluation.{one.name}": read_manifest(prepared_at(data, one.prepared)) for one in sets}
    for name, manifest in (found | evaluated).items():
        if manifest.tokenizer.sha256 != found[first].tokenizer.sha256 or manifest.dtype != found[first].dtype:
            raise ConfigError(
                f"{first or 'data'} and {name} don't fit together: tokenizers {found[first].tokenizer.name} and "
                f"{manifest.tokenizer.name} are not the same; prepare both with one"
            )
    return found


def fingerprint_of(data: Data, seq_len: int) -> str:
    """Of all that is trained on, in windows of `seq_len`: two runs with the same one have the same samples."""
    fingerprints = {name: manifest.fingerprint for name, manifest in read_manifests(data).items()}
    if data.packing == "best_fit":
        fingerprints = {name: packed_fingerprint(one, seq_len) for name, one in fingerprints.items()}
    if "" in fingerprints:
        return fingerprints[""]
    return hashlib.sha256("".join(f"{name} {one}\n" for name, one in fingerprints.items()).encode()).hexdigest()
