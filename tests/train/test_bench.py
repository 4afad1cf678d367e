"""The benchmark compares like with like: both methods give one loss, and products are counted as executed."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from train import bench, bench_mtp
from train.measure import peak_memory

ROOT = Path(__file__).resolve().parents[2]

TINY = dataclasses.replace(
    bench.SHAPES["smollm2"],
    hidden=32,
    heads=4,
    key_value_heads=2,
    intermediate=48,
    vocabulary=90,
    draft_vocabulary=40,
    steps=3,
    cells=((48, 24, 0.5),),
    long=((64, 64, 0.25),),
    only_supervised=((64, 64, 0.25),),
)


@pytest.fixture
def pair() -> dict[str, bench.Bench]:
    return {method: bench.Bench(TINY, TINY.cells[0], method, "fp32", "cpu") for method in bench.METHODS}


def test_all_rows_gives_the_loss_and_the_gradients_of_supervised_rows(pair):
    ours, theirs = pair["supervised_rows"], pair["all_rows"]
    assert ours.loss() == pytest.approx(theirs.loss(), rel=1e-5)
    for each in pair.values():
        each.objective(each.pack, each.counts, 0).loss.backward()
    parameters = zip(ours.objective.head.parameters(), theirs.objective.head.parameters(), strict=True)
    for mine, other in parameters:
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", bench.METHODS)
def test_products_are_counted_as_they_are_executed(pair, method, monkeypatch):
    monkeypatch.setattr("models.attention.BLOCK_ROWS", 1)  # a block of one row has no masked score
    each = pair[method]
    with FlopCounterMode(display=False) as counter:
        each.objective(each.pack, each.counts, 0).loss.backward()
    config, pack = each.objective.head.config, each.pack
    rows = each.objective.rows(pack, None)
    queries = config.num_attention_heads * config.head_dim
    prefix = sum((rows_R - pack.starts_T[rows_R] + 1).sum().item() for rows_R in rows)
    own = sum(k * rows_R.numel() for k, rows_R in enumerate(rows))
    again = 2 * (prefix + own) * queries  # scores that backward computes once more
    assert each.flops() == counter.get_total_flops() - again


def test_the_list_has_what_was_asked_for(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(bench.SHAPES, "smollm2", TINY)
    monkeypatch.setattr(bench, "matmul_peak", lambda precision, device: 1e9)

    def here(arguments: list[str]) -> bench.Measured:
        _, name, tokens, length, share, method, precision, device = arguments
        cell = (int(tokens), int(length), float(share))
        return bench.measure_alone(bench.SHAPES[name], cell, method, precision, device)

    monkeypatch.setattr(bench, "in_its_own_process", here)
    monkeypatch.setattr("sys.argv", ["bench", "--precision", "fp32", "--json", str(tmp_path / "bench.json")])
    bench.main()
    found = json.loads((tmp_path / "bench.json").read_text())
    assert [(each["method"], each["tokens"], each["supervised_share"]) for each in found] == [
        ("supervised_rows", 48, 0.5),
        ("all_rows", 48, 0.5),
        ("supervised_rows", 64, 0.25),
    ]
    keys = {"tokens_per_s", "rows_per_s", "peak_bytes", "matmul_efficiency"}
    assert all(keys <= set(each) and each["tokens_per_s"] > 0 for each in found)
    assert "all_rows" in capsys.readouterr().out


def test_a_device_that_is_not_there_is_one_line(monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    monkeypatch.setattr("sys.argv", ["bench", "--device", "cuda"])
    with pytest.raises(SystemExit) as stopped:
        bench.main()
    assert stopped.value.code == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "words", "told"),
    [
        (bench, ["--fast"], "bench: unrecognized arguments: --fast; --help tells how it is called"),
        (
            bench_mtp,
            ["--k", "0"],
            "bench_mtp: argument --k: invalid positive value: '0'; --help tells how it is called",
        ),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(module, words, told, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench", *words])
    with pytest.raises(SystemExit) as stopped:
        module.main()
    assert (stopped.value.code, capsys.readouterr().err) == (2, told + "\n")


def test_a_document_of_32768_tokens_with_512_supervised_trains_in_4_gb():
    cell = bench.SHAPES["smollm2"].long[-1]
    assert cell[0] == cell[1] == 32768 and cell[0] * cell[2] == 512
    measured = bench.in_its_own_process(["--alone", "smollm2", *map(str, cell), "supervised_rows", "fp32", "cpu"])
    assert 0.2e9 < measured.peak_bytes < 4e9


def test_peak_memory_is_a_processs_own_whatever_its_parent_holds():
    held = torch.ones(500_000_000, dtype=torch.uint8)
    program = "import torch; from train.measure import peak_memory; print(peak_memory(torch.device('cpu')))"
    child = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 0 < int(child.stdout) < held.numel() < peak_memory(torch.device("cpu"))
