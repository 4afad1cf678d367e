"""The model card of an export: what the head was made from, what it is worth, and how it is served.

Everything in it is read from what the stages left behind, so that two exports of a checkpoint have the same
card. The acceptance lengths are the evaluation's if it measured these very weights; without it they are what
the held-out documents gave while training, and the card says which of the two they are. It names no path of
the machine it was written on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from models.artefact import file_sha256, read_json, read_json_lines, write_bytes
from models.config import ExportConfig
from models.engines import HEADS, sglang_options, vllm_options
from models.serving import Remarks, remarks_on

HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")

USUAL_K = 3
"""Draft tokens in the commands of a head that was neither evaluated nor trained here."""


def _read(path: Path) -> dict[str, Any]:
    value = read_json(path) if path.exists() else {}
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True)
class Story:
    """What is known of a head beside its tensors; what was not left behind is empty.

    Attributes:
        state: state.json of its checkpoint: progress, feature contract, resolved configuration.
        training: manifest of the training it came from.
        validation: the line of metrics.jsonl with its acceptance on held-out documents.
        features: manifest of the feature store it was trained on.
        evaluation: summary.json of the evaluation, of whatever weights.
    """

    checkpoint: str
    state: dict[str, Any]
    training: dict[str, Any]
    validation: dict[str, Any]
    features: dict[str, Any]
    evaluation: dict[str, Any]

    @classmethod
    def of(cls, run: Path, checkpoint: Path) -> Story:
        """Read the story of a run's checkpoint; one from elsewhere has only what lies in it."""
        own = (run / "train").resolve() in checkpoint.resolve().parents
        state = _read(checkpoint / "state.json")
        step, lines = state.get("progress", {}).get("step"), read_json_lines(run / "train/metrics.jsonl") if own else []
        validation: dict[str, Any] = next((line for line in lines if line.get("step") == step and "val_al" in line), {})
        return cls(
            checkpoint=checkpoint.name,
            state=state,
            training=_read(run / "train/manifest.json") if own else {},
            validation=validation,
            features=_read(run / "features/manifest.json") if own else {},
            evaluation=_read(run / "eval/summary.json"),
        )

    def evaluated(self, weights: str) -> dict[str, Any]:
        """The evaluation, if it measured weights with this hash."""
        return self.evaluation if self.evaluation.get("weights") == weights else {}

    @cached_property
    def trained_steps(self) -> int | None:
        """Unroll steps the head was trained for."""
        return self.state.get("config", {}).get("objective", {}).get("unroll_steps")


def draft_tokens(story: Story, weights: str | None, settings: ExportConfig) -> int | None:
    """How many tokens to draft: what was asked for, the evaluation's best, or what the head was trained for."""
    evaluated = story.evaluated(weights) if weights else {}
    return settings.k or evaluated.get("best_k") or story.trained_steps


def public_name(given: str) -> str:
    """What a target is called where the card is read: its name on the hub, else that of its directory, never a path.

    Args:
        given: how the run named it, a directory or a name on the hub.
    """
    directory = Path(given).expanduser()
    if not directory.is_dir():
        return given
    known = _read(directory / "config.json").get("_name_or_path")
    if isinstance(known, str) and HUB_NAME.fullmatch(known) and not Path(known).exists():
        return known
    return directory.resolve().name


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _positions(values: list[float | None] | None) -> str:
    return ", ".join("n/a" if value is None else f"{value:.3f}" for value in values or []) or "n/a"


def _acceptance(name: str, measured: dict[str, Any]) -> list[str]:
    al = "n/a" if measured["al"] is None else f"{measured['al']:.3f}"
    return [name, al, _positions(measured.get("per_position")), str(measured["rounds"])]


def method_of_head(served: Mapping[str, Any]) -> str | None:
    """The name under which a served evaluation measured the exported head; None where only others drafted.

    Args:
        served: section of summary.json. One from before methods were compared names none, and has the head alone.
    """
    name = served.get("head", "eagle3")
    method = served.get("methods", {}).get(name, {}).get("method", name)
    return name if method in HEADS else None


