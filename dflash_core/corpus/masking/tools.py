"""Tool calls and tool schemas, however a chat file spells them, as OpenAI's."""

import json
from collections.abc import Mapping
from typing import Any

from dflash_core.corpus.preparing.keys import first_of, kind_of, maybe_json
from dflash_core.errors import DataError

__all__ = ["is_call", "to_calls", "to_tools"]

ARGUMENTS = ("arguments", "parameters")


def is_call(value: Any) -> bool:
    """Say whether a value names a function and gives it arguments, as a row's answer may."""
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict):
        return False
    return isinstance(function.get("name"), str) and first_of(function, ARGUMENTS) is not None


def to_calls(value: Any) -> list[dict[str, Any]]:
    """Return one call, or a list of them, each as it is or in JSON.

    Raises:
        DataError: One of them names no function.
    """
    given = maybe_json(value)
    if not given:
        return []
    if not isinstance(given, str | dict | list | tuple):
        raise DataError(f"has tool calls of type {kind_of(given)}, not a list")
    return [_call(call) for call in ([given] if isinstance(given, str | dict) else given)]


def _call(value: Any) -> dict[str, Any]:
    """Return a call as OpenAI's object, its arguments as an object wherever they are one."""
    call = maybe_json(value)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError("has a tool call without a function name")
    given = first_of(function, ARGUMENTS)
    parsed = {} if given is None else maybe_json(given)
    arguments = parsed if isinstance(parsed, dict) else given
    json.dumps(arguments)  # Parquet holds dates and bytes, which no template takes
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def to_tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Return the schemas of a row's tools.

    Raises:
        DataError: They are no list of objects, or one of them has no name.
    """
    given = maybe_json(value)
    if not given:
        return ()
    if not isinstance(given, list):
        raise DataError("has tools that are not a list of objects")
    json.dumps(given)
    return tuple(_schema(maybe_json(tool)) for tool in given)


def _schema(tool: Any) -> Mapping[str, Any]:
    if not isinstance(tool, dict):
        raise DataError("has tools that are not a list of objects")
    tool = tool if "function" in tool else {"type": "function", "function": tool}
    function = tool["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError("has a tool without a function name")
    return tool
