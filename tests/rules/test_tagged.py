"""Every op torch tags as pointwise obeys the pointwise rule: arguments are made from the schema."""
import pytest
import torch

from autoshard.rules import registry
from autoshard.rules.check.oracle import wrong_rows
from autoshard.rules.check.samples import T, build, sample

aten = torch.ops.aten


def tagged_ops():
    packets = (getattr(aten, name) for name in dir(aten))
    ops = (getattr(p, o) for p in packets if hasattr(p, "overloads") for o in p.overloads())
    return [op for op in ops if torch.Tag.pointwise in op.tags and not op._schema.is_mutable
            and all("Tensor" in str(r.type) for r in op._schema.returns)]


def make(op, tensor):
    """A sample of `op`: `tensor` for the first tensor, one that broadcasts for the others."""
    args, shapes = [], [tensor, T(6, dtype=tensor.dtype, high=tensor.high)]
    for a in op._schema.arguments:
        if a.kwarg_only or (a.has_default_value() and "Tensor" not in str(a.type)):
            break
        kind = str(a.type)
        if "Tensor" in kind:
            args.append(shapes.pop(0) if len(shapes) > 1 else shapes[0])
        else:
            args.append({"bool": False, "int": 1, "Optional[str]": "floor"}.get(kind, 0.5))
    return sample(op, *args)


def made(op):
    """The first sample the op accepts, or None."""
    for tensor in (T((2, 4), 6), T((2, 4), 6, high=9), T((2, 4), 6, dtype=torch.complex128)):
        try:
            return build(make(op, tensor))
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
            continue
    return None


OPS = tagged_ops()


@pytest.mark.parametrize("part", range(8))
def test_tagged_ops_are_pointwise(part):
    wrong, tried = [], 0
    for op in OPS[part::8]:
        found = made(op)
        if found is None:
            continue
        tried += 1
        assert len(registry.rows(found[0])) >= 4, f"{op}: three logical dims, so at least four rows"
        wrong += wrong_rows(*found, pairs=4)
    assert tried > len(OPS[part::8]) // 2
    assert not wrong, "\n".join(map(str, wrong))
