"""`autoshard generate`: the text of a model folder, tokens, JSON, and what is refused."""
from __future__ import annotations

import json

import pytest

from tests.support.tiny_decoders import save_llama

transformers = pytest.importorskip("transformers")
NEW = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_llama(path)
    return path


def theirs(folder, prompts):
    """What transformers says, one prompt at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    out = [model.generate(tokenizer(p, return_tensors="pt").input_ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0] for p in prompts]
    return [row.tolist() for row in out], tokenizer.batch_decode(out, skip_special_tokens=True)


def test_text_of_prompts_of_other_lengths(run, folder):
    prompts = ["Once", "Two words"]
    code, out, err = run("generate", folder, "--prompt", prompts[0], "--prompt", prompts[1], "--new", NEW)
    assert code == 0, err
    assert out.splitlines() == theirs(folder, prompts)[1] and out.startswith("Once")
    for words in ("first token after", "predicted", "a token", "caches:", "in all"):
        assert words in err


def test_json_has_tokens_seconds_and_bytes(run, folder):
    code, out, err = run("generate", folder, "--tokens", "50,60,70", "--new", NEW, "--context", 16, "--json")
    assert code == 0, err
    said = json.loads(out)
    assert said["texts"] is None and said["tokens"][0][:3] == [50, 60, 70] and len(said["tokens"][0]) == 3 + NEW
    assert said["whole_cache_bytes"] == said["cache_bytes"] == 2 * 2 * 2 * 16 * 8 * 4  # keys and values, 2 layers, 2 heads, 16 tokens of 8 float32
    assert min(said["first_s"], said["token_s"], said["predicted_first_s"], said["predicted_token_s"]) > 0


def test_a_config_alone_and_sampling(run, folder, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**json.loads((folder / "config.json").read_text()), "num_hidden_layers": 1}))
    found = [run("generate", tmp_path, "--random", "--tokens", "5,6", "--new", NEW, "--temperature", "3", "--random-seed", s, "-q") for s in (1, 1, 2)]
    assert [code for code, _, _ in found] == [0, 0, 0], found
    assert not any("first token" in err for _, _, err in found)
    assert found[0][1] == found[1][1] != found[2][1] and found[0][1].startswith("5,6,")


@pytest.mark.parametrize(("arguments", "words"), [
    ((), "--prompt"), (("--prompt", "a", "--tokens", "1"), "not both"), (("--tokens", "1,x"), "'1,x'"), (("--tokens", "1,9999"), "vocabulary of 251"),
    (("--prompt", ""), "no token"), (("--prompt", "a", "--new", "0"), "new=0"), (("--prompt", "abcdef", "--context", "4"), "larger context"),
    (("--prompt", "a", "--dtype", "int3"), "dtype"), (("--prompt", "a", "--mesh", "tp=2"), "needs 2 processes"), (("--prompt", "a", "--cluster", "moon"), "moon"),
    (("--prompt", "a", "--seed", "keys_*=-,tp,-"), "keys_"),
    (("--prompt", "a", "--temperature", "0"), "temperature=0.0"), (("--prompt", "a", "--top-p", "2"), "top_p=2.0"), (("--prompt", "a", "--top-k", "-1"), "top_k=-1"),
])
def test_bad_input_is_refused_in_a_sentence(run, folder, arguments, words):
    code, out, err = run("generate", folder, *arguments)
    assert (code, out) == (2, "") and words in err and "Traceback" not in err


def test_folders_that_cannot_be_used_are_refused(run, folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    for arguments, words in (((tmp_path / "none", "--prompt", "a"), "no folder"), ((tmp_path, "--prompt", "a"), "--random"),
                             ((tmp_path, "--random", "--prompt", "a"), "--tokens 5,17,4")):
        code, out, err = run("generate", *arguments)
        assert (code, out) == (2, "") and words in err and "Traceback" not in err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    code, _, err = run("generate", tmp_path, "--random", "--tokens", "1")
    assert code == 2 and "no decoder" in err
