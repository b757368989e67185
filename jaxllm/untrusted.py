"""The one door for what comes from outside: JSON, YAML and text, from files, messages and the environment.

Size, depth and expansion are bounded before anything is built; duplicate keys and what YAML 1.1 reads in a surprising way are
refused; `checked` turns the result into the type that says what it may hold. A refusal is a phrase without a full stop, such as
"line 3: the key steps is there twice": the caller knows the file and what to do about it.
"""

import json
import math
import os
import re
import stat
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NoReturn, TypeVar, cast

import yaml
from pydantic import Field, ValidationError
from yaml.nodes import MappingNode, Node, ScalarNode

KIB, MIB, GIB = 2**10, 2**20, 2**30
RECIPE_BYTES, JSON_BYTES = MIB, 64 * MIB
"""Limits of files. A recipe has a few KiB; the largest JSON of a model is its tokenizer's, with up to 33 MiB, or the index of
a trillion parameters, with 20 MiB."""
DEPTH = 64
JSON_VALUES = 4 * MIB
"""Values of a JSON text. An empty list of three bytes takes 80 in memory, so that 64 MiB could become 1.6 GiB."""
YAML_NODES = 50_000
"""Keys and values of a YAML file, with aliases expanded. PyYAML builds about 30,000 per second."""
INT32, INT64 = 2**31 - 1, 2**63 - 1

T = TypeVar("T")
Whole = Annotated[int, Field(strict=True, ge=0, le=INT64)]
"""A whole number that any array can hold."""
LONGEST_TEXT = 4096
"""Characters of a name, a path or a sentence."""
Text = Annotated[str, Field(strict=True, max_length=LONGEST_TEXT)]


class RefusedInput(ValueError):
    """Why a file or a message is not taken: a phrase, for use inside a sentence."""


