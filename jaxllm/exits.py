"""Exit codes of a run that say to who started it whether to start it again.

Every other code that is not 0 (1 for a Python error; 134, 137 and 139 for JAX's aborts and for kills) may be restarted within
the limit of whoever restarts. 0 and BAD_INPUT never are.
"""

from __future__ import annotations

import errno

BAD_INPUT = 2
"""Nothing to restart: change something."""

RESTART = 75
"""Stopped by a signal and saved: start it again and it goes on. EX_TEMPFAIL of sysexits.h; SLURM's RequeueExit can name it."""

LOST = 76
"""A peer was lost, or a step is stuck: start again from the last checkpoint."""

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of the system that a restart would meet again."""


def of(error: BaseException) -> int:
    """The code of a process that ends with an error: one's own `exit_code`, BAD_INPUT for a full disk, or Python's 1."""
    if isinstance(error, OSError) and error.errno in FULL:
        return BAD_INPUT
    return getattr(error, "exit_code", 1)
