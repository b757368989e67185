"""from-hf and to-hf: a round trip is exact, and a conversion is complete or absent."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hf_folders import DTYPES, HUB, LLAMA3_ROPE, in_new_dialect, random_weights, read_folder, write_file, write_folder
from safetensors.numpy import load_file
from tiny import TINY

import jaxllm
from jaxllm.cli import app as cli
from jaxllm.config import ConfigError, load_config
from jaxllm.weights import streaming
from jaxllm.weights.folder import open_folder
from jaxllm.weights.hf_convert import from_hf, parse_size, to_hf
from jaxllm.weights.safetensors import Tensor
from jaxllm.weights.weights import export

TIED = {**HUB, "tie_word_embeddings": True}
WIDE_HEADS = {**HUB, "head_dim": 10}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"


def bits(weights):
    return {name: (array.dtype.name, array.shape, array.tobytes()) for name, array in weights.items()}


def there_and_back(source, tmp_path, **options):
    from_hf(str(source), str(tmp_path / "ours"))
    to_hf(str(tmp_path / "ours"), str(tmp_path / "back"), **options)
    return read_folder(tmp_path / "back")


@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("config", [HUB, TIED, WIDE_HEADS], ids=["untied", "tied", "wide heads"])
@pytest.mark.parametrize("shards", [1, 4])
def test_every_tensor_comes_back_bit_for_bit(config, code, shards, tmp_path, monkeypatch):
    # Make blocks smaller than a tensor, as they are for real tensors.
    monkeypatch.setattr(streaming, "BLOCK_BYTES", 600)
    weights = random_weights(config, code)
    # Values that a cast or an addition would change.
    weights[GATE][0, :3] = np.array([-0.0, 1e-40, 6e-8], np.float32).astype(DTYPES[code])
    source = write_folder(tmp_path / "hf", config, weights, shards)
    back = there_and_back(source, tmp_path, largest_file=9000 if shards > 1 else 10**9)
    assert bits(back) == bits(weights)
    assert (len(list((tmp_path / "back").glob("*.safetensors"))) > 1) == (shards > 1)


def test_dtypes_may_differ_from_tensor_to_tensor(tmp_path):
    weights = random_weights(HUB, "BF16")
    for name in weights:
        if "norm" in name or name == GATE:
            weights[name] = random_weights(HUB, "F32")[name]
    weights[HEAD] = weights[HEAD].astype(np.float16)
    assert bits(there_and_back(write_folder(tmp_path / "hf", HUB, weights), tmp_path)) == bits(weights)


@pytest.mark.parametrize("stored", [(EMBEDDING,), (EMBEDDING, HEAD), (HEAD,)])
def test_a_tied_matrix_comes_back_under_the_names_it_had(stored, tmp_path):
    weights = random_weights(TIED)
    matrix = weights.pop(EMBEDDING)
    weights |= dict.fromkeys(stored, matrix)
    assert bits(there_and_back(write_folder(tmp_path / "hf", TIED, weights), tmp_path)) == bits(weights)


def test_config_tokenizer_and_generation_config_travel_along(tmp_path):
    config = {**in_new_dialect({**HUB, "rope_scaling": LLAMA3_ROPE}), "pad_token_id": 5, "use_cache": True}
    source = write_folder(tmp_path / "hf", config, random_weights(HUB))
    companions = [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "LICENSE",
        "README.md",
    ]
    for name in companions:
        (source / name).write_text(json.dumps({"of": name}))
    there_and_back(source, tmp_path)
    for name in companions:
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    folder = open_folder("x", str(tmp_path / "ours"))
    assert (folder.tokenizer, folder.generation) == (tmp_path / "ours" / "tokenizer", {"of": "generation_config.json"})
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key: written[key] for key in config} == config
    assert written["rope_scaling"] == LLAMA3_ROPE


def test_buffers_of_old_folders_are_left_aside_and_told(tmp_path):
    weights = random_weights(HUB)
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32) for i in range(3)}
    done = from_hf(str(write_folder(tmp_path / "hf", HUB, {**weights, **buffers})), str(tmp_path / "ours"))
    assert "dropped 3 tensors such as model.layers.0.self_attn.rotary_emb.inv_freq" in done.lines()[-1]
    assert done.tensors == len(weights)


def test_another_dtype_is_rounded_to_and_what_is_too_large_refused(tmp_path):
    weights = random_weights(HUB)
    source = write_folder(tmp_path / "hf", HUB, weights)
    back = there_and_back(source, tmp_path, dtype="bfloat16")
    assert bits(back) == bits({name: array.astype(DTYPES["BF16"]) for name, array in weights.items()})
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    weights[GATE][0, 0] = 7e4
    shutil.rmtree(tmp_path / "ours")
    from_hf(str(write_folder(tmp_path / "large", HUB, weights)), str(tmp_path / "ours"))
    with pytest.raises(ConfigError, match=rf"{GATE} holds values too large for float16: choose another --dtype"):
        to_hf(str(tmp_path / "ours"), str(tmp_path / "half"), dtype="float16")
    assert not (tmp_path / "half").exists()


def test_how_many_positions_is_asked_where_nothing_says(tmp_path):
    from_hf(str(write_folder(tmp_path / "hf", HUB, random_weights(HUB))), str(tmp_path / "ours"))
    (tmp_path / "ours" / "tokenizer" / "config.json").unlink()
    with pytest.raises(ConfigError, match="how many positions the model was trained for: add --max-position=N"):
        to_hf(str(tmp_path / "ours"), str(tmp_path / "back"))
    with pytest.raises(ConfigError, match="--max-position=0 is not valid"):
        to_hf(str(tmp_path / "ours"), str(tmp_path / "back"), max_position=0)
    to_hf(str(tmp_path / "ours"), str(tmp_path / "back"), max_position=77)
    assert open_folder("x", str(tmp_path / "back")).original_config["max_position_embeddings"] == 77
    assert open_folder("x", str(tmp_path / "back")).model == open_folder("x", str(tmp_path / "ours")).model


def test_as_many_positions_as_the_model_was_trained_for(tmp_path):
    """The value in its config.json, or more if jaxllm trained on longer sequences. A missing value stays missing."""
    from_hf(str(write_folder(tmp_path / "hf", HUB, random_weights(HUB))), str(tmp_path / "ours"))
    for name, change, positions in (("shorter", 64, 128), ("longer", 512, 512)):
        said(tmp_path / "ours", sequence_length=change)
        to_hf(str(tmp_path / "ours"), str(tmp_path / name))
        assert json.loads((tmp_path / name / "config.json").read_text())["max_position_embeddings"] == positions
    silent = {key: value for key, value in HUB.items() if key != "max_position_embeddings"}
    from_hf(str(write_folder(tmp_path / "silent", silent, random_weights(HUB))), str(tmp_path / "silently"))
    to_hf(str(tmp_path / "silently"), str(tmp_path / "back"))
    assert "max_position_embeddings" not in json.loads((tmp_path / "back" / "config.json").read_text())


# -------------------------------------------------------------------------------------------------------- what is not whole


@pytest.fixture
def sharded(tmp_path):
    return write_folder(tmp_path / "hf", HUB, random_weights(HUB), shards=3)


def rewrite(folder, change):
    """The folder as one file, with `change` applied to its tensors."""
    weights = read_folder(folder)
    change(weights)
    shutil.rmtree(folder)
    write_folder(folder, HUB, weights)


def cut(folder):
    shard = folder / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])


def as_float8(folder):
    rewrite(folder, lambda weights: None)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header[GATE]["dtype"] = "F8_E4M3"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[start:])


def only_pickles(folder):
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def nan(weights):
    weights[GATE] = weights[GATE].copy()
    weights[GATE][7, 3] = np.nan


SPOILED = [
    (cut, "model-00002-of-00003.safetensors is damaged .*it is truncated"),
    (lambda f: (f / "model-00003-of-00003.safetensors").unlink(), "model-00003-of-00003.safetensors is missing"),
    (lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": '), r"index.json cannot be read \(not JSON"),
    (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "index.json has no weight_map"),
    (lambda f: (f / "model.safetensors.index.json").unlink(), "holds shards such as model-00001-of-00003.safetensors but no"),
    (lambda f: (f / "config.json").write_text("{"), r"config.json cannot be read \(not JSON"),
    (lambda f: (f / "config.json").unlink(), "holds no model: there is neither config.json"),
    (lambda f: rewrite(f, lambda w: w.pop(GATE)), f"has no tensor {GATE}, which its config.json requires"),
    (lambda f: rewrite(f, lambda w: w.pop(HEAD)), f"has no tensor {HEAD}.* or set tie_word_embeddings to true"),
    (
        lambda f: rewrite(f, lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": w[HEAD]})),
        "q_proj.bias, which that network does not have",
    ),
    (
        lambda f: rewrite(f, lambda w: w.update({GATE: w[GATE].T})),
        r"gate_proj.weight in .* has shape \[24, 40\], and .* \[40, 24\]",
    ),
    (lambda f: rewrite(f, nan), rf"^{GATE} holds values that are not finite \(NaN or infinite\)"),
    (as_float8, f"{GATE} in .* has dtype F8_E4M3, jaxllm supports F32, BF16, F16"),
    (
        only_pickles,
        "holds pytorch_model.bin but no safetensors file: load the model with transformers and call save_pretrained",
    ),
    (lambda f: [p.unlink() for p in f.glob("model*")], r"has a config.json but no \*.safetensors"),
    (
        lambda f: write_file(f / "model-00001-of-00003.safetensors", {HEAD: np.ones((67, 24), np.float32)}),
        "lm_head.weight twice",
    ),
    (
        lambda f: (f / "config.json").write_text(json.dumps({**HUB, "num_attention_heads": 8, "num_key_value_heads": 3})),
        "k_proj",
    ),
    (lambda f: (f / "config.json").write_text(json.dumps({**HUB, "hidden_act": "relu"})), "hidden_act=relu"),
]


@pytest.mark.parametrize(("spoil", "sentence"), SPOILED)
def test_a_source_that_is_not_whole_is_refused_and_leaves_nothing(spoil, sentence, sharded, tmp_path):
    spoil(sharded)
    with pytest.raises(ConfigError, match=sentence):
        from_hf(str(sharded), str(tmp_path / "new" / "ours"))
    assert not (tmp_path / "new").exists() or not list((tmp_path / "new").iterdir())


def test_a_tied_head_that_differs_is_refused(tmp_path):
    weights = random_weights(HUB)
    with pytest.raises(ConfigError, match="tie_word_embeddings=true: set it to false to load both"):
        from_hf(str(write_folder(tmp_path / "hf", TIED, weights)), str(tmp_path / "ours"))


def test_what_was_written_otherwise_than_read_is_found(sharded, tmp_path, monkeypatch):
    """A flipped bit on the disk or a wrong map leaves no folder."""
    plain = Tensor.write

    def flip(self, values, first=0):
        if self.name == "layers.mlp.gate" and first == 24 * 40:
            values = values.copy()
            values.view(np.uint32)[5] ^= 1
        plain(self, values, first)

    monkeypatch.setattr(Tensor, "write", flip)
    with pytest.raises(ConfigError, match=rf"{GATE} reads back differently"):
        from_hf(str(sharded), str(tmp_path / "ours"))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_no_space_is_one_sentence_and_leaves_nothing(sharded, tmp_path, monkeypatch):
    # In KiB; the weights have 92.
    command = f'ulimit -f 20; exec "{sys.executable}" -m jaxllm.cli convert from-hf "{sharded}" "{tmp_path / "ours"}"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, "")
    assert "ours could not be written (File too large): remove the cause, or choose another." in done.stderr
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    with pytest.raises(ConfigError, match=r"needs .* GB, and its disk has 1e-06 GB left"):
        from_hf(str(sharded), str(tmp_path / "ours"))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_links_out_of_the_folder_are_not_followed(sharded, tmp_path, monkeypatch):
    """Except in Hugging Face's own cache, where a snapshot consists of links to blobs."""
    monkeypatch.setattr("jaxllm.cluster.distributed.start", lambda run: pytest.fail("a device was touched"))
    (tmp_path / "secret").write_text("x")
    license = sharded / "LICENSE"
    sections = {"model": open_folder("x", str(sharded)).model, "data": {"source": "prepared", "paths": ["none"]}}
    init = load_config({**TINY, **sections}, [f"train.init_from={sharded}"])
    for target in (tmp_path / "secret", "../secret", "/dev/zero"):
        license.symlink_to(target)
        for start in (lambda: from_hf(str(sharded), str(tmp_path / "ours")), lambda: jaxllm.Trainer(init)):
            with pytest.raises(
                ConfigError, match=r"hf/LICENSE is a link to .*, outside .*: put the file itself there, or remove"
            ):
                start()
        license.unlink()
    license.symlink_to("LICENSE")
    with pytest.raises(ConfigError, match=r"hf/LICENSE is (a link to itself|not a regular file)"):
        from_hf(str(sharded), str(tmp_path / "ours"))
    license.unlink()
    os.mkfifo(license)
    with pytest.raises(ConfigError, match=r"hf/LICENSE is not a regular file: replace or remove it"):
        from_hf(str(sharded), str(tmp_path / "ours"))
    license.unlink()
    assert not (tmp_path / "ours").exists()
    hub = tmp_path / "models--a--b"
    (hub / "blobs").mkdir(parents=True)
    (hub / "blobs" / "1").write_text("of the hub")
    license.symlink_to(Path("..", "..", "blobs", "1"))
    (hub / "snapshots").mkdir()
    (sharded / "templates").mkdir()
    (sharded / "templates" / "a.jinja").write_text("a")
    (sharded / "additional_chat_templates").symlink_to("templates")
    from_hf(str(shutil.move(sharded, hub / "snapshots" / "rev")), str(tmp_path / "ours"))
    assert (tmp_path / "ours" / "tokenizer" / "additional_chat_templates" / "a.jinja").read_text() == "a"
    assert (tmp_path / "ours" / "tokenizer" / "LICENSE").read_text() == "of the hub"
    assert not (tmp_path / "ours" / "tokenizer" / "LICENSE").is_symlink()


