"""Writes the recipe cards of docs/recipes.md. Each recipe is planned and confirmed by compiling. Needs no GPU.

    python docs/recipes.py [NAME ...]     plans and compiles (extra aot; minutes per card), then writes docs/recipes.md
    python docs/recipes.py --render       writes docs/recipes.md from the stored figures

docs/recipes/NAME.yaml is the question: model, text and batch. NAME-best.yaml is the planner's answer, a recipe to train with.
NAME.json has the figures and the commands that produced them. tests/test_pages.py checks that they match this script.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.config.remat_policy import remat_text
from jaxllm.cost_model.hardware import GPUS

CHECKOUT = Path(__file__).resolve().parents[1]
PAGE = CHECKOUT / "docs" / "recipes.md"
GPU = "h100-80gb"
CONFIRMED = 4
"""Number of each plan's best candidates to compile."""
GIB = 2**30
PLANNED = (
    *("configurations", "candidates_that_fit", "confirmed", "unconfirmed_because", "cost"),
    *("without_host", "with_fp8", "tokens_per_s_per_gpu_range", "extrapolated"),
)
COMPILED = (
    *("total_bytes", "host_bytes", "capacity_bytes", "share_of_capacity", "fits", "attention", "hlo_instructions"),
    *("warnings", "jax_version"),
)
"""Stored keys of the two commands' JSON."""

HEAD = f"""# Recipe cards

These are the planner's answers for common jobs on {GPU}, each confirmed by compiling the real step without a GPU. The first
file of a card is the question (model, text, batch), the second the planner's answer. Put your own text, batch or GPUs into the
first file and run the same commands ([plan](plan.md), [compile](compile.md)).

Memory is XLA's figure. **Speeds are predictions** ([how sure they are](estimate.md#how-sure-a-speed-is)); no card was run on
GPUs. By how much copies to the host slow the compute beside them is not measured ([remat](remat.md)), so a card that keeps
something there also shows the best answer that does not. `python docs/recipes.py` writes this page.
"""


@dataclass(frozen=True)
class Card:
    name: str
    title: str
    gpus: int
    tokens: str
    """Number of tokens for the days and GPU-hours."""
    about: str
    options: str = ""
    """Extra options of the plan."""

    @property
    def question(self) -> str:
        return f"docs/recipes/{self.name}.yaml"

    @property
    def answer(self) -> str:
        return f"docs/recipes/{self.name}-best.yaml"

    @property
    def plan(self) -> str:
        target = f"--gpu {GPU} --gpus {self.gpus} --tokens {self.tokens} --compile {CONFIRMED}"
        target += f" {self.options}" if self.options else ""
        return f"jaxllm plan {self.question} {target} --out {self.answer}"

    @property
    def compile(self) -> str:
        return f"jaxllm compile {self.answer} --gpu {GPU} --gpus {self.gpus}"

    @property
    def train(self) -> str:
        return f"jaxllm train {self.answer}"

    @property
    def kept(self) -> Path:
        return CHECKOUT / "docs" / "recipes" / f"{self.name}.json"


CARDS = (
    Card(
        "8b-on-8",
        "Llama 3.1 8B on 8 GPUs",
        8,
        "100B",
        "One host. A million tokens a step; the learning rate is Llama 3's for 8B (arXiv 2407.21783, table 3).",
    ),
    Card(
        "70b-on-64",
        "Llama 3.1 70B on 64 GPUs",
        64,
        "1T",
        "Eight hosts. Four million tokens a step; the learning rate is Llama 3's for 70B.",
    ),
    Card(
        "405b-on-1024",
        "Llama 3.1 405B on 1,024 GPUs",
        1024,
        "1T",
        "128 hosts. Sixteen million tokens a step, as in Llama 3 after 2.87T tokens. `train.batch_schedule` begins a run with "
        "smaller batches ([the batch](batch.md)).",
    ),
    Card(
        "128k-on-8",
        "A context of 128k: Llama 3.1 8B on 8 GPUs",
        8,
        "1B",
        "Continued training on complete documents of up to 131,072 tokens, from weights converted by `jaxllm convert from-hf`.",
    ),
    Card(
        "1m-on-64",
        "A context of 1M: Llama 3.1 8B on 64 GPUs",
        64,
        "1B",
        "1,048,576 tokens a sequence. Llama 3.1 was trained on positions up to 131,072; for more, raise `model.rope_theta` and "
        "continue training. The ring of each layer spans several hosts. A pipeline would keep context inside a host, but has "
        "only four microbatches here and is idle most of the time.",
        "--across-hosts",
    ),
)


