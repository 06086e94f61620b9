"""Tests of the layers: imports, includes and the shape of the tree. ARCHITECTURE.md says why."""

import ast
import functools
import html
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from paths import ROOT

PACKAGE = ROOT / "python" / "fastdist"
CSRC = ROOT / "csrc"

# A chain: each imports from itself and from those above it, and from nothing below.
CHAIN = (
    "fastdist.processes",
    "fastdist.errors",
    "fastdist._core",
    "fastdist._version",
    "fastdist._config",
    "fastdist.link",
    "fastdist.cluster",
    "fastdist.recorder",
    "fastdist.collectives",
    "fastdist.replicas",
    "fastdist.training",
    "fastdist.data",
    "fastdist.strategies",
    "fastdist.checkpoints",
    "fastdist.ps",
    "fastdist.tpu",
    "fastdist.keras",
    "fastdist.integrations",
    "fastdist.nn",
    "fastdist",
    "fastdist.cli",
    "fastdist.__main__",
)
PLACE = {name: place for place, name in enumerate(CHAIN)}
# The same rule inside of fastdist.ps.
PS_CHAIN = (
    "fastdist.ps.wire",
    "fastdist.ps.server",
    "fastdist.ps.client",
    "fastdist.ps.coordinator",
    "fastdist.ps.model",
    "fastdist.ps.worker_host",
    "fastdist.ps.strategy",
    "fastdist.ps",
)
PS_PLACE = {name: place for place, name in enumerate(PS_CHAIN)}

# Folders of csrc/ that each one may include from, besides itself.
INCLUDES = {
    "bindings": {"core", "host", "net", "table", "cuda", "nccl"},
    "nccl": {"core", "cuda"},
    "cuda": {"core"},
    "net": {"core", "host"},
    "host": {"core"},
    "table": {"core"},
    "core": set(),
}
# C++ is fastdist._core. What it needs from above is given to it.
CPP_IMPORT = re.compile(r'[iI]mport\w*\(\s*"(fastdist[\w.]*)"')
PYTHON_HEADERS = re.compile(r"pybind11/|Python\.h$|numpy/")
CUDA_HEADERS = re.compile(r"cuda|nccl|cub/|thrust/|cooperative_groups|device_launch|driver_types")
TORCH_HEADERS = re.compile(r"torch/|ATen/|c10/")

# Variables that launchers set for the ranks they start; everything else that begins with FASTDIST_
# is a setting and read in _config.py.
LAUNCH_VARIABLES = {
    "FASTDIST_JOB": ("cluster", "cli"),
    "FASTDIST_LAUNCHER": ("cluster", "cli"),
    "FASTDIST_RANK_PROCESS": ("cluster",),
    "FASTDIST_REPLICAS": ("cluster",),
    "FASTDIST_ROSTER": ("cluster",),
}

VAGUE_NAMES = {"common", "helper", "helpers", "misc", "util", "utils"}

