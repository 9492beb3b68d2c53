"""The architecture, checked: which module may import which, and what an import costs."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src" / "dspark"

# Every sub-package and every module above them, from bottom to top, and what it may import besides
# itself. A command is a module; what it is made of is a package.
MAY_IMPORT = {
    "errors": "",
    "options": "",
    "plan": "",
    "disk": "errors",
    "reading": "errors disk",
    "offline_cache": "disk reading",
    "schema": "errors disk",
    "cache": "errors disk reading offline_cache schema",
    "rendering": "errors",
    "chat": "errors rendering",
    "data": "errors disk chat",
    "processes": "errors disk",
    "model": "errors schema processes",
    "target": "errors model",
    "checks": "errors plan disk reading schema cache model target",
    "job": "errors plan disk schema cache chat data processes model target checks",
    "reports": "errors plan disk schema chat data checks job",
    "precompute": "errors options disk cache processes target job",
    "verify": "options checks reports",
    "inspect": "errors options chat data checks reports",
}
# The training side: whoever reads a cache should not have to install or wait for more.
LIGHT = {"errors", "disk", "reading", "offline_cache", "schema", "cache"}
HEAVY = {"transformers", "datasets", "pyarrow", "pandas"}


def layer_of(path: Path) -> str:
    """The sub-package that a file is in, or the name of a module outside all of them."""
    inside = path.relative_to(SRC).parts
    return inside[0] if len(inside) > 1 else path.stem


def imports(path: Path) -> set[str]:
    """The modules that a file names, dspark's own as "dspark.x…"."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = [f"dspark.{alias.name}" for alias in node.names] if base == "dspark" else [base]
            found |= set(names)
    return found


def own_imports(path: Path) -> set[str]:
    """The modules of dspark that a file imports, without the package's name."""
    return {name.partition(".")[2] for name in imports(path) if name.startswith("dspark.")}


def sources() -> list[Path]:
    return sorted(path for path in SRC.rglob("*.py") if path.name != "__init__.py")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts)


def test_every_layer_has_a_place_in_the_table():
    assert {layer_of(path) for path in sources()} == MAY_IMPORT.keys()


def test_the_table_points_down():
    layers = list(MAY_IMPORT)
    for place, layer in enumerate(layers):
        assert set(MAY_IMPORT[layer].split()) <= set(layers[:place]), layer


def test_the_map_in_contributing_is_this_table():
    text = (SRC.parents[1] / "CONTRIBUTING.md").read_text()
    for layer, allowed in MAY_IMPORT.items():
        row = rf"\| `{layer}` \| [^|]+ \| {', '.join(allowed.split()) or 'nothing'} \|"
        assert re.search(row, text), layer


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_a_module_imports_only_from_layers_below_its_own(path):
    layer = layer_of(path)
    allowed = {layer, *MAY_IMPORT[layer].split()}
    strays = {name for name in own_imports(path) if name.partition(".")[0] not in allowed}
    assert not strays, f"{name_of(path)} may not import {sorted(strays)}"


def test_no_two_modules_import_each_other():
    graph = {name_of(path): own_imports(path) for path in sources()}
    tuple(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("path", [p for p in sources() if layer_of(p) in LIGHT], ids=name_of)
def test_the_training_side_names_no_heavy_library(path):
    assert not HEAVY & {name.partition(".")[0] for name in imports(path)}


def loaded_by(*arguments: str) -> set[str]:
    """The top-level names of all that a fresh interpreter imports when run with `arguments`."""
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


def test_importing_the_cache_loads_neither_transformers_nor_datasets():
    loaded = loaded_by("-c", "import dspark.cache")
    assert "torch" in loaded
    assert not HEAVY & loaded


@pytest.mark.parametrize("command", ["precompute", "verify", "inspect"])
def test_the_help_of_a_command_loads_no_torch(command):
    loaded = loaded_by("-m", f"dspark.{command}", "--help")
    assert "argparse" in loaded
    assert not {"torch", "numpy", *HEAVY} & loaded
