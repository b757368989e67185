"""Tokens that the files beside a tokenizer.json name, as transformers 5 reads these files.

added_tokens_decoder of tokenizer_config.json gives tokens ids. Where it is absent, added_tokens.json does, and
special_tokens_map.json names special tokens too. A special token may also have a name alone, such as pad_token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxllm.config.errors import ConfigError, line_of
from jaxllm.untrusted import RefusedInput, read_json, reason_of, shown

CONFIG, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_DECODER = "added_tokens_decoder"
_FIRST = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_LONGEST_TOKEN = 4096


def tokens_beside(folder: Path, known: Iterable[Any]) -> tuple[list[tuple[int, Any]], list[Any], Path]:
    """Tokens of the tokenizers library: those that have an id, with it and in its order; special tokens that have a name, in
    the order in which they are added; and the file with the ids.

    Args:
      known: those of tokenizer.json, which added_tokens.json does not change.

    Raises:
      ConfigError: a file has another form than transformers writes.
    """
    said, beside, ids = (read_companion(folder / name) for name in (CONFIG, SPECIAL, ADDED))
    is_new = _DECODER in said
    file = folder / (CONFIG if is_new else ADDED)
    special = dict(_special(said, {} if is_new else beside, file))
    try:
        if is_new:
            declared = [(int(token_id), _added(token, special)) for token_id, token in said[_DECODER].items()]
        else:
            made = {text: _added({"content": text, "special": text in special}) for text in ids}
            made |= {token.content: token for token in known}
            declared = [(int(token_id), made[text]) for text, token_id in ids.items()]
        return sorted(declared, key=lambda pair: pair[0]), [_added(token) for token in special.values()], file
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = shown(line_of(error))
        raise ConfigError(f"{file} has tokens of another form than transformers writes ({reason}): save it again.") from None


def special_token(added: Any, text: str | None) -> Any:
    """A token that is added already, or a text that is none yet, as a special token."""
    token = added or _added({"content": text, "special": True})
    token.special = True
    return token


def _special(config: Mapping[str, Any], beside: Mapping[str, Any], file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The special tokens of a tokenizer_config.json and of a special_tokens_map.json, by their texts."""
    more = [said.get("extra_special_tokens") or said.get("additional_special_tokens") for said in (config, beside)]
    own = {key: value for key, value in {**config, **beside}.items() if key.endswith("_token")}
    named = [*(dict.fromkeys(_FIRST) | own | {k: v for one in more if isinstance(one, dict) for k, v in one.items()}).values()]
    for number, token in enumerate([*named, *next((one for one in more if isinstance(one, list)), [])]):
        if text := token_text(token, "special token", file):
            flags = token if isinstance(token, dict) else {}
            yield text, {"special": True, **flags, "content": text, **({"special": True} if number < len(named) else {})}


def _added(token: Mapping[str, Any], special: Collection[str] = ()) -> Any:
    from tokenizers import AddedToken

    made = AddedToken(token["content"], **{key: token[key] for key in _FLAGS if key in token})
    made.special = made.special or token["content"] in special
    return made


def read_companion(file: Path) -> dict[str, Any]:
    """Reads the JSON object in a file; an empty dict if there is no file."""
    try:
        if not file.is_file():
            return {}
        values = read_json(file)
    except (OSError, RefusedInput) as error:
        raise ConfigError(f"{file} cannot be used ({reason_of(error)}): fix it or remove it.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} does not hold a JSON object: fix it or remove it.")
    return values


def token_text(token: Any, name: str, file: Path) -> str | None:
    """The text of a special token, which a file gives as a text or as an object with `content`. None if it gives neither."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    if len(text) > _LONGEST_TOKEN:
        raise ConfigError(f"The {shown(name)} in {file} has more than {_LONGEST_TOKEN:,} characters: give a token's text.")
    return text
