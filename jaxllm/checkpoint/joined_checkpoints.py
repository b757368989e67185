"""The checkpoints of a run whose hosts share no disk: only those that are whole in the store count.

A restart takes the newest intact one there. The leader of each run.dir (host_shares.py) copies the whole checkpoint into it,
under another name until it is verified; then each process reads what it needs, as from a disk that all share. host_shares.py
says how the parts of a new one come into the store; they are a checkpoint when process 0 has written files.json.
"""

import json
import shutil
import socket
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

import jax

from jaxllm.checkpoint.files import (
    FILES,
    FILES_BYTES,
    changed,
    damage,
    listed_in,
    newest_whole,
    read_meta,
    saved_steps,
    set_aside,
)
from jaxllm.checkpoint.host_shares import (
    PARTS,
    DiskGroups,
    HostShares,
    Left,
    by_checkpoint,
    find_disk_groups,
    is_brought_by,
    parts_in,
)
from jaxllm.checkpoint.store import Store, StoreError, StoreLock, unusable
from jaxllm.checkpoint.stored_checkpoints import CURVES, StoredCheckpoints
from jaxllm.cluster import distributed
from jaxllm.cluster.distributed import raising_together
from jaxllm.config import CheckpointConfig, ConfigError
from jaxllm.untrusted import parse_json

T = TypeVar("T")


