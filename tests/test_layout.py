"""The layout, as rules: who may import whom, how long things may be, what files may not say."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    file for folder in ("fastturn", "kernels", "bench") for file in (ROOT / folder).rglob("*.py")
)

DATA = {"fastturn.types", "fastturn.config"}
LEFT = (
    "render",
    "template",
    "tokenizer",
    "envs",
    "rules",
    "sampler",
    "tree",
    "credit",
    "algorithms",
    "expand",
    "passes",
    "demos",
    "pool",
    "recipes",
    "plan",
    "memory",
    "devices",
    "simulate",
    "forecast",
    "lengths",
    "calibrate",
    "shape",
    "trie",
    "cut",
)
# Samplers that hold the trainer's own model are the exceptions on the left: the one in this process
# runs it, the one for vLLM servers publishes and proves it.
IN_PROCESS = {f"fastturn.sampler.{n}" for n in ("local", "attention", "draw", "store", "vllm")}
RIGHT = (
    *("policy", "loss", "lora", "optim", "publish", "carriers", "checkpoint", "learner"),
    *("dist", "meeting", "sharding", "vocabulary", "lifeline"),
    *("meter", "records", "trackers", "timeline", "provenance"),
)
TEXT = ("render", "template", "envs", "tokenizer", "demos", "transcripts", "tree")
MOST_LINES_FUNCTION, MOST_LINES_FILE = 60, 450
# Called by transformers with its own signature.
DICTATED = {"_registered_attention"}


def module_name(file: Path) -> str:
    """The import name as installed: kernels/rows.py is fastturn.kernels.rows."""
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    if parts[0] != "fastturn":
        parts.insert(0, "fastturn")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports, at any depth, with relative imports resolved.

    `from a import b` gives `a` and `a.b`, because b may be a module.
    """
    package = module_name(file).split(".")
    if file.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


MODULES = {module_name(file): file for file in SOURCES}
IMPORTS = {name: set(imports(file)) for name, file in MODULES.items()}


def within(name: str, packages: tuple[str, ...]) -> bool:
    """Whether a module is one of, or inside one of, `fastturn.<package>`."""
    return any(name == f"fastturn.{p}" or name.startswith(f"fastturn.{p}.") for p in packages)


def third_party(names: set[str]) -> set[str]:
    tops = {name.split(".")[0] for name in names}
    return tops - set(sys.stdlib_module_names) - {"fastturn"}


def members(packages: tuple[str, ...]) -> list[str]:
    found = sorted(name for name in MODULES if within(name, packages))
    assert found
    return found


def test_the_data_types_need_only_numpy():
    for name in DATA:
        assert third_party(IMPORTS[name]) <= {"numpy"}, name
    assert not {n for n in IMPORTS["fastturn.types"] if n.startswith("fastturn")}


@pytest.mark.parametrize("name", sorted(set(members(LEFT)) - IN_PROCESS))
def test_no_torch_left_of_the_isthmus(name):
    assert "torch" not in third_party(IMPORTS[name])
    ours = {n for n in IMPORTS[name] if n in MODULES}
    right = {n for n in ours if within(n, (*RIGHT, "kernels", "pack")) or n in IN_PROCESS}
    assert not right, f"{name} imports {right}"


@pytest.mark.parametrize("name", members(RIGHT))
def test_no_text_right_of_the_isthmus(name):
    text = {n for n in IMPORTS[name] if within(n, TEXT)}
    assert not text, f"{name} imports {text}"
    assert "tokenizers" not in third_party(IMPORTS[name])


@pytest.mark.parametrize("name", members(("kernels",)))
def test_kernels_import_nothing_of_ours(name):
    foreign = {n for n in IMPORTS[name] if n.startswith("fastturn") and not within(n, ("kernels",))}
    assert foreign <= {"fastturn"}, f"{name} imports {foreign}"
    assert third_party(IMPORTS[name]) <= {"torch", "triton", "numpy"}


def test_the_packer_needs_types_and_torch_only():
    assert third_party(IMPORTS["fastturn.pack"]) <= {"numpy", "torch"}
    ours = {n for n in IMPORTS["fastturn.pack"] if n in MODULES}
    assert ours <= {"fastturn.types", "fastturn.trie", "fastturn.cut"}
    ours = {n for n in IMPORTS["fastturn.cut"] if n in MODULES}
    assert not ours, "the plan is made of numbers alone"


def test_only_commands_and_benchmarks_import_the_trainer():
    users = {name for name, names in IMPORTS.items() if "fastturn.trainer" in names}
    commands = ("fastturn.cli", "fastturn.probe")
    assert all(name in commands or within(name, ("bench",)) for name in users), users


