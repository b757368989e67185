"""How a command ends: one sentence on standard error and an exit code. Only a defect of jaxllm prints a traceback."""

import errno
import logging
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import typer

from jaxllm.cluster import exit_codes
from jaxllm.config import ConfigError
from jaxllm.terminal import print_sentence, safe_to_print

INTERRUPTED = 130
NAMELESS = {
    errno.EMFILE: "This process may not open more files: raise `ulimit -n`",
    errno.ENFILE: "This machine may not open more files: close other programs",
    errno.ENOMEM: "The system has no memory left for this: close other programs, or use a larger machine",
    errno.EAGAIN: "The system starts no more processes for this user: raise `ulimit -u`",
    errno.EIO: "A disk or a terminal has failed (input/output error): see the system's log",
}
"""Sentences for system errors that name no file."""


def open_standard_streams() -> None:
    """Opens what was closed before the start, such as standard output by `>&-`: otherwise the next file or socket would get its
    number, and everything that is printed."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(number)
    sys.stdin, sys.stdout, sys.stderr = (
        stream or os.fdopen(number, mode, closefd=False)
        for stream, number, mode in ((sys.stdin, 0, "r"), (sys.stdout, 1, "w"), (sys.stderr, 2, "w"))
    )


def in_one_line(record: logging.LogRecord) -> bool:
    """A filter for a handler of logs."""
    # The handler itself says that arguments are wrong.
    with suppress(Exception):
        record.msg, record.args = safe_to_print(record.getMessage()), None
    return True


@contextmanager
def ending_in_one_sentence() -> Iterator[None]:
    """Turns every error of the body into the end of the process."""
    try:
        try:
            os.getcwd()
        except FileNotFoundError:
            raise ConfigError("The working directory does not exist any more: change to another one.") from None
        try:
            yield
        finally:
            sys.stdout.flush()
    except typer.Exit as done:
        sys.exit(done.exit_code)
    except ConfigError as error:
        _end(*map(str, error.args), code=error.exit_code)
    except OSError as error:
        _end_of(error)
    except MemoryError as error:
        _end(f"This machine has too little memory for this{f' ({error})' if str(error) else ''}: use a larger one.")
    except (KeyboardInterrupt, typer.Abort):
        _end("interrupted.", code=INTERRUPTED)
    except Exception as error:
        if hasattr(error, "format_message"):
            _end_of_usage(error)
        if exit_codes.NO_THREAD in str(error):
            _end("The system starts no more threads for this user: raise `ulimit -u`.")
        _end_of_defect("this is a defect of jaxllm", exit_codes.exit_code_for(error))


@contextmanager
def ending_at_ctrl_c() -> Iterator[None]:
    """For imports, after which nothing is to be cleaned up: raised while an extension is initialized, KeyboardInterrupt may be
    lost, become another error or crash the process."""

    def end(*_: object) -> None:
        print_sentence("interrupted.")
        os._exit(INTERRUPTED)

    before = signal.signal(signal.SIGINT, end) if signal.getsignal(signal.SIGINT) is signal.default_int_handler else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _end_of_usage(error: Any) -> NoReturn:
    """Ends after a mistake in the options. The class is that of the click which typer brings."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message(), file=sys.stderr)
        sys.exit(exit_codes.BAD_INPUT)
    command = "jaxllm" if error.ctx is None else " ".join(["jaxllm", *error.ctx.command_path.split()[1:]])
    _end(f"{error.format_message().rstrip('.')}: see `{command} --help`.")


def _end_of(error: OSError) -> NoReturn:
    code = exit_codes.exit_code_for(error)
    if error.errno == errno.EPIPE and _has_no_reader(1):
        # The reader of a pipe may stop early, as `head` does. A run that ends for it should say so.
        sentence = "Nobody reads what this run prints any more (broken pipe): print into a file. The same command resumes it."
        _end(sentence if sys.argv[1:2] == ["train"] else "", broken_output=True)
    if error.errno in exit_codes.FULL:
        what = error.filename or "what it prints or writes"
        _end(f"{error.strerror} for {what}: make room there.", code=code, broken_output=True)
    if error.filename is not None:
        name = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else f"file {error.filename}"
        _end(f"{name} cannot be used ({error.strerror}): remove the cause, or name another path.", code=code)
    if error.errno in NAMELESS:
        _end(f"{NAMELESS[error.errno]}.", code=code)
    _end_of_defect("a system call failed where jaxllm does not expect it", code)


def _has_no_reader(stream: int) -> bool:
    poll = select.poll()
    poll.register(stream, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _end_of_defect(what: str, code: int) -> NoReturn:
    import traceback

    # Rules of the console hold here too: the error may quote anything.
    print("\n".join(map(safe_to_print, traceback.format_exc().splitlines())), file=sys.stderr)
    _end(f"{what}: please open an issue with the lines above.", code=code)


def _end(sentence: str = "", *below: str, code: int = exit_codes.BAD_INPUT, broken_output: bool = False) -> NoReturn:
    """Ends after a sentence, and lines below it."""
    if sentence:
        lines = (safe_to_print(line) for line in (f"jaxllm: {sentence}", *below))
        with suppress(OSError):
            print("\n".join(lines), file=sys.stderr, flush=True)
    if broken_output:
        # The rest in the buffers would fail again at exit.
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    sys.exit(code)
