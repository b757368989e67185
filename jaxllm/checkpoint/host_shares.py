"""Parts of checkpoints, for a run whose hosts share no disk: each process writes its own, and copies it into the store.

    run.dir/shares/START-3/2/400/      the part of process 2 of 3, in one start of the run: no other's arrays, so no checkpoint
    s3://bucket/first/400/state/...    its pieces of the arrays, and what each array is from process 0
    s3://bucket/first/400/parts/2/...  its files.json, until process 0 has written that of the whole

Process 0 says on a board which checkpoint is copied now, and the others answer there when their parts have arrived. So what
an earlier start left in the store, or one of more processes, is never taken for a part. A part stays until its checkpoint, or
a newer one, is whole there, and one of a permanent checkpoint until that one is: if a run ends before, the next start copies
it, where all parts of it are left.

Orbax writes a part with one file for each piece of an array (its format without OCDBT), so the parts side by side are the files
of an ordinary checkpoint: none is read or changed to make it whole.
"""

import json
import logging
import os
import secrets
import shutil
import socket
import threading
import time
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxllm.checkpoint.files import FILES, MANIFEST, META, damage, read_files, saved_steps, why
from jaxllm.checkpoint.store import Store, StoreError
from jaxllm.cluster import distributed, exit_codes
from jaxllm.config import CheckpointConfig, ConfigError
from jaxllm.untrusted import parse_json

# ------------------------------------------------------------------------------------------------------ who shares a disk
# Which processes of a run have one run.dir: those whose hosts share its disk, and those of one host.
#
# Each process makes a file there and looks for those of the others. Of the processes with one run.dir, the lowest leads: it
# holds the lock, fetches checkpoints and deletes old ones.

SHARED_LIMIT_S = 20
"""Seconds that a process looks for the files of others: NFS may need some seconds to show them."""


@dataclass(frozen=True)
class DiskGroups:
    leaders: tuple[int, ...]
    """By rank, the lowest process with the same run.dir."""

    @property
    def is_one(self) -> bool:
        """Whether all processes have the same run.dir."""
        return not any(self.leaders)

    @property
    def leads(self) -> bool:
        """Whether this process is the leader of its run.dir."""
        rank = jax.process_index()
        return self.leaders[rank] == rank


def find_disk_groups(run_dir: Path) -> DiskGroups:
    """The processes by their run directories; every process must call it. If not all share it, that takes SHARED_LIMIT_S."""
    count, rank = jax.process_count(), jax.process_index()
    name = distributed.broadcast(f".shared-{uuid.uuid4().hex}")
    own = run_dir / f"{name}-{rank}"
    own.touch()
    try:
        distributed.broadcast("written")
        deadline, unseen = time.monotonic() + SHARED_LIMIT_S, set(range(count))
        while True:
            # Listing the folder makes NFS refresh it.
            os.listdir(run_dir)
            unseen = {other for other in unseen if not (run_dir / f"{name}-{other}").exists()}
            if not unseen or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        seen = sorted(set(range(count)) - unseen)
        return DiskGroups(_leaders(distributed.gathered(seen)))
    finally:
        own.unlink(missing_ok=True)


