"""`jaxllm export --to gguf`: one file for llama.cpp and what is built on it, with network, tokenizer and weights.

The values are those of `--to hf` with the same dtype, one tensor at a time, each read back and compared, as there. The file
gets its name last. It is not quantised: llama.cpp's `llama-quantize` does that.

llama.cpp computes some networks otherwise than transformers. What it would compute otherwise is refused by name, as read in its
source (src/models/*.cpp, src/llama-model.cpp).
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, LlamaFileType, RopeScalingType, TokenType

from jaxllm.config import ConfigError, ModelConfig
from jaxllm.config.hf_kinds import KINDS
from jaxllm.config.model_config import RopeScaling
from jaxllm.data.chat import load_chat_template
from jaxllm.data.tokenizer import DOCUMENT_END, JsonTokenizer, byte_characters, load_tokenizer
from jaxllm.model.layers import rotary_frequencies
from jaxllm.untrusted import read_json
from jaxllm.weights.folder import Folder, HuggingFaceFolder
from jaxllm.weights.hf_convert import config_json, reads_bytes, write_companions
from jaxllm.weights.safetensors import CODES, DTYPES, Described, Elements, Tensor, ValuesFile
from jaxllm.weights.staging import companion_files, new_folder, require_new
from jaxllm.weights.streaming import Conversion, Move, nbytes, stream, total_bytes
from jaxllm.weights.weights import dtype_named, find_weights

# ------------------------------------------------------------------------------------------------------- values in a file
# The values of a GGUF file, whose header the library gguf writes. They are written and read in pieces, as those of safetensors:
# the library's writer needs a tensor whole, and pages of its reader's memory map count as the process's own memory.
#
# Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md


def new_gguf(header: GGUFWriter, path: Path, tensors: Described) -> dict[str, Tensor]:
    """Creates a file of full length for these tensors, whose values are still to be written. The header has all keys."""
    for name, (dtype, shape) in tensors.items():
        # ggml names dtypes as safetensors does.
        raw = GGMLQuantizationType[CODES[dtype]]
        header.add_tensor_info(name, shape, np.dtype(np.float32), nbytes(dtype, shape), raw_dtype=raw)
    header.write_header_to_file(path)
    header.write_kv_data_to_file()
    header.write_ti_data_to_file()
    header.close()
    file, found = ValuesFile(path, os.O_RDWR), {}
    end = file.size
    for name, (dtype, shape) in tensors.items():
        begin = GGUFWriter.ggml_pad(end, header.data_alignment)
        end = begin + nbytes(dtype, shape)
        found[name] = Tensor(name, CODES[dtype], shape, file, begin, end)
    os.truncate(path, GGUFWriter.ggml_pad(end, header.data_alignment))
    return found


# ------------------------------------------------------------------------------------------------------------- parameters

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "olmo2": MODEL_ARCH.OLMO2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
}
"""By transformers' model_type."""
FILE_TYPES = {"F32": LlamaFileType.ALL_F32, "F16": LlamaFileType.MOSTLY_F16, "BF16": LlamaFileType.MOSTLY_BF16}
ROPE_FREQS = "rope_freqs.weight"
"""By what the frequency of each rotary pair is divided (Llama 3)."""
GEMMA_27B_LAYERS = 62
"""So many layers are Gemma 3 27B for llama.cpp, which then divides scores by the square root of hidden_size / num_heads."""


def architecture(kind: str, model: ModelConfig) -> MODEL_ARCH:
    """llama.cpp's architecture of a network. If llama.cpp computes it otherwise, a ConfigError says what.

    Args:
      kind: transformers' model_type.
    """
    if (found := ARCHITECTURES.get(kind)) is None:
        raise ConfigError(f"jaxllm writes no GGUF of {KINDS[kind].architecture}: use --to hf and another server.")
    for reason in _differences(found, model):
        raise ConfigError(f"llama.cpp's {MODEL_ARCH_NAMES[found]} has no {reason}: use --to hf and another server.")
    return found


