"""What is wrong with a command line or a file of settings, in one line that names the option.

Hydra and OmegaConf tell it in several lines: with search paths, names of our classes, and the advice to add an unknown
key with a "+", which would do nothing here.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator
from typing import Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException


def all_options(run: type) -> list[str]:
    """Every option of the dataclass of a run, as it is written on a command line (`optim.lr`), and `experiment`."""
    found = ["experiment"]
    for field in dataclasses.fields(run):
        section: Any = field.default_factory
        inner = [each.name for each in dataclasses.fields(section)] if dataclasses.is_dataclass(section) else []
        found += [f"{field.name}.{name}" for name in inner] or [field.name]
    return found


def unknown_options(config: Any, at: str = "") -> Iterator[str]:
    """Keys that were added (`+optim.foo=1`) to a section that does not have them."""
    if isinstance(config, ListConfig):
        for index, each in enumerate(config):
            yield from unknown_options(each, f"{at}[{index}]")
    elif isinstance(config, DictConfig):
        kind = OmegaConf.get_type(config)
        fields = getattr(kind, "__dataclass_fields__", None)
        for key in config:
            name = f"{at}.{key!s}" if at else str(key)
            if fields is not None and key not in fields:
                yield name
            elif not OmegaConf.is_missing(config, key) and not OmegaConf.is_interpolation(config, str(key)):
                yield from unknown_options(config[key], name)


def alike(name: str, names: list[str]) -> str:
    """ "; did you mean ...?" where there is something alike."""
    near = difflib.get_close_matches(name, names, n=2, cutoff=0.75)
    near += [each for each in names if each.rpartition(".")[2] == name and each not in near]
    return f"; did you mean {' or '.join(near[:2])}?" if near else ""


def told(error: Exception, options: list[str]) -> str:
    """One line on what Hydra or OmegaConf refused.

    Args:
        error: what they raised.
        options: of `all_options`.
    """
    below = error.__cause__ or error.__context__
    cause = below if isinstance(below, OmegaConfBaseException) else error
    lines = [line.strip() for line in str(cause).splitlines()]
    file = re.match(r"In '(\w+/[^']+)'", str(error))
    override = re.search(r"(?:Could not|merging) override '?([^'\n]+)", str(error))
    place = f"conf/{file[1]}.yaml: " if file else ""
    header = f"{place}a file of this group begins with the line `# @package _global_`"
    given = override[1] if override else ""
    key = str(getattr(cause, "full_key", None) or "")

    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return f"there is no {group}={name}, only {', '.join(error.options)}{alike(name, list(error.options))}"
    if isinstance(error, OverrideParseException):
        reason = next(line for line in str(error).splitlines() if not line.startswith("Error parsing"))
        return f"{error.override}: options are KEY=VALUE, with quotes around what has brackets or spaces ({reason})"
    if file and f"@{file[1].split('/')[0]}." in given:  # data@experiment.data
        return header
    if isinstance(cause, MissingMandatoryValue):
        return f"{key} is not given; say {key}=..., or choose an experiment=NAME that does"
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and key:
        if file and key == file[1].split("/")[0]:
            return header
        name = given if given.startswith(key) else key
        nested = f" (in {given})" if given and not name.startswith(given) else ""
        return f"{place}there is no option {name}{nested}{alike(name, options)}"
    if key and (given or file):
        several = f"; several values are written {key}=[a,b]" if "not a ListConfig" in lines[0] else ""
        return f"{place}{given if '=' in given else key}: {lines[0].rstrip('.')}{several}"
    kept = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(dict.fromkeys(kept))
