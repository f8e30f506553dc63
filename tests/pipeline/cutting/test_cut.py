"""Cuts of the models, interpreted micro-batch by micro-batch, against the uncut model on the full batch."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autoshard.base.graph import BACKWARD, FORWARD, LATE, WEIGHT
from autoshard.base.plan import RECOMPUTE_SUFFIX
from autoshard.base.windows import END
from autoshard.decide.pipeline_options import Pipeline
from autoshard.pipeline.cutting.blocks import Blocks
from autoshard.pipeline.cutting.cut import cut, one_stage
from autoshard.pipeline.cutting.interpret import StagePlayer
from autoshard.pipeline.cutting.split import split_backward
from autoshard.pipeline.microbatches import batch
from autoshard.recompute.rewrite import candidates, with_recompute
from tests.pipeline.cut_models import MODELS, subject

TOLERANCE = 1e-12


def reference(what):
    """Mean over micro-batches: for moe, whose balance loss is not linear in the batch, the full batch is another model."""
    what.model.zero_grad()
    losses = [what.loss(what.model(*part[:-1]), part[-1]) for part in what.parts(4)]
    sum(losses).div(4).backward()
    return losses, {n: p.grad for n, p in what.model.named_parameters() if p.grad is not None}


def assert_equal_training(what, made, **given):
    losses, grads = reference(what)
    found = StagePlayer(made, dict(what.state), what.parts(4), **given).step()
    for m, loss in enumerate(losses):
        assert abs(float(found.users[m]["0"]) - loss.item()) <= TOLERANCE * abs(loss.item())
    assert found.grads.keys() == grads.keys()
    scale = max(float(g.norm()) for g in grads.values())
    for name, g in grads.items():
        assert float((found.grads[name] - g).norm()) <= TOLERANCE * max(float(g.norm()), 1e-3 * scale), name


def some_cuts(blocks: Blocks) -> list[tuple[int, ...]]:
    n = len(blocks.blocks)
    return [(i,) for i in range(1, n)] + [(1, n // 2, n - 1) if n > 3 else (1, n - 1), tuple(range(1, n))]


@pytest.mark.parametrize("name", MODELS)
def test_every_cut_trains_as_the_whole(name):
    what = subject(name)
    blocks = Blocks.of(what.traced.graph)
    for starts in some_cuts(blocks):
        assert_equal_training(what, cut(what.traced.graph, starts, blocks))


@pytest.mark.parametrize("name", MODELS)
def test_backward_in_two_windows(name):
    what = subject(name)
    blocks = Blocks.of(what.traced.graph)
    middle = len(blocks.blocks) // 2
    made = split_backward(cut(what.traced.graph, (middle,), blocks))
    first, last = made.stages
    assert [w.name for w in first.graph.windows] == [FORWARD, WEIGHT], "the first stage sends no gradient"
    assert [w.name for w in last.graph.windows] == [FORWARD, BACKWARD, WEIGHT]
    assert_equal_training(what, made)


@pytest.mark.parametrize("name", ["gpt", "llama", "t5"])
def test_backward_in_two_windows_runs_forward_again(name):
    """The weight part too reads what runs again, in its own window or in the one before, and numbers are the same."""
    what = subject(name)
    blocks = Blocks.of(what.traced.graph)
    made = split_backward(cut(what.traced.graph, (len(blocks.blocks) // 2,), blocks))
    made = replace(made, stages=tuple(replace(s, graph=with_recompute(s.graph, candidates(s.graph))) for s in made.stages))
    for graph in (s.graph for s in made.stages):
        phases = [op.phase for op in graph.ops]
        again = {op.phase for op in graph.ops if op.name.endswith(RECOMPUTE_SUFFIX)}
        assert phases == sorted(phases, key=[w.name for w in graph.windows].index) and WEIGHT in phases
        assert again == set(phases) - {FORWARD}, "what the weight part alone needs runs there"
        kept = set(candidates(graph))
        assert not [op.name for op in graph.ops if op.phase in LATE and {r.op for r in op.refs} & kept], "backward reads what forward made"
    assert_equal_training(what, made)


def test_the_full_batch_where_the_loss_is_a_mean():
    what = subject("gpt")
    what.model.zero_grad()
    loss = what.loss(what.model(what.batch[0]), what.batch[1])
    loss.backward()
    made = cut(what.traced.graph, (3,))
    found = StagePlayer(made, dict(what.state), what.parts(4)).step()
    assert abs(sum(float(u["0"]) for u in found.users) / 4 - loss.item()) < 1e-12
    for name, p in what.model.named_parameters():
        assert torch.allclose(found.grads[name], p.grad, rtol=1e-10, atol=1e-14), name


@pytest.mark.parametrize("name", ["gpt", "llama", "t5"])
def test_a_graph_with_holds_and_accumulators(name):
    """Micro-batches in the graph: parameters are held for the step, gradients accumulated; of a tied weight in every stage that reads it."""
    what = subject(name)
    found = batch.traced(what.model, what.batch, {}, Pipeline(microbatches=4), loss_fn=what.loss)
    blocks = Blocks.of(found.graph)
    made = split_backward(cut(found.graph, (len(blocks.blocks) // 2, len(blocks.blocks) - 1), blocks))
    assert any(op.phase == END for s in made.stages for op in s.graph.ops)
    assert_equal_training(what, made)


def test_blocks_are_the_layers_and_what_is_between_them():
    assert Blocks.of(subject("gpt").traced.graph).names == ("wte", "wpe", "h.0", "h.1", "ln_f", "lm_head")


def test_a_tied_weight_never_crosses():
    what = subject("gpt")
    made = cut(what.traced.graph, (3,))
    assert made.tied == (("wte.weight", (0, 1)),)
    shape = what.model.wte.weight.shape
    assert all(h.meta.shape != tuple(shape) for h in made.hops)
    assert [str(h.value) for h in made.hops if h.window == FORWARD] == ["add_2"]


def test_what_all_stages_read_goes_along_the_chain():
    """The encoder's output and the position biases of t5: one hop to each next reader, and none past the last."""
    what = subject("t5")
    blocks = Blocks.of(what.traced.graph)
    at = [blocks.names.index(n) for n in ("decoder.blocks.0", "decoder.blocks.1")]
    made = cut(what.traced.graph, at, blocks)
    memory = [(h.source, h.target) for h in made.hops if h.window == FORWARD and h.meta.shape[-1] == 64]
    assert memory.count((0, 1)) >= 1 and memory.count((0, 2)) == 0


