"""The tokenised set: what conversations have become before any model runs, complete or absent.

Documents (ids, spans, route) are kept in the order of the conversations, in `tokenised.safetensors` with
`tokenised.json` beside it, written last. What went in is described by contents alone (`describe_inputs`):
hashes of the data files, of the target's configuration, weights and tokenizer, and the options. That
description is the key of everything in the folder: a rerun with the same one goes on, another is refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from featurize.config import DataConfig, FeaturizeConfig
from featurize.contract import dtype_name, tokenizer_fingerprint
from featurize.conversations import Conversation, Refusals, Unusable
from featurize.sources import describe_sources, read_conversations
from featurize.spans import Rendered, Renderer
from models.artefact import file_sha256, fingerprint, read_json, write_bytes, write_tensors
from models.config import TargetConfig
from models.errors import Refused
from models.target import Target

log = logging.getLogger(__name__)

VERSION = 3
"""Of the files in a features folder; features of another version are refused, never reinterpreted."""

MESSAGE = "#message-"
"""In the id of a document that is one answer: between the conversation's id and the number of the message."""


@dataclass(frozen=True, slots=True)
class Document:
    """A conversation, or one answer of it with its history, as token ids; the ids themselves are read when needed.

    Attributes:
        id: of the conversation; of one answer, with the number of its message behind it.
        length: tokens.
        spans: half-open ranges that the target itself produced, each of at least two tokens.
    """

    id: str
    route: str
    length: int
    spans: tuple[tuple[int, int], ...]

    @property
    def conversation(self) -> str:
        """Id of the conversation: its documents are held out together or not at all."""
        return self.id.partition(MESSAGE)[0]

    @property
    def teachers(self) -> int:
        """Positions whose final plane a supervised row needs: s .. e-2 of every span (s, e)."""
        return sum(end - start - 1 for start, end in self.spans)

    @property
    def rows(self) -> int:
        """Rows that it supervises at the first unroll step: none before its first token."""
        return sum(max(0, end - max(start, 1) - 1) for start, end in self.spans)


@dataclass(frozen=True)
class TokenisedSet:
    """All documents.

    Attributes:
        documents: in the order of the conversations.
        tokens: int32, the documents' ids end to end.
        fingerprint: of the description of everything that went in.
        refused: conversations left out, by reason.
        truncated: how many `documents` lost `supervised_tokens` at data.max_tokens, and how many tokens.
    """

    documents: list[Document]
    tokens: torch.Tensor
    fingerprint: str
    refused: dict[str, int]
    truncated: dict[str, int]

    @cached_property
    def starts(self) -> list[int]:
        """Where each document begins in `tokens`, and the total at the end."""
        return [0, *accumulate(document.length for document in self.documents)]

    def ids(self, index: int) -> torch.Tensor:
        """Token ids of one document, int32 [T], a view."""
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def part(self, indices: Sequence[int], key: str) -> TokenisedSet:
        """Some of the documents, as a set of their own."""
        documents = [self.documents[index] for index in indices]
        tokens = torch.cat([self.tokens[:0], *(self.ids(index) for index in indices)])
        return TokenisedSet(documents, tokens, key, {}, {"documents": 0, "supervised_tokens": 0})


def held_out(document_id: str, share: float) -> bool:
    """Whether a document belongs to the validation set: decided by its id alone, whatever else there is."""
    return int.from_bytes(hashlib.sha256(document_id.encode()).digest()[:4], "big") < share * 2**32


def describe_inputs(
    data: DataConfig, settings: FeaturizeConfig, target: Target, aux_layers: Sequence[int], top_k: dict[str, Any]
) -> dict[str, Any]:
    """Everything that decides what the features are, by contents, without loading a model or a tokenizer.

    Backends agree within rounding only, so that the shards of one store come from one of them; transformers, the first
    there was, goes unsaid, and so does a final plane that is kept only where it teaches.

    Args:
        top_k: what decides the teacher where it is kept as its likeliest draft tokens instead of the final plane
            (`featurize.teacher.Drafted.inputs`); empty where it is not.

    Raises:
        Refused: no data file is named, or one is missing.
    """
    return {
        "version": VERSION,
        "data.mixture (contents)" if data.mixture else "data.conversations (contents)": describe_sources(data),
        "data.chat_template_kwargs": data.chat_template_kwargs,
        "data.turns": data.turns,
        "data.max_tokens": data.max_tokens,
        "data.limit": data.limit,
        "data.route_limits": dict(data.route_limits),
        "target configuration": target.config_hash,
        "target weights": target.weights_hash,
        "target tokenizer and chat template": tokenizer_fingerprint(Path(target.path)),
        "target.dtype": dtype_name(target.dtype),
        "target.aux_layers": list(aux_layers),
        "featurize.shard_tokens": settings.shard_tokens,
        "encoding": settings.encoding,
        **({} if settings.backend == "transformers" else {"featurize.backend": settings.backend}),
        **({"featurize.final_everywhere": True} if settings.final_everywhere else {}),
        **top_k,
    }


