"""The documents are true: options, commands, links and code in them are those of the project."""

import argparse
import ast
import errno
import importlib
import inspect
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from dspark.cache import build_cached_dspark_dataloader
from learnable_cache import next_token_cache

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted(
    path for folder in (".", "docs", "benchmarks") for path in (ROOT / folder).glob("*.md")
)
PARSERS = {"precompute": "_build_parser", "verify": "build_parser", "inspect": "build_parser"}


def parser_of(command: str) -> argparse.ArgumentParser:
    build = getattr(importlib.import_module(f"dspark.{command}"), PARSERS[command])
    parser = build()
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


def default_of(action: argparse.Action) -> str:
    if action.required:
        return "required"
    if action.nargs == 0:
        return "off"
    return "" if action.default is None else f"`{action.default}`"


def usage_of(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar)
    name = action.option_strings[-1]
    if action.nargs == 0:
        return name
    values = "{" + ",".join(action.choices) + "}" if action.choices else action.metavar
    return f"{name} {values or action.dest.upper()}{' …' if action.nargs == '+' else ''}"


def options_table(parser: argparse.ArgumentParser) -> str:
    """The table that README shows for `parser`: a line for each argument, grouped as in --help."""
    lines = ["| argument | default | |", "|---|---|---|"]
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.dest != "help"]
        if actions and group.title not in ("positional arguments", "options"):
            lines.append(f"| **{group.title}** | | |")
        for action in actions:
            text = action.help or ""
            if action.default is not None:
                text = re.sub(r" *\(default: [^)]*\)$", "", text)
            lines.append(f"| `{usage_of(action)}` | {default_of(action)} | {text} |")
    return "\n".join(lines)


@pytest.mark.parametrize("command", PARSERS)
def test_readme_describes_exactly_the_options_that_a_command_has(command):
    table = options_table(parser_of(command))
    assert table in README, f"README needs this table:\n{table}"


def shell_lines(text: str) -> list[str]:
    """The commands in the shell blocks of a document, continued lines joined."""
    blocks = re.findall(r"```(?:bash|console)\n(.*?)```", text, re.DOTALL)
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [line.removeprefix("$ ").split("#")[0].strip() for line in joined.splitlines()]


def dspark_commands() -> list[tuple[str, list[str]]]:
    found = []
    for document in DOCUMENTS:
        for line in shell_lines(document.read_text()):
            match = re.search(r"-m dspark\.(\w+)(.*)", line)
            if match and "…" not in line:
                arguments = re.sub(r"\$\w+", "0", match[2]).rstrip("'")
                words = shlex.split(re.split(r"[|&>]", arguments)[0])
                found.append((match[1], words))
    return found


@pytest.mark.parametrize(("command", "words"), dspark_commands())
def test_every_command_in_the_documents_is_understood_by_its_parser(command, words):
    words = [word.strip("[]") if word.startswith("[--") else word for word in words]
    parser_of(command).parse_args(words)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_relative_link_and_anchor_leads_somewhere(document):
    text = document.read_text()
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        linked = document.parent / path if path else document
        assert linked.exists(), f"{document.name} links to {target}"
        if anchor:
            assert anchor in anchors(linked.read_text()), f"{document.name} links to {target}"


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of a document's headings."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_make_target_and_script_in_the_documents_exists(document):
    text = document.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets
    for script in re.findall(r"`((?:scripts|examples|benchmarks|docs|tests|src)/[\w./-]+)`", text):
        assert (ROOT / script).exists(), f"{document.name} names {script}"


def texts_in_the_source() -> str:
    """All string literals of the package, the constant parts of f-strings among them."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "src" / "dspark").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return "\n".join(str(node.value) for node in nodes if isinstance(node, ast.Constant))


def test_the_messages_that_readme_explains_are_those_of_the_program():
    section = README.partition("## Troubleshooting")[2].partition("\n## ")[0]
    first_cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    messages = [text for cell in first_cells for text in re.findall(r"`([^`]+)`", cell)]
    known = texts_in_the_source()
    known += "".join(os.strerror(number) for number in errno.errorcode)
    parts = [part.strip() for text in messages for part in re.split(r"…|\bN\b|\d+|[\[\]]", text)]
    assert len(messages) > 20
    assert [part for part in parts if part not in known] == []


def test_readme_describes_exactly_the_keywords_of_the_loader():
    section = README.partition("## Reading a cache")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    described = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    keywords = set(inspect.signature(build_cached_dspark_dataloader).parameters)
    assert described | {"cache_dir"} == keywords


def test_the_training_loop_in_readme_runs(tmp_path):
    block = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    cache = next_token_cache(tmp_path)
    names: dict[str, Any] = {}
    exec(block.replace("demo/cache", cache), names)
    assert names["target"].shape == (2 * 40, 16)


def test_the_benchmarks_are_all_described():
    text = (ROOT / "benchmarks" / "README.md").read_text()
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    assert set(re.findall(r"`benchmarks/(\w+\.py)`", text)) == scripts


def test_the_changelog_has_the_version_of_the_package():
    version = importlib.import_module("dspark").__version__
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()


def test_the_dtype_names_of_the_parser_are_those_of_the_cache():
    from dspark.cache import DTYPE_MAP
    from dspark.options import COMPUTE_DTYPES, DTYPES

    assert tuple(DTYPE_MAP) == DTYPES
    assert ("auto", *DTYPE_MAP) == COMPUTE_DTYPES