def _differences(arch: MODEL_ARCH, model: ModelConfig) -> Iterator[str]:
    scaling = model.rope_scaling
    if model.sliding_window is not None and arch != MODEL_ARCH.GEMMA3:
        yield f"model.sliding_window={model.sliding_window}"
    if model.full_attention_first:
        yield f"model.full_attention_first={model.full_attention_first}"
    if model.num_heads * model.head_dim != model.hidden_size and arch in (MODEL_ARCH.QWEN2, MODEL_ARCH.OLMO2):
        yield f"model.head_dim={model.head_dim} that is not hidden_size / num_heads"
    if model.tie_embeddings and arch == MODEL_ARCH.OLMO2:
        yield "model.tie_embeddings=true"
    if arch == MODEL_ARCH.GEMMA3:
        usual = model.hidden_size // model.num_heads if model.num_layers == GEMMA_27B_LAYERS else model.head_dim
        if (scalar := model.query_pre_attn_scalar or model.head_dim) != usual:
            yield f"model.query_pre_attn_scalar={scalar} but {usual} for {model.num_layers} layers"
    if scaling is None:
        return
    if (scaling.rope_type == "llama3" and arch != MODEL_ARCH.LLAMA) or (
        scaling.rope_type == "yarn" and arch == MODEL_ARCH.GEMMA3
    ):
        yield f"model.rope_scaling.rope_type={scaling.rope_type}"
    for name in ("beta_slow", "beta_fast", "attention_factor"):
        if (value := getattr(scaling, name)) != (default := RopeScaling.model_fields[name].default):
            yield f"model.rope_scaling.{name}={value} but {default or 'its default'}"


def describe_network(writer: GGUFWriter, model: ModelConfig, positions: int, dtype: np.dtype) -> None:
    """Writes the keys of a network.

    Args:
      positions: how many the model was trained for.
      dtype: of most tensors.
    """
    writer.add_type("model")
    writer.add_file_type(FILE_TYPES[CODES[dtype]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(positions)
    writer.add_vocab_size(model.vocab_size)
    writer.add_block_count(model.num_layers)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_layer_norm_rms_eps(model.norm_eps)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(model.rope_theta)
    if model.sliding_window is not None:
        writer.add_sliding_window(model.sliding_window)
        writer.add_sliding_window_pattern(model.full_attention_every or 0)
        writer.add_rope_freq_base_swa(model.local_rope_theta or model.rope_theta)
    if (scaling := model.rope_scaling) is None or scaling.rope_type == "llama3":
        # Llama 3's scaling is a tensor: ROPE_FREQS.
        return
    writer.add_rope_scaling_type(RopeScalingType(scaling.rope_type))
    writer.add_rope_scaling_factor(scaling.factor)
    if scaling.rope_type == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position)


# -------------------------------------------------------------------------------------------------------------- tokenizer
# A tokenizer.json as the vocabulary of a GGUF file.
#
# llama.cpp has two kinds of BPE: on bytes, whose rule for cutting a text has a name there ("gpt2"), and sentencepiece's, which
# merges by scores instead of a list ("llama"). A tokenizer that would give a text other ids there is refused. Its own converter
# knows tokenizers by a list of hashes; here the rule itself is read, so that one you trained is known too.

_WORDS, _DIGITS, _THREE_DIGITS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|", r"\p{N}", r"\p{N}{1,3}"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2, _DIGITS_THEN_GPT2, _UNCUT = "GPT-2's", "digits, then GPT-2's", "uncut"
CUTS = {
    (_GPT2, False): "gpt-2",
    (_DIGITS_THEN_GPT2, False): "smollm",
    (_WORDS + _THREE_DIGITS + _REST, True): "llama-bpe",
    (_WORDS + _THREE_DIGITS + _REST, False): "dbrx",
    (_WORDS + _DIGITS + _REST, False): "qwen2",
    (_TEKKEN, True): "tekken",
}
"""llama.cpp's names (src/llama-vocab.cpp), by how a text is cut before merges and whether a piece that is a token is taken as
it is (ignore_merges)."""
SPACE = "▁"
END = "<|endoftext|>"
"""What the EOS token of bytes, U+0000, is called: llama.cpp reads no text beyond a zero byte."""


def describe_tokenizer(writer: GGUFWriter, folder: Path, vocab_size: int, model_name: str) -> None:
    """Writes the keys of the tokenizer in a folder: vocabulary, merges or scores, special tokens, chat template and the token
    that ends its turns. ConfigError if llama.cpp cannot give a text the same ids.

    Args:
      vocab_size: that of the model, which may be larger.
      model_name: for error messages.
    """
    content, tokenizer = read_json(folder / "tokenizer.json"), load_tokenizer(folder, for_documents=False)
    assert isinstance(tokenizer, JsonTokenizer), "a folder's"
    where = f"The tokenizer of {model_name}"
    if tokenizer.text_size > vocab_size:
        raise ConfigError(f"{where} has {tokenizer.text_size} ids, and the model {vocab_size}: give the model's own tokenizer.")
    model = content.get("model") or {}
    if model.get("type") != "BPE" or any(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix")):
        raise ConfigError(f"{where} is no BPE that llama.cpp knows: use --to hf and another server.")
    tokens, types = _vocabulary(content, tokenizer, vocab_size)
    try:
        special = gguf.SpecialVocab(folder, load_merges=not model.get("byte_fallback"), n_vocab=vocab_size)
    except ValueError as error:
        raise ConfigError(f"{where} cannot be written ({error}): correct the files beside the weights.") from None
    if model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(model, tokens, types, where))
        writer.add_add_space_prefix(_adds_space(content, TokenType.USER_DEFINED in types, where))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_name_of_cut(content, where))
        # llama.cpp needs at least one merge. The zero byte is in no text.
        special.merges = special.merges or [" ".join(2 * [byte_characters()[0]])]
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    template = turn = None
    # That of training (gguf has another rule where two files have one). An export does not depend on it.
    with suppress(ConfigError):
        found = load_chat_template(folder)
        template, turn = found, found and found.end_of_turn(tokenizer)
    if template is not None:
        found = special.chat_template
        others = [] if found is None or isinstance(found, str) else [one for one in found if one.get("name") != "default"]
        default = {"name": "default", "template": template.source}
        special.chat_template = [default, *others] if others else template.source
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "eot": turn}
    special.special_token_ids |= {name: number for name, number in ids.items() if number is not None}
    first = tokenizer.encode("a").tolist()[:1]
    special.add_special_token |= {"bos": first == [tokenizer.bos_id], "eos": False}
    special.add_to_gguf(writer, quiet=True)


