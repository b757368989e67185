"""Bounds on what a tokenizer.json makes of a text: its normalizer, pre-tokenizer and decoder may replace each character by a
long text, again and again, and its post-processor may add tokens without end.

The growth is computed from the descriptions of these parts, before any text is read. Sizes are those after Unicode's
decomposition, so that a normalizer's Unicode forms (NFKD and the like) add nothing to what other steps insert.

A limit of the process's memory would not do: at it the library aborts the process (tokenizers 0.23: SIGABRT, no exception), and
runs, `jaxllm generate` and `jaxllm eval` tokenize in the process that has the model.
"""

import base64
import json
import math
import re
import struct
import unicodedata
from collections.abc import Iterator
from typing import Any

from jaxllm.untrusted import RefusedInput, parse_json

GROWTH, ADDED_BYTES, STEPS, ADDED_TOKENS, AFFIX = 100, 4096, 256, 1024, 256
"""Limits: the factor by which a text may grow, what is put before it, steps of a part, tokens that a document gets, characters
of the prefix or suffix of each piece. T5 has 66 of the first; real tokenizers have at most 3, 10, 3 and 4 of the others."""


def require_modest_growth(described: Any) -> None:
    """Takes the content of a tokenizer.json, before the library makes a tokenizer of it: that normalizes the added tokens.

    Raises:
      RefusedInput: it is no object, or a text may grow beyond the limits.
    """
    import tokenizers

    if not isinstance(described, dict):
        raise RefusedInput("it is not a JSON object")
    model = described.get("model")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = model.get(key) if isinstance(model, dict) else None
        if isinstance(affix, str) and len(affix) > AFFIX:
            raise RefusedInput(f"its {key} has more than {AFFIX} characters")
    # The library describes each part in one form, whatever form the file has.
    bare = {**described, "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(bare))
    text = _Growth()
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if part == "decoder":
            text = _Growth()
        found = getattr(tokenizer, part)
        for number, step in enumerate(_steps(None if found is None else parse_json(found.__getstate__()))):
            text.take(step)
            if text.factor > GROWTH:
                raise RefusedInput(f"its {part} may make a text more than {GROWTH} times as long")
            if text.before > ADDED_BYTES:
                raise RefusedInput(f"its {part} puts more than {ADDED_BYTES:,} bytes before a text")
            if number >= STEPS:
                raise RefusedInput(f"its {part} has more than {STEPS} steps")
    if tokenizer.num_special_tokens_to_add(False) > ADDED_TOKENS:
        raise RefusedInput(f"its post_processor adds more than {ADDED_TOKENS:,} tokens to a text")


class _Growth:
    """How much longer than the text its normalized form may be."""

    def __init__(self):
        self.factor, self.before = 1.0, 0.0
        self._inserted: set[str] = set()
        self._any = False
        """Whether any character may have been inserted."""

    def take(self, step: dict[str, Any]) -> None:
        kind = step["type"]
        if kind == "Replace":
            self._replace(step["content"], step["pattern"])
        elif kind == "Prepend":
            self.before += _size(step["prepend"])
            self._inserted |= set(_decomposed(step["prepend"]))
        elif kind == "Metaspace":
            self._replace(step["replacement"], {"String": " "})
            self.before += 3
        elif kind == "Precompiled":
            # Its longest text stands for a character of three bytes in real ones.
            self._multiply(_longest_text(step["precompiled_charsmap"]) / 3)
            self._any = True
        elif kind in ("ByteLevel", "BertNormalizer"):
            # The first writes a byte as a character of two; the second puts spaces around a Chinese character.
            self._multiply(2)

    def _replace(self, content: str, pattern: dict[str, str]) -> None:
        size, text = _size(content), pattern.get("String")
        shortest = _shortest_match(pattern["Regex"]) if text is None else len(text)
        if shortest == 0:
            # It matches before each character and at the end.
            self._multiply(1 + size)
            self.before += size
        elif text is None or self._any or not self._inserted.isdisjoint(_decomposed(text)):
            self._multiply(size / shortest)
        else:
            # What was inserted so far stays as it is.
            self.factor = max(self.factor, size / shortest)
        self._inserted |= set(_decomposed(content))

    def _multiply(self, times: float) -> None:
        self.factor *= max(1, times)
        self.before *= max(1, times)


def _steps(described: Any) -> Iterator[dict[str, Any]]:
    """The steps of a part, those of its sequences one after the other."""
    if described is None:
        return
    inner = next((described[key] for key in ("normalizers", "pretokenizers", "decoders") if key in described), None)
    if inner is None:
        yield described
    else:
        for step in inner:
            yield from _steps(step)


def _shortest_match(regex: str) -> int:
    """Characters that a regular expression matches at least; 0 if it is of a form that Oniguruma knows and Python does not."""
    try:
        return re._parser.parse(regex).getwidth()[0]  # type: ignore[attr-defined]
    except Exception:
        return 0


def _decomposed(text: str) -> str:
    return unicodedata.normalize("NFKD", text.lower())


def _size(text: str) -> int:
    return max(len(text.encode()), len(_decomposed(text).encode()))


def _longest_text(charsmap: str) -> float:
    """Bytes of the longest text in a map of SentencePiece: the size of a trie, the trie, and texts with a zero after each."""
    content = base64.b64decode(charsmap)
    if len(content) < 4:
        return math.inf
    start = 4 + struct.unpack_from("<I", content)[0]
    return max(map(len, content[start:].split(b"\0")), default=0)