def read_bytes(path: Path, at_most: int = JSON_BYTES) -> bytes:
    """Reads a regular file; never a device, a pipe or a socket, which may not end.

    Raises:
      OSError: it cannot be read.
      RefusedInput: it is no regular file, or larger than `at_most` bytes.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > at_most:
            raise RefusedInput(_too_large(at_most))
        # Python first allocates what may be read.
        return _bounded(file.read(min(at_most, size) + 1), at_most)


def opened(path: Path) -> BinaryIO:
    """Opens a regular file. Raises as read_bytes does."""
    # Opening a pipe for reading would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RefusedInput("it is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_text(path: Path, at_most: int = JSON_BYTES) -> str:
    """Raises as read_bytes does, and RefusedInput if the file is not UTF-8."""
    return _decoded(read_bytes(path, at_most))


def read_json(path: Path, at_most: int = JSON_BYTES, *, finite: bool = True) -> Any:
    """Raises as read_bytes and parse_json do."""
    return parse_json(read_bytes(path, at_most), at_most, finite=finite)


def read_yaml(path: Path, at_most: int = RECIPE_BYTES) -> Any:
    """Raises as read_bytes and parse_yaml do."""
    return parse_yaml(read_text(path, at_most), at_most)


def read_lines(path: Path, at_most: int = MIB) -> Iterator[bytes]:
    """Yields each line of a file without its end. A line of more than `at_most` bytes is left out, and never held in memory.

    Raises:
      OSError: the file cannot be read.
      RefusedInput: it is no regular file.
    """
    with opened(path) as file:
        while line := file.readline(at_most + 2):
            content = line.removesuffix(b"\n").removesuffix(b"\r")
            if len(content) <= at_most and (line.endswith(b"\n") or len(line) < at_most + 2):
                yield content
            while line and not line.endswith(b"\n"):
                line = file.readline(at_most)


def parse_json(content: bytes | str, at_most: int = JSON_BYTES, *, finite: bool = True, lenient: bool = False) -> Any:
    """Parses a JSON value.

    Args:
      finite: refuse NaN and Infinity. What jaxllm writes may hold them.
      lenient: take these, and duplicate keys (the last wins), as Python does, and any depth that Python reads. For lines of
        data and metrics, of which there are millions.

    Raises:
      RefusedInput: it is not JSON, not UTF-8, too large, too long or too deep, has a key twice or a number that is not finite.
    """
    text = _decoded(_bounded(content, at_most)) if isinstance(content, bytes) else _bounded(content, at_most)
    may_be_long = len(text) > JSON_VALUES and _num_marks(text) > JSON_VALUES
    if may_be_long and _num_marks(_STRING.sub("", text)) > JSON_VALUES:
        raise RefusedInput(f"it has more than {JSON_VALUES:,} values")
    try:
        if lenient:
            return json.loads(text)
        numbers = {"parse_constant": _not_json, "parse_float": _finite} if finite else {}
        value = json.loads(text, object_pairs_hook=_once_each, **numbers)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if "\n" in text else f"column {error.colno}"
        raise RefusedInput(f"not JSON ({error.msg.removesuffix(' at')} at {where})") from None
    except RecursionError:
        raise RefusedInput(_TOO_DEEP) from None
    except RefusedInput:
        raise
    except ValueError:
        # Python converts no whole number of more than 4,300 digits.
        raise RefusedInput(_TOO_MANY_DIGITS) from None
    if any(depth > DEPTH for depth in _depths(value)):
        raise RefusedInput(_TOO_DEEP)
    return value


def parse_yaml(text: str, at_most: int = RECIPE_BYTES) -> Any:
    """Parses one YAML document of maps, lists, texts, numbers, true, false and null.

    What YAML 1.1 alone reads as a number, a switch or a date (1:30 as 90, 010 as 8, yes as true, 2026-01-01) stays text, as in
    YAML 1.2, so that it is refused where a number or a switch belongs, and right where text does.

    Raises:
      RefusedInput: it is not YAML, too large, too deep or too long, has a key twice, or an alias that contains itself.
    """
    try:
        loader = _Loader(_bounded(text, at_most))
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            if _expanded(node, {}) > YAML_NODES:
                raise RefusedInput(f"its aliases expand to more than {YAML_NODES:,} values")
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
        reason = f"line {mark.line + 1}: {problem}" if problem and mark else " ".join(str(error).split()).rstrip(".")
        raise RefusedInput(shown(reason, 200)) from None
    except RefusedInput:
        raise
    except ValueError:
        # A number of thousands of digits.
        raise RefusedInput(_TOO_MANY_DIGITS) from None


def checked(value: Any, kind: type[T]) -> T:
    """The value as a pydantic model, a dataclass or another type.

    Raises:
      RefusedInput: it is something else; names the first key that is wrong.
    """
    try:
        return cast(T, _adapter(kind).validate_python(value))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        if first["type"] == "jaxllm":
            # A sentence of the config's own checks.
            raise RefusedInput(first["msg"].rstrip(".")) from None
        where = shown(".".join(str(part) for part in first["loc"]))
        if first["type"] == "missing":
            raise RefusedInput(f"it has no {where}") from None
        wish = re.sub(r"^(Input|Value|Dictionary|Object) should", "it should", first["msg"])
        raise RefusedInput(f"{where or 'it'} is {shown(first['input'])}: {wish}") from None


def checked_map(value: Any, kind: type[T]) -> dict[str, T]:
    """A map from texts, as `checked` takes each of its values. It ends at the first that is wrong: pydantic would describe all.

    Raises:
      RefusedInput: it is something else; names the first key that is wrong.
    """
    if not isinstance(value, dict):
        raise RefusedInput(f"it is {shown(value)}: it should have keys")
    found = {}
    for key, part in value.items():
        try:
            found[checked(key, _TEXT)] = checked(part, kind)
        except RefusedInput as error:
            raise RefusedInput(f"{shown(key)}: {error}") from None
    return found


def whole_number(text: str, at_least: int = 0, at_most: int = INT32) -> int:
    """The number that a variable of the environment or an option holds, in ASCII digits.

    Raises:
      RefusedInput: the text is not a whole number between the two.
    """
    is_short = re.fullmatch(r"[0-9]{1,20}", text)
    if is_short is None or not at_least <= int(text) <= at_most:
        limit = f"of at least {at_least}" if at_most == INT32 else f"from {at_least} to {at_most:,}"
        raise RefusedInput(f"it should be a whole number {limit}")
    return int(text)


def reason_of(error: OSError | RefusedInput) -> str:
    """Why a file was not read: a phrase."""
    return str(error.strerror or error) if isinstance(error, OSError) else str(error)


_HOST, _WEB = re.compile(r"(\[[^\]@]*\]|[^:]*)(:\d{0,5})?"), re.compile(r"https?$", re.IGNORECASE)
# Python's Path leaves one slash of two. A query ends with its word, but for what closes a sentence; a store's may be a pattern.
_SCHEME = re.compile(r"(?<=[A-Za-z][A-Za-z0-9+.-])(:/{1,2})(?=[^/\s])")
_QUERY, _QUERY_OF_STORE = (re.compile(rf"[?#]{begin}.*(?<!['\")\].,:;])") for begin in ("", r"[\w.%~-]+="))


def without_passwords(text: str) -> str:
    """A text without what may be secret in its URLs: the user and the password before a host, and the query, where signatures
    are, to the end of the word. Half of all AWS keys have a slash, and others an @: a password ends at the last @."""
    first, *others = _SCHEME.split(text)
    found, in_query = [first], False
    for before, slashes, part in zip([first, *others[1::2]], others[::2], others[1::2], strict=False):
        # The text is of anybody: each step takes time in proportion to it.
        url = part.split(maxsplit=1)[0]
        rest, authority = part[len(url) :], url.partition("/")[0]
        if not in_query:
            url = url[(authority if _HOST.fullmatch(authority) else url).rfind("@") + 1 :]
            public = (_QUERY if _WEB.search(before[-5:]) else _QUERY_OF_STORE).sub("", url, count=1)
            in_query = public != url
            found += [slashes, public]
        in_query = in_query and not rest
        found.append(rest)
    return "".join(found)


def shown(value: Any, at_most: int = 80) -> str:
    """A value for a message: one line of printable characters without passwords, with its middle left out if it is long."""
    text = without_passwords(value if isinstance(value, str) else _bounded_text(value))
    if len(text) > at_most:
        text = f"{text[: at_most * 2 // 3]} ... {text[len(text) - at_most // 4 :]}"
    return one_line(text)


def one_line(text: str) -> str:
    """The text with everything escaped that could end a line, steer a terminal or turn the direction of what follows."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def in_lines(text: str) -> str:
    """The text with its lines, each as `one_line` has it."""
    return "\n".join(map(one_line, text.split("\n")))


