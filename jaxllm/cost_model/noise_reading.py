"""Describes a gradient noise scale and a batch in one sentence, for the log (run/noise_scale.py) and for `jaxllm report`."""

import math
from typing import NamedTuple


class NoiseEstimate(NamedTuple):
    """The noise scale and its 95% interval, in tokens. `low` is 0 and `high` infinite if that end is not known."""

    tokens: float
    low: float
    high: float


def wasted_share(batch_tokens: float, noise_tokens: float) -> float:
    """Share of a step's tokens that smaller batches would not have needed: B / (B + N)."""
    return batch_tokens / (batch_tokens + noise_tokens)


def reading(estimate: NoiseEstimate, batch_tokens: float) -> str:
    """Describes a batch by the noise scale: the share of a step that is wasted, and the effect of twice the data ranks.

    With w = B / (B + N), twice the batch takes (1 - w) / 2 fewer steps and w more tokens (plan/data_ranks.py).
    """
    if estimate.low == 0 and math.isinf(estimate.high):
        known = "unknown yet" if math.isinf(estimate.tokens) else f"about {short(estimate.tokens)} tokens"
        return f"gradient noise scale {known}: too few or too noisy estimates to read it"
    least, most = wasted_share(batch_tokens, estimate.high), wasted_share(batch_tokens, estimate.low)
    if math.isinf(estimate.high):
        scale, wasted = f"above {short(estimate.low)} tokens", f"at most {_percent(most)}"
        fewer, more = f"at least {_percent((1 - most) / 2)}", f"at most {_percent(most)}"
    else:
        share = wasted_share(batch_tokens, estimate.tokens)
        scale = f"{short(estimate.tokens)} tokens ({short(estimate.low)} to {short(estimate.high)})"
        wasted = f"{_percent(share)} ({_percent(least)} to {_percent(most)})"
        fewer, more = _percent((1 - share) / 2), _percent(share)
    return (
        f"gradient noise scale {scale}: of a step of {short(batch_tokens)} tokens {wasted} is wasted; twice the data ranks, "
        f"with twice the batch, would take {fewer} fewer steps and {more} more tokens"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.{0 if share >= 0.1 else 1}f}%"


def short(count: float) -> str:
    """'1.2M', '512.0k', '37': one decimal, for repeated log lines."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count:.0f}"
