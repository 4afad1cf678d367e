"""Methods side by side: each with its k and command, windows in turns, a ratio with its range; attached or started."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import conf
from models.config import EngineConfig
from models.errors import Refused
from models.servers import command
from serve_eval.config import EvalConfig, MethodConfig
from serve_eval.methods import methods_of
from serve_eval.policy import make_policy, read_records
from serve_eval.prompts import Prompt
from serve_eval.servers import speculation
from serve_eval.sweep import run_sweep
from tests.serve_eval.stub import Behaviour, Handler, running
from tests.serve_eval.test_servers import lives, wait_until

Make = Callable[..., EngineConfig]
Starts = Callable[[], list[dict[str, Any]]]
NGRAM, HEAD = MethodConfig("ngram", k=5, lookup_min=3), MethodConfig("eagle3", k=2)


@pytest.fixture
def sweep(head_dir: Path, numbered_prompts: list[Prompt], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs the sweep at concurrency 1 with one request per route."""

    def run(engine: EngineConfig, **settings: Any) -> dict[str, Any]:
        few: dict[str, Any] = {"concurrencies": [1], "requests_per_route": 1, "max_new_tokens": 8}
        return run_sweep(
            engine=engine,
            settings=EvalConfig(**(few | {"request_timeout_s": 10} | settings)),
            target_path="some/target",
            head=head_dir,
            k=4,
            prompts=numbered_prompts,
            directory=tmp_path / "eval",
        )

    return run


def windows(tmp_path: Path) -> list[dict[str, Any]]:
    return read_records(tmp_path / "eval/cells.jsonl")


def test_every_method_of_the_list_is_measured_with_its_own_k_and_command(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make, starts: Starts, tmp_path: Path
) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    served = sweep(fake_engine(), methods=[NGRAM, HEAD, MethodConfig("draft_model", model=str(draft))])
    asked = [json.loads(words[words.index("--speculative-config") + 1]) for words in served_words(starts)[1:]]
    assert "--speculative-config" not in served_words(starts)[0]
    assert asked == [
        {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 3, "prompt_lookup_max": 4},
        {"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": 2},
        {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4},
    ]
    assert list(served["commands"]) == ["none", "ngram", "eagle3", "draft_model"]
    assert '"num_speculative_tokens":5' in served["commands"]["ngram"]
    assert {name: each["k"] for name, each in served["methods"].items()} == {"ngram": 5, "eagle3": 2, "draft_model": 4}
    assert (served["head"], served["k"]) == ("eagle3", 2), "the first figures are the head's wherever it stands"
    assert served["speedup"] == served["methods"]["eagle3"]["speedup"]
    assert served["lossless"]["identical"] == 2
    assert {cell["method"] for cell in served["cells"]} == {"none", "ngram", "eagle3", "draft_model"}


def served_words(starts: Starts) -> list[list[str]]:
    return [start["arguments"] for start in starts()]


def test_side_by_side_the_windows_of_all_methods_take_turns_within_each_repeat(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make, starts: Starts, tmp_path: Path
) -> None:
    served = sweep(fake_engine(), methods=[HEAD, NGRAM], side_by_side=True, repeats=3)
    order = [(each["route"], each["repeat"], each["method"]) for each in windows(tmp_path)]
    assert order == [
        (route, repeat, method)
        for route in ("chat", "code")
        for repeat in range(3)
        for method in ("none", "eagle3", "ngram")
    ]
    assert len(starts()) == 3
    assert (served["side_by_side"], served["repeats"]) == (True, 3)
    assert "taking turns" in served["interval_from"]
    seconds = {(each["method"], each["repeat"]): 0.0 for each in windows(tmp_path)}
    for each in windows(tmp_path):
        seconds[each["method"], each["repeat"]] += each["seconds"]
    for name, each in served["methods"].items():
        low, high = each["interval"]["1"]
        ratios = [seconds["none", repeat] / seconds[name, repeat] for repeat in range(3)]  # of equally many tokens
        assert math.prod(ratios) ** (1 / 3) == pytest.approx(math.sqrt(low * high), abs=1e-3)
        assert set(each["interval_by_route"]) == {"chat", "code"}
    pooled = next(cell for cell in served["cells"] if (cell["method"], cell["route"]) == ("ngram", "all"))
    assert (pooled["requests"], pooled["output_tokens"], len(pooled["window_seconds"])) == (6, 48, 6)
    assert served["prompts"] == {"1": ["chat-0", "code-0"]}, "repeats send the same prompts"


def test_one_after_the_other_it_says_that_drift_is_not_excluded(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make, tmp_path: Path
) -> None:
    served = sweep(fake_engine(), methods=[HEAD, NGRAM], repeats=2)
    methods = [each["method"] for each in windows(tmp_path)]
    assert methods == ["none"] * 4 + ["eagle3"] * 4 + ["ngram"] * 4
    assert "drift is not excluded" in served["interval_from"]


