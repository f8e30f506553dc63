"""The Trainer of examples/: sharded over two processes and resumed on one, it has the losses of transformers' Trainer on one."""
from __future__ import annotations

import re

import pytest
from test_examples import ROOT, TORCHRUN, python


def losses(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"\d+\.\d{6}", text.split("losses")[-1])]


@pytest.mark.dist
def test_it_trains_and_resumes_as_trainer_itself(tmp_path):
    trainer = ROOT / "examples" / "hf_trainer.py"
    cache = {"AUTOSHARD_CACHE": str(tmp_path / "cache")}
    any_plan = ("--time-limit", 3)  # losses are those of one process under every plan
    whole = losses(python(trainer, "--plain", "--steps", 5, "--folder", tmp_path / "plain", "--save-steps", 100))
    python(*TORCHRUN, trainer, "--steps", 3, "--folder", tmp_path / "cut", "--save-steps", 3, *any_plan, **cache)
    rest = losses(python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 1, trainer, "--steps", 5,
                         "--folder", tmp_path / "cut", "--resume", *any_plan, **cache))
    assert len(whole) == 6 and rest == pytest.approx(whole, rel=1e-5)  # five losses of training, one of evaluation


def test_a_loss_outside_of_the_model_is_refused(monkeypatch, tmp_path):
    """It would meet the logits of all processes with the labels of one."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(ROOT / "examples")
    from hf_trainer import ShardedTrainer

    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), label_smoothing_factor=0.1, use_cpu=True)
    with pytest.raises(ValueError, match="label_smoothing_factor: .* let the model compute it"):
        ShardedTrainer(None, None, args=arguments)
