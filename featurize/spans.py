"""Token ids and spans of a conversation, from its structure as the target's own chat template renders it.

Nothing is searched in text: contents may hold the very strings that open and close turns. For assistant
message i the prompt is the rendering of the messages before it with the generation prompt, exactly what
serving feeds the target; the rendering up to and including the message must begin with it, token for
token, and the whole must begin with that. The span starts where the prompt ends and stops just after the
end-of-turn token that closes the message, so it holds what the target itself produced and not the
newline that many templates put behind it. A template that rewrites history (thinking stripped from
earlier turns) or a tokenizer that merges across the boundary breaks one of the two conditions: that
conversation is refused and counted, since its ids are not what serving would see. So is one whose
template puts words before an answer (an empty think block, say) that the target did not say.

What follows the last span supervises nothing and is cut off: nobody attends to it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError

from featurize.conversations import Conversation, Unusable
from models.errors import Refused


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
        self.end_of_turn = self._end_of_turn(frozenset(eos_ids) | own)

    def _end_of_turn(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """`eos_ids`, with the token by which the template closes an answer if it is not among them."""
        question = [{"role": "user", "content": "a"}]
        try:
            prompt = self.ids(self.text(question, generation=True))
            whole = self.ids(self.text([*question, {"role": "assistant", "content": "b"}]))
        except Unusable as error:
            raise Refused(f"the target's chat template cannot render a plain question and answer: {error}") from None
        if whole[: len(prompt)] != prompt:
            raise Refused("the target's chat template renders an answer otherwise than its generation prompt begins it")
        tail = whole[len(prompt) :]
        if eos_ids.intersection(tail):
            return eos_ids
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.get_added_vocab().values())
        for token in tail:
            if token in special:
                return eos_ids | {token}
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
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=generation, **(arguments or {})
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

    def render(self, conversation: Conversation, max_tokens: int) -> Rendered:
        """Ids and spans of a conversation, cut at `max_tokens`.

        Raises:
            Unusable: the template refuses it, a boundary is unstable, or no row would be supervised.
        """
        tokenised: dict[str, list[int]] = {}

        def rendered(count: int, generation: bool = False) -> tuple[str, list[int]]:
            text = self.text(
                conversation.messages[:count],
                generation=generation,
                tools=conversation.tools,
                arguments=conversation.template_arguments,
            )
            if text not in tokenised:
                tokenised[text] = self.ids(text)
            return text, tokenised[text]

        _, whole = rendered(len(conversation.messages))
        spans = []
        for index, message in enumerate(conversation.messages):
            if message["role"] != "assistant":
                continue
            (prompt_text, prompt), (upto_text, upto) = rendered(index, generation=True), rendered(index + 1)
            if upto[: len(prompt)] != prompt:
                raise Unusable("unstable boundary: the answer does not begin where its prompt ends")
            if whole[: len(upto)] != upto:
                raise Unusable("unstable boundary: later turns rewrite an answer")
            begins = upto_text[len(prompt_text) :].lstrip().startswith((message["content"] or "").strip())
            if not begins and "reasoning_content" not in message:
                raise Unusable(
                    "the template adds text to an answer that the target did not say (an empty think block? a row's "
                    "chat_template_kwargs can switch it off)"
                )
            closing = max((at for at in range(len(prompt), len(upto)) if upto[at] in self.end_of_turn), default=None)
            if closing is None:
                raise Unusable("an answer without an end-of-turn token")
            spans.append((len(prompt), closing if index == conversation.cut else closing + 1))
        everything, clipped = (
            tuple((start, min(end, limit)) for start, end in spans if min(end, limit) - start >= 2)
            for limit in (len(whole), max_tokens)
        )
        if not everything:
            raise Unusable("no supervised row")
        if not clipped:
            raise Unusable(f"no supervised row within data.max_tokens={max_tokens}")
        cut = sum(end - start for start, end in everything) - sum(end - start for start, end in clipped)
        return Rendered(tuple(whole[: clipped[-1][1]]), clipped, cut)
