"""Messages for an invalid config: one sentence that names the key and says what to change."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from jaxllm.untrusted import shown


class ConfigError(ValueError):
    """A config that cannot run. The message is one sentence that says what to change; more arguments are lines below it."""

    exit_code = 2
    """Exit code of the command (exit_codes.py). A subclass or an error has another if a restart may help without a change."""

    def with_code(self, exit_code: int) -> Self:
        """This error, which now ends the command with another code."""
        self.exit_code = exit_code
        return self

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


def refuse(sentence: str) -> PydanticCustomError:
    """An error for validators. Pydantic passes its sentence through unchanged."""
    return PydanticCustomError("jaxllm", "{sentence}", {"sentence": sentence})


def line_of(error: BaseException) -> str:
    """The error's message on one line without its full stop, for use inside a sentence."""
    return " ".join(str(error).split()).rstrip(".")


def nearest(given: object, known: Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """The end of a sentence that refuses a name: the known one that is most like it, else `otherwise`."""
    found = difflib.get_close_matches(str(given), list(known), n=1, cutoff=cutoff)
    return f"did you mean {found[0]}?" if found else otherwise


def one_sentence(error: ValidationError, root: type[BaseModel]) -> str:
    """The first error of a config of class `root`, an unknown key before all others, in words that a user can act on."""
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    # For a union, pydantic appends the tag of the tried member to the key; those tags never equal a key of ours.
    where = [part for part in first["loc"] if isinstance(part, int) or not re.search(r"[\[-]|^(int|float|bool)$", part)]
    kind, given = first["type"], first.get("input")
    if kind == "extra_forbidden" and where[-1:] != [first["loc"][-1]]:
        # An unknown key may look like a tag.
        where.append(first["loc"][-1])
    path = _path(where)
    if kind == "jaxllm":
        return first["msg"]
    if kind == "extra_forbidden":
        from jaxllm.config.key_hints import meant

        siblings = {key: _path([*where[:-1], key]) for key in _section_class(root, where[:-1]).model_fields}
        # Below an unknown section its first key says more.
        while (is_elsewhere := where[0] not in root.model_fields) and isinstance(given, Mapping) and given:
            key, given = next(iter(given.items()))
            where.append(str(key))
        all_keys = f"the {'sections' if is_elsewhere else 'keys there'} are {', '.join(siblings)}."
        return f"Unknown key {_path(where)}: {meant(root, [p for p in where if isinstance(p, str)], siblings) or all_keys}"
    if kind == "missing":
        if len(where) == 1:
            return f"The section {path} is missing: add it to the config."
        hint = " (or model.name for a published shape)" if where[0] == "model" and len(where) == 2 else ""
        # Command line overrides cannot reach an element of a list.
        override = "" if any(isinstance(part, int) for part in where) else f" or with {path}=VALUE"
        return f"{path} is missing: set it in the config{override}{hint}."
    if kind == "literal_error":
        choices = str(first.get("ctx", {}).get("expected")).replace("'", "")
        # With the choice between types, of which a tag in the key tells, there are others.
        choices = choices.replace(" or ", ", ") if len(where) == len(first["loc"]) else choices
        return f"{path}={shown(given)} is not one of the choices: use {choices}."
    if path == "parallel.data":
        return f"{path}={shown(given)} is not valid: it should be a whole number of at least 1, or auto."
    return f"{path}={shown(given)} is not valid: {_expectation(first)}."


def _expectation(error: Mapping[str, Any]) -> str:
    """Describes a valid value, in pydantic's words unless they are about Python classes."""
    kind, given = error["type"], error.get("input")
    if kind == "int_type" and isinstance(given, float) and given.is_integer():
        # YAML reads 1e9 as a float.
        return f"it should be a valid integer, written {int(given)}"
    if kind == "string_type" and isinstance(given, int | float):
        return "it should be a valid string, so put it in quotes (and those in quotes for a shell)"
    plain = {"bool_type": "be true or false", "tuple_type": "be a list", "float_parsing": "be a valid number"}
    plain |= {"int_parsing_size": "be smaller", "model_type": "have keys below it", "dict_type": "have keys below it"}
    if kind in plain:
        return f"it should {plain[kind]}"
    return re.sub(r"^\w+ should", "it should", error["msg"]).replace(" after validation", "")


def _path(where: Sequence[str | int]) -> str:
    """Joins (data, mixture, 0, name) into data.mixture[0].name."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).removeprefix(".")


def _section_class(root: type[BaseModel], where: Sequence[str | int]) -> type[BaseModel]:
    node = root
    for key in where:
        # An element of a list has the class that the annotation of the list's key names.
        if not isinstance(key, int):
            node = next(_classes(node.model_fields[key].annotation))
    return node


def _classes(annotation: Any) -> Iterator[type[BaseModel]]:
    """The section classes in a type: the type itself, members of a union, elements of a tuple."""
    if isinstance(annotation, type) and not get_args(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _classes(inner)
