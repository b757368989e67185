"""Exit codes that tell a supervisor or scheduler whether to restart the run.

All other nonzero codes (1 for a Python error; 134, 137 and 139 for JAX's aborts and for kills) may be restarted, up to the
supervisor's limit. 0 and BAD_INPUT are never restarted.
"""

from __future__ import annotations

import errno

BAD_INPUT = 2
"""A restart cannot help: the user has to change something."""

RESTART = 75
"""A signal stopped the run and the run saved: a restart resumes it. EX_TEMPFAIL of sysexits.h; SLURM's RequeueExit can name it.
"""

LOST = 76
"""A peer was lost, or a step is stuck: restart from the last checkpoint."""

FULL = (errno.ENOSPC, errno.EDQUOT)

PASSING = (
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ECONNRESET,
    errno.ECONNREFUSED,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
)
"""System errors that may be gone after a restart, such as those of a network's disk. Others, such as permissions and full
disks, would come again."""


def exit_code_for(error: BaseException) -> int:
    """Exit code of a process that ends with an error: the error's own `exit_code`, BAD_INPUT for a system error that a restart
    would meet again, else 1."""
    if isinstance(error, OSError) and error.errno is not None:
        return 1 if error.errno in PASSING else BAD_INPUT
    return getattr(error, "exit_code", BAD_INPUT if isinstance(error, MemoryError) else 1)
