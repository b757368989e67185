"""What `import jaxllm` re-exports from rooms that import JAX."""

from jaxllm import notebook
from jaxllm.compile.inspect import inspect_config
from jaxllm.run import advisor
from jaxllm.run.loop import fit
from jaxllm.run.trainer import Trainer
from jaxllm.run_report import for_runs
from jaxllm.weights.load_model import open_model
from jaxllm.weights.pretrained import load_model

advisor.answers = for_runs
notebook.register()
