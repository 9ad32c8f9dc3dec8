"""Style that the linters can't check (DESIGN section 7), as a test: a rule that is not here is a wish."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "elastic").rglob("*.py"))
PURE = ("planner", "health", "controller", "telemetry", "chaos", "config.py", "plan.py", "events.py", "report.py")
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
CONSTRUCTOR_LINES_MAX = 30
BANNED_NAMES = ("Manager", "Handler", "Base", "Abstract", "Utils", "Common")
BANNED_FILES = ("utils.py", "common.py", "misc.py", "core.py", "helpers.py")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(params=FILES, ids=name, scope="module")
def source(request: pytest.FixtureRequest) -> tuple[Path, ast.Module]:
    return request.param, ast.parse(request.param.read_text())


def test_lengths(source: tuple[Path, ast.Module]) -> None:
    path, tree = source
    assert len(path.read_text().splitlines()) <= FILE_LINES_MAX
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            limit = CONSTRUCTOR_LINES_MAX if node.name == "__init__" else FUNCTION_LINES_MAX
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= limit, f"{node.name} has {length} lines, at most {limit}"


def test_names(source: tuple[Path, ast.Module]) -> None:
    path, tree = source
    assert path.name not in BANNED_FILES
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            assert not node.name.startswith("Base") and not node.name.endswith(BANNED_NAMES), node.name


def test_module_says_what_it_is_for(source: tuple[Path, ast.Module]) -> None:
    path, tree = source
    if path.read_text():
        assert ast.get_docstring(tree), "needs a docstring"


def test_pure_rooms_read_no_clock_and_draw_no_chance(source: tuple[Path, ast.Module]) -> None:
    path, tree = source
    if path.relative_to(ROOT / "elastic").parts[0] not in PURE:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not {alias.name for alias in node.names} & {"time", "random", "datetime", "secrets"}, ast.dump(node)
        if isinstance(node, ast.ImportFrom):
            assert node.module not in ("time", "random", "datetime", "secrets")


def test_environment_is_read_in_the_command_line_only(source: tuple[Path, ast.Module]) -> None:
    path, tree = source
    if path.name == "cli.py":
        return
    text = path.read_text()
    # Setting what a library or a child will read is fine; reading a setting of ours from there is not.
    written = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and id(node) not in written:
            assert f"**{ast.get_source_segment(text, node)}" in text, f"line {node.lineno} reads the environment"


def test_no_debt_without_an_issue(source: tuple[Path, ast.Module]) -> None:
    path, _ = source
    for number, line in enumerate(path.read_text().splitlines(), 1):
        assert not any(word in line for word in ("TODO", "FIXME", "XXX")) or "#" in line.split("TODO")[-1], number
        is_print = re.search(r"(?<![\w.])print\(", line)
        assert not is_print or path.name.startswith("cli") or "file=sys.stderr" in line, f"line {number} prints"
