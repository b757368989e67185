"""Old name of jaxllm.machine.program_cache, kept for one version."""

from jaxllm.machine.program_cache import *  # noqa: F403
from jaxllm.machine.program_cache import _head as _head
