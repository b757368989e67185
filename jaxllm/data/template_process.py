"""Renders one chat template in a process of its own, with limits of time, memory and files.

A template is a program of strangers, and no limit inside Jinja stops `10 ** 10 ** 8` or `'a' * 10 ** 10`. TemplateProcess
starts this file as that process, ends it, and gives it pickles: first the template, then conversations. For each rendering the
process writes a letter, a length and that many bytes of UTF-8. It knows only the standard library and Jinja, and starts in
0.1 s.
"""

import datetime
import importlib
import json
import pickle
import re
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import IO, Any

RENDERED, NOT_JINJA, REFUSED, FAILED, TOO_LARGE, TOO_SLOW = b"rnfeos"
"""What a rendering gives: a text, the reason why it has none, or nothing because memory or time does not suffice."""
HEADER = struct.Struct("<BQ")
LENGTH = struct.Struct("<Q")
SECONDS, BYTES_PER_SECOND = 2, 100_000
"""Processor time of a rendering, and the bytes of a conversation that give a second more. A usual one takes a millisecond."""
SECONDS_TOGETHER, SECONDS_EACH = 20, 0.02
"""Processor time of all renderings of a file together, and what each adds: a file of 100,000 conversations takes no day."""
MEMORY_BYTES, BYTES_PER_BYTE = 512 * 2**20, 32
"""Memory of the process, and what each byte of a conversation adds."""
FIXED_DATE = datetime.datetime(2024, 7, 26)
"""Today for a template that has no date of its own to write and may not ask. Llama 3.2's template has this one."""
Wish = tuple[int, bool, tuple[str, str]]
"""A rendering: of how many messages, whether with the generation prompt, and the marks around each {% generation %} block."""
Answer = tuple[int, str]
"""One of the kinds above, and the text or the reason."""

_TOGETHER, _LONG_BYTES = 16, 2**20
"""Renderings of a conversation that are in memory together, and the size from which on only one is."""
_OUTPUT_BYTES, _OUTPUT_PER_BYTE = 2**20, 16
"""What a rendering may take, and what each byte of the conversation adds: short messages are mostly marks."""


def needs_date(source: str) -> bool:
    """Whether a template asks for today's date without an alternative."""
    return "strftime_now" in source and not re.search(r"strftime_now is defined|if strftime_now\b", source)


class TemplateStopped(Exception):
    """Why the process has ended or was ended: a phrase such as "takes more than 2 s of processor time to render"."""