def require_same(inputs: dict[str, Any], recorded: dict[str, Any], directory: Path) -> None:
    """Check that a features folder was begun with these inputs.

    Raises:
        Refused: naming what differs.
    """
    different = [key for key in {**inputs, **recorded} if inputs.get(key) != recorded.get(key)]
    if different:
        told = []
        for key in different:
            was, now = recorded.get(key), inputs.get(key)
            hashes = "contents" in key or key.startswith("target ")
            name = "featurize.encoding" if key == "encoding" else key
            told.append(name if hashes else f"{name} (was {was}, is {now})")
        raise Refused(
            f"{directory} was made with other inputs: {', '.join(told)}; use another run name, or delete that folder"
        )


def load_renderer(target: Target, settings: TargetConfig) -> Renderer:
    """The target's tokenizer and template.

    Raises:
        Refused: there is no tokenizer, or no usable chat template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(target.path, trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError) as error:
        raise Refused(f"target.path={target.path} holds no usable tokenizer ({str(error).splitlines()[0]})") from None
    return Renderer(tokenizer, target.eos_ids)


def render_documents(
    data: DataConfig, renderer: Renderer, refusals: Refusals
) -> Iterator[tuple[Document, Rendered, Conversation]]:
    """Every document of `data` in order, with its ids, up to its limits; what is left out is counted in `refusals`.

    Raises:
        Refused: a source cannot be read.
    """
    taken: Counter[str] = Counter()
    for conversation in read_conversations(data, refusals):
        most = data.route_limits.get(conversation.route, sys.maxsize)
        answers = conversation.answers
        chosen: dict[str, Sequence[int | None]] = {"all": [None], "split": answers, "last": answers[-1:]}
        for only in chosen[data.turns]:
            if taken[conversation.route] >= most:
                refusals.add("beyond data.route_limits", conversation.source)
                break
            name = conversation.id if data.turns != "split" else f"{conversation.id}{MESSAGE}{only}"
            try:
                rendered = renderer.render(conversation, data.max_tokens, only)
            except Unusable as error:
                place = conversation.source if data.turns != "split" else f"{conversation.source}, message {only}"
                refusals.add(str(error), place)
                continue
            taken[conversation.route] += 1
            yield Document(name, conversation.route, len(rendered.ids), rendered.spans), rendered, conversation
            if taken.total() == data.limit:
                return


def tokenise(data: DataConfig, renderer: Renderer, key: str) -> TokenisedSet:
    """Render every conversation of `data`; those that cannot be used are counted by reason and logged.

    Raises:
        Refused: a source cannot be read, or no document is left.
    """
    refusals = Refusals()
    documents: list[Document] = []
    pieces: list[torch.Tensor] = []
    truncated = {"documents": 0, "supervised_tokens": 0}
    for document, rendered, _ in render_documents(data, renderer, refusals):
        documents.append(document)
        pieces.append(torch.tensor(rendered.ids, dtype=torch.int32))
        truncated["documents"] += rendered.cut > 0
        truncated["supervised_tokens"] += rendered.cut
    for line in refusals.lines():
        log.warning("left out: %s", line)
    if not documents:
        raise Refused(
            f"no document is left to featurize; left out: {'; '.join(refusals.lines()) or 'nothing was read'}"
        )
    return TokenisedSet(documents, torch.cat(pieces), key, dict(refusals.counts), truncated)


def save(directory: Path, tokenised: TokenisedSet) -> None:
    """Write the set; `tokenised.json` last."""
    spans = [(i, *span) for i, document in enumerate(tokenised.documents) for span in document.spans]
    tensors = {"tokens": tokenised.tokens, "spans": torch.tensor(spans, dtype=torch.int64)}
    write_tensors(directory / "tokenised.safetensors", tensors)
    value = {
        "fingerprint": tokenised.fingerprint,
        "sha256": file_sha256(directory / "tokenised.safetensors"),
        "refused": tokenised.refused,
        "truncated": tokenised.truncated,
        "documents": [[document.id, document.route, document.length] for document in tokenised.documents],
    }
    write_bytes(directory / "tokenised.json", (json.dumps(value, ensure_ascii=False) + "\n").encode())


def load(directory: Path) -> TokenisedSet | None:
    """The set in `directory`, or None when it is missing or torn."""
    record, file = directory / "tokenised.json", directory / "tokenised.safetensors"
    if not record.is_file() or not file.is_file():
        return None
    value = read_json(record)
    if file_sha256(file) != value["sha256"]:
        return None
    tensors = load_file(file)
    spans: list[list[tuple[int, int]]] = [[] for _ in value["documents"]]
    for index, start, end in tensors["spans"].tolist():
        spans[index].append((start, end))
    documents = [
        Document(identity, route, length, tuple(own))
        for (identity, route, length), own in zip(value["documents"], spans, strict=True)
    ]
    return TokenisedSet(documents, tensors["tokens"], value["fingerprint"], value["refused"], value["truncated"])


def load_or_tokenise(
    directory: Path, data: DataConfig, target: Target, settings: TargetConfig, inputs: dict[str, Any]
) -> TokenisedSet:
    """The set of these inputs: the one in `directory` if it is there and whole, otherwise made and saved.

    Raises:
        Refused: no tokenizer, no chat template, or no usable conversation.
    """
    key = fingerprint(inputs)
    tokenised = load(directory)
    if tokenised is None or tokenised.fingerprint != key:
        tokenised = tokenise(data, load_renderer(target, settings), key)
        save(directory, tokenised)
    return tokenised
