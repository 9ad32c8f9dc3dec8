"""What is wrong with a configuration, in one sentence each: where, key, value, what is allowed, a suggestion.

Made from pydantic's errors, the JSON schema (what is allowed) and the text (where it was said).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Any

from elastic.config_text import Key, Text

Schema = dict[str, Any]


def field_of(schema: Schema, key: Key) -> Schema | None:
    """The part of a JSON schema for `key`, a section's as well; None: there is no such key."""
    at: Schema | None = schema
    for part in key:
        assert at is not None
        at = at.get("items") if part.isdecimal() and "items" in at else at.get("properties", {}).get(part)
        if at is None:
            return None
        if "$ref" in at:
            at = {**schema["$defs"][at["$ref"].rpartition("/")[2]], **at}
    return at


def keys(schema: Schema, section: Key = ()) -> Iterator[Key]:
    """Every key that holds a value, by section."""
    for name in (field_of(schema, section) or {}).get("properties", {}):
        key = (*section, name)
        yield from list(keys(schema, key)) or [key]


def sentences(schema: Schema, text: Text, item: Any) -> Iterator[str]:
    """One for each problem in one of pydantic's errors: where, key, value, what is allowed, a suggestion."""
    key = tuple(str(part) for part in item["loc"])
    name = ".".join(key) or "the file"
    if item["type"] == "value_error":
        for line in item["msg"].removeprefix("Value error, ").splitlines():
            about = (*key, *line.split()[0].split("."))
            yield f"{text.origin(about)}: {'.'.join((*key, line))}"
    elif item["type"] == "extra_forbidden":
        yield f"{text.origin(key)}: unknown key {name}{_meant(schema, key)}"
    elif item["type"] == "missing":
        yield f"{text.origin(key)}: {name} is missing, wanted {_wanted(field_of(schema, key) or {})}"
    else:
        field = field_of(schema, key) or {}
        yield f"{text.origin(key)}: {name} is {_shown(item['input'])}, wanted {_wanted(field)}{_hint(field, item)}"


_KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "array": "a list",
    "null": "null",
}
_LIMITS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
    "pattern": "that matches",
}


def _wanted(field: Schema) -> str:
    if "properties" in field:
        return f"a section with keys such as {next(iter(field['properties']))}: ..."
    if "enum" in field:
        return " or ".join(map(str, field["enum"]))
    if "anyOf" in field:
        return " or ".join(_wanted(part) for part in field["anyOf"])
    limits = [f"{word} {field[limit]}" for limit, word in _LIMITS.items() if limit in field]
    return ", ".join([_KINDS.get(field.get("type", ""), "another value"), *limits])


def _hint(field: Schema, item: Any) -> str:
    given, default = item["input"], field.get("default")
    if "enum" in field and (close := difflib.get_close_matches(str(given), map(str, field["enum"]), n=1)):
        return f"; did you mean {close[0]}?"
    if field.get("type") == "string" and not isinstance(given, str):
        return f'; quote it: "{given}"'
    return f"; the default is {_shown(default)}" if isinstance(default, int | float | str) else ""


def _meant(schema: Schema, key: Key) -> str:
    """A key of this section that is spelled alike, else one of that name elsewhere, else what is allowed here."""
    *section, leaf = key
    here = list((field_of(schema, tuple(section)) or {}).get("properties", {}))
    if close := difflib.get_close_matches(leaf, here, n=1):
        return f"; did you mean {'.'.join((*section, close[0]))}?"
    elsewhere = {known[-1]: ".".join(known) for known in keys(schema)}
    if close := difflib.get_close_matches(leaf, elsewhere, n=1, cutoff=0.8):
        return f"; did you mean {elsewhere[close[0]]}?"
    return f"; allowed here: {', '.join(sorted(here))}"


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
