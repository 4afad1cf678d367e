"""The arithmetic that conf/ states in comments, from the code that sizes the work."""

from __future__ import annotations

import conf
from conf import Run
from featurize.shards import Unit, Widths
from featurize.tokenised import Document
from models.eagle3 import Eagle3Config
from models.target import aux_layers
from tests.conf.shapes import described
from train.dry_run import ASSUMED
from train.plan import Corpus, Costs
from train.sizes import memory, parameters

PACK, SUPERVISED, DRAFT, STEPS = 8192, 0.5, 32_000, 7
"""What the memory stated of a target is for."""


def widths(run: Run, name: str, encoding: str) -> Widths:
    """Of the run's planes of a target."""
    target = described(name)
    return Widths(target.hidden_size, len(aux_layers(target, run.target.aux_layers)), encoding)


def of_target(name: str) -> list[str]:
    """Lines on a target: shape, aux planes, disk, memory."""
    run = conf.load(["name=a", f"target={name}", f"draft.vocab_size={DRAFT}", f"objective.unroll_steps={STEPS}"])
    target = described(name)
    layers = aux_layers(target, run.target.aux_layers)
    head = Eagle3Config.for_target(target, layers, run.draft)
    sizes = []
    for encoding in ("bf16", "int8", "int4"):
        whole, prompt = (widths(run, name, encoding).bytes([unit(10**6, n)]) / 10**9 for n in (10**6, 0))
        sizes.append(f"{encoding} {whole:.1f} / {prompt:.1f}")
    run.trainer.pack_tokens = PACK
    taken = memory(head, run.objective, run.trainer, rows=round(PACK * SUPERVISED))
    return [
        f"# {target.num_layers} layers, hidden size {target.hidden_size}, vocabulary {target.vocab_size:,}; "
        f"aux planes by the default rule: {', '.join(map(str, layers))}.",
        f"# Disk, KB per token of an answer / of a prompt: {', '.join(sizes)}.",
        f"# Head of {parameters(head) / 1e9:.2f}e9 weights. Training, ddp, packs of {PACK:,} tokens, half supervised: "
        f"{taken.total / 1e9:.0f} GB a GPU, {taken.state / 1e9:.0f} of them weights,",
        "# gradients and AdamW in fp32 (draft vocabulary 32,000, 7 steps; train/sizes.py).",
    ]


def unit(tokens: int, teachers: int) -> Unit:
    """A shard of that size, without its table of channels counting."""
    return Unit(0, 0, 1, tokens, teachers, False, "")


def of_experiment(
    name: str, target: str, conversations: int, length: int, share: float, processes: int, billions: float
) -> list[str]:
    """Lines on an experiment: the data it is stated for, disk, memory and hours.

    Args:
        billions: parameters that a token of the target passes through, from its name.
    """
    run = conf.load([f"experiment={name}"])
    head = Eagle3Config.for_target(described(target), aux_layers(described(target), run.target.aux_layers), run.draft)
    tokens, spoken = conversations * length, round(conversations * length * share)
    size = widths(run, target, run.featurize.encoding).bytes([unit(tokens, spoken)])
    answer = round(length * share)
    document = Document("a", "b", length, ((length - answer, length),))
    corpus = Corpus.of([document], Costs.of(head, run.objective.row_share), run.objective.unroll_steps)
    flop = 6 * float(corpus.work_N[0]) * conversations * run.trainer.epochs
    passed = 2 * billions * 1e9 * tokens
    taken = memory(head, run.objective, run.trainer, rows=round(run.trainer.pack_tokens * share), processes=processes)
    rate = f"({processes} x {ASSUMED / 1e12:.0f} TFLOP/s)" if processes > 1 else f"{ASSUMED / 1e12:.0f} TFLOP/s"
    return [
        f"# Arithmetic for {conversations:,} conversations of {length:,} tokens, {share:.0%} of them the target's "
        "(tests/conf/test_arithmetic.py):",
        f"#   disk: {size / 1e12:.2f} TB ({run.featurize.encoding}).",
        f"#   memory of a GPU in training: {taken.total / 1e9:.0f} GB; weights, gradients, AdamW "
        f"{taken.state / 1e9:.0f}, positions {taken.positions / 1e9:.0f}, rows {taken.rows / 1e9:.0f}.",
        f"#   extraction: {passed / ASSUMED / processes / 3600:.1f} h, unmeasured estimate: "
        f"2 x {billions:g}e9 x tokens = {passed:.1e} FLOP / {rate}.",
        f"#   training: {flop / ASSUMED / processes / 3600:.1f} h, unmeasured estimate: {flop:.1e} FLOP / {rate}.",
    ]
