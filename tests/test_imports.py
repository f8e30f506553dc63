"""Modules import downward only, and the public names are exactly the documented ones."""
from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import autoshard

PACKAGE = Path(autoshard.__file__).parent

# From the bottom up; a module may import from its own layer and from those below it.
LAYERS = (
    ("errors", "typed"),
    ("logs",),
    ("search",),
    ("mesh", "_torch", "seeded"),
    ("spec",),
    ("plan", "precision"),
    ("graph",),
    ("layouts",),
    ("rules", "cost"),
    ("flow", "fusion"),
    ("naming", "given"),
    ("annotate",),
    ("calling", "recorder", "caches", "constants", "manual", "survey", "whole", "made_up", "trace", "simplify", "layers", "interpret", "hf_model", "model_ref"),
    ("recompute",),
    ("strategies",),
    ("reachable",),
    ("cost_table",),
    ("regions", "pinned"),
    ("sources",),
    ("copy_nodes",),
    ("formulate",),
    ("incumbents", "options"),
    ("schedule",),
    ("attention_kernels", "emit", "lower", "reprice"),
    ("memory",),
    ("assemble", "feasible", "leanest", "nothing_fits", "offloading"),
    ("wiring",),
    ("orders",),
    ("baselines", "propagate"),
    ("programs",),
    ("runtime",),
    ("explain", "diff"),
    ("layout_pairs",),
    ("report",),
    ("calibrate",),
    ("api",),
    ("verify",),
    ("compare", "sweep", "whynot"),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
PUBLIC = ["AutoshardError", "Mesh", "Plan", "Precision", "ShardingSpec", "annotate", "compile", "local_update", "plan", "shard_batch", "verify"]


def modules() -> list[Path]:
    return [p for p in sorted(PACKAGE.rglob("*.py")) if p != PACKAGE / "__init__.py"]


def unit(path: Path) -> str:
    """The file or folder of the package that `path` belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_units(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "autoshard":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {a.name for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("autoshard.")}
    return found


def test_every_module_has_a_layer():
    assert {unit(p) for p in modules()} - set(RANK) == set()


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downward(path):
    upward = {name for name in imported_units(path) if name in RANK and RANK[name] > RANK[unit(path)]}
    assert not upward, f"{path.name} imports {sorted(upward)} from above"


@pytest.mark.parametrize("path", sorted((PACKAGE / "search").rglob("*.py")), ids=lambda p: p.name)
def test_search_never_imports_torch(path):
    roots = {n.split(".")[0] for node in ast.walk(ast.parse(path.read_text()))
             for n in ([node.module or ""] if isinstance(node, ast.ImportFrom) else
                       [a.name for a in node.names] if isinstance(node, ast.Import) else [])}
    assert "torch" not in roots


def test_models_never_import_autoshard():
    for path in (PACKAGE.parent / "models").glob("*.py"):
        assert "import autoshard" not in path.read_text() and "from autoshard" not in path.read_text(), path


def test_public_names():
    assert sorted(autoshard.__all__) == sorted(PUBLIC)
    assert all(getattr(autoshard, name) is not None for name in PUBLIC)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match="compile|plan"):
        autoshard.no_such_name  # noqa: B018


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_plan_is_the_function_although_a_module_has_its_name():
    code = "import autoshard.plan, autoshard; from autoshard.plan import Plan; print(callable(autoshard.plan))"
    assert run_python(code) == "True"


def test_the_command_line_starts_without_torch():
    assert run_python("import sys, autoshard.cli; print('torch' in sys.modules)") == "False"
