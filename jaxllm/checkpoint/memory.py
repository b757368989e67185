"""Checkpoints in the memory of the hosts (checkpoint.memory_every_steps): each process keeps its pieces of the state on its own
host and on the next one, so that a run which loses a process or a host resumes a few steps back.

    memory = MemoryCheckpoints(run_dir, config.checkpoint, state)
    found = memory.find(after=checkpoints.latest)       the newest of which every piece is left, and intact
    trainer.restore(found or checkpoints)               on any number of hosts, in any layout
    memory.begin(keep=found)                            the others are removed
    memory.save(step, state, meta)                      written and sent in the background

All processes call each method in the same order. The idea is that of Gemini (Wang et al., SOSP 2023). NVIDIA's Resiliency
Extension calls it local checkpoints with replication; there the ranks of a resumed run must be those of the save.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxllm.checkpoint.files import Meta, why
from jaxllm.checkpoint.manager import State, as_dict
from jaxllm.checkpoint.memory_files import (
    Generation,
    Part,
    PartFile,
    Piece,
    copy_pieces,
    make_home,
    name_of_host,
    own_bytes,
    parts_in,
    remove,
    remove_home,
    require_space,
    write_part,
)
from jaxllm.checkpoint.memory_restore import CONNECTIONS, MemoryCheckpoint, Source
from jaxllm.checkpoint.memory_transfer import Address, Port, get_header, put
from jaxllm.config import CheckpointConfig, ConfigError
from jaxllm.runtime import distributed
from jaxllm.runtime.authentication import SECRET, SECRET_FILE
from jaxllm.runtime.launchers import is_loopback
from jaxllm.runtime.rendezvous_checks import listening_address
from jaxllm.runtime.socket_messages import Name, Rank, listen
from jaxllm.untrusted import JSON_BYTES, Text, Whole, checked, parse_json, read_text

log = logging.getLogger(__name__)

STORED = "newest_stored"
"""Key of the metadata: the newest checkpoint in the store at that time; None if there was none."""
RUN_FILE = ".memory-run"
"""In run.dir: the random name of the run, so that what an earlier run at this path left in memory is not taken for its own."""
CLOSE_S = 5.0
RUNNING, DONE = "running", "done"


@dataclass(frozen=True)
class Member:
    """What a process tells the others at the start."""

    host: Text
    """Random name of its memory."""
    name: Name
    """Its host's, for people."""
    address: Address | None
    """Where its port is; None on a single host."""
    share_bytes: Whole
    """Its pieces of the state."""
    held: tuple[tuple[Text, Rank, Rank], ...]
    """Files in its memory: generation, writer, number of writers."""

    @property
    def parts(self) -> list[Part]:
        named = ((Generation.parse(name), writer, count) for name, writer, count in self.held)
        return [Part(generation, writer, count) for generation, writer, count in named if generation is not None]


@dataclass
class _Save:
    generation: Generation
    outcome: str = RUNNING
    """Or DONE, or why it failed."""


