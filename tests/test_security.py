"""Nothing from outside is trusted (the last rule of the design): pickles, templates, keys, addresses."""

from __future__ import annotations

import ast
import importlib
import json
import pickle
import shutil
import socket
import sys
from pathlib import Path

import httpx
import pytest

import conf
from featurize.conversations import Conversation, Refusals
from featurize.sources import read_conversations
from featurize.spans import Unusable
from featurize.tokenised import load_renderer
from models.config import EngineConfig, TargetConfig
from models.errors import Refused
from models.servers import running
from models.target import describe_target
from serve_eval.config import GatewayConfig, MonitorConfig

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("conf", "models", "featurize", "train", "serve_eval", "slurm")
SECRET = "sk-not-to-be-found-anywhere"


class Bomb:
    """A pickle that leaves a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.path), "w")


def overrides(root: Path, target: Path, conversations: Path) -> list[str]:
    return [
        "name=safe",
        f"root={root}",
        f"target.path={target}",
        f"data.conversations=[{conversations}]",
        "data.validation_share=0.2",
        "data.limit=16",
        "objective.unroll_steps=2",
        "draft.vocab_size=64",
        "trainer.pack_tokens=256",
        "trainer.device=cpu",
        "trainer.precision=fp32",
    ]


def test_a_target_whose_weights_are_a_pickle_is_refused_and_never_read(
    tmp_path, tiny_target_dir, tiny_conversations
) -> None:
    target = tmp_path / "target"
    shutil.copytree(tiny_target_dir, target, ignore=shutil.ignore_patterns("*.safetensors"))
    (target / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    run = conf.load(overrides(tmp_path / "runs", target, tiny_conversations))
    with pytest.raises(
        Refused, match=r"neither model.safetensors nor an index of shards; it holds pickles, which are never loaded"
    ):
        importlib.import_module("featurize.__main__").work(run)
    assert not (tmp_path / "exploded").exists()
    pickle.loads((target / "pytorch_model.bin").read_bytes()).close()
    assert (tmp_path / "exploded").exists(), "the pickle would not have told"


def test_no_module_can_read_a_pickle() -> None:
    forbidden = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
    for path in (each for package in PACKAGES for each in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not forbidden & {alias.name.split(".")[0] for alias in node.names}, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in forbidden, path
            elif isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in ("torch.load", "np.load", "numpy.load", "eval", "exec"), path


ESCAPES = {
    "globals": "{{ cycler.__init__.__globals__.os.system('touch EXPLODED') }}",
    "subclasses": "{% for c in ''.__class__.__mro__[1].__subclasses__() %}{{ c('touch EXPLODED') }}{% endfor %}",
    "attribute by name": "{{ (messages | attr('__class__') | attr('__mro__'))[1] }}",
    "changed input": "{{ messages.append({'role': 'user', 'content': 'x'}) }}",
}


@pytest.mark.parametrize("template", ESCAPES.values(), ids=ESCAPES.keys())
def test_a_malicious_chat_template_cannot_leave_the_sandbox(
    tmp_path, tiny_target_dir, tiny_conversations, template
) -> None:
    target, exploded = tmp_path / "target", tmp_path / "exploded"
    shutil.copytree(tiny_target_dir, target)
    (target / "chat_template.jinja").write_text(template.replace("EXPLODED", str(exploded)))
    run = conf.load(overrides(tmp_path / "runs", target, tiny_conversations))
    conversation: Conversation = next(iter(read_conversations(run.data, Refusals())))
    with pytest.raises((Refused, Unusable)):
        settings = TargetConfig(path=str(target))
        load_renderer(describe_target(settings), settings).render(conversation, 512, None)
    assert not exploded.exists()


def test_keys_of_the_environment_reach_no_file_of_a_run(
    tmp_path, tiny_target_dir, tiny_conversations, monkeypatch, capsys, caplog
) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, SECRET)
    given = [
        f"+engine.environment.HF_TOKEN={SECRET}",
        f"engine.arguments=[--api-key,{SECRET}]",
        f"+cluster.environment.WANDB_API_KEY={SECRET}",
    ]
    run = conf.load([*overrides(tmp_path / "runs", tiny_target_dir, tiny_conversations), *given])
    for stage, function in {"featurize": "work", "train": "main"}.items():
        assert getattr(importlib.import_module(f"{stage}.__main__"), function)(run)
        conf._save(run, stage)
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert any(path.name == "train.yaml" and "HF_TOKEN" in path.read_text() for path in files)
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    printed = capsys.readouterr()
    assert SECRET not in printed.out + printed.err + caplog.text


def test_what_listens_binds_to_loopback_unless_told_otherwise() -> None:
    assert [each().host for each in (EngineConfig, GatewayConfig, MonitorConfig)] == ["127.0.0.1"] * 3


SERVER = """#!{python}
import http.server, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{{"version": "0"}}')
    def log_message(self, *words):
        pass
def word(name):
    return sys.argv[sys.argv.index(name) + 1]
http.server.HTTPServer((word("--host"), int(word("--port"))), Healthy).serve_forever()
"""


def test_a_server_that_we_start_is_not_reachable_from_another_address(tmp_path) -> None:
    # Any address but 127.0.0.1 stands for another machine's way in; Linux answers for all of 127.0.0.0/8.
    other = "127.0.0.2"
    python = tmp_path / "env/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(SERVER.format(python=sys.executable))
    python.chmod(0o755)
    for host, reachable in (("127.0.0.1", False), ("0.0.0.0", True)):
        engine = EngineConfig(python=str(python), host=host, startup_timeout_s=30)
        with running(engine, "target", name=host, directory=tmp_path) as server:
            assert json.loads(httpx.get(f"{server.url}/version").text) == {"version": "0"}
            with socket.socket() as probe:
                probe.settimeout(5)
                assert (probe.connect_ex((other, int(server.url.rsplit(":", 1)[1]))) == 0) is reachable
