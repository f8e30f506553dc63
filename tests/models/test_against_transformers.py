"""Llama and T5 give the logits of the transformers library with the same weights."""
import pytest
import torch

from models import llama, t5

transformers = pytest.importorskip("transformers")


def copy_weights(pairs):
    with torch.no_grad():
        for ours, theirs in pairs:
            theirs.weight.copy_(ours.weight)


def test_llama():
    torch.manual_seed(0)
    model, (ids, target) = llama.build("tiny", batch=2)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        intermediate_size=128, max_position_embeddings=32, rms_norm_eps=1e-5, rope_theta=500000.0)
    other = transformers.LlamaForCausalLM(config).eval()
    pairs = [(model.tok_embeddings, other.model.embed_tokens), (model.norm, other.model.norm),
             (model.output, other.lm_head)]
    for a, b in zip(model.layers, other.model.layers, strict=True):
        pairs += [(a.attention_norm, b.input_layernorm), (a.ffn_norm, b.post_attention_layernorm),
                  (a.attention.wq, b.self_attn.q_proj), (a.attention.wk, b.self_attn.k_proj),
                  (a.attention.wv, b.self_attn.v_proj), (a.attention.wo, b.self_attn.o_proj),
                  (a.feed_forward.w1, b.mlp.gate_proj), (a.feed_forward.w3, b.mlp.up_proj),
                  (a.feed_forward.w2, b.mlp.down_proj)]
    copy_weights(pairs)
    torch.testing.assert_close(model(ids), other(ids).logits, rtol=1e-4, atol=1e-5)


def attention_pairs(a, b):
    return [(a.q, b.q), (a.k, b.k), (a.v, b.v), (a.o, b.o)]


def test_t5():
    torch.manual_seed(0)
    model, (ids, decoder_ids, _) = t5.build("tiny", batch=2)
    config = transformers.T5Config(
        vocab_size=256, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, decoder_start_token_id=0)
    other = transformers.T5ForConditionalGeneration(config).eval()
    pairs = [(model.shared, other.shared), (model.lm_head, other.lm_head)]
    for ours, theirs in ((model.encoder, other.encoder), (model.decoder, other.decoder)):
        first = theirs.block[0].layer[0].SelfAttention
        pairs += [(ours.bias.table, first.relative_attention_bias), (ours.norm, theirs.final_layer_norm)]
        for a, b in zip(ours.blocks, theirs.block, strict=True):
            layers = list(b.layer)
            pairs += attention_pairs(a.self_attention, layers[0].SelfAttention)
            pairs += [(a.self_norm, layers[0].layer_norm), (a.ff_norm, layers[-1].layer_norm)]
            pairs += [(a.wi, layers[-1].DenseReluDense.wi), (a.wo, layers[-1].DenseReluDense.wo)]
            if a.cross_attention is not None:
                pairs += attention_pairs(a.cross_attention, layers[1].EncDecAttention)
                pairs.append((a.cross_norm, layers[1].layer_norm))
    copy_weights(pairs)
    expected = other(input_ids=ids, decoder_input_ids=decoder_ids).logits
    torch.testing.assert_close(model(ids, decoder_ids), expected, rtol=1e-4, atol=1e-4)
