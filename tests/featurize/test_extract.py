"""Planes are the target's own, row for row, whatever shares a batch; the canary sees when they are not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import featurize.extract
from featurize.canary import choose_documents, reference, run_canary
from featurize.config import DataConfig
from featurize.extract import Backend, batches, check_rows, extract_unit, load_backend
from featurize.shards import Widths, check_space, cut_units, teacher_positions
from featurize.tokenised import Document, TokenisedSet, load_renderer, tokenise
from models.config import TargetConfig
from models.errors import Refused
from models.target import Target, describe_target
from tests.models.test_export_families import FAMILIES, family

LAYERS = (1, 4, 7)


@pytest.fixture(scope="module")
def backend(target: Target, settings: TargetConfig) -> Backend:
    return load_backend(target, settings, LAYERS, "cpu")


@pytest.fixture(scope="module")
def tokenised(target: Target, settings: TargetConfig, tiny_conversations: Path) -> TokenisedSet:
    return tokenise(DataConfig([str(tiny_conversations)]), load_renderer(target, settings), "key")


def plain_planes(backend: Backend, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Aux planes [T, A, H] and final plane [T, H] of one document from transformers itself, in bf16."""
    with torch.no_grad():
        states = backend.model(input_ids=ids.long()[None], output_hidden_states=True).hidden_states
    aux = torch.stack([states[layer][0] for layer in LAYERS], dim=1)
    return aux.bfloat16(), states[-1][0].bfloat16()


@pytest.mark.parametrize("name", FAMILIES)
def test_targets_of_every_family_can_be_run(name: str, tmp_path: Path) -> None:
    model = family(name, tmp_path)
    settings = TargetConfig(path=str(tmp_path), dtype="float32")
    backend = load_backend(describe_target(settings), settings, LAYERS, "cpu")
    rows = [torch.arange(3, 9), torch.arange(4, 40)]
    aux, final = backend.planes(featurize.extract.pad(rows))
    for row, ids in enumerate(rows):
        with torch.no_grad():
            states = model(input_ids=ids[None], output_hidden_states=True).hidden_states
        for ours, wanted in zip((*aux, final), (states[1], states[4], states[7], states[-1]), strict=True):
            torch.testing.assert_close(ours[row, : len(ids)], wanted[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch_tokens", [1, 200, 100_000])
def test_b10_row_i_belongs_to_token_i_for_any_batch_size(
    backend: Backend, tokenised: TokenisedSet, batch_tokens: int
) -> None:
    (unit,) = cut_units(tokenised, 10**9)
    done: list[int] = []
    tokens, aux, final = extract_unit(backend, tokenised, unit, batch_tokens, 64, done.append)
    assert torch.equal(tokens, tokenised.tokens)
    assert sum(done) == unit.tokens == len(aux)
    assert len(final) == unit.finals
    teacher = 0
    for index, document in enumerate(tokenised.documents):
        rows = slice(tokenised.starts[index], tokenised.starts[index + 1])
        aux_alone, final_alone = plain_planes(backend, tokenised.ids(index))
        torch.testing.assert_close(aux[rows], aux_alone, rtol=1e-2, atol=1e-4)
        own = final[teacher : teacher + document.teachers]
        torch.testing.assert_close(own, final_alone[teacher_positions(document)], rtol=1e-2, atol=1e-3)
        teacher += document.teachers


def test_b10_documents_that_share_a_prefix_do_not_disturb_each_other(backend: Backend) -> None:
    shared = torch.arange(20, 60, dtype=torch.int32)
    rows = [torch.cat([shared, torch.arange(70 + 9 * i, 75 + 11 * i, dtype=torch.int32)]) for i in range(6)]
    aux, final = backend.planes(featurize.extract.pad(rows))
    for row, ids in enumerate(rows):
        aux_alone, final_alone = plain_planes(backend, ids)
        ours = torch.stack([plane[row, : len(ids)] for plane in aux], dim=1).bfloat16()
        torch.testing.assert_close(ours, aux_alone, rtol=1e-2, atol=1e-4)
        torch.testing.assert_close(final[row, : len(ids)].bfloat16(), final_alone, rtol=1e-2, atol=1e-3)


def test_b09_the_final_plane_through_the_head_gives_the_models_own_logits(
    backend: Backend, tokenised: TokenisedSet
) -> None:
    ids = tokenised.ids(0).long()[None]
    _, final = backend.planes(ids)
    with torch.no_grad():
        torch.testing.assert_close(backend.model.lm_head(final), backend.model(input_ids=ids).logits)


def test_batches_hold_every_document_once_within_their_bound_and_with_little_padding() -> None:
    lengths = [3 + (7 * i) % 40 for i in range(100)] + [500]
    made = list(batches(lengths, 200))
    assert sorted(i for batch in made for i in batch) == list(range(101))
    assert all(len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 200 for batch in made)
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in made)
    assert padded < 1.1 * sum(lengths)


def test_teacher_positions_stop_before_the_last_token_of_each_span() -> None:
    document = Document("a", "", 20, ((3, 7), (12, 14)))
    assert teacher_positions(document).tolist() == [3, 4, 5, 12]
    assert document.teachers == 4


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), float("-inf")])
def test_rows_of_zeros_and_non_finite_values_stop_the_run(value: float) -> None:
    plane = torch.ones(5, 4, dtype=torch.bfloat16)
    check_rows(plane, "plane 2", "doc")
    plane[3] = value
    with pytest.raises(Refused, match="plane 2 of document doc has 1 of 5 rows that are zero or not finite"):
        check_rows(plane, "plane 2", "doc")


