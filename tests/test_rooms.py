"""The shape of the house: rooms import downward only, private names of torch have one home, sizes are bounded, names are public once.

    python tests/test_rooms.py    # prints the largest files and functions
"""
from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

import autoshard
import autoshard._torch

PACKAGE = Path(autoshard.__file__).parent

# From the bottom up; a module imports from its own room and from those below it. docs/architecture.md says what each is for.
ROOMS = ("errors _torch base experts search collectives rules cost seeds program padding space recompute lower play formulate decide pipeline planner runtime api serve "
         "study verification simulation report calibrate cli __main__").split()
PUBLIC = ("AutoshardError Mesh Pipeline Plan Planner Precision ShardingSpec annotate check_rule clip_grad_norm_ clocked compile generator local_update "
          "pad_to_bucket plan "
          "register_rule shard_batch simulate stage stale_pipeline sweep transformers_cuts transformers_plan transformers_seeds verify").split()
MOST_LINES, MOST_IN_FUNCTION = 400, 60
SHOWN = 12  # of the largest files, and of the largest functions
NO_NAMES = {"common", "helper", "helpers", "misc", "tools", "util", "utils"}  # of modules: they say nothing of what is inside


def modules() -> list[Path]:
    return [p for p in sorted(PACKAGE.rglob("*.py")) if p != PACKAGE / "__init__.py"]


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    """Every module that `path` imports, with the names taken from it, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{a.name}" for a in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names)


EVERY_MODULE = pytest.mark.parametrize("path", modules(), ids=name_of)


def test_every_module_is_in_a_room():
    assert {room(p) for p in modules()} == set(ROOMS)


@EVERY_MODULE
def test_imports_point_downward(path):
    rank = {name: i for i, name in enumerate(ROOMS)}
    used = {name.split(".")[1] for name in imports(path) if name.startswith("autoshard.")}
    upward = {name for name in used if rank.get(name, -1) > rank[room(path)]}
    assert not upward, f"{name_of(path)} imports {sorted(upward)} from above"


@EVERY_MODULE
def test_only_one_file_imports_private_names_of_torch(path):
    private = {name for name in imports(path) if name.startswith("torch.") and any(part.startswith("_") for part in name.split("."))}
    assert path.name == "_torch.py" or not private, f"{name_of(path)}: move {sorted(private)} to _torch.py"


def lines_of_files() -> dict[str, int]:
    return {name_of(p): p.read_text().count("\n") for p in modules()}


def lines_of_functions() -> dict[str, int]:
    return {f"{name_of(p)}:{f.lineno} {f.name}": f.end_lineno - f.lineno + 1
            for p in modules() for f in ast.walk(tree(p)) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef))}


def largest(lines: dict[str, int], title: str) -> str:
    """A table of the largest, for whoever looks where to split next."""
    return "\n".join([title, *(f"  {n:4}  {name}" for name, n in sorted(lines.items(), key=lambda e: -e[1])[:SHOWN])])


@pytest.mark.parametrize("lines, most", [(lines_of_files, MOST_LINES), (lines_of_functions, MOST_IN_FUNCTION)])
def test_files_and_functions_are_small(lines, most):
    found = lines()
    assert max(found.values()) <= most, largest(found, f"{lines.__name__}, at most {most}: split the first of")


@EVERY_MODULE
def test_asserts_say_what_is_wrong(path):
    silent = [node.lineno for node in ast.walk(tree(path)) if isinstance(node, ast.Assert) and node.msg is None]
    assert not silent, f"{name_of(path)} asserts without a message in lines {silent}"


def test_no_module_is_named_like_a_public_function():
    names = {p.stem if p.stem != "__init__" else p.parent.name for p in PACKAGE.glob("*.py")} | {p.name for p in PACKAGE.iterdir() if p.is_dir()}
    assert not names & set(PUBLIC)


def test_modules_are_named_by_what_they_hold():
    nameless = [name_of(p) for p in modules() if {part.removesuffix(".py").strip("_") for part in Path(name_of(p)).parts} & NO_NAMES]
    assert set(nameless) <= {"cli/common.py"}, f"{nameless}: name a module by what is inside"  # what all commands share


@cache
def names_of(path: Path) -> set[str]:
    """The names that a module makes; of a room's `__init__.py` also those it imports: they are what the room offers."""
    nodes = list(ast.walk(tree(path)))
    made = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    made |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    if path.name == "__init__.py":
        made |= {a.asname or a.name for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names}
    return made | {p.stem for p in path.parent.iterdir()} if path.name == "__init__.py" else made


@EVERY_MODULE
def test_names_are_imported_from_where_they_are_made(path):
    passed_on = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("autoshard."):
            home = PACKAGE.parent / node.module.replace(".", "/")
            home = home / "__init__.py" if home.is_dir() else home.with_suffix(".py")
            if home.name != "_torch.py":  # hands on what is private in torch
                passed_on += [f"{node.module}.{a.name}" for a in node.names if a.name not in names_of(home)]
    assert not passed_on, f"{name_of(path)} takes {passed_on} from a module that only imports them"


@EVERY_MODULE
def test_what_is_taken_from_torch_is_there(path):
    used = {n.attr for n in ast.walk(tree(path))
            if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "_torch"}
    missing = {name for name in used if not hasattr(autoshard._torch, name)}
    assert not missing, f"{name_of(path)} uses {sorted(missing)} of _torch.py, which has no such names"


@pytest.mark.parametrize("path", sorted((PACKAGE / "search").rglob("*.py")), ids=name_of)
def test_search_never_imports_torch(path):
    assert "torch" not in {name.split(".")[0] for name in imports(path)}


def test_models_never_import_autoshard():
    for path in (PACKAGE.parent / "models").glob("*.py"):
        assert "import autoshard" not in path.read_text() and "from autoshard" not in path.read_text(), path


def test_public_names():
    assert sorted(autoshard.__all__) == sorted(PUBLIC)
    assert all(getattr(autoshard, name) is not None for name in PUBLIC)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match="compile|plan"):
        autoshard.no_such_name  # noqa: B018


def test_the_command_line_starts_without_torch():
    code = "import sys, autoshard.cli; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_no_folder_of_tests_is_left_out(pytestconfig):
    """pytest walks past folders with certain names, `dist` among them, without a word."""
    folders = {part for p in Path(__file__).parent.rglob("test_*.py") for part in p.relative_to(Path(__file__).parent).parts[:-1]}
    assert "dist" in folders and not [f for f in folders for pattern in pytestconfig.getini("norecursedirs") if fnmatch(f, pattern)]


if __name__ == "__main__":
    print(largest(lines_of_files(), "lines of the largest files"))
    print(largest(lines_of_functions(), "lines of the largest functions"))
