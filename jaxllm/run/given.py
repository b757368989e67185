"""What a Python program gives a Trainer in the place of the usual: documents or batches, a loss, an optimizer
(docs/extending.md).

The config that a run keeps has the value `documents` or `given` for each of them, so nothing else resumes the run.
"""

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from pydantic import ValidationError

from jaxllm.config import Config, ConfigError
from jaxllm.config.attention import packed_documents
from jaxllm.config.errors import one_sentence
from jaxllm.config.types import DOCUMENTS, GIVEN, NEEDS_DOCUMENTS
from jaxllm.cost_model.hardware import compute_capability
from jaxllm.parallel.parameters import parameter_table, trained
from jaxllm.train.build import Arrays, Batches, Given

INTEGERS, REQUIRED = ("tokens", "targets", "positions", "segments"), ("tokens", "targets", "mask")
KEPT = 8
"""Batches of an iterable that can be taken again: the queue reads two ahead, and Ctrl-C returns to the last step done."""


def adopted(config: Config, given: Given) -> Config:
    """`config` with the keys that say what is given; ConfigError if one contradicts that."""
    values, data = config.model_dump(mode="json"), config.data
    if given.batches is not None and given.documents is not None:
        raise ConfigError("batches= and documents= both say what to train on: leave one of them out.")
    if given.batches is not None and data.source != GIVEN and data.model_fields_set & {"source", "paths", "mixture"}:
        raise ConfigError(
            f"batches= takes the place of data.{'mixture' if data.mixture else f'source={data.source}'}: set "
            f"data.source=given, without paths and mixture."
        )
    read_here = any(part.source == DOCUMENTS for part in data.sources)
    if given.documents is not None:
        if not read_here and data.model_fields_set & {"source", "paths", "mixture"}:
            named = "mixture" if data.mixture else f"source={data.source}"
            raise ConfigError(f"documents= takes the place of data.{named}: set data.source=documents, or that of a part.")
        values["data"] |= {} if read_here else {"source": DOCUMENTS}
    elif read_here:
        raise ConfigError(NEEDS_DOCUMENTS)
    if given.batches is None and data.source == GIVEN:
        raise ConfigError("data.source=given needs batches: call jaxllm.Trainer or jaxllm.fit with batches=, or name a text.")
    if given.batches is not None:
        values["data"] |= {"source": GIVEN}
    for argument, value, name, section, field in (
        ("loss", given.loss, "train", config.train, "loss"),
        ("optimizer", given.optimizer, "optimizer", config.optimizer, "name"),
    ):
        if value is not None and field in section.model_fields_set and (named := getattr(section, field)) != GIVEN:
            raise ConfigError(f"{argument}= takes the place of {name}.{field}={named}: leave that out.")
    if given.loss is not None:
        values["train"] |= {"loss": GIVEN}
    if given.optimizer is not None:
        values["optimizer"] |= {"name": GIVEN, "moments": _moments(config, given.optimizer)}
    try:
        return config if all(value is None for value in given) else Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(one_sentence(error, Config)) from None


