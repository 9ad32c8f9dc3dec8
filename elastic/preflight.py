"""What is checked and shown before anything starts: the resolved configuration, the plan, what this machine can't hold.

Needs neither torch nor Ray. Gives lines; the command line prints them.
"""

from __future__ import annotations

import yaml

from elastic.config import Config, ConfigError
from elastic.config_text import Key, Text
from elastic.model.shape import parameters
from elastic.planner.memory import arenas_bytes, host_bytes, shard_bytes
from elastic.planner.search import choose
from elastic.resume import Start

WORLDS_SHOWN_MAX = 16
MIB, GIB = 1 << 20, 1 << 30


def config_lines(config: Config, text: Text | None = None) -> list[str]:
    """The resolved configuration as YAML; with `text`, each key says where its value comes from."""
    values = config.model_dump(mode="json")
    if text is None:
        return yaml.safe_dump(values, sort_keys=False).splitlines()
    return _lines(values, text, ())


def _lines(values: dict[str, object], text: Text, section: Key) -> list[str]:
    lines = []
    for name, value in values.items():
        key = (*section, name)
        if isinstance(value, dict):
            lines += [f"{'  ' * len(section)}{name}:", *_lines(value, text, key)]
            continue
        said = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
        lines.append(f"{'  ' * len(section)}{name}: {said}".ljust(44) + f"  # {text.origins.get(key, 'default')}")
    return lines


def check_machine(config: Config, text: Text, *, memory_bytes: int) -> None:
    """ConfigError: the Ray nodes that are started on this machine are too few, or their hosts need too much memory.

    Of a task of one's own the need is known where its sizes are: measured by its trial, or given.
    """
    local, problems = config.local, []
    slots = local.nodes * local.hosts_per_node
    if config.hosts_max > slots:
        problems.append(
            f"{text.origin(('hosts_max',))}: hosts_max {config.hosts_max} is above the {slots} hosts of this machine "
            f"(local.nodes {local.nodes} x local.hosts_per_node {local.hosts_per_node}); lower it, raise those, or "
            "give the --address of a cluster"
        )
    is_known = config.is_built_in or config.sizes.shard_bytes is not None
    if is_known and (need := arenas_bytes(config, shard_bytes(config), hosts=slots)) > memory_bytes:
        key = "model" if config.is_built_in else "task"
        problems.append(
            f"{text.origin((key,))}: {key} needs {need / GIB:.1f} GiB for the snapshots of {slots} hosts, with "
            f"shards as large as in a world of hosts_min {config.hosts_min}; this machine has "
            f"{memory_bytes / GIB:.1f}: raise hosts_min, lower local.hosts_per_node, or choose a smaller model"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def plan_lines(config: Config) -> list[str]:
    """For each allowed world: how the batch is cut and, for the built-in model, what a host needs."""
    count, shard = parameters(config.model), shard_bytes(config)
    lines = [f"plan of {summary(config)}, {config.batch.global_samples} samples a step"]
    heads = ["world", "rank's samples", "micro-batches"]
    sizes = ["parameters", "gradients", "optimizer", "arena", "MiB of a host"] if config.is_built_in else []
    lines.append("  ".join([*heads, *sizes]))
    worlds = range(config.hosts_min, config.hosts_max + 1)
    for world in [*worlds[: WORLDS_SHOWN_MAX - 1], *worlds[WORLDS_SHOWN_MAX - 1 :][-1:]]:
        plan = choose(config, world)
        low, high = plan.shares[-1], plan.shares[0]
        cells = [str(world), f"{low} to {high}" if low < high else str(low), str(plan.micro_batches)]
        if sizes:
            need = host_bytes(config, parameters=count, shard_bytes=shard, world=world)
            each = (need.parameters, need.gradients, need.optimizer, need.arena, need.total)
            cells += [f"{nbytes / MIB:,.1f}" for nbytes in each]
        lines.append("  ".join(cell.rjust(len(head)) for cell, head in zip(cells, [*heads, *sizes])))
    return lines


def start_line(config: Config, start: Start) -> str:
    """From what the run goes on, and why from nothing newer."""
    changed = f"; changed and allowed: {', '.join(start.changes)}" if start.changes else ""
    return f"{'resuming' if start.step else 'starting'} run {config.run} {start.origin}{changed}"


def summary(config: Config) -> str:
    """What the job is, in one line."""
    low, high = config.hosts_min, config.hosts_max
    hosts = f"{low} to {high} hosts" if low < high else f"{high} hosts"
    what = f"{parameters(config.model):,} parameters ({config.precision})" if config.is_built_in else config.task
    return f"run {config.run}: {what}, {config.steps} steps on {hosts}"
