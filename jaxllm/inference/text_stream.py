"""Decodes ids that arrive one at a time into text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxllm.data.tokenizer import Tokenizer

CONTEXT_IDS = 8
"""Number of prompt ids decoded together with new ids: some tokenizers drop the space before the first decoded word."""
HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""Result of decoding bytes that do not form a complete character (yet)."""


class TextStream:
    """The new ids of one row as text. A character made of several tokens is returned with its last token. A possible start of
    a stop text is held back until it is decided.

    Args:
      prompt: the ids before the new ones.
      stop_texts: the text ends before the first of them.

    Attributes:
      stopped: True after a stop text. No text is returned after that.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: np.ndarray, stop_texts: Sequence[str] = ()):
        self._tokenizer, self._stop_texts = tokenizer, tuple(stop_texts)
        self.stopped = False
        # `_before`: ids with final text, enough to decode the next ones. `_new`: ids whose text may still change.
        self._before, self._new = [int(i) for i in prompt[-CONTEXT_IDS:]], []
        self._text, self._given = "", 0

    def push(self, token: int) -> str:
        """Adds an id and returns the text that is now final."""
        self._new.append(token)
        self._settle()
        return self._give(hold=True)

    def rest(self) -> str:
        """Returns the text that was held back, after the last id."""
        self._settle(last=True)
        return self._give(hold=False)

    def _settle(self, last: bool = False) -> None:
        """Decodes the new ids, unless their end may still change: byte tokens decode to half characters, including earlier
        complete characters, until the last token of a character arrives.
        """
        before, text = (self._tokenizer.decode(ids) for ids in (self._before, self._before + self._new))
        if len(text) > len(before) and (last or not text.endswith(HALF_CHARACTER)):
            self._text += text[len(before) :]
            self._before, self._new = self._new, []

    def _give(self, hold: bool) -> str:
        if self.stopped:
            return ""
        text = self._text
        if (end := min((at for stop in self._stop_texts if (at := text.find(stop)) >= 0), default=None)) is not None:
            self.stopped, text = True, text[:end]
        elif hold:
            text = text[: len(text) - max((_overlap(text, stop) for stop in self._stop_texts), default=0)]
        new, self._given = text[self._given :], max(self._given, len(text))
        return new


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that is a prefix of the stop text."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def printable(text: str) -> str:
    """Replaces control characters by U+FFFD, because a terminal would execute those that a model writes."""
    return "".join(c if c.isprintable() or c in "\n\t" else HALF_CHARACTER for c in text)


class InTurn:
    """Shows texts that grow at the same time one after the other. The first unfinished text is shown live, each later one in
    its turn. Output is printable.

    Args:
      headings: shown before each text.
      write: writes a string at once.
    """

    def __init__(self, headings: Sequence[str], write: Callable[[str], None]):
        self._write = write
        self._waiting, self._ended = list(headings), [False] * len(headings)
        self._row = 0

    def __call__(self, row: int, text: str, ended: bool) -> None:
        """Takes the new part of a text, and whether the text has ended."""
        self._waiting[row] += text
        self._ended[row] = ended
        while self._row < len(self._waiting):
            text, self._waiting[self._row] = self._waiting[self._row], ""
            self._write(printable(text))
            if not self._ended[self._row]:
                break
            self._write("\n")
            self._row += 1
