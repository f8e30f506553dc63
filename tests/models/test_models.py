"""Every model file keeps the convention of models/__init__.py and computes what it says."""
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from models import bert, dlrm, gpt, llama, mlp, moe, resnet, t5, vit

MODELS = {m.__name__.split(".")[-1]: m for m in (mlp, gpt, llama, bert, vit, resnet, moe, t5, dlrm)}
EVERY = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def step(module, **options):
    model, (*inputs, target) = module.build("tiny", **options)
    return model, module.loss(model(*inputs), target)


@EVERY
def test_one_step_in_float64_gives_every_parameter_a_gradient(name):
    model, loss = step(MODELS[name])
    loss.backward()
    assert loss.shape == () and loss.dtype == torch.float64 and 0 < loss.item() < 20
    for path, p in model.named_parameters():
        assert p.dtype == torch.float64 and p.grad.isfinite().all(), path
        assert p.grad.abs().max() > 0, path


@EVERY
def test_the_loss_falls_under_adamw(name):
    model, (*inputs, target) = MODELS[name].build("tiny", batch=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = MODELS[name].loss(model(*inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@EVERY
def test_batch_is_the_first_dim_of_every_input(name):
    assert {x.shape[0] for x in MODELS[name].build("tiny")[1]} == {8}
    assert {x.shape[0] for x in MODELS[name].build("tiny", batch=12)[1]} == {12}


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "moe", "t5"])
def test_seq_sets_the_length_even_beyond_the_context(name):
    for seq in (16, 64):
        model, (*inputs, target) = MODELS[name].build("tiny", batch=2, seq=seq)
        assert target.shape == (2, seq)
        assert MODELS[name].loss(model(*inputs), target).isfinite()


@EVERY
def test_every_size_builds_on_meta_and_runs_there(name):
    module = MODELS[name]
    for size in module.SIZES:
        with torch.device("meta"):
            model, (*inputs, target) = module.build(size)
            loss = module.loss(model(*inputs), target)
        assert loss.shape == () and all(t.is_meta for t in (*model.parameters(), *model.buffers(), *inputs, target))


@EVERY
def test_builds_under_a_fake_tensor_mode(name):
    with FakeTensorMode():
        step(MODELS[name])[1].backward()


@EVERY
def test_reset_parameters_remakes_all_state_of_a_model_built_on_meta(name):
    with torch.device("meta"):
        model, _ = MODELS[name].build("tiny")
    model.to_empty(device="cpu")
    with torch.no_grad():
        for t in (*model.parameters(), *model.buffers()):
            t.copy_(torch.full_like(t, 77))
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.reset_parameters()
    left = [path for path, t in (*model.named_parameters(), *model.named_buffers()) if (t == 77).any()]
    assert left == []


@pytest.mark.parametrize("name, size, millions", [
    ("gpt", "124M", 124.4), ("gpt", "1.5B", 1557.7), ("llama", "1B", 1498.5), ("llama", "8B", 8030.3),
    ("llama", "70B", 70553.7), ("bert", "base", 109.5), ("vit", "b16", 86.6), ("resnet", "18", 11.69),
    ("resnet", "50", 25.56), ("t5", "small", 60.5), ("t5", "11B", 11307.3), ("mlp", "base", 0.67)])
def test_parameter_counts(name, size, millions):
    with torch.device("meta"):
        model, _ = MODELS[name].build(size)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=3e-3)


def test_tied_weights_are_one_parameter():
    model, _ = gpt.build()
    assert model.lm_head.weight is model.wte.weight
    model, _ = t5.build()
    assert model.lm_head.weight is model.shared.weight


@pytest.mark.parametrize("name", ["gpt", "llama", "moe"])
def test_decoders_do_not_look_ahead(name):
    model, (ids, _) = MODELS[name].build("tiny", batch=2)
    other = ids.clone()
    other[:, 20:] = (other[:, 20:] + 1) % 256
    a, b = model(ids), model(other)
    torch.testing.assert_close(a[:, :20], b[:, :20])
    assert not torch.allclose(a[:, 20:], b[:, 20:])


