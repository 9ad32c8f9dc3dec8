"""`elastic`: the one entry. Reads arguments and environment, prints, turns errors into exit codes.

Each command imports its room when it runs, so that what needs neither torch nor Ray starts at once.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic import cli_ckpt, cli_data, cli_interchange
from elastic.config import Config, ConfigError, ElasticError, TaskError, json_schema, load, resolve
from elastic.config_text import Text, setting

EXIT_DONE, EXIT_FAILED, EXIT_CONFIG, EXIT_RESOURCES, EXIT_USER_CODE, EXIT_BUDGET, EXIT_INTERRUPTED = (
    0,
    1,
    2,
    3,
    4,
    5,
    130,
)
EXIT_OF = {"user code": EXIT_USER_CODE, "not enough hosts": EXIT_RESOURCES, "restart budget spent": EXIT_BUDGET}
LINE_EVERY_S = 5.0
ACCOUNT_S = 2.0  # at a run's end: storage that does not answer is no reason to wait for its account


def main(arguments: Sequence[str] | None = None) -> None:
    parsed = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        sys.exit(parsed.command(parsed))
    except ConfigError as error:
        print("\n".join(f"elastic: {line}" for line in str(error).splitlines()), file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    except TaskError as error:
        print(f"elastic: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_CODE)
    except ElasticError as error:
        print(f"elastic: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="elastic", description="Elastic, fault-tolerant PyTorch training on Ray.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = _add_job(commands, "train", _train, "run a job to its end")
    train.add_argument("--dry-run", action="store_true", help="show the resolved configuration and the plan, and stop")
    train.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|STEP|RUN|URL",
        help="go on from the newest checkpoint (the default), be a new run, go back to a step, begin from another run",
    )
    train.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="this key (or section, or all) may differ from the run's earlier attempts; may be given often",
    )
    chaos = _add_job(commands, "chaos", _chaos, "run a job, break things, compare with the run that nothing broke")
    chaos.add_argument(
        "--fault", action="append", default=[], metavar="KIND@step=N[,rank=R][,seconds=S]", help="may be given often"
    )
    cli_data.add(commands, _set_ray_environment)
    _add_config(commands)
    _add_logs(commands)
    for name, command, text in (
        ("report", _report, "what a run did: recoveries, where time went"),
        ("verify-data", _verify_data, "prove that each sample was used exactly once"),
    ):
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument(
            "run", metavar="RUN", help="the run's directory, such as runs/quickstart, or its storage's URL"
        )
        sub.set_defaults(command=command)
    sub.add_argument("--against", metavar="RUN", help="prove too that both used the same samples in the same steps")
    cli_ckpt.add(commands, further=[cli_interchange.add_parsers])
    _add_orders(commands)
    return parser


def _add_orders(commands: Any) -> None:
    """Commands on a live run."""
    status = _add_order(commands, "status", "what a live run does now")
    status.add_argument("--json", action="store_true", help="all of it, for programs")
    status.set_defaults(command=_status)
    for kind, text in (
        ("pause", "hold at the next step, with a checkpoint; hosts stay"),
        ("resume", "go on after a pause"),
        ("checkpoint", "make the next safe step durable now"),
        ("stop", "end the run at the next step, with a checkpoint"),
    ):
        _add_order(commands, kind, text)
    resize = _add_order(
        commands, "resize", "train on fewer or more nodes from the next step on; without a size: as configured"
    )
    resize.add_argument("--nodes", type=int, help="at most so many nodes")
    resize.add_argument("--hosts", type=int, help="at most so many hosts (device slots)")
    for kind, text in (
        ("drain", "take a node out at the next step, so that it can be switched off; no step is lost"),
        ("quarantine", "keep a suspect node out from the next step on"),
        ("release", "let a node that is out take part again"),
    ):
        _add_order(commands, kind, text).add_argument("node", metavar="NODE", help="as status shows it, or its address")
    change = _add_order(commands, "set", "change a setting of the live run")
    change.add_argument("setting", metavar="KEY=VALUE")


def _add_order(commands: Any, kind: str, text: str) -> argparse.ArgumentParser:
    sub: argparse.ArgumentParser = commands.add_parser(kind, help=text, description=text)
    sub.add_argument("run", metavar="RUN", help="the run's directory, name or URL")
    sub.add_argument("--address", help="its Ray cluster; without it, the one its directory names")
    if kind != "status":
        sub.add_argument("--why", default="by hand", help="the reason, for the journal")
    sub.set_defaults(command=_order, kind=kind)
    return sub


def _add_config(commands: Any) -> None:
    text = "show, check or describe a configuration"
    inner = commands.add_parser("config", help=text, description=text).add_subparsers(required=True, metavar="WHAT")
    show = _add_job(inner, "show", _config_show, "the resolved configuration of a job")
    show.add_argument("--origin", action="store_true", help="say where each value comes from")
    _add_job(inner, "check", _config_check, "all that can be checked before a job starts")
    schema = inner.add_parser("schema", help="the JSON schema of job files", description="the JSON schema of job files")
    schema.set_defaults(command=_config_schema)


def _add_logs(commands: Any) -> None:
    text = "what trainers printed, several ranks as one; after a failure its last lines first"
    sub = commands.add_parser("logs", help=text, description=text)
    sub.add_argument("run", metavar="RUN", help="the run's directory, such as runs/quickstart, or its storage's URL")
    sub.add_argument("--generation", type=int, help="default: the newest")
    sub.add_argument("--rank", type=int, help="default: all")
    sub.add_argument("--hosts", action="store_true", help="of the hosts' own processes instead of the trainers")
    sub.add_argument("--follow", action="store_true", help="until the run ends")
    sub.set_defaults(command=_logs)


def _add_job(commands: Any, name: str, command: Any, text: str) -> argparse.ArgumentParser:
    sub: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    sub.add_argument("job", type=Path, metavar="JOB.yaml")
    sub.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE", help="over the file")
    sub.set_defaults(command=command)
    if name in ("train", "check"):
        sub.add_argument("--address", help="a running Ray cluster; without it, local Ray nodes are started")
    return sub


# ---------------------------------------------------------------- commands


def _train(parsed: argparse.Namespace) -> int:
    from elastic import preflight, resume
    from elastic.checkpoint.probe import check_storage
    from elastic.report import finished, summary_lines

    config, text = _checked(parsed)
    asked = resume.Resume(point=parsed.resume, allowed=tuple(parsed.allow_change))
    if not parsed.dry_run:
        check_storage(config.place(), _say)
    if asked.point == "auto" and finished(config):
        print(f"run {config.run} finished before; its account (for a new run: --set run=NAME, or remove its directory)")
        _print_lines(summary_lines(config.place()))
        return EXIT_DONE
    start = resume.choose(config, asked)
    first = preflight.start_line(config, start)
    if parsed.dry_run:
        _print_lines([*preflight.config_lines(config), "", *preflight.plan_lines(config), f"not started: {first}"])
        return EXIT_DONE
    config = _tried(config, text, parsed)
    asked = resume.settle(config, asked, start)
    _set_ray_environment()
    from elastic.cluster import session

    began_s, seen = time.monotonic(), [Progress(config)]
    ended = session.run(config, address=parsed.address, observers=seen, say=_say, first=first, resume=asked)
    _print_lines(summary_lines(config.place().within(ACCOUNT_S)))
    print(f"took        {time.monotonic() - began_s:.0f} s in all")
    return _exit_code(config, ended)


def _checked(parsed: argparse.Namespace) -> tuple[Config, Text]:
    """The job's configuration, its task found, held against this machine too where its nodes will be here."""
    from elastic.worker.task import located

    config, text = resolve(parsed.job, tuple(parsed.overrides))
    return _fits(located(config), text, parsed), text


