"""Remat policies worth trying: of a block's named tensors some are kept, some wait on the host, and the rest is recomputed.

    ladder = Ladder(model)                              of a config's StepModel; configs with the same layer share it
    for rung in ladder.on_device: ...                   fastest first: with less and less kept
    for rung in ladder.to_host(model): ...              those with tensors on the host, fastest first

A rung is a mapping that no other of its family (FAMILY) beats in bytes on the device, bytes on the host and seconds together.
Seconds are what the step-time model says that recomputing costs, with the transfers that it repeats, and copying what is held
into a loop's stack or to the host.
Bytes follow from cost_model/activations.py. Sums over a block's parts are exact: what one part costs does not depend on the
others. Rungs that differ by less than GRAIN count as equal, so that dozens are left of thousands.
"""

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum as sum  # As in step_parts.py.
from operator import itemgetter
from typing import Any

from jaxllm.config import ATTENTION_RESULTS, BLOCK_INPUT, Remat
from jaxllm.config.remat_policy import policy_of
from jaxllm.config.types import block_tensors
from jaxllm.cost_model.activations import bytes_per_token_and_layer
from jaxllm.cost_model.step_model import StepModel

GRAIN = 1 / 256
"""Share of a layer's recomputation, and of the bytes of all its tensors, that makes no difference between two rungs: 0.1% of a
step at most."""
PRODUCTS = ("mlp_gate", "mlp_up")
FAMILY = (*PRODUCTS, "attention_out")
"""Tensors by which XLA's other buffers differ: whether each is recomputed."""
PARTS = (("query", "key", "value"), ("attention_output",), ("attention_out",), PRODUCTS, ("mlp_down",), (BLOCK_INPUT,))
"""Tensors whose cost is joint, because tensor ranks gather their input once; those of the largest cost nothing alone."""
Actions = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Rung:
    remat: Remat
    kept: float
    """Bytes on the device per layer and microbatch."""
    offloaded: float
    """Bytes on the host per layer and microbatch."""
    spent_s: float
    """Seconds per layer and microbatch: of recomputation, and of copies into a loop's stack."""
    again_s: float
    """Those of recomputation."""
    whole: float
    """Bytes of all tensors of a layer and microbatch."""
    family: tuple[bool, ...]
    """Whether each of FAMILY is recomputed."""


class LeastStep(StepModel):
    """A step that is never slower than the same with less kept: nothing is copied into a loop's stack. With remat=selective it
    also recomputes nothing, so that no mapping is faster."""

    def stacks_s(self) -> float:
        return 0.0


def layer_of(model: StepModel) -> tuple:
    """What a ladder depends on, of all configs of a search: configs with the same layer have the same ladder."""
    return model.t, model.c, model.rows, model.rings_tensor, model.P > 1


