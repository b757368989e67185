"""Makes XLA begin the exchange between replicas at the start of the step beside it (train.diloco_overlap).

XLA's scheduler begins a collective as long before its end as it believes it to take: an all-reduce as long as some matmuls,
whatever the network, and less than a loop over layers. So most of the step would be over when the exchange begins. A profile
may give it other times by the names of instructions (XLA's profile-guided latency estimator). Only a compiled program has the
names, so such a step is compiled twice.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import jax

from jaxllm.runtime import flag_names, xla_flags
from jaxllm.runtime.program_cache import write_whole

log = logging.getLogger(__name__)

SCOPE = "outer_step"
"""jax.named_scope around the exchange."""
_START = re.compile(rf'^\s*%(\S+-start\S*) = .*op_name="[^"]*\b{SCOPE}/shard_map\b', re.MULTILINE)
_LATENCY_US = 10**12
_PROFILE = "xla_gpu_pgle_profile_file_or_directory_path"
_AT_ONCE = next(iter(xla_flags.MORE_AT_ONCE))


def early_exchange(lowered: Any, options: dict[str, Any], device: jax.Device) -> dict[str, Any]:
    """Options to compile a step with an exchange: `options`, and those with which the exchange begins as soon as it can.

    Args:
      lowered: the step. It is compiled once here.
    """
    if device.platform == "cpu" or _PROFILE in flag_names.names(xla_flags.given_flags()):
        return options
    if not (starts := _START.findall(lowered.compile(compiler_options=options).as_text() or "")):
        return options
    profile = "".join(f'costs {{ name: "{name}" cost_us: {_LATENCY_US} }}\n' for name in starts)
    try:
        path = _written(profile)
    except OSError as error:
        log.warning("The exchange between replicas begins late in its step: %s. Let TMPDIR name a folder to write to.", error)
        return options
    wanted = {
        # Also beside loops with collectives, which count as all that they send. With 4 an exchange of ZeRO 3 x tensor ranks
        # still waited for the loops.
        _AT_ONCE: max(64, options.get(_AT_ONCE, 1)),
        _PROFILE: str(path),
        # Instructions without a cost keep XLA's own: no reason for a warning each.
        "xla_gpu_pgle_accuracy_checker": "PGLE_STRICTNESS_LEVEL_OFF",
    }
    return options | {name: value for name, value in wanted.items() if xla_flags.is_accepted(name, value)}


def _written(text: str) -> Path:
    """A file with this text. JAX's cache of compiled programs knows its name, which is thus that of the content."""
    folder = Path(tempfile.gettempdir()) / f"jaxllm-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"exchange-{hashlib.sha256(text.encode()).hexdigest()[:16]}.pbtxt"
    write_whole(path, text.encode())
    return path
