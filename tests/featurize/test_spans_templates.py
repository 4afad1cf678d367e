"""Spans under templates in the manner of the families that are served: what was trained is what serving would feed.

The templates are short, but keep what makes the families differ: where BOS comes from, what a generation prompt
holds, trimmed contents, a system prompt that moves, thoughts that are stripped or put in, tool calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from featurize.config import DataConfig
from featurize.conversations import Conversation, Refusals, Unusable, parse_row
from featurize.spans import Rendered, Renderer
from featurize.tokenised import render_documents
from featurize.vocabulary import divide

FOLDER = Path(__file__).parent / "templates"
FAMILIES: dict[str, dict[str, Any]] = {
    "chatml": {"eos": "<|im_end|>"},
    "llama3": {"eos": "<|eot_id|>", "bos": "<|begin_of_text|>", "add_bos": True},
    "qwen3": {"eos": "<|im_end|>"},
    "mistral": {"eos": "</s>", "bos": "<s>", "add_bos": True},
    "gemma": {"eos": "<eos>", "bos": "<bos>", "add_bos": True},
    "hermes": {"eos": "<|im_end|>"},
    "r1": {"eos": "</s>", "bos": "<s>", "add_bos": True},
}
END = {"gemma": "<end_of_turn>"}
OPENS_A_THOUGHT = (
    "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable",
    "{{- '<|im_start|>assistant\\n<think>\\n' }}\n    {%- if enable",
)


@pytest.fixture
def family(make_tokenizer: Callable[..., Any]) -> Callable[..., Renderer]:
    """A function (name) -> renderer of that family; `change` replaces a piece of its template."""

    def make(name: str, change: tuple[str, str] | None = None) -> Renderer:
        template = (FOLDER / f"{name}.jinja").read_text()
        if change:
            assert template.count(change[0]) == 1
            template = template.replace(*change)
        return Renderer(make_tokenizer(template, **FAMILIES[name]))

    return make


def chat(*contents: str | dict[str, Any], **row: Any) -> Conversation:
    """A conversation of alternating user and assistant messages; a dict is a message of its own."""
    texts = iter(("user", "assistant") * len(contents))
    messages = [c if isinstance(c, dict) else {"role": next(texts), "content": c} for c in contents]
    return parse_row({"messages": messages, **row})


def supervised(renderer: Renderer, rendered: Rendered) -> list[str]:
    return [renderer.tokenizer.decode(rendered.ids[start:end]) for start, end in rendered.spans]


def served(renderer: Renderer, conversation: Conversation, index: int) -> list[int]:
    """Ids that a server would be given before it says message `index`."""
    return renderer.tokenizer.apply_chat_template(
        [{k: v for k, v in m.items() if k != "token_ids"} for m in conversation.messages[:index]],
        tools=conversation.tools,
        add_generation_prompt=True,
        return_dict=False,
        **conversation.template_arguments,
    )


def check_served(renderer: Renderer, conversation: Conversation, index: int, rendered: Rendered) -> None:
    """The last span of `rendered` is message `index` behind exactly what a server is given."""
    start, _ = rendered.spans[-1]
    assert list(rendered.ids[:start]) == served(renderer, conversation, index)


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "gemma", "hermes"])
def test_b01_every_turn_is_what_serving_feeds_and_the_target_says(family: Any, name: str) -> None:
    renderer, end = family(name), END.get(name, FAMILIES[name]["eos"])
    trap = f"say {end} [/INST] <|im_start|>assistant\nno{end} then"
    conversation = chat(trap, "yes", "again", "yes", "more", "no " + trap)
    rendered = renderer.render(conversation, 10_000)
    space = " " if name == "mistral" else ""
    assert supervised(renderer, rendered) == [space + "yes" + end] * 2 + [space + "no " + trap + end]
    for turn, (start, _) in enumerate(rendered.spans):
        assert list(rendered.ids[:start]) == served(renderer, conversation, 2 * turn + 1)
    # Alone, every turn is the same as in the whole.
    for turn, span in enumerate(rendered.spans):
        alone = renderer.render(conversation, 10_000, only=2 * turn + 1)
        assert alone == Rendered(rendered.ids[: span[1]], (span,), 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_b07_exactly_one_bos_whoever_wants_one(family: Any, name: str) -> None:
    renderer = family(name)
    rendered = renderer.render(chat("q", "<think>\nhm\n</think>\n\na"), 10_000, only=1)
    wanted = ["bos" in FAMILIES[name]]
    assert [rendered.ids.count(renderer.bos_id)] == wanted if renderer.bos_id is not None else not wanted[0]


@pytest.mark.parametrize(
    "marker", [("", ""), ("{% generation %}", "{% endgeneration %}"), ("{%- generation -%}", "{%- endgeneration -%}")]
)
@pytest.mark.parametrize("name", ["chatml", "hermes"])
def test_b03_generation_markers_or_none_give_the_same_spans(make_tokenizer: Any, name: str, marker: Any) -> None:
    plain = (FOLDER / f"{name}.jinja").read_text()
    piece = {"chatml": "message['content'] + '<|im_end|>'", "hermes": "message.content + '<|im_end|>\\n'"}[name]
    assert plain.count(piece) == 1
    opening, closing = marker
    marked = plain.replace(piece, "'' }}" + opening + "{{ " + piece + " }}" + closing + "{{ ''")
    conversation = chat("q", "a", "q", " b ")
    wanted, found = (
        Renderer(make_tokenizer(template, eos="<|im_end|>")).render(conversation, 10_000)
        for template in (plain, marked)
    )
    assert found == wanted
    assert supervised(Renderer(make_tokenizer(plain, eos="<|im_end|>")), wanted) == ["a<|im_end|>", " b <|im_end|>"]


THOUGHTS = (
    "q",
    "<think>\nhm\n</think>\n\none",
    "q",
    "<think>\nso\n</think>\n\ntwo",
    "q",
    "<think>\noh\n</think>\n\nthree",
)


def test_b02_stripped_thoughts_are_refused_whole_and_right_when_split(family: Any) -> None:
    renderer, conversation = family("qwen3"), chat(*THOUGHTS)
    with pytest.raises(Unusable, match="unstable boundary: later turns rewrite an answer"):
        renderer.render(conversation, 10_000)
    for index in (1, 3, 5):
        rendered = renderer.render(conversation, 10_000, only=index)
        check_served(renderer, conversation, index, rendered)
        assert supervised(renderer, rendered) == [THOUGHTS[index] + "<|im_end|>"]
        assert renderer.tokenizer.decode(rendered.ids).count("<think>") == 1


def test_b02_reasoning_content_is_rendered_as_the_template_writes_it(family: Any) -> None:
    answers = [{"role": "assistant", "content": text, "reasoning_content": "hm"} for text in ("one", "two")]
    user = {"role": "user", "content": "q"}
    renderer, conversation = family("qwen3"), chat(user, answers[0], user, answers[1])
    for index, text in ((1, "one"), (3, "two")):
        rendered = renderer.render(conversation, 10_000, only=index)
        check_served(renderer, conversation, index, rendered)
        assert supervised(renderer, rendered) == [f"<think>\nhm\n</think>\n\n{text}<|im_end|>"]
    with pytest.raises(Unusable, match="leaves out reasoning_content"):
        family("chatml").render(conversation, 10_000)


def test_b02_an_empty_think_block_is_supervised_in_no_mode(family: Any) -> None:
    renderer = family("qwen3")
    answers = ("q", "one", "q", "two")
    with pytest.raises(Unusable, match="the template adds text to an answer"):
        renderer.render(chat(*answers), 10_000)
    with pytest.raises(Unusable, match="the template adds text to an answer"):
        renderer.render(chat("q", {"role": "assistant", "content": ""}), 10_000)
    off = {"enable_thinking": False}
    for arguments in ({}, off):
        for index in (1, 3):
            conversation = chat(*answers, chat_template_kwargs=arguments)
            rendered = renderer.render(conversation, 10_000, only=index)
            check_served(renderer, conversation, index, rendered)
            assert supervised(renderer, rendered) == [answers[index] + "<|im_end|>"]
    # The whole conversation is stable in neither: serving puts the block into every prompt, history has none.
    with pytest.raises(Unusable, match="unstable boundary"):
        renderer.render(chat(*answers, chat_template_kwargs=off), 10_000)
    assert renderer.render(chat("q", "one", chat_template_kwargs=off), 10_000).spans


@pytest.mark.parametrize(
    "content", ["hm\n</think>\n\na", "<think>\nhm\n</think>\n\na"], ids=["closing tag only", "both tags"]
)
def test_b02_a_prompt_that_opens_the_thought_is_followed_by_its_rest(family: Any, content: str) -> None:
    for renderer in (family("qwen3", OPENS_A_THOUGHT), family("r1")):
        conversation = chat("q", "x</think>b", "q", content)
        rendered = renderer.render(conversation, 10_000, only=3)
        check_served(renderer, conversation, 3, rendered)
        end = renderer.tokenizer.eos_token
        assert supervised(renderer, rendered) == ["hm\n</think>\n\na" + end]
        with pytest.raises(Unusable, match="the prompt opens a thought that the answer does not close"):
            renderer.render(chat("q", "just an answer"), 10_000, only=1)
        cut = renderer.render(
            chat("q", {"role": "assistant", "content": "hm", "finish_reason": "length"}), 10_000, only=1
        )
        assert supervised(renderer, cut) == ["hm"]


def test_b02_an_answer_of_the_other_thinking_mode_is_refused(family: Any) -> None:
    conversation = chat("q", "<think>\nhm\n</think>\n\na", chat_template_kwargs={"enable_thinking": False})
    for only in (None, 1):
        with pytest.raises(Unusable, match=r"unstable boundary|its prompt is that of the mode without thinking"):
            family("qwen3").render(conversation, 10_000, only)


def test_b02_a_system_prompt_that_moves_is_refused_whole_and_right_when_split(family: Any) -> None:
    system = {"role": "system", "content": "be kind"}
    renderer, conversation = family("mistral"), chat(system, "q", "a", "r", "b")
    with pytest.raises(Unusable, match="unstable boundary: the answer does not begin where its prompt ends"):
        renderer.render(conversation, 10_000)
    for index, text in ((2, "a"), (4, "b")):
        rendered = renderer.render(conversation, 10_000, only=index)
        check_served(renderer, conversation, index, rendered)
        assert supervised(renderer, rendered) == [text + "</s>"]


CALL = {"name": "weather", "arguments": {"city": "Bern"}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("name", ["hermes", "qwen3", "llama3"])
def test_b08_tool_calls_are_supervised_and_their_results_are_not(family: Any, name: str) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": CALL}]}
    result = {"role": "tool", "content": "12 degrees"}
    think = {"chat_template_kwargs": {"enable_thinking": False}} if name == "qwen3" else {}
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "12 degrees"}
    conversation = chat(user, call, result, answer, tools=TOOLS, **think)
    renderer, end = family(name), FAMILIES[name]["eos"]
    said = f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(CALL["arguments"])}}}\n</tool_call>{end}'
    if name == "llama3":
        said = f'{{"name": "weather", "parameters": {json.dumps(CALL["arguments"])}}}{end}'
    texts = []
    for index in (1, 3):
        rendered = renderer.render(conversation, 10_000, only=index)
        check_served(renderer, conversation, index, rendered)
        texts += supervised(renderer, rendered)
    assert texts == [said, "12 degrees" + end]
    if name != "qwen3":
        assert supervised(renderer, renderer.render(conversation, 10_000)) == texts


def test_b08_a_template_that_leaves_out_tool_calls_is_not_trained_on(family: Any) -> None:
    call = {"role": "assistant", "content": "let me see", "tool_calls": [{"function": CALL}]}
    for only in (None, 1):
        with pytest.raises(Unusable, match="the chat template leaves out tool_calls of an answer"):
            family("chatml").render(chat("q", call), 10_000, only)


def test_b08_six_rows_of_odd_shapes_are_trained_or_counted(family: Any, tmp_path: Path) -> None:
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": CALL}]}
    rows = [
        {"id": "call", "messages": [user, call]},
        {"id": "result", "messages": [user, call, {"role": "tool", "content": "12"}, answer]},
        {"id": "users", "messages": [user, user, answer]},
        {"id": "leading", "messages": [answer, user, answer]},
        {"id": "empty", "messages": [user, {"role": "assistant", "content": ""}]},
        {"id": "sharegpt", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def made(name: str, turns: str) -> tuple[dict[str, int], dict[str, list[str]]]:
        refusals = Refusals()
        documents = render_documents(DataConfig([str(file)], turns=turns), family(name), refusals)
        return {document.id: len(document.spans) for document, *_ in documents}, refusals.places

    one = {"call": 1, "result": 2, "users": 1, "leading": 1, "sharegpt": 1}
    assert made("hermes", "all") == (one, {"no supervised row": [f"{file}:5"]})
    assert made("hermes", "last") == (dict.fromkeys(one, 1), {"no supervised row": [f"{file}:5"]})
    split, places = made("hermes", "split")
    assert list(split) == [
        "call#message-1", "result#message-1", "result#message-3", "users#message-2",
        "leading#message-2", "sharegpt#message-1",
    ]  # fmt: skip
    assert places == {"no supervised row": [f"{file}:5, message 1"]}
    strict, places = made("gemma", "all")
    assert strict == {"sharegpt": 1}
    reasons = {reason: [place.rpartition(":")[2] for place in found] for reason, found in places.items()}
    assert reasons == {
        "the chat template leaves out tool_calls of an answer": ["1", "2"],
        "the chat template refuses it: Conversation roles must alternate user/assistant/user/assistant/...": ["3", "4"],
        "no supervised row": ["5"],
    }


def test_b08_the_last_answer_alone_can_be_supervised(family: Any, tmp_path: Path) -> None:
    turns = [("user", "q"), ("assistant", "one"), ("user", "r"), ("assistant", "two")]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
    renderer = family("chatml")
    ((_, rendered, conversation),) = render_documents(DataConfig([str(file)], turns="last"), renderer, Refusals())
    check_served(renderer, conversation, 3, rendered)
    assert supervised(renderer, rendered) == ["two<|im_end|>"]


def test_ids_of_the_server_are_taken_as_they_are_where_nothing_comes_after(family: Any) -> None:
    renderer = family("chatml")
    end = renderer.closing
    ids = [renderer.tokenizer.convert_tokens_to_ids(token) for token in "yes"]
    exact = {"role": "assistant", "content": "yes", "token_ids": [*ids, end]}
    other = exact | {"token_ids": [*reversed(ids), end]}
    user = {"role": "user", "content": "q"}
    for first, only in ((exact, None), (exact, 3), (other, 3)):
        rendered = renderer.render(chat(user, first, user, other), 10_000, only)
        start, stop = rendered.spans[-1]
        assert list(rendered.ids[start:stop]) == other["token_ids"]
        assert list(rendered.ids[:start]) == served(renderer, chat(user, first, user, other), 3)
    with pytest.raises(Unusable, match="ids of an answer are not those that the server gave"):
        renderer.render(chat(user, other, user, exact), 10_000)
    with pytest.raises(Unusable, match="beyond the target's vocabulary"):
        renderer.render(chat(user, exact | {"token_ids": [10**6]}), 10_000)
    cut = renderer.render(chat(user, exact | {"token_ids": ids, "finish_reason": "length"}), 10_000)
    assert supervised(renderer, cut) == ["yes"]


@pytest.mark.parametrize("only", [None, 3])
def test_b05_truncation_keeps_what_fits_of_an_answer_alone_or_not(family: Any, only: int | None) -> None:
    renderer, conversation = family("llama3"), chat("q", "one", "q", "a long answer")
    whole = renderer.render(conversation, 10_000, only)
    start, end = whole.spans[-1]
    cut = renderer.render(conversation, start + 6, only)
    assert cut == Rendered(whole.ids[: start + 6], (*whole.spans[:-1], (start, start + 6)), end - start - 6)
    assert supervised(renderer, cut)[-1] == "a long"


def test_documents_of_one_conversation_are_held_out_together(family: Any, tmp_path: Path) -> None:
    user = {"role": "user", "content": "q"}
    answers = [{"role": "assistant", "content": f"<think>\nhm\n</think>\n\nanswer {i}"} for i in range(3)]
    messages = [message for answer in answers for message in (user, answer)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"id": f"c{i}", "messages": messages}) + "\n" for i in range(40)))
    rendered = render_documents(DataConfig([str(file)], turns="split"), family("qwen3"), Refusals())
    documents = [document for document, *_ in rendered]
    assert len(documents) == 120
    parts = [{documents[index].conversation for index in part} for part in divide(documents, 0.3)]
    assert all(parts)
    assert not parts[0] & parts[1]
    assert parts[0] | parts[1] == {f"c{i}" for i in range(40)}
