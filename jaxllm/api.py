"""The public Python API. `import jaxllm` re-exports it."""

from jaxllm import notebook
from jaxllm.checkpoint.load_model import LoadedModel, load_model, open_model
from jaxllm.commands.plan import plan
from jaxllm.commands.predict import evaluate, generate
from jaxllm.compile.inspect import inspect_config
from jaxllm.data.iterables import prepare
from jaxllm.plan.estimate import estimate
from jaxllm.plan.inference_estimate import estimate_inference
from jaxllm.train.loop import fit
from jaxllm.train.trainer import Trainer

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

notebook.register()
