"""The schemes that experts plan by: a role per mesh axis, and how parameters are stored.

    data       the batch is split; whoever computes with a parameter reads it whole
    tensor     matmuls split their weight: along the contracted dim where their input is split there already (row),
               else along the other (column); sums are reduced to whole values at once
    sequence   as tensor, but sums are reduce-scattered along the sequence, and gathered where a column starts
    context    as data, but dim 1 of the inputs is split, the sequence; attention reads keys and values whole
    ulysses    as context, but attention is split by heads: all-to-alls before and behind it
    experts    as data, but every rank has a share of the experts, to which tokens travel

    whole      parameters, gradients and optimizer state on every rank of the data axes
    sharded    split over the data axes; a gathered copy is kept from forward to backward (`keep`: ZeRO-1 and 2) or gathered again
               in backward (ZeRO-3). Gradients are reduced where they are made, or all when backward is through (`late`:
               ZeRO-1), which takes the memory of whole gradients and hides behind no compute.

The roles are as in Rajbhandari et al., "ZeRO" (2020), Shoeybi et al., "Megatron-LM" (2019), Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models" (2022), Jacobs et al., "DeepSpeed Ulysses" (2023), the context parallelism of Llama 3
("The Llama 3 Herd of Models", 2024), and Lepikhin et al., "GShard" (2020).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autoshard.base.graph import Call, Graph, Op, Ref, TensorMeta
from autoshard.base.mesh import Mesh
from autoshard.base.spec import R
from autoshard.experts.ops import EXPERTS, EXPERTS_BACKWARD
from autoshard.program import flow
from autoshard.rules import registry
from autoshard.rules.family import Family

Role = Literal["data", "tensor", "sequence", "context", "ulysses", "experts"]
ALONG_SEQUENCE: tuple[Role, ...] = ("context", "ulysses")
BY_BATCH: tuple[Role, ...] = ("data", "experts")
STORES_FREELY: tuple[Role, ...] = ("data", *ALONG_SEQUENCE)
"""Roles whose ranks read every parameter whole, so that it may be stored in any way."""
READS_WHOLE: tuple[Role, ...] = (*STORES_FREELY, "experts")
"""Likewise, but for the experts' own weights."""
HEADS, ROWS = 1, 2
"""Dims of attention's query."""
KEYS = ("key", "value")
READ_ALIKE = ("query", "grad_out", "out", "logsumexp")
"""What attention and its gradient read split as the query is."""


@dataclass(frozen=True)
class Scheme:
    """One way to plan by hand: a role per mesh axis, how parameters are stored, whether gathered copies are kept and
    gradients reduced late."""

    name: str
    roles: tuple[Role, ...]
    sharded: bool = False
    keep: bool = True
    late: bool = False

    def describe(self, mesh: Mesh) -> str:
        """`"data dp, tensor tp"`."""
        words = {r: "*".join(n for n, role in zip(mesh.names, self.roles, strict=True) if role == r) for r in self.roles}
        return ", ".join(f"{role} {names}" for role, names in words.items())

    def obstacle(self, graph: Graph, mesh: Mesh) -> str:
        """Why the scheme cannot be had as it is meant, or ""."""
        batch, sequence = lengths(graph)
        wanted: list[tuple[str, int, tuple[Role, ...]]] = [("a batch", batch, BY_BATCH), ("a sequence", sequence, ALONG_SEQUENCE)]
        wanted += [("a number of heads", n, ("ulysses",)) for n in sorted(_queries(graph, HEADS))]
        if "experts" in self.roles:
            wanted += [("a number of experts", n, ("experts",)) for n in sorted({graph.meta(ref).shape[0] for ref in of_experts(graph)})]
        for what, n, roles in wanted:
            ranks = mesh.ranks([a for a, role in enumerate(self.roles) if role in roles])
            if ranks > 1 and (not n or n % ranks):
                return f"{what} of {n} does not split over {ranks} ranks"
        return ""