def test_side_by_side_a_killed_sweep_measures_whole_turns_again(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make, tmp_path: Path
) -> None:
    engine = fake_engine()
    sweep(engine, side_by_side=True, repeats=2)
    file = tmp_path / "eval/cells.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:5]))  # two turns, and the baseline of the third
    sweep(engine, side_by_side=True, repeats=2)
    again = file.read_bytes().splitlines(keepends=True)
    assert again[:5] == lines[:5]
    told = [(each["route"], each["repeat"], each["method"]) for each in windows(tmp_path)[5:]]
    assert told == [("code", repeat, method) for repeat in range(2) for method in ("none", "eagle3")]


def test_several_k_of_one_method_are_methods_of_their_own(head_dir: Path) -> None:
    settings = EvalConfig(methods=[MethodConfig("eagle3", k=k) for k in (1, 3)] + [MethodConfig("ngram")])
    assert [(each.name, each.k) for each in methods_of(settings, head_dir, 4)] == [
        ("none", 0),
        ("eagle3-k1", 1),
        ("eagle3-k3", 3),
        ("ngram", 4),
    ]
    with pytest.raises(Refused, match="names eagle3-k3 twice"):
        methods_of(EvalConfig(methods=[MethodConfig("eagle3", k=3)] * 2), head_dir, 4)


@pytest.mark.parametrize("of_head", ["eagle3", "mtp"])
def test_head_is_the_exported_head_of_whichever_kind(head_dir: Path, of_head: str) -> None:
    if of_head == "mtp":
        (head_dir / "config.json").write_text('{"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}')
    settings = EvalConfig(methods=[MethodConfig("ngram"), MethodConfig("head", k=2)])
    assert [(each.name, each.k, each.model) for each in methods_of(settings, head_dir, 4)] == [
        ("none", 0, None),
        ("ngram", 4, None),
        (of_head, 2, str(head_dir)),
    ]
    several = EvalConfig(methods=[MethodConfig(k=1), MethodConfig(of_head, k=3)])
    assert [each.name for each in methods_of(several, head_dir, 4)] == ["none", f"{of_head}-k1", f"{of_head}-k3"]
    full = conf.load(["name=test", "target.path=somewhere", "eval=sweep"]).eval
    assert [each.method for each in methods_of(full, head_dir, 4)] == ["none", of_head, "ngram"]


@pytest.mark.parametrize(
    ("methods", "kind", "reason"),
    [
        ([MethodConfig("none")], "vllm", "nothing but none"),
        (
            [MethodConfig("suffix")],
            "sglang",
            "'suffix' is not one of .*, those of sglang",
        ),
        ([MethodConfig("suffix")], "vllm", "suffix needs the package arctic-inference"),
    ],
)
def test_what_an_engine_has_not_is_refused_before_a_server_starts(
    sweep: Callable[..., dict[str, Any]],
    fake_engine: Make,
    starts: Starts,
    methods: list[MethodConfig],
    kind: str,
    reason: str,
) -> None:
    with pytest.raises(Refused, match=reason):
        sweep(fake_engine(kind=kind), methods=methods)
    assert starts() == []


def test_suffix_decoding_starts_where_its_package_is(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make, starts: Starts
) -> None:
    engine = fake_engine()
    (Path(engine.python).parent.parent / "lib/python3.11/site-packages/arctic_inference").mkdir(parents=True)
    served = sweep(engine, methods=[MethodConfig("suffix", k=8)])
    assert served["head"] == "suffix"
    assert '{"method":"suffix","num_speculative_tokens":8}' in served_words(starts)[1]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("eval.methods=[{method: eagle}]", "method=eagle is not one of"),
        ("eval.methods=[{method: ngram, k: 0}]", "k=0"),
        ("eval.methods=[{method: draft_model}]", "model names the draft model"),
        ("eval.methods=[{method: ngram, lookup_min: 5}]", "lookup_min=5"),
        ("eval.methods=[{method: ngram, url: 'ftp://x'}]", "eval.methods: url must be http"),
        ("eval.methods=[{method: none, url: 'http://x:1'}, {method: ngram}]", "for every method, or for none"),
        ("eval.methods=[{method: ngram, url: 'http://x:1'}]", "a server without speculation too"),
        ("eval.repeats=0", "eval.repeats=0"),
        ("eval.warmup_requests=-1", "eval.warmup_requests=-1"),
        ("eval.request_timeout_s=0", "eval.request_timeout_s=0"),
        ("monitor.readings=0", "monitor.readings=0"),
        ("eval.rates=[0]", "eval.rates"),
        ("eval.input_lengths=[-5]", "eval.input_lengths"),
        ("eval.sampling={chat: {temperature: -1}}", "temperature=-1"),
        ("eval.price_per_hour=0", "eval.price_per_hour"),
    ],
)
def test_b43_a_mistake_in_the_sweep_is_refused_with_the_key(override: str, key: str) -> None:
    with pytest.raises(Refused, match=key):
        conf.load(["name=test", "target.path=somewhere", override])


