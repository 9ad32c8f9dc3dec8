"""YAML text and `--set key=value` -> nested plain values, each key with the place where it was said last.

Knows no schema. Nothing is raised: what can't be understood is a sentence in `problems`, so that all of them are told.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

Key = tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class Text:
    """`origins`: "FILE:LINE" or "--set KEY=VALUE" for each key that was written, sections too."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Key, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def origin(self, key: Key) -> str:
        """Where `key` was said, else the section that it stands in, else the file."""
        while key and key not in self.origins:
            key = key[:-1]
        return self.origins.get(key, self.name)


def read(text: str, name: str) -> Text:
    """One YAML document that holds a mapping. An empty one is an empty mapping."""
    found = Text(name=name)
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return found
        _locate(node, (), found, set())
        values = loader.construct_document(node)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: what looks like a date and is none
        found.problems.append(_not_yaml(name, error))
        return found
    finally:
        loader.dispose()
    if isinstance(values, dict):
        found.values = values
    else:
        found.problems.append(f"{name} holds {_kind(values)}, wanted keys with values, such as steps: 100")
    return found


def override(text: Text, argument: str) -> None:
    """Apply one `--set` argument, KEY=VALUE with a YAML value, over what was said before."""
    origin = f"--set {argument}"
    try:
        key, value = setting(argument)
    except ValueError as error:
        text.problems.append(f"--set {error}")
        return
    *parents, leaf = path = tuple(key.split("."))
    section = text.values
    for depth, parent in enumerate(parents, 1):
        section = section.setdefault(parent, {})
        text.origins.setdefault(path[:depth], origin)
        if not isinstance(section, dict):
            text.problems.append(f"{origin}: {'.'.join(path[:depth])} is {_kind(section)}, not a section")
            return
    section[leaf] = value
    text.origins[path] = origin


def setting(argument: str) -> tuple[str, Any]:
    """(key, value) of KEY=VALUE, where the value is YAML. ValueError: it is not that, in a sentence."""
    key, equals, value = argument.partition("=")
    if not equals or not all(key.split(".")):
        raise ValueError(f"{argument!r}: wanted KEY=VALUE, for example steps=100")
    try:
        return key, yaml.safe_load(value)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{argument!r}: {value!r} is no YAML value; quote it, such as '{key}=\"...\"'") from error


def _locate(node: yaml.Node, key: Key, found: Text, seen: set[int]) -> None:
    """Line of each key; keys that are given twice. An alias is followed once, so that a knot of them ends."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            found.origins[(*key, str(index))] = _place(found.name, item)
            _locate(item, (*key, str(index)), found, seen)
    if isinstance(node, yaml.MappingNode):
        here: dict[str, str] = {}
        for name_node, value in node.value:
            name, place = str(name_node.value), _place(found.name, name_node)
            if name in here:
                path = ".".join((*key, name))
                found.problems.append(f"{place}: {path} is given twice, first at {here[name]}; delete one of them")
            here[name] = found.origins[(*key, name)] = place
            _locate(value, (*key, name), found, seen)


def _place(name: str, node: yaml.Node) -> str:
    return f"{name}:{node.start_mark.line + 1}"


def _not_yaml(name: str, error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"{name}:{mark.line + 1}" if mark else name
    return f"{place} is not YAML: {getattr(error, 'problem', None) or error}"


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else f"the single value {value!r}"
