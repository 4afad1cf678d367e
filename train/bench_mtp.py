"""`python -m train.bench_mtp`: what the unroll is worth to a module that is used again for every further token.

A tiny target and an MTP module are trained together from scratch, the module for the next but one token alone, as
modules that come with a target are. From there it is trained on twice, with the same packs, steps and learning rate,
on what the target itself says: once for one step (K = 1), once with the unroll. Both are then judged as they would be
served, used again for every token of a draft: simulated AL (docs/concepts.md) on texts that none was trained on.

The language has words of several tokens, each followed by one of a few others, so that a draft can be right at any
length and has to know where in a word it is. Legend: B texts, L tokens of a text, V vocabulary.
"""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from models.mtp import MtpConfig, MtpHead, initialise
from train.config import ObjectiveConfig
from train.objective import Objective, judge, simulated_al
from train.packs import Pack, row_count

VOCABULARY, HIDDEN, LENGTH, PROMPT = 64, 64, 64, 8
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


def write_language(words: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Words of 2 to 5 tokens, which share tokens, and for each word those that may follow."""
    rng = random.Random(seed)
    spelled = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 5))] for _ in range(words)]
    return spelled, [rng.sample(range(words), 3) for _ in range(words)]


def sample_texts(language: tuple[list[list[int]], list[list[int]]], count: int, seed: int) -> torch.Tensor:
    """Texts [B, L]."""
    (spelled, following), rng, texts = language, random.Random(seed), []
    for _ in range(count):
        word, text = rng.randrange(len(spelled)), list[int]()
        while len(text) < LENGTH:
            text += spelled[word]
            word = rng.choices(following[word], (0.8, 0.15, 0.05))[0]
        texts.append(text[:LENGTH])
    return torch.tensor(texts)


def pack_of(model: Any, texts_BL: torch.Tensor) -> Pack:
    """Texts end to end with the target's final planes; all behind the first few tokens is supervised."""
    with torch.no_grad():
        final = model.model(input_ids=texts_BL).last_hidden_state.flatten(0, 1)
    starts = torch.arange(len(texts_BL)) * LENGTH
    return Pack(
        tokens_T=texts_BL.flatten(),
        starts_T=starts.repeat_interleave(LENGTH),
        aux_TAP=final[:, None],
        final_FP=final,
        teacher_T=torch.arange(len(final)),
        spans=[(start + PROMPT, start + LENGTH) for start in starts.tolist()],
        documents=[],
    )


def objective_of(head: MtpHead, model: Any, unroll_steps: int) -> Objective:
    """The trainer's objective of a module over this target."""
    target: Any = SimpleNamespace(
        load_embedding=lambda: model.model.embed_tokens.weight.detach(),
        load_lm_head=lambda: model.lm_head.weight.detach(),
    )
    return Objective(head, target, ObjectiveConfig(unroll_steps=unroll_steps), "fp32")


def train_jointly(steps: int, seed: int) -> tuple[Any, MtpHead, Any]:
    """A target, its module, and the language they know."""
    torch.manual_seed(seed)
    language = write_language(40, seed)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": ROPE,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
    }
    model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False, pad_token_id=None))
    head = MtpHead(MtpConfig(family="mimo", native=False, block=shape | {"hidden_act": "silu"}))
    start: Any = SimpleNamespace(load_final_norm=lambda: model.model.norm.weight.detach())
    initialise(head, start, torch.randn(256, 1, HIDDEN))
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=3e-3)
    for step in range(steps):
        texts_BL = sample_texts(language, 16, 1_000_000 * (seed + 1) + step)
        out = model(input_ids=texts_BL, labels=texts_BL, output_hidden_states=True)
        pack = pack_of(model, texts_BL)
        rows_R = torch.cat([torch.arange(start, stop - 2) for start, stop in pack.spans])
        final_T1H = out.hidden_states[-1].flatten(0, 1)[:, None]
        (drafted,) = head.unroll(pack.tokens_T, final_T1H, pack.starts_T, [rows_R], model.model.embed_tokens.weight)
        loss = out.loss + 0.3 * cross_entropy(model.lm_head(drafted.hidden_RH), pack.tokens_T[rows_R + 2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False), head, language


@torch.no_grad()
def answers_of(model: Any, language: Any, count: int, seed: int) -> torch.Tensor:
    """Texts [B, L] whose beginning is the language's and whose rest the target says itself, greedily."""
    texts_BL = sample_texts(language, count, seed)
    written = model.generate(
        input_ids=texts_BL[:, :PROMPT],
        attention_mask=torch.ones(count, PROMPT, dtype=torch.int64),
        max_new_tokens=LENGTH - PROMPT,
        min_new_tokens=LENGTH - PROMPT,
        do_sample=False,
        pad_token_id=0,
    )
    return written


def fine_tune(head: MtpHead, model: Any, packs: list[Pack], unroll_steps: int, lr: float) -> MtpHead:
    """A copy of the module after an optimizer step per pack."""
    tuned = copy.deepcopy(head)
    objective = objective_of(tuned, model, unroll_steps)
    optimizer = torch.optim.AdamW(tuned.parameters(), lr=lr)
    for pack in packs:
        counts = [float(row_count(pack.spans, k)) for k in range(unroll_steps)]
        optimizer.zero_grad()
        objective(pack, counts, 0).loss.backward()
        optimizer.step()
    return tuned


def acceptance(head: MtpHead, model: Any, pack: Pack, k: int) -> tuple[float, list[float]]:
    """Simulated greedy AL of drafts of k tokens, and the share of hits per step."""
    objective = objective_of(head, model, k)
    with torch.no_grad():
        hits_RK, _ = judge(objective, pack, objective.unroll(pack, None))
    return simulated_al(hits_RK), hits_RK.nanmean(0).tolist()


def compare(
    *, joint_steps: int = 400, steps: int = 150, k: int = 4, lr: float = 1e-3, seed: int = 0
) -> dict[str, tuple[float, list[float]]]:
    """AL and hits per step of the module as it comes, and trained on for one step and for k."""
    model, head, language = train_jointly(joint_steps, seed)
    texts_BL = answers_of(model, language, 8 * steps + 64, seed + 7)
    packs = [pack_of(model, part) for part in texts_BL[:-64].split(8)]
    held_out = pack_of(model, texts_BL[-64:])
    heads = {
        "as it comes": head,
        "trained on, K = 1": fine_tune(head, model, packs, 1, lr),
        f"trained on, K = {k}": fine_tune(head, model, packs, k, lr),
    }
    return {name: acceptance(each, model, held_out, k) for name, each in heads.items()}


def positive(word: str) -> int:
    """A whole number above 0 from a word of the command line; ValueError otherwise, as argparse wants it."""
    if (number := int(word)) < 1:
        raise ValueError
    return number


def main() -> None:
    """Print the table."""
    from conf.help import Parser, described

    parser = Parser("python -m train.bench_mtp", **described("train.bench_mtp"))
    parser.add_argument("--k", type=positive, default=4, help="steps of the unroll, and tokens of a draft")
    parser.add_argument("--steps", type=positive, default=150, help="optimizer steps of both fine-tunings")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    found = compare(k=asked.k, steps=asked.steps, seed=asked.seed)
    print(
        f"drafts of {asked.k} tokens by one module, simulated on {64 * (LENGTH - PROMPT):,} tokens of the target's own"
    )
    for name, (al, hits) in found.items():
        print(f"  {name:20} AL {al:.3f}   hits per step {' '.join(f'{share:.3f}' for share in hits)}")


if __name__ == "__main__":
    main()
