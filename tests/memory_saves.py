"""Saves states in memory and finds them again, for tests."""

import jax

from jaxllm.checkpoint.files import describe_run
from jaxllm.checkpoint.memory import MemoryCheckpoints
from jaxllm.config import CheckpointConfig


def opened(folder, state, absent_hosts=0):
    """MemoryCheckpoints of the run directory `folder`, which has its memory in folder/memory."""
    (folder / "memory").mkdir(parents=True, exist_ok=True)
    return MemoryCheckpoints(folder, CheckpointConfig(memory_dir=str(folder / "memory")), state, absent_hosts)


def save(memory, config, step, state):
    """Returns when all is written."""
    memory.save(step, state, describe_run(config, step, "text"))
    memory.wait()


def found_again(folder, config, state, step=3):
    """The state as a later start finds it."""
    save(opened(folder, state), config, step, state)
    return opened(folder, state).find(after=None)


def layout(state, shardings):
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)
