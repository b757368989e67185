"""What replicas send each other, and the network that connects them.

Hybrid sharding sums the gradients of all replicas once a step, in float32. DiLoCo sums their weights once a round, in float32,
or as codes (train.diloco_bits), which take one all-to-all and one all-gather. With train.diloco_fragments an exchange is of
one fragment, and there are as many in a round. Each rank sends its shard of its replica's master weights, so all GPUs of a
replica send at the same time. Where a network of their own connects the replicas (parallel.replica_gbit_per_s,
replica_latency_ms), each has one link, which its GPUs share.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from jaxllm.config import Config, ParallelConfig
from jaxllm.config.model_spec import parameters
from jaxllm.config.rounds import OUTER_BLOCK, exchanges_beside_steps, fragments_of, sends_codes, steps_apart, without_rounds
from jaxllm.cost_model.network import Group, Links, all_reduce_s, ring_all_reduce_s
from jaxllm.cost_model.step_parts import BANDWIDTH_SHARE, OUTER_STEP, Transfers
from jaxllm.cost_model.step_sizes import FLOAT32, StepSizes
from jaxllm.display import readable


@dataclass(frozen=True)
class Exchange:
    """One exchange between replicas."""

    replicas: int
    gpus: int
    """GPUs of a replica."""
    rank_bytes: int
    """Bytes that each GPU has to sum with those of the other replicas. Of codes, without the zeros that fill the last block."""
    steps: int
    """Steps from one exchange to the next: 1, or a round of DiLoCo, or the part of it that belongs to a fragment."""
    reductions: int
    """All-reduces, one after another: a single one of codes, and beside a step; else one for each matrix, of all its layers at
    once. Vectors and a few numbers are not counted, and XLA combines some of the matrices: compiled for two replicas of four
    H100s (ZeRO 1), a step of Llama 3 8B has 9 by this count and 9 in the program, and 11 in the outer step; a step of Llama 3.2
    1B 8 and 8."""

    codes: bool
    """Whether an all-reduce is an all-to-all and an all-gather of codes."""
    hidden_share: float = 0.0
    """Share of its time that runs beside a step, if the step takes as long (train.diloco_overlap): compiled for H100s, an
    all-reduce does from the step's first kernel on; of codes the all-gather does, for which the all-to-all must be done."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that leave each replica, in rings; as many arrive."""
        return 2 * (self.replicas - 1) * self.rank_bytes * self.gpus // self.replicas

    def seconds(self, group: Group, links: Links) -> float:
        """Time on an idle network."""
        time_s = ring_all_reduce_s if self.codes else all_reduce_s
        return self.reductions * time_s(self.rank_bytes / self.reductions, group, links)


