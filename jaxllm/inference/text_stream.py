"""Text from ids that come one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxllm.data.tokenizer import Tokenizer

CONTEXT_IDS = 8
"""Of the prompt, decoded along: some tokenizers drop the space before the first word of whatever they decode."""
HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""What decoding gives for bytes that are no whole character, or not yet."""


class TextStream:
    """One row's new ids as text. A character that several tokens make comes out with its last; what may be the beginning of a
    stop text waits until it is known.

    Args:
      prompt: ids that were there before.
      stop_texts: the text ends before the first of them.

    Attributes:
      stopped: whether a stop text was met; nothing comes out after that.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: np.ndarray, stop_texts: Sequence[str] = ()):
        self._tokenizer, self._stop_texts = tokenizer, tuple(stop_texts)
        self.stopped = False
        # Ids whose text is settled, enough of them to decode the next ones after; and those that are not settled.
        self._before, self._new = [int(i) for i in prompt[-CONTEXT_IDS:]], []
        self._text, self._given = "", 0

    def push(self, token: int) -> str:
        """The text that is certain with this id."""
        self._new.append(token)
        self._settle()
        return self._give(hold=True)

    def rest(self) -> str:
        """What was held back, when no more ids come."""
        self._settle(last=True)
        return self._give(hold=False)

    def _settle(self, last: bool = False) -> None:
        """Decodes the new ids, unless their end may still change: byte tokens are half characters all together, also those of
        whole ones, until the last is there.
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
    """Characters at the end of the text with which the stop text begins."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def printable(text: str) -> str:
    """The text with U+FFFD for control characters: a model may write them, and a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else HALF_CHARACTER for c in text)


class InTurn:
    """Shows texts that grow at the same time one after the other: the first that has not ended live, a later one when it is
    its turn. What is shown is printable.

    Args:
      headings: what is shown before each text.
      write: puts out a string at once.
    """

    def __init__(self, headings: Sequence[str], write: Callable[[str], None]):
        self._write = write
        self._waiting, self._ended = list(headings), [False] * len(headings)
        self._row = 0

    def __call__(self, row: int, text: str, ended: bool) -> None:
        """Takes what has come of a text, and whether that was all."""
        self._waiting[row] += text
        self._ended[row] = ended
        while self._row < len(self._waiting):
            text, self._waiting[self._row] = self._waiting[self._row], ""
            self._write(printable(text))
            if not self._ended[self._row]:
                break
            self._write("\n")
            self._row += 1