class JoinedCheckpoints(StoredCheckpoints):
    """The checkpoints of a run in its store, on each process. All create it together, and call `choose` and `begin` together.
    ConfigError on all, if one cannot use the store.

    Args:
      store, lock: on process 0 the lock is held, on the others it is not used.
    """

    def __init__(self, store: Store, lock: StoreLock, run_dir: Path, config: CheckpointConfig, groups: DiskGroups):
        super().__init__(store, lock, run_dir, config)
        self.shares = HostShares(run_dir, config, self._store)
        self._groups, self._begun = groups, set[int]()
        self._may_have_left = True
        # (step, intact parts here, number of parts) of the newest one that other hosts, or a backup, may complete.
        self._lacking: tuple[int, int, int] | None = None
        self.safe_in = f"{self.shares.home} of each host"
        probe = f"{PARTS}/{self.shares.start}-{jax.process_index()}"
        _together(lambda: (self._store.write(probe, b"{}"), self._store.remove([probe])), store)
        self._on_main(self._remove_partial)

    def close(self) -> None:
        self.shares.close()
        super().close()

    # ------------------------------------------------------------------------------------------------- from the store

    def choose(self) -> tuple[int | None, list[str]]:
        """The newest intact checkpoint of the store that no earlier call returned, in each run.dir now, and sentences on it, on
        the damaged ones, and on newer ones of hosts; None if there is none.

        Raises:
          ConfigError: on all processes, if a host cannot fetch or hold it, if all are damaged, or if the store has none and a
            host has some.
        """
        said: list[str] = []
        while (step := self._next(said)) is not None:

            def fetch(step: int = step) -> str:
                found, _ = self.fetch(step - 1) if self._groups.leads else (step, [])
                return "" if found == step else self.damaged.get(step, "it is no longer there")

            reason = distributed.first_nonempty(_together(fetch, self._store))
            if not reason:
                said.append(f"took checkpoint {step} from {self._store.address}")
                said += self._newer_here(step)
                if self._lacking and self._lacking[0] > step:
                    said.append(f"{self._parts_said()}: a start with all of them copies it, until the run has saved again")
                self.shares.committed = step
                return step, said
            said.append(self._pass_over(step, reason))
        if self.shares.committed is not None:
            # An earlier call returned it.
            self.damaged[self.shares.committed] = "its copy in run.dir cannot be read"
        self._require_no_damaged()
        _together(self._require_none_here, self._store)
        if self._lacking:
            raise ConfigError(
                f"{self._parts_said()}, and {self._store.address} has no checkpoint: start the run on all hosts that have its "
                f"parts, which copies it, or move {self.safe_in} away."
            )
        return None, said

    def _parts_said(self) -> str:
        step, count, of = self._lacking or (0, 0, 0)
        return f"{self.safe_in} has {count} of the {of} parts of checkpoint {step} intact"

    def _next(self, said: list[str]) -> int | None:
        """The newest step of the store that was not tried yet, the same on all processes."""
        if self._may_have_left:
            # Again after the newest of them has proved damaged.
            whole, untried = self._on_main(lambda: (self._store.committed(), self._untried()))
            copied = self._copy_left(set(whole), -1 if untried is None else untried)
            self._may_have_left = bool(copied)
            said += [f"copied checkpoint {step}, of which the hosts had all parts, to {self._store.address}" for step in copied]
        return self._on_main(self._untried)

    def _untried(self) -> int | None:
        return max({*self._store.committed()} - self.damaged.keys() - self._fetched, default=None)

    def _on_main(self, ask: Callable[[], T]) -> T:
        """What `ask` returns on process 0, on all processes; it fails on all."""
        found = _together(lambda: ask() if distributed.is_main_process() else None, self._store)
        return parse_json(distributed.broadcast(json.dumps(found)))

    def has_parts(self) -> bool:
        """Whether these hosts have all parts of a checkpoint, which `choose` copies. All processes call it together."""
        return any(len(places) == one[2] for one, places in self._parts_left()[0].items())

    def _parts_left(self) -> tuple[dict[Left, dict[int, int]], set[Left]]:
        """As by_checkpoint."""
        here = _together(lambda: parts_in(self.shares.home) if self._groups.leads else [], self._store)
        return by_checkpoint(distributed.gathered(here))

    def _copy_left(self, whole: set[int], newest: int) -> list[int]:
        """Copies what the store lacks and of which these hosts have all parts, as after a run whose store failed: the newest
        checkpoint, and permanent ones of any age. Of one that lacks parts, those here are kept: other hosts may have the rest.

        Args:
          whole: steps that are whole in the store.
          newest: the newest of them that may be intact.

        Returns:
          The steps that it copied.
        """
        found, never_whole = self._parts_left()
        found = {one: places for one, places in found.items() if one[0] not in whole}
        complete = {one[0]: one for one, places in sorted(found.items()) if len(places) == one[2]}
        left = max((step for step in complete if step > newest), default=None)
        partial = {one: places for one, places in found.items() if one[0] > (newest if left is None else left)}
        self.shares.kept = max(
            ((step, len(places), start) for (step, start, _), places in partial.items() if places), default=None
        )
        lacking = [(one[0], len(places), one[2]) for one, places in partial.items() if one not in never_whole]
        self._lacking = max(lacking, default=None)
        copied = sorted(step for step in complete if step == left or self._config.keeps_forever(step))
        for step in copied:
            self._copy_parts(step, complete[step][1], found[complete[step]])
        self.shares.stored = whole | {*copied}
        return copied

    def _copy_parts(self, step: int, start: str, places: dict[int, int]) -> None:
        """Makes a checkpoint of an earlier start whole in the store; `places` says which process has the part of a rank."""
        own = [rank for rank, process in places.items() if process == jax.process_index()]
        folders = {rank: self.shares.home / start / str(rank) / str(step) for rank in own}

        def upload() -> list[tuple[int, int]]:
            self.require()
            if 0 in own:
                # The run's curves are on the host that was that of process 0.
                self._write_run_files(step)
            return [(rank, self.shares.upload(step, folder, rank)) for rank, folder in folders.items()]

        # Parts of another run would displace what the store has.
        _together(lambda: self.accept(str(folders[0]), read_meta(folders[0])) if 0 in own else None, self._store)
        sent = sorted(tuple(pair) for pairs in distributed.gathered(_together(upload, self._store)) for pair in pairs)
        self._on_main(lambda: self._commit(step, [crc for _, crc in sent]))

    def _require_none_here(self) -> None:
        """A run starts from scratch only if no host has a checkpoint, intact or not, as on one disk."""
        step, _ = newest_whole(self._folder) if self._groups.leads else (None, {})
        if step is not None:
            raise ConfigError(
                f"{self._folder} has checkpoint {step}, and {self._store.address} has none, while the hosts share no run.dir: "
                f"start the run there alone, which copies it, or move that checkpoint away."
            )

    def _newer_here(self, latest: int) -> list[str]:
        """Sentences on the hosts' checkpoints that `begin` moves aside, but for those that the store gave."""
        newer = [step for step in saved_steps(self._folder) if step > latest and step not in self._fetched]
        home, where = str(self._folder.with_name("checkpoints-damaged")), self._store.address
        return [
            f"checkpoint {step} on {host} is newer than {latest}, the newest whole one in {where}: moved to {place}"
            for host, steps, place in distributed.gathered([socket.gethostname(), newer if self._groups.leads else [], home])
            for step in steps
        ]

    def _fetch(self, step: int, there: dict[str, int]) -> str | None:
        folder = self._folder / str(step)
        if self._is_in_store(step) and not (damage(folder) or changed(folder)):
            # This host has it from an earlier start.
            self._take_run_files(step, self._folder / f"{step}.from-store", there)
            return None
        return super()._fetch(step, there)

    def _take_run_files(self, step: int, aside: Path, there: dict[str, int], curves: tuple[str, ...] = CURVES) -> None:
        # The curves are those of process 0, wherever it runs now.
        super()._take_run_files(step, aside, there, curves if distributed.is_main_process() else ())

    def begin(self, latest: int | None) -> None:
        """Call it when all have restored the state: removes what was left by earlier starts, and is ready for parts. Of the
        checkpoints that the store has too, this host keeps the one it resumes from.
        """
        if self._groups.leads:
            self.require()
            for step in saved_steps(self._folder):
                if latest is not None and step > latest:
                    # Training will save its step again.
                    set_aside(self._folder / str(step))
                elif step != latest and self._is_in_store(step):
                    shutil.rmtree(self._folder / str(step))
            # This process holds run_dir, so that none of an earlier start writes them now. The second are those of a version
            # that joined parts.
            for leftover in (self._twins, *self._run_dir.glob(".joining-*")):
                shutil.rmtree(leftover, ignore_errors=True)
            self.shares.remove_left()
        self.shares.begin()

    def _remove_partial(self) -> None:
        """Removes what an earlier start copied in part."""
        there = self._store.steps()
        for step in [step for step, files in there.items() if FILES not in files]:
            self.lock.require()
            self._remove_step(step, there[step])

    # ----------------------------------------------------------------------------------------- to the store, on process 0

    def _copy(self, step: int) -> None:
        self.lock.require()
        # One that is offered again has no parts any more.
        if step not in self.shares.done:
            if step not in self._begun:
                # A damaged one, or a part of an earlier copy.
                self._remove_step(step, self._store.steps(step).get(step, {}))
                self._begun.add(step)
            crcs = self.shares.gather(step)
            self._write_run_files(step)
            self._commit(step, crcs)
            self.damaged.pop(step, None)
            self.shares.commit(step)
        self._prune(step)

    def _commit(self, step: int, crcs: Sequence[int]) -> None:
        """Makes one checkpoint of the parts that are there.

        Args:
          crcs: CRC32 of the files.json of each part, by rank.
        """
        listed: dict[str, tuple[int, int]] = {}
        for rank, crc in enumerate(crcs):
            content = self._store.read(f"{step}/{PARTS}/{rank}/{FILES}", FILES_BYTES)
            if zlib.crc32(content) != crc:
                raise StoreError(f"{PARTS}/{rank}/{FILES} is not what process {rank} wrote")
            listed |= {name: entry for name, entry in listed_in(content).items() if is_brought_by(name, rank)}
        found = self._require_arrived(step, {name: size for name, (size, _) in listed.items()})
        self._store.remove(f"{step}/{name}" for name in found if name.startswith(f"{PARTS}/"))
        self.lock.require()
        self._store.write(f"{step}/{FILES}", json.dumps(listed).encode())


