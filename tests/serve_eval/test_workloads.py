"""The common sets come from local files in whatever shape they lie there; long prompts are exactly as long as asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from models.config import EngineConfig
from models.errors import Refused
from serve_eval.config import EvalConfig, MethodConfig, SamplingConfig
from serve_eval.prompts import Prompt
from serve_eval.sweep import choose, run_sweep
from serve_eval.windows import Load
from serve_eval.workloads import SETS, lengthened, load_set, load_workload
from tests.serve_eval.stub import Behaviour, running
from tests.serve_eval.test_prompts import Characters, row, write

ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "mt_bench": ({"prompt_id": 1, "category": "writing", "prompt": ["first?", "second?"]}, "mt_bench", "first?"),
    "gsm8k": ({"question": "1+1?", "answer": "2"}, "gsm8k", "1+1?"),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n"},
        "humaneval",
        "Complete this Python function.\n\n```python\ndef f():\n```",
    ),
    "alpaca": ({"instruction": "Sort.", "input": "b a", "output": "a b"}, "alpaca", "Sort.\n\nb a"),
    "cnn_dm": ({"article": "News.", "highlights": "N."}, "cnn_dm", "Summarize this article.\n\nNews."),
    "spec_bench": ({"question_id": 1, "category": "rag", "turns": ["ask", "more"]}, "spec_bench/rag", "ask"),
    "speed_bench": ({"category": "coding", "turns": ["ask", "more"]}, "speed_bench/coding", "ask"),
}


def said(prompt: Prompt) -> str:
    return "".join(map(chr, prompt.ids))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("socket.socket.connect", refuse)


def test_every_set_has_a_row_here() -> None:
    assert set(ROWS) == set(SETS)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_each_set_becomes_a_prompt_and_a_route(tmp_path: Path, name: str) -> None:
    value, route, text = ROWS[name]
    (prompt,) = load_set(name, str(write(tmp_path / "rows.jsonl", value)), 5, Characters())
    assert (prompt.id, prompt.route) == (f"{name}-1", route)
    assert said(prompt) == f"<user>{text}<assistant>"


def as_clone(rows: datasets.Dataset, folder: Path) -> None:
    """As a clone of the hub's repository: a card that names subsets, and Parquet files."""
    (folder / "main").mkdir(parents=True)
    rows.to_parquet(folder / "main/test-00000-of-00001.parquet")
    told = "configs:\n- config_name: main\n  data_files:\n  - split: test\n    path: main/test-*\n"
    (folder / "README.md").write_text(f"---\n{told}---\n")


def as_files(rows: datasets.Dataset, folder: Path) -> None:
    """As a plain folder of a split's data."""
    folder.mkdir()
    rows.to_json(folder / "test.jsonl")


def as_saved(rows: datasets.Dataset, folder: Path) -> None:
    """As `datasets` saves splits."""
    datasets.DatasetDict({"test": rows}).save_to_disk(str(folder))


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("lay", [as_clone, as_files, as_saved])
def test_a_local_folder_works_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lay: Callable[[datasets.Dataset, Path], None]
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = datasets.Dataset.from_list([{"question": f"{n}?", "answer": ""} for n in range(5)])
    lay(rows, tmp_path / "gsm8k")
    prompts = load_set("gsm8k", str(tmp_path / "gsm8k"), 3, Characters())
    assert [said(prompt) for prompt in prompts] == [f"<user>{n}?<assistant>" for n in range(3)]


def test_spec_bench_gives_so_many_of_each_of_its_subtasks(tmp_path: Path) -> None:
    categories = ["writing", "roleplay", "qa", "writing", "qa", "qa", "rag"]
    file = write(tmp_path / "q.jsonl", *[{"category": each, "turns": [each]} for each in categories])
    prompts = load_set("spec_bench", str(file), 2, Characters())
    assert [(prompt.id, prompt.route) for prompt in prompts] == [
        ("spec_bench-1", "spec_bench/mt_bench"),
        ("spec_bench-2", "spec_bench/mt_bench"),
        ("spec_bench-3", "spec_bench/qa"),
        ("spec_bench-5", "spec_bench/qa"),
        ("spec_bench-7", "spec_bench/rag"),
    ]


@pytest.mark.parametrize(
    ("name", "place", "reason"),
    [
        ("mmlu", None, "mmlu is not one of mt_bench, gsm8k"),
        ("spec_bench", None, "not on the hub; name the file"),
        ("gsm8k", "rows.jsonl", "row 1, is none of gsm8k: it has prompt"),
        ("gsm8k", "empty.jsonl", "holds no row"),
        ("speed_bench", "unfilled.jsonl", "holds placeholders"),
        ("gsm8k", "./nowhere", r"no such file: nowhere \(eval.datasets"),
    ],
)
def test_what_is_no_such_set_is_refused_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str | None, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", {"prompt": "x"})
    write(tmp_path / "empty.jsonl")
    told = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    write(tmp_path / "unfilled.jsonl", {"category": "rag", "turns": [told]})
    with pytest.raises(Refused, match=reason):
        load_set(name, place, 1, Characters())


def test_own_traffic_and_sets_are_one_workload_with_ids_of_their_own(tmp_path: Path) -> None:
    own = write(tmp_path / "own.jsonl", row("a"))
    sets: dict[str, str | None] = {"gsm8k": str(write(tmp_path / "g.jsonl", {"question": "q"}))}
    settings = EvalConfig(prompts=[str(own)], datasets=sets)
    assert [prompt.route for prompt in load_workload(settings, Characters(), {})] == ["chat", "gsm8k"]
    assert [prompt.route for prompt in load_workload(EvalConfig(datasets=sets), Characters(), {})] == ["gsm8k"]
    write(tmp_path / "own.jsonl", row("gsm8k-1"))
    with pytest.raises(Refused, match="the id 'gsm8k-1'"):
        load_workload(settings, Characters(), {})
    with pytest.raises(Refused, match="names no file"):
        load_workload(EvalConfig(), Characters(), {})


