"""Images of conversations: pixels are transformers', each image is in its place, and what cannot be used is named."""

import io
import json
import os
import random
import re

import numpy as np
import pytest
import tokenizers
from PIL import Image, ImageDraw

import jaxllm
from jaxllm.config import ConfigError, load_config
from jaxllm.config.model_config import VisionConfig
from jaxllm.data import images as module
from jaxllm.data.images import ImageTokens, load_image_processor
from jaxllm.data.sources import load_data
from jaxllm.data.tokenizer import load_tokenizer
from jaxllm.inference import predict

COLOURS = {"red": (220, 30, 30), "green": (30, 180, 40), "blue": (40, 60, 220), "yellow": (230, 220, 40)}
SHAPES = ("circle", "square", "bar")
SPECIAL = ["<unk>", "<s>", "</s>", "<picture>", "<eot>"]
TOWER = {"image_size": 16, "patch_size": 8, "num_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4}
VISION = VisionConfig(**TOWER, image_token_id=3)
STRINGS = "{% for m in messages %}{{ m.role + ' ' + m.content + ' <eot>' }}{% endfor %}"
PARTS = """\
{% for m in messages %}{{ m.role + ' ' }}{% for part in m.content %}
{%- if part['type'] == 'image' %}{{ '<picture>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}
{{- ' <eot>' }}{% endfor %}"""
ASKS = "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"


@pytest.fixture
def tokenizer(tmp_path):
    """A folder with a tokenizer of words, in which the image token is <picture>."""
    words = ["a", *COLOURS, *SHAPES, "what", "is", "it", "?", "user", "assistant", "and"]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(SPECIAL + words)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(SPECIAL)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (folder / "chat_template.jinja").write_text(STRINGS + ASKS)
    return folder


def picture(rng, colour="red", shape="circle", size=24):
    """A shape somewhere on a dark ground."""
    image = Image.new("RGB", (size, size + 8 * rng.randrange(2)), tuple(rng.randrange(60) for _ in range(3)))
    draw, (width, height), r = ImageDraw.Draw(image), image.size, 6
    x, y = rng.randrange(r, width - r), rng.randrange(r, height - r)
    if shape == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), outline=COLOURS[colour], width=3)
    elif shape == "square":
        draw.rectangle((x - r, y - r, x + r, y + r), fill=COLOURS[colour])
    else:
        draw.rectangle((0, y - 1, width, y + 1), fill=COLOURS[colour])
    return image


def asked(text, answer="a red circle", **more):
    return {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": answer}], **more}


@pytest.fixture
def config_of(tmp_path, tokenizer):
    """config_of(records, *overrides) -> a Config that reads these conversations."""

    def make(records, *overrides):
        file = tmp_path / "data" / "chat.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(map(json.dumps, records)))
        model = {"num_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "vocab_size": 32}
        values = {
            "model": {**model, "compute_dtype": "float32", "vision": {**TOWER, "image_token_id": 3}},
            "train": {"steps": 2, "sequence_length": 32, "global_batch_sequences": 8},
            "data": {"source": "chat", "paths": str(file), "tokenizer": str(tokenizer), "packing": "best_fit"},
            "run": {"dir": str(tmp_path / "run")},
        }
        return load_config(values, [*overrides, "data.held_out_fraction=0"])

    return make


@pytest.fixture
def pictures(tmp_path):
    """Paths, from the folder of the conversations on, of a few pictures."""
    (tmp_path / "data").mkdir(exist_ok=True)
    for number in range(4):
        picture(random.Random(number), [*COLOURS][number]).save(tmp_path / "data" / f"{number}.png")
    return [f"{number}.png" for number in range(4)]


# ------------------------------------------------------------------------------------------------------------- pixels


@pytest.mark.parametrize("size", [(40, 30), (30, 41), (16, 16), (9, 12)])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_pixels_are_those_of_transformers_with_pillow(tmp_path, kind, size):
    transformers = pytest.importorskip("transformers")
    name = {"clip": "CLIPImageProcessorPil", "siglip": "SiglipImageProcessorPil"}[kind]
    if not hasattr(transformers, name):
        pytest.skip("transformers 4 has other names for them")
    sizes = {"size": {"shortest_edge": 16}, "crop_size": 16} if kind == "clip" else {"size": {"height": 16, "width": 16}}
    theirs = getattr(transformers, name)(**sizes)
    theirs.save_pretrained(tmp_path)
    vision = VISION.model_copy(update={"kind": kind})
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8))
    expected = theirs(image.convert("P"), return_tensors="np")["pixel_values"][0]
    for folder in (tmp_path, None):
        found = load_image_processor(vision, folder).pixels(image.convert("P"))
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"size": {"shortest_edge": 24}, "crop_size": 24}, "images of another size than the tower's 16 x 16"),
        ({"size": {"shortest_edge": 16}, "do_center_crop": False}, "images of another size"),
        ({"size": {"height": 24, "width": 24}, "crop_size": 16}, "images of another size"),
        ({"do_pad": True}, "do_pad is true"),
        ({"do_resize": False}, "do_resize is false"),
        ({"image_mean": [0.5]}, "image_mean"),
    ],
)
def test_another_processor_is_refused_by_its_key(tmp_path, said, sentence):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    with pytest.raises(ConfigError, match=f"preprocessor_config.json describes a processor.*{sentence}"):
        load_image_processor(VISION, tmp_path)


