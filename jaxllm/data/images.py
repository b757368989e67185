"""Images of conversations: where they are in a text, and the pixels that a vision tower takes of them.

    processor = load_image_processor(model.vision, folder)
    pixels_CXY = processor.pixels(open_image("cat.jpg"))

An image is the path of a JPEG, PNG or WebP, or its bytes. In a text PLACEHOLDER says where it is.
"""

import io
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from stat import S_ISREG
from typing import Any, Literal

import numpy as np

from jaxllm.config.errors import ConfigError
from jaxllm.config.hf_config import read_object
from jaxllm.config.model_config import VisionConfig
from jaxllm.config.types import PositiveFloat, PositiveInt, Switch
from jaxllm.data.documents import Documents
from jaxllm.data.tokenizer import PROCESSOR_FILES, JsonTokenizer, Tokenizer
from jaxllm.machine.host import available_cpus
from jaxllm.untrusted import MIB, RefusedInput, checked, shown

PLACEHOLDER = "<image>"
FORMATS = ("JPEG", "PNG", "WEBP")
MOST_BYTES, MOST_PIXELS, MOST_TIMES = 64 * MIB, 2**26, 200
"""Limits of an image before its pixels are decoded, the last of its sides; 2^26 pixels take 200 MB."""
Image = Path | bytes


class BrokenImage(Exception):
    """Why an image cannot be used: a phrase."""


