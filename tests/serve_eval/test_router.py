"""The router applies the policy to the live load, falls back and recovers, and hands out slots in order."""

from __future__ import annotations

import asyncio
from collections import Counter as Count
from dataclasses import replace

import pytest

from models.errors import Refused
from serve_eval.config import BackendConfig
from serve_eval.counters import Counters
from serve_eval.policy import Level, Policy, RoutePolicy
from serve_eval.router import Backend, Choice, NoBackend, QueueFull, RecentAcceptance, Router

PLAIN = BackendConfig("http://plain")
EAGLE = BackendConfig("http://eagle", "eagle3", 3)


def levels(*ends: int, method: str = "eagle3") -> list[Level]:
    return [Level(up_to=end, method=method, k=3, min_al=1.5) for end in ends]


def policy(**routes: RoutePolicy) -> Policy:
    """Chat speculates up to 4 in flight, everything else never."""
    chat = RoutePolicy(levels=[*levels(4), Level(up_to=8)])
    return Policy(
        max_queue_wait_ms=100,
        window_drafts=100,
        probe_every=5,
        routes={"all": RoutePolicy(levels=[Level(up_to=8)]), "chat": chat} | routes,
    )


def router(*backends: BackendConfig, max_queue: int = 10, **routes: RoutePolicy) -> Router:
    made = Router(policy(**routes), backends or (PLAIN, EAGLE), max_queue)
    for backend in made.backends:
        backend.up = True
    return made


def enter(made: Router, route: str = "chat") -> Choice:
    return asyncio.run(made.enter(route))


def went(choice: Choice) -> tuple[str, str]:
    return choice.backend.config.method, choice.reason


def test_a_route_speculates_up_to_its_load_and_not_beyond() -> None:
    made = router()
    assert [went(enter(made)) for _ in range(6)] == [("eagle3", "policy")] * 4 + [("none", "off")] * 2
    assert went(enter(made, "all")) == ("none", "off")


def test_a_slot_that_is_given_back_is_load_no_more() -> None:
    made = router()
    taken = [enter(made) for _ in range(5)]
    made.leave(taken[0])
    assert went(enter(made)) == ("eagle3", "policy")
    assert [backend.load for backend in made.backends] == [1, 4]


def test_of_several_backends_the_least_loaded_is_taken() -> None:
    made = router(PLAIN, EAGLE, BackendConfig("http://eagle-2", "eagle3", 3))
    assert Count(enter(made).backend.config.url for _ in range(8)) == {"http://eagle": 4, "http://eagle-2": 4}


def test_the_rollouts_share_is_kept_exactly() -> None:
    made = router(chat=RoutePolicy(share=0.25, levels=levels(100)))
    told = Count(went(enter(made)) for _ in range(40))
    assert told == {("eagle3", "policy"): 10, ("none", "share"): 30}
    none = router(chat=RoutePolicy(share=0.0, levels=levels(100)))
    assert {went(enter(none)) for _ in range(20)} == {("none", "share")}


def test_acceptance_below_the_threshold_falls_back_but_for_probes_and_recovers_with_it() -> None:
    made = router(chat=RoutePolicy(levels=levels(1000)))
    choice = enter(made)
    made.told(choice, 100, 40)  # AL 1.4 < 1.5
    told = Count(went(enter(made)) for _ in range(20))
    assert told == {("none", "acceptance"): 16, ("eagle3", "probe"): 4}
    made.told(choice, 100, 60)  # the window holds nothing else now: AL 1.6
    assert went(enter(made)) == ("eagle3", "policy")


def test_one_routes_acceptance_is_not_anothers() -> None:
    made = router(code=RoutePolicy(levels=levels(1000)))
    made.told(enter(made, "chat"), 100, 10)
    assert went(enter(made, "code")) == ("eagle3", "policy")
    assert went(enter(made, "chat")) == ("none", "acceptance")


def test_the_window_slides_over_drafting_steps_and_is_silent_without_enough_of_them() -> None:
    window = RecentAcceptance(100)
    window.add(24, 48)
    assert window.al is None
    window.add(1, 2)
    assert window.al == 3.0
    for _ in range(10):
        window.add(10, 5)
    assert window.al == 1.5
    assert window.drafts == 100


def reading(drafts: int, accepted: int, queue_s: float = 0.0, queued: int = 0, waiting: int = 0) -> Counters:
    return Counters(drafts, 3 * drafts, accepted, (accepted,), 1.0, 0, waiting, queue_s, queued)


def test_counters_are_evidence_for_a_route_that_had_the_backend_to_itself() -> None:
    made = router(code=RoutePolicy(levels=levels(1000)))
    eagle = made.backends[1]
    made.polled(eagle, True, reading(0, 0))
    made.leave(enter(made, "chat"))
    made.polled(eagle, True, reading(50, 40))
    assert made.acceptance["chat"].al == 1.8
    made.leave(enter(made, "chat"))
    enter(made, "code")
    made.polled(eagle, True, reading(100, 40))  # mixed: nobody's
    made.polled(eagle, True, reading(140, 120))  # code's request is still there, alone
    assert made.acceptance["chat"].al == 1.8
    assert made.acceptance["code"].al == 3.0