# ------------------------------------------------------------------------------------------------------- conversations


@pytest.mark.parametrize("template", [STRINGS, PARTS])
@pytest.mark.parametrize("form", ["placeholder", "parts", "own images", "bytes"])
def test_each_image_is_in_its_place(config_of, tokenizer, pictures, tmp_path, template, form):
    (tokenizer / "chat_template.jinja").write_text(template)
    text, parts = "<image>\nwhat is it ?", [{"type": "image"}, {"type": "text", "text": "what is it ?"}]
    answer = [{"type": "text", "text": "a red circle"}]
    record = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]}
    if form == "placeholder":
        record = asked(text, image=pictures[0])
    elif form == "parts":
        record |= {"images": [{"path": pictures[0], "bytes": None}]}
    elif form == "own images":
        parts[0]["image"] = str(tmp_path / "data" / pictures[0])
    else:
        pytest.importorskip("pyarrow")
        from pyarrow import Table
        from pyarrow.parquet import write_table

        record |= {"images": [{"path": None, "bytes": (tmp_path / "data" / pictures[0]).read_bytes()}]}
        write_table(Table.from_pylist([record] * 2), tmp_path / "data" / "chat.parquet")
    config = config_of([{} if form == "bytes" else record] * 2, "train.sequence_length=16")
    if form == "bytes":
        paths = (str(tmp_path / "data" / "chat.parquet"),)
        config = config.model_copy(update={"data": config.data.model_copy(update={"paths": paths})})
    data = load_data(config)
    batch = data.stream().samples(np.array([0]))
    tokens = batch["tokens"][0]
    assert (tokens == 3).sum() == VISION.tokens_per_image == 4
    at = int(np.argmax(tokens == 3))
    assert (tokens[at : at + 4] == 3).all()
    assert tokens[at - 1] == load_tokenizer(tokenizer).encode("user", parse_special=True)[-1]
    # The answer and the token that ends it are learnt; no image token is.
    learnt = batch["targets"][0][batch["mask"][0]]
    assert load_tokenizer(tokenizer).decode(learnt) == "a red circle"
    assert batch["images"].shape == (1, 4, 3, 16, 16)
    expected = load_image_processor(VISION, tokenizer).pixels(picture(random.Random(0)))
    np.testing.assert_array_equal(batch["images"][0, 0], expected)
    assert (batch["images"][0, 1:] == 0).all()