def test_constants_are_repeated_not_sent():
    """llama's rotary tables and causal masks are made in every stage."""
    what = subject("llama")
    made = cut(what.traced.graph, (2,))
    assert len([h for h in made.hops if h.window == FORWARD]) == 1
    assert any("@1" in op.name and "cos" in op.name for op in made.stages[1].graph.ops)


def test_no_hop_passes_a_stage_that_does_not_read():
    for name in MODELS:
        what = subject(name)
        blocks = Blocks.of(what.traced.graph)
        made = cut(what.traced.graph, tuple(range(1, len(blocks.blocks))), blocks)
        for hop in made.hops:
            target = made.stages[hop.target].graph
            readers = [target.op(u) for u, _ in next(v for k, v in target.users.items() if k.op == hop.recv)]
            assert any(op.kind == "call" or not op.is_port for op in readers), hop


def test_names_are_unique_over_the_stages():
    what = subject("t5")
    made = cut(what.traced.graph, (2, 4, 7))
    names = [op.name for s in made.stages for op in s.graph.ops]
    assert len(names) == len(set(names))


def test_one_stage_is_that_of_the_cut():
    """But for the numbers in the names of what several stages have."""
    graph = subject("t5").traced.graph
    blocks = Blocks.of(graph)
    starts = (1, 3)
    for stage in cut(graph, starts, blocks).stages:
        alone = one_stage(graph, starts, stage.index, blocks)
        assert [(op.name.partition("@")[0], op.kind, op.phase, op.outputs) for op in alone.graph.ops] == [
            (op.name.partition("@")[0], op.kind, op.phase, op.outputs) for op in stage.graph.ops]
        assert (alone.sends, alone.receives, alone.blocks) == (stage.sends, stage.receives, stage.blocks)
