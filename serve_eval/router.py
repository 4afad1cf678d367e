"""Which server a request goes to: the policy applied to the live load, without a line of HTTP.

Every backend may answer every request, because speculation changes no answer; so the choice is about speed only,
and a choice that cannot be had (a backend full or down) is replaced by the other kind, not by an error. The load
that the policy is asked about is the backend's own requests in flight, as in the measurement, where one server had
so many clients.

A route's live AL comes from what responses tell about themselves (vLLM's --per-request-spec-decode-metrics), or,
from backends that do not tell, from differences of their counters over stretches in which one route had the backend
to itself. Counters know no routes, so stretches of mixed traffic are evidence for none.

Requests that find every backend full wait in one queue, first come, first served; a slot that becomes free is
handed to the first of them before anybody else can take it.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from models.errors import Refused
from serve_eval.config import BackendConfig
from serve_eval.counters import CounterReset, Counters, difference, queue_wait_ms
from serve_eval.policy import Level, Policy


class QueueFull(Exception):
    """Every backend is full and so is the queue."""


class NoBackend(Exception):
    """No backend is up."""


class RecentAcceptance:
    """AL of one route over the last so many drafting steps."""

    def __init__(self, window_drafts: int) -> None:
        self.window_drafts = window_drafts
        self._samples: deque[tuple[int, int]] = deque()
        self.drafts = self.accepted = 0

    def add(self, drafts: int, accepted: int) -> None:
        """Take in drafting steps and the draft tokens accepted in them; what is older than the window goes."""
        if drafts <= 0:
            return
        self._samples.append((drafts, accepted))
        self.drafts += drafts
        self.accepted += accepted
        while self.drafts - self._samples[0][0] >= self.window_drafts:
            gone = self._samples.popleft()
            self.drafts -= gone[0]
            self.accepted -= gone[1]

    @property
    def al(self) -> float | None:
        """1 + accepted / drafting steps; None until a quarter of the window is there."""
        return 1 + self.accepted / self.drafts if self.drafts >= max(1, self.window_drafts / 4) else None


@dataclass(eq=False)
class Backend:
    """One server, and what is known of it now.

    Attributes:
        up: it answered the last health check, and no connection to it has failed since.
        in_flight: our requests that it works on, by route.
        queue_wait_ms: mean wait in its queue over the last poll in which requests left it; None when not told.
        silent: health checks in a row that it has not answered.
        tells: its responses tell their own acceptance, so its counters are not asked.
    """

    config: BackendConfig
    up: bool = False
    in_flight: Counter[str] = field(default_factory=Counter)
    queue_wait_ms: float | None = None
    silent: int = 0
    tells: bool = False
    _reading: Counters | None = None
    _seen: set[str] = field(default_factory=set)

    @property
    def load(self) -> int:
        """Our requests in flight."""
        return self.in_flight.total()

    @property
    def speculates(self) -> bool:
        """Whether it drafts."""
        return self.config.method != "none"


@dataclass(frozen=True)
class Choice:
    """A slot of a backend, taken for a request of a route.

    Attributes:
        reason: why it is there. "policy" and "probe" speculate; "off": it does not pay at this load; "share": not in
            the rollout's share; "acceptance": AL fell; "queue": the speculating server makes requests wait; "spill":
            no backend of the kind that was wanted had room.
    """

    backend: Backend
    route: str
    reason: str


@dataclass(eq=False)
class _Waiter:
    route: str
    exclude: Backend | None
    future: asyncio.Future[Choice]


class Router:
    """The policy at work on a set of backends; everything in it happens on one event loop."""

    def __init__(self, policy: Policy, backends: Sequence[BackendConfig], max_queue: int) -> None:
        """Raises Refused when there is no backend, or the policy wants a method that none has."""
        if not backends:
            raise Refused(
                "gateway.backends is empty; name the servers: '[{url: ...}, {url: ..., method: eagle3, k: 3}]'"
            )
        wanted = {(level.method, level.k) for route in policy.routes.values() for level in route.levels}
        lacking = wanted - {(each.method, each.k) for each in backends} - {("none", 0)}
        if lacking:
            names = ", ".join(f"method={method} k={k}" for method, k in sorted(lacking))
            raise Refused(f"the policy uses {names}, but no server in gateway.backends has it")
        self.policy = policy
        self.backends = [Backend(each) for each in backends]
        self.max_queue = max_queue
        self.acceptance = {route: RecentAcceptance(policy.window_drafts) for route in policy.routes}
        self.waiting: deque[_Waiter] = deque()
        self._turns: Counter[str] = Counter()
        self._held_back: Counter[str] = Counter()

    # Choosing -----------------------------------------------------------------------------------------------------

    def _paying(self, route: str, open_to: Sequence[Backend]) -> tuple[Backend, Level] | None:
        """The least loaded backend whose method the policy names for the load that it would then have."""
        found = None
        for backend in open_to:
            level = self.policy.routes[route].level(backend.load + 1)
            if backend.speculates and level and (level.method, level.k) == (backend.config.method, backend.config.k):
                if found is None or backend.load < found[0].load:
                    found = backend, level
        return found

    def _speculation(self, route: str, open_to: Sequence[Backend]) -> tuple[Backend | None, str]:
        """The backend to speculate on, if the request is to, and the reason why or why not."""
        share = self.policy.routes[route].share
        self._turns[route] += 1
        turn = self._turns[route]
        if math.floor(turn * share) == math.floor((turn - 1) * share):
            return None, "share"
        paying = self._paying(route, open_to)
        if paying is None:
            return None, "spill" if self._paying(route, self.backends) else "off"
        backend, level = paying
        limit, wait = self.policy.max_queue_wait_ms, backend.queue_wait_ms
        if limit is not None and wait is not None and wait > limit:
            return None, "queue"
        al = self.acceptance[route].al
        if al is not None and level.min_al is not None and al < level.min_al:
            self._held_back[route] += 1
            return (backend, "probe") if self._held_back[route] % self.policy.probe_every == 0 else (None, "acceptance")
        return backend, "policy"

    def _choose(self, route: str, exclude: Backend | None) -> Choice | None:
        """Take a slot; None when no backend that is up has one."""
        open_to = [
            each for each in self.backends if each.up and each is not exclude and each.load < each.config.max_in_flight
        ]
        if not open_to:
            return None
        backend, reason = self._speculation(route, open_to)
        if backend is None:
            plain = [each for each in open_to if not each.speculates]
            backend = min(plain or open_to, key=lambda each: each.load)
            reason = reason if plain else "spill"
        backend.in_flight[route] += 1
        backend._seen.add(route)
        return Choice(backend, route, reason)

    # Slots and the queue --------------------------------------------------------------------------------------------

    async def enter(self, route: str, exclude: Backend | None = None) -> Choice:
        """A slot for a request, at once or after waiting; give it back with `leave`.

        Args:
            route: a name that the policy knows.
            exclude: a backend that has just failed this request, which is then first in the queue.

        Raises:
            QueueFull: there is no slot, and no room to wait.
            NoBackend: none is up (but for the excluded one).
        """
        if not any(each.up and each is not exclude for each in self.backends):
            raise NoBackend
        # Slots are handed on at once when they are given back, so one that is free has nobody waiting for it.
        choice = self._choose(route, exclude)
        if choice is not None:
            return choice
        if len(self.waiting) >= self.max_queue and exclude is None:
            raise QueueFull
        waiter = _Waiter(route, exclude, asyncio.get_running_loop().create_future())
        if exclude is None:
            self.waiting.append(waiter)
        else:
            self.waiting.appendleft(waiter)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter in self.waiting:
                self.waiting.remove(waiter)
            elif not waiter.future.cancelled() and waiter.future.exception() is None:
                self.leave(waiter.future.result())  # the slot came in the moment in which the client went
            raise

    def leave(self, choice: Choice) -> None:
        """Give a slot back."""
        flying = choice.backend.in_flight
        flying[choice.route] -= 1
        if not flying[choice.route]:
            del flying[choice.route]
        self.serve_waiting()

    def serve_waiting(self) -> None:
        """Hand free slots to those who wait longest; with no backend up there is nothing to wait for."""
        for waiter in list(self.waiting):
            if waiter.future.done():  # cancelled; its own task removes it
                continue
            up = any(each.up and each is not waiter.exclude for each in self.backends)
            choice = self._choose(waiter.route, waiter.exclude) if up else None
            if up and choice is None:
                if waiter.exclude is None:
                    break
                continue
            self.waiting.remove(waiter)
            if choice is None:
                waiter.future.set_exception(NoBackend())
            else:
                waiter.future.set_result(choice)

    # What is heard of backends ---------------------------------------------------------------------------------------

    def failed(self, backend: Backend) -> None:
        """A connection to `backend` could not be made: it is down until a health check says otherwise."""
        backend.up = False
        self.serve_waiting()

    def told(self, choice: Choice, drafts: int, accepted: int) -> None:
        """A response told its own drafting steps and accepted drafts."""
        choice.backend.tells = True
        self.acceptance[choice.route].add(drafts, accepted)

    def polled(self, backend: Backend, up: bool, reading: Counters | None) -> None:
        """Take in the result of a poll: health, and the counters if they could be read."""
        backend.up = up
        before, seen = backend._reading, backend._seen
        backend._reading, backend._seen = reading, set(backend.in_flight)
        if reading is None:
            backend.queue_wait_ms = None
        elif before is not None:
            wait = queue_wait_ms(before, reading)
            if wait is not None or not reading.waiting:
                backend.queue_wait_ms = wait or 0.0
            if len(seen) == 1 and not backend.tells:
                try:
                    window = difference(before, reading)
                except CounterReset:
                    window = None
                if window is not None:
                    self.acceptance[next(iter(seen))].add(window.drafts, window.accepted)
        self.serve_waiting()