def test_sequences_hold_the_images_of_their_conversations_in_order(config_of, tokenizer, pictures):
    """Each image token's number in its sequence leads to the image of its conversation, and no sequence has too many."""
    records = [
        asked("<image> and <image> what", "a red bar", images=[pictures[n % 4], pictures[(n + 1) % 4]]) for n in range(7)
    ]
    records += [asked("<image> what", f"a {colour} bar", image=pictures[n]) for n, colour in enumerate(COLOURS)] * 3
    records += [asked("what is it ?", "a square")] * 5
    config = config_of(records, "data.max_images=2", "train.sequence_length=64")
    data = load_data(config)
    stream, processor = data.stream(), load_image_processor(VISION, tokenizer)
    of_file = [processor.pixels(picture(random.Random(n), colour)) for n, colour in enumerate(COLOURS)]
    batch = stream.samples(np.arange(stream.sources[0].packing.num_samples))
    colours = {int(load_tokenizer(tokenizer).encode(colour)[-1]): number for number, colour in enumerate(COLOURS)}
    seen = 0
    for tokens, segments, images in zip(batch["tokens"], batch["segments"], batch["images"], strict=True):
        numbers = np.cumsum(tokens == 3) // 4
        assert numbers[-1] <= 2
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            count = (tokens[here] == 3).sum() // 4
            first = int(numbers[np.argmax(here)])
            if count == 1:
                colour = next(number for token, number in colours.items() if token in tokens[here])
                np.testing.assert_array_equal(images[first], of_file[colour])
                seen += 1
    assert seen == 12


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (asked("what is it ?", image="0.png"), "it has 1 images and 0 places for them in its text"),
        (asked("<image> <image>", image="0.png"), "it has 1 images and 2 places"),
        (asked("<image>"), "it has 0 images and 1 places"),
        (asked("<image>", image="missing.png"), r"missing.png cannot be read \(No such file"),
        (asked("<image>", image="text.png"), "text.png is no JPEG, PNG, WEBP"),
        (asked("<image>", image="large.png"), "large.png has 70 x 24 pixels, more than 1,000"),
        (asked("<image>", image="heavy.png"), "heavy.png has 90,000 bytes, more than 0 MiB"),
        (asked("<image>", image="narrow.png"), "narrow.png has 402 x 2 pixels, more than 1,000 or too narrow"),
        (asked("<image>", image="pipe.png"), "pipe.png is no file"),
        (asked("<image>", image="0.png", images=["1.png"]), "it has images in two places"),
        (asked("<image>", image=7), "an image is 7, neither a path nor bytes"),
    ],
)
def test_a_conversation_with_an_unusable_image_is_skipped_and_named(config_of, pictures, tmp_path, monkeypatch, record, reason):
    monkeypatch.setattr(module, "MOST_PIXELS", 1_000)
    monkeypatch.setattr(module, "MOST_BYTES", 80_000)
    (tmp_path / "data" / "text.png").write_text("no picture")
    (tmp_path / "data" / "heavy.png").write_bytes(bytes(90_000))
    Image.new("RGB", (70, 24)).save(tmp_path / "data" / "large.png")
    Image.new("RGB", (402, 2)).save(tmp_path / "data" / "narrow.png")
    os.mkfifo(tmp_path / "data" / "pipe.png")
    data = load_data(config_of([*[asked("<image> what", image=pictures[0])] * 3, record]))
    assert data.sources[0].train.size == 3
    assert re.search(rf"1 of 4 lines skipped, the first .*chat.jsonl:4: .*{reason}", data.description)


def test_pixels_that_are_damaged_end_the_run_with_the_name_of_the_file(config_of, pictures, tmp_path):
    file = tmp_path / "data" / pictures[1]
    file.write_bytes(file.read_bytes()[:90])
    data = load_data(config_of([asked("<image> what", image=pictures[1])] * 4))
    with pytest.raises(ConfigError, match=r"1\.png is damaged .*replace it"):
        data.stream().samples(np.arange(2))


def test_a_conversation_without_room_is_left_out_and_counted(config_of, pictures):
    records = [asked("<image> what", image=pictures[0])] * 6 + [asked("<image> " * 9, images=[pictures[0]] * 9)]
    data = load_data(config_of(records))
    assert "1 conversations have images and do not fit into a sequence, and are left out" in data.description
    assert data.stream().samples(np.arange(1))["images"].shape[1] == 32 // 4
    with pytest.raises(ConfigError, match=r"No conversation of chat fits into train.sequence_length=12 .*max_images=3"):
        load_data(config_of(records[-1:], "train.sequence_length=12")).stream()


@pytest.mark.parametrize(("most", "length"), [(3, 32), (4, 32), (2, 31), (1, 20)])
def test_a_sequence_takes_as_many_images_as_it_may_and_no_more(config_of, pictures, most, length):
    """Also where their number does not divide the sequence, nothing is cut and each image is in a sequence."""
    records = [asked("<image> " * count, image=None, images=pictures[:count]) for count in (1, most) * 3]
    data = load_data(config_of(records, f"data.max_images={most}", f"train.sequence_length={length}"))
    stream = data.stream()
    batch = stream.samples(np.arange(stream.sources[0].packing.num_samples))
    of_rows = (batch["tokens"] == 3).sum(1) // VISION.tokens_per_image
    assert of_rows.max() == most
    assert of_rows.sum() == 3 + 3 * most
    assert ((np.abs(batch["images"]).max((2, 3, 4)) > 0).sum(1) == of_rows).all()


