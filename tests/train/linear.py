"""A target so simple that what a head can know of it at the start is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import rms_norm

from train.packs import Pack


class LinearWorld:
    """A target whose next state is linear in its present one and the token between, and a text of its states.

    Attributes:
        state_TH: after each token; the final plane is `state_TH * final_norm`.
        pack: the text, in documents of 60 tokens; its one plane to read is the final plane, too.
    """

    def __init__(self, hidden: int, vocabulary: int, length: int) -> None:
        self.embedding = rms_norm(torch.randn(vocabulary, hidden), (hidden,))
        self.lm_head, self.final_norm = torch.randn(vocabulary, hidden), torch.rand(hidden) + 0.5
        onward, inward = torch.randn(hidden, hidden) * 0.25, torch.randn(hidden, hidden) * 0.15
        tokens_T = torch.randint(0, vocabulary, (length,))
        state, states = torch.randn(hidden), []
        for token in tokens_T:
            state = rms_norm(state @ onward + self.embedding[token] @ inward, (hidden,))
            states.append(state)
        self.state_TH = torch.stack(states)
        final_TH = self.state_TH * self.final_norm
        self.pack = Pack(
            tokens_T=tokens_T,
            starts_T=torch.arange(length) // 60 * 60,
            aux_TAP=final_TH[:, None],
            final_FP=final_TH,
            teacher_T=torch.arange(length),
            spans=[(begin + 8, begin + 60) for begin in range(0, length, 60)],
            documents=[0],
        )
        self.target: Any = SimpleNamespace(
            hidden_size=hidden,
            load_embedding=lambda: self.embedding,
            load_lm_head=lambda: self.lm_head,
            load_final_norm=lambda: self.final_norm,
        )