def _vocabulary(content: Mapping[str, Any], tokenizer: JsonTokenizer, vocab_size: int) -> tuple[list[str], list[TokenType]]:
    """Text and type of each id of the model. Those that the tokenizer does not have are unused."""
    tokens, types = [f"[PAD{number}]" for number in range(vocab_size)], [TokenType.UNUSED] * vocab_size
    model = content["model"]
    vocabulary: dict[str, int] = model["vocab"]
    for text, number in ((text, number) for text, number in vocabulary.items() if number < vocab_size):
        tokens[number], types[number] = text, TokenType.NORMAL
        if model.get("byte_fallback") and len(text) == 6 and text.startswith("<0x"):
            types[number] = TokenType.BYTE
        elif model.get("byte_fallback") and text == model.get("unk_token"):
            types[number] = TokenType.UNKNOWN
    # No text has those that the model does not have.
    for number, added in ((number, added) for number, added in tokenizer.added.items() if number < vocab_size):
        text = added.content
        if types[number] != TokenType.UNKNOWN:
            types[number] = TokenType.CONTROL if added.special else TokenType.USER_DEFINED
        # llama.cpp looks for such tokens in the text as it was given.
        tokens[number] = text if added.special or not model.get("byte_fallback") else text.replace(SPACE, " ")
        if text == DOCUMENT_END.decode():
            tokens[number] = END
    return tokens, types


def _name_of_cut(content: Mapping[str, Any], where: str) -> str:
    model, normalizer = content["model"], content.get("normalizer") or {}
    cut = _cut(content.get("pre_tokenizer") or {})
    # Without merges every byte is a token, however a text is cut.
    name = "gpt-2" if cut == _UNCUT and not model["merges"] else CUTS.get((cut, model.get("ignore_merges") is True))
    # llama.cpp does not normalise; nearly all text is in NFC.
    if name is None or normalizer.get("type") not in (None, "NFC"):
        raise ConfigError(
            f"{where} prepares text in a way for which llama.cpp has no name (normalizer, pre_tokenizer or ignore_merges of "
            f"its tokenizer.json): use --to hf and another server."
        )
    return name


