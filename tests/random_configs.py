"""Random configs over every key: a small one that is valid, with some keys drawn from what is likely, or strange."""

import random
import types
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from jaxllm.config import Config
from jaxllm.config.model_spec import LORA_TARGETS, MATMUL_OUTPUTS
from jaxllm.config.types import ATTENTION_RESULTS, BLOCK_INPUT

WHOLE = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64)
REAL = (1e-30, 1e-8, 1e-3, 0.1, 0.5, 0.9, 0.999, 1.0, 2.0, 6, 1e4, 1e30, 1e38, 1e300)
STRANGE: tuple[Any, ...] = (
    *(0, -1, 7, 1000, 2**20, 2**30, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**30, 1.5, True, None),
    *("x", "", [], {}, [[]], float("nan"), float("inf"), "a\nb", "a\x1b[2J"),
)
MOST_CHANGES = 12


def remat(draw: random.Random) -> Any:
    if draw.random() < 0.6:
        return draw.choice(["none", "selective", "full", "offload"])
    names = draw.sample([BLOCK_INPUT, *MATMUL_OUTPUTS], draw.randint(0, 6))
    found = {name: draw.choice(["keep", "recompute", "offload"]) for name in names}
    if draw.random() < 0.5:
        found |= dict.fromkeys(ATTENTION_RESULTS, draw.choice(["keep", "offload"]))
    return found


def rope_scaling(draw: random.Random) -> dict[str, Any]:
    found = {"rope_type": draw.choice(["llama3", "linear", "yarn"]), "factor": draw.choice([0.5, 1.0, 2.0, 8.0])}
    if draw.random() < 0.7:
        found["original_max_position"] = draw.choice([8, 16, 64, 8192])
    if draw.random() < 0.3:
        key = draw.choice(["low_freq_factor", "high_freq_factor", "beta_slow", "beta_fast", "attention_factor"])
        found[key] = draw.choice([0.5, 1.0, 2.0, 32.0])
    return found


def lora(draw: random.Random) -> dict[str, Any]:
    targets = draw.sample(LORA_TARGETS, draw.randint(1, len(LORA_TARGETS)))
    return {"rank": draw.choice([1, 3, 8, 64, 256]), "alpha": draw.choice([1e-5, 1.0, 16.0]), "targets": targets}


def mixture(draw: random.Random) -> list[dict[str, Any]]:
    sizes = range(draw.randint(1, 3))
    return [{"name": f"s{n}", "source": "files", "paths": "words.txt", "weight": draw.choice([0.3, 1, 5])} for n in sizes]


def schedule(*steps: list[int]) -> Callable[[random.Random], list[list[int]]]:
    return lambda draw: [[draw.choice([64, 128]) * n, size] for n, size in enumerate(draw.choice(steps), start=1)]


LIKELY: dict[str, Any] = {
    **{"model.num_layers": (1, 2, 3, 4, 5, 8), "model.hidden_size": (8, 16, 32, 36, 48, 64), "model.lora": lora},
    **{"model.intermediate_size": (1, 8, 32, 33, 48, 64, 96), "model.num_heads": (1, 2, 3, 4, 6, 8), "model.name": (None,)},
    **{
        "model.num_kv_heads": (1, 2, 3, 4, None),
        "model.head_dim": (1, 2, 4, 6, 8, 16, None),
        "model.rope_scaling": rope_scaling,
    },
    **{"model.vocab_size": (256, 257, 260, 300, 512), "model.sliding_window": (None, 1, 2, 4, 8, 16, 100)},
    **{f"parallel.{axis}": (1, 1, 2, 4, 8, 3) for axis in ("pipe", "context", "tensor", "replica")},
    **{"parallel.data": ("auto", "auto", 1, 2, 4, 8), "parallel.virtual_stages": (1, 2, 3, 4), "parallel.remat": remat},
    **{"data.paths": ("words.txt", "absent"), "data.mixture": mixture, "data.tokenizer": (None, "bytes", "absent")},
    **{"data.source": ("files", "python_stdlib", "chat", "given"), "data.chat_template": (None,), "data.cache_dir": (None,)},
    **{"train.sequence_length": (1, 2, 4, 8, 15, 16, 24, 32, 64), "train.steps": (1, 2, 3, 4, 10)},
    **{"train.global_batch_sequences": (1, 2, 4, 6, 8, 12, 16, 24, 32), "train.microbatch_sequences": (None, 1, 2, 3, 4, 8)},
    **{"train.batch_schedule": schedule([8], [16, 32], [4, 8, 16]), "train.length_schedule": schedule([8], [4, 8], [1, 2])},
    **{"train.batch_grows_to": (None, 16, 32, 64), "train.init_from": (None,), "train.init_adapter": (None,)},
    "train.freeze": ([], ["embedding"], ["layers.*.mlp.*"], ["layers"], ["head"], ["*"], ["x"], ["*norm*"]),
    **{
        "log.profile_steps": (None, [1, 2], [2, 1]),
        "log.sinks": ([],),
        "log.prometheus_file": (None,),
        "log.wandb_tags": ([], ["a"]),
    },
    **{f"log.{key}": (None,) for key in ("wandb_project", "mlflow_experiment")},
    **{"run.dir": ("run",), "run.cpu_devices": (None, 8), "run.compilation_cache": ("off",)},
    **{"run.deterministic": (False,), "checkpoint.store": (None,), "log.tensorboard": (False,)},
}
KEYS = {
    f"{name}.{key}": field for name, part in Config.model_fields.items() for key, field in part.annotation.model_fields.items()
}  # type: ignore[union-attr]


def value_of(draw: random.Random, key: str, kind: Any) -> Any:
    """A value of the key, whose annotation is `kind`."""
    if (likely := LIKELY.get(key)) is not None:
        return likely(draw) if callable(likely) else draw.choice(likely)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return draw.choice(inner)
    if origin is Annotated:
        return value_of(draw, key, inner[0])
    if origin in (Union, types.UnionType):
        return value_of(draw, key, draw.choice(inner))
    return draw.choice({bool: (True, False), int: WHOLE, float: REAL}.get(kind, ("x", None)))


def random_config(seed: str) -> dict[str, Any]:
    """A recipe, mostly for at most eight devices."""
    draw = random.Random(seed)
    found: dict[str, dict[str, Any]] = {section: {} for section in Config.model_fields}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "vocab_size": draw.choice([256, 259, 512])}
    found["model"] |= {**sizes, "num_layers": draw.choice([1, 2, 4, 8]), "num_kv_heads": draw.choice([1, 2, 4])}
    found["model"]["compute_dtype"] = draw.choice(["float32", "bfloat16"])
    batch = draw.choice([8, 16, 32])
    found["train"] |= {"steps": 2, "sequence_length": 16, "global_batch_sequences": batch, "microbatch_sequences": 1}
    found["data"] = {"source": "files", "paths": "words.txt", "packing": draw.choice(["concat", "best_fit"])}
    for axis in draw.choices(["pipe", "context", "tensor", "replica", "data"], k=draw.randint(0, 3)):
        if axis != "data":
            found["parallel"][axis] = 2 * found["parallel"].get(axis, 1)
    for key in draw.sample(list(KEYS), min(MOST_CHANGES, int(draw.expovariate(0.3)))):
        section, name = key.split(".")
        found[section][name] = draw.choice(STRANGE) if draw.random() < 0.06 else value_of(draw, key, KEYS[key].annotation)
    return found


def random_configs(seed: str, count: int) -> Iterator[dict[str, Any]]:
    return (random_config(f"{seed} {number}") for number in range(count))