def test_the_canary_takes_no_more_memory_than_the_extraction_after_it(
    backend: Backend, tokenised: TokenisedSet
) -> None:
    sizes = []

    class Seen(Backend):
        def planes(self, ids_BL: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
            sizes.append(ids_BL.numel())
            return super().planes(ids_BL)

    run_canary(Seen(**vars(backend)), tokenised, 8, reference(backend.model), 120)
    assert len(sizes) > 1 and max(sizes) <= 120


def test_the_canary_passes_and_reports_documents_of_all_lengths(backend: Backend, tokenised: TokenisedSet) -> None:
    report = run_canary(backend, tokenised, 4, reference(backend.model), 2048)
    lengths = [document.length for document in tokenised.documents]
    assert report["lengths"][0] == min(lengths)
    assert report["lengths"][-1] == max(lengths)
    assert report["argmax_agreement"] > 0.98
    assert set(report["planes"]) == {"plane 1", "plane 4", "plane 7", "the final plane"}
    assert all(plane["median_relative_error"] < 0.005 for plane in report["planes"].values())
    assert choose_documents(tokenised, 1000) == choose_documents(tokenised, len(lengths))


class Shifted(Backend):
    """A backend whose second plane leaves one layer too late."""

    def planes(self, ids_BL: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        aux, final = super().planes(ids_BL)
        other, _ = dataclasses.replace(Backend(**vars(self)), aux_layers=(5,)).planes(ids_BL)
        return [aux[0], other[0], aux[2]], final


class PreNorm(Backend):
    """A backend whose final plane was taken before the final norm."""

    def planes(self, ids_BL: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        norm = self.model.get_decoder().norm
        self.model.get_decoder().norm = nn.Identity()
        try:
            return super().planes(ids_BL)
        finally:
            self.model.get_decoder().norm = norm


class Mixed(Backend):
    """A backend whose rows belong to another document of the batch."""

    def planes(self, ids_BL: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        aux, final = super().planes(ids_BL)
        return [plane.roll(1, 0) for plane in aux], final.roll(1, 0)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Shifted, r"plane 4 differs .* by [\d.]+ .*plane 5 is nearer"),
        (PreNorm, r"the final plane differs from a plain forward by [\d.]+"),
        (Mixed, r"plane 1 differs from a plain forward by [\d.]+"),
    ],
)
def test_b09_the_canary_stops_on_a_wrong_plane_and_names_it(
    backend: Backend, tokenised: TokenisedSet, kind: Any, message: str
) -> None:
    with pytest.raises(Refused, match=message):
        run_canary(kind(**vars(backend)), tokenised, 4, reference(backend.model), 2048)


def test_what_cannot_fit_is_refused_before_it_starts(
    tokenised: TokenisedSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    units = cut_units(tokenised, 500)
    widths = Widths(64, 3, "bf16")
    check_space(tmp_path, tokenised, units, units[1:], widths)
    said = capsys.readouterr().out
    assert f"{len(tokenised.documents)} documents" in said
    assert f"{len(units) - 1} shards" in said
    needed = sum(unit.tokens * (4 + 3 * 64 * 2) + unit.finals * 64 * 2 for unit in units)
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("Usage", (), {"free": needed})())
    check_space(tmp_path, tokenised, units, units[1:], widths)
    with pytest.raises(Refused, match="GB free and .* are needed"):
        check_space(tmp_path, tokenised, units, units, widths)
    check_space(tmp_path, tokenised, units, units, Widths(64, 3, "int8"))


def test_a_target_that_cannot_be_loaded_is_refused(target: Target, settings: TargetConfig, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((Path(target.path) / "config.json").read_bytes())
    with pytest.raises(Refused, match="cannot be loaded"):
        load_backend(dataclasses.replace(target, path=str(tmp_path)), settings, LAYERS, "cpu")
    with pytest.raises(Refused, match="holds no usable tokenizer"):
        load_renderer(dataclasses.replace(target, path=str(tmp_path)), settings)
    with pytest.raises(Refused, match="featurize.device=nonsense is no device of torch"):
        load_backend(target, settings, LAYERS, "nonsense")


class Broken(Backend):
    """A backend whose second plane is what `broken` makes of it."""

    broken: Any = None

    def planes(self, ids_BL: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        aux, final = super().planes(ids_BL)
        return [aux[0], self.broken(aux[1]), aux[2]], final


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (torch.zeros_like, "plane 4 is zero"),
        (lambda plane: plane * torch.inf, "plane 4 has values that are not finite"),
        (lambda plane: plane[:, :1].expand_as(plane), "plane 4 has the same values for all"),
        (lambda plane: plane[:, :-1], "plane 4 has .* rows for .* tokens"),
    ],
)
def test_the_canary_refuses_planes_without_content_and_with_missing_rows(
    backend: Backend, tokenised: TokenisedSet, monkeypatch: pytest.MonkeyPatch, broken: Any, message: str
) -> None:
    monkeypatch.setattr(Broken, "broken", staticmethod(broken))
    with pytest.raises(Refused, match=message):
        run_canary(Broken(**vars(backend)), tokenised, 4, reference(backend.model), 2048)
