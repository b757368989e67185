"""Which hosts of a launch train, of those that are there (launch.least_hosts)."""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxllm.cluster.launchers import Launch
from jaxllm.cluster.rendezvous_checks import ProcessInfo, why_incompatible

LEADERS = 16
"""Processes that may lead where a run may shrink. All of them gone is the one loss that it does not survive by itself."""
DOES_NOT_FIT = "the batch does not divide over them, or their memory is too small"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Elastic:
    """How far a run may shrink.

    Args:
      least_hosts: None: not at all. All hosts are required, and process 0 leads.
      wait_s: how long the others wait for a host that is missing.
      layout: (processes of each host that is there) -> keys of the config for them, as JSON; None if it cannot train there.
      too_few: (processes of each host of the launch) -> whether the config's mesh has more devices than all of them.
      why_none: (processes of each host that is there) -> why no layout fits them, and what to change.
      sites: number of groups of consecutive hosts that a slow network connects (replicas). Whole ones are taken first, and the
        hosts of one have consecutive ranks.
    """

    least_hosts: int | None = None
    wait_s: float = math.inf
    layout: Callable[[Sequence[Sequence[ProcessInfo]]], str | None] = lambda hosts: None
    too_few: Callable[[Sequence[Sequence[ProcessInfo]]], bool] = lambda hosts: False
    why_none: Callable[[Sequence[Sequence[ProcessInfo]]], str] = lambda hosts: DOES_NOT_FIT
    sites: int = 1

    @property
    def shrinks(self) -> bool:
        return self.least_hosts is not None

    @property
    def leaders(self) -> int:
        """Number of the first processes, each of which may lead the rendezvous."""
        return LEADERS if self.shrinks else 1


ALL_REQUIRED = Elastic()


def complete_hosts(launch: Launch, there: Collection[int]) -> list[list[int]]:
    """Ranks of each host all of whose processes are there. A launch that does not tell its hosts counts as one."""
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(launch.hosts or launch.num_processes * ("",)):
        by_host.setdefault(host, []).append(rank)
    present = set(there)
    return [ranks for ranks in by_host.values() if present.issuperset(ranks)]


def site_of(rank: int, count: int, sites: int) -> int:
    """The group of hosts (Elastic.sites) of a rank of the launch, which has `count` processes."""
    return rank * sites // count


class HostChoice:
    """The choice, as one process makes it. Hosts are lists of the ranks of their processes.

    Args:
      infos: by rank; it may grow.
    """

    def __init__(self, own: ProcessInfo, launch: Launch, elastic: Elastic, infos: Mapping[int, ProcessInfo]):
        self._own, self._launch, self._elastic, self._infos = own, launch, elastic, infos
        self._least = elastic.least_hosts or launch.num_processes

    def candidates(self, there: Collection[int]) -> list[list[int]]:
        """Hosts that may train. At the first start one that does not fit is one of them, so that all learn of it."""
        is_again = self._elastic.shrinks and self._own.attempt
        return self.fitting(there) if is_again else complete_hosts(self._launch, there)

    def fitting(self, there: Collection[int]) -> list[list[int]]:
        """Each complete host whose processes fit to this one's host, which comes first; none if that is not complete."""
        hosts = complete_hosts(self._launch, there)
        home = next((ranks for ranks in hosts if self._own.rank in ranks), None)
        if home is None:
            return []
        fit = [ranks for ranks in hosts if ranks != home and not why_incompatible(self.numbered([*home, *ranks]))]
        # This one's site first, and then whole ones.
        here, all_fit = self.site(self._own.rank), [home, *fit]
        return [home, *sorted(fit, key=lambda at: (self.site(at[0]) != here, not self._is_whole(at[0], all_fit), at[0]))]

    def numbered(self, ranks: Sequence[int]) -> list[ProcessInfo]:
        """These processes with new ranks, in this order."""
        return [replace(self._infos[rank], rank=number) for number, rank in enumerate(ranks)]

    def in_order(self, ranks: Sequence[int]) -> list[int]:
        """This process first, then those of its site, then the others by site."""
        home = self.site(self._own.rank)
        return sorted(ranks, key=lambda rank: (self.site(rank) != home, self.site(rank), rank != self._own.rank, rank))

    def are_all(self, hosts: Sequence[Sequence[int]]) -> bool:
        """Whether these are all of the launch, and enough for the config's mesh."""
        return self.is_launch(hosts) and not self._elastic.too_few(self._described(hosts))

    def is_launch(self, hosts: Sequence[Sequence[int]]) -> bool:
        return sum(map(len, hosts)) == self._own.count

    def choose(self, there: Collection[int]) -> tuple[list[int], str] | None:
        """Ranks of the largest number of hosts that has a layout, this one among them, and the layout."""
        hosts = self.fitting(there)
        for count in range(len(hosts), self._least - 1, -1):
            if (layout := self.layout(hosts[:count])) is not None:
                if spares := hosts[count:]:
                    names = ", ".join(self.names(spares))
                    log.warning("No layout fits %d hosts: training on %d, without %s.", len(hosts), count, names)
                return [rank for ranks in hosts[:count] for rank in ranks], layout
        return None

    def why_none(self, hosts: Sequence[Sequence[int]]) -> str:
        """The sentence, without its end, if these hosts are enough and no layout fits them; else empty."""
        if len(hosts) < self._least:
            return ""
        why = self._elastic.why_none(self._described(hosts))
        return f"No layout fits {len(hosts)} hosts or fewer, down to launch.least_hosts={self._least} ({why})"

    def are_more_without_this_host(self, hosts: Sequence[Sequence[int]], processes: int) -> bool:
        """Whether the whole sites beside this one's have more than so many processes, and can train. Each leader trains."""
        if self._is_whole(self._own.rank, hosts):
            return False
        others = [ranks for ranks in hosts if self._is_whole(ranks[0], hosts)]
        is_more = len(others) >= self._least and sum(map(len, others)) > processes
        may_lead = any(rank < self._elastic.leaders for ranks in others for rank in ranks)
        return is_more and may_lead and self.layout(others) is not None

    def to_grow_by(self, present: Collection[int], waiting: Collection[int]) -> list[str]:
        """Names of hosts that wait and with which the run can grow.

        Args:
          present: ranks that train.
        """
        hosts = self.fitting({*present, *waiting})
        hosts.sort(key=lambda ranks: not set(ranks) <= set(present))
        least = sum(set(ranks) <= set(present) for ranks in hosts)
        for count in range(len(hosts), least, -1):
            if self.are_all(hosts[:count]) or self.layout(hosts[:count]) is not None:
                return self.names(hosts[least:count])
        return []

    def layout(self, hosts: Sequence[Sequence[int]]) -> str | None:
        return self._elastic.layout(self._described(hosts))

    def names(self, hosts: Sequence[Sequence[int]]) -> list[str]:
        return [self._launch.hosts[ranks[0]] for ranks in hosts]

    def site(self, rank: int) -> int:
        return site_of(rank, self._own.count, self._elastic.sites)

    def _is_whole(self, rank: int, hosts: Sequence[Sequence[int]]) -> bool:
        """Whether all processes of a rank's site are among these hosts."""
        present = sum(len(ranks) for ranks in hosts if self.site(ranks[0]) == self.site(rank))
        return self._elastic.sites == 1 or present >= self._own.count // self._elastic.sites

    def _described(self, hosts: Sequence[Sequence[int]]) -> list[list[ProcessInfo]]:
        return [[self._infos[rank] for rank in ranks] for ranks in hosts]
