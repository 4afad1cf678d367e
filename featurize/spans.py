"""Token ids and spans of a conversation, from its structure as the target's own chat template renders it.

Nothing is searched in text: contents may hold the very strings that open and close turns. For assistant
message i the prompt is the rendering of the messages before it with the generation prompt, exactly what
serving feeds the target; the rendering up to and including the message must begin with it, token for
token, and the whole must begin with that. The span starts where the prompt ends and stops just after the
end-of-turn token that closes the message, so it holds what the target itself produced and not the
newline that many templates put behind it. A template that rewrites history (thinking stripped from
earlier turns, a system prompt moved to the last user's message) or a tokenizer that merges across the
boundary breaks one of the two conditions: that conversation is refused and counted, since its ids are not
what serving would see. So is one whose template says more or less than the target did (an empty think
block put in, thoughts or tool calls left out).

Where one answer alone is supervised (`data.turns` = split or last), nothing comes after it that could be
rewritten. If the template then renders a plain answer otherwise than its prompt begins it, the answer is what
serving would have made of it all the same: the prompt, the raw text, the end-of-turn token. Ids that came
with an answer from a server are taken as they are.

What follows the last span supervises nothing and is cut off: nobody attends to it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

from jinja2.exceptions import TemplateError

from featurize.conversations import Conversation, Unusable
from models.errors import Refused

THINK_START, THINK_END = "<think>", "</think>"
"""As reasoning models write their thoughts; looked for only where a template and an answer disagree."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An assistant message with all that comes before it: `ids`, of which start .. end-1 is what the target said."""

    ids: list[int]
    start: int
    end: int


@dataclass(frozen=True)
class Rendered:
    """A conversation as the target sees it.

    Attributes:
        ids: token ids.
        spans: half-open ranges of `ids` that the target itself produced, ascending, disjoint, each of
            at least two tokens (a shorter one supervises no row).
        cut: tokens that the target produced too, but beyond the limit.
    """

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    cut: int


