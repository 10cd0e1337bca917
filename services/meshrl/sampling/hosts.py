"""The rollout services of a run: their environments, health and speed, and the choice of the service for a group.

No I/O and no clock: `pool` reports what happens.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from meshrl.client.backoff import Backoff
from meshrl.sampling.retry import Patience
from meshrl.wire.errors import Reason
from meshrl.wire.types import EnvironmentInfo

HALF_LIFE_S = 60.0
"""Of a service's record, so that a change of speed shows within minutes."""

QUARANTINED_AFTER = 3
FIRST_QUARANTINE_S = 30.0
LONGEST_QUARANTINE_S = 960.0
"""For an environment of which a service failed QUARANTINED_AFTER groups in a row."""

_MAY_PASS = frozenset({Reason.CANCELLED, Reason.DUPLICATE_REQUEST})
"""gRPC's server cancels a call that its application has not taken up in time, and a service that has not noticed its
broken stream reports that the group is running: neither is absent."""


class HostState(enum.Enum):
    """Any state may follow any other."""

    SERVING = "serving"
    DRAINING = "draining"
    AWAY = "away"
    """It does not answer, or does not serve."""


@dataclass
class Quarantine:
    """Groups of one environment that failed in a row, and until when that leaves the service out, each time twice as
    long; a good group ends the count and the doubling."""

    until_s: float = 0.0
    in_a_row: int = 0
    again: bool = False
    """It has been left out since its last good group."""
    lengths: Backoff = field(default_factory=lambda: Backoff(FIRST_QUARANTINE_S, LONGEST_QUARANTINE_S, jitter=0.0))

    def group_failed(self, now_s: float) -> float:
        """Returns for how long the service is left out, or 0. After a time in quarantine one such group is enough for
        the next."""
        self.in_a_row += 1
        if self.until_s > now_s or self.in_a_row < (1 if self.again else QUARANTINED_AFTER):
            return 0.0
        lasts_s = self.lengths.next_s()
        self.until_s, self.in_a_row, self.again = now_s + lasts_s, 0, True
        return lasts_s

    def group_went_well(self) -> None:
        self.in_a_row, self.again = 0, False
        self.lengths.reset()


@dataclass
class Achievement:
    """A service's recent record in one environment; each part halves every HALF_LIFE_S."""

    busy_s: float = 0.0
    """Rollout-seconds in flight."""
    finished: float = 0.0
    failed: float = 0.0
    tokens: float = 0.0
    """Sampled, of those that finished."""
    in_flight: int = 0
    quarantine: Quarantine = field(default_factory=Quarantine)
    _counted_s: float = 0.0

    def count(self, now_s: float, *, begun: int = 0, finished: int = 0, failed: int = 0, tokens: int = 0) -> None:
        """A rollout that neither finished nor failed has a negative `begun`."""
        passed_s = max(0.0, now_s - self._counted_s)
        kept = 0.5 ** (passed_s / HALF_LIFE_S)
        self.busy_s = self.busy_s * kept + self.in_flight * passed_s
        self.finished = self.finished * kept + finished
        self.failed = self.failed * kept + failed
        self.tokens = self.tokens * kept + tokens
        self.in_flight = max(0, self.in_flight + begun - finished - failed)
        self._counted_s = now_s

    def pace_s(self, unknown_s: float, mean_tokens: float = 0.0) -> float:
        """Seconds in flight for each finished rollout; `unknown_s` without a record. A rollout counts as a multiple of
        `mean_tokens`, since long ones do not make a service slow; with 0 each counts as one. Failures count once more,
        so that a service that fails everything at once does not draw all groups to itself."""
        share = (self.finished + 1.0) / (self.finished + self.failed + 1.0)
        made = self.tokens / mean_tokens if mean_tokens > 0.0 else self.finished
        return (self.busy_s + unknown_s) / (made + 1.0) / share


@dataclass(eq=False)
class GroupPlace:
    """A group that is sampled: `left` of its rollouts are missing, and it is at a host, or waits for one."""

    environment: str
    left: int
    since_s: float
    group_id: str = ""
    min_version: int = 0
    retry_s: float = 0.0
    """For how long refusing hosts are asked again."""
    host: RolloutHost | None = None
    limit: asyncio.Timeout | None = None
    """Of the call; brought forward when the host is given up."""
    waits_for: str = ""
    """Why it is at no host."""
    finished_here: int = 0
    failed_here: int = 0
    """In the present or last call."""
    interrupted: int = 0
    """Calls that broke off after a part of the group."""
    avoids_until_s: dict[str, float] = field(default_factory=dict)
    """By the addresses of hosts that have refused it."""

    def __post_init__(self) -> None:
        self.size = self.left
        self.begin_anew()

    @property
    def has_begun(self) -> bool:
        return self.finished_here + self.failed_here > 0

    def begin_anew(self) -> None:
        """Forgets how long hosts have refused it, or been away."""
        self.patience = Patience(unreachable_s=0.0, retry_s=self.retry_s, also=_MAY_PASS)
        self.while_away = Backoff(0.05, 2.0)
        self.away_s = 0.0
        """How long to wait for a serving host before any is tried."""