def _tried(config: Config, text: Text, parsed: argparse.Namespace) -> Config:
    """`config`, with the sizes of a task of one's own, which take a trial of it."""
    from elastic.worker.task_check import check

    return config if config.is_built_in else _fits(check(config), text, parsed)


def _fits(config: Config, text: Text, parsed: argparse.Namespace) -> Config:
    from elastic import preflight
    from elastic.cluster import memory

    if parsed.address is None:
        preflight.check_machine(config, text, memory_bytes=memory.total_bytes())
    return config


def _config_show(parsed: argparse.Namespace) -> int:
    from elastic import preflight

    config, text = resolve(parsed.job, tuple(parsed.overrides))
    print("\n".join(preflight.config_lines(config, text if parsed.origin else None)))
    return EXIT_DONE


def _config_schema(parsed: argparse.Namespace) -> int:
    print(json.dumps(json_schema(), indent=2))
    return EXIT_DONE


def _config_check(parsed: argparse.Namespace) -> int:
    from elastic import preflight, resume
    from elastic.checkpoint.probe import try_storage
    from elastic.data.prepare import check_input
    from elastic.report import finished

    config, text = _checked(parsed)
    check_input(config)
    try_storage(config.place(), _say)
    _tried(config, text, parsed)
    start = None if finished(config) else resume.choose(config, resume.Resume())
    told = preflight.start_line(config, start) if start else f"run {config.run} has finished"
    print(f"OK: {preflight.summary(config)}; {told}")
    return EXIT_DONE


def _chaos(parsed: argparse.Namespace) -> int:
    from elastic.chaos import faults
    from elastic.worker.task_check import check

    config = load(parsed.job, tuple(parsed.overrides))
    config = config.model_copy(update={"run": f"{config.run}-chaos"})
    chosen = [faults.parse(text) for text in parsed.fault]
    faults.check(chosen, config.steps)
    config = check(config)
    _set_ray_environment()
    shutil.rmtree(config.run_dir(), ignore_errors=True)
    from elastic.cluster import trial

    return EXIT_DONE if trial.run(config, chosen, progress=Progress(config), say=_say) else EXIT_FAILED


