"""Formats the rows of benchmarks/gpu.py as Markdown tables, with their targets. Plain arithmetic.

text(rows)          rows: name of a case -> its figures, with its `kind` and `about` (model, S, remat, ...)
verdicts(rows)      each target: its subject, the figure, whether it is met
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import gpu_day_table
import trace_parts

Row = Mapping[str, Any]
Rows = Mapping[str, Row]

MFU_TARGETS = {"1B": 0.50, "3B": 0.50, "8B": 0.55}
"""Full-square MFU by model."""
CEILING_TARGET = 0.8
RATIO_TARGET, RATIO_LENGTH = 1.2, 8192
"""Ratio to the best compiled side of transformers at this length. The target for the best of PyTorch's sides is 1.0."""
RING_TARGET = 0.1
COPY_TARGET = 0.8
ALONE_TARGET = 0.9
SAME_WORK = ("", "looped")
CAST_BYTES = 6
"""Bytes per parameter: read in float32 and written in bfloat16, once per step."""


class Verdict(NamedTuple):
    target: str
    of: str
    figure: float
    met: bool


def verdicts(rows: Rows) -> list[Verdict]:
    return [
        *_speed_verdicts(rows),
        *_ratio_verdicts(rows),
        *_ring_verdicts(rows),
        *_part_verdicts(rows),
        *_in_step_verdicts(rows),
    ]


def of_kind(rows: Rows, kind: str) -> dict[str, Row]:
    """Rows of one kind that have figures; of train steps, those of the plan of gpu.py (gpu_day_table.py has the others)."""
    found = {name: row for name, row in rows.items() if row["kind"] == kind and "error" not in row}
    return {name: row for name, row in found.items() if kind != "train" or "about" in row}


def ceiling_share(row: Row, rows: Rows) -> float | None:
    """Ideal time of a step by the measured ceilings, as a fraction of its time: the model's matmul FLOPs at the speed of the
    best matmul, causal attention at the speed of its kernel alone at this length (or of a matmul if not measured), and AdamW
    and the cast of the weights at the speed of the copy. None without ceilings.
    """
    found = next(iter(of_kind(rows, "ceilings").values()), None)
    if found is None:
        return None
    tokens = row["tokens_per_step"]
    per_token = {name: row[f"tflops_{name}"] * 1e12 / row["tokens_per_s"] for name in ("causal", "full_square")}
    # Full-square FLOPs count attention twice.
    attention_flops = (per_token["full_square"] - per_token["causal"]) * tokens
    matmul_flops = per_token["causal"] * tokens - attention_flops
    attention_rate = found["matmul_flops"]
    for part in of_kind(rows, "parts").values():
        if all(part["about"][key] == row["about"][key] for key in ("model", "sequence_length")):
            # Forward plus backward, which is twice the work of forward.
            attention_rate = 3 * part["attention"]["forward_flops"] / part["attention"]["forward_backward_s"]
    from_optimizer = (32 + CAST_BYTES) * row["parameters"] / found["copy_bytes_per_s"]
    least_s = matmul_flops / found["matmul_flops"] + attention_flops / attention_rate + from_optimizer
    return least_s / row["step_s"]["median"]


def best_of_ours(rows: Rows, about: Mapping[str, Any]) -> Row | None:
    """The fastest remat policy for a model and length that does PyTorch's work: bfloat16, one text per sequence."""
    ours = [
        row
        for row in of_kind(rows, "train").values()
        if all(row["about"][key] == about[key] for key in ("model", "sequence_length")) and row["about"]["variant"] in SAME_WORK
    ]
    return max(ours, key=lambda row: row["tokens_per_s"], default=None)


def ratio(row: Row, rows: Rows) -> float | None:
    """Tokens per second of jaxllm's best, divided by those of this PyTorch side."""
    ours = best_of_ours(rows, row["about"])
    return None if ours is None else ours["tokens_per_s"] / row["tokens_per_s"]


def ring_overhead(played: Row, whole: Row, key: str = "forward_backward_s") -> float:
    return played["ranks"] * played[key] / whole[key] - 1


# ---------------------------------------------------------------------------------------------------------------- verdicts


def _speed_verdicts(rows: Rows) -> Iterator[Verdict]:
    lengths = {
        (row["about"]["model"], row["about"]["sequence_length"]): row["about"] for row in of_kind(rows, "train").values()
    }
    for (model, S), about in lengths.items():
        row = best_of_ours(rows, about)
        if row is None or row["mfu_full_square"] is None:
            continue
        target, of = MFU_TARGETS[model], f"{model}, S {S}"
        yield Verdict(f"full-square MFU at least {target:.0%}", of, row["mfu_full_square"], row["mfu_full_square"] >= target)
        share = ceiling_share(row, rows)
        if share is not None:
            yield Verdict(f"at least {CEILING_TARGET:.0%} of the ceilings", of, share, share >= CEILING_TARGET)