def test_counters_are_not_asked_where_responses_tell_and_a_reset_is_no_evidence() -> None:
    made = router()
    choice = enter(made)
    made.polled(choice.backend, True, reading(100, 200))
    made.polled(choice.backend, True, reading(50, 100))
    assert made.acceptance["chat"].drafts == 0
    made.told(choice, 30, 60)
    made.polled(choice.backend, True, reading(100, 100))
    assert made.acceptance["chat"].drafts == 30


def test_a_long_wait_in_the_engines_queue_keeps_requests_off_it() -> None:
    made = router()
    eagle = made.backends[1]
    made.polled(eagle, True, reading(0, 0))
    made.polled(eagle, True, reading(0, 0, queue_s=1.0, queued=4, waiting=3))
    assert eagle.queue_wait_ms == 250
    assert went(enter(made)) == ("none", "queue")
    made.polled(eagle, True, reading(0, 0, queue_s=1.0, queued=4, waiting=3))
    assert eagle.queue_wait_ms == 250, "they still wait"
    made.polled(eagle, True, reading(0, 0, queue_s=1.0, queued=4))
    assert went(enter(made)) == ("eagle3", "policy")


def test_a_backend_that_is_down_or_full_is_replaced_by_the_other_kind() -> None:
    made = router(replace(PLAIN, max_in_flight=2), EAGLE)
    made.failed(made.backends[1])
    assert [went(enter(made)) for _ in range(2)] == [("none", "spill")] * 2
    made.polled(made.backends[1], True, None)
    made.backends[0].up = False
    assert went(enter(made, "all")) == ("eagle3", "spill")


def test_with_no_backend_up_nobody_waits() -> None:
    made = router()
    for backend in made.backends:
        made.failed(backend)
    with pytest.raises(NoBackend):
        enter(made)


SMALL = [replace(PLAIN, max_in_flight=1), replace(EAGLE, max_in_flight=1)]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_who_waits_is_served_in_order_and_the_queue_is_bounded() -> None:
    async def story() -> None:
        made = router(*SMALL, max_queue=2)
        taken = [await made.enter("chat"), await made.enter("chat")]
        first, second = (asyncio.create_task(made.enter("chat")) for _ in range(2))
        await settle()
        with pytest.raises(QueueFull):
            await made.enter("chat")
        made.leave(taken[0])
        newcomer = asyncio.create_task(made.enter("chat"))
        await settle()
        assert first.done() and not second.done() and not newcomer.done()
        made.leave(taken[1])
        await settle()
        assert second.done() and not newcomer.done()
        made.leave(await first)
        await newcomer

    asyncio.run(story())


def test_a_client_that_leaves_the_queue_costs_no_slot() -> None:
    async def story() -> None:
        made = router(*SMALL)
        taken = [await made.enter("chat"), await made.enter("chat")]
        gone, lucky = (asyncio.create_task(made.enter("chat")) for _ in range(2))
        await settle()
        made.leave(taken[0])  # gone has a slot now, but has not been told
        gone.cancel()
        await settle()
        assert lucky.done(), "the slot went on to the next"
        waiting = asyncio.create_task(made.enter("chat"))
        await settle()
        waiting.cancel()
        await settle()
        assert not made.waiting
        made.leave(await lucky)
        made.leave(taken[1])
        assert [backend.load for backend in made.backends] == [0, 0]

    asyncio.run(story())


def test_a_request_that_is_sent_again_goes_elsewhere_and_first() -> None:
    async def story() -> None:
        made = router(*SMALL)
        taken = [await made.enter("chat"), await made.enter("chat")]
        patient = asyncio.create_task(made.enter("chat"))
        await settle()
        failing = taken[0].backend
        made.leave(taken[0])  # goes to the patient one
        again = asyncio.create_task(made.enter("chat", exclude=failing))
        await settle()
        assert patient.done() and not again.done()
        other = asyncio.create_task(made.enter("chat"))
        await settle()
        made.leave(taken[1])
        assert (await again).backend is not failing
        made.leave(await patient)
        assert (await other).backend is failing

    asyncio.run(story())


def test_those_who_wait_are_told_when_the_last_backend_goes_down() -> None:
    async def story() -> None:
        made = router(*SMALL)
        for _ in range(2):
            await made.enter("chat")
        waiting = asyncio.create_task(made.enter("chat"))
        await settle()
        for backend in made.backends:
            made.polled(backend, False, None)
        with pytest.raises(NoBackend):
            await waiting

    asyncio.run(story())


def test_a_policy_that_no_backend_can_follow_is_refused() -> None:
    with pytest.raises(Refused, match="method=eagle3 k=3"):
        Router(policy(), [PLAIN, replace(EAGLE, k=4)], 1)
    with pytest.raises(Refused, match="gateway.backends is empty"):
        Router(policy(), [], 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": "ftp://host"},
        {"url": "http://user:key@host"},
        {"method": "eagle3"},
        {"k": 3},
        {"max_in_flight": 0},
    ],
)
def test_b43_a_backend_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="gateway.backends") as caught:
        BackendConfig(**({"url": "http://host"} | wrong))  # type: ignore[arg-type]
    assert "key" not in str(caught.value)


def test_a_backend_starts_down_until_it_has_been_seen() -> None:
    assert not Backend(PLAIN).up