# ------------------------------------------------------------------------------------------------------------- running


def run(card: Card) -> None:
    """Plans, compiles, and stores the answer and the figures. The old ones stay if either fails."""
    answer = CHECKOUT / card.answer
    before = answer.with_suffix(".before")
    if answer.exists():
        # A plan never overwrites a file.
        answer.replace(before)
    try:
        plan, plan_s = _json_of(card.plan)
        # The command that a reader would type.
        answer.write_text(answer.read_text().replace(" --json\n", "\n", 1))
        compiled, _ = _json_of(card.compile)
    except BaseException:
        if before.exists():
            before.replace(answer)
        raise
    before.unlink(missing_ok=True)
    searched = {key: plan[key] for key in PLANNED}
    searched["candidates"] = plan["candidates"][:3]
    found = {key: compiled[key] for key in COMPILED}
    found["hidden_share"] = hidden_share(compiled["collectives"])
    times = {"date": datetime.date.today().isoformat(), "plan_s": round(plan_s, 1)}
    figures = {**_origin(card), **times, "plan": searched, "compiled": found}
    card.kept.write_text(json.dumps(figures, indent=1) + "\n")


def hidden_share(collectives: list[Mapping[str, Any]]) -> float | None:
    """Fraction of the bytes that one GPU sends in a step in collectives with a matmul between start and done. None if it sends
    nothing."""
    sent = sum(line["sent_bytes"] for line in collectives)
    hidden = sum(line["sent_bytes"] for line in collectives if line["asynchronous"] and line["behind_matmuls"])
    return hidden / sent if sent else None


def _json_of(command: str) -> tuple[dict[str, Any], float]:
    """(JSON that a jaxllm command prints with --json, seconds that it took)"""
    began = time.perf_counter()
    words = [sys.executable, "-m", "jaxllm.cli", *command.split()[1:], "--json"]
    done = subprocess.run(words, cwd=CHECKOUT, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout), time.perf_counter() - began


def _origin(card: Card) -> dict[str, str]:
    """Origin of the figures. Figures from another command or question do not belong to this card."""
    question = (CHECKOUT / card.question).read_bytes()
    return {"command": card.plan, "question_sha256": hashlib.sha256(question).hexdigest()}


# ----------------------------------------------------------------------------------------------------------- rendering


def page() -> str:
    """Text of docs/recipes.md, from the questions and the stored figures."""
    contents = [f"- [{card.title}](#{slug(card.title)})" for card in CARDS]
    return "\n".join([HEAD, *contents, *(line for card in CARDS for line in _card_lines(card))]) + "\n"


def slug(heading: str) -> str:
    """GitHub's anchor for a heading of letters, digits, spaces and punctuation."""
    return "".join(c for c in heading.lower() if c.isalnum() or c in " -_").replace(" ", "-")


def is_current(card: Card) -> bool:
    """Whether the stored figures belong to today's commands and question."""
    return card.kept.exists() and _origin(card).items() <= json.loads(card.kept.read_text()).items()


def _card_lines(card: Card) -> Iterator[str]:
    yield from ("", f"## {card.title}", "", card.about, "", "```yaml")
    yield (CHECKOUT / card.question).read_text().rstrip()
    yield from ("```", "", f"    {card.plan}", f"    {card.compile}", f"    {card.train}", "")
    if not is_current(card):
        yield f"Not planned yet: `python docs/recipes.py {card.name}`."
        return
    figures = json.loads(card.kept.read_text())
    yield from ("| | |", "|---|---|")
    yield from (f"| {name} | {value} |" for name, value in _rows(card, figures))
    compiled = figures["compiled"]
    yield ""
    taken = f"the plan took {figures['plan_s']:.0f} s, its compilations included"
    yield f"JAX {compiled['jax_version']}, {figures['date']}; {taken}."