def open_image(image: Image) -> Any:
    """Pillow's image, of which only the header is read.

    Raises:
      BrokenImage: it is missing, too large, or not a JPEG, PNG or WebP.
    """
    try:
        from PIL import Image as Pillow
        from PIL import UnidentifiedImageError
    except ImportError:
        raise ConfigError("Reading images needs Pillow: pip install 'jaxllm[images]'.") from None
    name = "the image" if isinstance(image, bytes) else str(image)
    try:
        if isinstance(image, Path) and not S_ISREG(image.stat().st_mode):
            raise BrokenImage(f"{name} is no file")
        if (size := len(image) if isinstance(image, bytes) else image.stat().st_size) > MOST_BYTES:
            raise BrokenImage(f"{name} has {size:,} bytes, more than {MOST_BYTES // MIB} MiB")
        found = Pillow.open(io.BytesIO(image) if isinstance(image, bytes) else image, formats=FORMATS)
    except UnidentifiedImageError:
        raise BrokenImage(f"{name} is no {', '.join(FORMATS)}") from None
    except (OSError, SyntaxError, ValueError, Pillow.DecompressionBombError) as error:
        raise BrokenImage(f"{name} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if math.prod(found.size) > MOST_PIXELS or max(found.size) > MOST_TIMES * min(found.size):
        found.close()
        raise BrokenImage(f"{name} has {found.size[0]} x {found.size[1]} pixels, more than {MOST_PIXELS:,} or too narrow")
    return found


@dataclass(frozen=True)
class ImageProcessor:
    """How an image becomes pixels, as the tower was trained with."""

    side: int
    """Pixels of each side of the result."""
    shortest: int | None
    """The shorter side is resized to this, and the middle is cut out. None: both sides are resized."""
    resample: int
    """Pillow's number of the filter."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    scale: float = 1 / 255

    def pixels(self, image: Any) -> np.ndarray:
        """float32 [3, side, side] of an image of Pillow.

        Raises:
          BrokenImage: its bytes are damaged.
        """
        from PIL import ImageOps

        try:
            # As transformers opens one: cameras write how it was held.
            image = ImageOps.exif_transpose(image).convert("RGB")
        except (OSError, SyntaxError, ValueError) as error:
            raise BrokenImage(f"{getattr(image, 'filename', '') or 'the image'} is damaged ({error})") from None
        width, height = self.side, self.side
        if self.shortest is not None:
            short, long = sorted(image.size)
            sizes = self.shortest, int(self.shortest * long / short)
            width, height = sizes if image.size[0] <= image.size[1] else sizes[::-1]
        array = np.asarray(image.resize((width, height), self.resample))
        top, left = (height - self.side) // 2, (width - self.side) // 2
        array = array[top : top + self.side, left : left + self.side].astype(np.float32) * np.float32(self.scale)
        return ((array - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)).transpose(2, 0, 1)


# -------------------------------------------------------------------------------------------------- preprocessor_config.json

_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_SIGLIP = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
_Size = PositiveInt | dict[Literal["shortest_edge", "height", "width"], PositiveInt]


@dataclass(frozen=True)
class _Said:
    """What is read of preprocessor_config.json."""

    do_resize: Literal[True] = True
    do_rescale: Literal[True] = True
    do_normalize: Literal[True] = True
    do_convert_rgb: Literal[True, None] = True
    do_pad: Literal[False, None] = None
    do_center_crop: Switch | None = None
    size: _Size | None = None
    crop_size: _Size | None = None
    resample: Literal[1, 2, 3] = 3
    rescale_factor: PositiveFloat = 1 / 255
    image_mean: tuple[float, float, float] | None = None
    image_std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] | None = None


def load_image_processor(vision: VisionConfig, *folders: str | Path | None) -> ImageProcessor:
    """The processor of the first of a model's folders with its file; without one that of the class of the tower.

    Raises:
      ConfigError: the file is damaged, or says what jaxllm does not do.
    """
    mean, std = _CLIP if vision.kind == "clip" else _SIGLIP
    side, crops = vision.image_size, vision.kind == "clip"
    files = (Path(folder) / name for folder in folders if folder for name in PROCESSOR_FILES)
    if (file := next((file for file in files if file.is_file()), None)) is None:
        return ImageProcessor(side, side if crops else None, 3, mean, std)
    found = read_object(file)
    try:
        said = checked(found.get("image_processor", found), _Said)
        crops = crops if said.do_center_crop is None else said.do_center_crop
        # A number, in files of old versions, is that of the shorter side where the middle is cut out.
        size = said.size if isinstance(said.size, Mapping) else {"shortest_edge" if crops else "height": said.size or side}
        cut = said.crop_size.values() if isinstance(said.crop_size, Mapping) else [said.crop_size or side]
        shortest = size.get("shortest_edge")
        if not (crops and {*cut} == {side} and shortest >= side if shortest else {*size.values()} == {side}):
            raise RefusedInput(f"it makes images of another size than the tower's {side} x {side}")
    except RefusedInput as error:
        raise ConfigError(f"{file} describes a processor that jaxllm does not have ({error}): change it.") from None
    return ImageProcessor(side, shortest, said.resample, said.image_mean or mean, said.image_std or std, said.rescale_factor)


# ---------------------------------------------------------------------------------------------------------- in a sequence


@dataclass(frozen=True)
class SequenceImages:
    """The images of packed sequences."""

    processor: ImageProcessor
    most: int
    """Images of a sequence at most."""

    def counts(self, documents: Documents) -> np.ndarray:
        """int64 [documents]: images of each document."""
        return np.array([*map(len, documents.images or [])] or np.zeros(len(documents.lengths)), np.int64)

    def room(self, documents: Documents, sequence_length: int) -> np.ndarray:
        """Lengths of documents as they are packed: a sequence that they fill has at most so many images."""
        counts = self.counts(documents)
        # `most` of these fill no more than a sequence, and one more does not fit.
        return np.maximum(documents.lengths, np.where(counts > 0, counts * sequence_length // (self.most + 1) + 1, 0))

    def pixels(self, documents: Documents, rows: Sequence[Sequence[int]]) -> np.ndarray:
        """float32 [rows, most, 3, side, side]: of the documents of each row.

        Raises:
          ConfigError: an image is damaged; the message names it.
        """
        side, listed = self.processor.side, documents.images or []
        found = np.zeros((len(rows), self.most, 3, side, side), np.float32)
        here = [[image for number in row for image in listed[number]] if listed else [] for row in rows]
        places = [(row, place, image) for row, images in enumerate(here) for place, image in enumerate(images)]

        def put(where: tuple[int, int, Image]) -> None:
            row, place, image = where
            with open_image(image) as opened:
                found[row, place] = self.processor.pixels(opened)

        try:
            # Pillow decodes without Python's lock.
            list(_decoders().map(put, places))
        except BrokenImage as error:
            raise ConfigError(f"{error}, and a run reads the same images each time: replace it.") from None
        return found


@cache
def _decoders() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, available_cpus()), "images")


# ------------------------------------------------------------------------------------------------------------- in a text


@dataclass(frozen=True)
class ImageTokens:
    """The image token of a model, in texts and ids."""

    text: str
    """What the tokenizer makes the token of."""
    id: int
    per_image: int

    def in_text(self, text: str) -> str:
        """`text` with the token in the place of placeholders."""
        return text.replace(PLACEHOLDER, self.text)

    def expanded(self, ids: np.ndarray, *beside: np.ndarray) -> tuple[np.ndarray, ...]:
        """Ids, and arrays of as many elements, with each image token as often as an image has features."""
        times = np.where(ids == self.id, self.per_image, 1)
        return tuple(np.repeat(array, times) for array in (ids, *beside))


def image_tokens(tokenizer: Tokenizer, vision: VisionConfig) -> ImageTokens:
    """
    Raises:
      ConfigError: the tokenizer has no special token of that id.
    """
    token = tokenizer.added.get(vision.image_token_id) if isinstance(tokenizer, JsonTokenizer) else None
    if token is None or not token.special:
        raise ConfigError(
            f"The tokenizer {tokenizer.name} has no special token of model.vision.image_token_id={vision.image_token_id}: set "
            f"that to one of its special tokens, or name the tokenizer of the model (data.tokenizer)."
        )
    return ImageTokens(token.content, vision.image_token_id, vision.tokens_per_image)


def images_of(value: Any, folder: Path) -> list[Image]:
    """Images of a record's field: a path, a row of datasets with bytes or path, or a list of them. Paths begin at `folder`.

    Raises:
      BrokenImage: one is something else, or cannot be read.
    """
    found: list[Image] = []
    for one in value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]:
        if isinstance(one, Mapping):
            one = one.get("bytes") or one.get("path")
        if not isinstance(one, str | bytes) or not one:
            raise BrokenImage(f"an image is {shown(one, 40)}, neither a path nor bytes")
        found.append(folder / one if isinstance(one, str) else bytes(one))
        open_image(found[-1]).close()
    return found


def with_placeholders(value: Any) -> tuple[Any, list[Any]]:
    """A record with texts in the place of parts that are images, and the images that these hold."""
    if isinstance(value, dict) and value.get("type") == "image":
        own = [value[name] for name in ("image", "path", "bytes") if value.get(name) is not None]
        return {"type": "text", "text": PLACEHOLDER}, own[:1]
    if not isinstance(value, dict | list):
        return value, []
    found = [with_placeholders(inner) for inner in (value.values() if isinstance(value, dict) else value)]
    texts, images = [text for text, _ in found], [image for _, own in found for image in own]
    return dict(zip(value, texts, strict=True)) if isinstance(value, dict) else texts, images