# ------------------------------------------------------------------------------------------------- destinations and the command


def test_an_existing_destination_is_refused_or_moved_aside(sharded, tmp_path):
    target = tmp_path / "ours"
    for text in ("first", "second"):
        target.mkdir()
        (target / "mine").write_text(text)
        with pytest.raises(ConfigError, match="ours exists already, and nothing is overwritten"):
            from_hf(str(sharded), str(target))
        from_hf(str(sharded), str(target), force=True)
        shutil.rmtree(target)
    assert [(tmp_path / f"ours.before-{n}" / "mine").read_text() for n in (1, 2)] == ["first", "second"]
    target.mkdir()
    (target / "mine").write_text("third")
    (sharded / "config.json").unlink()
    with pytest.raises(ConfigError, match="holds no model"):
        from_hf(str(sharded), str(target), force=True)
    assert (target / "mine").read_text() == "third"


def test_folders_of_the_other_kind_are_told_apart(sharded, tmp_path):
    from_hf(str(sharded), str(tmp_path / "ours"))
    with pytest.raises(ConfigError, match="is already in jaxllm's own format"):
        from_hf(str(tmp_path / "ours"), str(tmp_path / "x"))
    with pytest.raises(ConfigError, match="is already a Hugging Face folder"):
        to_hf(str(sharded), str(tmp_path / "x"))
    with pytest.raises(ConfigError, match="--dtype=int8 is not one of the choices: use float32, bfloat16, float16"):
        to_hf(str(tmp_path / "ours"), str(tmp_path / "x"), dtype="int8")