class Renderer:
    """The target's tokenizer and chat template, with exactly one BOS and known end-of-turn ids.

    Args:
        tokenizer: of the target, with its chat template.
        eos_ids: the target's own end-of-sequence ids (generation config, config).

    Raises:
        Refused: no chat template, a template that cannot render a plain exchange, that renders BOS
            twice, or that closes an answer with no end-of-turn token.
    """

    def __init__(self, tokenizer: Any, eos_ids: Collection[int] = ()) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise Refused("the target's tokenizer has no chat template; give target.path one that has")
        self.tokenizer = tokenizer
        bos = tokenizer.bos_token_id
        adds = bos is not None and tokenizer("a", add_special_tokens=True)["input_ids"][:1] == [bos]
        self.bos_id = bos
        self._missing_bos = [bos] if adds else []
        own = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
        self.closing, self.end_of_turn = self._closing(frozenset(eos_ids) | own)

    def _closing(self, eos_ids: frozenset[int]) -> tuple[int, frozenset[int]]:
        """The token by which the template closes an answer, and it with `eos_ids`.

        It is in what two renderings have in common behind answers that differ.
        """
        question = {"role": "user", "content": "a"}
        try:
            one, other = (self.ids(self.text([question, {"role": "assistant", "content": text}])) for text in "bd")
        except Unusable as error:
            raise Refused(f"the target's chat template cannot render a plain question and answer: {error}") from None
        alike = list(takewhile(lambda pair: pair[0] == pair[1], zip(reversed(one), reversed(other), strict=False)))
        tail = [token for token, _ in reversed(alike)]
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.get_added_vocab().values())
        for closing in (eos_ids, special):
            for token in tail:
                if token in closing:
                    return token, eos_ids | {token}
        raise Refused(
            "the target's chat template closes an answer with no end-of-turn token, so its end cannot be learnt"
        )

    def text(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        generation: bool = False,
        tools: list[Any] | None = None,
        arguments: dict[str, Any] | None = None,
    ) -> str:
        """The template's text of `messages`, with the generation prompt if asked.

        Raises:
            Unusable: the template itself refuses the messages.
        """
        if not messages and not generation:
            return ""
        shown = [{key: value for key, value in message.items() if key != "token_ids"} for message in messages]
        try:
            return self.tokenizer.apply_chat_template(
                shown, tools=tools, tokenize=False, add_generation_prompt=generation, **(arguments or {})
            )
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            reason = " ".join(str(error).split())[:120]
            raise Unusable(f"the chat template refuses it: {reason}") from None

    def ids(self, text: str) -> list[int]:
        """Token ids of rendered text; BOS is put first only where the tokenizer wants one and the text has none.

        Raises:
            Unusable: the text begins with two BOS.
        """
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if self._missing_bos and ids[:1] != self._missing_bos:
            ids = self._missing_bos + ids
        if self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]:
            raise Unusable("rendered with two BOS tokens")
        return ids

    def render(self, conversation: Conversation, max_tokens: int, only: int | None = None) -> Rendered:
        """Ids and spans of a conversation, cut at `max_tokens`.

        Args:
            conversation: what is rendered.
            max_tokens: ids beyond are cut off.
            only: index of the one assistant message to supervise; what comes after it is left out.

        Raises:
            Unusable: the template refuses it, a boundary is unstable, or no row would be supervised.
        """
        answers = conversation.answers if only is None else [only]
        turns = [self._turn(conversation, at, alone=only is not None, last=at == answers[-1]) for at in answers]
        whole = turns[-1].ids
        for turn, later in pairwise(turns):
            if later.ids[: len(turn.ids)] != turn.ids:
                raise Unusable("unstable boundary: later turns rewrite an answer")
        everything, clipped = (
            tuple((turn.start, min(turn.end, limit)) for turn in turns if min(turn.end, limit) - turn.start >= 2)
            for limit in (len(whole), max_tokens)
        )
        if not everything:
            raise Unusable("no supervised row")
        if not clipped:
            raise Unusable(f"no supervised row within data.max_tokens={max_tokens}")
        cut = sum(end - start for start, end in everything) - sum(end - start for start, end in clipped)
        return Rendered(tuple(whole[: clipped[-1][1]]), clipped, cut)

    def _turn(self, conversation: Conversation, index: int, *, alone: bool, last: bool) -> Turn:
        """One assistant message with everything before it.

        Raises:
            Unusable: its ids are not its prompt's, then those of what the target said.
        """
        message, before = conversation.messages[index], conversation.messages[:index]

        def text(messages: list[dict[str, Any]], generation: bool = False) -> str:
            return self.text(
                messages, generation=generation, tools=conversation.tools, arguments=conversation.template_arguments
            )

        prompt_text = text(before, generation=True)
        prompt = self.ids(prompt_text)
        if max(message.get("token_ids", ()), default=0) >= len(self.tokenizer):
            raise Unusable("token_ids of an answer go beyond the target's vocabulary")
        if last and "token_ids" in message:
            return Turn(prompt + message["token_ids"], len(prompt), len(prompt) + len(message["token_ids"]))
        upto_text = text([*before, message])
        upto = self.ids(upto_text)
        for key in ("tool_calls", "reasoning_content"):
            if key in message and text([*before, {k: v for k, v in message.items() if k != key}]) == upto_text:
                raise Unusable(f"the chat template leaves out {key} of an answer")
        plain = "tool_calls" not in message and "reasoning_content" not in message
        problem = None
        if upto[: len(prompt)] != prompt:
            problem = "unstable boundary: the answer does not begin where its prompt ends"
        elif plain and not self._says(upto_text, prompt_text, message["content"]):
            problem = (
                "the template adds text to an answer that the target did not say (an empty think block? "
                "data.chat_template_kwargs may switch it off, data.turns=split takes the answer without it)"
            )
        elif "token_ids" in message and upto[len(prompt) :][: len(message["token_ids"])] != message["token_ids"]:
            problem = "unstable boundary: the template's ids of an answer are not those that the server gave"
        end = max((at for at in range(len(prompt), len(upto)) if upto[at] in self.end_of_turn), default=None)
        if problem is None and end is None:
            problem = "an answer without an end-of-turn token"
        if problem is None:
            assert end is not None
            return Turn(upto[: end + 1], len(prompt), end if index == conversation.cut else end + 1)
        if not alone or not plain:
            raise Unusable(problem)
        history = text(before) if before else ""
        opening = prompt_text[len(history) :] if prompt_text.startswith(history) else ""
        raw = self._raw(message["content"], opening, cut=index == conversation.cut)
        ids = self.tokenizer(raw, add_special_tokens=False)["input_ids"]
        ids += [] if index == conversation.cut else [self.closing]
        return Turn(prompt + ids, len(prompt), len(prompt) + len(ids))

    def _says(self, upto_text: str, prompt_text: str, content: str) -> bool:
        """Whether what the template puts behind the prompt is `content` and its end, but for spaces.

        The prompt may have said the beginning of `content` already (an opened think block).
        """
        said, start = content.strip(), len(prompt_text)
        emitted = upto_text[start:]
        start += len(emitted) - len(emitted.lstrip()) if said else 0
        first = max(0, start - max(len(said), 1) + 1)
        at = next((at for at in range(first, start + 1) if upto_text.startswith(said, at)), None)
        if at is None:
            return False
        rest = self.tokenizer(upto_text[at + len(said) :].strip(), add_special_tokens=False)["input_ids"]
        return not rest or rest[0] in self.end_of_turn

    @staticmethod
    def _raw(content: str, opening: str, *, cut: bool) -> str:
        """What of `content` comes behind the prompt; `opening` is the part of the prompt that opens the answer.

        Raises:
            Unusable: the prompt is of one thinking mode, the answer of the other.
        """
        closed = THINK_END in opening
        opened = THINK_START in opening and not closed
        if closed and THINK_END in content:
            raise Unusable("the answer thinks, but its prompt is that of the mode without thinking")
        if opened and THINK_END not in content and not cut:
            raise Unusable("the prompt opens a thought that the answer does not close")
        if opened and content.lstrip().startswith(THINK_START):
            return content.lstrip()[len(THINK_START) :].lstrip("\n")
        return content
