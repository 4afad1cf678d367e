"""`python -m featurize.inspect experiment=demo inspect.documents=5`: what is trained, for a person to see.

Documents are made here as they are for the features, with the run's own data, target and template. What the target
said (the spans) is green, behind "+"; the rest, which it only reads, is dim, behind "|". The marks are always there,
so that a file or a pager shows as much as a terminal. Nothing is written and no model is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from featurize.config import DataConfig, InspectConfig
from featurize.conversations import Conversation, Refusals
from featurize.spans import Rendered, Renderer
from featurize.tokenised import Document, render_documents
from models.errors import Refused
from models.terminal import escaped, tables


def pieces(rendered: Rendered) -> Iterator[tuple[bool, tuple[int, ...]]]:
    """The ids in order, cut at the borders of spans: (whether the target said them, ids)."""
    at = 0
    for start, end in rendered.spans:
        if at < start:
            yield False, rendered.ids[at:start]
        yield True, rendered.ids[start:end]
        at = end


def lines(text: str) -> Iterator[str]:
    """Lines of a text, each newline marked, so that it can be seen to which piece it belongs; no control characters."""
    *ended, last = text.split("\n")
    for line, newline in [*((line, "↵") for line in ended), *([(last, "")] if last else [])]:
        yield escaped(line) + newline


def show(console: Console, tokenizer: Any, document: Document, rendered: Rendered, conversation: Conversation) -> None:
    """Print one document."""
    supervised = sum(end - start for start, end in rendered.spans)
    facts = f"{document.length} tokens, {supervised} supervised in {len(rendered.spans)} spans"
    cut = f", {rendered.cut} more beyond data.max_tokens" if rendered.cut else ""
    route = f" [{document.route}]" if document.route else ""
    console.print(Text(f"{document.id}{route}, {conversation.source}: {facts}{cut}", "bold"), soft_wrap=True)
    for said, ids in pieces(rendered):
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for line in lines(text):
            console.print(Text(("+ " if said else "| ") + line, "green" if said else "dim"), soft_wrap=True)
    console.print()


def inspect(data: DataConfig, renderer: Renderer, settings: InspectConfig, console: Console) -> None:
    """Print the documents that `settings` asks for, then what was left out on the way.

    Raises:
        Refused: there is none.
    """
    refusals, shown = Refusals(), 0
    for document, rendered, conversation in render_documents(data, renderer, refusals):
        if settings.id in (None, document.id, conversation.id):
            show(console, renderer.tokenizer, document, rendered, conversation)
            shown += 1
        elif shown:
            break
        if settings.id is None and shown >= settings.documents:
            break
    for line in refusals.lines():
        console.print(Text(f"left out: {line}", "yellow"), soft_wrap=True)
    if not shown:
        raise Refused(f"no document has the id {settings.id} (inspect.id)" if settings.id else "there is no document")


if __name__ == "__main__":
    from conf import Run, stage
    from featurize.tokenised import load_renderer
    from models.target import describe_target

    def work(run: Run) -> None:
        """Show some of the run's documents."""
        renderer = load_renderer(describe_target(run.target), run.target)
        inspect(run.data, renderer, run.inspect, tables())

    stage("inspect", work, shared=True)