def worth(story: Story, weights: str) -> str:
    """The section on acceptance, from the evaluation or else from the validation."""
    if measured := story.evaluated(weights):
        reference, served = measured["reference"], measured.get("served") or {}
        text = ""
        if reference is not None:
            rows = [_acceptance("all", reference)]
            rows += [_acceptance(route, each) for route, each in sorted(reference["routes"].items())]
            how = reference.get("how") or f"greedy, k = {measured['k']}"
            text = (
                "Mean acceptance length (AL: tokens per forward of the target, the bonus token included), "
                f"{how}, measured by draftsmith's reference decoder:\n\n"
                + _table(["route", "AL", "acceptance by position", "drafting rounds"], rows)
                + "\n\n"
            )
        method = method_of_head(served)
        cells = [cell for cell in served.get("cells", []) if cell["method"] == method and cell["route"] == "all"]
        if cells:
            told = [
                [str(c["concurrency"]), "n/a" if c["al"] is None else f"{c['al']:.3f}", str(c["output_tokens_per_s"])]
                for c in cells
            ]
            text += (
                f"In {served['engine']} {served['version']} ({served['dtype']}, k={served['k']}, "
                f"{measured['machine']}):\n\n" + _table(["concurrency", "AL", "tokens/s"], told)
            )
        return text.rstrip() or "Evaluated without the head: n/a."
    if story.validation:
        sampled = story.validation.get("val_al_sampled")
        return (
            f"Not evaluated{' with these weights' if story.evaluation else ' yet'}. On held-out documents at this "
            f"checkpoint of the training, on the target's own answers and by simulation, not by routes: AL "
            f"{story.validation['val_al']:.3f} greedy"
            + (f", {sampled:.3f} sampled" if sampled is not None else "")
            + f"; accuracy by position {_positions(story.validation.get('val_accuracy'))}."
        )
    return "Not evaluated, and its training left no validation here: n/a."


def serving(
    config: dict[str, Any], settings: ExportConfig, k: int, dtype: str, head: dict[str, Any] | None, remarks: Remarks
) -> str:
    """The section with the commands, for a target of a family with these remarks.

    Args:
        head: of an MTP head, what export.json says of it.
    """
    directory, target = settings.push_to or ".", settings.base_model
    method, native = ("eagle3", False) if head is None else ("mtp", bool(head["native"]))
    served, model = (directory, None) if native else (target, directory)
    options = vllm_options(method, model, k).items()
    arguments = [f"--dtype {dtype}", *remarks.vllm_arguments]
    vllm = " ".join([f"vllm serve {served}", *arguments, *(f"{name} '{json.dumps(each)}'" for name, each in options)])
    words = [f"{name} {value}" for name, value in sglang_options(method, model, k).items()]
    lines = [f"python -m sglang.launch_server --model-path {served} --dtype {dtype} {words[0]}"]
    lines += [" ".join(words[first : first + 3]) for first in range(1, len(words), 3)]
    sglang = " \\\n    ".join(lines)
    where = "" if settings.push_to else " from inside this directory"
    stands = f"`{target}` stands for the target's own directory. "
    named = "" if native or HUB_NAME.fullmatch(str(target)) else stands
    if reason := remarks.unserved.get("vLLM"):
        text = named + f"vLLM does not serve this target with a head: {reason}.\n\n"
    else:
        text = named + f"With vLLM{where}:\n\n```bash\n{vllm}\n```\n\n"
    if "speculators_config" in config:
        return text + "SGLang does not read this dialect (speculators); export it with `export.dialect=plain`."
    if reason := remarks.unserved.get("SGLang"):
        return text + f"SGLang does not serve this target with a head: {reason}."
    return text + f"With SGLang{where}:\n\n```bash\n{sglang}\n```"


def _made_from(story: Story) -> str:
    contract = story.state.get("features", {})
    facts = {
        "target configuration": contract.get("target_config"),
        "target weights": contract.get("target_weights"),
        "tokenizer and chat template": contract.get("tokenizer"),
        "features by": " ".join(str(contract[key]) for key in ("backend", "backend_version") if contract.get(key)),
        "plane encoding": contract.get("encoding"),
    }
    facts |= {
        key: ", ".join(map(str, value)) if isinstance(value, list) else value
        for key, value in story.features.get("inputs", {}).items()
        if "contents" in key
    }
    rows = [[key, f"`{value}`"] for key, value in facts.items() if value]
    return _table(["what", "fingerprint"], rows) if rows else "This checkpoint does not say what it was trained on."


def _trained(story: Story) -> str:
    config, training = story.state.get("config", {}), story.training
    objective, optim, trainer = (config.get(key, {}) for key in ("objective", "optim", "trainer"))
    data, totals = training.get("data", {}), story.features.get("totals", {})
    facts = {
        "checkpoint": story.checkpoint,
        "optimizer steps of the run": training.get("steps"),
        "documents": data.get("training"),
        "held-out documents": data.get("validation"),
        "tokens": data.get("tokens"),
        "supervised rows": data.get("rows"),
        "supervised tokens in the features": totals.get("supervised_tokens"),
        "share of supervised tokens in the draft vocabulary": training.get("coverage"),
        "unroll steps": objective.get("unroll_steps"),
        "epochs": trainer.get("epochs"),
        "precision": trainer.get("precision"),
        "learning rate": optim.get("lr"),
    }
    return _table(["what", "value"], [[key, str(value)] for key, value in facts.items() if value is not None])


