"""Which code a run trains: a task's name, from text or from an object, and its import by that name.

Trainers import a task as multiprocessing's spawn does; nothing of it is ever pickled. No torch here: the driver's
process names tasks too.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from elastic.config import Config, ConfigError, TaskError

_WANTED = "wanted module:Name or file.py:Name"

# What `load` is importing at this moment: such a module must not start a run.
importing: list[str] = []


def name_of(task: object) -> str:
    """`task`, a class or a function, as trainers will import it: "module:Name", or "/a/script.py:Name" for what the
    running script defines. Text stays as it is.

    ConfigError: it can't be imported by name: an instance, a lambda, something local, a notebook's cell.
    """
    if isinstance(task, str):
        return task
    if not inspect.isclass(task) and not inspect.isfunction(task):
        raise ConfigError(
            f"task {task!r:.80} is {type(task).__name__}: wanted a class or a function, or its name, since each "
            "trainer imports it and makes its own instance"
        )
    module, name = task.__module__, task.__qualname__
    if "<" in name:
        raise ConfigError(
            f"task {name} of {module} is a lambda or defined inside a function, where trainers can't import it; "
            "define it at the top level of a module"
        )
    found: object = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not task:
        raise ConfigError(
            f"task {name}: {module} has another object of that name, which is what trainers would import; "
            'give the name of the one to train, as "module:Name"'
        )
    return f"{_place_of_main(name) if module == '__main__' else module}:{name}"


def _place_of_main(name: str) -> str:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # python -m package.module
        return str(spec.name)
    file = getattr(main, "__file__", None)
    if file is None or not os.path.isfile(file):
        raise ConfigError(
            f"task {name} is defined in a notebook or at a prompt, where trainers can't import it; "
            f'write it to a file and give "file.py:{name}"'
        )
    return os.path.abspath(file)


def located(config: Config) -> Config:
    """`config`, with a task of your own and its search path absolute: they mean the same in every process.

    The search path is what this process has beyond the interpreter's own, the working directory included.
    ConfigError: not a task's name, or no such file.
    """
    place, _, name = config.task.rpartition(":")
    if not place or not name:
        raise ConfigError(f"task {config.task!r}: {_WANTED}")
    if config.is_built_in:
        return config
    path = [os.path.abspath(directory) for directory in (*config.task_path, "", *_beyond_the_interpreter())]
    if place.endswith(".py"):
        file = Path(os.path.abspath(place))
        if not file.is_file():
            near = difflib.get_close_matches(file.name, [f.name for f in file.parent.glob("*.py")], n=1)
            hint = f"did you mean {near[0]}?" if near else "a relative path starts at the working directory"
            raise ConfigError(f"task {config.task!r}: there is no file {file}; {hint}")
        place = str(file)
        path.insert(0, str(file.parent))
    return config.model_copy(update={"task": f"{place}:{name}", "task_path": tuple(dict.fromkeys(path))})


def _beyond_the_interpreter() -> list[str]:
    own = tuple({os.path.abspath(prefix) for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)})
    return [d for d in sys.path if os.path.isdir(d) and not os.path.abspath(d).startswith(own)]


def extend_path(config: Config) -> None:
    """Let this process find the task's modules; before all others, as Python does for a script's directory."""
    sys.path[:0] = [directory for directory in config.task_path if directory not in sys.path]


def load(task: str) -> Any:
    """What `task`, located, names. ConfigError: no such module, or nothing of that name in it; TaskError: its
    import raised."""
    place, _, name = task.rpartition(":")
    importing.append(task)
    try:
        module = _module_of(place) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{place}.".startswith(f"{error.name}."):
            raise ConfigError(f"task {task!r}: no module {error.name} in {', '.join(sys.path[:5])} ...") from error
        raise TaskError(f"task {task!r}: importing it raised {story(error)}") from error
    finally:
        importing.pop()
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"task {task!r}: {place} has no {name}{_hint(name, module)}")
        found = getattr(found, part)
    return found


def story(error: BaseException) -> str:
    """`error` in one line, with the line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _hint(name: str, module: ModuleType) -> str:
    defined = [n for n, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    near = difflib.get_close_matches(name, defined, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; it defines {', '.join(defined[:8])}" if defined else "; it defines nothing"


def _module_of(file: str) -> ModuleType:
    """The module in `file`: under its own name where the search path leads there, so that a second import of it is
    the same module; never as "__main__"."""
    stem = Path(file).stem
    spec = None if stem.startswith("__") else importlib.util.find_spec(stem)
    found = spec.origin if spec is not None else None
    if found is not None and os.path.exists(found) and os.path.samefile(found, file):
        return importlib.import_module(stem)
    name = f"elastic_task_{stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None, file
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
