"""The rules of the house, read from the source: who may import whom, what no file may say, what README promises."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import conf
from conf.sweep import expand

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT: dict[str, set[str]] = {
    "models": set(),
    "featurize": {"models"},
    "train": {"models", "featurize"},
    "serve_eval": {"models", "featurize"},
    "slurm": {"models", "featurize", "train", "serve_eval"},
    "conf": {"models", "featurize", "train", "serve_eval", "slurm"},
}
CONF_MAY_IMPORT = re.compile(r"(models|featurize|train|serve_eval|slurm)\.config|models\.(artefact|errors)")
NOT_OURS = re.compile(r"\.git|\.venv.*|runs|wandb|build|\.cache|\.\w+_cache|__pycache__|.*\.egg-info")


def files() -> Iterator[Path]:
    """Every file of the project; environments, caches and runs are not part of it."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not NOT_OURS.fullmatch(name)]
        yield from (Path(folder, name) for name in names if not NOT_OURS.fullmatch(name))


def modules() -> dict[str, Path]:
    """Dotted name -> file, of all modules in the packages."""
    found = {}
    for package in MAY_IMPORT:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def is_main_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def imports(tree: ast.AST, module: str, *, outside_main: bool = False) -> set[str]:
    """Our modules that `module` imports anywhere in its source, or anywhere but in `main` and the main guard."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if outside_main and (is_main_guard(node) or (isinstance(node, ast.FunctionDef) and node.name == "main")):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively; write the full name"
            name = node.module or ""
            found |= {f"{name}.{a.name}" if f"{name}.{a.name}" in MODULES else name for a in node.names}
        else:
            found |= imports(node, module, outside_main=outside_main)
    return {name for name in found if name.split(".")[0] in MAY_IMPORT}


def parsed(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def below(module: str) -> set[str]:
    """What a module imports, but for conf, which every entry point asks for the configuration."""
    return {name for name in imports(parsed(module), module) if name.split(".")[0] != "conf"}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_only_run_down(module: str) -> None:
    package = module.split(".")[0]
    for name in below(module):
        if package == "conf":
            assert CONF_MAY_IMPORT.fullmatch(name), f"conf imports {name}; it knows the config.py files only"
        elif name.split(".")[0] != package:
            assert name.split(".")[0] in MAY_IMPORT[package], f"{module} imports {name}, which is not below it"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_only_what_is_run_as_a_command_imports_the_configuration(module: str) -> None:
    if not module.endswith(".__main__") and module.split(".")[0] != "conf":
        found = imports(parsed(module), module, outside_main=True)
        assert not [name for name in found if name.split(".")[0] == "conf"]


def test_no_module_reaches_itself_through_its_imports() -> None:
    graph = {module: below(module) & MODULES.keys() for module in MODULES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, "circle of imports: " + " -> ".join((*path, module))
        if module not in done:
            for name in graph[module]:
                visit(name, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def texts() -> Iterator[tuple[Path, str]]:
    for path in files():
        try:
            yield path, path.read_text()
        except UnicodeDecodeError:
            continue


def test_no_file_names_a_machine_or_a_package_host() -> None:
    # Put together here, so that this file does not hold what it looks for.
    folders = "|".join("/" + name + "/" for name in ("work", "home", "root", "Users"))
    hosts = "|".join(("py" + r"pi\.org", "python" + "hosted", r"download\.py" + "torch", "conda" + r"\.anaconda"))
    forbidden = re.compile(rf"(?<![\w.~$}}])({folders})|{hosts}")
    for path, text in texts():
        found = forbidden.search(text)
        assert not found, f"{path.relative_to(ROOT)} names {found and found.group()}"


def test_no_source_file_is_longer_than_500_lines() -> None:
    for path, text in texts():
        if path.suffix in {".py", ".sh", ".sbatch", ".yaml", ".j2"} or path.name == "Makefile":
            assert text.count("\n") <= 500, f"{path.relative_to(ROOT)} has {text.count(chr(10))} lines; cut it by ideas"


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """(module, overrides) of every `-m <one of our modules> ...` in a document or script, --multirun among them."""
    text = re.sub(r"\\\n\s*", " ", text)
    for match in re.finditer(r"-m ((?:(?:models|featurize|train|serve_eval)\b|slurm\.)[\w.]*)([^\n`|&;]*)", text):
        words = shlex.split(match[2].split(" #")[0], posix=True)
        if "$@" not in words:  # which are handed on
            yield match[1], [word for word in words if re.match(r"[+~]?\w[\w./]*=|--multirun$", word)]


PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "slurm").glob("*.s*")])
DOCUMENTS = ["Makefile", *(str(path.relative_to(ROOT)) for path in PAGES)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_b43_every_command_in_the_documents_exists_and_composes(document: str) -> None:
    path = ROOT / document
    if not path.exists():
        pytest.skip(f"no {document}")
    found = list(commands(path.read_text()))
    assert found or document != "Makefile", "the demo's commands were not recognised"
    for module, overrides in found:
        entry = MODULES.get(f"{module}.__main__") or MODULES.get(module)
        assert entry, f"{document} runs {module}, which is not there"
        guards = [node for node in ast.parse(entry.read_text()).body if is_main_guard(node)]
        assert guards or entry.name == "__main__.py", f"{document} runs {module}, which does nothing when it is run"
        if "conf" not in imports(ast.parse(entry.read_text()), module):
            assert not overrides, f"{document}: {module} takes no overrides"
            continue
        fixed = [word for word in overrides if word != "--multirun"]
        run = conf.load(fixed) if fixed == overrides else expand(fixed).base
        assert run.name, f"{document}: {module} {overrides} names no run"


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_make_alone_lists_the_targets() -> None:
    told = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True)
    assert (told.returncode, told.stderr) == (0, "")
    assert {line.split()[0] for line in told.stdout.splitlines()[1:]} >= {"demo", "test", "lint", "clean"}


def test_every_make_target_in_readme_exists() -> None:
    if not (ROOT / "README.md").exists():
        pytest.skip("no README.md")
    code = re.findall(r"```.*?```|^    [^\n]*$|`[^`\n]+`", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    named = {name for block in code for name in re.findall(r"(?:^|[`\s])make ([a-z][a-z-]+)", block)}
    assert named <= make_targets(), f"README names make {named - make_targets()}"


def test_ci_runs_nothing_that_readme_does_not_know() -> None:
    if not (ROOT / "README.md").exists():
        pytest.skip("no README.md")
    readme = (ROOT / "README.md").read_text()
    loop = re.search(r"for target in ([a-z -]+);", (ROOT / ".ci/run").read_text())
    assert loop
    for target in loop[1].split():
        assert target in make_targets()
        assert f"make {target}" in readme, f".ci/run calls make {target}, of which README says nothing"