def test_the_package_imports_bench_for_its_command_alone():
    for name, names in IMPORTS.items():
        if not within(name, ("bench",)) and name != "fastturn.commands":
            assert not {n for n in names if within(n, ("bench",))}, name
    command = {n for n in IMPORTS["fastturn.commands"] if within(n, ("bench",))}
    assert command == {"fastturn.bench.suites", "fastturn.bench.suites.run"}


def test_light_modules_load_without_torch():
    """What the rules promise, at run time: nothing that these import brings torch with it."""
    light = "types config credit render tree recipes plan memory shape cli envs envs.base sampler"
    light += " sampler.base"
    code = f"import sys, {', '.join(f'fastturn.{name}' for name in light.split())}\n"
    code += "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_kernels_and_bench_install_inside_the_package(tmp_path):
    """A top-level `kernels` would shadow the distribution that transformers looks for."""
    code = (
        "import importlib.util as u; "
        "print([u.find_spec(n).origin for n in ('fastturn.kernels', 'fastturn.bench')]); "
        "print([n for n in ('kernels', 'bench') if u.find_spec(n)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    inside = [str(ROOT / name / "__init__.py") for name in ("kernels", "bench")]
    assert done.stdout.splitlines() == [str(inside), "[]"]


def functions(file: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{file.relative_to(ROOT)}:{node.lineno} {node.name}", node


def test_functions_fit_a_screen():
    long = [
        f"{where} has {length} lines"
        for file in SOURCES
        if ROOT / "kernels" not in file.parents
        for where, node in functions(file)
        if (length := (node.end_lineno or 0) - node.lineno + 1) > MOST_LINES_FUNCTION
    ]
    assert not long, "\n".join(long)


def test_at_most_six_positional_arguments_outside_kernels():
    wide = [
        f"{where} takes {count}"
        for file in SOURCES
        if ROOT / "kernels" not in file.parents
        for where, node in functions(file)
        if node.name not in DICTATED
        and (count := len([a for a in node.args.args if a.arg not in ("self", "cls")])) > 6
    ]
    assert not wide, "\n".join(wide)


def test_files_can_be_read_in_one_go():
    lengths = {file: len(file.read_text().splitlines()) for file in SOURCES}
    long = [f"{f.relative_to(ROOT)}: {n}" for f, n in lengths.items() if n > MOST_LINES_FILE]
    assert not long, "\n".join(long)


def test_no_name_says_nothing():
    vague = re.compile(r"(^|_)(utils?|managers?|helpers?|misc|common)(_|$)")
    assert not [name for name in MODULES if any(map(vague.search, name.split(".")))]


def tracked() -> list[Path]:
    """Files under version control; all files of the working tree where there is no git."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    names = done.stdout.split("\0") if done.returncode == 0 else []
    files = [ROOT / name for name in names if name] or SOURCES
    return [file for file in files if file.is_file()]


def test_no_machine_paths_or_index_hosts():
    """Nothing that holds on one machine only. The patterns are built so as not to match here."""
    places = ("work", "root", "home", "opt", "Users")
    path = re.compile(r"(?<![\w.}~/-])/(" + "|".join(places) + r")/\w")
    host = re.compile(
        "|".join(("py" + "pi.org", "python" + "hosted", "index" + "-url", "find" + "-links"))
    )
    found = []
    for file in tracked():
        try:
            text = file.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if path.search(line) or host.search(line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


def test_nothing_generated_is_tracked():
    generated = re.compile(r"(^|/)(__pycache__|\.venv|build|runs|[^/]+\.egg-info)/|\.pyc$")
    names = [file.relative_to(ROOT).as_posix() for file in tracked()]
    assert not [name for name in names if generated.search(name)]


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def stated_packages() -> set[str]:
    """Names of all dependencies, those of the extras included."""
    extras = PROJECT["project"]["optional-dependencies"]
    lines = itertools.chain(PROJECT["project"]["dependencies"], *extras.values())
    return {re.split(r"[^\w-]", line)[0] for line in lines}


def test_every_dependency_is_explained():
    document = (ROOT / "docs" / "dependencies.md").read_text()
    names = stated_packages() | set(PROJECT["project"]["optional-dependencies"])
    assert not [name for name in sorted(names) if f"`{name}`" not in document]


def test_every_third_party_import_is_a_dependency():
    known = {name.replace("-", "_") for name in stated_packages()}
    # Trackers and data sets are the user's choice and imported only when asked for; tokenizers and
    # huggingface_hub come with transformers, markupsafe with jinja2.
    known |= {"wandb", "trackio", "datasets", "tokenizers", "huggingface_hub", "markupsafe"}
    for name, names in IMPORTS.items():
        if not within(name, ("bench",)):  # peers, each skipped by name when absent
            assert third_party(names) <= known, name


def test_the_packages_listed_are_the_folders_there_are():
    """A new sub-package must be listed, or an ordinary installation would leave it out."""
    folders = {module_name(file) for file in SOURCES if file.name == "__init__.py"}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == folders
