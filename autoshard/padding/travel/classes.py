"""Softmax over a padded dim, and losses and tables whose positions are classes: no class is behind the last one."""
from __future__ import annotations

from collections.abc import Sequence

import torch

from autoshard.base.graph import Slot
from autoshard.padding.site import Outcome, Site
from autoshard.padding.values import ANY, BESIDE, FINITE, LOWEST, Fill, Pad, Value, is_finite
from autoshard.rules.ops.embedding_bag import EMBEDDING_BAG, EMBEDDING_BAG_BACKWARD

aten = torch.ops.aten
IGNORED = "ignore_index"


def softmax(site: Site) -> Outcome:
    """The lowest number has no share. A row of the pad has numbers where it had some."""
    (value,), dim = site.values, _dim(site)
    if dim in value.pads:
        value = site.filled(value, dim, LOWEST)
    log = "log" in str(site.op.target)
    share: Fill = LOWEST if log else 0.0
    lowest = dim in value.pads  # every row has numbers beside it, and -inf there
    row: Fill = BESIDE if log and lowest else FINITE
    pads = {d: p.filled(share if d == dim else row if is_finite(p.fill) or lowest and p.fill == BESIDE else ANY) for d, p in value.pads.items()}
    return Outcome([value], [pads])


def softmax_backward(site: Site) -> Outcome | None:
    """Where the gradient is zero behind the classes, and so is their share, the result is."""
    (grad, out), dim, log = site.values, _dim(site), "log" in str(site.op.target)
    for d, pad in out.pads.items():
        grad = site.lengthened(grad, d, pad)
    for d, pad in grad.pads.items():
        out = site.lengthened(out, d, pad)
    if dim in out.pads and out.pads[dim].fill != (LOWEST if log else 0.0):
        return None
    pads: dict[int, Pad] = {}
    for d in grad.pads:
        grad = site.filled(grad, d, 0.0) if d == dim or not is_finite(grad.pads[d].fill) else grad
    for d, pad in grad.pads.items():
        rows = is_finite(out.pads[d].fill) or log and dim in out.pads and out.pads[d].fill == BESIDE
        pads[d] = pad.filled(0.0 if d == dim or pad.fill == 0.0 and rows else FINITE if rows else ANY)
    return Outcome([grad, out], [pads])


def nll(site: Site) -> Outcome | None:
    """No target is behind the classes; targets behind the rows are ignored."""
    x, target, *weight = site.values
    x, target = _rows_ignored(site, x, target)
    weight = _weighted(site, x, weight)
    if target is None or weight is None:
        return None
    rows = {d: p.filled(0.0) for d, p in target.pads.items()} if site.call.argument("reduction") == 0 else {}
    return Outcome([x, target, *weight], [rows, {}])


def nll_backward(site: Site) -> Outcome | None:
    """Zero wherever no target is."""
    grad, x, target, *others = site.values
    given = site.call.argument("weight")
    weight, total = ([others[0]], others[1:]) if isinstance(given, Slot) else ([], others)
    x, target = _rows_ignored(site, x, target)
    weight = _weighted(site, x, weight)
    if target is None or weight is None:
        return None
    for d, pad in target.pads.items():
        grad = site.lengthened(grad, d, pad) if grad.shape else grad
    return Outcome([site.finite(grad), x, target, *weight, *total], [{d: p.filled(0.0) for d, p in x.pads.items()}])


def _rows_ignored(site: Site, x: Value, target: Value) -> tuple[Value, Value | None]:
    """Rows (every dim but 1, the classes) padded alike; None where the target has no rows."""
    row = {d: d - (d > 1) for d in range(len(x.shape)) if d != 1}
    if len(x.shape) < 2 and (x.pads or target.pads):
        return (x, target) if not target.pads and set(x.pads) == {0} else (x, None)
    for d, pad in x.pads.items():
        target = site.lengthened(target, row[d], pad) if d in row else target
    for d, t in row.items():
        x = site.lengthened(x, d, target.pads[t]) if t in target.pads else x
    for t in list(target.pads):
        target = site.filled(target, t, site.call.argument(IGNORED))
    return x, target


def _weighted(site: Site, x: Value, weight: list[Value]) -> list[Value] | None:
    """A weight for every class."""
    at = 1 if len(x.shape) > 1 else 0
    return [site.lengthened(w, 0, x.pads[at]) if at in x.pads else w for w in weight]


def embedding(site: Site) -> Outcome:
    """Rows behind the last are not read."""
    table, ids = site.values
    last = len(ids.shape)
    pads = {d: p.filled(FINITE if table.is_finite else ANY) for d, p in ids.pads.items()}
    for d in list(ids.pads):
        ids = site.filled(ids, d, 0)
    return Outcome([table, ids], [pads | ({last: table.pads[1]} if 1 in table.pads else {})])


def embedding_backward(site: Site) -> Outcome:
    """Rows of the pad add nothing: their gradient is zero."""
    grad, ids = site.values
    for d, pad in grad.pads.items():
        ids = site.lengthened(ids, d, pad) if d < len(ids.shape) else ids
    for d, pad in ids.pads.items():
        grad = site.lengthened(grad, d, pad)
    for d in ids.pads:
        ids, grad = site.filled(ids, d, 0), site.filled(grad, d, 0.0)
    last = len(ids.shape)
    return Outcome([grad, ids], [{1: grad.pads[last]} if last in grad.pads else {}])


def embedding_bag(site: Site) -> Outcome:
    """Rows of the table behind the last are not read. Bags of the pad have its first row."""
    table, *others = site.values
    rows, others = _bags(site, others)
    pads = {} if rows is None else {0: rows.filled(FINITE if table.is_finite else ANY)}
    return Outcome([table, *others], [pads | ({1: table.pads[1]} if 1 in table.pads else {})])


def embedding_bag_backward(site: Site) -> Outcome:
    """Rows of the pad add nothing: their gradient is zero."""
    grad, *others = site.values
    rows, others = _bags(site, others, grad.pads.get(0))
    if rows is not None:
        grad = site.filled(site.lengthened(grad, 0, rows), 0, 0.0)
    return Outcome([grad, *others], [{1: grad.pads[1]} if 1 in grad.pads else {}])


def _bags(site: Site, of_ids: Sequence[Value], rows: Pad | None = None) -> tuple[Pad | None, list[Value]]:
    """The pad of the bags, and ids and what else there is of each, as many bags long."""
    of_ids = [site.cut(v, [1]) if 1 in v.pads else v for v in of_ids]
    rows = next((v.pads[0] for v in of_ids if 0 in v.pads), rows)
    return rows, of_ids if rows is None else [site.filled(site.lengthened(v, 0, rows), 0, 0) for v in of_ids]


def _dim(site: Site) -> int:
    dim: int = site.call.argument("dim") % max(len(site.values[0].shape), 1)
    return dim


TRAVELS = {
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default), softmax),
    **dict.fromkeys((aten._softmax_backward_data.default, aten._log_softmax_backward_data.default), softmax_backward),
    **dict.fromkeys((aten.nll_loss_forward.default, aten.nll_loss2d_forward.default), nll),
    **dict.fromkeys((aten.nll_loss_backward.default, aten.nll_loss2d_backward.default), nll_backward),
    aten.embedding.default: embedding,
    aten.embedding_dense_backward.default: embedding_backward,
    EMBEDDING_BAG: embedding_bag,
    EMBEDDING_BAG_BACKWARD: embedding_bag_backward,
}
