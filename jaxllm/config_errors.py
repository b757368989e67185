"""What is wrong with a config, in one sentence that names the key and says what to change."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError


class ConfigError(ValueError):
    """A config that cannot be run. The message is one sentence that says what to change."""

    exit_code = 2
    """Of the command (exits.py). Another where nothing has to change and a new start may go better."""


def refuse(sentence: str) -> PydanticCustomError:
    """An error for validators: pydantic carries the sentence out as it is."""
    return PydanticCustomError("jaxllm", "{sentence}", {"sentence": sentence})


def line_of(error: BaseException) -> str:
    """What an error says, in one line without its full stop: to stand in a sentence."""
    return " ".join(str(error).split()).rstrip(".")


def why_not_yaml(error: Exception) -> str:
    """What yaml.safe_load of a file's text said, in a few words: the line, where it gives one."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    return f"line {mark.line + 1}: {problem}" if problem and mark else line_of(error)


def one_sentence(error: ValidationError, root: type[BaseModel]) -> str:
    """The first thing wrong with a config of class `root`, in words a user can act on."""
    first = error.errors()[0]
    # Unions put the tried member's tag behind the key; those never name a key of ours.
    where = [part for part in first["loc"] if isinstance(part, int) or not re.search(r"[\[-]|^(int|float|bool)$", part)]
    path, kind, given = _path(where), first["type"], first.get("input")
    if kind == "jaxllm":
        return first["msg"]
    if kind == "extra_forbidden":
        keys = list(_section_class(root, where[:-1]).model_fields)
        nearest = difflib.get_close_matches(str(where[-1]), keys, n=1, cutoff=0.5)
        home = next((s for s, f in root.model_fields.items() if where[-1] in getattr(f.annotation, "model_fields", {})), None)
        if nearest:
            hint = f"did you mean {_path([*where[:-1], nearest[0]])}?"
        elif home:
            hint = f"did you mean {home}.{where[-1]}?"
        else:
            hint = f"the keys there are {', '.join(keys)}."
        return f"Unknown key {path}: {hint}"
    if kind == "missing":
        if len(where) == 1:
            return f"The section {path} is missing: add it to the config."
        hint = " (or model.name for a published shape)" if where[0] == "model" and len(where) == 2 else ""
        # Overrides reach no part of a list.
        override = "" if any(isinstance(part, int) for part in where) else f" or with {path}=VALUE"
        return f"{path} is missing: set it in the config{override}{hint}."
    if kind == "literal_error":
        choices = _literal_choices(root, where) or str(first.get("ctx", {}).get("expected")).replace("'", "")
        return f"{path}={_plain(given)} is not one of the choices: use {choices}."
    if path == "parallel.data":
        return f"{path}={_plain(given)} is not valid: it should be a whole number of at least 1, or auto."
    return f"{path}={_plain(given)} is not valid: {_expectation(first)}."


def _expectation(error: Mapping[str, Any]) -> str:
    """What a value should be: pydantic's words, where they are not about Python's classes."""
    kind, given = error["type"], error.get("input")
    if kind == "int_type" and isinstance(given, float) and given.is_integer():
        # YAML reads 1e9 as a fraction.
        return f"it should be a valid integer, written {int(given)}"
    if kind == "string_type" and isinstance(given, int | float):
        return "it should be a valid string, so put it in quotes (and those in quotes for a shell)"
    plain = {"bool_type": "be true or false", "tuple_type": "be a list", "float_parsing": "be a valid number"}
    plain |= {"int_parsing_size": "be smaller", "model_type": "have keys below it", "dict_type": "have keys below it"}
    if kind in plain:
        return f"it should {plain[kind]}"
    return re.sub(r"^\w+ should", "it should", error["msg"]).replace(" after validation", "")


def _path(where: Sequence[str | int]) -> str:
    """data.mixture[0].name of (data, mixture, 0, name)."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).removeprefix(".")


def _section_class(root: type[BaseModel], where: Sequence[str | int]) -> type[BaseModel]:
    node = root
    for key in where:
        # A place in a list has the class that the list's own key says.
        if not isinstance(key, int):
            node = next(_classes(node.model_fields[key].annotation))
    return node


def _classes(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections in a type: itself, a member of a union, or what a tuple holds."""
    if isinstance(annotation, type) and not get_args(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _classes(inner)


def _literal_choices(root: type[BaseModel], where: Sequence[str | int]) -> str | None:
    places = sum(isinstance(part, int) for part in where[-1:])
    *outer, key = where[: len(where) - places]
    annotation = _section_class(root, outer).model_fields[str(key)].annotation
    if places:
        # Of a list, what each part may be.
        annotation = get_args(annotation)[0]
    choices = [str(value) for value in get_args(annotation) if not hasattr(value, "__mro__") and not get_args(value)]
    return ", ".join(choices) or None


def _plain(value: Any) -> str:
    """A value as the user wrote it in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
