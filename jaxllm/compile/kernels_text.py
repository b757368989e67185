"""The kernel account as terminal text. `jaxllm compile --kernels` prints it, beside that of another config with `--against`."""

from __future__ import annotations

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jaxllm.compile.kernel_account import KernelAccount
from jaxllm.compile.report import CompileReport
from jaxllm.compile.text import heading, teraflops, verdict
from jaxllm.config import ConfigError
from jaxllm.display import terminal_table


def render_kernels(report: CompileReport, against: CompileReport | None = None) -> Group:
    """The account for a terminal of at least 80 columns.

    Raises:
      ConfigError: the devices' figures are not known.
    """
    account, other = account_of(report), None if against is None else account_of(against)
    table = _comparison(account, other) if other else _table(account)
    lines = [f"  {value:,.3g} {unit}" for value, unit in _rates(account)]
    return Group(
        *heading(report),
        *verdict(report),
        *([Text("\nThe other"), *heading(against), *verdict(against)] if against else []),
        Text("\nKernels of one step, on one device, by roofline (nothing was timed)"),
        Padding(table, (0, 0, 0, 2)),
        Text(""),
        Text(_total("", account)),
        *([Text(_total("the other: ", other))] if other else []),
        Text("\nRates: shares of the peaks that one H100 reached; assumed for other GPUs (jaxllm/cost_model/kernel_rates.py)"),
        *map(Text, lines),
        *([Text("\nWarnings"), *(Text(f"  {line}") for line in report.warnings)] if report.warnings else []),
    )


def account_of(report: CompileReport) -> KernelAccount:
    """The report's account. Raises ConfigError if it has none."""
    if report.kernels is None:
        raise ConfigError(f"--kernels needs the figures of the GPU, and {report.gpu} has none: name a kind with --gpu.")
    return report.kernels


def _table(account: KernelAccount) -> Table:
    figures = ("runs", "GB", "TFLOP", "ms", "least", "us a layer")
    table = terminal_table(("part", *figures), right=figures)
    for row in account.parts:
        layer = "" if row.layer_seconds is None else f"{1e6 * row.layer_seconds:,.0f}"
        flops = teraflops(row.flops) if row.flops else ""
        moved = f"{row.bytes / 1e9:,.1f}"
        table.add_row(row.part, f"{row.runs:,}", moved, flops, _ms(row.seconds), _ms(row.least_seconds), layer)
    least = sum(row.least_seconds for row in account.parts)
    table.add_row("all", f"{sum(row.runs for row in account.parts):,}", "", "", _ms(account.step_s), _ms(least), "")
    return table


def _comparison(account: KernelAccount, other: KernelAccount) -> Table:
    figures = ("ms", "other", "change")
    table = terminal_table(("part", *figures), right=figures)
    ours, theirs = ({row.part: row.seconds for row in one.parts} for one in (account, other))
    pairs = {part: (ours.get(part, 0.0), theirs.get(part, 0.0)) for part in ours | theirs}
    for part, (a, b) in sorted(pairs.items(), key=lambda item: -max(item[1])):
        table.add_row(part, _ms(a), _ms(b), f"{1e3 * (b - a):+,.1f}")
    table.add_row("all", _ms(account.step_s), _ms(other.step_s), f"{1e3 * (other.step_s - account.step_s):+,.1f}")
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


def _total(whose: str, account: KernelAccount) -> str:
    return (
        f"{whose}{_ms(account.step_s)} ms a step, MFU {account.mfu_full_square:.1%} with the full square of attention, "
        f"{account.mfu_causal:.1%} causal"
    )


def _rates(account: KernelAccount) -> list[tuple[float, str]]:
    rates = account.rates
    return [
        (rates.matmul_flops_per_s / 1e12, "TFLOP/s in matmuls"),
        (rates.attention_forward_flops_per_s / 1e12, "TFLOP/s in attention, of the causal half"),
        (rates.attention_backward_flops_per_s / 1e12, "TFLOP/s in its backward pass"),
        (rates.memory_bytes_per_s / 1e12, "TB/s of memory"),
        (rates.launch_s * 1e6, "us between kernels"),
    ]
