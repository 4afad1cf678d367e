"""--help of every command: what it does, its own options with their defaults, and two examples.

What a command does is its module's docstring; an option is told as the docstring of its section tells it. So nothing
is written down twice; only which sections a command reads, and the examples, stand here.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.util
import inspect
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

DATA = ("target", "data")
TRAINING = ("draft", "objective", "optim", "trainer")

COMMANDS: dict[str, tuple[tuple[str, ...], tuple[str, str]]] = {
    "models.packaged": (("target",), ("experiment=demo", "name=mine target=smollm2-135m")),
    "models.export": (
        ("export", "target"),
        ("experiment=demo", "experiment=demo export.checkpoint=last export.k=3 dry_run=true"),
    ),
    "models.doctor": ((), ("runs/demo/export --target models/my-target", "my-head --engine vllm")),
    "models.importer": (
        (),
        (
            "my-head --target models/my-target --out runs/imported",
            "their-head --target models/my-target --out runs/theirs",
        ),
    ),
    "featurize": (
        (*DATA, "featurize", "spool"),
        ("experiment=demo", "name=mine target=llama-3.1-8b data=jsonl 'data.conversations=[chats.jsonl]' dry_run=true"),
    ),
    "featurize.generate": (
        ("generate", "target"),
        (
            "experiment=demo",
            "name=mine target=qwen3-8b 'generate.prompts=[questions.jsonl]' generate.model=Qwen/Qwen3-8B",
        ),
    ),
    "featurize.inspect": (
        (*DATA, "inspect"),
        ("experiment=demo inspect.documents=5", "experiment=demo inspect.id=chat-7"),
    ),
    "featurize.verify": (("target",), ("experiment=demo", "name=mine target=qwen3-8b")),
    "featurize.bench": (
        (*DATA, "featurize"),
        ("experiment=demo", "experiment=demo featurize.encoding=int8 data.limit=64"),
    ),
    "train": (
        (*TRAINING, "spool"),
        ("experiment=demo", "--multirun experiment=demo optim.lr=1e-3,3e-4"),
    ),
    "train.sweep": ((), ("experiment=demo", "name=mine target=qwen3-8b")),
    "train.bench": ((), ("--shapes smollm2", "--shapes 8b --device cuda --precision bf16")),
    "train.bench_mtp": ((), ("", "--k 2 --steps 300")),
    "serve_eval": (
        ("eval", "engine", "target"),
        ("experiment=demo", "experiment=demo engine=none eval.k=6"),
    ),
    "serve_eval.apart": (
        ("eval", "target"),
        (
            "experiment=demo +engine@engines.a=vllm-cpu eval.served_k=3 eval.part=a-head",
            "experiment=demo +engine@engines.a=vllm 'eval.methods=[{method: ngram, k: 4}]' eval.part=a-ngram-k4",
        ),
    ),
    "serve_eval.compare": ((), ("runs/a/eval runs/b/eval", "runs/a runs/b")),
    "serve_eval.policy": ((), ("experiment=demo", "name=mine target=qwen3-8b")),
    "serve_eval.gateway": (
        ("gateway",),
        (
            "experiment=demo 'gateway.backends=[{url: \"http://127.0.0.1:8000\"}]'",
            "experiment=demo gateway.port=9000 'gateway.backends=[{url: \"http://127.0.0.1:8000\"}]'",
        ),
    ),
    "serve_eval.monitor": (
        ("monitor",),
        (
            "experiment=demo 'monitor.servers={chat: \"http://127.0.0.1:8001\"}'",
            "experiment=demo monitor.port=9100 'monitor.servers={all: \"http://127.0.0.1:8080\"}'",
        ),
    ),
    "serve_eval.bench": ((), ("", "gateway")),
    "serve_eval.agreement": (
        ("eval", "engine", "target"),
        ("experiment=demo", "experiment=demo 'eval.methods=[{method: none}]'"),
    ),
    "slurm.submit": (
        ("cluster",),
        ("experiment=demo cluster=cpu dry_run=true", "--multirun experiment=demo cluster=gpu optim.lr=1e-3,3e-4"),
    ),
    "slurm.status": ((), ("demo", "demo root=runs --json")),
    "slurm.generate": (("generate", "engine"), ("experiment=demo", "experiment=demo generate.concurrency=8")),
}
"""Sections of the configuration that a command is about, and two command lines."""
DRY = ("featurize", "train", "models.export", "serve_eval", "serve_eval.apart", "slurm.submit")
"""Commands with a dry_run=true."""


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether a command line asks what the command does."""
    return any(word in ("-h", "--help") for word in arguments)


