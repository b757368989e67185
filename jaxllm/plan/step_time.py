"""How long one train step takes: a roofline of its parts, in plain Python and a fraction of a millisecond. Nothing is measured.

    step = estimate_step_time(config, GPUS["h100-80gb"], gpus_per_host=8)
    step.step_s, step.tokens_per_s_per_gpu, step.terms_s
    print("\\n".join(step_time_lines(step)))

Each part is FLOPs over the speed that its shape allows, bytes over a bandwidth, or kernels times what each takes to start; a
transfer that lies behind compute costs what is left of it when the compute is done. terms_s has what the step waits for, and
sums to it; hidden_s what does not show.

A stage's work comes in ticks, one chunk of layers forward and one backward (plan/schedule.py). M microbatches over V virtual
stages are M V ticks and P - 1 more in which a stage waits or works for nothing: the bubble, (P - 1) / V times a microbatch's
layers. Two conventions:

  jaxllm    what parallel/ sends: all stages in lockstep, embedding and head split over pipe, gradients reduced once a step
            (ZeRO 0, 1) or behind the layer loop (2, 3)
  megatron  what Megatron-LM would do with the same mesh: 1F1B, the head on the last stage, for which all others wait, gradients
            and weights exchanged behind the last backward and the first forward (from ZeRO 1 on all alike), FLOPs as it counts

Constants. Four are fitted, FITTED, and serve all kinds of GPU and both conventions: to 88 published TFLOP/s of Megatron-LM
(Llama 3.1 8B, S 8192, A100s and H100s; benchmarks/published), by `python benchmarks/step_time.py --fit`, which also fits to
some rows and predicts the others. The rest are data sheets' (plan/hardware.py), follow from shapes, or are rules of thumb that
say so where they stand; which parts there are was decided with the published rows at hand. jaxllm itself has not been timed on
GPUs: its predictions are what these constants make of what it computes and sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from jaxllm.config import Config
from jaxllm.config_errors import ConfigError
from jaxllm.plan.hardware import Gpu
from jaxllm.plan.megatron_step import MegatronStep
from jaxllm.plan.step_model import StepModel
from jaxllm.plan.step_parts import FITTED, Fitted, StepTime

Convention = Literal["jaxllm", "megatron"]
CONVENTIONS = get_args(Convention)


def estimate_step_time(
    config: Config, gpu: Gpu, gpus_per_host: int, convention: str = "jaxllm", fitted: Fitted = FITTED
) -> StepTime:
    """Predicts the train step of a resolved config.

    Args:
      gpus_per_host: devices are dealt to hosts in the mesh's order, replica and pipe slowest and tensor fastest. Between
        islands of parallel.replica the network is taken to be that between hosts; a slower one is not known here.
      convention: jaxllm or megatron, see the module. In Megatron's parallel.remat means what it is there if it is `full`, and
        is not read otherwise.
      fitted: other constants, to fit them.

    Raises:
      ConfigError: no such convention.
    """
    if convention not in CONVENTIONS:
        raise ConfigError(f"convention={convention} is not one of the choices: use {', '.join(CONVENTIONS)}.")
    model = MegatronStep if convention == "megatron" else StepModel
    return model(config, gpu, gpus_per_host, fitted).time()


def step_time_lines(step: StepTime) -> Iterator[str]:
    """A table for a terminal: of each term the seconds that show, their share of the step, and the seconds that do not."""
    yield f"{'term':<16}{'exposed s':>12}{'share':>8}{'hidden s':>12}"
    for name in dict.fromkeys((*step.terms_s, *step.hidden_s)):
        exposed_s = step.terms_s.get(name, 0.0)
        yield _line(name.replace("_", " "), exposed_s, exposed_s / step.step_s, step.hidden_s.get(name, 0.0))
    yield _line("step", step.step_s, 1.0, sum(step.hidden_s.values()))


def _line(name: str, exposed_s: float, share: float, hidden_s: float) -> str:
    return f"{name:<16}{exposed_s:>12.4f}{share:>8.1%}" + (f"{hidden_s:>12.4f}" if hidden_s else f"{'-':>12}")