def _rows(card: Card, figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    plan, compiled = figures["plan"], figures["compiled"]
    best, *others = plan["candidates"]
    yield "the planner's answer", f"[{card.name}-best.yaml](recipes/{card.name}-best.yaml): {_layout(best)}"
    verdict = "fits" if compiled["fits"] else "**does not fit**"
    yield (
        "memory by XLA",
        f"{compiled['total_bytes'] / GIB:.1f} GiB, {compiled['share_of_capacity']:.0%} of what a step may take: {verdict}"
        + _of_the_host(compiled["host_bytes"], card.gpus),
    )
    yield "memory by the estimate", f"{best['estimate_bytes'] / GIB:.1f} GiB"
    yield "attention", compiled["attention"]
    yield from (("the compiler warns", warning) for warning in compiled["warnings"])
    if compiled["hidden_share"] is not None:
        yield "bytes sent behind matmuls", f"{compiled['hidden_share']:.0%}"
    yield (
        "speed, predicted",
        f"{best['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU, {best['tflops_per_gpu']:,.0f} TFLOP/s/GPU (causal); "
        f"{best['exposed_communication_share']:.0%} of a step waits for other GPUs",
    )
    low, high = plan["tokens_per_s_per_gpu_range"]
    beyond = f"; extrapolated: {'; '.join(plan['extrapolated'])}" if plan["extrapolated"] else ""
    yield "range for four of five runs", f"{low:,.0f} to {high:,.0f} tokens/s/GPU{beyond}"
    if best.get("host_bytes") and "without_host" in plan:
        other = plan["without_host"]
        yield "the best with nothing on the host", "nothing fits" if other is None else _beside(best, other)
    if other := plan.get("with_fp8"):
        yield "the best with FP8", _beside(best, other)
    cost = plan["cost"]
    yield f"{card.tokens} tokens, predicted", f"{cost['days']:,.1f} days, {cost['gpu_hours']:,.0f} GPU-hours"
    yield "searched", f"{plan['configurations']:,} configurations, {plan['candidates_that_fit']:,} fit, {_confirmed(plan)}"
    for number, other in enumerate(others, start=2):
        yield f"number {number}", f"{_layout(other)}: {other['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU"


def _beside(best: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Another plan, and how much faster or slower it is predicted to be."""
    gain = other["tokens_per_s_per_gpu"] / best["tokens_per_s_per_gpu"] - 1
    how = "predicted" if other["compiled_bytes"] is None else "confirmed by compiling"
    return f"{_layout(other)}: {other['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU, {gain:+.1%}, {how}"


def _of_the_host(host_bytes: int, gpus: int) -> str:
    if not host_bytes:
        return ""
    each, per_host = host_bytes / GIB, min(gpus, GPUS[GPU].gpus_per_host)
    return f"; {each:.1f} GiB for each GPU in the host's memory, {per_host * each:,.0f} GiB for the {per_host} of a host"


def _confirmed(plan: Mapping[str, Any]) -> str:
    why = plan["unconfirmed_because"]
    return f"{plan['confirmed']} confirmed by compiling" + (f" ({why})" if why else "")


def _layout(candidate: Mapping[str, Any]) -> str:
    axes = ", ".join(f"{axis} {candidate[axis]}" for axis in ("pipe", "data", "context", "tensor") if candidate[axis] > 1)
    schedule = ""
    if candidate["pipe"] > 1:
        chunks = f" x {candidate['virtual_stages']}" if candidate["virtual_stages"] > 1 else ""
        schedule = f", {candidate['schedule']}{chunks}"
    state = candidate.get("offload_state", "none")
    return (
        f"{axes or 'one GPU'}; ZeRO {candidate['zero']}, microbatch {candidate['microbatch_sequences']}{schedule}, "
        f"remat {remat_text(candidate['remat'])}" + ("" if state == "none" else f", offload_state {state}")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = [card.name for card in CARDS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(names)}; default: all")
    parser.add_argument("--render", action="store_true", help="run nothing")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"there is no card {min(unknown)}: choose from {', '.join(names)}")
    for card in () if options.render else CARDS:
        if not options.names or card.name in options.names:
            print(card.plan, card.compile, sep="\n", flush=True)
            run(card)
            # After each card, so that finished ones are kept.
            PAGE.write_text(page())
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