def schemes(mesh: Mesh, graph: Graph | None = None) -> tuple[Scheme, ...]:
    """The baselines of a mesh, and those for what is in `graph`: attention over a sequence, layers of experts. Data parallel schemes use all
    axes; the others have their role on the last axis (the fastest links), with data parallelism on the others."""
    data: tuple[Role, ...] = ("data",) * mesh.ndim

    def last(role: Role) -> tuple[Role, ...]:
        return (*data[1:], role)

    found = [Scheme("DDP", data), Scheme("ZeRO-1", data, sharded=True, late=True), Scheme("ZeRO-2", data, sharded=True),
             Scheme("FSDP (ZeRO-3)", data, sharded=True, keep=False), Scheme("Megatron TP", last("tensor")),
             Scheme("TP + sequence parallel", last("sequence"))]
    if mesh.ndim > 1:
        found += [Scheme("FSDP x TP", last("tensor"), sharded=True, keep=False),
                  Scheme("FSDP x (TP + sequence)", last("sequence"), sharded=True, keep=False)]
    if graph is not None and lengths(graph)[1] > 1 and lengths(graph)[1] in _queries(graph, ROWS):
        found += [Scheme("FSDP x context parallel (gather)", last("context"), sharded=True, keep=False),
                  Scheme("FSDP x context parallel (Ulysses)", last("ulysses"), sharded=True, keep=False)]
    if graph is not None and of_experts(graph):
        found += [Scheme("FSDP x expert parallel", last("experts"), sharded=True, keep=False)]
    return tuple(found)


def batch_size(inputs: tuple[Op, ...]) -> int:
    """Dim 0 of the first input that has dims."""
    return next((op.outputs[0].logical_shape[0] for op in inputs if op.outputs[0].logical_shape), 0)


def lengths(graph: Graph) -> tuple[int, int]:
    """Rows and columns of the first input that has dims: batch and, where attention has as many queries, sequence. 0 for what there is not."""
    first = next((op.outputs[0].shape for op in graph.of_kind("input") if op.outputs[0] is not None and op.outputs[0].shape), ())
    batch, sequence = (*first, 0, 0)[:2]
    return batch, sequence


def splits_input(role: Role, shape: tuple[int, ...], graph: Graph) -> int:
    """The dim along which an input of `shape` is split on an axis of this role, or R."""
    batch, sequence = lengths(graph)
    if role in BY_BATCH and shape[:1] == (batch,):
        return 0
    return 1 if role in ALONG_SEQUENCE and shape[:2] == (batch, sequence) else R


def is_attention(op: Op) -> bool:
    """Attention of [batch, heads, sequence, head], or its gradient."""
    return registry.family_of(op) is Family.ATTENTION


def of_experts(graph: Graph) -> frozenset[Ref]:
    """Weights that hold a matrix for each expert, [experts, ..., ...], and what views and casts make of them: what a layer of experts reads, or a
    matmul of matrices in rows."""
    matrices = [ref for ref in flow.param_derived(graph) if len(graph.meta(ref).shape) == 3]
    counts = {graph.meta(ref).shape[0] for ref in matrices if any(_reads_experts(graph.op(name)) for name, _ in graph.users.get(ref, ()))}
    return frozenset(ref for ref in matrices if graph.meta(ref).shape[0] in counts)


def _reads_experts(reader: Op) -> bool:
    return reader.target in (EXPERTS, EXPERTS_BACKWARD) or registry.family_of(reader) is Family.MATMUL


def attention_departures(role: Role, call: Call, index: int, wanted: int) -> float | None:
    """How far attention that reads its input `index` as `wanted` departs from the role; None where the role says nothing about it."""
    names = {call.argument(name).index: name for name in READ_ALIKE + KEYS if call.given(name) is not None}
    if role not in ALONG_SEQUENCE or index not in names:
        return None
    split = wanted in call.inputs[index].logical_dims(HEADS if role == "ulysses" else ROWS)
    if names[index] not in KEYS:
        return 0.0 if split else 4.0
    if role == "context":
        return 0.0 if wanted == R else 4.0
    return 0.0 if split else 1.0 if wanted == R else 4.0


def behind_attention(role: Role, call: Call, index: int, made: int, wanted: int) -> float | None:
    """Likewise of what reads output `index` of attention, made as `made`: from heads it goes back to the sequence at once, not once per reader."""
    meta = call.outputs[index]
    if role != "ulysses" or meta is None or len(meta.shape) <= ROWS or made not in meta.logical_dims(HEADS):
        return None
    return 0.0 if wanted in meta.logical_dims(ROWS) else 2.0


def sequence_departures(role: Role, meta: TensorMeta, wanted: int, graph: Graph) -> float:
    """Of splitting a sum along a dim that is not the sequence's, where an axis of this role has that."""
    return 0.25 * (role in ALONG_SEQUENCE and wanted >= 0 and meta.logical_shape[wanted] != lengths(graph)[1])


def _queries(graph: Graph, dim: int) -> set[int]:
    """Sizes of a dim of the queries of attention in the graph: HEADS or ROWS."""
    calls = (graph.calls[op.name] for op in graph.of_kind("call") if is_attention(op))
    return {meta.shape[dim] for call in calls if (meta := call.given("query")) is not None}
