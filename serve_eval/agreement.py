"""`python -m serve_eval.agreement experiment=demo`: does the sweep measure what vLLM's own benchmark measures?

One server gets the same prompts, four at a time, from the sweep's client and from `vllm bench serve` (of the
environment of engine.python), in turns. Output tokens per second of a window, in the median over turns, and TTFT, in
the median over all requests, must agree within 10 %; else the exit code is 1. Who begins alternates, so that a drift
decides nothing. The server is that of the first of eval.methods, or of the exported head;
`eval.methods=[{method: none}]` is the server alone.

What could differ besides the clock and the client is held equal: answers are greedy, lengths and stops are those of the
sweep, and the prompts are the same ids. vLLM's benchmark takes text only, so ids are decoded for it, which must give
them again when they are encoded; and the server's own count of each prompt's tokens is compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from models.artefact import read_json
from models.config import EngineConfig
from models.errors import Refused
from models.servers import Server, find_interpreter, last_lines, local, own_environment
from serve_eval.config import POOLED, EvalConfig
from serve_eval.figures import figures
from serve_eval.methods import PLAIN, Method, methods_of, opened
from serve_eval.prompts import Prompt
from serve_eval.sweep import choose_prompts, in_server
from serve_eval.windows import Load, Place, measure, warm_up

CONCURRENCY, TURNS, BAR = 4, 4, 0.10
OURS, THEIRS = "the sweep's client", "vllm bench serve"

_BENCH = (
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser()\n"
    "add_cli_args(parser)\n"
    "main(parser.parse_args())\n"
)
"""`vllm bench serve`, whose command line does not start where the distribution is not called vllm (the CPU build)."""


@dataclass(frozen=True)
class Reading:
    """One window as one client saw it: output tokens/s, and each request's TTFT in ms and text."""

    tokens_per_s: float
    ttft_ms: tuple[float, ...]
    texts: tuple[str, ...]

    @property
    def ttft(self) -> float:
        """The median of the requests'."""
        return float(np.median(self.ttft_ms))


