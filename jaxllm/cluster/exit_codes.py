"""What a process and its supervisor agree on: exit codes that tell whether to restart the run, and how attempts are counted.

All other nonzero codes (1 for a Python error; 134, 137 and 139 for JAX's aborts and for kills) may be restarted, up to the
supervisor's limit. 0 and BAD_INPUT are never restarted.
"""

import errno

BAD_INPUT = 2
"""A restart cannot help: the user has to change something."""

RESTART = 75
"""A signal stopped the run, which saved: a restart resumes it. EX_TEMPFAIL of sysexits.h; SLURM's RequeueExit can name it."""

LOST = 76
"""A peer was lost, a step is stuck, or a store does not answer: restart from the last checkpoint."""

NESTED = 1000
"""A supervisor inside another counts its attempts from this number times the outer attempt: attempts of one launch only
increase."""
MOST_ATTEMPTS = 10**15
"""Limit for JAXLLM_ATTEMPT, so that no sum of attempts exceeds 64 bits."""

FULL = (errno.ENOSPC, errno.EDQUOT)
LASTING = (
    *(*FULL, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE),
    *(errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP),
)
"""System errors that a restart would meet again. Others may pass, such as those of a network's disk."""
NO_THREAD = "can't start new thread"


def exit_code_for(error: BaseException) -> int:
    """Exit code of a process that ends with an error: the error's own `exit_code`, BAD_INPUT for what a restart would meet
    again, else 1."""
    is_lasting = isinstance(error, OSError) and error.errno in LASTING
    if is_lasting or isinstance(error, MemoryError) or NO_THREAD in str(error):
        return BAD_INPUT
    return getattr(error, "exit_code", 1)


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