def test_t5_decoder_looks_back_only_and_at_the_whole_encoder():
    model, (ids, decoder_ids, _) = t5.build("tiny", batch=2)
    other = decoder_ids.clone()
    other[:, 20:] = (other[:, 20:] + 1) % 256
    torch.testing.assert_close(model(ids, decoder_ids)[:, :20], model(ids, other)[:, :20])
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 256
    assert not torch.allclose(model(ids, decoder_ids)[:, 0], model(changed, decoder_ids)[:, 0])


def test_bert_ignores_padding_and_averages_over_the_masked_positions():
    model, (ids, types, mask, target) = bert.build("tiny", batch=4)
    assert not mask.all() and mask[:, 0].all()
    other = torch.where(mask, ids, (ids + 1) % 256)
    torch.testing.assert_close(model(ids, types, mask)[mask], model(other, types, mask)[mask])
    logits, chosen = model(ids, types, mask), target != -100
    torch.testing.assert_close(bert.loss(logits, target), F.cross_entropy(logits[chosen], target[chosen]))
    per_row = chosen.sum(dim=1)
    assert per_row.min() > 0 and per_row.min() != per_row.max()


def test_moe_equals_its_two_best_experts_where_none_overflows():
    config = replace(moe.SIZES["tiny"], capacity_factor=4.0)
    layer, x = moe.MixtureOfExperts(config), torch.randn(2, 8, 64)
    scores, best = layer.router.gate(x).softmax(-1).topk(2)
    e = layer.experts
    every = torch.stack([(F.silu(x @ e.gate[i]) * (x @ e.up[i])) @ e.down[i] for i in range(4)], dim=2)
    picked = every.gather(2, best.unsqueeze(-1).expand(-1, -1, -1, 64))
    expected = (picked * (scores / scores.sum(-1, keepdim=True)).unsqueeze(-1)).sum(dim=2)
    torch.testing.assert_close(layer(x), expected)


def test_moe_fills_no_slot_twice_and_drops_what_overflows():
    config = replace(moe.SIZES["tiny"], capacity_factor=0.5)
    router = moe.Router(config)
    dispatch, combine = router(torch.randn(3, 32, 64))
    capacity = router.capacity(32)
    assert capacity == 8 and dispatch.shape == (3, 32, 4 * capacity)
    assert dispatch.sum(dim=1).max() == 1
    assert dispatch.sum() < 3 * 32 * 2
    assert torch.equal(combine > 0, dispatch > 0)


def test_dlrm_multiplies_every_pair_of_features_once():
    model, (dense, sparse, _) = dlrm.build("tiny", batch=4)
    seen = []
    model.top.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(dense, sparse)
    bottom = model.bottom(dense)
    features = [bottom] + [t(sparse[:, i]).mean(1) for i, t in enumerate(model.tables)]
    pairs = [(features[i] * features[j]).sum(1) for i in range(9) for j in range(i)]
    torch.testing.assert_close(seen[0], torch.cat((bottom, torch.stack(pairs, dim=1)), dim=1))


def test_resnet_keeps_running_statistics_in_training_only():
    model, (x, _) = resnet.build("tiny")
    before = model.stem.norm.running_mean.clone()
    model.eval()(x)
    assert torch.equal(model.stem.norm.running_mean, before)
    model.train()(x)
    assert not torch.equal(model.stem.norm.running_mean, before)


def test_gpt_dropout_acts_in_training_only():
    model, (ids, _) = gpt.build("tiny", batch=2, dropout=0.5)
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


def test_rotary_tables_of_half_types_are_exact_at_far_positions():
    cos, _ = llama.rotary_tables(4096, 8, 1e4, torch.empty(0, dtype=torch.bfloat16))
    exact, _ = llama.rotary_tables(4096, 8, 1e4, torch.empty(0, dtype=torch.float64))
    assert cos.dtype == torch.bfloat16 and (cos - exact).abs().max() < 1e-2
