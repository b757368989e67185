"""Copies a run's checkpoints into an object store behind run.dir, and takes the newest one back on a new machine.

    s3://bucket/first/400/state/... meta/...   the files of run.dir/checkpoints/400, under the same names
    s3://bucket/first/400/run/...              metrics.jsonl, config.yaml and other small files of run.dir
    s3://bucket/first/400/files.json           sizes and checksums; written last: a step without it does not exist
    s3://bucket/first/holder.json              the lock: the process that writes there

An object appears whole or not at all, so no other name is needed before files.json. Process 0 copies in a thread while training
continues; of the checkpoints that wait only the newest does.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import jax

from jaxllm.checkpoint.checksums import changed
from jaxllm.checkpoint.files import FILES, FILES_BYTES, META, STATE, damage, read_files, saved_steps, set_aside, why
from jaxllm.checkpoint.run_lock import unfenced
from jaxllm.checkpoint.store import LostError, Store, StoreError, StoreLock
from jaxllm.config import CheckpointConfig, ConfigError
from jaxllm.json_lines import parse
from jaxllm.pretrained.folder import TOKENIZER
from jaxllm.runtime import distributed
from jaxllm.untrusted import parse_json, shown

RUN = "run"
CURVES = ("metrics.jsonl", "spikes.jsonl")
COMPANIONS = ("config.yaml", "reference.npy")
WAITS_S = (1.0, 5.0, 20.0)
"""Before each further try to copy a checkpoint."""

log = logging.getLogger(__name__)


class GoneError(Exception):
    """The local checkpoint was deleted before it was copied."""


class StoredCheckpoints:
    """The checkpoints of one run in its store, on process 0.

    Args:
      store, lock: of the run; the lock is held.
      run_dir: the local folder of the run.

    Attributes:
      damaged: {step: reason} of the checkpoints there that are damaged. They stay, until the run saves the step again.
    """

    def __init__(self, store: Store, lock: StoreLock, run_dir: Path, config: CheckpointConfig):
        self._store, self._lock, self._run_dir, self._config = store, lock, run_dir, config
        self._folder = run_dir.absolute() / "checkpoints"
        self.damaged: dict[int, str] = {}
        self._fetched: set[int] = set()
        self._changed = threading.Condition()
        self._waiting: set[int] = set()
        self._copying: int | None = None
        self._failed: dict[int, str] = {}
        self._ended = False
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------------------------------------- from the store

    def fetch(self, newer_than: int, require: Callable[[], None] = unfenced) -> tuple[int | None, list[str]]:
        """Copies the newest intact checkpoint that is newer than a step into run_dir/checkpoints, and what belongs to it into
        run_dir. A damaged local one of its step is moved aside.

        Returns:
          its step, or None if there is none; and sentences on it and on the damaged ones.

        Raises:
          ConfigError: the store does not answer, the disk does not take it, or all there are damaged, and the local ones too.
        """
        said = []
        try:
            there = self._store.steps()
            for step in sorted((one for one, files in there.items() if FILES in files), reverse=True):
                if step <= newer_than:
                    break
                if step in self._fetched or step in self.damaged:
                    continue
                require()
                if reason := self._fetch(step, there[step]):
                    self.damaged[step] = reason
                    shutil.rmtree(self._folder / f"{step}.from-store")
                    said.append(f"checkpoint {step} in {self._store.address} is damaged ({reason}): it stays there, unused")
                    continue
                self._fetched.add(step)
                said.append(f"took checkpoint {step} from {self._store.address}")
                return step, said
        except (StoreError, FileNotFoundError) as error:
            raise _unusable(self._store.address, error) from None
        except OSError as error:
            raise ConfigError(
                f"{self._folder} does not take the checkpoint of {self._store.address} ({why(error)}): remove the cause."
            ) from None
        if self.damaged and newer_than < 0:
            listed = ", ".join(f"{step} ({reason})" for step, reason in self.damaged.items())
            raise ConfigError(
                f"No checkpoint in {self._store.address} is intact: {listed}; restore a copy of one there, or choose another "
                f"checkpoint.store to start again."
            )
        return None, said

    def _fetch(self, step: int, there: dict[str, int]) -> str | None:
        """Copies a step. Returns why it is damaged."""
        for leftover in self._folder.glob("*.from-store"):
            shutil.rmtree(leftover)
        aside = self._folder / f"{step}.from-store"
        aside.mkdir(parents=True)
        try:
            (aside / FILES).write_bytes(self._store.read(f"{step}/{FILES}", FILES_BYTES))
            listed = {name: size for name, (size, _) in read_files(aside).items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return why(error)
        for name, size in listed.items():
            path = PurePosixPath(name)
            if path.parts[:1] not in ((STATE,), (META,)) or ".." in path.parts:
                return f"{FILES} names {shown(name)}"
            if there.get(name) != size:
                return f"{shown(name)} " + (f"has {there[name]} bytes of {size}" if name in there else "is missing")
        self._store.copy_out({f"{step}/{name}": aside / name for name in listed}, sum(listed.values()))
        if reason := damage(aside) or changed(aside):
            return reason
        belongings = [name.removeprefix(f"{RUN}/") for name in there if name.startswith(f"{RUN}/")]
        self._restore_run_files(step, [name for name in belongings if _belongs(PurePosixPath(name))], there)
        if (self._folder / str(step)).exists():
            set_aside(self._folder / str(step))
        aside.rename(self._folder / str(step))
        return None

    def _restore_run_files(self, step: int, names: list[str], there: dict[str, int]) -> None:
        """Local curves, which end earlier, get another name; of the other files those that are missing are taken."""
        wanted = [name for name in names if name in CURVES or not (self._run_dir / name).exists()]
        aside = self._folder / f"{step}.from-store" / RUN
        files = {f"{step}/{RUN}/{name}": aside / name for name in wanted}
        self._store.copy_out(files, sum(there[f"{RUN}/{name}"] for name in wanted))
        for name in wanted:
            target = self._run_dir / name
            if target.exists():
                free = (target.with_stem(f"{target.stem}-{n}") for n in itertools.count(1))
                target.rename(next(path for path in free if not path.exists()))
            target.parent.mkdir(parents=True, exist_ok=True)
            (aside / name).rename(target)
        shutil.rmtree(aside, ignore_errors=True)

    # --------------------------------------------------------------------------------------------------- to the store

    def offer_local(self, latest: int) -> None:
        """Offers what a run has at its start: a copy may be missing because the store failed, or the run was killed."""
        for step in saved_steps(self._folder):
            if step == latest or (step < latest and self._is_kept_forever(step)):
                self.offer(step)

    def offer(self, step: int) -> None:
        """Copies a complete local checkpoint in the background. Those that wait for their turn give way to it, but for the ones
        of checkpoint.keep_every_steps.
        """
        with self._changed:
            self._waiting = {step, *filter(self._is_kept_forever, self._waiting)}
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="checkpoint-store", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self) -> str:
        """Waits until what was offered is in the store. Returns a sentence if one could not be copied, or ""."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and self._copying is None)
            if not self._failed:
                return ""
            step, reason = max(self._failed.items())
        return (
            f"Checkpoint {step} could not be copied to {self._store.address} ({reason}): it is safe in {self._folder}; remove "
            f"the cause, and rerun the same command to copy it."
        )

    def close(self) -> None:
        """Ends the thread after the request that is under way; what is not committed then does not exist."""
        with self._changed:
            self._ended = True
            self._waiting.clear()
            self._changed.notify_all()

    def _is_kept_forever(self, step: int) -> bool:
        return self._config.keep_every_steps is not None and step % self._config.keep_every_steps == 0

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended)
                if self._ended:
                    return
                self._copying = step = max(self._waiting)
                self._waiting.remove(step)
            reason = self._copy_patiently(step)
            with self._changed:
                self._failed.pop(step, None)
                if reason:
                    self._failed[step] = reason
                else:
                    # A newer one makes up for those that would be deleted some day.
                    self._failed = {n: why for n, why in self._failed.items() if n > step or self._is_kept_forever(n)}
                self._copying = None
                self._changed.notify_all()

    def _copy_patiently(self, step: int) -> str:
        """Copies a checkpoint, in several tries. Returns the reason if that failed."""
        for wait_s in (*WAITS_S, None):
            try:
                self._copy(step)
                return ""
            except GoneError:
                reason = "it was deleted here before it was copied: raise checkpoint.keep, or save less often"
                break
            except LostError as error:
                reason = f"the store {error}"
                break
            except Exception as error:
                # A thread that ends without a word would leave the run without copies.
                reason = str(error) if isinstance(error, StoreError) else why(error)
            if wait_s is None or self._is_replaced_within(wait_s):
                break
        log.warning("Checkpoint %d is not in %s (%s): training continues.", step, self._store.address, reason)
        return reason

    def _is_replaced_within(self, wait_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._waiting) or self._ended, wait_s)

    def _copy(self, step: int) -> None:
        folder = self._folder / str(step)
        if not folder.exists():
            raise GoneError
        self._lock.require()
        there = self._store.steps()
        try:
            listed = read_files(folder)
            content = (folder / FILES).read_bytes()
            here = {name: size for name, (size, _) in listed.items()} | {FILES: len(content)}
            is_whole = step not in self.damaged and here.items() <= there.get(step, {}).items()
            if not (is_whole and self._store.read(f"{step}/{FILES}", FILES_BYTES) == content):
                self._replace(step, there.get(step, {}), {name: folder / name for name in listed})
                # The checkpoint is in the store from here on, unless another run is its holder by now.
                self._lock.require()
                self._store.write(f"{step}/{FILES}", content)
            self.damaged.pop(step, None)
        except FileNotFoundError:
            if damage(folder):
                raise GoneError from None
            raise
        self._prune(step)

    def _replace(self, step: int, there: dict[str, int], files: dict[str, Path]) -> None:
        """Copies the files of a step, in the place of a damaged or half-copied one. Checks the sizes."""
        if step in self.damaged:
            log.warning("The damaged checkpoint %d in %s is replaced.", step, self._store.address)
        self._remove_step(step, there)
        self._store.copy_in({f"{step}/{name}": path for name, path in files.items()})
        for name, content in self._run_files(step):
            self._store.write(f"{step}/{RUN}/{name}", content)
        found = self._store.steps().get(step, {})
        for name, path in files.items():
            if found.get(name) != path.stat().st_size:
                raise StoreError(f"{name} has arrived with {found.get(name, 0)} bytes of {path.stat().st_size}")

    def _run_files(self, step: int) -> Iterator[tuple[str, bytes]]:
        """What belongs to a checkpoint beside it: (name in run.dir, content). Curves end at its step."""
        for name in CURVES:
            if (path := self._run_dir / name).exists():
                lines = path.read_bytes().splitlines(keepends=True)
                last = (n for n in reversed(range(len(lines))) if _step_of(lines[n]) <= step)
                yield name, b"".join(lines[: next(last, -1) + 1])
        others = [self._run_dir / name for name in COMPANIONS]
        for path in (*others, *(self._run_dir / TOKENIZER).rglob("*")):
            if path.is_file():
                yield path.relative_to(self._run_dir).as_posix(), path.read_bytes()

    def _prune(self, newest: int) -> None:
        """Deletes what checkpoint.keep no longer covers and what was copied in part. Damaged ones stay and do not count."""
        there = self._store.steps()
        whole = [step for step, files in there.items() if FILES in files and step not in self.damaged]
        kept = {newest, *whole[-self._config.keep :], *filter(self._is_kept_forever, whole), *self.damaged}
        if there.keys() - kept:
            # What is there in part may be a copy of another run by now.
            self._lock.require()
        for step in there.keys() - kept:
            self._remove_step(step, there[step])

    def _remove_step(self, step: int, names: Iterable[str]) -> None:
        """Removes files.json first: what is left after a kill does not exist."""
        self._store.remove(f"{step}/{name}" for name in sorted(names, key=lambda name: name != FILES))