# ------------------------------------------------------------------------------------------------------------- JSON


_TOO_MANY_DIGITS = "a number has thousands of digits"
_TOO_DEEP = f"it nests deeper than {DEPTH} levels"


def _too_large(at_most: int) -> str:
    return f"it is larger than {at_most // MIB} MiB" if at_most >= MIB else f"it is larger than {at_most // KIB} KiB"


B = TypeVar("B", bytes, str)
# Pyright takes no Annotated for a type.
_TEXT: Any = Text


def _bounded(content: B, at_most: int) -> B:
    if len(content) > at_most:
        raise RefusedInput(_too_large(at_most))
    return content


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise RefusedInput(f"byte {error.start} is not UTF-8") from None


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise RefusedInput(f"the key {shown(name)} is there twice")
        found[name] = value
    return found


def _not_json(constant: str) -> NoReturn:
    raise RefusedInput(f"{constant} is no JSON number")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise RefusedInput(f"the number {shown(text, 30)} is too large")
    return value


def _num_marks(text: str) -> int:
    """Commas and opening brackets: about the number of values."""
    return sum(map(text.count, ",[{"))


# It never starts twice at one place: a string without an end reaches to the end of the text.
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)


def _depths(value: Any) -> Iterator[int]:
    """The depth of every map and list of a parsed value, without recursion."""
    left = [(value, 1)]
    while left:
        node, depth = left.pop()
        if isinstance(node, (dict, list)):
            yield depth
            inner = node.values() if isinstance(node, dict) else node
            left += [(part, depth + 1) for part in inner if isinstance(part, (dict, list))]


def _bounded_text(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 512:
        return f"a number of {value.bit_length()} bits"
    return json.dumps(_beginning(value, depth=3), default=str, ensure_ascii=False)


def _beginning(value: Any, depth: int) -> Any:
    """The first few parts of a map or a list: all of it may be larger than memory."""
    if isinstance(value, (dict, list, tuple)) and depth == 0:
        return "..."
    if isinstance(value, dict):
        return {shown(key, 40): _beginning(part, depth - 1) for key, part in list(value.items())[:8]}
    if isinstance(value, (list, tuple)):
        return [_beginning(part, depth - 1) for part in value[:8]]
    if isinstance(value, str):
        return value[:200]
    return _bounded_text(value) if isinstance(value, int) and value.bit_length() > 512 else value


@lru_cache(maxsize=256)
def _adapter(kind: Any) -> Any:
    # Importing it takes 10 ms, and reading a recipe does not need it.
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


# ------------------------------------------------------------------------------------------------------------- YAML


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with bounds, without duplicate keys, and with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[Any, Any] = {}

    def __init__(self, text: str):
        super().__init__(text)
        self._depth = self._nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        self._nodes += 1
        if self._depth > DEPTH:
            raise RefusedInput(_TOO_DEEP)
        if self._nodes > YAML_NODES:
            raise RefusedInput(f"it has more than {YAML_NODES:,} values")
        event: Any = self.peek_event()
        if getattr(event, "tag", None) not in (None, "tag:yaml.org,2002:str"):
            raise RefusedInput(f"line {event.start_mark.line + 1}: the tag {shown(event.tag)} is not supported")
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise RefusedInput(f"line {key.start_mark.line + 1}: the key {shown(key.value)} is there twice")
                seen.add(key.value)
        return node


_SCALARS = {
    # A leading zero means base 8 in YAML 1.1, and nothing in 1.2.
    "int": (r"[-+]?(?:0|[1-9][0-9_]*)|[-+]?0x[0-9a-fA-F][0-9a-fA-F_]*|[-+]?0b[01][01_]*", "-+0123456789"),
    "float": (
        r"[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "null": (r"~|null|Null|NULL|", "~nN\0"),
    "merge": (r"<<", "<"),
}
for _tag, (_pattern, _first) in _SCALARS.items():
    _characters = [*_first.replace("\0", ""), *([""] if "\0" in _first else [])]
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _characters)


def _expanded(node: Node, known: dict[int, int]) -> int:
    """Number of keys and values below a node, where each alias counts as what it stands for."""
    if (found := known.get(id(node))) is not None:
        if found == 0:
            raise RefusedInput(f"line {node.start_mark.line + 1}: an alias contains itself")
        return found
    known[id(node)] = 0
    if isinstance(node, MappingNode):
        count = 1 + sum(_expanded(key, known) + _expanded(value, known) for key, value in node.value)
    elif isinstance(node, ScalarNode):
        count = 1
    else:
        count = 1 + sum(_expanded(one, known) for one in node.value)
    known[id(node)] = count
    return count
