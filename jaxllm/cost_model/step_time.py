"""Predicted time of one train step: a roofline of its parts, in plain Python within a fraction of a millisecond.

    step = estimate_step_time(config, GPUS["h100-80gb"], gpus_per_host=8)
    step.step_s, step.tokens_per_s_per_gpu, step.terms_s
    print("\\n".join(step_time_lines(step)))

Each part is FLOPs over the speed that its shape permits, bytes over a bandwidth, or kernels times their launch time. A transfer
that overlaps with compute costs only the time by which it outlasts the compute. terms_s has the exposed times and sums to the
step; hidden_s has the overlapped times.

A stage's work comes in ticks: one chunk of layers forward and one backward (pipeline_schedule.py). M microbatches over V
virtual stages take M V ticks, plus P - 1 ticks in which a stage waits or computes garbage: the bubble, (P - 1) / V times a
microbatch's layers. There are two conventions:

  jaxllm    the transfers of parallel/: all stages in lockstep, embedding and head sharded over pipe, gradients reduced once a
            step (ZeRO 0, 1) or behind the layer loop (2, 3)
  megatron  Megatron-LM on the same mesh: 1F1B, the head on the last stage, for which all others wait, gradients and weights
            exchanged behind the last backward and the first forward (the same from ZeRO 1 on), FLOPs as it counts them

All GPUs of a step wait for the slowest: slowest_gpu, which grows with the root of the logarithm of their number. In Megatron's
convention data ranks also wait for attention masks, S x S bytes for each sequence unless its loaders are told not to: input.
That explains why its published speeds fall with longer sequences, more ranks and small microbatches; it is not proven.

Constants: jaxllm's own were measured on one H100 (MEASURED); on several GPUs they are what programs of its kind reach by the
public record (PUBLISHED). Megatron's are fitted to one table, with parts chosen with knowledge of it (FITTED). The rest come
from data sheets (hardware.py), follow from shapes, or are rules of thumb, marked as such. error_range.py has the errors.
"""

from collections.abc import Iterator
from typing import Literal, get_args

from jaxllm.config import Config
from jaxllm.config.errors import ConfigError
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.megatron import MegatronStep
from jaxllm.cost_model.step_model import StepModel
from jaxllm.cost_model.step_parts import Fitted, StepTime

Convention = Literal["jaxllm", "megatron"]
CONVENTIONS = get_args(Convention)


def estimate_step_time(
    config: Config, gpu: Gpu, gpus_per_host: int, convention: str = "jaxllm", fitted: Fitted | None = None
) -> StepTime:
    """Predicts the train step of a resolved config.

    Args:
      gpus_per_host: devices fill hosts in the mesh's order, replica and pipe slowest and tensor fastest. Without
        parallel.replica_gbit_per_s and replica_latency_ms, hosts and their network connect the replicas too.
      convention: jaxllm or megatron, see the module docstring. In Megatron's, parallel.remat=full means Megatron's full
        recomputation; other values are ignored.
      fitted: other constants than the convention's own.
    """
    return step_model(convention)(config, gpu, gpus_per_host, fitted).time()


def step_model(convention: str) -> type[StepModel]:
    """The model of a convention's step. Raises ConfigError if the convention does not exist."""
    if convention not in CONVENTIONS:
        raise ConfigError(f"convention={convention} is not one of the choices: use {', '.join(CONVENTIONS)}.")
    return MegatronStep if convention == "megatron" else StepModel


def step_time_lines(step: StepTime) -> Iterator[str]:
    """A terminal table: for each term its exposed seconds, their share of the step, and its hidden seconds."""
    yield f"{'term':<16}{'exposed s':>12}{'share':>8}{'hidden s':>12}"
    for name in dict.fromkeys((*step.terms_s, *step.hidden_s)):
        exposed_s = step.terms_s.get(name, 0.0)
        yield _line(name.replace("_", " "), exposed_s, exposed_s / step.step_s, step.hidden_s.get(name, 0.0))
    yield _line("step", step.step_s, 1.0, sum(step.hidden_s.values()))
    yield "of these " + ", ".join(f"{name} {time_s:.4f} s" for name, time_s in step.phases_s.items())


def _line(name: str, exposed_s: float, share: float, hidden_s: float) -> str:
    return f"{name:<16}{exposed_s:>12.4f}{share:>8.1%}" + (f"{hidden_s:>12.4f}" if hidden_s else f"{'-':>12}")
