"""Reads of data that one graph can hold: checks raise when the program runs, clamps are chosen by data, buffers are compared with what was read."""
from dataclasses import replace

import pytest
import reading_models as models
import torch

import autoshard
from autoshard.base.checked import CHECKED
from autoshard.base.spec import R
from autoshard.errors import CheckError, TraceError
from autoshard.program.interpret import run
from autoshard.program.trace import trace
from autoshard.rules import registry

CHECKS = ("raises", "raises_by_item", "asserts", "asserts_both", "asks_torch", "asks_torch_of_all", "asserts_async", "as_bool", "in_checkpoint", "counts_ids")
REFUSED = ("other_branch", "other_clamp", "has_an_else", "only_both", "of_another_shape", "does_more", "checks_gradient", "fills_a_dict",
           "fills_by_numbers")


def state_of(model):
    return {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_holds_or_the_program_raises_with_the_users_line(name):
    model, x = models.Body(getattr(models, name)), torch.rand(4, 8)
    traced = trace(model, (x,))
    assert torch.equal(run(traced, state_of(model), (x,)).users[0], model(x))
    bad = x.clone()
    bad[2, 3] = 5.0
    with pytest.raises(CheckError, match=r"(?s)does not hold.*reading_models.py:\d+"):
        run(traced, state_of(model), (bad,))


def test_the_error_shows_what_the_user_raises():
    traced = trace(models.Body(models.raises), (torch.rand(4, 8),))
    with pytest.raises(CheckError, match=r"if x.max\(\) >= m.bound: raise ValueError\(f'values must be below"):
        run(traced, state_of(models.Body(models.raises)), (torch.full((4, 8), 9.0),))


def test_lines_are_no_part_of_the_programs_hash():
    graph = trace(models.Body(models.raises), (torch.rand(4, 8),)).graph
    check = next(op for op in graph.ops if op.target is CHECKED)
    moved = [op.mapped(lambda leaf: "elsewhere" if isinstance(leaf, str) else leaf) if op is check else op for op in graph.ops]
    assert moved != list(graph.ops) and replace(graph, ops=tuple(moved)).hash == graph.hash


@pytest.mark.parametrize("body", [models.clamps, models.clamps_unless, models.clamps_in_checkpoint])
@pytest.mark.parametrize("largest", [0.1, 50.0])
def test_a_branch_that_clamps_is_chosen_by_data_of_all_ranks(body, largest):
    torch.manual_seed(0)
    model, x = models.Body(body), torch.randn(8, 8) * 0.1
    x[5] *= largest / 0.1  # rows of one rank decide for all
    assert (model.linear(x).max() > 2) == (largest > 1), "the sample takes the branch that the test means"
    report = autoshard.verify(model, "d=4", (x,), plans=("split", "fully_sharded", "random:0"))
    assert report.ok, str(report)


@pytest.mark.parametrize("body", [models.raises, models.asserts_both, models.counts_ids])
def test_checks_are_part_of_plans(body):
    report = autoshard.verify(models.Body(body), "dp=2,tp=2", (torch.rand(8, 8),), plans=("split", "random:0", "random:1"))
    assert report.ok, str(report)


@pytest.mark.parametrize("shift", [0.0, -1.0])
def test_a_masked_write_needs_no_look_at_the_mask(shift):
    x = torch.rand(8, 8) + shift
    report = autoshard.verify(models.Body(models.fills), "d=4", (x,), plans=("split", "random:0"))
    assert report.ok, str(report)


@pytest.mark.parametrize("shift", [0.0, -1.0])
def test_a_write_by_a_mask_has_a_gradient(shift):
    torch.manual_seed(0)
    report = autoshard.verify(models.Body(models.writes_by_mask), "d=4", (torch.rand(8, 8) + shift,), plans=("split", "random:0"))
    assert report.ok, str(report)


def test_a_buffer_that_is_read_must_stay_as_it_is():
    model, x = models.Body(models.reads_a_buffer), torch.rand(4, 8)
    traced, state = trace(model, (x,)), state_of(model)
    assert torch.equal(run(traced, state, (x,)).users[0], model(x))
    for name, other in (("stride", torch.tensor(4)), ("kept", torch.tensor([0.5, 2.0]))):
        with pytest.raises(CheckError, match=f"the buffer '{name}' is"):
            run(traced, {**state, name: other}, (x,))
    assert autoshard.verify(model, "d=2", (x,), plans=("split",)).ok


@pytest.mark.parametrize("body", [models.counts, models.counts_in_place])
def test_a_buffer_that_the_model_writes_is_no_setting(body):
    with pytest.raises(TraceError, match="writes buffer 'calls'|depends on the data of a tensor"):
        trace(models.Body(body), (torch.rand(4, 8),))


@pytest.mark.parametrize("name", REFUSED)
def test_all_else_is_refused(name):
    with pytest.raises(TraceError, match="depends on the data of a tensor|the backward pass checks data"):
        trace(models.Body(getattr(models, name)), (torch.rand(4, 8),))


def test_a_check_without_a_place_is_refused():
    def nothing(m, x):
        if m.linear(x).max() > 3:
            raise ValueError
        return 3

    with pytest.raises(TraceError, match="returns no tensor"):
        trace(models.Body(nothing), (torch.rand(4, 8),), training=False)


def test_every_row_of_the_check_knows_its_truths_whole():
    """They may not be pieces or parts of sums: a rank must raise when the others do."""
    graph = trace(models.Body(models.asserts_both), (torch.rand(4, 8),)).graph
    rows = registry.rows(graph.calls[next(op.name for op in graph.ops if op.target is CHECKED)])
    assert len(rows) > 1 and all(set(row.inputs[1:]) == {R} and row.inputs[0] == row.outputs[0] for row in rows)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_masks_of_torchs_transformer_may_be_inputs(causal, training):
    torch.manual_seed(0)
    model = torch.nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(6) if causal else torch.randn(6, 6)
    inputs = {"src": torch.randn(4, 5, 16), "tgt": torch.randn(4, 6, 16), "src_mask": torch.randn(5, 5), "tgt_mask": mask}
    report = autoshard.verify(model, "d=2", (), inputs, training=training, plans=("split", "random:0"))
    assert report.ok, str(report)

