"""A run's figures as one picture: loss, accuracy, simulated AL, learning rate and gradient norm over optimizer steps.

Figures of single steps jump with the documents in them, so each is drawn faintly, behind its moving average.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.artefact import replacing
from train.measure import Journal

REACH = 4
"""Lines of the journal before and behind a point that its moving average takes in; short runs are drawn as they are."""


def smooth(values: Sequence[float]) -> list[float]:
    """The mean of each value and its neighbours, up to REACH on either side."""
    windows = (values[max(0, middle - REACH) : middle + REACH + 1] for middle in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _trace(panel: Any, points: Sequence[tuple[int, float]], color: Any, label: str | None = None) -> None:
    """One quantity, faint, and its moving average."""
    if not points:
        return
    steps, values = zip(*points, strict=True)
    many = len(values) > 4 * REACH
    if many:
        panel.plot(steps, values, lw=0.8, alpha=0.3, color=color)
    panel.plot(steps, smooth(values) if many else values, "-" if many else ".-", lw=1.5, color=color, label=label)


def draw_curves(journal: Path, picture: Path, best_step: int | None = None) -> None:
    """Draw the figures of a journal to a PNG file.

    Args:
        journal: metrics.jsonl.
        best_step: of the checkpoint that is exported, to be marked.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    lines = Journal.read(journal)
    training = [line for line in lines if "loss" in line]
    validation = [line for line in lines if "val_al" in line]
    figure, ((losses, accuracies), (lengths, rates)) = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    shades = plt.get_cmap("viridis")
    for panel, key, title, unit in (
        (losses, "loss_per_step", "Loss (training)", "loss"),
        (accuracies, "accuracy", "Accuracy (training)", "share of rows with the target's token"),
    ):
        steps = len(training[0][key]) if training else 0
        for k in range(steps):
            known = [(line["step"], line[key][k]) for line in training if line[key][k] is not None]
            _trace(panel, known, shades(0.9 * k / max(1, steps - 1)), f"unroll step {k}")
        panel.set(title=title, ylabel=unit)
    accuracies.set_ylim(0, 1)

    at = [line["step"] for line in validation]
    for key, style, label in (("val_al", "o-", "greedy"), ("val_al_sampled", "s--", "sampled")):
        lengths.plot(at, [line[key] for line in validation], style, lw=1.5, ms=5, label=label)
    for line in validation:
        if line["step"] == best_step:
            lengths.plot(
                best_step, line["val_al"], "*", ms=16, color="tab:red", label=f"best: {line['val_al']:.2f}", zorder=3
            )
    lengths.set(title="Simulated acceptance length (held out)", ylabel="tokens per target forward")

    _trace(rates, [(line["step"], line["grad_norm"]) for line in training], "tab:gray")
    rates.set(title="Gradient norm and learning rate")
    rates.set_ylabel("gradient norm", color="dimgray")
    rates.set_ylim(bottom=0)
    twin = rates.twinx()
    twin.plot(
        [line["step"] for line in training], [line["lr"] for line in training], ".-", ms=2, lw=1.5, color="tab:red"
    )
    twin.set_ylabel("learning rate", color="tab:red")
    twin.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    twin.set_ylim(bottom=0)
    for panel in (losses, accuracies, lengths, rates):
        panel.set_xlabel("optimizer step")
        panel.set_xlim(0, max([line["step"] for line in lines], default=1) * 1.03)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.3)
        if panel.get_legend_handles_labels()[1]:
            panel.legend(fontsize=8, ncols=2 if panel in (losses, accuracies) else 1)
    with replacing(picture) as temporary:
        figure.savefig(temporary, dpi=130, format="png")
    plt.close(figure)