def test_jaxllms_own_folder_is_checked_like_the_others(sharded, tmp_path):
    from_hf(str(sharded), str(tmp_path / "ours"))
    for name, spoil, sentence in (
        ("cut", lambda f: os.truncate(f / "weights.safetensors", 2000), "it is truncated"),
        ("none", lambda f: (f / "weights.safetensors").unlink(), "weights.safetensors is missing"),
        ("json", lambda f: (f / "model.json").write_text("["), r"model.json cannot be read \(not JSON"),
        ("newer", lambda f: said(f, format=3), "has format 3, this jaxllm reads up to 2"),
        (
            "other",
            lambda f: said(f, model={**model(f), "num_layers": 4}),
            r"shape \[3, 24\], and the config requires \[4, 24\]",
        ),
    ):
        folder = shutil.copytree(tmp_path / "ours", tmp_path / name)
        spoil(folder)
        with pytest.raises(ConfigError, match=sentence):
            open_folder("x", str(folder))


def model(folder):
    return json.loads((folder / "model.json").read_text())["model"]


def said(folder, **change):
    path = folder / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def test_an_export_of_a_folder_of_hugging_face_is_its_conversion(tmp_path):
    """In jaxllm's format matrices are as it multiplies them, [in, out]."""
    source = write_folder(tmp_path / "hf", HUB, random_weights(HUB))
    from_hf(str(source), str(tmp_path / "converted"))
    export(str(source), str(tmp_path / "exported"))
    folders = (sorted((tmp_path / name).glob("*.safetensors")) for name in ("converted", "exported"))
    converted, exported = ({k: v for file in files for k, v in load_file(file).items()} for files in folders)
    assert converted
    assert converted.keys() == exported.keys()
    for name, values in converted.items():
        np.testing.assert_array_equal(exported[name], values, err_msg=name)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("500MiB", 500 * 2**20), ("1.5kb", 1500), ("7", 7), ("x", None), ("0GB", None)]
)
def test_sizes_of_shards(text, size):
    if size is None:
        with pytest.raises(ConfigError, match=f"--max-shard-size={text} is not a size"):
            parse_size(text)
    else:
        assert parse_size(text) == size


def test_the_command_says_what_it_did(sharded, tmp_path, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["jaxllm", "convert", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code, capsys.readouterr()

    code, said = run("from-hf", sharded, tmp_path / "ours")
    nbytes = sum(array.nbytes for array in read_folder(sharded).values())
    assert code == 0
    assert said.out.splitlines() == [
        f"converted {sharded} to {tmp_path / 'ours'}: 30 tensors, {nbytes:,} bytes of float32 in 1 file",
        "every tensor was read back, and its checksum is the source's",
    ]
    code, said = run("to-hf", tmp_path / "ours", tmp_path / "back", "--max-shard-size", "20KB")
    files = list((tmp_path / "back").glob("*.safetensors"))
    assert (code, len(files) > 1, f"in {len(files)} files" in said.out) == (0, True, True)
    code, said = run("from-hf", tmp_path / "none", tmp_path / "x")
    assert (code, said.out) == (2, "")
    assert said.err.startswith(f"jaxllm: SRC={tmp_path / 'none'} is not a folder")
