"""`jaxllm lm-eval`: the tasks of EleutherAI's lm-evaluation-harness, by its own code, on any mesh (extra lm-eval).

    import lm_eval
    from jaxllm.inference.lm_eval import JaxLLM

    results = lm_eval.simple_evaluate(model=JaxLLM("models/mine", ["parallel.tensor=2"]), tasks=["arc_easy"])

The adapter answers the harness's three kinds of requests as its own HFLM does with transformers
(https://github.com/EleutherAI/lm-evaluation-harness/blob/main/docs/model_guide.md).
"""

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import redirect_stdout
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, make_disjoint_window, make_table

from jaxllm.config import ConfigError
from jaxllm.cost_model.inference_memory import SMALLEST_PROMPT, bucket, evaluation_rows, rooms
from jaxllm.data.chat import ChatTemplate, load_chat_template
from jaxllm.inference import predict
from jaxllm.inference.cache import attention_of, look_up
from jaxllm.inference.generate import Generator, Sampling, complete, mesh_of
from jaxllm.mesh.axes import DATA
from jaxllm.model.layers import Ops
from jaxllm.model.llama import Llama
from jaxllm.model.loss import VocabularySlice, cut_positions, joined_positions, scores
from jaxllm.weights.load_model import KEY
from jaxllm.weights.weights import Adapters, find_weights

log = logging.getLogger(__name__)
USUAL_LENGTH = 2048
"""Tokens of a text at most, if the model does not say; HFLM's."""
NEW_TOKENS = 256
"""New tokens at most, if the task does not say; HFLM's."""
NEW_TOKENS_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
PROMPTS_AT_ONCE = 16
CHUNK_TOKENS = 4096
"""Tokens of all rows whose logits exist at once."""
MOST_ROWS = 8
"""Rows per data rank of one call on CPU; accelerators take evaluation_rows."""
UNUSED = {
    "repetition_penalty": (1, "penalties"),
    "no_repeat_ngram_size": (0, "penalties"),
    "min_p": (0, "min_p"),
    "num_beams": (1, "beams"),
}
"""Options of tasks that change the answers and are not supported: their values without effect, and what is lacking."""


class Scorer:
    """A model with its scoring programs, one for each power of two of positions. Parameters may have any sharding: the compiler
    partitions the work accordingly, rows over `data`.

    Args:
      model: its parameters are used in their dtype, cast to the compute dtype in each call.
    """

    def __init__(self, model: Llama):
        graph, self._params = nnx.split(model)
        mesh = mesh_of(self._params)
        self._ranks = 1 if mesh is None else mesh.shape[DATA]
        self._on_cpu = jax.default_backend() == "cpu"
        by_rows, whole = (None, None) if mesh is None else (NamedSharding(mesh, PartitionSpec(d)) for d in (DATA, None))

        def program(params, ids_BS, targets_BS):
            if by_rows is not None:
                ids_BS = jax.lax.with_sharding_constraint(ids_BS, by_rows)
            return score_tokens(nnx.merge(graph, params), ids_BS, targets_BS)

        self._program = jax.jit(program, out_shardings=whole)

    def __call__(self, pairs: Sequence[tuple[np.ndarray, int]]) -> list[tuple[float, bool]]:
        """(log-probability of the last tokens of each text, in nats, whether each of them is the likeliest).

        Args:
          pairs: (ids, how many of the last are scored: at least 1, at most all but the first). Texts of similar length belong
            together: all have as many positions as the longest, rounded up to a power of two.
        """
        S = bucket(max(len(ids) for ids, _ in pairs) - 1, SMALLEST_PROMPT)
        B = self._ranks * (MOST_ROWS if self._on_cpu else bucket(evaluation_rows(S)))
        found: list[tuple[float, bool]] = []
        for first in range(0, len(pairs), B):
            some = pairs[first : first + B]
            ids_BS, targets_BS = np.zeros((B, S), np.int32), np.zeros((B, S), np.int32)
            for row, (ids, _) in enumerate(some):
                ids_BS[row, : len(ids) - 1], targets_BS[row, : len(ids) - 1] = ids[:-1], ids[1:]
            losses_BS, greedy_BS = map(np.asarray, self._program(self._params, ids_BS, targets_BS))
            for row, (ids, count) in enumerate(some):
                last = slice(len(ids) - 1 - count, len(ids) - 1)
                found.append((-float(losses_BS[row, last].sum()), bool(greedy_BS[row, last].all())))
        return found


