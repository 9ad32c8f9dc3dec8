"""Checkpoints to and from other software: which one, under which names, and what a job makes of what it gets."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from elastic import resume
from elastic.checkpoint import dcp, export, importing, llama
from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.log import CommitLog, Entry
from elastic.checkpoint.reader import Reader, Source
from elastic.checkpoint.safetensors_file import SafetensorsSource
from elastic.checkpoint.upkeep import manifest_of, of_step
from elastic.config import Config, ConfigError, Place
from elastic.data.feed import fingerprint_of
from elastic.data.prepare import prepare_for
from elastic.report import config_of
from elastic.storage.errors import ObjectMissing
from elastic.storage.store import Store, open_store, store_at

Format = Literal["safetensors", "dcp"]
What = Literal["model", "all"]

PROBLEMS_MAX = 20


# ---------------------------------------------------------------- export


def export_run(
    place: Place,
    *,
    to: str,
    format: Format,
    step: int | None = None,
    what: What | None = None,
    dtype: str | None = None,
    file_bytes_max: int = export.FILE_BYTES,
) -> list[str]:
    """Writes the newest checkpoint, or that of `step`, to a directory or URL; what was done, in lines.

    what: by default the model as safetensors, everything as DCP. dtype: of the model's floats.
    """
    what = what or ("model" if format == "safetensors" else "all")
    if dtype is not None and (format, what) != ("safetensors", "model"):
        raise ConfigError(f"--dtype {dtype} is for --format safetensors --what model; the rest is exported as it is")
    store = store_at(place)
    entry = _checkpoint(store, place.url, step)
    manifest = manifest_of(entry)
    config, reader = config_of(place, manifest.attempt), Reader(store, manifest)
    with export.target(to, place.options) as target:
        if format == "dcp":
            values = _groups(config, manifest.key.step, reader) if what == "all" and config.is_built_in else {}
            paths = {name: path for name in reader.tensors if (path := _dcp_path(name)) and _is(what, name)}
            nbytes = dcp.write_dcp(reader, paths, target, values=values, file_bytes_max=file_bytes_max)
            notes = [] if values or what == "model" else ["param_groups are not in it: load with allow_partial_load"]
        else:
            names, described = _safetensors_names(config, reader, what, dtype)
            nbytes = export.write_safetensors(
                reader,
                names,
                target,
                config=described,
                metadata={"run": manifest.about.run, "step": str(manifest.key.step)},
                dtype=dtype,
                file_bytes_max=file_bytes_max,
            )
            notes = [] if described else ["without config.json, names as the task has them"]
    told = f"step {manifest.key.step} of run {manifest.about.run} (log entry {entry.number})"
    return [f"exported {told} as {format}: {nbytes:,} bytes, every one verified, to {to}", *notes]


def _checkpoint(store: Store, where: str, step: int | None) -> Entry:
    log = CommitLog(store)
    if step is None:
        newest = log.newest_entry()
        if newest is None:
            raise CheckpointError(f"{where} has no checkpoint; give the directory or URL of a run that has one")
        return newest
    try:
        return of_step(log, step)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _is(what: What, name: str) -> bool:
    return what == "all" or name.startswith("model.")


def _safetensors_names(
    config: Config, reader: Reader, what: What, dtype: str | None
) -> tuple[dict[str, str], dict[str, Any] | None]:
    """Names there, and config.json where there is one."""
    if what == "all":
        return {name: name for name in reader.tensors}, None
    mine = {name.removeprefix("model."): block for name, block in reader.tensors.items() if name.startswith("model.")}
    if not config.is_built_in:
        return {f"model.{name}": name for name in mine}, None
    shapes = {name: block.global_shape for name, block in mine.items()}
    if shapes != llama.shapes(config.model):
        raise CheckpointError("the tensors are not those of the model in the run's config.yaml; export --what all")
    described = llama.config(config.model, dtype=dtype or mine["embed.weight"].dtype)
    return {f"model.{ours}": theirs for ours, theirs in llama.names(config.model).items()}, described


def _dcp_path(name: str) -> dcp.Path:
    """Where `get_state_dict` has it, in {"model": ..., "optim": ...}; what was registered beside them."""
    kind, _, rest = name.partition(".")
    if kind == "optimizer":
        parameter, _, key = rest.rpartition(".")
        return ("optim", "state", parameter, key)
    return (kind, rest)


def _groups(config: Config, step: int, reader: Reader) -> dict[dcp.Path, Any]:
    """param_groups of the built-in task's optimizer: matrices decay, vectors do not; the rate of the next step."""
    import torch

    from elastic.worker.schedule import warmup_cosine

    names = [
        (name, len(reader.tensors[f"model.{name}"].global_shape))
        for name in llama.names(config.model)
        if f"model.{name}" in reader.tensors
    ]
    settings = config.optimizer
    groups: list[dict[str, Any]] = [
        {"params": [torch.nn.Parameter(torch.empty(0))]},
        {"params": [torch.nn.Parameter(torch.empty(0))], "weight_decay": 0.0},
    ]
    made = torch.optim.AdamW(
        groups,
        lr=settings.lr * warmup_cosine(settings, config.steps, step),
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    members = ([name for name, dims in names if dims > 1], [name for name, dims in names if dims <= 1])
    return dcp.group_values([{**group, "params": mine} for group, mine in zip(made.param_groups, members)])


# ---------------------------------------------------------------- import


def import_run(config: Config, where: str, *, step: int | None = None, say: Callable[[str], None]) -> None:
    """Makes what lies in directory or URL `where` the first checkpoint of the job's run, which must not exist yet.

    step: of which the run goes on, for its schedule and position in the data; None: as many as the optimizer has made.
    ConfigError: one line for each thing that does not fit. Killed at any moment and called again it does the same:
    without a log entry there is no run.
    """
    place = config.place()
    if resume.exists(place):
        raise ConfigError(
            f"{place.url} holds a run already, so nothing can be imported into it; name a new one (--set run=NAME)"
        )
    fitted = _fit(config, where)
    if fitted.problems:
        more = len(fitted.problems) - PROBLEMS_MAX
        problems = [f"{where}: {problem}" for problem in fitted.problems[:PROBLEMS_MAX]]
        raise ConfigError("\n".join([*problems, *([f"{where}: {more} more of this kind"] if more > 0 else [])]))
    for line in fitted.told:
        say(line)
    if step is None:
        made = importing.steps_made(fitted.parts)
        if len(made) > 1:
            raise ConfigError(
                f"{where}: its optimizer states are of steps {sorted(made)}; say with --step where it goes on"
            )
        step = next(iter(made), 0)
    if not 0 <= step <= config.steps:
        raise ConfigError(
            f"step {step} of {where}: wanted 0 to {config.steps}, which is `steps` of the job; see --step"
        )
    prepare_for(config, progress=say)
    store = store_at(place)
    manifest = importing.write(
        store,
        fitted.parts,
        about=resume.about(config, fingerprint_of(config.data, config.model.seq_len)),
        step=step,
        samples=step * config.batch.global_samples,
    )
    resume.save_config(config, store)
    number = CommitLog(store).commit(importing.ATTEMPT, manifest)
    say(f"imported {where} as log entry {number} of run {config.run}: `elastic train` goes on from it at step {step}")


def _fit(config: Config, where: str) -> importing.Fitted:
    store = open_store(where, config.storage_options)
    if "://" not in where and not Path(where).is_dir():
        raise ConfigError(f"{where} is no directory; give the one that holds the .safetensors files or .metadata")
    if _has(store, dcp.METADATA):
        return _fit_dcp(config, store)
    if any(name.endswith(".safetensors") for name in store.list("")):
        return _fit_safetensors(config, store)
    there = ", ".join([*store.list("")][:5]) or "nothing"
    raise ConfigError(f"{where} has neither .safetensors files nor {dcp.METADATA}; it has {there}")


def _has(store: Store, name: str) -> bool:
    try:
        store.get(name, 0, 1)
    except ObjectMissing:
        return False
    return True


def _fit_dcp(config: Config, store: Store) -> importing.Fitted:
    source = dcp.DcpSource(store)
    names = _of_dcp([block.name for block in source.blocks])
    left = [*source.other, *sorted({block.name for block in source.blocks if block.name not in names})]
    source.blocks = tuple(block for block in source.blocks if block.name in names)
    fitted = _fit_own(config, source, names)
    if left:
        fitted.told.append(f"left unread: {', '.join(left[:5])}{', ...' if len(left) > 5 else ''}")
    return fitted


def _of_dcp(names: list[str]) -> dict[str, str]:
    """Our name of each. All may lie one level deeper, as in PyTorch's own examples ("app.model.")."""
    tops = {name.partition(".")[0] for name in names}
    above = f"{next(iter(tops))}." if len(tops) == 1 and tops != {"model"} else ""
    found = {}
    for name in names:
        top, _, rest = name.removeprefix(above).partition(".")
        if top in ("model", "state"):
            found[name] = f"{top}.{rest}"
        elif top in ("optim", "optimizer") and rest.startswith("state."):
            found[name] = f"optimizer.{rest.removeprefix('state.')}"
    return found


def _fit_safetensors(config: Config, store: Store) -> importing.Fitted:
    source = SafetensorsSource(store)
    have = {block.name for block in source.blocks}
    if llama.EMBEDDING not in have:
        return _fit_own(config, source, {})
    if not config.is_built_in:
        raise ConfigError(f"these are a Llama's weights, task {config.task} is not; load them in its initialise()")
    try:
        described: Mapping[str, Any] = json.loads(store.get("config.json"))
    except (ObjectMissing, ValueError) as error:
        raise ConfigError(f"config.json is missing or no JSON ({error}); without it the heads are not known") from error
    if misfits := llama.misfits(described, config.model):
        return importing.Fitted(problems=[f"config.json: {misfit}" for misfit in misfits])
    # Saved by older versions, and computed here; with tied embeddings transformers does not read the second one.
    left = {name for name in have if name.endswith("rotary_emb.inv_freq")}
    left |= {llama.OUTPUT} & have if config.model.tie_embeddings else set()
    source.blocks = tuple(block for block in source.blocks if block.name not in left)
    names = {theirs: f"model.{ours}" for ours, theirs in llama.names(config.model).items()}
    return importing.fit(source, names, _wanted(config), what_next="import a model of these sizes")


def _fit_own(config: Config, source: Source, names: Mapping[str, str]) -> importing.Fitted:
    """Names as elastic has them. Of a task of one's own the trainers compare them when they start."""
    if config.is_built_in:
        return importing.fit(source, names, _wanted(config), what_next="import a checkpoint of this model")
    ours = [names.get(block.name, block.name) for block in source.blocks]
    if not any(name.startswith("optimizer.") for name in ours):
        raise ConfigError(
            f"it has no optimizer state, which only the built-in model can begin without; export it with --what all, "
            f"or load the weights in initialise() of {config.task}"
        )
    return importing.Fitted(parts=importing.taken(source, names, {}), told=["tensors are taken as they are"])


def _wanted(config: Config) -> dict[str, importing.Kind]:
    dtype = "float64" if config.precision == "float64" else "float32"
    return importing.adamw_state({name: (dtype, shape) for name, shape in llama.shapes(config.model).items()})
