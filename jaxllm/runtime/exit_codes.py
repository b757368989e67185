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
"""System errors that a restart would meet again."""


def exit_code_for(error: BaseException) -> int:
    """Exit code of a process that ends with an error: the error's own `exit_code`, BAD_INPUT for a full disk, else 1."""
    if isinstance(error, OSError) and error.errno in FULL:
        return BAD_INPUT
    return getattr(error, "exit_code", 1)
