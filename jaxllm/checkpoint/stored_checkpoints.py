"""Copies a run's checkpoints into an object store behind run.dir, and takes the newest one back on a new machine.

    s3://bucket/first/400/state/... meta/...   the files of run.dir/checkpoints/400, under the same names
    s3://bucket/first/400/run/...              metrics.jsonl, config.yaml and other small files of run.dir
    s3://bucket/first/400/files.json           sizes and checksums; written last: a step without it does not exist
    s3://bucket/first/holder.json              the lock: the process that writes there

An object appears whole or not at all, so no other name is needed before files.json. Process 0 copies in a thread while training
continues; of the checkpoints that wait only the newest does. Those that wait or are being copied have a second name, by hard
links, in run.dir/.to-store, so that checkpoint.keep does not delete them first.
"""

import itertools
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from jaxllm.checkpoint.files import (
    FILES,
    FILES_BYTES,
    META,
    Meta,
    changed,
    committed_steps,
    damage,
    differs,
    read_files,
    read_meta,
    saved_steps,
    set_aside,
    why,
)
from jaxllm.checkpoint.run_lock import unfenced
from jaxllm.checkpoint.store import ANSWER_S, GoneError, LostError, Store, StoreError, StoreLock, unusable
from jaxllm.cluster import distributed, exit_codes
from jaxllm.cluster.distributed import raising_together
from jaxllm.config import CheckpointConfig, ConfigError
from jaxllm.config.hf_config import TOKENIZER
from jaxllm.json_lines import parse
from jaxllm.untrusted import RefusedInput

RUN = "run"
CURVES = ("metrics.jsonl", "spikes.jsonl")
COMPANIONS = ("config.yaml", "reference.npy")
"""Files of run.dir that belong to a stored checkpoint, in its folder RUN, with those of the tokenizer."""
WAITS_S = (1.0, 5.0, 20.0)
"""Before each further try to copy a checkpoint."""

log = logging.getLogger(__name__)