def _moments(config: Config, optimizer: optax.GradientTransformation) -> float:
    """Float32 numbers in the optimizer's state for each parameter."""
    _, table = parameter_table(config)
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), trained(table, table))
    state = jax.eval_shape(optimizer.init, params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / (4 * sum(p.size for p in jax.tree.leaves(params)))


def require_same_optimizer(folder: Path | str, meta: Mapping[str, Any], config: Config) -> None:
    """Refuses a checkpoint that another optimizer saved, whose moments mean something else."""
    # Older checkpoints lack the key.
    saved, wanted = meta["config"]["optimizer"].get("name", "adamw"), config.optimizer.name
    if saved != wanted:
        raise ConfigError(
            f"{folder} has the state of optimizer.name={saved}, not {wanted}: set optimizer.name={saved}, or begin a new "
            f"run.dir from its weights with train.init_from."
        )


class GivenBatches:
    """The caller's batches, checked, by step.

    Args:
      config: resolved.
      batches: function from the number of steps done to a batch, or an iterable of the batches of the steps in order, of which
        those of steps that a resumed run has done are read and dropped.
      device: one of the devices, whose kind says for how many documents attention is compiled.
    """

    def __init__(self, config: Config, batches: Batches, device: jax.Device):
        self._config, self._most_documents = config, packed_documents(config, compute_capability(device))
        self._function: Callable[[int], Arrays] = batches if callable(batches) else self._next_of(iter(batches))
        self._form: dict[str, Any] = {}

    def reader(self, step: int) -> Callable[[np.ndarray], Arrays]:
        """rows -> their arrays, of the batch of the step that follows `step` steps. Raises as `at`."""
        batch = self.at(step)
        return lambda rows: {name: array[rows] for name, array in batch.items()}

    def at(self, step: int) -> dict[str, np.ndarray]:
        """The batch of the step that follows `step` steps: arrays [sequence, position], or [sequence, ...].

        Raises:
          ConfigError: it is not what the config asks for, or there is none. The sentence names the array.
        """
        found = self._function(step)
        if not isinstance(found, Mapping):
            raise self._refusal(step, f"is {type(found).__name__}, not a dict of arrays")
        missing = [name for name in REQUIRED if name not in found]
        if missing:
            raise self._refusal(step, f"has no {missing[0]}: it needs tokens, targets and mask")
        batch = {name: self._array(step, name, found[name]) for name in found}
        if "positions" not in batch:
            batch["positions"] = np.broadcast_to(np.arange(batch["tokens"].shape[1], dtype=np.int32), batch["tokens"].shape)
        self._check_values(step, batch)
        form = {name: (str(array.dtype), array.shape[1:]) for name, array in batch.items()}
        self._form = self._form or form
        if form != self._form:
            names = sorted(name for name in form.keys() | self._form.keys() if form.get(name) != self._form.get(name))
            raise self._refusal(step, f"differs from the first in {names[0]}: all need the same arrays, dtypes and shapes")
        return batch

    def _next_of(self, batches: Any) -> Callable[[int], Arrays]:
        kept: deque[tuple[int, Arrays]] = deque(maxlen=KEPT)
        read = 0

        def at(step: int) -> Arrays:
            nonlocal read
            while read <= step:
                try:
                    kept.append((read, next(batches)))
                except StopIteration:
                    steps = f"after {read} batches, and train.steps={self._config.train.steps}"
                    raise ConfigError(f"batches= ended {steps}: give more, or train fewer steps.") from None
                read += 1
            if step < kept[0][0]:
                raise ConfigError(f"batches= cannot return to step {step + 1}: give a function of the step, not an iterable.")
            return kept[step - kept[0][0]][1]

        return at

    def _array(self, step: int, name: str, value: Any) -> np.ndarray:
        array = np.asarray(value)
        B, S = self._config.phase_at(step).sequences, self._config.train.sequence_length
        needs, fits = f"[{B}, {S}]", array.shape[:2] in ((B, S), (B,))
        if name in (*INTEGERS, "mask"):
            fits = array.shape == (B, S)
        elif name == "images" and (vision := self._config.model.vision) is not None:
            needs = f"[{B}, images, {', '.join(map(str, vision.pixels))}]"
            fits = (*array.shape[:1], *array.shape[2:]) == (B, *vision.pixels)
        if not fits:
            raise self._refusal(step, f"has {name} of shape {list(array.shape)}: it needs {needs}")
        wanted = "integers" if name in INTEGERS else "bool" if name == "mask" else "numbers"
        kinds = {"integers": "iu", "bool": "b", "numbers": "biuf"}[wanted]
        if array.dtype.kind not in kinds and not (wanted == "numbers" and jax.numpy.issubdtype(array.dtype, np.floating)):
            raise self._refusal(step, f"has {name} of {array.dtype}: it needs {wanted}")
        if array.dtype.kind in "iu":
            if array.size and not (array.min() >= -(2**31) and array.max() < 2**31):
                raise self._refusal(step, f"has {name} that do not fit into 32 bits")
            return array.astype(np.int32)
        return array.astype(np.float32) if array.dtype == np.float64 else array

    def _check_values(self, step: int, batch: dict[str, np.ndarray]) -> None:
        vocab_size = self._config.model.vocab_size
        for name, ids in (("tokens", batch["tokens"]), ("targets", batch["targets"][batch["mask"]])):
            if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
                bad = ids[(ids < 0) | (ids >= vocab_size)].flat[0]
                raise self._refusal(step, f"has the id {bad} in {name}, and model.vocab_size={vocab_size}")
        if (vision := self._config.model.vision) is not None:
            places = (batch["tokens"] == vision.image_token_id).sum(1).max(initial=0)
            if places > (room := batch["images"].shape[1] * vision.tokens_per_image if "images" in batch else 0):
                raise self._refusal(step, f"has {places} image tokens in a sequence, and images for {room}: give more images")
        if (segments := batch.get("segments")) is None:
            return
        if not self._config.data.mask_documents:
            raise self._refusal(step, "has segments, and data.mask_documents=false: leave them out, or set it to true")
        most = 1 + int((segments[:, 1:] != segments[:, :-1]).sum(1).max(initial=0))
        if self._most_documents is not None and most > self._most_documents:
            raise self._refusal(step, f"has {most} documents in a sequence: set data.max_documents to {most} or more")

    def _refusal(self, step: int, what: str) -> ConfigError:
        return ConfigError(f"The batch of step {step + 1} from batches= {what}.")