def _ratio_verdicts(rows: Rows) -> Iterator[Verdict]:
    theirs: dict[tuple[str, int], list[Row]] = {}
    for row in of_kind(rows, "transformers").values():
        theirs.setdefault((row["about"]["model"], row["about"]["sequence_length"]), []).append(row)
    for (model, S), sides in theirs.items():
        of = f"{model}, S {S}"
        speed_of = lambda row: row["tokens_per_s"]  # noqa: E731
        compiled = max((row for row in sides if row["options"]["compiled"]), key=speed_of, default=None)
        if S == RATIO_LENGTH and compiled and (found := ratio(compiled, rows)) is not None:
            target = f"{RATIO_TARGET} x the best compiled transformers ({compiled['about']['side']})"
            yield Verdict(target, of, found, found >= RATIO_TARGET)
        best = max(sides, key=speed_of)
        if (found := ratio(best, rows)) is not None:
            yield Verdict(f"1.0 x the best PyTorch ({best['about']['side']})", of, found, found >= 1.0)


def _ring_verdicts(rows: Rows) -> Iterator[Verdict]:
    for row in of_kind(rows, "ring").values():
        for played in row["played"]:
            overhead = ring_overhead(played, row["whole"])
            of = f"{row['about']['model']}, S {row['sequence_length']}, {played['ranks']} ranks"
            yield Verdict(f"a ring's blocks cost at most {RING_TARGET:.0%} more", of, overhead, overhead < RING_TARGET)


def _part_verdicts(rows: Rows) -> Iterator[Verdict]:
    found = next(iter(of_kind(rows, "ceilings").values()), None)
    for row in of_kind(rows, "parts").values() if found else ():
        of = f"{row['about']['model']}, S {row['about']['sequence_length']}"
        norm, update = row["norm"], row["optimizer"]
        rates = {
            "optimizer": update["bytes"] / update["s"],
            "norm forward": norm["forward_bytes"] / norm["forward_s"],
            "norm backward": norm["backward_bytes"] / norm["backward_s"],
        }
        for name, rate in rates.items():
            share = rate / found["copy_bytes_per_s"]
            yield Verdict(f"{name}, alone: at least {COPY_TARGET:.0%} of the copy", of, share, share >= COPY_TARGET)


def _in_step_verdicts(rows: Rows) -> Iterator[Verdict]:
    """Compares attention and matmuls in a traced step with the same shapes alone."""
    parts = {(row["about"]["model"], row["about"]["sequence_length"]): row for row in of_kind(rows, "parts").values()}
    for row in of_kind(rows, "train").values():
        about = row["about"]
        part = parts.get((about["model"], about["sequence_length"]))
        if part is None or "by_kind_s" not in row.get("trace", {}) or about["variant"]:
            continue
        in_step, alone = row["trace"]["by_kind_s"], _alone(row, part)
        for kind, alone_s in alone.items():
            step_s = sum(seconds for name, seconds in in_step.items() if name.startswith(kind))
            if step_s:
                of = f"{about['model']}, S {about['sequence_length']}, {about['remat']}"
                share = alone_s / step_s
                yield Verdict(f"{kind} in the step: at least {ALONE_TARGET:.0%} of alone", of, share, share >= ALONE_TARGET)


def _alone(row: Row, part: Row) -> dict[str, float]:
    """Seconds of a step's attention and matmuls, computed from the same shapes alone per token, because the microbatch may
    differ. `selective` runs attention's forward pass twice; `full` runs all of a block twice but its last product.
    """
    remat = row["about"]["remat"]
    times = row["tokens_per_step"] / part["tokens"] * row["layers"]
    attention, again = part["attention"], remat in ("selective", "full", "offload")
    attention_s = attention["forward_backward_s"] + (attention["forward_s"] if again else 0)
    products = part["matmuls"]
    matmul_s = sum(one["count"] * (one["forward_s"] + one["input_s"] + one["weight_s"]) for one in products)
    if remat == "full":
        # Nothing in the block needs the down projection's output. If F is D or the width of all heads, other shapes match too.
        down = products[-1]
        matmul_s += sum(one["count"] * one["forward_s"] for one in products) - down["forward_s"]
    head = part["head_products"]
    head_s = (head["forward_s"] + head["input_s"] + head["weight_s"]) * row["tokens_per_step"] / head["shape"][0]
    return {"attention": attention_s * times, "matmul": matmul_s * times + head_s}


# ------------------------------------------------------------------------------------------------------------------ tables


