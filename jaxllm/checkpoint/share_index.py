"""The index of a checkpoint's arrays (OCDBT): each process writes that of its own arrays, and process 0 joins them.

    state/ocdbt.process_1/...            the arrays of a process, as Orbax writes them, with an index inside
    state/manifest.ocdbt, state/d/...    the index of a whole checkpoint, which names places in the files above

Where hosts share a disk Orbax writes the index of the whole. It copies references and no arrays, but reads the indexes inside
the arrays' files. So each process first does the same for its own files alone; its index is then small files, which process 0
fetches and joins. TensorStore's own drivers of S3 and GCS would do it in the store, with other rules for credentials and
servers than s3fs and gcsfs have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tensorstore as ts

MANIFEST = "manifest.ocdbt"
NODES = "d"
_CONFIG = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"}
"""As Orbax has it: its readers do not need it, and a copy keeps what a source holds inline."""


def write_own_index(state: Path, process: int) -> None:
    """Writes the index of the arrays of one process into their folder. A process may have none, and then has no index."""
    arrays = state / f"ocdbt.process_{process}"
    if (arrays / MANIFEST).exists():
        _copy([(arrays, None)], state)


def join_indexes(state: Path, manifests: Iterable[Path]) -> None:
    """Writes MANIFEST and nodes of a whole checkpoint into a folder.

    Args:
      state: has the nodes of all processes; the arrays need not be there.
      manifests: folders, each with the MANIFEST of a process.
    """
    _copy([(state, folder) for folder in manifests], state)


def _opened(base: Path, context: ts.Context, manifest: Path | None = None) -> Any:
    spec = {"driver": "ocdbt", "base": _url(base), "config": _CONFIG, "assume_config": True}
    elsewhere = {} if manifest is None else {"manifest": _url(manifest)}
    return ts.KvStore.open({**spec, **elsewhere}, context=context).result()


def _url(folder: Path) -> dict[str, str]:
    return {"driver": "file", "path": f"{folder.absolute()}/"}


def _copy(sources: Sequence[tuple[Path, Path | None]], target: Path) -> None:
    # References are copied only between stores of one context.
    context, transaction = ts.Context(), ts.Transaction(atomic=True)
    into = _opened(target, context).with_transaction(transaction)
    opened = [_opened(base, context, manifest) for base, manifest in sources]
    for copied in [source.experimental_copy_range_to(into) for source in opened]:
        copied.result()
    transaction.commit_async().result()