HEAVY_MODULES = ("torch", "cupy", "ml_dtypes", "jax", "tensorflow", "matplotlib", "rich")


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def python_modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def is_module(name: str) -> bool:
    path = PACKAGE.parent / Path(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists() or path.with_suffix(".pyi").exists()


def place_of(module: str) -> int:
    """Return the position of a module in the chain."""
    parts = module.split(".")
    return PLACE[".".join(parts[:2])]


def place_in_ps(module: str) -> int:
    """Return the position of a module of fastdist.ps in its chain."""
    return PS_PLACE[".".join(module.split(".")[:3])]


def imports_of(module: str, path: Path) -> Iterator[tuple[str, int]]:
    """Yield every fastdist module that a file imports, with the line, inside functions too."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                inside = name.startswith("fastdist.") and is_module(name)
                yield name if inside else base, node.lineno


def is_allowed(importer: str, imported: str) -> bool:
    if importer.startswith("fastdist.ps.") and f"{imported}.".startswith("fastdist.ps."):
        return place_in_ps(imported) <= place_in_ps(importer)
    return place_of(imported) <= place_of(importer)


def sources() -> Iterator[Path]:
    for path in sorted(CSRC.rglob("*")):
        if path.suffix in (".h", ".cpp", ".cu", ".cuh"):
            yield path


def includes_of(path: Path) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8").splitlines():
        if match := re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line):
            yield match[1]


def tracked_files() -> list[str]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a clone")
    result = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if result.returncode != 0:
        pytest.skip(f"git ls-files: {result.stderr.strip()}")
    return [name for name in result.stdout.splitlines() if (ROOT / name).exists()]


def test_every_module_has_a_place_in_the_chain() -> None:
    tops = {".".join(module.split(".")[:2]) for module, _ in python_modules()}
    assert sorted(tops - PLACE.keys()) == [], "add them to CHAIN"
    modules = [module for module, _ in python_modules() if module.startswith("fastdist.ps.")]
    tops = {".".join(module.split(".")[:3]) for module in modules}
    assert sorted(tops - PS_PLACE.keys()) == [], "add them to PS_CHAIN"


def test_imports_point_down() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {module} imports {imported}"
        for module, path in python_modules()
        for imported, line in imports_of(module, path)
        if imported.split(".")[0] == "fastdist" and not is_allowed(module, imported)
    ]
    assert wrong == []


def names_in(path: Path) -> set[str]:
    """Return what a module may define: names that it binds, and strings, for those made lazily."""
    names: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names


@pytest.mark.slow
def test_tests_and_examples_import_what_exists() -> None:
    """Some of them run in few environments only, such as those of TPUs."""
    defined = {module: names_in(path) for module, path in python_modules()}
    defined["fastdist._core"] = names_in(PACKAGE / "_core.pyi")
    wrong = []
    for folder in ("tests", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in nodes_of(path):
                if isinstance(node, ast.Import):
                    imported = [(alias.name, None) for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    imported = [(node.module or "", alias.name) for alias in node.names]
                else:
                    continue
                wrong += [
                    f"{path.relative_to(ROOT)}:{node.lineno}: {module} {name or ''}"
                    for module, name in imported
                    if module.split(".")[0] == "fastdist"
                    and (module not in defined or name not in {None, *defined[module]})
                    and not is_module(f"{module}.{name}")
                ]
    assert wrong == []


def test_no_module_imports_itself_through_others() -> None:
    """Imports for types alone, and inside functions, count too."""
    graph = {
        module: {imported for imported, _ in imports_of(module, path)} - {module}
        for module, path in python_modules()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("fastdist.cli.run", "fastdist.cluster.launch", True),
        ("fastdist.cli.bench.worker", "fastdist", True),
        ("fastdist.collectives.communicator", "fastdist._core", True),
        ("fastdist.collectives.init", "fastdist", False),
        ("fastdist.collectives.rendezvous", "fastdist.replicas.context", False),
        ("fastdist.cluster.launch", "fastdist.errors", True),
        ("fastdist._core", "fastdist.errors", True),
        ("fastdist._core", "fastdist.collectives.hints", False),
        ("fastdist.cluster.launch", "fastdist.collectives.init", False),
        ("fastdist.errors", "fastdist._config", False),
        ("fastdist.processes.supervisor", "fastdist.errors", False),
        ("fastdist.data.sharding", "fastdist.strategies", False),
        ("fastdist.training.modules", "fastdist.ps.model.table", False),
        ("fastdist.ps.client.client", "fastdist.link.secret", True),
        ("fastdist.link.listener", "fastdist.cluster.launch", False),
        ("fastdist.ps.wire.snapshot", "fastdist.ps.client.client", False),
        ("fastdist.ps.worker_host", "fastdist.ps.strategy", False),
        ("fastdist.ps.strategy", "fastdist.ps", False),
        ("fastdist.nn", "fastdist.ps.model.embeddings", True),
    ],
)
def test_the_rule_itself(importer: str, imported: str, allowed: bool) -> None:
    assert is_allowed(importer, imported) is allowed


def test_imports_are_found_in_every_form(tmp_path: Path) -> None:
    path = tmp_path / "__init__.py"
    path.write_text(
        "import fastdist.collectives\nfrom fastdist import errors, init\nfrom . import run\n"
        "from ..cluster import launch\ndef f():\n    from fastdist.replicas.context import state\n"
    )
    assert [name for name, _ in sorted(imports_of("fastdist.cli", path), key=lambda x: x[1])] == [
        "fastdist.collectives",
        "fastdist.errors",
        "fastdist",
        "fastdist.cli.run",
        "fastdist.cluster.launch",
        "fastdist.replicas.context",
    ]


def test_imports_of_cpp_point_down() -> None:
    found = [
        (path.relative_to(ROOT), imported)
        for path in sources()
        for imported in CPP_IMPORT.findall(path.read_text(encoding="utf-8"))
    ]
    assert found, "fastdist.errors is imported"
    assert [each for each in found if not is_allowed("fastdist._core", each[1])] == []


@pytest.mark.parametrize("call", ["py::module_::import(", "PyImport_ImportModule(\n    "])
def test_imports_of_cpp_are_found(call: str) -> None:
    assert CPP_IMPORT.findall(f'{call}"fastdist.collectives.hints")') == [
        "fastdist.collectives.hints"
    ]


def test_includes_point_down() -> None:
    wrong = []
    for path in sources():
        folder = path.relative_to(CSRC).parts[0]
        for header in includes_of(path):
            target = header.split("/")[0]
            if (CSRC / target).is_dir() and target not in {folder} | INCLUDES[folder]:
                wrong.append(f"{path.relative_to(ROOT)} includes {header}")
    assert wrong == []


def test_own_headers_are_included_by_their_path_in_csrc() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} includes {header}"
        for path in sources()
        for header in re.findall(r'#\s*include\s*"([^"]+)"', path.read_text(encoding="utf-8"))
        if not (CSRC / header).exists()
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("headers", "folders"),
    [
        (PYTHON_HEADERS, {"bindings"}),
        (CUDA_HEADERS, {"cuda", "nccl"}),
        (TORCH_HEADERS, set[str]()),
    ],
    ids=["python", "cuda", "torch"],
)
def test_foreign_headers_stay_in_their_folders(headers: re.Pattern[str], folders: set[str]) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} includes {header}"
        for path in sources()
        if path.relative_to(CSRC).parts[0] not in folders
        for header in includes_of(path)
        if headers.match(header) and not (CSRC / header).exists()
    ]
    assert wrong == []


def test_no_condition_on_cuda() -> None:
    condition = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif)\b.*(CUDA|NCCL|NVCC)", re.MULTILINE)
    wrong = [path for path in sources() if condition.search(path.read_text(encoding="utf-8"))]
    assert wrong == [], "let CMake pick a file"


def test_settings_are_read_in_one_file() -> None:
    wrong = []
    for module, path in python_modules():
        folder = path.relative_to(PACKAGE).parts[0]
        for node in nodes_of(path):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            name = node.value
            if re.fullmatch(r"FASTDIST_\w*", name) is None or module == "fastdist._config":
                continue
            if folder not in LAUNCH_VARIABLES.get(name, ()):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    wrong += [
        f"{path.relative_to(ROOT)} reads the environment"
        for path in sources()
        if re.search(r'getenv\s*\(\s*"FASTDIST', path.read_text(encoding="utf-8"))
    ]
    assert wrong == []


def test_settings_are_documented_in_one_table() -> None:
    tree = ast.parse((PACKAGE / "_config.py").read_text(encoding="utf-8"))
    read = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"FASTDIST_\w+", node.value)
    }
    rows = re.findall(r"^\| (FASTDIST_\w+) \|", ast.get_docstring(tree) or "", re.MULTILINE)
    assert sorted(rows) == sorted(read)


def test_import_is_light() -> None:
    """CI prints how long it takes."""
    script = "import fastdist, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "fastdist" in loaded
    assert [name for name in HEAVY_MODULES if name in loaded] == []


def test_names_of_files_say_what_is_inside() -> None:
    vague = [
        name
        for name in tracked_files()
        if VAGUE_NAMES & {Path(part).stem.lower().lstrip("_") for part in Path(name).parts}
    ]
    assert vague == []


def test_ci_runs_the_test_command_of_the_readme() -> None:
    blocks = re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", readme(), re.MULTILINE | re.DOTALL)
    commands = [line.removeprefix("$ ") for line in blocks[1].splitlines() if line.strip()]
    assert any("pytest" in command for command in commands), "README's second command block"
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert [command for command in commands if command not in ci] == []


def test_ci_names_cpp_tests_that_exist() -> None:
    ci = (ROOT / ".ci" / "aarch64").read_text(encoding="utf-8")
    named = re.search(r"^tests=\((.+)\)$", ci, re.MULTILINE)
    assert named is not None
    files = (ROOT / "tests" / "cpp").glob("test_*.cpp")
    assert set(named[1].split()) <= {path.stem.removeprefix("test_") for path in files}


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def test_links_lead_to_files() -> None:
    """A link to a folder works on GitHub and is dead on the site."""
    wrong = []
    for name in tracked_files():
        if name.endswith(".md"):
            text = re.sub(r"```.*?```|`[^`\n]*`", "", (ROOT / name).read_text(), flags=re.DOTALL)
            for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
                if not ((ROOT / name).parent / target).is_file():
                    wrong.append(f"{name}: {target}")
    assert wrong == []


def test_pictures_are_those_of_their_texts() -> None:
    pictures = sorted((ROOT / "docs" / "images").glob("*.dot"))
    assert pictures
    for path in pictures:
        labels = re.findall(r'label="([^"]+)"', path.read_text(encoding="utf-8"))
        wanted = sorted({line for label in labels for line in label.split("\\n")})
        drawn = html.unescape(path.with_suffix(".svg").read_text(encoding="utf-8"))
        found = {line.replace("\xa0", " ") for line in re.findall(r"<text[^>]*>([^<]*)<", drawn)}
        assert [line for line in wanted if line not in found] == [], f"draw {path.name} again"
