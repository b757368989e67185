"""Reports errors of Orbax's saves at once, and suppresses the tracebacks that follow them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp


class WatchedHandler(ocp.PyTreeCheckpointHandler):
    """Records a write error at once. Orbax reports it only after a barrier of all processes, and if one process failed, that
    barrier times out after twenty minutes.

    Args:
      written: called in the background when this process has written its arrays, before that barrier, with their folder,
        which has another name until the save is complete.
      of_part: the folder is this process's alone, with a file for each of its pieces of the arrays. Orbax's end of a save is
        left out then, which expects the pieces of all processes.
    """

    def __init__(
        self,
        errors: list[Exception],
        written: Callable[[Path], None],
        of_part: bool = False,
        **options: Any,
    ):
        super().__init__(use_ocdbt=not of_part, **options)
        self._errors, self._written, self._of_part = errors, written, of_part

    async def async_save(self, directory: Any, *arguments: Any, **options: Any) -> Any:
        futures = await super().async_save(directory, *arguments, **options)
        # Orbax waits for them in this order.
        last = _Call(partial(self._written, Path(directory)))
        return [WatchedFuture(future, self._errors) for future in (*(futures or ()), last)]

    def finalize(self, directory: Any) -> None:
        try:
            if not self._of_part:
                super().finalize(directory)
        except Exception as error:
            self._errors.append(error)
            raise


@dataclass(frozen=True)
class _Call:
    """A function as an Orbax future."""

    function: Callable[[], None]

    def result(self, timeout: float | None = None) -> None:
        self.function()


class WatchedFuture:
    """An Orbax future that records the error it raises."""

    def __init__(self, future: Any, errors: list[Exception]):
        self._future, self._errors = future, errors

    def result(self, timeout: float | None = None) -> Any:
        try:
            return self._future.result(timeout)
        except Exception as error:
            self._errors.append(error)
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._future, name)


ORPHANS = ("Event loop is closed", "Encountered error while reading array index")


def silence_orphans() -> None:
    """Suppresses useless tracebacks and logs. After the first array that fails, Orbax closes its event loop, and asyncio,
    TensorStore (writing) or Python (reading) print a traceback for each array that finishes later. They would hide the one
    useful sentence. Orbax also logs through absl the errors that it raises, and warnings that would appear below a notebook
    cell.
    """
    for name in ("asyncio", "absl"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    before = sys.unraisablehook
    if getattr(before, "silences_orphans", False):
        return

    def hook(raised: Any) -> None:
        if not str(raised.exc_value).startswith(ORPHANS):
            before(raised)

    hook.silences_orphans = True
    sys.unraisablehook = hook
