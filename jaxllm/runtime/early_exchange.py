"""Makes XLA begin the exchange between replicas at the start of the step beside it (train.diloco_overlap).

XLA's scheduler begins a collective as long before its end as it believes it to take: an all-reduce as long as some matmuls,
whatever the network, and less than a loop over layers. So most of the step would be over when the exchange begins. A profile
may give it other times by the names of instructions (XLA's profile-guided latency estimator). Only a compiled program has the
names, so such a step is compiled twice.

The profile itself is an option of JAX's, not a file that XLA reads: so JAX's cache of compiled programs knows its content.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import jax

from jaxllm.runtime import distributed, flag_names, xla_flags

log = logging.getLogger(__name__)

SCOPE = "outer_step"
"""jax.named_scope around the exchange."""
_START = re.compile(rf'^\s*%(\S+-start\S*) = .*op_name="[^"]*\b{SCOPE}/shard_map\b', re.MULTILINE)
_LATENCY_US = 10**12
_ESTIMATES = ("xla_gpu_pgle_profile_file_or_directory_path", "xla_gpu_enable_latency_hiding_scheduler")
"""Flags of a user who has a profile, or decides about the scheduler that reads it."""
_GPU_OPTIONS: dict[str, Any] = {
    # Also beside loops with collectives, which count as all that they send. With 4 an exchange of ZeRO 3 x tensor ranks still
    # waited for the loops.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 64,
    # Instructions without a time in the profile keep XLA's own: no reason for a warning each.
    "xla_gpu_pgle_accuracy_checker": "PGLE_STRICTNESS_LEVEL_OFF",
}


def early_exchange(lowered: Any, options: dict[str, Any], device: jax.Device) -> dict[str, Any]:
    """Options to compile a step with an exchange: `options`, and those with which the exchange begins as soon as it can. The
    user's XLA_FLAGS take precedence.

    Args:
      lowered: the step. It is compiled once here.
    """
    if device.platform == "cpu":
        return options
    given = set(flag_names.names(xla_flags.given_flags()))
    text = "" if given.intersection(_ESTIMATES) else lowered.compile(compiler_options=options).as_text()
    profile = "".join(f'costs {{ name: "{name}" cost_us: {_LATENCY_US} }}\n' for name in _START.findall(text or ""))
    if jax.process_count() > 1:
        what = "compiled different exchanges between replicas; give all hosts the same packages, flags and cache of programs"
        distributed.require_same(profile, what)
    if not profile:
        if text:
            log.warning("XLA's program has no transfer between replicas that could begin early (train.diloco_overlap).")
        return options
    wanted = {name: value for name, value in _GPU_OPTIONS.items() if name not in given and xla_flags.is_accepted(name, value)}
    return options | wanted | {"fdo_profile": profile.encode()}
