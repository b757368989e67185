"""The public Python API. `import jaxllm` re-exports it."""

from jaxllm import notebook
from jaxllm.plan.estimate import estimate
from jaxllm.planner import plan
from jaxllm.predict import evaluate, generate
from jaxllm.report import inspect_config
from jaxllm.train.loop import fit
from jaxllm.train.opened import LoadedModel, load_model, open_model
from jaxllm.train.trainer import Trainer

__all__ = [
    "LoadedModel",
    "Trainer",
    "estimate",
    "evaluate",
    "fit",
    "generate",
    "inspect_config",
    "load_model",
    "open_model",
    "plan",
]

notebook.register()