@dataclass(eq=False)
class RolloutHost:
    address: str
    environments: Mapping[str, EnvironmentInfo] = field(default_factory=dict)
    state: HostState = HostState.AWAY
    why: str = "not asked yet"
    refusal: str = ""
    """The logged reason why it refuses groups; "" since one went well."""
    since_s: float = 0.0
    refuses_until_s: float = 0.0
    others: int = 0
    """Rollouts of other clients."""
    slots: int | None = None
    """Rollouts that it runs at once; None: not reported."""
    groups: dict[str, GroupPlace] = field(default_factory=dict)
    """Ours that it plays, by group_id."""
    achieved: dict[str, Achievement] = field(default_factory=dict)
    """By environment."""
    version: int | None = None
    """The newest of its engines at the last look; None: not reported."""
    needed: int | None = None
    """The newest version that groups needed at that look."""
    patience_s: float | None = None
    """Of a worker that dials in: how long a run waits for it if no other host has its environments."""

    @property
    def load(self) -> int:
        return self.others + sum(place.left for place in self.groups.values())

    def achievement(self, environment: str) -> Achievement:
        return self.achieved.setdefault(environment, Achievement())

    def why_not(self, environment: str, now_s: float, min_version: int | None) -> str:
        """Why others get its groups while they serve; empty without a reason."""
        if self.achievement(environment).quarantine.until_s > now_s:
            return f"its groups of {environment!r} failed again and again"
        if min_version is not None and self.needed is not None:
            min_version = min(min_version, self.needed)  # what had all then may have what was made since
        if min_version is not None and self.version is not None and self.version < min_version:
            return f"its engines serve version {self.version}, and groups need {min_version}"
        return ""

    def turn(self, state: HostState, now_s: float, why: str = "") -> bool:
        """Returns True if the state changes."""
        if state is self.state:
            self.why = why
            return False
        self.state, self.since_s, self.why = state, now_s, why
        return True


class HostTable:
    def __init__(self, addresses: Sequence[str]) -> None:
        self.hosts = [RolloutHost(address=address) for address in addresses]
        self._last_tried: dict[str, int] = {}

    def hosting(self, environment: str) -> list[RolloutHost]:
        """Present or away."""
        return [host for host in self.hosts if environment in host.environments]

    def choose(
        self,
        environment: str,
        size: int,
        now_s: float,
        *,
        avoid: Collection[str] = (),
        min_version: int | None = None,
    ) -> RolloutHost | None:
        """The host at which a group of `size` rollouts is expected to be over first: (its rollouts + size) times its
        pace; None while none takes it. Passed over are hosts that do not serve, have refused until a later time, or are
        in `avoid`, and as long as others serve, those in quarantine and those whose engines are older than
        `min_version`."""
        hosting = self.hosting(environment)
        open_to = [
            host
            for host in hosting
            if host.state is HostState.SERVING and host.refuses_until_s <= now_s and host.address not in avoid
        ]
        fit = [host for host in hosting if host.why_not(environment, now_s, min_version) == ""]
        if any(host.state is HostState.SERVING for host in fit):
            open_to = [host for host in open_to if host in fit]
        known = [one for host in hosting if (one := host.achievement(environment)).finished >= 1.0]
        unknown_s = sum(one.busy_s / one.finished for one in known) / len(known) if known else 1.0
        mean_tokens = sum(one.tokens for one in known) / sum(one.finished for one in known) if known else 0.0
        for host in open_to:
            host.achievement(environment).count(now_s)
        return min(
            open_to,
            key=lambda host: (host.load + size) * host.achievement(environment).pace_s(unknown_s, mean_tokens),
            default=None,
        )

    def next_in_turn(self, environment: str) -> RolloutHost:
        hosting = self.hosting(environment)
        turn = self._last_tried[environment] = self._last_tried.get(environment, -1) + 1
        return hosting[turn % len(hosting)]

    def all_away(self, environment: str, now_s: float, patience_s: float) -> bool:
        return all(
            host.state is not HostState.SERVING
            and now_s - host.since_s >= (patience_s if host.patience_s is None else host.patience_s)
            for host in self.hosting(environment)
        )

    def replaceable(self, host: RolloutHost, environment: str) -> bool:
        return any(other is not host and other.state is HostState.SERVING for other in self.hosting(environment))


def differing(hosts: Sequence[RolloutHost]) -> list[str]:
    """A sentence for each name of different environments at two services."""
    problems = []
    for number, host in enumerate(hosts):
        for other in hosts[:number]:
            for name in host.environments.keys() & other.environments.keys():
                ours, theirs = host.environments[name].num_tasks, other.environments[name].num_tasks
                if ours != theirs:
                    problems.append(
                        f"environment {name!r} has {_tasks(theirs)} at {other.address} and {_tasks(ours)} at"
                        f" {host.address}; host the same taskset with the same args at both, or give one another name"
                    )
    return problems


def _tasks(number: int | None) -> str:
    return "infinitely many tasks" if number is None else f"{number} tasks"