def _leaders(seen: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The lowest process of each process's group, by rank; `seen` are those that each sees. One that sees another shares its
    disk: the other may see it later.
    """
    leaders = tuple(range(len(seen)))
    for rank, others in enumerate(seen):
        joined = {leaders[one] for one in (rank, *others)}
        leaders = tuple(min(joined) if leader in joined else leader for leader in leaders)
    return leaders


# ------------------------------------------------------------------------------------------------------------ host shares

SHARES, PARTS = "shares", "parts"
LOOK_S = 1.0
"""Seconds between looks at the board."""
JOB, COMMITTED = "job", "committed"

Folder = tuple[str, int, int, list[tuple[int, bool]]]
"""What a process of an earlier start left: start, rank, number of processes, and (step, whether it is intact) of each part."""
Left = tuple[int, str, int]
"""A checkpoint of an earlier start: step, start, number of processes."""

log = logging.getLogger(__name__)


class HostShares:
    """The parts that this process writes, from the creation, by all processes, until `close`.

    Attributes:
      folder: of its parts, by step.
      committed: the newest step that is whole in the store, as far as this process knows.
      done: the steps that this start has made whole there.
      kept: (step, number of parts on these hosts, start) of an earlier start's checkpoint whose parts stay until this start has
        made one whole; None if there is none.
      stored: the steps that were whole in the store before this start made one.
    """

    def __init__(self, run_dir: Path, config: CheckpointConfig, store: Store):
        self._rank = jax.process_index()
        self.start = distributed.broadcast(f"{secrets.token_hex(8)}-{jax.process_count()}")
        self.home = run_dir.absolute() / SHARES
        self.folder = self.home / self.start / str(self._rank)
        self._config, self._store = config, store
        self.committed: int | None = None
        self.done: set[int] = set()
        self.kept: tuple[int, int, str] | None = None
        self.stored: set[int] = set()
        self._board, self._number = distributed.Board(), 0
        self._arrived: set[str] = set()
        self._copying: int | None = None
        # The newest step that was here.
        self._newest = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="checkpoint-shares", daemon=True)

    def begin(self) -> None:
        """Begins to answer to process 0, when all have restored the state."""
        # What was sent for an earlier start's checkpoint may be replaced.
        self._arrived.clear()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._thread.start()

    def remove_left(self) -> None:
        """Removes what earlier starts left in run.dir/shares, but for the parts to be kept, and permanent ones that the store
        lacks; on the process that leads there.

        One of their processes may still run on this host, and copy. That copy then fails; with the lock on the store, it could
        not have been committed anyway.
        """
        step, _, start = self.kept or (None, 0, "")
        for folder in self.home.glob("*"):
            if folder != self.folder.parent:
                self._remove(folder, step if folder.name == start else None)

    def _remove(self, folder: Path, kept: int | None = None) -> None:
        """Removes an earlier start's parts, but for those of step `kept`, and permanent ones that the store lacks."""
        stays = False
        for one in folder.glob("*/*"):
            step = int(one.name) if one.name.isdecimal() else None
            is_lacked = step is not None and step not in self.stored | self.done
            if step is not None and (step == kept or (is_lacked and self._config.keeps_forever(step))):
                stays = True
            else:
                shutil.rmtree(one, ignore_errors=True)
        if not stays:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        self._ended.set()

    # ------------------------------------------------------------------------------------------------------ on process 0

    def gather(self, step: int) -> list[int]:
        """Has all processes copy their parts of a checkpoint; on process 0. Returns the CRC32 of each part's files.json.

        Raises:
          StoreError: one could not, when all others have ended too.
        """
        self._number += 1
        self._board.put(JOB, json.dumps([self._number, step]))
        while True:
            texts = self._board.read()
            answers = [parse_json(texts.get(str(rank), "[0, 0, null, false]")) for rank in range(jax.process_count())]
            if all(number == self._number for number, *_ in answers):
                break
            if self._ended.wait(LOOK_S):
                raise StoreError("the run has ended")
        if failed := [(reason, passes) for _, _, reason, passes in answers if reason]:
            raise StoreError(failed[0][0], passes=all(passes for _, passes in failed))
        return [crc for _, crc, _, _ in answers]

    def commit(self, step: int) -> None:
        """Tells all that a checkpoint is whole in the store; on process 0."""
        self.done.add(step)
        self._board.put(COMMITTED, json.dumps(sorted(self.done)))

    # ---------------------------------------------------------------------------------------------------- on each process

    def _serve(self) -> None:
        """Answers to process 0, in a thread."""
        answered = 0
        while not self._ended.wait(LOOK_S):
            try:
                texts = self.look()
                number, step = parse_json(texts.get(JOB, "[0, 0]"))
                if number > answered:
                    self._copying = step
                    answer = self._answer(step)
                    self._copying = None
                    self._board.put(str(self._rank), json.dumps([number, *answer]))
                    answered = number
            except Exception as error:
                # The run ends, and its coordinator with it; or this disk fails, which the next save says.
                log.debug("no look at the parts of process 0: %s", error)

    def look(self) -> dict[str, str]:
        """What is on the board. Deletes what is no longer needed here."""
        texts = self._board.read()
        if COMMITTED in texts:
            self.done |= set(parse_json(texts[COMMITTED]))
            self.committed = max(*self.done, self.committed or 0)
            if self.kept is not None:
                # The run has continued without it.
                self._remove(self.home / self.kept[2])
                self.kept = None
        self._prune()
        return texts

    def _answer(self, step: int) -> tuple[int, str, bool]:
        """Copies this process's part: (CRC32 of its files.json, why that failed or "", whether that may pass by itself)."""
        folder, who = self.folder / str(step), f"for process {self._rank} on {socket.gethostname()}"
        # Process 0 may be the first to have its part.
        while not folder.exists():
            was_here = max([self._newest, *saved_steps(self.folder)]) >= step and not folder.exists()
            if was_here or self._ended.wait(LOOK_S / 4):
                return 0, f"it was deleted before it was copied, {who}", False
        try:
            return self.upload(step, folder, self._rank), "", False
        except Exception as error:
            # Process 0 waits for an answer, whatever this is.
            passes = isinstance(error, StoreError) and error.exit_code == exit_codes.LOST
            return 0, f"{error if isinstance(error, StoreError) else why(error)}, {who}", passes

    def upload(self, step: int, folder: Path, rank: int) -> int:
        """Copies the part of process `rank` of a checkpoint into the store. Returns the CRC32 of its files.json."""
        content = (folder / FILES).read_bytes()
        files = {f"{step}/{name}": folder / name for name in read_files(folder) if is_brought_by(name, rank)}
        if missing := {name: path for name, path in files.items() if name not in self._arrived}:
            self._store.copy_in(missing)
            self._arrived |= missing.keys()
        self._store.write(f"{step}/{PARTS}/{rank}/{FILES}", content)
        return zlib.crc32(content)

    def _prune(self) -> None:
        """Deletes what is no longer needed here: Orbax would delete a part that is still to be copied."""
        steps = saved_steps(self.folder)
        self._newest = max([self._newest, *steps])
        # Two: another process may not have its part of the newest yet, and begin with the one before.
        least = max(2, self._config.keep)
        newest = {*steps[-least:], *list(filter(self._config.goes_to_store, steps))[-least:]}
        waiting = {step for step in newest if self.committed is None or step > self.committed}
        needed = {*waiting, *filter(self._config.keeps_forever, steps)} - self.done
        for step in {*steps} - needed - {self._copying}:
            shutil.rmtree(self.folder / str(step), ignore_errors=True)


def parts_in(home: Path) -> list[Folder]:
    """What each process of an earlier start left in run.dir/shares."""
    found = []
    for folder in home.glob("*-*/*"):
        start, count = folder.parent.name, folder.parent.name.rpartition("-")[2]
        if count.isdecimal() and folder.name.isdecimal():
            parts = [(step, not _is_torn(folder / str(step))) for step in saved_steps(folder)]
            found.append((start, int(folder.name), int(count), parts))
    return found


def by_checkpoint(lists: Sequence[list[Folder]]) -> tuple[dict[Left, dict[int, int]], set[Left]]:
    """What all processes found with `parts_in`: for each checkpoint {rank: process that has its intact part}, and those that
    never were whole, since a process that is here was killed before it had saved its part."""
    places: dict[Left, dict[int, int]] = {}
    written: dict[tuple[str, int], set[int]] = {}
    for process, folders in enumerate(lists):
        for start, rank, count, parts in folders:
            written.setdefault((start, rank), set()).update(step for step, _ in parts)
            for step, is_intact in parts:
                found = places.setdefault((step, start, count), {})
                if is_intact:
                    found.setdefault(rank, process)
    return places, {one for one in places for (start, _), steps in written.items() if start == one[1] and one[0] not in steps}


def _is_torn(folder: Path) -> bool:
    """Whether a part lacks something, as after a power cut. Raises ConfigError for one of an earlier version."""
    try:
        listed = read_files(folder)
        if MANIFEST not in listed:
            sizes = ((folder / name).stat().st_size == size for name, (size, _) in listed.items())
            return damage(folder, META) is not None or not all(sizes)
    except (OSError, ValueError):
        return True
    raise ConfigError(
        f"{folder} is a part that an earlier jaxllm wrote, with an index of its own: start the run once with that version, "
        f"which copies the checkpoint to the store, or move the part away."
    )


def is_brought_by(name: str, process: int) -> bool:
    """Whether the whole checkpoint has this file of the part of a process: the metadata, and what Orbax writes for all arrays,
    are those of process 0. The others have pieces of arrays beside them."""
    return process == 0 or name.count("/") > 1