@contextmanager
def hold_store(run_dir: Path, config: CheckpointConfig) -> Iterator[tuple[StoredCheckpoints | None, bool]]:
    """Holds checkpoint.store for this run; every process must call it. Yields its checkpoints on process 0, None on the others
    and without a store; and whether there is one.

    Raises:
      ConfigError: on all processes, if another run holds the store, or it cannot be read and written.
    """
    if config.store is None:
        yield None, False
        return
    lock, stored, found = None, None, {"refusal": "", "has_one": False}
    # A process that runs alone has no number before JAX has devices, which are not needed yet.
    is_main = not jax.distributed.is_initialized() or distributed.is_main_process()
    if is_main:
        try:
            store = Store(config.store)
            lock = StoreLock(store)
            lock.take()
            found["has_one"] = any(FILES in files for files in store.steps().values())
            stored = StoredCheckpoints(store, lock, run_dir, config)
        except ConfigError as error:
            found["refusal"] = str(error)
        except (StoreError, OSError) as error:
            found["refusal"] = str(_unusable(config.store, error))
    try:
        found = parse_json(distributed.broadcast(json.dumps(found)))
        if found["refusal"]:
            raise ConfigError(found["refusal"])
        yield stored, found["has_one"]
    finally:
        if stored is not None:
            stored.close()
        if lock is not None:
            lock.release()


def _unusable(address: str, error: OSError) -> ConfigError:
    # A bucket that does not exist is a FileNotFoundError.
    found = error if isinstance(error, StoreError) else StoreError("the bucket is not there")
    return ConfigError(f"checkpoint.store={address} cannot be used ({found}): {found.fix}.")


def _belongs(path: PurePosixPath) -> bool:
    """Whether a copy writes such a file beside a checkpoint. Other names could replace any file of this machine."""
    return str(path) in (*CURVES, *COMPANIONS) or (path.parts[:1] == (TOKENIZER,) and ".." not in path.parts)


def _step_of(line: bytes) -> float:
    """The step of a line of metrics; infinity for a damaged one."""
    return math.inf if (record := parse(line)) is None else record["step"]