def score_tokens(
    model: Llama, ids_BS: Int[Array, "B S"], targets_BS: Int[Array, "B S"]
) -> tuple[Float[Array, "B S"], Bool[Array, "B S"]]:
    """(-log p(target) in nats, whether the target is the likeliest id) of each position, float32 and bool."""
    config, (B, S) = model.config, ids_BS.shape
    attend = attention_of(rooms(config, S), S)
    h_BSD, head_VD = model.hidden(ids_BS, ops=Ops(attend=attend, look_up=look_up)), model.head_matrix()
    ids_V = jnp.arange(head_VD.shape[0])

    def chunk(inputs):
        h_BCD, targets_BC = inputs
        logits_BCV, _, log_z_BC, target_BC = scores(h_BCD, head_VD, targets_BC, ids_V, config.vocab_size, VocabularySlice())
        return log_z_BC - target_BC, logits_BCV.argmax(axis=-1) == targets_BC

    cut = partial(cut_positions, chunks=min(S, -(-B * S // CHUNK_TOKENS)))
    losses, greedy = jax.lax.map(chunk, (cut(h_BSD), cut(targets_BS)))
    return joined_positions(losses, S), joined_positions(greedy, S)


class Conversation(str):
    """A text that the chat template has written. The type stays with the text in the harness's cache of requests, which another
    process reads without a call of apply_chat_template.
    """


class JaxLLM(TemplateLM):
    """A model for lm-evaluation-harness.

    Args:
      model, overrides, tokenizer, adapter, say: as in predict.evaluate. `overrides` may be one text with spaces between.
      max_length: tokens of a text at most; the rest is cut on the left. Default: what the model supports, or 2,048.
      batch_size: prompts that are continued at once. default: 16.
      others: what the harness passes to every model (device, max_batch_size), without effect here.

    Raises:
      ConfigError: as predict.evaluate.
    """

    def __init__(
        self,
        model: str | Path,
        overrides: str | Sequence[str] = (),
        *,
        tokenizer: str | None = None,
        adapter: Adapters = (),
        max_length: int | None = None,
        batch_size: int | str | None = None,
        say: Callable[[str], None] = lambda line: None,
        **others: Any,
    ):
        super().__init__()
        overrides = overrides.split() if isinstance(overrides, str) else overrides
        home = find_weights(KEY, model, adapters=adapter).outline
        self._home, self._vocab_size = home, home.model["vocab_size"]
        self._reader = predict.tokenizer_of(home, tokenizer, say)
        self.max_length = max_length or predict.longest_of(home) or USUAL_LENGTH
        self._prompts = int(batch_size) if batch_size and str(batch_size).isdecimal() else PROMPTS_AT_ONCE
        loaded = predict.open_model_for(model, overrides, predict.divisible(self.max_length, overrides), adapter)
        predict.say_model(say, loaded)
        self._generator = Generator(loaded.model)
        self._scorer = Scorer(self._generator.model)

    @property
    def eot_token_id(self) -> int:
        return self.prefix_token_id if self._reader.eos_id is None else self._reader.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context."""
        for token in (self._reader.bos_id, self._reader.eos_id):
            if token is not None:
                return token
        raise ConfigError(
            f"The tokenizer {self._reader.name} has no BOS or EOS token, which lm-eval needs before a text: name one in its "
            f"tokenizer_config.json."
        )

    @property
    def tokenizer_name(self) -> str:
        """Name by which the harness finds its cached requests to this chat template. Texts of the harness's other models
        are no Conversations, and folders of one name may have different templates.

        Raises:
          ConfigError: the model has no chat template.
        """
        template = self._template
        written_by = repr((template.source, sorted(template.special_tokens.items())))
        return f"{self._reader.name}-jaxllm-{hashlib.sha256(written_by.encode()).hexdigest()[:16]}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text. Text that spells a special token is that token, as chat templates write it."""
        if add_special_tokens is False:
            ((ids, _),) = self._reader.encode_with_starts([string], parse_special=True)
        else:
            ids = self._reader.encode(string, parse_special=True)
        predict.require_ids(ids, self._reader, self._vocab_size)
        return ids.tolist()

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._template.source if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text = self._template.render(chat_history, add_generation_prompt=add_generation_prompt)
        if not add_generation_prompt:
            # The task begins the answer, and the model continues it: without the end of its turn.
            begun = chat_history[-1]["content"].strip()
            text = text[: text.rindex(begun) + len(begun)]
        return Conversation(text)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        windows, counts = [], []
        for (text,) in (request.args for request in requests):
            cut = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1)
            found = [(None, *make_disjoint_window(window)) for window in cut]
            windows += found
            counts.append(len(found))
        scored = iter(self._loglikelihood_tokens(windows))
        totals = [sum(next(scored)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        answers: dict[int, tuple[float, bool]] = {}
        for count in (len(ending) for *_, ending in requests):
            if not 1 <= count <= self.max_length:
                raise ConfigError(
                    f"A task asks for the score of {count} tokens, and {self._home.description} scores 1 to {self.max_length} "
                    f"at once: leave out the task."
                )
        # Of a context of white space alone the harness leaves nothing.
        whole = [(context or [self.prefix_token_id]) + ending for _, context, ending in requests]
        texts = [np.array(ids) for ids in self._cut(whole, self.max_length + 1)]
        for some in together(range(len(requests)), lambda number: bucket(len(texts[number]))):
            pairs = [(texts[number], len(requests[number][2])) for number in some]
            for number, answer in zip(some, self._scorer(pairs), strict=True):
                answers[number] = answer
                if requests[number][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], answer)
        return [answers[number] for number in range(len(requests))]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        answers: dict[int, str] = {}
        encoded = [self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests]

        def is_conversation(number: int) -> bool:
            return isinstance(requests[number].args[0], Conversation)

        def alike(number: int) -> Hashable:
            return repr(requests[number].args[1]), is_conversation(number), bucket(len(encoded[number]))

        for some in together(range(len(requests)), alike):
            for first in range(0, len(some), self._prompts):
                numbers = some[first : first + self._prompts]
                # A sample depends on the seed and its row: batches of one seed would repeat the samples of a repeated request.
                template = self._template if is_conversation(numbers[0]) else None
                prompts, options = [encoded[number] for number in numbers], requests[numbers[0]].args[1]
                texts = self._continue(prompts, options, numbers[0], template)
                for number, text in zip(numbers, texts, strict=True):
                    answers[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return [answers[number] for number in range(len(requests))]

    def _continue(
        self, prompts: list[list[int]], options: dict[str, Any], seed: int, template: ChatTemplate | None
    ) -> list[str]:
        """Texts. Answers to prompts that a template wrote also end with their turn."""
        until = options.get("until") or []
        until = [text for text in ([until] if isinstance(until, str) else until) if text]
        new_tokens = next((int(options[key]) for key in NEW_TOKENS_KEYS if options.get(key)), NEW_TOKENS)
        if new_tokens >= self.max_length:
            raise ConfigError(
                f"A task asks for {new_tokens} new tokens, and {self._home.description} supports {self.max_length} with the "
                f"prompt: leave out the task."
            )
        for name, (without, what) in UNUSED.items():
            if (value := options.get(name)) not in (None, without):
                raise ConfigError(f"A task asks for {name}={value}, and jaxllm has no {what}: leave out the task.")
        temperature = float(options.get("temperature") or 0) if options.get("do_sample", True) else 0.0
        cut = {key: options[key] for key in ("top_p", "top_k") if options.get(key)} if temperature else {}
        sampling = Sampling(temperature=temperature, seed=seed, **cut)
        ends = predict.stop_ids(self._reader, {**self._home.text_config, **self._home.generation}, template, until)
        ids = [np.array(prompt, np.int32) for prompt in self._cut(prompts, self.max_length - new_tokens)]
        how = {"new_tokens": new_tokens, "sampling": sampling, "stop_ids": ends, "stop_texts": until}
        return [one.text for one in complete(self._generator, self._reader, ids, **how)]

    def _cut(self, texts: list[list[int]], most: int) -> list[list[int]]:
        """The last ids of each text. A warning says how many were cut."""
        if count := sum(len(ids) > most for ids in texts):
            log.warning(
                "%d of %d texts do not fit into the %d tokens that the model supports, and were cut on the left.",
                count,
                len(texts),
                self.max_length,
            )
        return [ids[-most:] for ids in texts]

    @cached_property
    def _template(self) -> ChatTemplate:
        if (template := load_chat_template(self._reader.folder)) is None:
            raise ConfigError(f"{self._home.description} has no chat template: leave out --chat.")
        return template


# As a decorator it would hide the arguments of the class from type checkers.
register_model("jaxllm")(JaxLLM)


def together(numbers: Sequence[int], kind: Callable[[int], Hashable]) -> list[list[int]]:
    """Numbers of the same kind, in order."""
    groups: dict[Hashable, list[int]] = {}
    for number in numbers:
        groups.setdefault(kind(number), []).append(number)
    return list(groups.values())


def run_tasks(
    model: JaxLLM,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    include_path: str | None = None,
    chat: bool = False,
) -> dict[str, Any]:
    """The harness's results, by task. What it prints goes to standard error.

    Raises:
      ConfigError: the harness has no such task.
    """
    manager = TaskManager(include_path=include_path)
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise ConfigError(f"lm-eval has no task {unknown[0]}: `lm-eval ls tasks` lists them.")
    # Its overloads have no names for type checkers.
    evaluate: Any = simple_evaluate
    with redirect_stdout(sys.stderr):
        return evaluate(
            model=model, tasks=list(tasks), task_manager=manager, limit=limit, num_fewshot=num_fewshot, apply_chat_template=chat
        )


def shown(results: dict[str, Any], as_json: bool) -> str:
    """The harness's table of results, in Markdown; or the results, and the versions of its tasks, as JSON."""
    if as_json:
        return json.dumps({key: results[key] for key in ("results", "versions")}, default=handle_non_serializable)
    return make_table(results).rstrip()