def running() -> str:
    """The name under which `python -m` runs the current command."""
    spec = sys.modules["__main__"].__spec__
    return spec.name.removesuffix(".__main__") if spec else ""


def _docstring(command: str) -> str:
    spec = importlib.util.find_spec(command)
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin)
    if path.name == "__init__.py":
        path = path.with_name("__main__.py")
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def explained(section: type) -> dict[str, str]:
    """Option -> what the section's docstring says of it; one line may tell of several options."""
    found: dict[str, str] = {}
    names: list[str] = []
    _, _, body = inspect.cleandoc(section.__doc__ or "").partition("Attributes:\n")
    for line in body.splitlines():
        text = line.strip()
        # An entry begins at the first indentation: `name, name: text`.
        if re.match(r"    \w", line) and (begun := re.match(r"((?:\w+, )*\w+): (.*)", text)):
            names, text = begun[1].split(", "), begun[2]
            found |= dict.fromkeys(names, text)
        else:
            found |= {name: f"{found[name]} {text}".strip() for name in names}
    return found


def options(key: str, section: type) -> list[str]:
    """Lines on the options of a section: key, default, and what it is."""
    told = explained(section)
    lines = []
    for field in dataclasses.fields(section):
        default: Any = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        shown = "..." if dataclasses.is_dataclass(default) else str(default)
        if default is None or isinstance(default, bool):
            shown = {None: "null", True: "true", False: "false"}[default]
        lines.append(f"  {key}.{field.name}={shown}")
        if field.name in told:
            lines += textwrap.wrap(told[field.name], 110, initial_indent="      ", subsequent_indent="      ")
    return lines


def _examples(command: str) -> list[str]:
    return ["examples:", *(f"  python -m {command} {example}".rstrip() for example in COMMANDS[command][1])]


class Parser(argparse.ArgumentParser):
    """argparse's, for a command that has options of its own: a mistake costs one line, and --help tells the rest."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake and exit with 2."""
        print(f"{self.prog.rpartition('.')[2]}: {message}; --help tells how it is called", file=sys.stderr)
        sys.exit(2)


def described(command: str) -> dict[str, Any]:
    """What argparse is to print before and behind the options of a command that has some of its own."""
    return {
        "description": _docstring(command),
        "epilog": "\n".join(_examples(command)),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }


def render(command: str) -> str:
    """The help of a command."""
    from conf import Run

    sections = {field.name: field.default_factory for field in dataclasses.fields(Run)}
    keys, _ = COMMANDS[command]
    lines = [_docstring(command), "", *_examples(command)]
    if keys:
        lines += ["", "groups (GROUP=NAME sets several options at once), of which experiment=NAME chooses several:"]
        for key in ("experiment", *keys):
            if names := sorted(path.stem for path in (Path(__file__).parent / key).glob("*.yaml")):
                lines += textwrap.wrap(
                    f"{key}: {', '.join(names)}", 110, initial_indent="  ", subsequent_indent="      "
                )
        dry = ", dry_run=true only tells" if command in DRY else ""
        lines += ["", f"options (KEY=VALUE), with their defaults; name=... names the run{dry}:"]
        for key in keys:
            section = sections[key]
            assert isinstance(section, type)
            lines += options(key, section)
        lines += ["", "`python -m train ... --cfg job` prints the options of all commands, with their values."]
    return "\n".join(lines)


def tell() -> NoReturn:
    """Print the help of the command that `python -m` runs, and exit."""
    print(render(running()))
    sys.exit(0)
