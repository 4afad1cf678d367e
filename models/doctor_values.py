"""What a head's numbers say: maps that point elsewhere, weights that were never trained, copies that differ.

Tensors are read one at a time. A matrix counts as random when nothing tells it from independent draws: its rows and
columns are as even, and its largest singular value as small (Marchenko and Pastur, 1967), as chance makes them. Any
gradient leaves a direction that stands out. gate, up, q, k and v may look random after a short training, since they
start large; what writes into the residual stream, fc and lm_head may not.

Shape suffixes: D draft vocabulary, V target vocabulary, M rows and N columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from models.doctor_config import BOTH, SGLANG, VLLM, Finding
from models.heads import HeadFiles, same_values
from models.target import Target

ROWS = 4096
"""Rows of a matrix that are looked at, evenly spaced: enough to tell chance from training."""
EVEN, EDGE = 1.4, 1.05
"""Largest spread of row and column energies, and largest singular value, that chance explains (as ratios)."""
NEIGHBOURS = 20
"""Pairs of neighbouring ids to be expected in a map, above which a map without any holds target ids, not offsets."""
TRAINED = ("fc.weight", "lm_head.weight", "midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight")


def always_grows(d2t_D: torch.Tensor) -> bool:
    """Whether offsets grow from each draft id to the next, as target ids do; offsets do where no two are neighbours."""
    return d2t_D.numel() > 1 and bool((d2t_D.diff() > 0).all())


def map_faults(d2t_D: torch.Tensor, t2d_V: torch.Tensor | None, vocab_size: int) -> Iterator[str]:
    """What is wrong with a vocabulary map, if anything.

    Args:
        d2t_D: offsets, target id = draft id + offset.
        t2d_V: whether a target id is in the draft vocabulary; None when the file has none (no engine reads it).
    """
    d2t_D = d2t_D.to(torch.int64)
    ids_D = d2t_D + torch.arange(d2t_D.numel())
    marked = None if t2d_V is None else t2d_V.bool().nonzero()[:, 0]
    outside = bool(ids_D.min() < 0 or ids_D.max() >= vocab_size)
    # About D * D / V pairs of a map are neighbours, more in a real one: with so many, none is no chance.
    absolute = always_grows(d2t_D) and (outside or d2t_D.numel() ** 2 > NEIGHBOURS * vocab_size)
    if torch.equal(d2t_D, marked) if marked is not None else absolute:
        yield "holds target ids where offsets belong: every proposal is another token"
        return
    if outside:
        yield f"points to ids {int(ids_D.min())}..{int(ids_D.max())}, outside 0..{vocab_size - 1}"
    elif not (ids_D.diff() > 0).all():
        at = int((ids_D.diff() <= 0).nonzero()[0])
        yield f"is not ascending: draft ids {at} and {at + 1} mean {int(ids_D[at])} and {int(ids_D[at + 1])}"
    elif marked is not None and not torch.equal(ids_D, marked):
        yield f"and t2d mark different tokens ({ids_D.numel()} and {marked.numel()}): one of them is not as trained"


def looks_random(weight_MN: torch.Tensor) -> bool:
    """Whether a matrix is indistinguishable from independent draws of one distribution."""
    x_MN = weight_MN[:: -(-weight_MN.shape[0] // ROWS)].float()
    energy = x_MN.pow(2).mean()
    spread = (x_MN.pow(4).mean() / energy.pow(2) - 1).sqrt()
    for axis in (0, 1):
        sums = x_MN.pow(2).mean(axis)
        if sums.std() / energy > EVEN * spread / x_MN.shape[axis] ** 0.5:
            return False
    v_N = torch.ones(x_MN.shape[1])
    for _ in range(12):
        v_N = x_MN.T @ (x_MN @ (v_N / v_N.norm()))
    edge = energy.sqrt() * sum(size**0.5 for size in x_MN.shape)
    return bool(v_N.norm().sqrt() < EDGE * edge)


def judge_values(head: HeadFiles, target: Target | None, as_exported: bool = False) -> Iterator[Finding]:
    """The numbers of every tensor whose shape makes sense.

    Args:
        as_exported: whether the tensors are those that we exported: then little training is no damage, but a note.
    """

    def untrained(name: str, looks: str, verdict: str) -> Finding:
        return Finding(name, f"{looks}: {'as it was exported' if as_exported else verdict}", wrong=not as_exported)

    if "d2t" in head.tensors and head.tensors["d2t"].shape == (head.draft_vocab_size,):
        t2d_V = head.read("t2d") if "t2d" in head.tensors else None
        if t2d_V is not None and t2d_V.numel() != head.config.vocab_size:
            yield Finding("vocab_size", f"is {head.config.vocab_size}, but t2d has {t2d_V.numel()} entries")
        full = head.draft_vocab_size == head.config.vocab_size
        d2t_D = head.read("d2t")
        faults = list(map_faults(d2t_D, t2d_V, head.config.vocab_size))
        yield from (Finding("d2t", fault, SGLANG if full else BOTH) for fault in faults)
        if not faults and t2d_V is None and always_grows(d2t_D):
            said = "has offsets that always grow, as target ids would; there is no t2d that tells them apart"
            yield Finding("d2t", said, wrong=False)
    matrices: dict[str, bool] = {}
    ones, norms = [], 0
    for name, stored in sorted(head.tensors.items()):
        if not (stored.dtype and stored.dtype.is_floating_point) or not all(stored.shape) or name == "d2t":
            continue
        value = head.read(name)
        if not value.isfinite().all():
            yield Finding(name, "holds values that are not finite: every draft is garbage")
        elif name == "embed_tokens.weight":
            yield from _embedding(value, head, target)
        elif name.endswith("norm.weight") or name.startswith("fc_norm."):
            norms += 1
            if (value == 1).all():
                ones.append(name)
            elif value.min() == value.max():
                yield untrained(name, f"is {float(value.flatten()[0]):g} everywhere", "never trained, or lost")
        elif value.dim() == 2 and value.min() == value.max():
            yield untrained(name, f"is {float(value[0, 0]):g} everywhere", "never trained, or lost")
        elif value.dim() == 2:
            matrices[name] = looks_random(value)
    if ones and len(ones) == norms:
        yield untrained("norms", "are all exactly 1", "untrained, or trained in bf16, where updates round away")
    else:
        yield from (untrained(name, "is exactly 1 everywhere", "never trained, or lost") for name in ones)
    if matrices and all(matrices.values()):
        yield untrained("weights", "all matrices look freshly initialised", "nothing was trained")
    else:
        for name in TRAINED:
            if matrices.get(name):
                yield untrained(name, "looks freshly initialised", "not the trained tensor")


def _embedding(mine_VH: torch.Tensor, head: HeadFiles, target: Target | None) -> Iterator[Finding]:
    """An embedding of the head's own: vLLM keeps it, SGLang takes the target's."""
    name, its_VH = "embed_tokens.weight", None
    if target is not None and head.target_hidden_size == head.config.hidden_size:
        its_VH = target.load_embedding()
        if same_values(mine_VH, its_VH):
            yield Finding(name, "is the target's own: not needed", wrong=False)
            return
    if looks_random(mine_VH):
        yield Finding(name, "looks freshly initialised, and is used instead of the target's", VLLM)
    elif its_VH is None:
        yield Finding(name, "is the head's own; used as it is", VLLM, wrong=False)
    else:
        yield Finding(name, "differs from the target's, and is used as it is", VLLM, wrong=False)
    if its_VH is not None:
        yield Finding(name, "differs from the target's, which is used instead", SGLANG)
