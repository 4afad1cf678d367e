"""An exported MTP head is what both engines lay over a target; a target's own module goes back into a copy of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models.artefact import file_sha256, tensor_sha256
from models.card import Story, write_card
from models.checkpoint import describe, load_head, save_head
from models.config import DraftConfig, ExportConfig, TargetConfig
from models.doctor import diagnose
from models.errors import Refused
from models.export import export_head, load_export, weights_file
from models.mtp import MtpConfig
from models.native import load_native
from models.target import Target, describe_target
from tests.models.independent_mtp import ServedMtp
from tests.models.mtp_targets import described, random_head, save_native

STEPS = 4
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 128}
CASES: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "every head its own keys": {"num_key_value_heads": 4},
    "tied embeddings": {"tie_word_embeddings": True},
    "target's heads wider than the block's": {"head_dim": 24},
    "rope llama3": {"rope_parameters": LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    "rope linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
}


def saved(target_dir: Path, checkpoint: Path) -> tuple[Target, Any]:
    target = describe_target(TargetConfig(path=str(target_dir), dtype="float32"))
    head = random_head(MtpConfig.for_target(target, DraftConfig(algorithm="mtp")))
    checkpoint.mkdir(parents=True)
    save_head(checkpoint, head, describe(target))
    return target, head


def test_the_doctor_says_that_it_reads_another_kind(make_target, tmp_path):
    target, _ = saved(make_target(), tmp_path / "checkpoint")
    export_head(tmp_path / "checkpoint", tmp_path / "export", target, ExportConfig())
    for place, key in (
        (tmp_path / "export", "num_nextn_predict_layers"),
        (save_native("qwen3_5", tmp_path / "own"), "mtp_num_hidden_layers"),
    ):
        said = (
            f"{place} holds no EAGLE-3 head, the only kind that is read here: it is an MTP one \\({key} in config.json"
        )
        with pytest.raises(Refused, match=said):
            diagnose(place)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_b17_b33_b34_every_engines_reading_gives_the_trainers_logits(make_target, tmp_path, changes, engine):
    target_dir = make_target(**changes)
    target, head = saved(target_dir, tmp_path / "checkpoint")
    export_head(tmp_path / "checkpoint", tmp_path / "export", target, ExportConfig(dtype="float32"))
    embedding, lm_head = target.load_embedding(), target.load_lm_head()
    served = ServedMtp(tmp_path / "export", target_dir, engine, embedding, lm_head)
    torch.manual_seed(1)
    tokens, final = torch.randint(3, target.vocab_size, (30,)), torch.randn(30, target.hidden_size)
    rows = [torch.arange(29 - step) for step in range(STEPS)]
    with torch.no_grad():
        steps = head.unroll(tokens, final[:, None], torch.zeros(30, dtype=torch.int64), rows, embedding)
        ours = [step.hidden_RH @ lm_head.T for step in steps]
    read = 0
    for row in (0, 6, 20):
        positions = torch.arange(read, row + 1)
        logits, fed = served.forward(tokens[positions + 1], final[positions].double(), positions)
        torch.testing.assert_close(logits.float(), ours[0][positions], rtol=1e-5, atol=1e-5)
        read, hidden = row + 1, fed[-1:]
        for step in range(1, STEPS):
            logits, hidden = served.forward(tokens[row + 1 + step][None], hidden, torch.tensor([row + step]))
            torch.testing.assert_close(logits.float(), ours[step][row][None], rtol=1e-5, atol=1e-5)
        served.forget(STEPS - 1)
    assert served.used == served.weights.keys()


def test_b28_tensors_have_the_asked_dtype_and_neither_embedding_nor_output_head_is_among_them(make_target, tmp_path):
    target, head = saved(make_target(), tmp_path / "checkpoint")
    assert export_head(tmp_path / "checkpoint", tmp_path / "export", target, ExportConfig()) is True
    assert export_head(tmp_path / "checkpoint", tmp_path / "export", target, ExportConfig()) is False
    tensors, record = (
        load_file(tmp_path / "export/model.safetensors"),
        json.loads((tmp_path / "export/export.json").read_text()),
    )
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert not [name for name in tensors if "embed" in name or "lm_head" in name]
    assert {name: each["sha256"] for name, each in record["tensors"].items()} == {
        name: tensor_sha256(tensor) for name, tensor in tensors.items()
    }
    again, made_for = load_export(tmp_path / "export")
    assert again.config == head.config and made_for == describe(target)
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.bfloat16().float())
    export_head(tmp_path / "checkpoint", tmp_path / "b", target, ExportConfig())
    for file in ("model.safetensors", "config.json", "export.json"):
        assert file_sha256(tmp_path / "export" / file) == file_sha256(tmp_path / "b" / file)


@pytest.mark.parametrize("name", ["eagle3-then-mtp", "EAGLE-2", "dflash", "dspark"])
def test_a_run_whose_name_leads_vllm_astray_is_refused_and_told_which_word(make_target, tmp_path, name):
    target, _ = saved(make_target(), tmp_path / "checkpoint")
    with pytest.raises(Refused, match=r"since its path holds '(eagle3|eagle-|dflash|dspark)'; change name or root"):
        export_head(tmp_path / "checkpoint", tmp_path / name / "export", target, ExportConfig())
    with pytest.raises(Refused, match=r"since its path holds '.*'; change export\.push_to"):  # as its card names it
        settings = ExportConfig(push_to=f"me/{name}")
        export_head(tmp_path / "checkpoint", tmp_path / "export", target, settings)
    with pytest.raises(Refused, match=r"export\.dialect=speculators has no MTP heads"):
        export_head(tmp_path / "checkpoint", tmp_path / "export", target, ExportConfig(dialect="speculators", k=2))


def test_b41_the_card_has_the_commands_of_both_engines(make_target, tmp_path):
    target, _ = saved(make_target(), tmp_path / "checkpoint")
    directory = tmp_path / "export"
    export_head(tmp_path / "checkpoint", directory, target, ExportConfig())
    write_card(directory, Story.of(tmp_path, tmp_path / "checkpoint"), ExportConfig(base_model="o/t", k=2), "bfloat16")
    text = (directory / "README.md").read_text()
    assert (
        "vllm serve o/t --dtype bfloat16 --hf-overrides '{\"num_nextn_predict_layers\": 1}' --speculative-config "
        in text
    )
    assert '\'{"method": "mtp", "model": ".", "num_speculative_tokens": 2}\'' in text
    assert "--speculative-algorithm NEXTN" in text and "--speculative-num-draft-tokens 3" in text
    assert "# MTP draft head for o/t" in text and "- mtp" in text and "- eagle3" not in text


def test_b37_the_targets_own_module_goes_back_bit_for_bit_when_nothing_was_trained(tmp_path):
    target = described(save_native("qwen3_5", tmp_path / "target"))
    head = load_native(target, MtpConfig.for_target(target, DraftConfig(algorithm="mtp_native"), native=True))
    (tmp_path / "checkpoint").mkdir()
    save_head(tmp_path / "checkpoint", head, describe(target))
    assert load_head(tmp_path / "checkpoint")[0].config == head.config
    directory = tmp_path / "export"
    assert export_head(tmp_path / "checkpoint", directory, target, ExportConfig()) is True
    assert export_head(tmp_path / "checkpoint", directory, target, ExportConfig()) is False
    copy = described(directory)
    assert copy.files.keys() == target.files.keys()
    assert all(torch.equal(copy.read(name), target.read(name)) for name in target.files)
    again, made_for = load_export(directory)
    assert again.config == head.config and made_for == describe(target)
    assert weights_file(directory).name == "model-mtp.safetensors"
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 3}))
    with pytest.raises(Refused, match=r"config\.json was edited: .*mtp_num_hidden_layers"):
        load_export(directory)
    assert export_head(tmp_path / "checkpoint", directory, target, ExportConfig()) is True
    assert json.loads((directory / "config.json").read_text()) == config
    write_card(directory, Story.of(tmp_path, tmp_path / "checkpoint"), ExportConfig(base_model="o/t", k=2), "bfloat16")
    text = (directory / "README-mtp.md").read_text()
    assert (
        'vllm serve . --dtype bfloat16 --speculative-config \'{"method": "mtp", "num_speculative_tokens": 2}\'' in text
    )
    assert "speculative-draft-model-path" not in text