def text(rows: Rows) -> str:
    sections = [
        _versions_text(rows),
        _ceilings_text(rows),
        _table(TRAIN_HEADER, [_train_cells(row, rows) for row in of_kind(rows, "train").values()]),
        _table(THEIR_HEADER, [_their_cells(row, rows) for row in of_kind(rows, "transformers").values()]),
        _attention_text(rows),
        _parts_text(rows),
        _trace_text(rows),
        *_account_texts(rows),
        _ring_text(rows),
        gpu_day_table.text(rows),
        _table(("target", "of", "found", ""), [_verdict_cells(verdict) for verdict in verdicts(rows)]),
        "\n".join(f"- {name}: {row['error']}" for name, row in rows.items() if "error" in row),
    ]
    return "\n\n".join(section for section in sections if section)


TRAIN_HEADER = (
    *("jaxllm", "remat", "microbatch", "tokens/s", "TFLOP/s causal, full", "MFU causal, full", "of the ceilings"),
    *("step ms (quartiles)", "GiB in use, XLA, estimate", "compiled in s", "W, MHz"),
)
THEIR_HEADER = (
    *("PyTorch", "side", "microbatch", "tokens/s", "TFLOP/s causal, full", "MFU causal, full", "jaxllm / it"),
    *("step ms (quartiles)", "GiB in use", "compiled in s", "W, MHz"),
)


def _train_cells(row: Row, rows: Rows) -> list[str]:
    about = row["about"]
    variant = f", {about['variant']}" if about["variant"] else ""
    memory = ", ".join(_gib(row[f"{key}_bytes"]) for key in ("in_use", "compiled", "estimate"))
    return [
        _what(row),
        f"{about['remat']}{variant}",
        f"{row['microbatch']} x {row['microbatches']}",
        *_speed_cells(row),
        _percent(ceiling_share(row, rows)),
        _milliseconds(row),
        memory,
        f"{row['compile_s']:.0f}",
        _power(row),
    ]


def _their_cells(row: Row, rows: Rows) -> list[str]:
    found = ratio(row, rows)
    return [
        _what(row),
        row["about"]["side"] + (", checkpointing" if row["checkpointing"] else ""),
        f"{row['microbatch']} x {row['microbatches']}",
        *_speed_cells(row),
        "" if found is None else f"{found:.2f}",
        _milliseconds(row),
        _gib(row["in_use_bytes"]),
        f"{row['compile_s']:.0f}",
        _power(row),
    ]


def _speed_cells(row: Row) -> list[str]:
    return [
        f"{row['tokens_per_s']:,.0f}",
        f"{row['tflops_causal']:.1f}, {row['tflops_full_square']:.1f}",
        ", ".join(_percent(row[key]) for key in ("mfu_causal", "mfu_full_square")),
    ]


def _what(row: Row) -> str:
    return f"{row['about']['model']}, {row['layers']} layers, S {row['about']['sequence_length']:,}"


def _milliseconds(row: Row) -> str:
    median, lower, upper = (1e3 * row["step_s"][key] for key in ("median", "lower_quartile", "upper_quartile"))
    return f"{median:.1f} ({lower:.1f} .. {upper:.1f})"


def _power(row: Row) -> str:
    return f"{row['power_w']:.0f}, {row['sm_mhz']:.0f}" if "power_w" in row else "-"


def _gib(size: float | None) -> str:
    return "-" if size is None else f"{size / 2**30:.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def _verdict_cells(verdict: Verdict) -> list[str]:
    figure = f"{verdict.figure:.2f}" if " x " in verdict.target else _percent(verdict.figure)
    return [verdict.target, verdict.of, figure, "met" if verdict.met else "MISSED"]


def _versions_text(rows: Rows) -> str:
    names = ("jax", "torch", "transformers", "python", "date")
    found = {name: sorted({row[name] for row in rows.values() if name in row}) for name in names}
    fp8 = any(row["about"]["variant"] == "fp8" for row in of_kind(rows, "train").values())
    note = "MFU of fp8 is against bfloat16's peak." if fp8 else ""
    return "; ".join([f"{name} {', '.join(values)}" for name, values in found.items() if values] + ([note] if note else []))


def _ceilings_text(rows: Rows) -> str:
    lines = []
    for row in of_kind(rows, "ceilings").values():
        matmuls = ", ".join(f"{n}: {rate / 1e12:.0f}" for n, rate in row["matmuls"].items())
        copies = ", ".join(f"{name} {rate / 1e12:.3f}" for name, rate in row["copies"].items())
        lines.append(f"{row['device']}: {copies} TB/s; bfloat16 matmuls of width {matmuls} TFLOP/s")
    return "\n".join(lines)