class StoredCheckpoints:
    """The checkpoints of one run in its store, on process 0.

    Args:
      store, lock: of the run; the lock is held.
      run_dir: the local folder of the run.

    Attributes:
      damaged: {step: reason} of the checkpoints there that are damaged. They stay, until the run saves the step again.
      safe_in: where a checkpoint is that is not in the store.
      copied: the steps that this start has copied, or found whole in the store.
      require: called before anything is written into run_dir.
      accept: called with the address, or a folder, and the metadata of a checkpoint before the rest of it is taken; raises
        ConfigError if it is of another run.
    """

    def __init__(self, store: Store, lock: StoreLock, run_dir: Path, config: CheckpointConfig):
        # Its own, so that it can be closed before the lock's.
        self._store, self.lock, self._run_dir, self._config = Store(store.address), lock, run_dir, config
        self._folder, self._twins = run_dir.absolute() / "checkpoints", run_dir.absolute() / ".to-store"
        self.safe_in, self.damaged = str(self._folder), dict[int, str]()
        self._fetched, self._waiting, self.copied = set[int](), set[int](), set[int]()
        self._changed = threading.Condition()
        self._copying: int | None = None
        self._failed, self._ended = dict[int, tuple[str, int]](), False
        self._thread: threading.Thread | None = None
        self.require: Callable[[], None] = unfenced
        self.accept: Callable[[str, Meta], None] = lambda address, meta: None

    # ------------------------------------------------------------------------------------------------- from the store

    def fetch(self, newer_than: int) -> tuple[int | None, list[str]]:
        """Copies the newest intact checkpoint that is newer than a step into run_dir/checkpoints, and what belongs to it into
        run_dir. A damaged local one of its step is moved aside.

        Returns:
          its step, or None if there is none; and sentences on it and on the damaged ones.

        Raises:
          ConfigError: the store does not answer, `accept` raises it, the disk does not take the checkpoint, or all there are
            damaged, and the local ones too.
        """
        said = []
        try:
            there = self._store.steps()
            for step in reversed(committed_steps(there)):
                if step <= newer_than:
                    if not (self._fetched or self.damaged):
                        # Copies of this run would displace what another one has there.
                        self.require()
                        with suppress(FileNotFoundError):
                            self._fetch_meta(step, there[step])
                    break
                if step in self._fetched or step in self.damaged:
                    continue
                self.require()
                try:
                    reason = self._fetch(step, there[step])
                except FileNotFoundError:
                    reason = "a file has disappeared while it was being copied"
                if reason is None:
                    self._fetched.add(step)
                    said.append(f"took checkpoint {step} from {self._store.address}")
                    return step, said
                said.append(self._pass_over(step, reason))
        except StoreError as error:
            raise unusable(self._store.address, error) from None
        except OSError as error:
            raise ConfigError(
                f"{self._folder} does not take the checkpoint of {self._store.address} ({why(error)}): remove the cause."
            ) from None
        finally:
            self._remove_unfinished()
        if newer_than < 0:
            self._require_no_damaged()
        return None, said

    def _pass_over(self, step: int, reason: str) -> str:
        self.damaged[step] = reason
        return f"checkpoint {step} in {self._store.address} is damaged ({reason}): it stays there, unused"

    def _require_no_damaged(self) -> None:
        """A run does not start from scratch beside damaged checkpoints."""
        if self.damaged:
            listed = ", ".join(f"{step} ({reason})" for step, reason in self.damaged.items())
            raise ConfigError(
                f"No checkpoint in {self._store.address} is intact: {listed}; restore a copy of one there, or choose another "
                f"checkpoint.store to start again."
            )

    def refuse(self, step: int, reason: str) -> None:
        """A checkpoint that was fetched cannot be restored, although no byte has changed: it is damaged there."""
        if step in self._fetched:
            self.damaged[step] = reason

    def _fetch(self, step: int, there: dict[str, int]) -> str | None:
        """Copies a step. Returns why it is damaged."""
        aside = self._folder / f"{step}.from-store"
        if reason := self._fetch_meta(step, there):
            return reason
        self._copy_out(step, aside, {name: n for name, (n, _) in read_files(aside).items() if not name.startswith(f"{META}/")})
        if reason := damage(aside) or changed(aside):
            return reason
        self._take_run_files(step, aside, there)
        if (self._folder / str(step)).exists():
            set_aside(self._folder / str(step))
        aside.rename(self._folder / str(step))
        return None

    def _fetch_meta(self, step: int, there: dict[str, int]) -> str | None:
        """Copies a step's list of files and its metadata, which is small and says whose it is. Returns why it is damaged."""
        self._remove_unfinished()
        aside = self._folder / f"{step}.from-store"
        aside.mkdir(parents=True)
        try:
            (aside / FILES).write_bytes(self._store.read(f"{step}/{FILES}", FILES_BYTES))
        except RefusedInput as error:
            return str(error)
        if reason := differs(aside, there):
            return reason
        self._copy_out(step, aside, {name: n for name, (n, _) in read_files(aside).items() if name.startswith(f"{META}/")})
        if reason := damage(aside, META):
            return reason
        self.accept(self._store.address, read_meta(aside))
        return None

    def _take_run_files(self, step: int, aside: Path, there: dict[str, int], curves: tuple[str, ...] = CURVES) -> None:
        """Copies these curves into run_dir, and of the other files those that it lacks. Other names could replace any file of
        this machine. Local curves, which end earlier, get another name."""
        names = [name.removeprefix(f"{RUN}/") for name in there if name.startswith(f"{RUN}/") and "/../" not in f"{name}/"]
        others = [name for name in names if name in COMPANIONS or name.startswith(f"{TOKENIZER}/")]
        wanted = [name for name in names if name in curves]
        wanted += [name for name in others if not (self._run_dir / name).exists()]
        self._copy_out(step, aside, {f"{RUN}/{name}": there[f"{RUN}/{name}"] for name in wanted})
        for name in wanted:
            source, target = aside / RUN / name, self._run_dir / name
            if target.exists() and target.read_bytes().startswith(source.read_bytes()):
                # What is here goes further.
                continue
            if target.exists():
                free = (target.with_stem(f"{target.stem}-{n}") for n in itertools.count(1))
                target.rename(next(path for path in free if not path.exists()))
            target.parent.mkdir(parents=True, exist_ok=True)
            source.rename(target)
        shutil.rmtree(aside / RUN, ignore_errors=True)

    def _copy_out(self, step: int, aside: Path, sizes: dict[str, int]) -> None:
        self._store.copy_out({f"{step}/{name}": aside / name for name in sizes}, sum(sizes.values()))

    def _remove_unfinished(self) -> None:
        for leftover in self._folder.glob("*.from-store"):
            # If one stays, the next fetch says why it cannot be made.
            shutil.rmtree(leftover, ignore_errors=True)

    # --------------------------------------------------------------------------------------------------- to the store

    def offer_local(self, latest: int) -> None:
        """Offers what a run has at its start: a copy may be missing because the store failed, or the run was killed. If the
        last due checkpoint is in neither place, offers `latest` instead.
        """
        self._remove_left_twins()
        try:
            stored = {*self._store.committed()} - self.damaged.keys()
        except StoreError:
            # Each copy tries again.
            stored = set[int]()

        def is_of_another(step: int) -> bool:
            """Whether the store has an older step that another machine made, from which the run continued."""
            return step != latest and step in stored and not self._is_in_store(step)

        local = [step for step in saved_steps(self._folder) if step <= latest]
        due = [step for step in local if self._config.goes_to_store(step) and not is_of_another(step)]
        every = self._config.store_every_steps
        if every is not None and max((*due, *stored), default=0) < latest - latest % every:
            due.append(latest)
        for step in sorted({*due[-1:], *filter(self._config.keeps_forever, due)}):
            self.offer(step)

    def _is_in_store(self, step: int) -> bool:
        """Whether the store has the local checkpoint of a step, not known to be damaged there."""
        try:
            content = (self._folder / str(step) / FILES).read_bytes()
            return step not in self.damaged and self._store.read(f"{step}/{FILES}", FILES_BYTES) == content
        except (OSError, RefusedInput):
            return False

    def offer(self, step: int) -> None:
        """Copies a complete local checkpoint in the background. Those that wait for their turn give way to it, but for the ones
        of checkpoint.keep_every_steps.
        """
        with self._changed:
            self._remove_left_twins()
            if step != self._copying:
                # Where the file system has no links, checkpoint.keep may delete it too early.
                with suppress(OSError):
                    shutil.copytree(self._folder / str(step), self._twins / str(step), copy_function=os.link)
            dropped = {one for one in self._waiting if one != step and not self._config.keeps_forever(one)}
            self._waiting = {step, *self._waiting} - dropped
            for one in dropped - {self._copying}:
                shutil.rmtree(self._twins / str(one), ignore_errors=True)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="checkpoint-store", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    @property
    def lacks_one(self) -> bool:
        """Whether a copy has failed, and none has succeeded of a newer checkpoint."""
        return max(self._failed, default=-1) > max(self.copied, default=-1)

    def wait(self) -> ConfigError | None:
        """Waits until what was offered is in the store. Returns the error if one could not be copied."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and self._copying is None)
            if not self._failed:
                return None
            step, (reason, code) = max(self._failed.items())
        return ConfigError(
            f"Checkpoint {step} could not be copied to {self._store.address} ({reason}): it is safe in {self.safe_in}; remove "
            f"the cause, and rerun the same command to copy it."
        ).with_code(code)

    def close(self) -> None:
        """Ends the copy under way: what is not committed then does not exist. Nothing is written to the store after this."""
        with self._changed:
            self._ended = True
            self._waiting.clear()
            self._changed.notify_all()
        self._store.close()
        if self._thread is not None:
            self._thread.join(ANSWER_S)
            shutil.rmtree(self._twins, ignore_errors=True)

    def _remove_left_twins(self) -> None:
        """At the start of a run: those of one that was killed."""
        if self._thread is None:
            shutil.rmtree(self._twins, ignore_errors=True)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended)
                if self._ended:
                    return
                self._copying = step = max(self._waiting)
                self._waiting.remove(step)
            failure = self._copy_patiently(step)
            with self._changed:
                self._failed.pop(step, None)
                if failure:
                    self._failed[step] = failure
                else:
                    self.copied.add(step)
                    # A newer one makes up for those that would be deleted some day.
                    self._failed = {n: why for n, why in self._failed.items() if n > step or self._config.keeps_forever(n)}
                if step not in self._waiting:
                    shutil.rmtree(self._twins / str(step), ignore_errors=True)
                self._copying = None
                self._changed.notify_all()

    def _copy_patiently(self, step: int) -> tuple[str, int] | None:
        """Copies a checkpoint, in several tries. Returns the reason and the exit code if that failed."""
        for wait_s in (*WAITS_S, None):
            try:
                self._copy(step)
                return None
            except (GoneError, LostError) as error:
                failure = str(error), error.exit_code
                break
            except StoreError as error:
                failure = str(error), error.exit_code
            except Exception as error:
                # A thread that ends without a word would leave the run without copies.
                failure = why(error), exit_codes.BAD_INPUT
            with self._changed:
                # A newer one takes its place.
                if wait_s is None or self._changed.wait_for(lambda: bool(self._waiting) or self._ended, wait_s):
                    break
        if not self._ended:
            log.warning("Checkpoint %d is not in %s (%s): training continues.", step, self._store.address, failure[0])
        return failure

    def _copy(self, step: int) -> None:
        folder = self._twins / str(step)
        if damage(folder):
            # There are no links here.
            folder = self._folder / str(step)
        if not folder.exists():
            raise GoneError
        self.lock.require()
        there = self._store.steps()
        try:
            listed = read_files(folder)
            content = (folder / FILES).read_bytes()
            here = {name: size for name, (size, _) in listed.items()} | {FILES: len(content)}
            is_whole = step not in self.damaged and here.items() <= there.get(step, {}).items()
            if not (is_whole and self._store.read(f"{step}/{FILES}", FILES_BYTES) == content):
                self._replace(step, there.get(step, {}), {name: folder / name for name in listed})
                # The checkpoint is in the store from here on, unless another run is its holder by now.
                self.lock.require()
                self._store.write(f"{step}/{FILES}", content)
            self.damaged.pop(step, None)
        except FileNotFoundError:
            if damage(folder):
                raise GoneError from None
            raise
        self._prune(step, there)

    def _replace(self, step: int, there: dict[str, int], files: dict[str, Path]) -> None:
        """Copies the files of a step, in the place of a damaged or half-copied one. Checks the sizes."""
        if step in self.damaged:
            log.warning("The damaged checkpoint %d in %s is replaced.", step, self._store.address)
        self._remove_step(step, there)
        self._store.copy_in({f"{step}/{name}": path for name, path in files.items()})
        self._write_run_files(step)
        self._require_arrived(step, {name: path.stat().st_size for name, path in files.items()})

    def _write_run_files(self, step: int) -> None:
        """Curves end at the step."""
        for name in CURVES:
            if (path := self._run_dir / name).exists():
                lines = path.read_bytes().splitlines(keepends=True)
                last = (n for n in reversed(range(len(lines))) if (record := parse(lines[n])) and record["step"] <= step)
                self._store.write(f"{step}/{RUN}/{name}", b"".join(lines[: next(last, -1) + 1]))
        others = [self._run_dir / name for name in COMPANIONS]
        for path in (*others, *(self._run_dir / TOKENIZER).rglob("*")):
            if path.is_file():
                self._store.write(f"{step}/{RUN}/{path.relative_to(self._run_dir).as_posix()}", path.read_bytes())

    def _require_arrived(self, step: int, sizes: Mapping[str, int]) -> dict[str, int]:
        """The files of a step in the store and their sizes. Raises StoreError if one of `sizes` has another there."""
        found = self._store.steps(step).get(step, {})
        for name, size in sizes.items():
            if found.get(name) != size:
                raise StoreError(f"{name} has arrived with {found.get(name, 0)} bytes of {size}", passes=True)
        return found

    def _prune(self, newest: int, there: dict[int, dict[str, int]] | None = None) -> None:
        """Deletes what checkpoint.keep no longer covers and what was copied in part. Damaged ones stay and do not count. A
        failure is a warning: the newest is whole.

        Args:
          there: what was there before the newest was copied; None: what is there now.
        """
        try:
            there = self._store.steps() if there is None else there
            whole = sorted({newest, *committed_steps(there)} - (self.damaged.keys() - {newest}))
            kept = {newest, *whole[-self._config.keep :], *filter(self._config.keeps_forever, whole), *self.damaged}
            if there.keys() - kept:
                # What is there in part may be a copy of another run by now.
                self.lock.require()
            for step in there.keys() - kept:
                self._remove_step(step, there[step])
        except LostError:
            raise
        except StoreError as error:
            log.warning("Older checkpoints in %s are not deleted (%s): the next copy tries again.", self._store.address, error)

    def _remove_step(self, step: int, names: Iterable[str]) -> None:
        """Removes files.json first: what is left after a kill does not exist."""
        self._store.remove(f"{step}/{name}" for name in sorted(names, key=lambda name: name != FILES))


@contextmanager
def hold_store(run_dir: Path, config: CheckpointConfig) -> Iterator[tuple[StoredCheckpoints | None, bool]]:
    """Holds checkpoint.store for this run; every process must call it. Yields its checkpoints on process 0, None on the others
    and without a store; and whether there is one. ConfigError on all processes, if another run holds the store, or it cannot be
    read and written.
    """
    if config.store is None:
        yield None, False
        return
    with ExitStack() as stack:
        stored, has_one = None, False
        with raising_together():
            if distributed.is_main_process():
                try:
                    store = Store(config.store)
                    lock = StoreLock(store)
                    stack.callback(lock.release)
                    lock.take()
                    has_one = bool(store.committed())
                    stored = stack.enter_context(closing(StoredCheckpoints(store, lock, run_dir, config)))
                except OSError as error:
                    raise unusable(config.store, error) from None
        yield stored, bool(distributed.broadcast("yes" if has_one else ""))
