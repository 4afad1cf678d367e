"""What a server's own counters say about acceptance over a window.

Measured AL = 1 + accepted drafts / drafting steps, from differences of the counters before and after the
window: the counters are cumulative, and everything before the window (warm-up, another user) belongs to
none of ours. The 1 is the bonus token that every target forward yields. A server without such counters, or
one that drafted nothing, has no AL: it is None ("n/a"), never 1.0, because 1.0 is a statement about a head.

The price: counters are global to a server, so per-route figures need a window per route.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from models.errors import Refused
from models.servers import Server, get

IDLE_AL = 1.01
"""At or below this a head accepts practically nothing: a wrong method or a wrong export, not a weak head."""

SETTLE_S = 5.0
"""How long counters may take to come to rest."""

_DRAFTS = "vllm:spec_decode_num_drafts"
_DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_QUEUE = "vllm:request_queue_time_seconds"
_SGLANG = {
    "sglang:num_running_reqs": _RUNNING,
    "sglang:num_queue_reqs": _WAITING,
    "sglang:queue_time_seconds_sum": f"{_QUEUE}_sum",
    "sglang:queue_time_seconds_count": f"{_QUEUE}_count",
}
"""What means the same in SGLang's metrics."""
_GAUGE = "sglang:spec_accept_length"
_LINE = re.compile(
    r"(?:# \w+ )?(?:vllm:(?:spec_decode_|num_requests_|request_queue_time_seconds_(?:sum|count))"
    r"|sglang:(?:spec_accept_length|num_running_reqs|num_queue_reqs|queue_time_seconds_(?:sum|count)))"
)


class CounterReset(Refused):
    """A counter went backwards (or was created anew) in the window: the server restarted meanwhile."""


@dataclass(frozen=True)
class Counters:
    """One reading of /metrics, summed over the engines of the server.

    Attributes:
        drafts: drafting steps so far; None when the server has no such counter.
        draft_tokens, accepted: tokens drafted and accepted so far.
        per_position: accepted tokens by draft position, first position first.
        created: when the server created the counters (seconds since the epoch), if it tells.
        busy: requests running or waiting in the engine at this moment.
        waiting: those of them that wait.
        queue_s, queued: seconds that requests have waited so far, and how many did.
        gauge: SGLang's own AL, of whatever it last averaged over.
    """

    drafts: int | None
    draft_tokens: int
    accepted: int
    per_position: tuple[int, ...]
    created: float | None
    busy: int
    waiting: int = 0
    queue_s: float = 0.0
    queued: int = 0
    gauge: float | None = None


@dataclass(frozen=True)
class Acceptance:
    """Counts over one window, or over several when added."""

    drafts: int
    draft_tokens: int
    accepted: int
    per_position: tuple[int, ...]

    def __add__(self, other: Acceptance) -> Acceptance:
        width = max(len(self.per_position), len(other.per_position))
        mine, theirs = (side.per_position + (0,) * (width - len(side.per_position)) for side in (self, other))
        return Acceptance(
            self.drafts + other.drafts,
            self.draft_tokens + other.draft_tokens,
            self.accepted + other.accepted,
            tuple(a + b for a, b in zip(mine, theirs, strict=True)),
        )

    @property
    def al(self) -> float | None:
        """1 + accepted / drafting steps; None when nothing was drafted."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def positions(self) -> list[float] | None:
        """Share of drafting steps in which the i-th drafted token was accepted; None when nothing was drafted."""
        return [count / self.drafts for count in self.per_position] if self.drafts else None


def counter_lines(text: str) -> str:
    """Of an engine's /metrics the lines that `parse_counters` reads, for those who cannot wait for all of them."""
    return "".join(line for line in text.splitlines(True) if _LINE.match(line))