def _parts_text(rows: Rows) -> str:
    lines = []
    for row in of_kind(rows, "parts").values():
        attention, norm, update = row["attention"], row["norm"], row["optimizer"]
        flops = attention["forward_flops"]
        backward_s = max(attention["forward_backward_s"] - attention["forward_s"], 1e-12)
        lines += [
            f"{row['about']['model']}, S {row['about']['sequence_length']:,}, {row['tokens']:,} tokens, alone:",
            "",
            f"- attention ({attention['kernel']}): forward {1e3 * attention['forward_s']:.3f} ms, "
            f"{flops / attention['forward_s'] / 1e12:.0f} TFLOP/s causal; backward {1e3 * backward_s:.3f} ms, "
            f"{2 * flops / backward_s / 1e12:.0f}",
        ]
        for one in [*row["matmuls"], row["head_products"]]:
            rates = ", ".join(f"{one['flops'] / one[way] / 1e12:.0f}" for way in ("forward_s", "input_s", "weight_s"))
            tokens, inputs, outputs = one["shape"]
            lines.append(f"- {tokens} x {inputs} x {outputs}: forward, for the input, for the weight {rates} TFLOP/s")
        heads = ", ".join(f"{n} {row['head_flops'] / s / 1e12:.0f}" for n, s in row["head_s"].items())
        lines += [
            *([f"- head and loss, forward and backward, by tokens of a chunk: {heads} TFLOP/s"] if heads else []),
            f"- norm: forward {norm['forward_bytes'] / norm['forward_s'] / 1e12:.3f} TB/s, "
            f"backward {norm['backward_bytes'] / norm['backward_s'] / 1e12:.3f}",
            f"- optimizer: {1e3 * update['s']:.2f} ms, {update['bytes'] / update['s'] / 1e12:.3f} TB/s",
            "",
        ]
    return "\n".join(lines).rstrip()


def _trace_text(rows: Rows) -> str:
    traced = {name: row for name, row in of_kind(rows, "train").items() if "by_kind_s" in row.get("trace", {})}
    kinds = list(dict.fromkeys(kind for row in traced.values() for kind in row["trace"]["by_kind_s"]))
    table = []
    for row in traced.values():
        seen = row["trace"]
        idle = 1 - seen["busy_s"] / seen["span_s"] if seen["span_s"] else None
        cells = [f"{1e3 * seen['by_kind_s'].get(kind, 0):.1f}" for kind in kinds]
        table.append([f"{_what(row)}, {row['about']['remat']}", *cells, _percent(idle)])
    return _table(("ms of a traced step", *kinds, "no kernel runs"), table)


def _account_texts(rows: Rows) -> Iterator[str]:
    """Traced steps by part of the kernel account."""
    for name, row in of_kind(rows, "train").items():
        if "parts" in row.get("trace", {}):
            yield f"{name}, a traced step:\n\n{trace_parts.table(row['trace'])}"


def _attention_text(rows: Rows) -> str:
    table = []
    for case in of_kind(rows, "attention").values():
        for row in case["attention"]:
            B, S, N, K, H = row["shape"]
            way = row["way"] if row["documents"] == 1 else f"{row['way']}, {row['documents']} documents"
            cells = ["-", "-", row["error"].replace("\n", " ").replace("|", "/")] if "error" in row else _attention_cells(row)
            table.append([f"{B} x {S:,}, {N} heads on {K}, of {H}", way, *cells])
    header = ("attention alone", "way", "TFLOP/s forward", "backward", "largest relative error")
    return _table(header, table)


def _attention_cells(row: Row) -> list[str]:
    """FLOPs of the causal half: two products forward, five backward."""
    flops = row["forward_flops"]
    backward_s = max(row["forward_backward_s"] - row["forward_s"], 1e-12)
    errors = row.get("errors")
    worst = max(errors, key=errors.__getitem__) if errors else None
    return [
        f"{flops / row['forward_s'] / 1e12:.0f}",
        f"{2.5 * flops / backward_s / 1e12:.0f}",
        f"{errors[worst]:.1e} ({worst})" if worst else "-",
    ]


def _ring_text(rows: Rows) -> str:
    lines = []
    for row in of_kind(rows, "ring").values():
        for played in row["played"]:
            forward, both = (ring_overhead(played, row["whole"], key) for key in ("forward_s", "forward_backward_s"))
            what = f"{row['about']['model']}, S {row['sequence_length']:,}, blocks of {played['ranks']} ranks ({row['kernel']})"
            lines.append(f"- {what}: {100 * forward:+.1f}% forward, {100 * both:+.1f}% forward and backward")
    return "\n".join(["Ring, over one fused call:", "", *lines]) if lines else ""


def _table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    if not cells:
        return ""
    lines = [header, ["---"] * len(header), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
