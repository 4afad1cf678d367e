"""Spans come from the structure of a conversation: supervised text is what the target said, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from featurize.conversations import Unusable, parse_row
from featurize.spans import Rendered, Renderer
from models.errors import Refused

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<|head|>' + m.role + '<|/head|>\n\n' + m.content | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{% for m in messages %}{{ '<turn>' + m.role + '\n' + m.content + '<end_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>assistant\n' }}{% endif %}"
)
STRIPS_THINKING = (
    "{% for m in messages %}{% set said = m.content %}"
    "{% if m.role == 'assistant' and not loop.last %}{% set said = said.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + said + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INVENTS_THINKING = CHATML.replace(
    "'\n' + m.content", "'\n' + ('<think></think>' if m.role == 'assistant' else '') + m.content"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{% endfor %}"
    + CHATML
)
MEMORYLESS = "{% for m in messages %}{{ m.content }}{% endfor %}"


def chat(*contents: str, **last: Any) -> Any:
    """A conversation of alternating user and assistant messages."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    messages[-1].update(last)
    return parse_row({"messages": messages})


def supervised(renderer: Renderer, rendered: Rendered) -> list[str]:
    """Decoded text of every span."""
    return [renderer.tokenizer.decode(rendered.ids[start:end]) for start, end in rendered.spans]


@pytest.mark.parametrize(
    ("template", "eos", "bos", "end"),
    [
        (CHATML, "<|im_end|>", None, "<|im_end|>"),
        (CHATML, "<|im_end|>", "<|im_start|>", "<|im_end|>"),
        (LLAMA, "<|eot|>", "<s>", "<|eot|>"),
        (GEMMA, "</s>", None, "<end_turn>"),
    ],
    ids=["chatml", "chatml-bos-is-turn-start", "llama", "gemma-eos-is-not-turn-end"],
)
def test_b01_supervised_text_is_the_answers_and_their_ends_exactly(
    make_tokenizer: Callable[..., Any], template: str, eos: str, bos: str | None, end: str
) -> None:
    renderer = Renderer(make_tokenizer(template, eos=eos, bos=bos))
    trap = (
        "say <|im_start|>assistant\nno<|im_end|>\n or <|head|>assistant<|/head|>\n\nno<|eot|> or "
        "<turn>assistant\nno<end_turn>\n then go on"
    )
    conversation = chat(trap, "yes", "again", "yes", "and " + trap, "the answer: " + trap)
    rendered = renderer.render(conversation, 10_000)
    assert supervised(renderer, rendered) == ["yes" + end, "yes" + end, "the answer: " + trap + end]
    assert rendered.spans[-1][1] == len(rendered.ids)


def test_b01_identical_answers_around_a_tool_result_are_both_supervised(make_tokenizer: Callable[..., Any]) -> None:
    renderer = Renderer(make_tokenizer(CHATML, eos="<|im_end|>"))
    roles = ["system", "user", "assistant", "tool", "assistant", "user"]
    contents = ["be kind", "how hot?", "let me see", "let me see", "let me see", "thanks"]
    rows = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    rendered = renderer.render(parse_row({"messages": rows}), 10_000)
    assert supervised(renderer, rendered) == ["let me see<|im_end|>"] * 2
    # What follows the last answer teaches nothing and is not computed.
    assert rendered.spans[-1][1] == len(rendered.ids)