class TemplateProcess:
    """A process that renders one template. It starts with the first use, and again after `close` or after a stop. It ends with
    this process, whose end closes its input, and with this object. Thread-safe.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], knows_date: bool):
        self._template = pickle.dumps((source, dict(special_tokens), knows_date, inf if knows_date else SECONDS_TOGETHER))
        self._lock = threading.RLock()
        self._running: subprocess.Popen[bytes] | None = None
        self._end = None

    def compile(self) -> Answer:
        """The text is empty if the template is Jinja. Raises TemplateStopped if compiling it needs more than the limits."""
        with self._lock:
            self.close()
            return self._start()[1]

    def render(self, messages: Sequence[Any], wishes: Sequence[Wish]) -> Iterator[Answer]:
        """Renders beginnings of a conversation, in the order of the wishes. Raises TemplateStopped as `compile` does."""
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
        program = [sys.executable, "-P", "-S", __file__, *sys.path]
        try:
            # In a session of its own: Ctrl-C in a terminal is for the process that may want to finish what it does.
            process = subprocess.Popen(
                program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
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
            left, found = answers * (_OUTPUT_BYTES + _OUTPUT_PER_BYTE * len(request)), []
            for _ in range(answers):
                found.append(_received(written, left))
                left -= len(found[-1][1])
            return found
        except (EOFError, BrokenPipeError):
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
            code = process.returncode
            self.close()
            if code == -signal.SIGPROF:
                raise TemplateStopped(f"takes more than {SECONDS} s of processor time to render") from None
            raise TemplateStopped(f"ends the process that renders it (code {code})") from None
        except BaseException:
            # The rest of its answers is of no use to the next request.
            self.close()
            raise


def _received(written: IO[bytes], at_most: int) -> Answer:
    header = written.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    kind, length = HEADER.unpack(header)
    if kind == TOO_LARGE:
        raise TemplateStopped(f"needs more than {MEMORY_BYTES // 2**20} MiB of memory to render")
    if length > at_most:
        raise TemplateStopped(f"writes a text of {length:,} bytes, and {at_most:,} are the most")
    if kind == TOO_SLOW:
        raise TemplateStopped(
            f"takes more than {SECONDS_EACH:g} s of processor time for each rendering and {SECONDS_TOGETHER} s more"
        )
    content = written.read(length)
    if len(content) < length:
        raise EOFError
    try:
        return kind, content.decode("utf-8")
    except UnicodeDecodeError:
        raise TemplateStopped("writes what is not text") from None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    # Closes the pipes too, and ignores what a broken one did not take.
    process.communicate()


# ----------------------------------------------------------------------------------------------------- the process that renders


def main() -> None:
    # The path of the process that asked, which finds the same Jinja.
    sys.path[:] = sys.argv[1:]
    received, answers = sys.stdin.buffer, sys.stdout.buffer
    environment, template, special_tokens = _environment(), None, {}
    _forbid_files(environment)
    largest = 0
    while length := received.read(LENGTH.size):
        size = LENGTH.unpack(length)[0]
        # What a long conversation has used may not be given back at once.
        largest = max(largest, size)
        _limit_memory(largest)
        request = pickle.loads(received.read(size))
        if template is None:
            source, special_tokens, knows_date, left = request
            if knows_date:
                environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
            elif needs_date(source):
                environment.globals["strftime_now"] = FIXED_DATE.strftime
            kind, template = _within_limits(size, environment.from_string, source)
            _answer(answers, kind, b"" if kind == RENDERED else template)
        else:
            messages, wishes = request
            del request
            for wish in wishes:
                began = time.process_time()
                kind, content = _within_limits(size, _render, template, special_tokens, messages, *wish)
                left += SECONDS_EACH + size / BYTES_PER_SECOND - (time.process_time() - began)
                _answer(answers, *((kind, content) if left > 0 else (TOO_SLOW, b"")))


def _render(
    template: Any, special_tokens: dict[str, str], messages: Any, count: int, add_generation_prompt: bool, marks: Any
) -> bytes:
    text = template.render(
        messages=messages[:count],
        add_generation_prompt=add_generation_prompt,
        generation_marks=marks,
        # Templates that test whether these are none expect them to exist.
        tools=None,
        documents=None,
        **special_tokens,
    )
    # Half a surrogate pair is a fault of the template: no text holds one.
    return text.encode("utf-8")


def _within_limits(size: int, action: Callable[..., Any], *arguments: Any) -> tuple[int, Any]:
    """Runs an action on an input of `size` bytes: what it gives, or in UTF-8 why it gives nothing. The system ends this process
    if the action takes too long: code that is written in C returns to no handler of Python's.
    """
    from jinja2 import TemplateError, TemplateSyntaxError

    signal.setitimer(signal.ITIMER_PROF, SECONDS + size / BYTES_PER_SECOND)
    try:
        try:
            return RENDERED, action(*arguments)
        except MemoryError:
            raise
        except TemplateSyntaxError as error:
            return NOT_JINJA, _utf8(f"line {error.lineno}: {_line_of(error)}")
        except TemplateError as error:
            return REFUSED, _utf8(_line_of(error))
        except Exception as error:
            # The template is foreign code: any exception is a fault of these messages or of the template.
            return FAILED, _utf8(f"{type(error).__name__}: {_line_of(error)}")
    except MemoryError:
        return TOO_LARGE, b""
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory(size: int) -> None:
    with suppress(ValueError, OSError):
        # Not all systems have this limit.
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        wanted = MEMORY_BYTES + BYTES_PER_BYTE * size
        resource.setrlimit(resource.RLIMIT_AS, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))


def _answer(answers: Any, kind: int, content: bytes) -> None:
    answers.write(HEADER.pack(kind, len(content)))
    answers.write(content)
    answers.flush()


def _line_of(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _forbid_files(environment: Any) -> None:
    """From here on nothing can be opened. What Jinja and strftime open when they are first used is opened before."""
    for name in ("html", "pprint", "textwrap", "unicodedata", "jinja2.constants", "jinja2.debug"):
        importlib.import_module(name)
    # The codec of Jinja's string literals, and the time zone.
    environment.from_string("{{ '\\n' }}").render()
    datetime.datetime.now().strftime("%Z")
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    # The process that started this one may ignore or block it.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})


def _environment() -> Any:
    """The Jinja environment that chat templates expect, as documented by transformers."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationMarks(Extension):
        """The block {% generation %} ... {% endgeneration %}: puts the marks given to render() around its content."""

        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_between_marks", [nodes.ContextReference()])
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _between_marks(self, context: Any, caller: Any) -> str:
            begin, end = context.get("generation_marks", ("", ""))
            return begin + caller() + end

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **kwargs: Any) -> str:
        # Jinja's own filter escapes HTML markup.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **kwargs)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationMarks, loopcontrols]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = tojson
    return environment


if __name__ == "__main__":
    main()