@contextmanager
def joined_checkpoints(
    run_dir: Path, config: CheckpointConfig, stored: StoredCheckpoints | None
) -> Iterator[tuple[bool, JoinedCheckpoints | None]]:
    """Whether this process leads those with its run.dir; and the run's checkpoints in its store, if its hosts share no disk,
    None if they do. Every process must call it.

    Args:
      stored: those of a run on a shared disk, on process 0.

    Raises:
      ConfigError: on all processes, if there is no store, one cannot use it, or the config needs a shared disk.
    """
    if not jax.distributed.is_initialized():
        # A run of one process, which may have no devices yet.
        yield True, None
        return
    groups = find_disk_groups(run_dir)
    if groups.is_one:
        yield groups.leads, None
        return
    if config.store is None:
        stranger = next(rank for rank, leader in enumerate(groups.leaders) if leader)
        raise ConfigError(
            f"run.dir={run_dir} of process {stranger} is not that of process 0: put it on storage that all hosts share, or set "
            f"checkpoint.store=s3://BUCKET/PREFIX."
        )
    if config.export_every_steps is not None:
        raise ConfigError(
            "checkpoint.export_every_steps reads whole checkpoints in run.dir, and these hosts share none: put run.dir on "
            "storage that all hosts share, or set checkpoint.export_every_steps=null and export a checkpoint of the store."
        )
    store = Store(config.store)
    lock = StoreLock(store) if stored is None else stored.lock
    with closing(JoinedCheckpoints(store, lock, run_dir, config, groups)) as joined:
        yield groups.leads, joined


def _together(ask: Callable[[], T], store: Store) -> T:
    """What `ask` returns here. Raises ConfigError on all processes if it fails on one, with that one's name."""
    with raising_together():
        try:
            return ask()
        except (ConfigError, OSError) as error:
            cause = error if isinstance(error, ConfigError) else unusable(store.address, error)
            who = f"Process {jax.process_index()} on {socket.gethostname()}"
            raise ConfigError(f"{who}: {cause}").with_code(cause.exit_code) from None
