"""A config's pipeline in a few lines: ticks, idle share, residual slots. `jaxllm schedule` prints it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxllm.config import AUTO, Config, ConfigError
from jaxllm.config.remat_policy import policy_of
from jaxllm.cost_model.activations import bytes_per_token_and_layer, is_blockwise
from jaxllm.display import readable
from jaxllm.pipeline_schedule import USUAL_IDLE, Schedule, idle_share, make_schedule, microbatches_for


@dataclass(frozen=True)
class PipelineReport:
    schedule: Schedule
    data: int
    """Data ranks, which share a batch's microbatches."""
    data_is_assumed: bool
    slot_bytes: int | None
    """Bytes that one chunk keeps of one microbatch on one device; None for remat=none, which keeps all that autodiff needs."""
    offloaded_slot_bytes: int
    """The same in host memory."""

    identity_layers: int
    """Layers of zeros that fill up the chunks."""
    layers: int
    """Layers that are computed, with these."""

    @property
    def waiting_share(self) -> float:
        """Share of the step that a stage waits."""
        return idle_share(self.schedule.stages, self.schedule.microbatches, self.schedule.virtual_stages)

    @property
    def idle_share(self) -> float:
        """The same, and what identity layers take."""
        return 1 - (1 - self.waiting_share) * (1 - self.identity_layers / self.layers)

    @property
    def most_live(self) -> list[int]:
        """Maximum number of residual slots in use, for each stage."""
        return self.schedule.live.max(axis=0).tolist()

    def to_json(self) -> dict[str, Any]:
        s, sizes = self.schedule, ("stages", "virtual_stages", "microbatches", "ticks", "slots")
        return {
            **vars(self),
            "schedule": s.name,
            **{name: getattr(s, name) for name in sizes},
            "forward_ticks": s.forward_units,
            "backward_ticks": s.backward_units,
            "idle_share": self.idle_share,
            "waiting_share": self.waiting_share,
            "most_live_slots": self.most_live,
        }

    def lines(self) -> Iterator[str]:
        s = self.schedule
        P, V = s.stages, s.virtual_stages
        chunks, plural = f" x {V} virtual" if V > 1 else "", "es" if s.microbatches > 1 else ""
        yield f"{s.name}: {P} stages{chunks}, {s.microbatches} microbatch{plural} a step"
        if self.data_is_assumed:
            yield "  parallel.data=auto counts as 1 here: set it, or run.cpu_devices, to divide the batch as the run does."
        yield f"  ticks        {s.ticks}; forward in {s.forward_units}, backward in {s.backward_units}"
        enough = microbatches_for(USUAL_IDLE, P, V)
        hint = "" if self.waiting_share < USUAL_IDLE else f"; below {USUAL_IDLE:.0%} from {enough} microbatches"
        extra = f"{self.identity_layers} identity layer{'s' if self.identity_layers > 1 else ''} of {self.layers}"
        without = f", {self.waiting_share:.1%} without {extra}" if self.identity_layers else ""
        yield f"  idle         {self.idle_share:.1%} of the step{without}{hint}"
        part = f", 1/{V} of its layers" if V > 1 else ""
        yield f"  slots        {s.slots} on each stage, each for one microbatch's residuals{part}"
        yield f"  most in use  {' '.join(map(str, self.most_live))}  (stage 0 first)"
        if self.slot_bytes is None:
            yield "  memory       not known before compilation: remat=none keeps all that autodiff needs"
        else:
            on_host = f", and {readable(s.slots * self.offloaded_slot_bytes)} on its host" if self.offloaded_slot_bytes else ""
            yield f"  memory       {readable(s.slots * self.slot_bytes)} of residuals on each device{on_host}"


def pipeline_report(config: Config) -> PipelineReport:
    """The schedule that a run of this config executes.

    The number of microbatches depends on parallel.data. If that is auto, run.cpu_devices gives the devices; without it, one
    data rank is assumed.

    Raises:
      ConfigError: parallel.pipe is 1, or the batch does not divide.
    """
    p = config.parallel
    if p.pipe == 1:
        raise ConfigError(
            "parallel.pipe=1 has no pipeline: set parallel.pipe to the number of stages, such as parallel.pipe=4."
        )
    assumed = p.data == AUTO and config.run.cpu_devices is None
    if p.data == AUTO:
        config = config.resolve(config.run.cpu_devices or p.replica * p.pipe * p.context * p.tensor)
    schedule = make_schedule(p.schedule, p.pipe, config.num_microbatches, p.virtual_stages)
    model, policy, kept, offloaded = config.model, policy_of(p.remat, config.model), None, 0
    if not policy.everything:
        held = bytes_per_token_and_layer(policy, config, blockwise=is_blockwise(config))
        tokens = config.chunk_layers * config.microbatch_sequences * config.train.sequence_length
        kept, offloaded = (round(tokens * sum(of_token.values())) for of_token in (held.kept, held.offloaded))
    layers = config.chunk_layers * p.pipe * p.virtual_stages
    return PipelineReport(schedule, int(config.parallel.data), assumed, kept, offloaded, layers - model.num_layers, layers)
