"""experiment=demo_mtp in small: an MTP head trained on another run's features, evaluated, and shown beside its head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import conf
import featurize.__main__ as featurize_stage
import serve_eval.__main__ as serve_eval_stage
from models.checkpoint import describe
from models.errors import Refused
from models.export import export_head, find_checkpoint
from models.target import describe_target
from tests.train.runs import overrides, train_here


def export(run: conf.Run) -> None:
    checkpoint = find_checkpoint(run.directory / "train", "best")
    export_head(checkpoint, run.directory / "export", describe_target(run.target), run.export)


def test_acceptance_of_both_heads_by_route_is_in_one_table(
    tiny_target_dir: Path,
    tiny_conversations: Path,
    tiny_prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    common = [
        *overrides(tiny_target_dir, tiny_conversations, tmp_path),
        "featurize.final_everywhere=true",
        "trainer.epochs=1",
        "engine.kind=none",
        f"eval.prompts=[{tiny_prompts}]",
        "eval.k=2",
        "eval.max_new_tokens=12",
    ]
    first = [*common, "name=first"]
    second = [*common, "name=second", "features_of=first", "draft.algorithm=mtp", "draft.vocab_size=null"]
    second.append("eval.compare_with=[first]")
    with pytest.raises(Refused, match="features_of=first names the run whose features these are"):
        featurize_stage.work(conf.load(second))
    with pytest.raises(
        Refused, match=r"no features in .*/first/features; run `python -m featurize` for run first first, or correct f"
    ):
        train_here(second)
    with pytest.raises(Refused, match="features_of=second is the run itself"):
        train_here([*second, "features_of=second"])
    for draft in ("algorithm=mtp", "algorithm=mtp_native", "use_aux_hidden_state=false"):
        with pytest.raises(Refused, match=r"at every position; set featurize\.final_everywhere=true"):
            featurize_stage.work(conf.load([*first, "featurize.final_everywhere=false", f"draft.{draft}"]))
    featurize_stage.work(conf.load(first))
    for arguments in (first, second):
        assert train_here(arguments) is True
        export(conf.load(arguments))
    assert (tmp_path / "second/features").resolve() == (tmp_path / "first/features").resolve()
    with pytest.raises(Refused, match="second/features is that of run first, not of features_of=third; choose another"):
        train_here([*second, "features_of=third"])
    with pytest.raises(Refused, match=r"run first is not evaluated; run `python -m serve_eval` for it first"):
        serve_eval_stage.main(conf.load(second))
    assert serve_eval_stage.main(conf.load(first)) is True
    capsys.readouterr()
    assert serve_eval_stage.main(conf.load(second)) is True
    told = capsys.readouterr().out
    summaries = [json.loads((tmp_path / name / "eval/summary.json").read_text()) for name in ("first", "second")]
    (beside,) = summaries[1]["compared"]
    assert beside["al"] == summaries[0]["reference"]["al"] and beside["routes"].keys() == {"chat", "json"}
    assert summaries[1]["kind"] == "MTP" and beside["kind"] == "EAGLE-3"
    assert "AL of heads, k = 2" in told and "EAGLE-3 (first)" in told
    page = (tmp_path / "second/eval/report.html").read_text()
    assert "Acceptance length of heads, k = 2" in page and "<th>EAGLE-3 (first)</th>" in page
    lossless = summaries[1]["lossless"]["reference"]
    assert lossless["identical"] == lossless["prompts"]
    assert serve_eval_stage.main(conf.load(second)) is False
    other_prompts, other_target = tmp_path / "prompts.jsonl", tmp_path / "target"
    other_prompts.write_text(tiny_prompts.read_text().replace('"content": "', '"content": "one more word: '))
    shutil.copytree(tiny_target_dir, other_target)
    tensors = load_file(other_target / "model.safetensors")
    tensors["model.norm.weight"] *= 1.01
    save_file(tensors, other_target / "model.safetensors", {"format": "pt"})
    for change in ("k=3", "max_new_tokens=8", "drafting.temperature=1.0", f"prompts=[{other_prompts}]"):
        with pytest.raises(Refused, match="run first was evaluated with another target, on other prompts, with ano"):
            serve_eval_stage.main(conf.load([*second, f"eval.{change}"]))
    over_another = conf.load([*second, f"target.path={other_target}"])
    record = tmp_path / "second/export/export.json"
    made_for = describe(describe_target(over_another.target))
    record.write_text(json.dumps(json.loads(record.read_text()) | {"target": made_for}))
    with pytest.raises(Refused, match="run first was evaluated with another target"):
        serve_eval_stage.main(over_another)
