"""What notebooks import; `import jaxllm` re-exports it."""

from jaxllm.plan.estimate import estimate
from jaxllm.planner import plan
from jaxllm.train.trainer import Trainer

__all__ = ["Trainer", "estimate", "plan"]
