"""Encodes prompts, and finds the tokens that end an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.config.errors import ConfigError
from jaxllm.data.chat import ChatTemplate
from jaxllm.data.tokenizer import Tokenizer


def encode_prompt(
    tokenizer: Tokenizer, text: str, vocab_size: int, template: ChatTemplate | None = None, system: str | None = None
) -> np.ndarray:
    """Encodes a text to be continued, or with a template a conversation up to its first answer: an optional system message and
    the user's text. Text that spells a special token is that token, as it is for transformers. BOS comes before a text if the
    tokenizer's rule adds it, but not twice if the text begins with it; a template writes it.

    Raises:
      ConfigError: there are no ids, an id is outside the model's vocabulary, a text is not Unicode, or the template refuses it.
    """
    for part in (text, system or ""):
        try:
            # Python makes lone surrogates of a command line in an encoding other than the terminal's.
            part.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"A prompt is not Unicode (at character {error.start:,}): give it in UTF-8.") from None
    if template is None:
        ids = tokenizer.encode(text, parse_special=True)
        empty = "A prompt is empty, and this tokenizer adds no BOS token: give at least one character."
    else:
        messages = [] if system is None else [{"role": "system", "content": system}]
        rendered = template.render([*messages, {"role": "user", "content": text}], add_generation_prompt=True)
        ((ids, _),) = tokenizer.encode_with_starts([rendered], parse_special=True)
        empty = f"The chat template of {template.origin} makes nothing of a message: fix it, or leave out --chat."
    if not len(ids):
        raise ConfigError(empty)
    require_ids(ids, tokenizer, vocab_size)
    return ids


def require_ids(ids: np.ndarray, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises ConfigError if an id is outside the model's vocabulary."""
    if len(ids) and int(ids.max()) >= vocab_size:
        raise ConfigError(
            f"The tokenizer {tokenizer.name} gives the id {ids.max()}, and the model's vocabulary is {vocab_size}: use the "
            f"tokenizer that the model was trained with."
        )


def stop_ids(
    tokenizer: Tokenizer,
    generation: Mapping[str, Any],
    template: ChatTemplate | None = None,
    stop_texts: Sequence[str] = (),
) -> frozenset[int]:
    """Ids that end a text: the tokenizer's EOS, those of generation_config.json and, with a template, its end of turn.

    Args:
      generation: the content of generation_config.json. Its eos_token_id is a number or a list.
      stop_texts: a stop text that spells a special token adds that token, because decoded text does not show it.
    """
    named = generation.get("eos_token_id")
    found = {tokenizer.eos_id, *(named if isinstance(named, list) else [named])}
    spelled = [text for text in stop_texts if text in tokenizer.special_tokens]
    found |= {int(ids[0]) for ids, _ in tokenizer.encode_with_starts(spelled, parse_special=True)}
    if template is not None:
        found.add(template.end_of_turn(tokenizer))
    return frozenset(token for token in found if isinstance(token, int))