def texts_of(prompts: Sequence[Prompt], tokenizer: Any) -> list[str]:
    """The prompts as texts that are exactly their ids when they are encoded without further special tokens.

    Raises:
        Refused: there is no such text of one.
    """
    found = []
    for prompt in prompts:
        text = tokenizer.decode(list(prompt.ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if tokenizer(text, add_special_tokens=False)["input_ids"] != list(prompt.ids):
            raise Refused(
                f"eval.prompts: the ids of {prompt.id} have no text, which is all that vllm bench serve takes"
            )
        found.append(text)
    return found


def ours(server: Server, method: Method, prompts: Sequence[Prompt], settings: EvalConfig) -> Reading:
    """One window of the sweep.

    Raises:
        Refused: a request failed, or the server sent no usage.
    """
    record = measure(server, method, Place(method.name, Load(CONCURRENCY), POOLED), prompts, settings)
    told = figures([record])
    if told["failed"] or told["output_tokens_per_s"] is None:
        raise Refused(record["warnings"][0])
    outcomes = record["outcomes"]
    return Reading(
        told["output_tokens_per_s"],
        tuple(outcome["ttft_ms"] for outcome in outcomes),
        tuple(outcome["text"] for outcome in outcomes),
    )


def theirs(
    server: Server,
    engine: EngineConfig,
    target_path: str,
    prompts: Sequence[Prompt],
    texts: Sequence[str],
    settings: EvalConfig,
) -> Reading:
    """One run of `vllm bench serve` with the prompts' texts.

    Raises:
        Refused: it failed, a request of it did, or the server saw other prompts.
    """
    with tempfile.TemporaryDirectory(prefix="draftsmith-bench-") as name:
        folder = Path(name)
        rows = [{"prompt": text, "output_tokens": settings.max_new_tokens} for text in texts]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        options: dict[str, Any] = {
            "base-url": server.url,
            "model": local(target_path),
            "served-model-name": server.model,
            "dataset-name": "custom",
            "dataset-path": folder / "prompts.jsonl",
            "num-prompts": len(rows),
            "custom-output-len": -1,
            "max-concurrency": CONCURRENCY,
            "temperature": 0,
            "extra-body": json.dumps({"add_special_tokens": False, "return_token_ids": True}),
            "result-dir": folder,
            "result-filename": "result.json",
        }
        flags = ["skip-chat-template", "disable-shuffle", "disable-tqdm", "save-result", "save-detailed"]
        words = [str(find_interpreter(engine)), "-c", _BENCH]
        words += [word for key, value in options.items() for word in (f"--{key}", str(value))]
        words += [f"--{flag}" for flag in [*flags, *(["ignore-eos"] if settings.ignore_eos else [])]]
        with (folder / "log").open("wb") as output:
            code = subprocess.run(
                words,
                cwd=folder,
                env=os.environ | own_environment(engine),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            ).returncode
        if code != 0:
            raise Refused(f"vllm bench serve ended with exit code {code}: {last_lines(folder / 'log')}")
        result = read_json(folder / "result.json")
    if result["completed"] != len(rows):
        raise Refused(f"vllm bench serve: {len(rows) - result['completed']} of {len(rows)} requests failed")
    if result["input_lens"] != [len(prompt.ids) for prompt in prompts]:
        raise Refused("the server saw other prompts from vllm bench serve than from the sweep's client")
    ttft_ms = tuple(1e3 * seconds for seconds in result["ttfts"])
    return Reading(result["output_throughput"], ttft_ms, tuple(result["generated_texts"]))


def window_of(prompts: Sequence[Prompt], settings: EvalConfig) -> list[Prompt]:
    """The prompts of every route's window, one of each route after the other."""
    groups = choose_prompts(prompts, settings, CONCURRENCY).values()
    return [prompt for prompt in chain(*zip_longest(*groups)) if prompt is not None]


def compare(
    engine: EngineConfig,
    settings: EvalConfig,
    target_path: str,
    head: Path,
    prompts: list[Prompt],
    tokenizer: Any,
    directory: Path,
) -> dict[str, list[Reading]]:
    """Start the server, and measure in turns; each reading is printed as it comes.

    Args:
        settings: of the sweep. head: the exported head. prompts: of every window. tokenizer: the target's.
        directory: where the server's log is kept.

    Returns:
        OURS and THEIRS -> a reading per turn.

    Raises:
        Refused: another engine than vLLM, prompts that have no text, a client that failed.
    """
    if engine.kind != "vllm":
        raise Refused(f"engine.kind={engine.kind}: vllm bench serve is a part of vllm")
    methods = methods_of(settings, head, settings.served_k or settings.k)
    alone = bool(settings.methods) and settings.methods[0].method == PLAIN
    method = methods[0 if alone else 1]
    greedy, texts = replace(settings, sampling={}), texts_of(prompts, tokenizer)
    with opened(engine, target_path, method, directory) as server:
        warm_up(server, prompts, greedy)
        told: dict[str, list[Reading]] = {OURS: [], THEIRS: []}
        for turn in range(TURNS):
            for client in (OURS, THEIRS) if turn % 2 == 0 else (THEIRS, OURS):
                if client == OURS:
                    reading = ours(server, method, prompts, greedy)
                else:
                    reading = theirs(server, engine, target_path, prompts, texts, greedy)
                told[client].append(reading)
                print(f"turn {turn + 1}, {client}: {reading.tokens_per_s:.1f} tokens/s, TTFT {reading.ttft:.0f} ms")
    return told


def judge(told: Mapping[str, Sequence[Reading]]) -> bool:
    """Print both figures of both clients with their ratio; whether both ratios are within BAR of 1."""
    rates = {client: float(np.median([each.tokens_per_s for each in readings])) for client, readings in told.items()}
    firsts = {client: float(np.median([ms for each in rs for ms in each.ttft_ms])) for client, rs in told.items()}
    alike = True
    for name, unit, found in (("output tokens/s", "", rates), ("TTFT", " ms", firsts)):
        ratio = found[OURS] / found[THEIRS]
        within = abs(ratio - 1) <= BAR
        alike = alike and within
        verdict = f"{'within' if within else 'NOT within'} {100 * BAR:.0f} %"
        print(
            f"{name}: {OURS} {found[OURS]:.1f}{unit}, {THEIRS} {found[THEIRS]:.1f}{unit}: ratio {ratio:.3f}, {verdict}"
        )
    pairs = [pair for a, b in zip(told[OURS], told[THEIRS], strict=True) for pair in zip(a.texts, b.texts, strict=True)]
    print(f"answers: {sum(a == b for a, b in pairs)} of {len(pairs)} are the same text")
    return alike


if __name__ == "__main__":
    from conf import Run, stage

    def main(run: Run) -> None:
        """Measure, print, and leave with 1 where the figures do not agree."""
        from featurize.tokenised import load_renderer
        from models.target import describe_target
        from serve_eval.workloads import load_workload

        target = describe_target(run.target)
        renderer = load_renderer(target, run.target)
        settings = in_server(run.eval)
        prompts = load_workload(settings, renderer, run.data.chat_template_kwargs)
        told = compare(
            run.engine,
            settings,
            target.path,
            run.directory / "export",
            window_of(prompts, settings),
            renderer.tokenizer,
            run.directory / "eval",
        )
        if not judge(told):
            sys.exit(1)

    stage("agreement", main)
