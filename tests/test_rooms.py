"""The shape of the house: rooms import downward only, private names of torch have one home, sizes are bounded, names are public once."""
from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import autoshard

PACKAGE = Path(autoshard.__file__).parent

# From the bottom up; a module imports from its own room and from those below it. docs/architecture.md says what each is for.
ROOMS = ("errors _torch base search collectives rules cost seeds program space recompute lower play formulate decide runtime api "
         "study verification report calibrate cli __main__").split()
PUBLIC = ["AutoshardError", "Mesh", "Plan", "Precision", "ShardingSpec", "annotate", "compile", "local_update", "plan", "shard_batch", "verify"]
MOST_LINES, MOST_IN_FUNCTION = 400, 60


def modules() -> list[Path]:
    return [p for p in sorted(PACKAGE.rglob("*.py")) if p != PACKAGE / "__init__.py"]


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Every module that `path` imports, with the names taken from it, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text())):
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


@EVERY_MODULE
def test_files_and_functions_are_small(path):
    text = path.read_text()
    assert text.count("\n") <= MOST_LINES, f"{name_of(path)} has {text.count(chr(10))} lines; split it"
    long = [f"{f.name}: {f.end_lineno - f.lineno + 1}" for f in ast.walk(ast.parse(text))
            if isinstance(f, ast.FunctionDef) and f.end_lineno - f.lineno >= MOST_IN_FUNCTION]
    assert not long, f"{name_of(path)} has functions of many lines: {long}"


@EVERY_MODULE
def test_asserts_say_what_is_wrong(path):
    silent = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert) and node.msg is None]
    assert not silent, f"{name_of(path)} asserts without a message in lines {silent}"


def test_no_module_is_named_like_a_public_function():
    names = {p.stem if p.stem != "__init__" else p.parent.name for p in PACKAGE.glob("*.py")} | {p.name for p in PACKAGE.iterdir() if p.is_dir()}
    assert not names & set(PUBLIC)


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