def _cut(pre_tokenizer: Mapping[str, Any]) -> str:
    """How a text is cut: a regular expression or one of the names above. Empty for other ways."""
    *before, last = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space") or len(before) > 1:
        return ""
    if last.get("use_regex", True):
        return _GPT2 if not before else _DIGITS_THEN_GPT2 if before == [{"type": "Digits", "individual_digits": True}] else ""
    if not before:
        return _UNCUT
    split = before[0]
    # Where the expression fits everywhere, to remove what is between is to isolate what fits.
    how = split.get("behavior"), bool(split.get("invert"))
    if split.get("type") != "Split" or how not in (("Isolated", False), ("Removed", True)):
        return ""
    return (split.get("pattern") or {}).get("Regex", "")


def _adds_space(content: Mapping[str, Any], has_own_tokens: bool, where: str) -> bool:
    """Whether a sentencepiece tokenizer puts a space before a text. llama.cpp then puts one after each token of the user too.

    Args:
      has_own_tokens: whether there are tokens of the user.
    """
    normalizer, pre = content.get("normalizer") or {}, content.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers") or ([normalizer] if normalizer else [])
    spaces, prefix = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}, {"type": "Prepend", "prepend": SPACE}
    # After the spaces are replaced this cuts nothing.
    of_gemma = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    adds = None
    if pre.get("type") == "Metaspace" and not steps and pre.get("replacement") == SPACE and pre.get("split") is False:
        adds = pre.get("prepend_scheme") != "never"
    elif steps in ([spaces], [prefix, spaces]) and pre in ({}, of_gemma):
        adds = prefix in steps
    if adds is not None and not (adds and has_own_tokens):
        return adds
    raise ConfigError(f"{where} prepares text otherwise than sentencepiece: use --to hf and another server.")


def _scores(model: Mapping[str, Any], tokens: list[str], types: list[TokenType], where: str) -> list[float]:
    """A score for each token, by which llama.cpp merges the pair with the best result, as the list of merges does.

    Any two tokens that make a token are merged there, so the list must have all such pairs, one result after the other. It
    finds tokens of the user, such as several spaces, before all others, so their merges must come first.
    """
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    known = {token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.NORMAL}
    of_user = sum(1 for _ in takewhile(lambda pair: not {*pair, "".join(pair)} <= known, pairs))
    pairs = pairs[of_user:]
    order = [result for result, _ in groupby(map("".join, pairs))]
    made = {
        (token[:at], token[at:])
        for token in known
        for at in range(1, len(token))
        if token[:at] in known and token[at:] in known
    }
    if len(order) != len(set(order)) or made != set(pairs):
        raise ConfigError(f"{where} merges otherwise than sentencepiece: use --to hf and another server.")
    ranks = {result: -float(rank) for rank, result in enumerate(order)}
    return [ranks.get(token, 0.0) for token in tokens]


# ------------------------------------------------------------------------------------------------------------- conversion

SUFFIX = ".gguf"
FLOAT32 = DTYPES["F32"]
ROTATED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")


def to_gguf(
    source: str,
    destination: str,
    *,
    step: int | None = None,
    dtype: str | None = None,
    max_position: int | None = None,
    force: bool = False,
    adapters: Sequence[str] = (),
) -> Conversion:
    """Converts a model, a run directory or one of its checkpoints to a GGUF file. Adapters are merged. It needs host memory as
    to_hf does.

    Args:
      destination: a new file, which ends in .gguf.
      others: as in to_hf. Vectors, such as the scales of norms, are stored as float32 after rounding to `dtype`.

    Raises:
      ConfigError: as to_hf; or llama.cpp would compute the network or read the text otherwise.
    """
    require_new(destination, force, is_file=True)
    if not destination.endswith(SUFFIX):
        raise ConfigError(
            f"--to gguf writes a file, and {destination} does not end in {SUFFIX}: name it {destination}{SUFFIX}."
        )
    wanted = None if dtype is None else dtype_named(dtype)
    found = find_weights("SRC", source, step, adapters)
    folder = found.as_folder()
    companion_files(folder.companions)
    if folder.tokenizer is None and not reads_bytes(folder):
        raise ConfigError(f"SRC={source} has no tokenizer.json, which llama.cpp needs: put the model's own beside the weights.")
    config, model = config_json(folder, wanted, max_position), ModelConfig.model_validate(folder.model)
    if folder.model.get("vision") is not None:
        raise ConfigError("llama.cpp has vision towers in a file of their own, which jaxllm does not write: use --to hf.")
    arch = architecture(config["model_type"], model)
    moves, tensors = _moves(folder, arch, model, wanted)
    layout = {Path(destination).name: tensors}
    writer = GGUFWriter(None, MODEL_ARCH_NAMES[arch])
    writer.add_name(Path(destination).stem)
    positions = config.get("max_position_embeddings") or KINDS[config["model_type"]].defaults["max_position_embeddings"]
    describe_network(writer, model, positions, wanted or folder.common_dtype)
    with new_folder(destination, total_bytes(layout), force, only=Path(destination).name) as aside:
        write_companions(folder, aside / "beside")
        describe_tokenizer(writer, aside / "beside", model.vocab_size, found.description)
        stream(moves, layout, aside, "to GGUF", partial(new_gguf, writer))
    dtypes = {dtype.name for dtype, _ in tensors.values()}
    return Conversion(found.description, destination, len(moves), total_bytes(layout), dtypes, 1)


