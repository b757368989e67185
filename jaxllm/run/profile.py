"""log.profile_steps = [first, last]: a trace of these steps in run.dir/profile."""

from __future__ import annotations

import jax

from jaxllm.run.hooks import Run


def register(run: Run) -> None:
    """A run that resumes inside the span traces the rest of it."""
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
