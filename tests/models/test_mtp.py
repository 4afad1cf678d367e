"""An unrolled MTP head equals the target family's module stepped one token at a time, as a server steps it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from models import attention, unroll
from models.mtp import MtpConfig, MtpHead
from tests.models.mtp_targets import FAMILIES, config_for, random_head, save_plain

STARTS_T = torch.tensor([0] * 11 + [11] * 9)
ROWS = [[0, 1, 2, 5, 6, 7, 8, 13, 14, 15], [0, 1, 5, 6, 7, 13, 14], [0, 5, 6, 13], [5]]
"""Two documents; spans 1..4, 6..10 and 14..17 of the pack, the first from its first token on."""


@pytest.fixture(scope="module")
def configured(tmp_path_factory) -> Callable[[str], MtpConfig]:
    """The head's configuration of each family over its tiny target."""
    known: dict[str, MtpConfig] = {}

    def get(family: str) -> MtpConfig:
        if family not in known:
            known[family] = config_for(family, save_plain(family, tmp_path_factory.mktemp(family)))
        return known[family]

    return get


@pytest.fixture
def exact_norms(monkeypatch) -> Callable[[MtpHead, str], None]:
    """transformers' norms round to fp32 on their way; within the test those of a head's family do not."""

    def patch(head: MtpHead, family: str) -> None:
        def forward(norm: Any, x: torch.Tensor) -> torch.Tensor:
            eps = norm.eps if FAMILIES[family].plus_one else norm.variance_epsilon
            return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * (norm.weight + FAMILIES[family].plus_one)

        monkeypatch.setattr(type(head.final_norm), "forward", forward)

    return patch


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of two rows, so that this small pack has several."""
    monkeypatch.setattr(attention, "BLOCK_ROWS", 2)


class Sequential:
    """A module as its family defines it: transformers' layer with its own attention and a causal mask."""

    def __init__(self, head: MtpHead, family: str, attention: str = "eager") -> None:
        self.facts, self.weights = FAMILIES[family], head.state_dict(keep_vars=True)
        block = type(head.layer.self_attn.config).from_dict(head.config.block)
        block._attn_implementation, block._experts_implementation = attention, "eager"
        index = 2 if family in ("deepseek_v3", "glm4_moe") else 0  # the module counts as a third layer
        self.layer, self.rotary = (
            getattr(importlib.import_module(f"transformers.models.{path}"), name)(*arguments)
            for (path, _, name), *arguments in (
                (self.facts.layer.rpartition("."), block, index),
                (self.facts.rotary.rpartition("."), block),
            )
        )
        # The very parameters of the head, so that gradients reach them.
        for name, parameter in self.weights.items():
            if name.startswith("layer."):
                owner = self.layer.get_submodule(name.removeprefix("layer.").rpartition(".")[0])
                setattr(owner, name.rpartition(".")[2], parameter)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.weights[f"{name}.weight"] + self.facts.plus_one
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def outputs(self, embedded_SH, hidden_SH, positions_S) -> torch.Tensor:
        """The layer's outputs of rows that see all before them and themselves."""
        if self.facts.zeroed:
            embedded_SH = embedded_SH * (positions_S > 0)[:, None]
        e, h = self.norm(embedded_SH, "embedding_norm"), self.norm(hidden_SH, "hidden_norm")
        x = torch.cat((h, e) if self.facts.hidden_first else (e, h), -1) @ self.weights["input_proj.weight"].T
        mask = torch.full((len(x), len(x)), float("-inf"), dtype=x.dtype).triu(1)
        rope = self.rotary(x[None], positions_S[None])
        return self.layer(x[None], position_embeddings=rope, attention_mask=mask[None, None])[0]

    def draft(self, tokens_T, planes_T1H, row: int, steps: int, embedding_VH) -> list[torch.Tensor]:
        """Post-norm outputs [H] of one row, step after step."""
        start = int(STARTS_T[row])
        fed, hidden = tokens_T[start + 1 : row + 2].tolist(), list(planes_T1H[start : row + 1, 0])
        drafted = []
        for step in range(steps):
            output = self.outputs(embedding_VH[fed], torch.stack(hidden), torch.arange(len(fed)))[-1]
            drafted.append(self.norm(output, "final_norm"))
            fed.append(int(tokens_T[row + 2 + step]))
            hidden.append(drafted[-1] if self.facts.feedback == "normed" else output)
        return drafted


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, final planes with channels of unequal size, and an embedding."""
    torch.manual_seed(3)
    planes_T1H = torch.randn(20, 1, 32, dtype=dtype) * torch.linspace(0.3, 3, 32, dtype=dtype)
    return torch.randint(0, 50, (20,)), planes_T1H, torch.randn(50, 32, dtype=dtype)


def rows_of(rows: list[list[int]]) -> list[torch.Tensor]:
    return [torch.tensor(each) for each in rows]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_unroll_equals_the_familys_module_stepped_one_token_at_a_time(family, configured):
    head = random_head(configured(family)).double()
    tokens_T, planes_T1H, embedding_VH = inputs(torch.float64)
    with torch.no_grad():
        steps = head.unroll(tokens_T, planes_T1H, STARTS_T, rows_of(ROWS), embedding_VH)
        sequential = Sequential(head, family)
        for row in ROWS[0]:
            reached = sum(row in rows for rows in ROWS)
            wanted = sequential.draft(tokens_T, planes_T1H, row, reached, embedding_VH)
            for step, hidden in enumerate(wanted):
                got = steps[step].hidden_RH[steps[step].rows_R == row][0]
                torch.testing.assert_close(got, hidden, rtol=1e-5, atol=1e-5)
    assert [step.rows_R.tolist() for step in steps] == ROWS


@pytest.mark.parametrize("family", ["mimo", "qwen3_5"])
def test_gradients_are_those_of_the_sequential_module_in_fp64(family, configured, exact_norms):
    head = random_head(configured(family)).double()
    exact_norms(head, family)
    tokens_T, planes_T1H, embedding_VH = inputs(torch.float64)
    weight_H = torch.randn(32, dtype=torch.float64)
    steps = head.unroll(tokens_T, planes_T1H, STARTS_T, rows_of(ROWS), embedding_VH)
    ours, theirs = torch.zeros(2, dtype=torch.float64)
    for k, step in enumerate(steps):
        ours = ours + ((step.hidden_RH @ weight_H).sin() * (k + 1)).sum()
    sequential = Sequential(head, family, "sdpa")
    for row in ROWS[0]:
        drafted = sequential.draft(tokens_T, planes_T1H, row, sum(row in rows for rows in ROWS), embedding_VH)
        theirs = theirs + sum((hidden @ weight_H).sin() * (k + 1) for k, hidden in enumerate(drafted))
    names, parameters = zip(*head.named_parameters(), strict=True)
    got, wanted = (torch.autograd.grad(each, parameters) for each in (ours, theirs))
    for name, a, b in zip(names, got, wanted, strict=True):
        assert b.abs().max() > 1e-4, f"{name} has no gradient to compare"
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-10), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_does_not_depend_on_which_other_rows_are_drafted_or_on_chunks(family, configured, monkeypatch):
    head = random_head(configured(family))
    tokens_T, planes_T1H, embedding_VH = inputs(torch.float32)
    everything = [sorted({*range(10), *range(11, 19)} & set(range(18 - step))) for step in range(2)]
    few = [[2, 7, 15], [7]]
    results = []
    with torch.no_grad():
        for rows, chunk in ((everything, 100), (few, 100), (few, 2)):
            monkeypatch.setattr(unroll, "POSITIONS", chunk)
            monkeypatch.setattr(unroll, "ROWS", chunk)
            steps = head.unroll(tokens_T, planes_T1H, STARTS_T, rows_of(rows), embedding_VH)
            results.append(
                [step.hidden_RH[torch.isin(step.rows_R, torch.tensor(few[k]))] for k, step in enumerate(steps)]
            )
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_under_autocast_attention_sees_one_dtype_and_routers_see_full_precision(family, configured, monkeypatch):
    head = random_head(configured(family))
    tokens_T, planes_T1H, embedding_VH = inputs(torch.float32)
    wanted = head.unroll(tokens_T, planes_T1H, STARTS_T, rows_of(ROWS), embedding_VH)
    seen: list[Any] = []

    def attend(*arguments: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.extend(each.dtype for each in arguments[:5])
        return attention.attend(*arguments, **options)

    monkeypatch.setattr(unroll, "attend", attend)
    monkeypatch.setattr(unroll, "laid_out", lambda keys: keys)
    routers = [module for module in head.modules() if type(module).__name__.endswith("Router")]
    for router in routers:
        router.register_forward_hook(lambda _module, _inputs, outputs: seen.append(("router", outputs[0].dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        steps = head.unroll(tokens_T, planes_T1H.bfloat16(), STARTS_T, rows_of(ROWS), embedding_VH)
    assert len(routers) == (0 if family in ("mimo", "qwen3_5") else 1)
    assert set(seen) == {torch.bfloat16} | {("router", torch.float32) for _ in routers}
    gradients = torch.autograd.grad(torch.cat([step.hidden_RH for step in steps]).sum(), list(head.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)
    if not routers:  # experts may change by rounding alone
        torch.testing.assert_close(steps[0].hidden_RH.float(), wanted[0].hidden_RH, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_survives_json_and_gives_the_same_head(family, configured):
    config = configured(family)
    again = MtpConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    states: Any = [MtpHead(each).state_dict() for each in (config, again)]
    assert {n: t.shape for n, t in states[0].items()} == {n: t.shape for n, t in states[1].items()}