def _planes(config: dict[str, Any]) -> str:
    if ids := config.get("eagle_aux_hidden_state_layer_ids"):
        return f"the target's residual stream after {ids} layers"
    return "the target's last hidden state, after its final norm"


def _eagle3_shape(config: dict[str, Any], layer: dict[str, Any]) -> list[list[str]]:
    vocabulary, draft = layer["vocab_size"], config["draft_vocab_size"]
    flags = [key for key in ("norm_before_fc", "fc_norm", "norm_output") if config[key]]
    return [
        ["algorithm", f"EAGLE-3{'.1' if flags else ''}, one layer, {', '.join(flags) or 'no extra norms'}"],
        ["hidden size, MLP, heads", f"{layer['hidden_size']}, {layer['intermediate_size']}, "
         f"{layer['num_attention_heads']} of {layer['head_dim']} ({layer['num_key_value_heads']} for keys and values)"],
        ["planes", _planes(config)],
        ["vocabulary", f"{draft} of {vocabulary} tokens" if draft < vocabulary else f"all {vocabulary} tokens"],
        ["dtype", config["torch_dtype"]],
    ]  # fmt: skip


def _mtp_shape(head: dict[str, Any], record: dict[str, Any]) -> list[list[str]]:
    block, dtypes = head["block"], sorted({tensor["dtype"] for tensor in record["tensors"].values()})
    return [
        ["algorithm", f"multi-token prediction, one module of the family {head['family']}"],
        ["hidden size, heads", f"{block['hidden_size']}, {block['num_attention_heads']}"],
        ["planes", _planes({})],
        ["vocabulary", f"all {block['vocab_size']} tokens; embedding and output head are the target's"],
        ["dtype", ", ".join(dtype.removeprefix("torch.") for dtype in dtypes)],
    ]


def card_text(directory: Path, story: Story, settings: ExportConfig, dtype: str) -> str:
    """The card of the export in `directory`.

    Args:
        settings: with base_model filled in.
        dtype: the dtype the target is served in.
    """
    config, record = read_json(directory / "config.json"), read_json(directory / "export.json")
    file, head = record.get("file", "model.safetensors"), record.get("head")
    weights, layer = file_sha256(directory / file), config.get("transformer_layer_config", config)
    k = draft_tokens(story, weights, settings)
    front = [f"license: {json.dumps(settings.license)}"] if settings.license else []
    if HUB_NAME.fullmatch(settings.base_model or ""):
        front.append(f"base_model: {settings.base_model}")
    front += ["tags:", "- speculative-decoding", "- mtp" if head else "- eagle3"]
    shape = [
        ["target", f"{settings.base_model}"],
        *(_mtp_shape(head, record) if head else _eagle3_shape(config, layer)),
        ["made for the target with", f"`{record['target']['config_hash']}` (configuration), "
         f"`{record['target']['weights_hash']}` (weights)"],
        [f"sha256 of {file}", f"`{weights}`"],
    ]  # fmt: skip
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "safetensors")}
    guess = "" if k else f" The k of {USUAL_K} is a usual start: this head was neither evaluated nor trained here."
    parts = [
        "---\n" + "\n".join(front) + "\n---",
        f"# {'MTP' if head else 'EAGLE-3'} draft head for {settings.base_model}",
        "A draft head for speculative decoding: it proposes tokens that the target then accepts or replaces, so the "
        "output stays the target's. "
        + (
            f"It is the target's own module, trained on, in {file} of a copy of the target."
            if head and head["native"]
            else "It holds no embedding and works with this target only."
        ),
        _table(["what", "value"], shape),
        "## Serving",
        serving(config, settings, k or USUAL_K, dtype, head, remarks_on(record.get("target_type"))) + guess,
        "## What it is worth",
        worth(story, weights),
        "## What it was made from",
        _made_from(story),
        "## Training",
        _trained(story),
        "## License and versions",
        f"License: {settings.license or 'not stated'}. Written by draftsmith with "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + ". The hash and origin of every tensor are in `export.json`.",
    ]
    return "\n\n".join(parts) + "\n"


def holds_target(directory: Path) -> bool:
    """Whether an export is a copy of the target with its own module trained on."""
    return bool(_read(directory / "export.json").get("head", {}).get("native"))


def write_card(directory: Path, story: Story, settings: ExportConfig, dtype: str) -> bool:
    """Write README.md into an export; False when it says the same already."""
    path = directory / ("README-mtp.md" if holds_target(directory) else "README.md")  # its own README is the target's
    text = card_text(directory, story, settings, dtype).encode()
    if path.exists() and path.read_bytes() == text:
        return False
    write_bytes(path, text)
    return True