def test_b43_methods_and_sampling_are_set_on_the_command_line() -> None:
    overrides = ["eval.methods=[{method: ngram, k: 3}, {method: eagle3}]", "eval.sampling={chat: {temperature: 0.7}}"]
    run = conf.load(["name=test", "target.path=somewhere", *overrides, "eval.datasets={gsm8k: null}"])
    assert [each.method for each in run.eval.methods] == ["ngram", "eagle3"]
    assert run.eval.sampling["chat"].temperature == 0.7


def test_b41_both_engines_are_started_with_the_same_k(fake_engine: Make, head_dir: Path) -> None:
    words = {}
    for kind in ("vllm", "sglang"):
        engine = fake_engine(kind=kind, tensor_parallel_size=2, max_model_len=512)
        plain = command(engine, "t", 8000)
        words[kind] = command(engine, "t", 8000, speculation("eagle3", head_dir, 3, engine=kind))
        extra = [word for word in words[kind] if word not in plain]
        assert [word for word in words[kind] if word not in extra] == plain, "nothing but the speculation differs"
    settings = json.loads(words["vllm"][words["vllm"].index("--speculative-config") + 1])
    pairs = [word for word in words["sglang"][3:] if word != "--enable-metrics"]
    told = dict(zip(pairs[::2], pairs[1::2], strict=True))
    assert settings["num_speculative_tokens"] == int(told["--speculative-num-steps"]) == 3
    assert told["--speculative-num-draft-tokens"] == "4", "SGLang counts the root"
    assert settings["model"] == told["--speculative-draft-model-path"] == str(head_dir)
    assert (told["--speculative-algorithm"], told["--speculative-eagle-topk"]) == ("EAGLE3", "1")
    assert (told["--context-length"], told["--tensor-parallel-size"], told["--host"]) == ("512", "2", "127.0.0.1")
    assert words["sglang"][1:3] == ["-m", "sglang.launch_server"] and "--enable-metrics" in words["sglang"]


def test_sglang_is_started_asked_in_its_own_way_and_told_apart_by_its_answers_counts(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make, starts: Starts
) -> None:
    behaviour = Behaviour(own_figures=True, queued_s=0.05)
    served = sweep(fake_engine(behaviour, kind="sglang"), methods=[HEAD, NGRAM], side_by_side=True)
    assert all("sglang.launch_server" in start["arguments"] for start in starts())
    cells = {(cell["method"], cell["route"]): cell for cell in served["cells"]}
    for name in ("eagle3", "ngram"):
        assert cells[name, "all"]["al"] == 3.0
        assert cells[name, "all"]["per_position"] == [1.0, 1.0]
        assert cells[name, "all"]["al_by_request"]["p50"] == 3.0
    assert cells["none", "all"]["al"] is None
    assert cells["none", "all"]["queue_ms"] == pytest.approx(50)
    assert cells["eagle3", "all"]["output_tokens"] == 16
    assert (served["engine"], served["version"]) == ("sglang", "0.5.stub")
    assert served["lossless"] == {"prompts": 2, "identical": 2, "differing": []}
    assert served["warnings"] == []


def test_b38_sglang_without_counts_in_its_answers_has_no_al_and_its_gauge_is_not_taken_for_one(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make
) -> None:
    served = sweep(fake_engine(Behaviour(own_figures=False), kind="sglang"))
    assert {cell["al"] for cell in served["cells"]} == {None}
    assert len(served["warnings"]) == 2
    assert "its gauge, of an unknown span, says 2.50" in served["warnings"][0]


def test_b41_speculation_that_does_nothing_in_sglang_is_warned_about(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make
) -> None:
    served = sweep(fake_engine(Behaviour(own_figures=True, accepted_per_draft=0), kind="sglang"))
    assert all("AL is 1.00" in warning for warning in served["warnings"]) and served["warnings"]