def parse_counters(text: str) -> Counters:
    """Read the Prometheus exposition `text` of a vLLM or SGLang server.

    Raises:
        Refused: the text is not in Prometheus' format.
    """
    drafts: int | None = None
    accepted: int | None = None
    draft_tokens = busy = waiting = queued = 0
    queue_s, gauge = 0.0, None
    positions: dict[int, int] = {}
    created: list[float] = []
    try:
        for family in text_string_to_metric_families(text):
            for name, labels, value, *_ in family.samples:
                name = _SGLANG.get(name, name)
                if name == f"{_DRAFTS}_total":
                    drafts = (drafts or 0) + int(value)
                elif name == f"{_DRAFT_TOKENS}_total":
                    draft_tokens += int(value)
                elif name == f"{_ACCEPTED}_total":
                    accepted = (accepted or 0) + int(value)
                elif name == f"{_PER_POSITION}_total":
                    position = int(labels["position"])
                    positions[position] = positions.get(position, 0) + int(value)
                elif name == f"{_DRAFTS}_created":
                    created.append(value)
                elif name == _RUNNING:
                    busy += int(value)
                elif name == _WAITING:
                    waiting += int(value)
                elif name == f"{_QUEUE}_sum":
                    queue_s += value
                elif name == f"{_QUEUE}_count":
                    queued += int(value)
                elif name == _GAUGE:
                    gauge = value
    except (ValueError, KeyError, OverflowError) as error:
        raise Refused(f"the server's /metrics is not in Prometheus' text format ({error})") from None
    per_position = tuple(positions.get(position, 0) for position in range(max(positions, default=-1) + 1))
    return Counters(
        drafts if accepted is not None else None,  # of counters that were renamed in part, nothing is known
        draft_tokens,
        accepted or 0,
        per_position,
        max(created, default=None),
        busy + waiting,
        waiting,
        queue_s,
        queued,
        gauge,
    )


def queue_wait_ms(before: Counters, after: Counters) -> float | None:
    """Mean wait in the engine's queue of the requests that left it between two readings; None when none did.

    A server that restarted in between has counted anew, which is None as well.
    """
    left = after.queued - before.queued
    return 1e3 * (after.queue_s - before.queue_s) / left if left > 0 and after.queue_s >= before.queue_s else None


def difference(before: Counters, after: Counters) -> Acceptance | None:
    """What happened between two readings; None when the server has no speculation counters.

    Raises:
        CounterReset: the counters do not continue the earlier reading.
    """
    if before.drafts is None and after.drafts is None:
        return None
    if before.drafts is None or after.drafts is None:
        raise CounterReset("the server's speculation counters appeared or vanished in the window: it restarted")
    if before.created != after.created:
        raise CounterReset("the server's counters were created anew in the window: it restarted")
    width = max(len(before.per_position), len(after.per_position))
    earlier, later = (side.per_position + (0,) * (width - len(side.per_position)) for side in (before, after))
    window = Acceptance(
        after.drafts - before.drafts,
        after.draft_tokens - before.draft_tokens,
        after.accepted - before.accepted,
        tuple(b - a for a, b in zip(earlier, later, strict=True)),
    )
    if min(window.drafts, window.draft_tokens, window.accepted, *window.per_position) < 0:
        raise CounterReset(
            f"a counter of the server went backwards in the window (drafts {before.drafts} -> {after.drafts}, "
            f"accepted {before.accepted} -> {after.accepted}): it restarted"
        )
    return window


def judge(method: str, acceptance: Acceptance | None) -> str | None:
    """A warning when speculation was asked for and is silently inactive, or the other way round; or None."""
    if method == "none":
        if acceptance is None or not acceptance.drafts:
            return None
        return f"none: the server drafted in {acceptance.drafts} steps of the window: it is none without speculation"
    if acceptance is None:
        return f"{method}: the server has no speculation counters, AL is n/a; did it take the method?"
    if acceptance.al is None:
        return f"{method}: the server drafted nothing in the window, AL is n/a; did it take the method?"
    if acceptance.al <= IDLE_AL:
        return (
            f"{method}: AL is {acceptance.al:.2f}, practically nothing is accepted; "
            "check the method, the head's aux layers and its draft vocabulary map"
        )
    return None


def read_counters(server: Server) -> Counters:
    """A server's counters once it is idle and they have come to rest, or after SETTLE_S as they then are.

    An answer reaches the client before the engine has booked its last step, so one reading right
    after a window could miss it: two equal readings in a row, with nothing running, are wanted.

    Raises:
        Refused: /metrics cannot be read.
    """
    deadline = time.monotonic() + SETTLE_S
    earlier = None
    while True:
        try:
            response = get(f"{server.url}/metrics", timeout_s=10)
            response.raise_for_status()
        except httpx.HTTPError as error:
            hint = "; SGLang has it with --enable-metrics" if server.kind == "sglang" else ""
            raise Refused(f"{server.url}/metrics cannot be read ({error!r}){hint}; {server.last_words()}") from None
        reading = parse_counters(response.text)
        if (reading == earlier and not reading.busy) or time.monotonic() > deadline:
            return reading
        earlier = reading
        time.sleep(0.05)
