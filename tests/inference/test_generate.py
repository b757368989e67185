"""Compares generation with a cache with the model itself, which reads the complete sequence again for every token."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from tiny import TINY

from jaxllm.config import ModelConfig
from jaxllm.config.errors import ConfigError
from jaxllm.cost_model.inference_memory import bucket
from jaxllm.data.tokenizer import ByteTokenizer, load_tokenizer
from jaxllm.inference.generate import Generator, Sampling, TextStream, complete, next_ids, sample
from jaxllm.inference.predict import encode_prompt
from jaxllm.mesh.axes import make_mesh
from jaxllm.model.llama import Llama
from jaxllm.parallel.parallelize import parallelize
from jaxllm.parallel.parameters import merge_model

LENGTHS = (5, 1, 16, 9)
NEW = 12


@pytest.fixture(scope="module")
def shape():
    # Larger initial weights than in training: logits are far enough apart that rounding changes no choice.
    return ModelConfig.model_validate({**TINY["model"], "initializer_std": 0.3, "rope_theta": 500.0})


@pytest.fixture(scope="module")
def model(shape):
    return Llama(shape, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def generator(model):
    return Generator(model)


@pytest.fixture(scope="module")
def prompts():
    draw = np.random.default_rng(0)
    return [draw.integers(1, 256, length).astype(np.int32) for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(model, prompts):
    return recomputed(model, prompts)


def recomputed(model, prompts):
    """Result of reading the complete sequence again for every token: [prompt][token]."""
    graph, params = nnx.split(model)
    width = max(LENGTHS) + NEW

    @jax.jit
    def likeliest(params, ids_S, length):
        return jnp.argmax(nnx.merge(graph, params)(ids_S[None])[0, length - 1])

    continued = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(NEW):
            padded = np.zeros(width, np.int32)
            padded[: len(ids)] = ids
            ids.append(int(likeliest(params, padded, len(ids))))
        continued.append(ids[len(prompt) :])
    return continued


def greedy(generator, prompts, new_tokens=NEW):
    return np.array(list(generator.ids(prompts, new_tokens))).T.tolist()


def test_greedy_is_full_recomputation_token_for_token(generator, prompts, expected):
    assert greedy(generator, prompts) == expected
    # A continuation that repeats itself could hide a wrong cache.
    assert all(len(set(ids)) > NEW // 3 for ids in expected)


@pytest.mark.parametrize("norms", [{"qk_norm": "head"}, {"qk_norm": "width", "block_norms": "both"}])
def test_a_cache_holds_keys_with_their_biases_and_norms(shape, prompts, norms):
    model = Llama(shape.model_copy(update={"qkv_bias": True, **norms}), rngs=nnx.Rngs(0))
    for number, vector in enumerate((model.layers.attention.key_bias, model.layers.attention.key_norm.scale)):
        vector[...] += jax.random.normal(jax.random.key(number), vector.shape)
    assert greedy(Generator(model), prompts[:2]) == recomputed(model, prompts[:2])


@pytest.mark.parametrize(
    "windows",
    [
        {"sliding_window": 5},
        {"sliding_window": 7, "full_attention_every": 2, "local_rope_theta": 50.0, "norm_plus_one": True},
    ],
    ids=["all layers", "some layers"],
)
def test_a_cache_is_as_long_as_the_window(shape, prompts, windows):
    model = Llama(shape.model_copy(update=windows), rngs=nnx.Rngs(0))
    generator, caches = Generator(model), []
    start = generator._start

    def watched(*arguments, **options):
        ids_B, made = start(*arguments, **options)
        caches.extend(made)
        return ids_B, made

    generator._start = watched
    assert greedy(generator, prompts) == recomputed(model, prompts)
    assert [cache.k_LBTKH.shape[2] for cache in caches] == [windows["sliding_window"], 32][: len(model.config.kinds)]


def test_a_prompt_among_others_is_continued_as_if_it_were_alone(generator, prompts, expected):
    assert [greedy(generator, [prompt])[0] for prompt in prompts] == expected


def test_one_token_needs_no_second_program(model, prompts, expected):
    assert greedy(Generator(model), prompts[:1], 1) == [expected[0][:1]]


class Compilations:
    """Counts the programs that XLA compiles in the block."""

    def __enter__(self):
        self.count = 0

        def heard(event, _seconds, **_):
            self.count += event == "/jax/core/compile/backend_compile_duration"

        self._heard = heard
        jax.monitoring.register_event_duration_secs_listener(heard)
        return self

    def __exit__(self, *error):
        jax.monitoring.unregister_event_duration_listener(self._heard)


def test_prompts_that_vary_within_buckets_compile_two_programs_a_bucket(model):
    generator, draw = Generator(model), np.random.default_rng(1)

    def run(length, rows=2):
        list(generator.ids([draw.integers(1, 256, max(1, length - row)) for row in range(rows)], 10))

    with Compilations() as first:
        for length in (3, 17):
            run(length)
    assert first.count == 4
    with Compilations() as more:
        for length in (1, 2, 7, 15, 16, 18, 25, 31, 32):
            run(length)
        for temperature, top_p, seed in ((0.0, 1.0, 3), (0.0, 1.0, 4)):
            list(generator.ids([np.ones(4), np.ones(9)], 10, Sampling(temperature=temperature, top_p=top_p, seed=seed)))
    assert more.count == 0
    with Compilations() as drawn:
        for temperature, top_p, top_k, seed in ((0.5, 0.9, None, 0), (1.0, 0.5, None, 1), (0.7, 1.0, 3, 2), (2.0, 0.8, 40, 3)):
            sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
            list(generator.ids([np.ones(4), np.ones(9)], 10, sampling))
    assert drawn.count == 2


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.tensor=4", "parallel.data=2", "parallel.zero=0"),
        ("parallel.tensor=2", "parallel.data=4", "parallel.zero=3"),
        ("parallel.pipe=2", "parallel.context=2", "parallel.data=2", "parallel.zero=1"),
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_parameters_on_several_devices_give_the_same_tokens(tiny_config, shape, model, prompts, expected, overrides):
    # Two key-value heads over four tensor ranks: each rank has the complete cache. Otherwise it is split.
    keys = [f"model.{key}={getattr(shape, key)}" for key in ("initializer_std", "rope_theta")]
    config = tiny_config(*keys, *overrides, "train.sequence_length=32").resolve(8)
    mesh = make_mesh(config.parallel)
    shardings = parallelize(config, mesh).master_shardings
    params = jax.tree.map(jax.device_put, nnx.to_pure_dict(nnx.state(model)), shardings)
    generator = Generator(merge_model(config, params))
    with Compilations() as compiled:
        assert greedy(generator, prompts) == expected
    assert compiled.count == 2


def test_a_window_reads_that_many_positions_and_no_more(shape):
    # In a single layer keys depend only on their own token, and rotary positions only on distance: only there a window equals
    # reading its tokens again.
    model = Llama(shape.model_copy(update={"num_layers": 1}), rngs=nnx.Rngs(1))
    prompt, window, new = np.arange(1, 12, dtype=np.int32), 6, 9
    graph, params = nnx.split(model)
    likeliest = jax.jit(lambda params, ids_S: jnp.argmax(nnx.merge(graph, params)(ids_S[None])[0, -1]))
    ids = list(prompt)
    for _ in range(new):
        ids.append(int(likeliest(params, np.array(ids[-window:]))))
    found = Generator(model, window=window).ids([prompt[-window:]], new)
    assert np.array(list(found))[:, 0].tolist() == ids[len(prompt) :]
    assert greedy(Generator(model), [prompt], new)[0] != ids[len(prompt) :]


# ------------------------------------------------------------------------------------------------------------- sampling

LOGITS = np.log(np.array([0.1, 0.4, 0.05, 0.25, 0.2], np.float32))


def frequencies(sampling, draws=20_000):
    logits_BV = jnp.tile(jnp.array(LOGITS)[None], (draws, 1))
    ids = next_ids(logits_BV, sampling.kind, sampling.numbers, np.int32(3))
    return np.bincount(np.asarray(ids), minlength=len(LOGITS)) / draws


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, [0.1, 0.4, 0.05, 0.25, 0.2]),
        ({"temperature": 0.5}, [0.01, 0.16, 0.0025, 0.0625, 0.04]),
        ({"top_k": 2}, [0, 0.4, 0, 0.25, 0]),
        ({"top_k": 99}, [0.1, 0.4, 0.05, 0.25, 0.2]),
        # The token that reaches top_p is kept too: 0.4 + 0.25 is enough for 0.6, and 0.7 needs one more.
        ({"top_p": 0.6}, [0, 0.4, 0, 0.25, 0]),
        ({"top_p": 0.7}, [0, 0.4, 0, 0.25, 0.2]),
        # Of the two tokens that top_k keeps, the first has probability 0.62.
        ({"top_k": 2, "top_p": 0.6}, [0, 1, 0, 0, 0]),
        ({"top_p": 1e-6}, [0, 1, 0, 0, 0]),
    ],
)
def test_tokens_are_drawn_as_often_as_they_should_be(options, weights):
    found = frequencies(Sampling(**{"temperature": 1.0, **options}))
    expected = np.array(weights) / sum(weights)
    # Five standard deviations of the rarest and of the commonest token.
    np.testing.assert_allclose(found, expected, atol=5 * np.sqrt(0.25 / 20_000))
    assert (found[expected == 0] == 0).all()


def test_what_is_drawn_depends_on_seed_step_and_row_alone(generator, prompts):
    def drawn(seed, rows=prompts):
        return np.array(list(generator.ids(rows, NEW, Sampling(temperature=1.0, seed=seed)))).T

    first = drawn(0)
    assert (first == drawn(0)).all()
    assert (first != drawn(1)).any()
    # The first of several prompts is sampled as if alone, and equal prompts get different continuations.
    assert (first[0] == drawn(0, prompts[:1])[0]).all()
    twice = drawn(0, [prompts[0], *prompts[:3]])
    assert (twice[0] != twice[1]).any()


def test_a_sample_of_training_is_drawn_as_any_other(model, generator):
    prompt = np.array([84, 104, 101], np.uint8)
    found = sample(model, prompt, NEW, window=32)
    assert found.shape == (NEW,)
    assert found.dtype == np.int32
    # The window is longer than the text, so it has no effect.
    expected = generator.ids([prompt], NEW, Sampling(temperature=0.8))
    assert (found == np.concatenate(list(expected))).all()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temperature": -1}, "temperature=-1 is not valid: use 0"),
        ({"temperature": float("nan")}, "temperature=nan is not valid: use 0"),
        ({"temperature": 1e-40}, "temperature=1e-40 is so small that logits overflow: use 0"),
        ({"temperature": 1, "top_p": 0}, "top_p=0 is not a probability: use a number above 0"),
        ({"temperature": 1, "top_k": 0}, "top_k=0 leaves no token to sample: use 1 or more"),
        ({"temperature": 1, "seed": -1}, "seed=-1 is not in 0"),
        ({"top_p": 0.9}, "temperature=0 does not sample: set temperature"),
    ],
)
def test_senseless_sampling_is_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence.replace("(", r"\(")):
        Sampling(**options)


# ----------------------------------------------------------------------------------------------------------------- text


class Scripted:
    """Replaces a Generator: gives these bytes for any prompt."""

    def __init__(self, *texts: bytes):
        self.texts, self.asked = texts, 0

    def ids(self, prompts, new_tokens, sampling, images):
        for step in range(new_tokens):
            self.asked += 1
            yield np.array([text[step] if step < len(text) else 120 for text in self.texts])


def finished(generator, **options):
    pieces = [[] for _ in generator.texts]
    options = {"new_tokens": 12, "on_text": lambda row, text, ended: pieces[row].append((text, ended)), **options}
    prompts = [np.array([65])] * len(generator.texts)
    completions = complete(generator, ByteTokenizer(), prompts, **options)
    for completion, shown in zip(completions, pieces, strict=True):
        # The streamed text is the completion, and its end is reported once, at the end.
        assert "".join(text for text, _ in shown) == completion.text
        assert [ended for _, ended in shown] == [False] * (len(shown) - 1) + [True]
    return completions


def test_each_row_ends_by_itself_and_asking_ends_with_the_last():
    generator = Scripted(b"one\0more", b"a stop here", b"never ends.....")
    found = finished(generator, stop_ids=frozenset([0]), stop_texts=["stop", "zzz"], new_tokens=8)
    assert [(c.text, c.ended_by) for c in found] == [("one", "stop_token"), ("a ", "stop_text"), ("never en", "length")]
    assert found[0].ids == list(b"one\0")
    assert found[1].ids == list(b"a stop")
    generator = Scripted(b"ab\0", b"\0")
    assert [c.text for c in finished(generator, stop_ids=frozenset([0]))] == ["ab", ""]
    assert generator.asked == 3


def test_half_a_character_is_never_shown():
    (found,) = finished(Scripted("é€😀".encode()), new_tokens=9)
    assert found.text == "é€😀"
    (cut,) = finished(Scripted("a😀".encode()), new_tokens=3)
    assert cut.text == "a\N{REPLACEMENT CHARACTER}"


def test_bytes_that_are_no_text_take_none_with_them():
    broken = b"ok\xff\xfe\xfd\xfc\xce\xaa, \xe2\x82 \xac\xf0\x9f."
    (found,) = finished(Scripted(broken), new_tokens=len(broken))
    assert found.text == broken.decode(errors="replace")


def test_characters_that_are_spelled_in_byte_tokens_come_whole(tmp_path):
    """If a run of byte tokens ends with half a character, this decoder decodes none of it as text."""
    spelled = "é😀😀".encode()
    words = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "</s>": 257}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(words, [], byte_fallback=True))
    decode = tokenizers.decoders
    tokenizer.decoder = decode.Sequence([decode.Replace("▁", " "), decode.ByteFallback(), decode.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    stream = TextStream(load_tokenizer(tmp_path), np.array([256]))
    pieces = [stream.push(token) for token in [256, *spelled, 256]]
    assert [piece for piece in pieces if piece] == [" a", "é", "😀", "😀", " a"]
    assert stream.rest() == ""


def test_what_may_become_a_stop_text_waits():
    shown = []
    generator = Scripted(b"a\n\nb\nUser: hi")
    options = {"stop_texts": ["\nUser:"], "on_text": lambda row, text, ended: shown.append(text)}
    (found,) = complete(generator, ByteTokenizer(), [np.array([65])], new_tokens=13, **options)
    assert found.text == "a\n\nb"
    assert "".join(shown) == found.text
    assert shown == ["a", "\n", "\nb", ""]


def test_a_prompt_without_an_id_is_refused():
    with pytest.raises(ConfigError, match="A prompt is empty, and this tokenizer adds no BOS token: give at least one"):
        encode_prompt(ByteTokenizer(), "", 256)
    with pytest.raises(ConfigError, match="The tokenizer bytes gives the id 122, and the model's vocabulary is 100: use"):
        encode_prompt(ByteTokenizer(), "zebra", 100)


@pytest.mark.parametrize(("count", "smallest", "expected"), [(1, 1, 1), (3, 1, 4), (4, 1, 4), (5, 16, 16), (17, 16, 32)])
def test_buckets_are_powers_of_two(count, smallest, expected):
    assert bucket(count, smallest) == expected


def test_the_space_before_the_first_word_is_kept(tmp_path):
    """SentencePiece-like tokenizers drop the space before the first decoded word."""
    words = {"▁Hello": 0, "▁world": 1, "▁!": 2, "</s>": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="</s>"))
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    pieces = load_tokenizer(tmp_path)
    assert pieces.decode([1, 2]) == "world !"
    stream = TextStream(pieces, np.array([0]))
    assert [stream.push(1), stream.push(2), stream.rest()] == [" world", " !", ""]
