"""`jaxllm eval` and `jaxllm generate`, and the Python functions behind them: a model folder and a text give a score or a
continuation.

    evaluate("smollm2", "hamlet.txt", ["parallel.tensor=3"]).perplexity
    generate("smollm2", ["The capital of France is"], max_new_tokens=20)[0].text

Errors in a text or an option are raised before any device is used.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.cluster import distributed
from jaxllm.config import ConfigError, sequence_unit, with_overrides
from jaxllm.config.model_config import VisionConfig
from jaxllm.cost_model.inference_memory import bucket, cache_bytes, cache_positions
from jaxllm.data.chat import ChatTemplate, load_chat_template
from jaxllm.data.images import PLACEHOLDER, BrokenImage, ImageTokens, image_tokens, load_image_processor, open_image
from jaxllm.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from jaxllm.inference.evaluate import Score, Windows, read_text, tokenize
from jaxllm.inference.evaluate import evaluate as score
from jaxllm.inference.generate import Completion, Generator, Sampling, complete
from jaxllm.machine.host import require_host_memory
from jaxllm.untrusted import shown
from jaxllm.weights.folder import Folder
from jaxllm.weights.load_model import KEY, LoadedModel, config_of, open_model
from jaxllm.weights.weights import Adapters, find_weights

USUAL_LENGTH = 1024
"""Tokens per window, unless the model was made for fewer."""
NONSENSE_TIMES, NONSENSE_POSITIONS = 64, 2**16
"""Positions that are refused: this many times what the model supports, and at least so many."""
BYTE_VOCABULARY = 512
"""Largest vocabulary of a model that reads bytes if it has no tokenizer."""


def evaluate(
    model: str | Path,
    text: str | Path,
    overrides: Sequence[str] = (),
    *,
    sequence_length: int | None = None,
    stride: int | None = None,
    by_position: bool = False,
    tokenizer: str | None = None,
    adapter: Adapters = (),
    say: Callable[[str], None] = lambda line: None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Score:
    """Evaluates a model on a text: loss, perplexity, bits per byte. inference/evaluate.py defines the windows.

    Args:
      model: a Hugging Face folder, one of jaxllm's own, a run directory or one of its checkpoints.
      text: a file in UTF-8.
      overrides: `section.key=value` strings, such as parallel.tensor=3. The default of model.compute_dtype is float32 on CPU
        and bfloat16 on GPUs. Without parallel.*, the weights are distributed over all local devices.
      sequence_length: S, tokens per window; default: 1024, or the model's own length if that is less.
      stride: tokens from the start of one window to the next; default: S.
      by_position: fill Score.by_position too: the loss by powers of two of the tokens before.
      tokenizer: a folder with tokenizer.json, or bytes; default: the model's own.
      adapter: a folder with a LoRA adapter in PEFT's format, or several, to be merged into the weights.
      say: receives lines of text for the terminal.
      progress: called with (description, windows done, total).

    Raises:
      ConfigError: a file is invalid, the text is too short, or the model does not fit the mesh.
    """
    home = find_weights(KEY, model, adapters=adapter).outline
    length = min(USUAL_LENGTH, longest_of(home) or USUAL_LENGTH) if sequence_length is None else sequence_length
    reader = tokenizer_of(home, tokenizer, say)
    ids, starts = tokenize(reader, read_text(text))
    require_ids(ids, reader, home.model["vocab_size"])
    windows = Windows(ids, starts, length, length if stride is None else stride)
    width = divisible(length, overrides)
    loaded = open_model_for(model, overrides, width, adapter)
    say_model(say, loaded)
    _note_length(say, home, length)
    options = {"width": width, "by_position": by_position, "progress": progress}
    return score(loaded.functions, loaded.params, loaded.mesh, windows, **options)


@dataclass(frozen=True)
class GenerateOptions(Sampling):
    """How prompts are continued.

    Raises:
      ConfigError: an option makes no sense.
    """

    chat: bool = False
    """Each prompt is what a user says, and the answer is generated."""
    system: str | None = None
    """With `chat`, the system message; default: the template's own, if it has one."""
    max_new_tokens: int = 128
    stop: str | Sequence[str] = ()
    """A text, or several, that end a continuation and are not part of it; one that spells a special token is that token."""

    def __post_init__(self):
        super().__post_init__()
        if self.max_new_tokens < 1:
            raise ConfigError(f"--max-new-tokens={self.max_new_tokens} leaves nothing to generate: use 1 or more.")
        if self.system is not None and not self.chat:
            raise ConfigError("--system is part of a conversation: add --chat, or leave it out.")
        if "" in self.stops:
            raise ConfigError("--stop is empty, and would end every text at its start: give at least one character.")

    @property
    def stops(self) -> Sequence[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


def generate(
    model: str | Path,
    prompts: str | Sequence[str],
    overrides: Sequence[str] = (),
    *,
    tokenizer: str | None = None,
    adapter: Adapters = (),
    images: Sequence[str | Path] = (),
    say: Callable[[str], None] = lambda line: None,
    on_text: Callable[[int, str, bool], None] = lambda row, text, ended: None,
    **options: Any,
) -> list[Completion]:
    """Continues each prompt, up to a stop token, a stop text or max_new_tokens. Prompts run together but independently.

    Args:
      model, overrides, tokenizer, adapter, say: as in `evaluate`.
      prompts: one or several texts to continue. With `chat` each is a user message, and the answer is generated.
      images: files for the places `<image>` of the prompts, in order. A single prompt without any begins with them.
      on_text: called with (number of the prompt, new text, whether the text has ended) as text arrives.
      options: fields of GenerateOptions: chat, system, max_new_tokens, temperature, top_p, top_k, seed, stop.

    Raises:
      ConfigError: a prompt or an option is invalid, or the model does not fit the mesh.
    """
    how = GenerateOptions(**options)
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if not prompts:
        raise ConfigError("No prompt is given: give one with --prompt.")
    home = find_weights(KEY, model, adapters=adapter).outline
    reader, vocab_size = tokenizer_of(home, tokenizer, say), home.model["vocab_size"]
    for stop in how.stops:
        # The text that is searched for it has no special tokens.
        if stop not in reader.special_tokens and any(token in stop for token in reader.special_tokens):
            raise ConfigError(f"--stop={shown(stop)} is a special token and more, which no text has: give that token alone.")
    prompts, tokens, pixels = with_images(home, reader, prompts, images)
    template = load_chat_template(reader.folder, image_token=tokens.text if tokens else None) if how.chat else None
    if how.chat and template is None:
        raise ConfigError(f"{home.description} has no chat template: leave out --chat, or add chat_template.jinja to it.")
    ids = [encode_prompt(reader, prompt, vocab_size, template, how.system) for prompt in prompts]
    ids = [tokens.expanded(these)[0] for these in ids] if tokens else ids
    if tokens and sum(int((these == tokens.id).sum()) for these in ids) != len(images) * tokens.per_image:
        raise ConfigError("The chat template does not write each image once: change it, or leave out --chat.")
    # A folder without a generation_config.json has these keys in its config.json.
    ends = stop_ids(reader, {**home.text_config, **home.generation}, template, how.stops)
    if template is not None:
        template.close()
    most = max(map(len, ids)) + how.max_new_tokens
    longest = longest_of(home)
    if longest is not None and most > max(NONSENSE_TIMES * longest, NONSENSE_POSITIONS):
        raise ConfigError(
            f"The prompt and --max-new-tokens make up to {most:,} positions, and the model supports {longest:,}: shorten them."
        )
    loaded = open_model_for(model, overrides, divisible(bucket(most), overrides), adapter)
    if jax.default_backend() == "cpu":
        positions = cache_positions(max(map(len, ids)), how.max_new_tokens)
        needed = cache_bytes(loaded.config.model, len(ids), positions)
        require_host_memory(needed, f"Keys and values of {positions:,} positions")
    say_model(say, loaded)
    _note_length(say, home, most)
    generator = Generator(loaded.model)
    # The generator has its own copy, perhaps in another dtype.
    del loaded
    rest = {"sampling": how, "stop_ids": ends, "stop_texts": how.stops, "on_text": on_text, "images": pixels}
    return complete(generator, reader, ids, new_tokens=how.max_new_tokens, **rest)


def with_images(
    home: Folder, tokenizer: Tokenizer, prompts: Sequence[str], images: Sequence[str | Path]
) -> tuple[Sequence[str], ImageTokens | None, np.ndarray | None]:
    """(prompts with the image token in the places of images, that token, pixels); None for both without images.

    Raises:
      ConfigError: the model has no vision tower, an image is unusable, or there are more or fewer places than images.
    """
    if not images and (home.model.get("vision") is None or not any(PLACEHOLDER in prompt for prompt in prompts)):
        return prompts, None, None
    if home.model.get("vision") is None:
        raise ConfigError(f"{home.description} has no vision tower: leave out --image, or name another model.")
    if len(prompts) == 1 and PLACEHOLDER not in prompts[0]:
        prompts = [f"{PLACEHOLDER}\n" * len(images) + prompts[0]]
    if (places := sum(prompt.count(PLACEHOLDER) for prompt in prompts)) != len(images):
        raise ConfigError(f"The prompts have {places} places {PLACEHOLDER} for {len(images)} images: make them equal.")
    vision = VisionConfig.model_validate(home.model["vision"])
    processor, tokens = load_image_processor(vision, home.companions), image_tokens(tokenizer, vision)
    try:
        pixels = []
        for image in images:
            with open_image(Path(image)) as opened:
                pixels.append(processor.pixels(opened))
    except BrokenImage as error:
        raise ConfigError(f"--image: {error}: give another file.") from None
    return [tokens.in_text(prompt) for prompt in prompts], tokens, np.stack(pixels)


def encode_prompt(
    tokenizer: Tokenizer, text: str, vocab_size: int, template: ChatTemplate | None = None, system: str | None = None
) -> np.ndarray:
    """Encodes a text to be continued, or with a template a conversation up to its first answer: an optional system message and
    the user's text. Text that spells a special token is that token, as it is for transformers. BOS comes before a text if the
    tokenizer's rule adds it, but not twice if the text begins with it; a template writes it.

    Raises:
      ConfigError: there are no ids, an id is outside the model's vocabulary, a text is not Unicode, or the template refuses it.
    """
    for part in (text, system or ""):
        try:
            # Python makes lone surrogates of a command line in an encoding other than the terminal's.
            part.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"A prompt is not Unicode (at character {error.start:,}): give it in UTF-8.") from None
    if template is None:
        ids = tokenizer.encode(text, parse_special=True)
        empty = "A prompt is empty, and this tokenizer adds no BOS token: give at least one character."
    else:
        messages = [] if system is None else [{"role": "system", "content": system}]
        rendered = template.render([*messages, {"role": "user", "content": text}], add_generation_prompt=True)
        ((ids, _),) = tokenizer.encode_with_starts([rendered], parse_special=True)
        empty = f"The chat template of {template.origin} makes nothing of a message: fix it, or leave out --chat."
    if not len(ids):
        raise ConfigError(empty)
    require_ids(ids, tokenizer, vocab_size)
    return ids


