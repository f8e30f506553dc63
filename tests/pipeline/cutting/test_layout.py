import pytest

from autoshard.decide.pipeline_options import Pipeline
from autoshard.errors import UsageError
from autoshard.pipeline.cutting.blocks import Blocks
from autoshard.pipeline.cutting.layout import layout_of, starts_of
from autoshard.pipeline.cutting.pinned import allowed, check_pinned
from tests.pipeline.cut_models import subject


@pytest.fixture(scope="module")
def blocks():
    return Blocks.of(subject("llama", layers=4).traced.graph)


def names(blocks, starts):
    return [blocks.names[at] for at in starts]


def test_a_layout_says_where_stages_begin(blocks):
    assert names(blocks, starts_of("Ett|ttL", blocks, 2)) == ["layers.2"]
    assert names(blocks, starts_of("E|t*4|L", blocks, 3)) == ["layers.0", blocks.names[-1]] or len(blocks.names) > 6
    assert names(blocks, starts_of("Et|(t|)*2,tL", blocks, 4)) == ["layers.1", "layers.2", "layers.3"]


def test_layouts_are_written_as_they_are_read(blocks):
    for text in ("Et*2|t*2L", "E|t*4L", "(Et|)*1t*3L", "Et|(t|)*2tL", "Et*4|L"):
        stages = text.replace("(t|)*2", "t|t|").replace("(Et|)*1", "Et|").count("|") + 1
        starts = starts_of(text, blocks, stages)
        again = layout_of(blocks, starts)
        assert starts_of(again, blocks, stages) == starts
    assert layout_of(blocks, starts_of("Et|t|t|tL", blocks, 4)) == "Et|(t|)*2tL"


@pytest.mark.parametrize("text, says", [
    ("Et*3|tt", "5 layers .* the model 4"), ("Ett|t*2X", "cannot read"), ("Ett||ttL", "without a layer"), ("ttE|ttL", "E stands once"),
    ("Ett|ttL|", "without a layer"), ("Et|t|ttL", "3 stages, and the pipeline 2"), ("(t*99999|)*9999", "too many")])
def test_a_bad_layout_says_what_is_wrong(blocks, text, says):
    with pytest.raises(UsageError, match=says):
        starts_of(text, blocks, 2)


def test_a_layout_and_cuts_are_one_too_many():
    with pytest.raises(UsageError, match="give one of them"):
        Pipeline(layout="Ett|ttL", cuts=["layers.2"])


def test_pins_leave_the_stages_that_hold_them(blocks):
    at = {name: i for i, name in enumerate(blocks.names)}
    may = allowed(blocks, (("layers.0*", 0), ("layers.2*", 1)), 2)
    one, two = at["layers.1"], at["layers.2"]
    count = len(blocks.names)
    assert may[0, 0, one] and may[0, 0, two] and not may[0, 0, two + 1] and not may[0, 0, 1]
    assert may[1, one, count] and may[1, two, count] and not may[1, two + 1, count]
    assert allowed(blocks, (), 2) is None


@pytest.mark.parametrize("pinned, stages, says", [
    ((("layers.9*", 0),), 2, "matches no module"), ((("layers.0*", 2),), 2, "2 stages, 0 to 1"), ((("layers.*", 0), ("layers.3", 1)), 2, "both match layers.3"),
    ((("layers.3", 0), ("layers.0", 1)), 2, "order of execution"), ((("layers.0", 0), ("layers.1", 2)), 3, "leave 0 blocks for 1 stages"),
    ((("layers.*", 1),), 5, "leave 2 blocks for 3 stages")])
def test_pins_that_cannot_be_are_errors(blocks, pinned, stages, says):
    with pytest.raises(UsageError, match=says):
        allowed(blocks, pinned, stages)


def test_pins_against_given_cuts(blocks):
    check_pinned(blocks, (("layers.0*", 0),), starts_of("Ett|ttL", blocks, 2))
    with pytest.raises(UsageError, match="the cuts put layers.3 into stage 1"):
        check_pinned(blocks, (("layers.3", 0),), starts_of("Ett|ttL", blocks, 2))
