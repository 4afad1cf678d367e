"""One run, one configuration: what every stage is given, and how a stage is started.

A run is described once and read by all its stages, so that `experiment=demo` means the same to each of
them. The sections are typed by the dataclasses in each package's config.py; Hydra refuses unknown keys
and wrong types before anything is loaded. This module is the only place that knows all sections. It
imports nothing of a package but its config.py, and is imported by nothing but the stages' __main__.
"""

from __future__ import annotations

from conf import interrupted  # isort: skip, it is for all the others

import contextlib
import errno
import fcntl
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from conf import help, mistakes
from featurize.config import DataConfig, FeaturizeConfig, GenerateConfig, InspectConfig, SpoolConfig
from models.artefact import read_json, write_bytes, write_json
from models.config import DraftConfig, EngineConfig, ExportConfig, TargetConfig, masked_arguments, masked_variables
from models.errors import Refused
from serve_eval.config import EvalConfig, GatewayConfig, MonitorConfig
from slurm.config import ClusterConfig
from train.config import ObjectiveConfig, OptimConfig, TrainerConfig


@dataclass
class Run:
    """Everything tunable about one run.

    Attributes:
        name: the run's name; with `root` it fixes every path, so a second launch resumes the first.
        root: folder of all runs.
        cache: folder of prepared targets.
        features_of: another run under `root` whose features this one trains on, instead of extracting its own.
        engines: by name, what the served sweep is measured on in place of `engine`, in parts (serve_eval/parts.py).
        dry_run: a stage, or `python -m slurm.submit`, shows what it would do, sizes included, and does nothing.
    """

    name: str = "???"
    root: str = "runs"
    cache: str = "~/.cache/draftsmith"
    features_of: str | None = None
    dry_run: bool = False
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    featurize: FeaturizeConfig = field(default_factory=FeaturizeConfig)
    spool: SpoolConfig = field(default_factory=SpoolConfig)
    inspect: InspectConfig = field(default_factory=InspectConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    engines: dict[str, EngineConfig] = field(default_factory=dict)
    eval: EvalConfig = field(default_factory=EvalConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        if not (path := Path(self.name)).parts or path.is_absolute() or ".." in path.parts:
            raise ValueError(f"name={self.name} names no folder below root={self.root}; choose a word, name=mine say")

    @property
    def directory(self) -> Path:
        """The run's folder: `features`, `train`, `export`, `eval` and timings.json live in it."""
        return Path(self.root).expanduser() / self.name


def _of_eagle3(value: Any, *, _root_: DictConfig) -> Any:
    """What a target says of an EAGLE-3 head over it; a run with a head of another kind does not hear of it."""
    return value if _root_.draft.algorithm == "eagle3" else None


OmegaConf.register_new_resolver("of_eagle3", _of_eagle3)


def _schema() -> DictConfig:
    """Of a run; sections are closed, but the mappings in them take any key, on the command line as in a file."""
    schema = OmegaConf.structured(Run)
    sections = [schema[key] for key in schema if not OmegaConf.is_missing(schema, key)]
    for section in (each for each in sections if isinstance(each, DictConfig)):
        for key in section:
            if not OmegaConf.is_missing(section, key) and OmegaConf.get_type(section, str(key)) is dict:
                OmegaConf.set_struct(section[key], False)
    return schema


ConfigStore.instance().store(name="run_schema", node=_schema())


def _resolve(config: Any) -> Run:
    run = OmegaConf.to_object(config)
    assert isinstance(run, Run)
    run.target.path = os.path.expanduser(run.target.path)
    run.spool.directory = os.path.expanduser(run.spool.directory)
    return run


def load(overrides: list[str]) -> Run:
    """The configuration for these overrides, as on a stage's command line.

    Raises:
        Refused: an unknown key or group, a wrong type, or a value that a section does not accept.
    """
    options = mistakes.all_options(Run)
    try:
        with hydra.initialize_config_dir(str(Path(__file__).parent), version_base="1.3"):
            config = hydra.compose("run", overrides)
        if added := next(mistakes.unknown_options(config), None):
            raise Refused(f"configuration: there is no option {added}{mistakes.alike(added, options)}")
        return _resolve(config)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise Refused(f"configuration: {mistakes.told(error, options)}") from None


def _first_process() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def resolved(run: Run) -> dict[str, Any]:
    """The whole configuration as plain values, to be kept with an output; what looks like a credential is masked."""
    values = OmegaConf.to_container(OmegaConf.structured(run), resolve=True)
    assert isinstance(values, dict)
    for engine in (values["engine"], *values["engines"].values()):
        engine["environment"] = masked_variables(engine["environment"])
        engine["arguments"] = masked_arguments(engine["arguments"])
    values["cluster"]["environment"] = masked_variables(values["cluster"]["environment"])
    return {str(key): value for key, value in values.items()}


def _save(run: Run, stage: str) -> None:
    """Keep the resolved configuration with the run."""
    text = OmegaConf.to_yaml(OmegaConf.create(resolved(run))).encode()
    path = run.directory / "config" / f"{stage}.yaml"
    if not path.exists() or path.read_bytes() != text:
        write_bytes(path, text)


def _record_seconds(run: Run, stage: str, seconds: float) -> None:
    path = run.directory / "timings.json"
    timings = read_json(path) if path.exists() else {}
    write_json(path, (timings if isinstance(timings, dict) else {}) | {stage: round(seconds, 1)})


def _describe(error: BaseException) -> str | None:
    """One line for what the person at the keyboard can mend; None for a fault of ours."""
    if isinstance(error, Refused):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left on the disk while writing {error.filename or 'a file'}; free some and run again"
    if isinstance(error, OSError) and error.filename:
        return f"{error.strerror}: {error.filename}"
    return None


@contextlib.contextmanager
def only_one(run: Run, stage: str) -> Iterator[None]:
    """Hold the stage's lock (first process of a job only), so that two launches cannot mix their files."""
    if not _first_process():
        yield
        return
    run.directory.mkdir(parents=True, exist_ok=True)
    with (run.directory / f".{stage}.lock").open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another process is running stage {stage} of {run.directory}; wait for it") from None
        yield


def _leave(code: int) -> NoReturn:
    """Exit, and of several processes at once: threads of a process group that failed would keep it from ending."""
    sys.stdout.flush()
    sys.stderr.flush()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os._exit(code)
    sys.exit(code)


def _arguments() -> Any:
    """Hydra's reading of the command line; what it does not know is told in one line."""
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise Refused(f"{message}; options are KEY=VALUE, and --help lists them")

    parser.error = refuse
    parser.allow_abbrev = False  # --experiment demo is a mistake, and none of Hydra's --experimental-rerun
    return parser.parse_intermixed_args()  # --multirun may stand anywhere


def stage(
    name: str,
    work: Callable[[Run], bool | None],
    *,
    shared: bool = False,
    sweep: Callable[[list[str]], int] | None = None,
    dry_run: Callable[[Run], None] | None = None,
) -> None:
    """Run one stage from the command line: compose, check, work, and speak in single lines.

    `work` returns whether there was anything to do; if so its seconds go into the run's timings.json. A command that
    only shows something returns None, and leaves no trace. Several launches at once are refused, unless the stage is
    `shared` and sees to that itself. `sweep` is given the overrides of a --multirun and returns an exit code.
    With `dry_run=true` the function `dry_run` tells what `work` would do; it is called in its place.
    Exits with 2 and one line on bad input, 130 on Ctrl-C. HYDRA_FULL_ERROR=1 shows tracebacks. --help and --version
    are answered at once.
    """
    if help.asks_for_help(sys.argv[1:]):
        help.tell()
    if "--version" in sys.argv[1:]:
        print(f"draftsmith {metadata.version('draftsmith')}")  # Hydra would tell its own
        sys.exit(0)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel(logging.WARNING)

    def task(config: DictConfig) -> None:
        run = _resolve(config)
        if run.dry_run:
            if dry_run is None:
                raise Refused(f"dry_run=true: this command has none; {', '.join(help.DRY)} do")
            if _first_process():
                dry_run(run)
            return
        started = time.monotonic()
        with contextlib.nullcontext() if shared else only_one(run, name):
            worked = work(run)
            if worked is None or not _first_process():
                return
            _save(run, name)  # of what is complete, too: it is so for this configuration
            if worked:
                _record_seconds(run, name, time.monotonic() - started)
                print(f"{name}: done in {time.monotonic() - started:.0f} s")
            else:
                print(f"{name}: nothing to do, it is complete")

    def guarded(config: DictConfig) -> None:
        try:
            task(config)
        except KeyboardInterrupt:
            print(f"{name}: {interrupted.SAID}", file=sys.stderr)
            _leave(130)
        except SystemExit as left:
            _leave(int(left.code or 0))
        except Exception as error:
            line = None if os.environ.get("HYDRA_FULL_ERROR") else _describe(error)
            if line is None:
                traceback.print_exc()
            else:
                print(f"{name}: {line}", file=sys.stderr)
            _leave(1 if line is None else 2)

    try:
        arguments = _arguments()
        if arguments.multirun:
            if sweep is None:
                raise Refused("--multirun is for training; the other stages have nothing to sweep")
            sys.exit(sweep(arguments.overrides))
        if not (arguments.hydra_help or arguments.info or arguments.cfg):
            load(arguments.overrides)
    except Refused as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
    hydra.main(config_path="pkg://conf", config_name="run", version_base="1.3")(guarded)()