def require_ids(ids: np.ndarray, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises ConfigError if an id is outside the model's vocabulary."""
    if len(ids) and int(ids.max()) >= vocab_size:
        raise ConfigError(
            f"The tokenizer {tokenizer.name} gives the id {ids.max()}, and the model's vocabulary is {vocab_size}: use the "
            f"tokenizer that the model was trained with."
        )


def stop_ids(
    tokenizer: Tokenizer, generation: Mapping[str, Any], template: ChatTemplate | None = None, stop_texts: Sequence[str] = ()
) -> frozenset[int]:
    """Ids that end a text: the tokenizer's EOS, those of generation_config.json and, with a template, its end of turn.

    Args:
      generation: the content of generation_config.json. Its eos_token_id is a number or a list.
      stop_texts: a stop text that spells a special token adds that token, because decoded text does not show it.
    """
    named = generation.get("eos_token_id")
    found = {tokenizer.eos_id, *(named if isinstance(named, list) else [named])}
    spelled = [text for text in stop_texts if text in tokenizer.special_tokens]
    found |= {int(ids[0]) for ids, _ in tokenizer.encode_with_starts(spelled, parse_special=True)}
    if template is not None:
        found.add(template.end_of_turn(tokenizer))
    return frozenset(token for token in found if isinstance(token, int))


def longest_of(home: Folder) -> int | None:
    """Number of positions that the model was trained with, or made for."""
    made_for = home.text_config.get("max_position_embeddings")
    rope = home.model.get("rope_scaling") or {}
    if rope.get("rope_type") == "yarn" and isinstance(made_for, int):
        made_for = max(made_for, int(rope["factor"] * rope["original_max_position"]))
    return home.sequence_length or (made_for if isinstance(made_for, int) and made_for > 0 else None)


def _note_length(say: Callable[[str], None], home: Folder, positions: int) -> None:
    if (longest := longest_of(home)) is not None and positions > longest:
        say(f"note: up to {positions:,} positions, but the model supports {longest:,}; expect nonsense beyond those")


def tokenizer_of(home: Folder, given: str | None, say: Callable[[str], None]) -> Tokenizer:
    if (found := given or home.tokenizer) is not None:
        return load_tokenizer(found, for_documents=False)
    if home.trained_on_bytes or 2**8 <= home.model["vocab_size"] <= BYTE_VOCABULARY:
        if home.model["vocab_size"] > 2**8 and not home.trained_on_bytes:
            say(f"note: {home.description} has no tokenizer.json, so text is read as bytes")
        return load_tokenizer(BYTES)
    raise ConfigError(
        f"{home.description} has no tokenizer.json, and its vocabulary of {home.model['vocab_size']} is not bytes: name a "
        f"folder that has one with --tokenizer."
    )


def divisible(length: int, overrides: Sequence[str]) -> int:
    """The next length that divides over the mesh of the overrides. The padding comes last and affects no other position."""
    sizes = with_overrides({}, overrides).get("parallel") or {}
    context, tensor = (sizes.get(axis, 1) for axis in ("context", "tensor"))
    if not all(isinstance(size, int) and size > 0 for size in (context, tensor)):
        # The config reports what is wrong with them.
        return length
    unit = sequence_unit(context, tensor)
    return -(-length // unit) * unit


def open_model_for(model: str | Path, overrides: Sequence[str], sequence_length: int, adapter: Adapters) -> LoadedModel:
    """Opens the model on the local devices, in a suitable compute dtype."""
    # Errors in the overrides are reported here, before any device is used.
    if "sequence_length" in (with_overrides({}, overrides).get("train") or {}):
        raise ConfigError("train.sequence_length applies only to training: leave it out and use --sequence-length.")
    config = config_of(find_weights(KEY, model), overrides, sequence_length)
    distributed.start(config.run)
    if "compute_dtype" not in (with_overrides({}, overrides).get("model") or {}):
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        overrides = [*overrides, f"model.compute_dtype={dtype}"]
    return open_model(model, overrides, sequence_length=sequence_length, adapter=adapter)


def say_model(say: Callable[[str], None], loaded: LoadedModel) -> None:
    devices = loaded.mesh.devices
    axes = ", ".join(f"{axis} {size}" for axis, size in loaded.mesh.shape.items() if size > 1)
    where = f"{devices.size} {devices.flat[0].device_kind} device{'s' if devices.size > 1 else ''}{axes and ': '}{axes}"
    say(f"{loaded.description}, computing in {loaded.config.model.compute_dtype} on {where}")