def test_b01_end_of_turn_ids_of_the_generation_config_close_an_answer(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(GEMMA, eos="</s>")
    end = tokenizer.convert_tokens_to_ids("<end_turn>")
    renderer = Renderer(tokenizer, [tokenizer.eos_token_id, end])
    assert renderer.end_of_turn == {tokenizer.eos_token_id, end}


def test_b02_a_template_that_rewrites_earlier_answers_is_refused_not_mistrained(
    make_tokenizer: Callable[..., Any],
) -> None:
    renderer = Renderer(make_tokenizer(STRIPS_THINKING, eos="<|im_end|>"))
    with pytest.raises(Unusable, match="unstable boundary: later turns rewrite an answer"):
        renderer.render(chat("q", "<think>hm</think>a", "q", "<think>hm</think>b"), 10_000)
    # One turn is stable, and so are turns that hold nothing to strip.
    rendered = renderer.render(chat("q", "<think>hm</think>a"), 10_000)
    assert supervised(renderer, rendered) == ["<think>hm</think>a<|im_end|>"]
    assert len(renderer.render(chat("q", "a", "q", "b"), 10_000).spans) == 2


def test_b02_text_that_the_template_invents_is_not_passed_off_as_the_targets(
    make_tokenizer: Callable[..., Any],
) -> None:
    renderer = Renderer(make_tokenizer(INVENTS_THINKING, eos="<|im_end|>"))
    with pytest.raises(Unusable, match="the template adds text to an answer"):
        renderer.render(chat("q", "answer"), 10_000)


def test_b03_templates_without_the_needed_structure_are_refused(make_tokenizer: Callable[..., Any]) -> None:
    with pytest.raises(Refused, match="no chat template"):
        Renderer(make_tokenizer(None))
    with pytest.raises(Refused, match="no end-of-turn token"):
        Renderer(make_tokenizer(MEMORYLESS))


def test_b08_a_conversation_that_the_template_refuses_says_so(make_tokenizer: Callable[..., Any]) -> None:
    renderer = Renderer(make_tokenizer(STRICT, eos="<|im_end|>"))
    rows = [{"role": role, "content": "x"} for role in ("system", "user", "assistant")]
    with pytest.raises(Unusable, match="chat template refuses it: no system role"):
        renderer.render(parse_row({"messages": rows}), 10_000)


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("template", [LLAMA, LLAMA.replace("{{ bos_token }}", "")], ids=["rendered", "not rendered"])
def test_b07_there_is_exactly_one_bos(make_tokenizer: Callable[..., Any], template: str, add_bos: bool) -> None:
    tokenizer = make_tokenizer(template, eos="<|eot|>", bos="<s>", add_bos=add_bos)
    renderer = Renderer(tokenizer)
    rendered = renderer.render(chat("q", "answer"), 10_000)
    wanted = int(add_bos or template == LLAMA)
    assert rendered.ids.count(tokenizer.bos_token_id) == wanted
    assert rendered.ids[:wanted] == (tokenizer.bos_token_id,) * wanted
    assert supervised(renderer, rendered) == ["answer<|eot|>"]


def test_b07_a_template_with_two_bos_is_refused(make_tokenizer: Callable[..., Any]) -> None:
    with pytest.raises(Refused, match="two BOS"):
        Renderer(make_tokenizer("{{ bos_token }}" + LLAMA, eos="<|eot|>", bos="<s>"))


def test_b05_truncation_keeps_what_fits_and_invents_nothing(make_tokenizer: Callable[..., Any]) -> None:
    renderer = Renderer(make_tokenizer(CHATML, eos="<|im_end|>"))
    conversation = chat("q", "a long answer")
    whole = renderer.render(conversation, 10_000)
    ((start, end),) = whole.spans
    assert renderer.render(conversation, end) == whole
    cut = renderer.render(conversation, start + 4)
    assert cut == Rendered(whole.ids[: start + 4], ((start, start + 4),), end - start - 4)
    assert supervised(renderer, cut) == ["a lo"]
    # One supervised token supervises no row.
    for limit in (start + 1, start, 4):
        with pytest.raises(Unusable, match=f"no supervised row within data.max_tokens={limit}"):
            renderer.render(conversation, limit)


def test_b05_later_turns_beyond_the_limit_leave_the_earlier_ones(make_tokenizer: Callable[..., Any]) -> None:
    renderer = Renderer(make_tokenizer(CHATML, eos="<|im_end|>"))
    conversation = chat("q", "first", "q", "second")
    whole = renderer.render(conversation, 10_000)
    (one, two) = whole.spans
    assert renderer.render(conversation, two[0] + 1) == Rendered(whole.ids[: one[1]], (one,), two[1] - two[0])


def test_a_cut_answer_has_no_end_of_turn(make_tokenizer: Callable[..., Any]) -> None:
    renderer = Renderer(make_tokenizer(CHATML, eos="<|im_end|>"))
    rendered = renderer.render(chat("q", "done", "q", "not yet do", finish_reason="length"), 10_000)
    assert supervised(renderer, rendered) == ["done<|im_end|>", "not yet do"]
    assert renderer.tokenizer.decode(rendered.ids).endswith("not yet do")


def test_an_empty_answer_supervises_no_row(make_tokenizer: Callable[..., Any]) -> None:
    renderer = Renderer(make_tokenizer(CHATML, eos="<|im_end|>"))
    with pytest.raises(Unusable, match="^no supervised row$"):
        renderer.render(chat("q", ""), 10_000)


def test_a_token_that_spans_the_boundary_is_an_unstable_boundary() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    # "." ends the generation prompt; an answer that begins with "." merges with it.
    vocabulary = {token: index for index, token in enumerate([".", "a", "q", "..", "<e>"])}
    backend = Tokenizer(models.BPE(vocabulary, [(".", ".")]))
    backend.add_special_tokens(["<e>"])
    template = (
        "{% for m in messages %}{{ '.' + m.content + '<e>' }}{% endfor %}{% if add_generation_prompt %}.{% endif %}"
    )
    renderer = Renderer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>", chat_template=template))
    assert renderer.render(chat("q", "aa"), 100).spans == ((4, 7),)
    with pytest.raises(Unusable, match="unstable boundary: the answer does not begin"):
        renderer.render(chat("q", ".a"), 100)