def test_a_failed_start_of_sglang_is_told_in_its_own_words(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make
) -> None:
    said = "[2026-11-30 07:00:00] Scheduler hit an exception: Traceback\nRuntimeError: no kernel image for this device"
    with pytest.raises(Refused, match=r"RuntimeError: no kernel image for this device \(log: .*server-none\.log\)"):
        sweep(fake_engine(Behaviour(fail_start=said), kind="sglang"))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_running_servers_are_measured_side_by_side_and_left_running(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make, starts: Starts, tmp_path: Path, kind: str
) -> None:
    behaviour = Behaviour(own_figures=True, kind=kind, model="org/served-name")
    engine = fake_engine(kind=kind, python="/nowhere/python") if kind == "vllm" else fake_engine(kind=kind)
    with contextlib.ExitStack() as stack:
        plain, stub = stack.enter_context(running(replace(behaviour, drafts=False)))
        ours, other = stack.enter_context(running(behaviour))
        served = sweep(
            engine, methods=[MethodConfig("none", url=plain), MethodConfig("eagle3", k=3, url=f"{ours}/v1")], repeats=2
        )
        assert stub.healthy and starts() == []
        if kind == "vllm":
            assert {body["model"] for body in other.bodies} == {"org/served-name"}
    assert [each["method"] for each in windows(tmp_path)] == ["none", "eagle3"] * 4
    assert served["commands"]["none"] == f"a running server at {plain}"
    cells = {(cell["method"], cell["route"]): cell for cell in served["cells"]}
    assert cells["eagle3", "all"]["al"] == 3.0
    assert served["side_by_side"] is True


def test_a_url_where_nothing_runs_is_refused_with_its_key(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make
) -> None:
    methods = [MethodConfig(method, url="http://127.0.0.1:9") for method in ("none", "eagle3")]
    with pytest.raises(Refused, match=r"eval\.methods: none: url=http://127.0.0.1:9: no healthy server"):
        sweep(fake_engine(), methods=methods)


def test_traffic_of_others_on_a_running_server_is_seen_in_its_counters(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        running(Behaviour(drafts=False)) as (plain, _),
        running(Behaviour(own_figures=True)) as (ours, _),
    ):
        book = Handler._book

        def busier(self: Any, behaviour: Behaviour) -> None:
            book(self, behaviour)
            with self.server.lock:
                self.server.drafted += 5

        monkeypatch.setattr(Handler, "_book", busier)
        served = sweep(fake_engine(), methods=[MethodConfig("none", url=plain), MethodConfig("eagle3", url=ours)])
    assert all("counted 15 drafting steps, our requests had 10: somebody else" in each for each in served["warnings"])
    assert len(served["warnings"]) == 2


def test_the_policy_chooses_among_the_methods_of_a_sweep(
    sweep: Callable[..., dict[str, Any]], fake_engine: Make, tmp_path: Path
) -> None:
    served = sweep(fake_engine(), methods=[HEAD, NGRAM], repeats=2, input_lengths=[5])
    policy = make_policy({"served": served, "target": "t", "head": "h"}, windows(tmp_path))
    assert set(policy.flags) == {"eagle3-k2", "ngram-k5"}
    assert set(policy.routes) == {"all", "chat", "code"}, "a length is no label of traffic"
    assert policy.routes["all"].levels[0].candidate in policy.flags
    assert policy.flags["ngram-k5"]["sglang"][:2] == ["--speculative-algorithm", "NGRAM"]
    assert "drift is not excluded" in policy.interval_from


OWNER = """
import sys
from pathlib import Path
from models import servers
from models.config import EngineConfig
from serve_eval.config import EvalConfig
from serve_eval.prompts import Prompt
from serve_eval.sweep import run_sweep
servers.GRACE_S = 1.0
python, head, directory, behaviour, starts = sys.argv[1:]
run_sweep(
    engine=EngineConfig(
        python=python, environment={"STUB_BEHAVIOUR": behaviour, "STUB_STARTS": starts}, startup_timeout_s=60
    ),
    settings=EvalConfig(concurrencies=[1], requests_per_route=1, side_by_side=True, max_new_tokens=8),
    target_path="t",
    head=Path(head),
    k=2,
    prompts=[Prompt("a", "chat", (1, 2))],
    directory=Path(directory),
)
"""


def test_ctrl_c_ends_the_servers_of_all_methods(
    fake_engine: Make, starts: Starts, head_dir: Path, tmp_path: Path
) -> None:
    behaviour = json.dumps({"mishap": {"any": "hang"}})
    arguments = [fake_engine().python, str(head_dir), str(tmp_path / "eval"), behaviour, str(tmp_path / "starts.jsonl")]
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, *arguments], stderr=subprocess.DEVNULL, cwd=Path(__file__).parents[2]
    )
    wait_until(lambda: len(starts()) == 2, 120)
    pids = [start["pid"] for start in starts()]
    assert all(lives(pid) for pid in pids)
    owner.send_signal(signal.SIGINT)
    assert owner.wait(timeout=60) != 0
    wait_until(lambda: not any(lives(pid) for pid in pids), 30)
