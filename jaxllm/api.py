"""The public Python API. `import jaxllm` re-exports it."""

from jaxllm import notebook
from jaxllm.compile.inspect import inspect_config
from jaxllm.compile.plan import plan
from jaxllm.data.iterables import prepare
from jaxllm.inference.predict import evaluate, generate
from jaxllm.plan.estimate import estimate
from jaxllm.plan.inference_estimate import estimate_inference
from jaxllm.run import advisor
from jaxllm.run.loop import fit
from jaxllm.run.trainer import Trainer
from jaxllm.run_report import for_runs
from jaxllm.weights.load_model import LoadedModel, load_model, open_model

__all__ = [
    "LoadedModel",
    "Trainer",
    "estimate",
    "estimate_inference",
    "evaluate",
    "fit",
    "generate",
    "inspect_config",
    "load_model",
    "open_model",
    "plan",
    "prepare",
]

advisor.use(for_runs)
notebook.register()