class Ladder:
    """The rungs of configurations that have the same layer.

    Args:
      own: of layers with arrays of their own: their products are kept, nothing waits on the host, and without a pipeline, whose
        ring they wait in, nothing is copied.
    """

    def __init__(self, model: StepModel, own: bool = False):
        self.model, self.own = model, own
        self.tokens = model.rows * model.c
        self.names = block_tensors(model.model)

    @cached_property
    def rungs(self) -> tuple[Rung, ...]:
        """All that no other beats, fastest first."""
        every = self._of_part(PARTS[0])
        for part in PARTS[1:]:
            options = self._of_part(part)
            families: dict[tuple[bool, ...], list] = {}
            for one, option in itertools.product(every, options):
                actions = one[4] + option[4]
                sums = (a + b for a, b in zip(one[:4], option[:4], strict=True))
                families.setdefault(_family(dict(actions)), []).append((*sums, actions))
            every = [one for alike in families.values() for one in _undominated(alike, self.grain_s, GRAIN * self.whole)]
        rungs = []
        for kept, out, spent_s, again_s, actions in sorted(every, key=lambda one: (one[2], one[0], one[1])):
            done = dict(actions)
            rungs.append(Rung(_named(done, self.names), kept, out, spent_s, again_s, self.whole, _family(done)))
        return tuple(rungs)

    @cached_property
    def grain_s(self) -> float:
        """Seconds that make no difference."""
        return GRAIN * sum(max(again_s for _, _, _, again_s, _ in self._of_part(part)) for part in PARTS)

    @cached_property
    def on_device(self) -> tuple[Rung, ...]:
        """Those with nothing on the host, fastest first."""
        return tuple(rung for rung in self.rungs if not rung.offloaded)

    def to_host(self, model: StepModel, more: Sequence[Rung] = ()) -> list[Rung]:
        """Those with tensors on the host, and `more`, fastest first beside the compute and the other copies of `model`, whose
        tick() has set free_s; of equal ones those that offload less first."""
        layers = model.config.chunk_layers
        out_s, in_s = (free_s / layers for free_s in model.free_s)
        out, back = 1 / model.activations_out_bytes_per_s, 1 / model.one_way

        def seconds(rung: Rung) -> tuple[int, float]:
            size = rung.offloaded
            spent_s = rung.spent_s + max(0.0, size * out - out_s) + max(0.0, size * back - in_s - rung.again_s)
            return round(spent_s / self.grain_s), size

        return sorted((*(rung for rung in self.rungs if rung.offloaded), *more), key=seconds)

    @cached_property
    def bytes(self) -> dict[str, float]:
        """Bytes of each name per layer and microbatch, without those that attention does not have."""
        policy = policy_of("selective", self.model.model)
        sizes = bytes_per_token_and_layer(policy, self.model.config, blockwise=self.model.is_blockwise)
        return {name: self.tokens * size for name, size in sizes.kept.items()}

    @cached_property
    def whole(self) -> float:
        return sum(self.bytes.values())

    def rung_of(self, remat: Remat) -> Rung:
        """Any policy but `none` as a rung."""
        policy = policy_of(remat, self.model.model)
        actions = dict.fromkeys(self.names, "recompute")
        actions |= dict.fromkeys(policy.keep, "keep") | dict.fromkeys(policy.offload, "offload")
        return Rung(remat, *self._costs(actions), self.whole, _family(actions))

    def _of_part(self, part: tuple[str, ...]) -> list[tuple[float, float, float, float, Actions]]:
        """(bytes kept, bytes offloaded, seconds, seconds of recomputation, actions) of all that can be done with a part."""
        names = [name for name in part if name in self.bytes]
        allowed = ("keep", "recompute") if self.own else ("keep", "recompute", "offload")
        found = []
        for actions in itertools.product(allowed, repeat=len(names)):
            chosen = dict(zip(names, actions, strict=True))
            if chosen.get(BLOCK_INPUT) == "recompute" or (self.own and part == PRODUCTS and "recompute" in actions):
                continue
            if "attention_output" in chosen:
                chosen["attention_lse"] = chosen["attention_output"]
            found.append((*self._costs(chosen), tuple(chosen.items())))
        return found

    def _costs(self, actions: Mapping[str, str]) -> tuple[float, float, float, float]:
        """(bytes kept, bytes offloaded, seconds, seconds of recomputation) of these actions, per layer and microbatch."""
        kept, out = (
            sum(self.bytes.get(name, 0.0) for name, action in actions.items() if action == where)
            for where in ("keep", "offload")
        )
        copied_s = 0.0 if self.own and self.model.P == 1 else self.model.moved_s(2 * (kept + out))
        again = {name for name, action in actions.items() if action == "recompute"}
        if not again:
            return kept, out, copied_s, 0.0
        repeats_attention = self.model.is_blockwise and bool(again & set(ATTENTION_RESULTS))
        again_s = self.model.recomputation_s(again & set(self.model.matmuls), repeats_attention)
        return kept, out, again_s + copied_s, again_s


def _family(actions: Mapping[str, str]) -> tuple[bool, ...]:
    return tuple(actions.get(name) == "recompute" for name in FAMILY)


def _named(actions: Mapping[str, Any], names: tuple[str, ...]) -> Remat:
    """The policy that does this: its name if it has one, else a mapping with what is not recomputed. The last output of a block
    is named in any case, as not every model has it."""
    done = set(actions.values())
    if done <= {"keep"}:
        return "selective"
    if done <= {"offload"}:
        return "offload"
    others = {action for name, action in actions.items() if name != BLOCK_INPUT}
    if others == {"recompute"} and actions[BLOCK_INPUT] == "keep":
        return "full"
    return {
        name: actions[name]
        for name in names
        if name in actions
        and (actions[name] != "recompute" or name == "mlp_down")
        and (name, actions[name]) != (BLOCK_INPUT, "keep")
    }


def _undominated(options: list, grain_s: float, grain_bytes: float) -> list:
    """The options (bytes kept, bytes offloaded, seconds, ...) that no other beats in all three; of equal ones that with less
    kept."""

    def grains(option: tuple) -> tuple[int, int, float]:
        return round(option[2] / grain_s), round(option[1] / grain_bytes), option[0]

    left: list[tuple] = []
    # A staircase: of ascending bytes offloaded, the fewest bytes kept with at most as many.
    outs: list[int] = []
    keeps: list[float] = []
    for (_, out, kept), option in sorted(((grains(option), option) for option in options), key=itemgetter(0)):
        at = bisect_right(outs, out)
        if at and keeps[at - 1] <= kept:
            continue
        left.append(option)
        end = at
        while end < len(keeps) and keeps[end] >= kept:
            end += 1
        outs[at:end], keeps[at:end] = [out], [kept]
    return left
