"""The values of a GGUF file, whose header the library gguf writes. They are written and read in pieces, as those of
safetensors: the library's writer needs a tensor whole, and pages of its reader's memory map count as the process's own memory.

Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from jaxllm.pretrained.safetensors import CODES, Tensor, ValuesFile, ValuesWriter
from jaxllm.pretrained.streaming import Described, nbytes

TYPES = {code: GGMLQuantizationType[code] for code in CODES.values()}
"""ggml's types, by the names that safetensors has for dtypes."""


class GGUFFile:
    """The format of a file with a given header (streaming.FileFormat).

    Args:
      header: with all keys, and without tensors.
    """

    def __init__(self, header: GGUFWriter):
        self._header = header
        self._begin: dict[str, int] = {}
        self._tensors: Described = {}

    def writer(self, path: Path, tensors: Described, metadata: Mapping[str, str]) -> ValuesWriter:
        header, self._tensors = self._header, tensors
        for name, (dtype, shape) in tensors.items():
            raw = TYPES[CODES[dtype]]
            header.add_tensor_info(name, shape, np.dtype(np.float32), nbytes(dtype, shape), raw_dtype=raw)
        header.write_header_to_file(path)
        header.write_kv_data_to_file()
        header.write_ti_data_to_file()
        header.close()
        end = path.stat().st_size
        for name, tensor in tensors.items():
            self._begin[name] = GGUFWriter.ggml_pad(end, header.data_alignment)
            end = self._begin[name] + nbytes(*tensor)
        os.truncate(path, GGUFWriter.ggml_pad(end, header.data_alignment))
        return ValuesWriter(self._begin, os.open(path, os.O_WRONLY))

    def reader(self, path: Path) -> dict[str, Tensor]:
        file = ValuesFile(path)
        return {
            name: Tensor(name, CODES[dtype], shape, file, self._begin[name], self._begin[name] + nbytes(dtype, shape))
            for name, (dtype, shape) in self._tensors.items()
        }
