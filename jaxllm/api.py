"""What notebooks import; `import jaxllm` re-exports it."""

from jaxllm.train.trainer import Trainer

__all__ = ["Trainer"]
