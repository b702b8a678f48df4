"""Writes a configuration as TOML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ._errors import ConfigError


def dumps(config: Mapping[str, Any]) -> str:
    """A table as TOML: text, numbers, booleans, and lists and tables of them."""
    plain, nested = [], []
    for key, value in config.items():
        is_table = isinstance(value, Mapping)
        is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
        if is_list and value and all(isinstance(entry, Mapping) for entry in value):
            nested += [f"[[{_key(key)}]]\n{_body(entry, key)}" for entry in value]
        elif is_table:
            nested.append(f"[{_key(key)}]\n{_body(value, key)}")
        else:
            plain.append(f"{_key(key)} = {_value(value)}\n")
    return "".join(plain + nested)


def _body(table: Mapping[str, Any], path: str) -> str:
    """The lines of a table: tables in it are written inline, lists of tables as tables of their own."""
    lines, nested = [], []
    for key, value in table.items():
        if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
            nested += [f"[[{_key(path)}.{_key(key)}]]\n{_body(entry, f'{path}.{key}')}" for entry in value]
        else:
            lines.append(f"{_key(key)} = {_value(value)}\n")
    return "".join(lines + nested)


def _text(text: str) -> str:
    import json

    # JSON's escapes are TOML's, but for the delete character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    bare = key.replace("_", "a").replace("-", "a")
    return key if bare.isascii() and bare.isalnum() else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(entry)}" for key, entry in value.items()) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_value(entry) for entry in value) + "]"
    raise ConfigError(f"a configuration cannot contain {value!r}: use text, numbers, booleans, lists and tables")
