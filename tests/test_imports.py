"""The architecture, checked: which module may import which, and what an import costs."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src" / "dspark"

# group: (its modules, the groups that it may import besides itself), from bottom to top.
GROUPS = {
    "base": (
        "errors limits publish plan background interrupts heartbeat group rendezvous lock "
        "identity log_setup run_log progress terminal options logits svg_plots",
        "",
    ),
    "disk": (
        "manifest shard_file shard_writer shard_check shard_reader open_shards batch_memory "
        "worker_memory sampler cache_loader offline_cache",
        "base",
    ),
    "schema": ("cache_manifest target_weights cache", "base disk"),
    "input": ("split_slice row_files columns rows", "base"),
    "chat": ("instrument messages watch template habits rendered alignment mask chat", "base"),
    "tokens": ("encoding tokens", "base input chat"),
    "target": ("tensor_parallel head layers recorder capture target_check target", "base"),
    "verify": (
        "directory_check manifest_check cache_content cache_check cache_rows recompute verify",
        "base disk schema target",
    ),
    "inspect": (
        "marked_text chat_report cache_summary cache_report html_report cache_inspection inspect",
        "base disk schema input chat tokens verify",
    ),
    "command": (
        "forward bad_states staging pipeline forecast settings workplace survey reading run "
        "precompute",
        "base disk schema input chat tokens target verify",
    ),
}
# The training side: whoever reads a cache should not have to install or wait for more.
LIGHT = ("disk", "schema")
HEAVY = {"transformers", "datasets", "pyarrow", "pandas"}

GROUP_OF = {module: group for group, (modules, _) in GROUPS.items() for module in modules.split()}


def imports(module: str) -> set[str]:
    """The modules that `module` names in its source, dspark's own as "dspark.x"."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((SRC / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = [f"dspark.{alias.name}" for alias in node.names] if base == "dspark" else [base]
            found |= set(names)
    return found


def own_imports(module: str) -> set[str]:
    """The modules of dspark that `module` imports, without the package's name."""
    return {name.split(".")[1] for name in imports(module) if name.startswith("dspark.")}


def modules_on_disk() -> list[str]:
    return sorted(path.stem for path in SRC.glob("*.py") if path.stem != "__init__")


def test_every_module_has_a_place_in_the_table():
    assert modules_on_disk() == sorted(GROUP_OF)


def test_the_map_in_contributing_is_this_table():
    text = (SRC.parents[1] / "CONTRIBUTING.md").read_text()
    for group, (modules, allowed) in GROUPS.items():
        named = " ".join(f"`{module}`" for module in modules.split())
        assert f"| {named} | {', '.join(allowed.split()) or 'nothing'} |" in text, group


@pytest.mark.parametrize("module", modules_on_disk())
def test_a_module_imports_only_from_groups_below_its_own(module):
    group = GROUP_OF[module]
    allowed = {group, *GROUPS[group][1].split()}
    strays = {name for name in own_imports(module) if GROUP_OF[name] not in allowed}
    assert not strays, f"{module} ({group}) may not import {sorted(strays)}"


def test_no_two_modules_import_each_other():
    graph = {module: own_imports(module) for module in modules_on_disk()}
    tuple(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("module", [m for g in LIGHT for m in GROUPS[g][0].split()])
def test_the_training_side_names_no_heavy_library(module):
    assert not HEAVY & {name.partition(".")[0] for name in imports(module)}


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
