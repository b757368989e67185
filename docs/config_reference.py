"""Writes docs/config.md, every key of a recipe, from the schema that `jaxllm schema` prints.

python docs/config_reference.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.config import json_schema
from jaxllm.untrusted import INT32, INT64

PAGE = Path(__file__).with_name("config.md")
NAMED = "that of `name`"
"""Default of a model size: the schema does not require it, because a published shape has it."""
HEAD = """# Every key of a recipe

A recipe is a YAML file with the sections below. `section.key=value` on the command line overrides a key; `--section.key=value`,
`--section.key value` and hydra's `+section.key=value` are the same. A key of another trainer is refused with the key here.
`python docs/config_reference.py` writes this page from the docstrings of the keys.

## Where it lives

`jaxllm/config/sections.py`, `jaxllm/config/model_config.py` and `jaxllm/config/run_sections.py`: each key with its type, its
default and a docstring. `jaxllm/config/foreign_keys.yaml`: the keys of other trainers.

## How it is tested

`tests/test_project_files.py` holds this page to the schema. `tests/config/test_config.py` tests what is refused, and
`tests/config/test_config_keys.py` that each key is read.
"""


def page() -> str:
    schema = json_schema()
    tables, seen, sections = [], set(), list(schema["properties"].items())
    # The list grows: a section inside a section follows at the end.
    for title, section in sections:
        definition = schema["$defs"][_reference(section)]
        tables.append(_table(title, definition))
        for key, value in definition["properties"].items():
            inner = _reference(value)
            if inner and inner not in seen:
                seen.add(inner)
                sections.append((f"{title}.{key}", value))
    return "\n".join([HEAD, *tables])


def _table(title: str, definition: Mapping[str, Any]) -> str:
    rows = []
    required = definition.get("required", ())
    for key, value in definition["properties"].items():
        default = f"`{json.dumps(value['default'])}`" if "default" in value else "required" if key in required else NAMED
        cells = (f"`{key}`", _values(value), default, " ".join(value.get("description", "").split()))
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    lead = f"{definition['description']}\n\n" if "description" in definition else ""
    return f"## `{title}`\n\n{lead}| key | values | default | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _reference(value: Mapping[str, Any]) -> str | None:
    """The definition that a value, an alternative of it or an item of it refers to."""
    if "$ref" in value:
        return value["$ref"].rpartition("/")[2]
    parts = [*value.get("anyOf", ()), *([value["items"]] if "items" in value else [])]
    return next(filter(None, map(_reference, parts)), None)


def _values(value: Mapping[str, Any]) -> str:
    """The type of a value in words."""
    if "anyOf" in value:
        return " or ".join(map(_values, value["anyOf"]))
    if "$ref" in value:
        return "keys below"
    if "enum" in value or "const" in value:
        return ", ".join(f"`{json.dumps(word).strip(chr(34))}`" for word in value.get("enum", [value.get("const")]))
    if "prefixItems" in value:
        return f"[{', '.join(map(_values, value['prefixItems']))}]"
    if value["type"] == "array":
        return f"list of {_values(value['items'])}"
    if value["type"] == "object":
        return f"name: {_values(value['additionalProperties'])}"
    if value["type"] == "null":
        return "`null`"
    # That a counter ends where int32 or int64 does, or a wait after 30 years, is no news to a reader.
    told = [(sign, value[limit]) for limit, sign in _LIMITS.items() if value.get(limit, INT64) not in (INT32, INT64, 1e9, 1e15)]
    # Some versions of Pydantic write 0 as 0.0.
    return " ".join([value["type"], *(f"{sign} {int(most) if most == int(most) else most}" for sign, most in told)])


_LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
