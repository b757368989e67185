"""What a run does beside its steps, in the order in which it registers with the run (run/hooks.py)."""

from collections.abc import Callable

from jaxllm.run import (
    batch_growth,
    dpo_reference,
    evaluation,
    exports,
    fewer_hosts,
    log_lines,
    messages,
    noise_scale,
    profile,
    saving,
    stragglers,
)
from jaxllm.run.hooks import Run

FEATURES: tuple[Callable[[Run], None], ...] = (
    messages.print_header,
    fewer_hosts.say_missing,
    # Before a save: the trace ends with its step, and hosts are compared while they are idle.
    profile.register,
    stragglers.register,
    noise_scale.register,
    # Restores the state, which the others need.
    saving.register,
    dpo_reference.register,
    exports.register,
    log_lines.register,
    batch_growth.register,
    evaluation.register,
    # After the evaluation, which may be stopped too.
    fewer_hosts.register,
)