def test_b41_every_prompt_is_rendered_as_the_training_data_was_unless_its_row_says_otherwise(tmp_path: Path) -> None:
    own = write(tmp_path / "own.jsonl", row("a"), row("b", chat_template_kwargs={"mode": "?"}))
    sets: dict[str, str | None] = {"gsm8k": str(write(tmp_path / "g.jsonl", {"question": "q"}))}
    made = load_workload(EvalConfig(prompts=[str(own)], datasets=sets), Characters(), {"mode": "!"})
    assert [said(prompt) for prompt in made] == ["<user>hi<assistant>!", "<user>hi<assistant>?", "<user>q<assistant>!"]


def test_long_prompts_have_exactly_the_length_end_with_their_own_and_begin_differently(
    numbered_prompts: list[Prompt],
) -> None:
    made = lengthened(numbered_prompts, [32, 3], 4)
    assert [(prompt.route, len(prompt.ids), prompt.input_length) for prompt in made] == [
        *[("input 3", 3, 3)] * 4,
        *[("input 32", 32, 32)] * 4,
    ]
    own = {prompt.id: prompt.ids for prompt in numbered_prompts}
    for prompt in made:
        assert prompt.ids[-3:] == own[prompt.id.partition("@")[0]]
    assert len({prompt.ids[:3] for prompt in made[4:]}) == 4, "no two contexts begin alike"
    assert {prompt.id.partition("-")[0] for prompt in made[4:]} == {"chat", "code"}, "routes are in it alike"
    with pytest.raises(Refused, match="0 prompts have at most 2 tokens, but a window takes 4"):
        lengthened(numbered_prompts, [2], 4)
    with pytest.raises(Refused, match="the route 'input 3'"):
        lengthened([Prompt("a", "input 3", (1,))], [3], 1)


def test_lengths_and_rates_are_further_cells_of_the_sweep(
    fake_engine: Callable[..., EngineConfig], head_dir: Path, numbered_prompts: list[Prompt], tmp_path: Path
) -> None:
    settings = EvalConfig(
        concurrencies=[2], rates=[50.0], input_lengths=[16], requests_per_route=2, max_new_tokens=8, warmup_requests=0
    )
    served = run_sweep(
        engine=fake_engine(Behaviour(queued_s=0.5)),
        settings=settings,
        target_path="t",
        head=head_dir,
        k=2,
        prompts=numbered_prompts,
        directory=tmp_path / "eval",
    )
    cells = {(cell["method"], cell["route"]): cell for cell in served["cells"]}
    assert cells["eagle3", "input 16"]["output_tokens"] == 16
    assert cells["eagle3", "input 16"]["al"] == 3.0
    assert cells["none", "all"]["requests"] == 4, "the pool leaves lengths out"
    told = {(cell["method"], cell["rate"], cell["route"]): cell for cell in served["open_loop"]}
    assert set(told) == {(m, 50.0, r) for m in ("none", "eagle3") for r in ("all", "chat", "code", "input 16")}
    assert told["eagle3", 50.0, "all"]["al"] == 3.0
    assert told["eagle3", 50.0, "all"]["queue_ms"] == 500.0
    assert served["overlap"]["input 16"] == 0.0


def test_routes_are_drawn_as_they_are_told_and_a_name_that_is_no_route_is_refused(
    head_dir: Path, numbered_prompts: list[Prompt], tmp_path: Path
) -> None:
    sampling = {"chat": SamplingConfig(0.8, 0.95), "all": SamplingConfig(0.2)}
    with running(Behaviour(drafts=False)) as (plain, _), running(Behaviour()) as (ours, stub):
        methods = [MethodConfig("none", url=plain), MethodConfig("eagle3", url=ours)]
        settings = EvalConfig(
            concurrencies=[1],
            requests_per_route=1,
            max_new_tokens=8,
            sampling=sampling,
            methods=methods,
            warmup_requests=0,
            ignore_eos=True,
            seed=5,
        )
        served = run_sweep(
            engine=EngineConfig(),
            settings=settings,
            target_path="t",
            head=head_dir,
            k=2,
            prompts=numbered_prompts,
            directory=tmp_path / "eval",
        )
        told = {body["prompt"][0]: body for body in stub.bodies}
    assert (told[0]["temperature"], told[0]["top_p"], told[0]["seed"]) == (0.8, 0.95, 5)
    assert (told[100]["temperature"], told[100].get("top_p")) == (0.2, None)
    assert all(body["ignore_eos"] for body in told.values())
    assert served["lossless"]["prompts"] == 0, "samples are no greedy outputs"
    with pytest.raises(Refused, match="eval.sampling names 'chta'; the routes are chat, code"):
        choose(numbered_prompts, EvalConfig(concurrencies=[1], sampling={"chta": SamplingConfig()}))


def test_a_window_of_an_open_loop_has_as_many_requests_as_a_route_gives(numbered_prompts: list[Prompt]) -> None:
    chosen = choose(numbered_prompts, EvalConfig(concurrencies=[4], rates=[2.0], requests_per_route=3))
    assert {load: [len(group) for group in groups.values()] for load, groups in chosen.items()} == {
        Load(concurrency=4): [4, 4],
        Load(rate=2.0): [3, 3],
    }
    assert [str(load) for load in chosen] == ["concurrency 4", "2 requests/s"]
