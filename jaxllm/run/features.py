"""What a run does beside its steps, in the order in which it registers with the run (run/hooks.py)."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxllm.run import batch_growth, evaluation, exports, fewer_hosts, messages, noise_scale, saving, stragglers
from jaxllm.run.hooks import Run


def profile(run: Run) -> None:
    """log.profile_steps = [first, last]: a trace of these steps in run.dir/profile. A run that resumes among them traces the
    rest."""
    span = run.asked.log.profile_steps
    if not span:
        return
    first, last = span

    def start() -> None:
        step = run.trainer.step + 1
        if step == max(first, run.first + 1) and step <= last:
            jax.profiler.start_trace(str(run.folder / "profile"))

    run.on("before", start)
    run.when(lambda moment: moment.step == last, lambda _: jax.profiler.stop_trace())


FEATURES: tuple[Callable[[Run], None], ...] = (
    messages.print_header,
    fewer_hosts.say_missing,
    # Before a save: the trace ends with its step, and hosts are compared while they are idle.
    profile,
    stragglers.register,
    noise_scale.register,
    # Restores the state, which the others need.
    saving.register,
    evaluation.keep_reference,
    exports.register,
    messages.register,
    batch_growth.register,
    evaluation.register,
    # After the evaluation, which may be stopped too.
    fewer_hosts.register,
)