class MemoryCheckpoints:
    """The checkpoints of one run in the memory of its hosts.

    Args:
      state: the state that will be saved, for its size.
      absent_hosts: the number of hosts that the run trains without.

    Raises:
      ConfigError: checkpoint.memory_dir cannot be used or has too little space; the processes of several hosts share no secret.
    """

    def __init__(self, run_dir: Path, config: CheckpointConfig, state: State, absent_hosts: int = 0):
        self._memory_dir, self._rank, self._absent_hosts = config.memory_dir, jax.process_index(), absent_hosts
        self._kind = type(state)
        self._home = make_home(config.memory_dir, run_dir)
        self._run, self._start = distributed.broadcast(f"{_name_of_run(run_dir)} {secrets.token_hex(8)}").split()
        self._most_bytes = 0
        self._complete: Generation | None = None
        self._saving: _Save | None = None
        self._thread: threading.Thread | None = None
        self._skipped = False
        self._port, self._secret = None, None
        host = name_of_host(self._home)
        address = None
        if len(set(_exchange(host))) > 1:
            address = self._open_port()
        held = tuple((str(part.generation), part.writer, part.count) for part in parts_in(self._home))
        share = own_bytes(as_dict(state))
        mine = Member(host, socket.gethostname(), address, share, held)
        self._members = [checked(parse_json(text), Member) for text in _exchange(json.dumps(vars(mine)))]
        hosts = [member.host for member in self._members]
        self._neighbour = neighbour(self._rank, hosts)
        self._has_space = self._check_space([member.share_bytes for member in self._members])

    def find(self, after: int | None, newest_name: int | None = None) -> MemoryCheckpoint | None:
        """The newest checkpoint of which all pieces are left, after a step (None: after any). What this host has of it is read
        and compared with its digests; a damaged file does not count, nor one on a host that cannot be reached.

        Args:
          newest_name: the newest step in the store, intact or not. A checkpoint in memory that followed a later one is left
            out: a user has taken the run back.
        """
        held = {member.host: {part for part in member.parts if part.generation.run == self._run} for member in self._members}
        while (chosen := newest(held, after)) is not None:
            files, bad = self._open(chosen, held)
            lost = [tuple(each) for text in _exchange(json.dumps(bad)) for each in parse_json(text)]
            stored = None if lost else files[0].header.meta.get(STORED)
            if stored is not None and (newest_name is None or newest_name < stored):
                for parts in held.values():
                    parts.difference_update(chosen)
                if distributed.is_main_process():
                    log.warning(
                        "The memory checkpoint of step %d is left out: it followed checkpoint %d, which is no longer there.",
                        *(chosen[0].generation.step, stored),
                    )
                continue
            if not lost:
                names = dict.fromkeys(member.name for member in self._members if held[member.host] & set(chosen))
                return MemoryCheckpoint(chosen[0].generation, files, self._secret, tuple(names))
            for host, writer in lost:
                held[host].discard(chosen[writer])
            if distributed.is_main_process():
                log.warning("Files of the memory checkpoint of step %d are damaged or out of reach.", chosen[0].generation.step)
        return None

    def begin(self, keep: MemoryCheckpoint | None) -> None:
        """Call it when all have restored a state, before the first `save`. Removes what is older than that state or another
        run's; `keep`, if it was the one restored, stays until there is a newer one.
        """
        self._complete = None if keep is None else keep.generation
        remove(self._home, keep=[] if keep is None else [keep.generation])

    def save(self, step: int, state: State, meta: Meta) -> None:
        """Returns when the pieces are copied to the host. If the previous save is not complete on all processes yet, there is
        none at this step; if it failed somewhere, it is removed, and the one before stays.
        """
        arrays = as_dict(state)
        if type(state) is not self._kind:
            # The first round of DiLoCo: each replica has a state of its own from now on.
            self._kind = type(state)
            self._has_space = self._check_space([int(text) for text in _exchange(str(own_bytes(arrays)))], refuses=False)
        if not self._has_space:
            return
        self._most_bytes = sum(x.nbytes for x in jax.tree.leaves(arrays)) + JSON_BYTES
        verdict = distributed.exchange("" if self._saving is None else self._saving.outcome, _verdict)
        if verdict == RUNNING:
            if not self._skipped and distributed.is_main_process():
                log.warning(
                    "No memory checkpoint at step %d: the previous one is not complete yet, as later ones may be.", step
                )
            self._skipped = True
            return
        if self._saving is not None:
            if verdict == DONE:
                self._complete = self._saving.generation
            elif distributed.is_main_process():
                log.warning("The memory checkpoint of step %d is not complete: %s.", self._saving.generation.step, verdict)
        self._saving = saving = _Save(Generation(step, self._run, self._start))
        try:
            pieces = copy_pieces(arrays)
        except MemoryError as error:
            saving.outcome = f"process {self._rank} could not copy ({why(error)})"
            return
        self._thread = threading.Thread(target=self._keep, args=[saving, pieces, meta], name="memory-checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """Whether this process has not yet written and sent its pieces."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, limit_s: float | None = None) -> None:
        """Waits until this process has written and sent its pieces, or could not."""
        if self._thread is not None:
            self._thread.join(limit_s)

    def close(self, is_useless: bool = False) -> None:
        """Ends the transfers.

        Args:
          is_useless: the store has a newer checkpoint, so the files are removed. Otherwise they stay for the next start.
        """
        if is_useless:
            self.wait(CLOSE_S)
        if self._port is not None:
            self._port.close()
            self._port = None
        if is_useless:
            remove_home(self._home)

    # ----------------------------------------------------------------------------------------------------------- at the start

    def _check_space(self, shares: Sequence[int], refuses: bool = True) -> bool:
        """Whether all hosts have the space. A run that lost hosts is not refused: each of the others has more to keep.

        Args:
          shares: bytes of each process's pieces.
        """
        refusal, hosts = "", [member.host for member in self._members]
        here = hosts[self._rank]
        own = sum(share for share, host in zip(shares, hosts, strict=True) if host == here)
        received = sum(
            share for rank, share in enumerate(shares) if (to := neighbour(rank, hosts)) is not None and hosts[to] == here
        )
        try:
            require_space(self._memory_dir, self._home, own + received, own)
        except ConfigError as error:
            refusal = str(error)
        if (refusal := distributed.first_nonempty(refusal)) and refuses and not self._absent_hosts:
            raise ConfigError(refusal)
        if refusal and distributed.is_main_process():
            log.warning("No memory checkpoints: %s", refusal)
        return not refusal

    def _open_port(self) -> Address:
        """Opens this process's port and returns its address for the others."""
        launch = distributed.launch()
        if launch is None or launch.secret is None:
            raise ConfigError(
                f"checkpoint.memory_every_steps sends the state to other hosts, and the processes of this run share no secret: "
                f"set {SECRET} or {SECRET_FILE} for all of them (docs/launch.md), or remove checkpoint.memory_every_steps."
            )
        self._secret = launch.secret
        if self._rank == 0:
            # All others have reached it by this name.
            to, at = launch.host, listening_address(launch)
        else:
            to = at = _address_towards(launch.host, launch.port)
            if is_loopback(at) and not is_loopback(launch.host):
                # The host of process 0, whose own name leads to loopback there, as Debian's /etc/hosts maps it.
                to, at = launch.host, ""
        listener = listen(0, at)
        places = CONNECTIONS * jax.process_count()
        self._port = Port(listener, self._secret, self._home, self._expected_bytes, places)
        return to, listener.getsockname()[1]

    def _expected_bytes(self, generation: Generation) -> int:
        known = (self._run, self._start)
        return self._most_bytes if (generation.run, generation.start) == known else 0

    def _open(self, chosen: Sequence[Part], held: Mapping[str, set[Part]]) -> tuple[list[Source], list[tuple[str, int]]]:
        """(the files of a checkpoint, where to read them, and those that turned out bad: host and writer)."""
        hosts = [member.host for member in self._members]
        here = hosts[self._rank]
        own = [rank for rank, host in enumerate(hosts) if host == here]

        def opened(part: Part) -> Source | tuple[str, int]:
            owners = [host for host in dict.fromkeys(hosts) if part in held[host]]
            owner = here if here in owners else owners[part.writer % len(owners)]
            try:
                if owner == here:
                    file = PartFile(self._home / part.path)
                    # The processes of a host share the work.
                    if own[part.writer % len(own)] == self._rank:
                        file.require_intact()
                    return Source(part, file.header, file)
                ranks = [rank for rank, host in enumerate(hosts) if host == owner]
                address = self._members[ranks[part.writer % len(ranks)]].address
                assert address is not None, "there are several hosts"
                return Source(part, get_header(address, self._secret, part), address)
            except (OSError, ValueError):
                return owner, part.writer

        # Each process begins at its own number, or all would ask the same one at once.
        begin = self._rank % len(chosen)
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            found = list(pool.map(opened, [*chosen[begin:], *chosen[:begin]]))
        found = [*found[len(chosen) - begin :], *found[: len(chosen) - begin]]
        return [x for x in found if isinstance(x, Source)], [x for x in found if not isinstance(x, Source)]

    # -------------------------------------------------------------------------------------------------------- in a thread

    def _keep(self, saving: _Save, pieces: list[tuple[Piece, np.ndarray]], meta: Meta) -> None:
        part, doing = Part(saving.generation, self._rank, len(self._members)), "write"
        try:
            # First, for their space.
            keep = [] if self._complete is None else [self._complete]
            remove(self._home, keep, before_step=saving.generation.step)
            path = write_part(self._home, part, meta, pieces)
            if self._neighbour is not None:
                to = self._members[self._neighbour]
                doing = f"send to process {self._neighbour} on {to.name}"
                assert to.address is not None, "there are several hosts"
                put(to.address, self._secret, path, part)
            saving.outcome = DONE
        except Exception as error:
            # Whatever it is, training continues.
            saving.outcome = f"process {self._rank} could not {doing} ({why(error)})"


def forget(run_dir: Path) -> None:
    """For a run without checkpoints in memory: those of an earlier start are not its own any more."""
    with suppress(OSError):
        (run_dir / RUN_FILE).unlink(missing_ok=True)


def neighbour(rank: int, hosts: Sequence[str]) -> int | None:
    """The process that keeps the second copy of this one's pieces: one of the next host, in the order of first processes. None
    if there is one host.
    """
    order = list(dict.fromkeys(hosts))
    if len(order) == 1:
        return None
    there = order[(order.index(hosts[rank]) + 1) % len(order)]
    own, others = ([other for other, host in enumerate(hosts) if host == name] for name in (hosts[rank], there))
    return others[own.index(rank) % len(others)]


def newest(held: Mapping[str, set[Part]], after: int | None) -> list[Part] | None:
    """The parts, by writer, of the newest generation after a step that has a part of each writer on some host."""
    found: dict[tuple[Generation, int], set[Part]] = {}
    for part in set().union(*held.values()):
        if after is None or part.generation.step > after:
            found.setdefault((part.generation, part.count), set()).add(part)
    whole = [(generation, count) for (generation, count), parts in found.items() if len(parts) == count]
    return sorted(found[max(whole)]) if whole else None


def _exchange(text: str) -> list[str]:
    """The texts of all processes, by rank."""
    return parse_json(distributed.exchange(text, json.dumps))


def _verdict(outcomes: Sequence[str]) -> str:
    if RUNNING in outcomes:
        return RUNNING
    return next((outcome for outcome in outcomes if outcome not in (DONE, "")), DONE)


def _name_of_run(run_dir: Path) -> str:
    """Random, made once for a run directory by process 0; anything on the others."""
    if not distributed.is_main_process():
        return "-"
    path = run_dir / RUN_FILE
    try:
        name = read_text(path, 64).strip()
    except (OSError, ValueError):
        name = ""
    if Generation.parse(f"0-{name}-{name}") is None:
        name = secrets.token_hex(8)
        aside = path.with_name(f"{RUN_FILE}-{uuid.uuid4().hex}")
        aside.write_text(name)
        aside.replace(path)
    return name


def _address_towards(host: str, port: int) -> str:
    """This host's address on the way to another. No packet is sent: connecting a UDP socket only chooses it."""
    for family, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    return socket.gethostname()