def exchange_of(config: Config) -> Exchange | None:
    """The exchange of a resolved config; None with a single replica."""
    if (replicas := config.parallel.replica) == 1:
        return None
    codes = sends_codes(config)
    each = config.train.diloco_bits / 8 + FLOAT32 / OUTER_BLOCK if codes else FLOAT32
    fragments = fragments_of(config)
    rank_bytes = round(each * StepSizes(config).trained.master / fragments)
    matrices = sum(spec.is_matrix and spec.path not in config.frozen for spec in parameters(config.model))
    reductions = 1 if config.train.diloco_overlap or codes else matrices
    hidden = (0.5 if codes else 1.0) if exchanges_beside_steps(config) else 0.0
    return Exchange(replicas, config.devices // replicas, rank_bytes, steps_apart(config.train), reductions, codes, hidden)


def over_replica_network(parallel: ParallelConfig, ranks: int, links: Links) -> tuple[Group, Links]:
    """(placement, links) of the ranks of a collective over all replicas, where a network of their own connects these.

    A rank has its part of the replica's link, and no more than its own adapters. Collectives are assumed to reach the same
    share of the link as of other links, which nobody has measured.
    """
    p, replicas = parallel, parallel.replica
    bytes_per_s, latency_s = links.network_bytes_per_s, links.network_latency_s
    if p.replica_gbit_per_s is not None:
        gpus = p.pipe * int(p.data) * p.context * p.tensor
        bytes_per_s = min(bytes_per_s, BANDWIDTH_SHARE * p.replica_gbit_per_s * 1e9 / 8 / gpus)
    if p.replica_latency_ms is not None:
        latency_s = p.replica_latency_ms / 1000
    own = replace(links, network_bytes_per_s=bytes_per_s, network_latency_s=latency_s)
    return Group(ranks // replicas, replicas), own


def add_exchange(transfers: Transfers, config: Config, group: Group, links: Links, step_s: float) -> None:
    """Adds what crosses between the replicas of a resolved config: gradients once a step, or with DiLoCo weights once a round.

    Args:
      group: of a rank in all replicas, where no network of their own connects them.
      step_s: what an exchange may run beside.
    """
    if (exchange := exchange_of(config)) is None:
        return
    if config.parallel.names_replica_network:
        group, links = over_replica_network(config.parallel, exchange.replicas, links)
    name, exchange_s = "replica" if config.train.diloco_steps is None else OUTER_STEP, exchange.seconds(group, links)
    for share, behind_s in ((exchange.hidden_share, step_s), (1 - exchange.hidden_share, 0.0)):
        transfers.add(name, share * exchange_s, behind_s, times=1 / exchange.steps)


def network_text(parallel: ParallelConfig) -> str:
    """'400 Gbit/s each, 10 ms': the network between replicas."""
    if not parallel.names_replica_network:
        return "the network of the hosts"
    gbit, latency_ms = parallel.replica_gbit_per_s, parallel.replica_latency_ms
    bandwidth = "adapters as between hosts" if gbit is None else f"{gbit:,g} Gbit/s each"
    latency = "latency as between hosts" if latency_ms is None else f"{latency_ms:,g} ms"
    return f"{bandwidth}, {latency}"


def exchange_json(config: Config, step_s: float | None) -> dict[str, Any] | None:
    """What crosses between the replicas of a resolved config, as plain numbers; None with a single replica. Args: see
    exchange_lines()."""
    if (exchange := exchange_of(config)) is None:
        return None
    return {**asdict(exchange), "sent_bytes": exchange.sent_bytes, "exposed_s_per_step": step_s}


def exchange_lines(config: Config, step_s: float | None) -> Iterator[str]:
    """What crosses between the replicas of a resolved config, as text; nothing with a single replica.

    Args:
      step_s: its exposed seconds in the mean step, if they are predicted.
    """
    if (exchange := exchange_of(config)) is None:
        return
    gpus = f"{exchange.gpus:,} GPU{'s' if exchange.gpus > 1 else ''}"
    yield f"Between {exchange.replicas} replicas of {gpus} ({network_text(config.parallel)})"
    sent = readable(exchange.sent_bytes)
    codes = f" in {config.train.diloco_bits} bits" if exchange.codes else ""
    if config.train.diloco_steps is None:
        time = "" if step_s is None else f": {step_s:.3g} s exposed"
        yield f"  each sends {sent} of gradients every step, and receives as much{time}"
        return
    steps, count = exchange.steps, fragments_of(config)
    time = "" if step_s is None else f": {steps * step_s:.3g} s exposed, {step_s:.3g} s a step"
    part = f", one of {count} fragments," if count > 1 else ""
    every = f"every {steps:,} step{'s' if steps > 1 else ''}"
    after = config.train.diloco_after_steps
    together = exchange_of(without_rounds(config))
    assert together is not None, "it has replicas"
    much = readable(together.sent_bytes) if exchange.codes or count > 1 else "as much"
    before = f"; {much} of gradients in each of the first {after:,} steps" if after else ""
    yield f"  each sends {sent} of weights{codes}{part} {every}, and receives as much{time}{before}"