def test_images_of_answers_are_not_learnt(config_of, pictures):
    batch = load_data(config_of([asked("what", "a <image> bar", image=pictures[0])] * 4)).stream().samples(np.arange(1))
    assert (batch["tokens"] == 3).any()
    assert not (batch["targets"][batch["mask"]] == 3).any()


def test_a_picture_is_seen_as_its_camera_was_held(tmp_path):
    pixels = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8))
    turned = pixels.transpose(Image.Transpose.ROTATE_90)
    held = Image.Exif()
    held[0x112] = 6
    turned.save(tmp_path / "turned.png", exif=held)
    processor = load_image_processor(VISION)
    with module.open_image(tmp_path / "turned.png") as found:
        np.testing.assert_array_equal(processor.pixels(found), processor.pixels(pixels))


def test_a_run_keeps_the_processor_that_it_was_trained_with(tokenizer, tmp_path):
    (tokenizer / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5]}')
    load_tokenizer(tokenizer).save(tmp_path / "kept")
    assert load_image_processor(VISION, tmp_path / "kept").mean == (0.5, 0.5, 0.5)
    assert load_image_processor(VISION, None, tmp_path / "kept").mean == (0.5, 0.5, 0.5)


def test_a_tokenizer_without_the_image_token_is_refused(config_of, pictures):
    config = config_of([asked("<image>", image=pictures[0])], "model.vision.image_token_id=5")
    with pytest.raises(ConfigError, match=r"has no special token of model.vision.image_token_id=5: set"):
        load_data(config)


def test_image_tokens_repeat_with_what_is_beside_them():
    tokens = ImageTokens("<picture>", 3, 2)
    ids, beside = tokens.expanded(np.array([1, 3, 5, 3]), np.array([True, False, True, False]))
    assert ids.tolist() == [1, 3, 3, 5, 3, 3]
    assert beside.tolist() == [True, False, False, True, False, False]


# ------------------------------------------------------------------------------------------------------------ a whole run


@pytest.mark.slow
def test_a_run_learns_to_name_drawn_shapes(config_of, tokenizer, tmp_path):
    """Trained from nothing, exported, and asked about pictures that it has not seen."""
    rng = random.Random(0)
    names = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    for number in range(2400):
        picture(rng, *names[number % 12]).save(tmp_path / f"{number}.png")
    (tmp_path / "data").mkdir()
    records = [
        asked("<image> what is it ?", "a {} {}".format(*names[number % 12]), image=f"../{number}.png") for number in range(2400)
    ]
    config = config_of(
        records,
        *("train.steps=900", "train.sequence_length=64", "train.global_batch_sequences=8", "parallel.data=1"),
        *("optimizer.learning_rate=0.003", "optimizer.warmup_tokens=8000", "run.cpu_devices=1", "log.every_steps=300"),
    )
    jaxllm.fit(config)
    model = tmp_path / "model"
    jaxllm.export(config.run.dir, model, "hf")
    asks, files, right = 48, [], []
    for number in range(asks):
        colour, shape = names[number % 12]
        picture(rng, colour, shape).save(file := tmp_path / f"asked-{number}.png")
        files.append(file)
        right.append(f"a {colour} {shape}")
    found = predict.generate(model, ["<image> what is it ?"] * asks, chat=True, max_new_tokens=5, images=files)
    correct = sum(one.text.strip() == expected for one, expected in zip(found, right, strict=True))
    assert correct > 0.95 * asks, [one.text for one in found]
    with pytest.raises(ConfigError, match="The prompts have 0 places <image> for 2 images"):
        predict.generate(model, ["what", "is"], images=files[:2])
    with pytest.raises(ConfigError, match="The prompts have 1 places <image> for 0 images"):
        predict.generate(model, "<image> what")
    with pytest.raises(ConfigError, match=r"--image: .*missing.png cannot be read"):
        predict.generate(model, "what", images=["missing.png"])


def test_an_image_in_memory_is_one_of_its_bytes():
    buffer = io.BytesIO()
    picture(random.Random(0)).save(buffer, "webp")
    with module.open_image(buffer.getvalue()) as found:
        assert found.size[0] == 24