def _moves(folder: Folder, arch: MODEL_ARCH, model: ModelConfig, wanted: np.dtype | None) -> tuple[list[Move], Described]:
    theirs = [name for entry in folder.entries.values() for name in entry.tensors]
    names = gguf.get_tensor_name_map(arch, model.num_layers)
    ours = {name: found for name in theirs if (found := names.get_name(name, (".weight", ".bias"))) is not None}
    moves, tensors = [], {}
    # Slabs of a Hugging Face folder are in its order already.
    is_theirs = isinstance(folder, HuggingFaceFolder)
    for entry in folder.entries.values():
        dtype = wanted or folder.dtype(entry.path)
        for number, name in enumerate(entry.tensors):
            source, passed = folder.slab(entry, number), dtype
            if model.norm_plus_one and name.endswith("norm.weight"):
                source, passed = _plus_one(source, dtype), FLOAT32
            if arch == MODEL_ARCH.LLAMA and name.endswith(ROTATED):
                rows = model.num_heads if name.endswith(ROTATED[0]) else model.num_kv_heads
                shape = (rows, model.head_dim, model.hidden_size) if is_theirs else (model.hidden_size, rows, model.head_dim, 1)
                source = _pairs_together(source, shape)
            matrix = entry.matrix if entry.columns and not is_theirs else None
            moves.append(Move(name, source, matrix, passed, ours[name]))
            # llama.cpp adds and multiplies vectors in float32 alone.
            tensors[ours[name]] = (dtype if len(entry.their_shape) > 1 else FLOAT32, entry.their_shape)
    if model.rope_scaling is not None and model.rope_scaling.rope_type == "llama3":
        factors = rotary_frequencies(model.model_copy(update={"rope_scaling": None})) / rotary_frequencies(model)
        elements = Elements(factors.size, factors.dtype, lambda begin, end: factors[begin:end])
        moves.append(Move(ROPE_FREQS, elements, None, FLOAT32, ROPE_FREQS))
        tensors[ROPE_FREQS] = (FLOAT32, (factors.size,))
    return moves, tensors


def _plus_one(source: Elements, through: np.dtype) -> Elements:
    """Scales of norms that begin at 0. llama.cpp's begin at 1."""
    return Elements(source.size, FLOAT32, lambda begin, end: 1 + source.read(begin, end).astype(through).astype(FLOAT32))


def _pairs_together(source: Elements, shape: tuple[int, ...]) -> Elements:
    """The query or key matrix of Llama with the rows of each head in llama.cpp's order. A rotary pair is one row in each half
    of a head in Hugging Face's order, and two neighbours in llama.cpp's. shape: [..., N, H, rest].
    """
    *outer, H, rest = shape

    def read(begin: int, end: int) -> np.ndarray:
        whole = source.read(0, source.size).reshape(*outer, 2, H // 2, rest)
        # NumPy calls a function for each bfloat16.
        unsigned = whole.view(f"u{whole.dtype.itemsize}").swapaxes(-3, -2)
        return unsigned.reshape(-1)[begin:end].view(source.dtype)

    return Elements(source.size, source.dtype, read)
