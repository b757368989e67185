"""The space of the search (jaxllm/plan/space.py) in one list, with the named remat policies."""

import itertools

from jaxllm.cost_model.hosts import choose_gpus_per_host
from jaxllm.plan.space import groups, meshes, why_not


def choices_of(config, gpus, gpus_per_host=None, *, keep=(), across_hosts=False):
    """Every choice that divides, in a fixed order."""
    per_host, _ = choose_gpus_per_host(gpus, gpus_per_host)
    for mesh in meshes(config, gpus, keep):
        if why_not(config, mesh, per_host, across_hosts) is None:
            for group in groups(config, mesh, per_host, keep):
                for state, remat, microbatch in itertools.product(group.offload_states, group.remats, group.microbatches):
                    yield group.choice(remat, microbatch, state)


def space(config, gpus, **options):
    """The same as resolved configs."""
    return (choice.applied_to(config) for choice in choices_of(config, gpus, **options))
