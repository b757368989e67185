"""Starts and ends the process that renders a chat template (template_program.py), and talks with it."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from jaxllm.data import template_program
from jaxllm.data.template_program import HEADER, LENGTH, MEMORY_BYTES, SECONDS

Wish = tuple[int, bool, tuple[str, str]]
"""A rendering: of how many messages, whether with the generation prompt, and the marks around each {% generation %} block."""
Answer = tuple[int, str]
"""One of the kinds of template_program.py, and the text or the reason."""

_TOGETHER, _LONG_BYTES = 16, 2**20
"""Renderings of a conversation that are in memory together, and the size from which on only one is."""
_OUTPUT_BYTES, _BYTES_PER_BYTE = 2**20, 16
"""What renderings may take together, and what each byte of the conversation adds: sixteen beginnings of it take eight."""


class TemplateStopped(Exception):
    """Why the process has ended or was ended: a phrase such as "takes more than 2 s of processor time to render"."""


class TemplateProcess:
    """A process that renders one template. It starts with the first use, and again after `close` or after a stop. It ends with
    this process, whose end closes its input, and with this object. Thread-safe.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], knows_date: bool):
        self._template = pickle.dumps((source, dict(special_tokens), knows_date))
        self._lock = threading.RLock()
        self._running: subprocess.Popen[bytes] | None = None
        self._end = None

    def compile(self) -> Answer:
        """The text is empty if the template is Jinja.

        Raises:
          TemplateStopped: compiling it needs more than the limits.
        """
        with self._lock:
            self.close()
            return self._start()[1]

    def render(self, messages: Sequence[Any], wishes: Sequence[Wish]) -> Iterator[Answer]:
        """Renders beginnings of a conversation, in the order of the wishes.

        Raises:
          TemplateStopped: one of them needs more than the limits.
        """
        start, count = 0, _TOGETHER
        while start < len(wishes):
            together = wishes[start : start + count]
            request = pickle.dumps((messages, together))
            if len(request) > _LONG_BYTES and len(together) > 1:
                count = 1
                continue
            start += count
            with self._lock:
                process = self._running or self._start()[0]
                answers = self._ask(process, request, len(together))
            yield from answers

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            if self._end is not None:
                self._end()
            self._running = self._end = None

    def _start(self) -> tuple[subprocess.Popen[bytes], Answer]:
        program = [sys.executable, "-P", "-S", str(Path(template_program.__file__)), *sys.path]
        try:
            # In a session of its own: Ctrl-C in a terminal is for the process that may want to finish what it does.
            process = subprocess.Popen(
                program,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise TemplateStopped(f"cannot be rendered: no process can be started ({error.strerror})") from None
        self._running, self._end = process, weakref.finalize(self, _end, process)
        return process, self._ask(process, self._template, 1)[0]

    def _ask(self, process: subprocess.Popen[bytes], request: bytes, answers: int) -> list[Answer]:
        given, written = process.stdin, process.stdout
        assert given is not None
        assert written is not None
        try:
            given.write(LENGTH.pack(len(request)) + request)
            given.flush()
            left, found = _OUTPUT_BYTES + _BYTES_PER_BYTE * len(request), []
            for _ in range(answers):
                found.append(_answer(written, left))
                left -= len(found[-1][1])
            return found
        except (EOFError, BrokenPipeError):
            reason = _why_ended(process)
            self.close()
            raise TemplateStopped(reason) from None
        except BaseException:
            # The rest of its answers is of no use to the next request.
            self.close()
            raise


def _answer(written: IO[bytes], at_most: int) -> Answer:
    header = written.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    kind, length = HEADER.unpack(header)
    if kind == template_program.TOO_LARGE:
        raise TemplateStopped(f"needs more than {MEMORY_BYTES // 2**20} MiB of memory to render")
    if length > at_most:
        raise TemplateStopped(f"writes a text of {length:,} bytes, and {at_most:,} are the most")
    content = written.read(length)
    if len(content) < length:
        raise EOFError
    try:
        return kind, content.decode("utf-8")
    except UnicodeDecodeError:
        raise TemplateStopped("writes what is not text") from None


def _why_ended(process: subprocess.Popen[bytes]) -> str:
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    if process.returncode == -signal.SIGPROF:
        return f"takes more than {SECONDS} s of processor time to render"
    return f"ends the process that renders it (code {process.returncode})"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            # Closing writes what a broken pipe did not take.
            if pipe is not None:
                pipe.close()
    process.wait()
