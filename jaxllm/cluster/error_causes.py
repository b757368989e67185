"""What an error comes from, and whether a lost peer may be behind it."""

from __future__ import annotations

import re

import jax

from jaxllm.config import ConfigError


def causes(error: BaseException | None, *, suppressed: bool = False) -> list[BaseException]:
    """An error and the errors that it was raised from, in that order: a save wraps errors in one of its own.

    Args:
      suppressed: follow causes hidden by `from None` too.
    """
    links: list[BaseException] = []
    # An error may be raised from itself. A StopIteration is how json says to itself that a text ends too early.
    while error is not None and error not in links and not isinstance(error, StopIteration):
        links.append(error)
        error = error.__cause__ or (error.__context__ if suppressed or not error.__suppress_context__ else None)
    return links


def is_of_jax(error: BaseException) -> bool:
    """Whether a device, a collective or a barrier may have raised this error. Such an error does not tell which peer was lost.
    In a step it is a JaxRuntimeError; where a step's result is copied to the host, as in a save, it is a ValueError.
    """
    return isinstance(error, jax.errors.JaxRuntimeError) or (
        isinstance(error, ValueError) and re.search(r"\b(Gloo|NCCL)\b", str(error)) is not None
    )


def as_sentence(error: BaseException) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first[:300]}".removesuffix(": ")