def _report(parsed: argparse.Namespace) -> int:
    from elastic.report import place_of, summary_lines

    _print_lines(summary_lines(place_of(parsed.run)))
    return EXIT_DONE


def _verify_data(parsed: argparse.Namespace) -> int:
    from elastic.proof import verify_data, verify_same
    from elastic.report import place_of

    _print_lines(verify_data(place_of(parsed.run)))
    if parsed.against:
        _print_lines(verify_same(place_of(parsed.run), place_of(parsed.against)))
    return EXIT_DONE


def _status(parsed: argparse.Namespace) -> int:
    _set_ray_environment()
    from elastic.cluster import control

    status = control.status(parsed.run, parsed.address)
    print(json.dumps(status, indent=1) if parsed.json else "\n".join(control.status_lines(status)))
    return EXIT_DONE


def _order(parsed: argparse.Namespace) -> int:
    given = {name: getattr(parsed, name) for name in ("node", "nodes", "hosts") if hasattr(parsed, name)}
    if parsed.kind == "set":
        given["key"], given["value"] = _setting(parsed.setting)
    _set_ray_environment()
    from elastic.cluster import control

    print(control.order(parsed.run, parsed.address, parsed.kind, parsed.why, given))
    return EXIT_DONE


def _setting(argument: str) -> tuple[str, Any]:
    try:
        return setting(argument)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _logs(parsed: argparse.Namespace) -> int:
    from elastic.cluster.run_logs import host_lines, trainer_lines
    from elastic.report import place_of

    which = {"generation": parsed.generation, "rank": parsed.rank, "follow": parsed.follow}
    place = place_of(parsed.run)
    for line in host_lines(place) if parsed.hosts else trainer_lines(place, **which):
        _say(line)
    return EXIT_DONE


def _exit_code(config: Config, ended: Any) -> int:
    from elastic.report import failure_of, finished

    failure, detail = failure_of(config.place().within(ACCOUNT_S))
    if ended.error is None:
        return EXIT_INTERRUPTED if ended.interrupted and not finished(config) else EXIT_DONE
    print(f"elastic: the run failed, {failure or type(ended.error).__name__}: {detail or ended.error}", file=sys.stderr)
    return EXIT_OF.get(failure, EXIT_FAILED)


def _set_ray_environment() -> None:
    """Ray reads these when it is imported, so they are set here, above everything else."""
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A call after the end of a run must fail, not join whatever cluster is found on this machine.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")


# ---------------------------------------------------------------- what a person sees


class Progress:
    """One line that is redrawn on a terminal; plain lines, now and then, elsewhere. Fed with journal entries."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._terminal = sys.stdout.isatty()
        self._shown_s = 0.0
        self._world = 0
        self._recent: list[dict[str, Any]] = []

    def __call__(self, entries: list[dict[str, Any]], nodes: object) -> None:
        for entry in entries:
            for action in entry["actions"]:
                if action["kind"] == "StartGeneration":
                    self._world = len(action["hosts"])
            if entry["event"]["kind"] == "StepCompleted":
                self._recent = [*self._recent[-19:], {**entry["event"]["record"], "t": entry["t"]}]
            elif entry["reason"]:
                self._tell(f"{entry['event']['kind']}: {entry['reason']}")
        last = bool(self._recent) and self._recent[-1]["step"] == self._config.steps
        every_s = 0.2 if self._terminal else LINE_EVERY_S
        stepped = any(entry["event"]["kind"] == "StepCompleted" for entry in entries)
        if stepped and (last or time.monotonic() - self._shown_s >= every_s):
            self._shown_s = time.monotonic()
            print(
                f"\r\033[K{self._line()}" if self._terminal else self._line(),
                end="" if self._terminal else "\n",
                flush=True,
            )

    def _tell(self, text: str) -> None:
        print(f"\r\033[K{text}" if self._terminal else text, flush=True)

    def _line(self) -> str:
        newest, oldest = self._recent[-1], self._recent[0]
        passed_s = newest["t"] - oldest["t"]
        each_s = passed_s / max(1, newest["step"] - oldest["step"]) if newest["step"] > oldest["step"] else 0.0
        rate = newest["tokens"] / each_s if each_s else 0.0
        left_s = round(each_s * (self._config.steps - newest["step"]))
        return (
            f"step {newest['step']}/{self._config.steps}  loss {newest['loss']:.4f}  {rate:,.0f} tokens/s  "
            f"world {self._world}  generation {newest['generation']}  ETA {left_s // 60}:{left_s % 60:02d}"
        )


def _say(text: str) -> None:
    print(text, flush=True)


def _print_lines(lines: list[str]) -> None:
    print("\n" + "\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
