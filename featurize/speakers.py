"""Who lets the target continue token ids: servers that were started elsewhere, or this process."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from featurize.config import GenerateConfig
from featurize.spans import Renderer
from models.errors import Refused
from models.target import Target

TRIES = 4
"""Times that a request is sent before it has failed."""


PASSING = (408, 409, 425, 429)
"""Statuses of a refusal that the same request need not meet a second time."""


class Unfilled(Exception):
    """A conversation that cannot be made; the message is the reason."""


class Unanswered(Unfilled):
    """Nobody answers: the fault may be the servers'."""


@dataclass(frozen=True)
class Completion:
    """What the target said: text, its ids where they are known, and why it ended ("stop" or "length")."""

    text: str
    ids: list[int] | None
    finish_reason: str


class Speaker(Protocol):
    """Whatever lets the target continue token ids."""

    async def complete(
        self, prompt: list[int], *, max_tokens: int, temperature: float, top_p: float, seed: int
    ) -> Completion:
        """Raises Unfilled when it cannot."""
        ...


def reason_of(response: httpx.Response) -> str:
    """Why a server refuses, in its own words, as vLLM, SGLang or FastAPI puts them: one line."""
    try:
        body = response.json()
        body = body.get("error", body)
        text = str(body.get("message") or body["detail"])
    except (ValueError, AttributeError, KeyError, TypeError):
        text = response.text
    return " ".join(text.split())[:200]


class Servers:
    """OpenAI-compatible servers of the same target; a request goes to the least busy one that is not resting."""

    def __init__(self, config: GenerateConfig, client: httpx.AsyncClient) -> None:
        self.urls, self.model, self.client = config.urls, config.model, client
        self.in_flight: Counter[str] = Counter()
        self.rests_until = dict.fromkeys(config.urls, 0.0)

    async def complete(self, prompt: list[int], **sampling: Any) -> Completion:
        """Ask; a failing server rests a little and the request goes to another one, or there again after that rest.

        Raises:
            Unfilled: a server refuses the request itself. Unanswered: it has failed TRIES times.
            Refused: a server refuses all requests: it knows no such model, or wants a key.
        """
        body = {"model": self.model, "prompt": prompt, "return_token_ids": True, **sampling}
        told: Exception | None = None
        for attempt in range(TRIES):
            now = time.monotonic()
            rests = {url: max(until - now, 0) for url, until in self.rests_until.items()}
            url = min(self.urls, key=lambda url: (rests[url], self.in_flight[url]))
            if attempt:  # a request that has not failed yet waits for nobody
                await asyncio.sleep(rests[url])
            self.in_flight[url] += 1
            try:
                response = await self.client.post(f"{url}/completions", json=body)
                status = response.status_code
                if status in (400, 413, 422):  # this request, not this server
                    raise Unfilled(f"{url} refuses it: {reason_of(response)}")
                if 400 <= status < 500 and status not in PASSING:
                    name = f"generate.model={self.model} must be the name under which it serves the target, and "
                    mend = f"{name if status == 404 else ''}generate.urls names the servers, each up to /v1"
                    raise Refused(f"{url}/completions answers {status}: {reason_of(response)}; {mend}")
                response.raise_for_status()
                choice = response.json()["choices"][0]
                return Completion(choice["text"], choice.get("token_ids"), choice["finish_reason"])
            except (httpx.HTTPError, KeyError, IndexError, TypeError, ValueError) as error:
                told = error
                self.rests_until[url] = time.monotonic() + 2**attempt
            finally:
                self.in_flight[url] -= 1
        reason = f"{type(told).__name__}: {told}".splitlines()[0]
        raise Unanswered(
            f"{url}/completions keeps failing: {reason}; "
            "generate.urls names the servers, and generate.urls=[] runs the target in this process"
        )


class InProcess:
    """The target in this process, one request after another."""

    def __init__(self, target: Target, renderer: Renderer) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = AutoModelForCausalLM.from_pretrained(
            target.path, dtype=target.dtype, trust_remote_code=target.trust_remote_code
        )
        self.model, self.renderer, self.lock = model.to(self.device).eval(), renderer, asyncio.Lock()

    async def complete(self, prompt: list[int], **sampling: Any) -> Completion:
        """Continue `prompt` in a thread, when it is its turn."""
        async with self.lock:
            return await asyncio.to_thread(self._complete, prompt, **sampling)

    def _complete(
        self, prompt: list[int], *, max_tokens: int, temperature: float, top_p: float, seed: int
    ) -> Completion:
        import torch

        how: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            how = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
        ids = torch.tensor([prompt], device=self.device)
        torch.manual_seed(seed)
        with torch.no_grad():
            whole = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                eos_token_id=sorted(self.renderer.end_of_turn),
                pad_token_id=self.renderer.closing,
                **how,
            )
        said = whole[0, len(prompt) :].tolist()
        finish_reason = "stop" if said[-1] in self.renderer.end_of_turn else "length"
        return Completion(self.renderer.tokenizer.decode(said, skip_special_tokens=True), said, finish_reason)
