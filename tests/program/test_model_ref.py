"""What a user may write for a model, and what is said when it cannot be used."""
import json

import pytest
import torch

from autoshard.errors import ModelError, UsageError
from autoshard.program.load import load_model

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1,
         "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 128,
         "max_position_embeddings": 32, "vocab_size": 256}

FACTORY = """
import torch
from torch import nn

def linear(batch=4):
    return nn.Linear(3, 2), (torch.randn(batch, 3), torch.randn(batch, 2))

def keywords():
    return nn.Linear(3, 2), {"input": torch.randn(4, 3)}

def nothing():
    return None

def reads_values():
    return nn.Linear(int(torch.ones(1).item()), 2), (torch.randn(4, 1), torch.randn(4, 2))

def fails():
    raise RuntimeError("out of cheese")

class Net(nn.Linear):
    def __init__(self, width=3):
        super().__init__(width, 2)

NET = Net()
not_a_function = 3
"""
LOSS = """
def loss(output, target):
    return (output - target).pow(2).mean()
"""


@pytest.fixture
def user(tmp_path, monkeypatch):
    """A directory with the user's own modules, as the current one."""
    (tmp_path / "own_factories.py").write_text(FACTORY)
    (tmp_path / "own_with_loss.py").write_text(FACTORY + LOSS)
    (tmp_path / "own_broken.py").write_text("import no_such_dependency\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def config(tmp_path):
    def write(**fields):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(fields))
        return path
    return write


def tensors(spec):
    return [*spec.model.parameters(), *spec.model.buffers(), *spec.example_inputs, *spec.example_kwargs.values()]


# -- models/ --------------------------------------------------------------------------------------

def test_name_and_size_in_any_case_without_memory():
    spec = load_model("LLaMA:8b", batch=2, seq=64)
    assert spec.reference == "llama:8B"
    assert all(t.is_meta for t in tensors(spec))
    assert spec.settings == {"batch": 2, "seq": 64, "dtype": None, "hf": None}
    ids, target = spec.example_inputs
    assert ids.shape == target.shape == (2, 64)


def test_a_name_alone_means_its_first_size():
    assert load_model("gpt").reference == "gpt:tiny"


def test_loss_takes_the_output_and_the_target():
    spec = load_model("mlp", fake=False)
    *inputs, target = spec.example_inputs
    assert spec.loss_fn(spec.model(*inputs), target).item() > 0


def test_for_inference_drops_the_target():
    spec = load_model("t5").for_inference
    assert len(spec.example_inputs) == 2 and spec.loss_fn is None


@pytest.mark.parametrize("fake", [True, False])
def test_dtype_casts_weights_and_float_inputs_only_and_keeps_ties(fake):
    spec = load_model("gpt", dtype="bf16", fake=fake)
    assert {p.dtype for p in spec.model.parameters()} == {torch.bfloat16}
    assert spec.model.lm_head.weight is spec.model.wte.weight
    assert spec.example_inputs[0].dtype == torch.int64
    assert load_model("vit", dtype="fp64", fake=fake).example_inputs[0].dtype == torch.float64


def test_a_models_folder_of_the_current_directory_comes_first(user):
    (user / "models").mkdir()
    (user / "models" / "mlp.py").write_text(
        "import torch\nSIZES = {'one': 1}\ndef build(size):\n    return torch.nn.Linear(3, 1), (torch.randn(2, 3),)\n")
    spec = load_model("mlp")
    assert spec.reference == "mlp:one" and spec.loss_fn is None


@pytest.mark.parametrize("reference, message", [
    ("gtp", "unknown model 'gtp': did you mean gpt?"),
    ("gtp:tiny", "unknown model 'gtp': did you mean gpt?"),
    ("zzz", "the models are bert, dlrm, gpt, llama"),
    ("llama:70", "did you mean 70B? its sizes are tiny, 1B, 8B, 70B"),
    ("runs/plan.json", "autoshard report runs/plan.json"),
    ("gpt:huge", "its sizes are tiny, 124M"),
])
def test_unknown_names_and_sizes_list_what_there_is(reference, message):
    with pytest.raises(ModelError) as error:
        load_model(reference)
    assert message in str(error.value)


def test_seq_is_refused_where_there_is_no_sequence():
    with pytest.raises(ModelError, match="resnet:tiny takes no seq; leave --seq out"):
        load_model("resnet", seq=8)


@pytest.mark.parametrize("options, message", [
    ({"batch": 0}, "--batch is 0"), ({"seq": -1}, "--seq is -1"), ({"dtype": "f8"}, "choose one of bf16, fp16"),
    ({"hf": "x.json"}, "give one")])
def test_bad_options(options, message):
    with pytest.raises(UsageError, match=message):
        load_model("mlp", **options)


def test_no_model_at_all():
    with pytest.raises(UsageError, match="no model was given"):
        load_model(None)


# -- package.module:factory -----------------------------------------------------------------------

def test_factory_without_a_loss(user):
    spec = load_model("own_factories:linear", batch=6)
    assert spec.reference == "own_factories:linear" and spec.loss_fn is None
    assert [x.shape[0] for x in spec.example_inputs] == [6, 6] and all(t.is_meta for t in tensors(spec))


def test_factory_beside_a_loss(user):
    spec = load_model("own_with_loss:linear")
    with torch.device("meta"):
        assert spec.loss_fn(spec.model(spec.example_inputs[0]), spec.example_inputs[1]).shape == ()


def test_factory_with_keyword_inputs(user):
    spec = load_model("own_factories:keywords")
    assert spec.example_inputs == () and list(spec.example_kwargs) == ["input"]


def test_a_file_of_models_is_an_importable_module_too():
    assert load_model("models.mlp:build").loss_fn is not None


@pytest.mark.parametrize("reference, message", [
    ("own_factories:lineer", "has no function 'lineer'; did you mean linear?"),
    ("own_factories:not_a_function", "has no function 'not_a_function', not_a_function there is of type int"),
    ("own.missing:linear", "there is no module 'own.missing'"),
    ("own_broken:linear", "cannot import 'own_broken': ModuleNotFoundError: No module named 'no_such_dependency'"),
    ("own_factories:nothing", "must return (model, example_inputs), but returned NoneType"),
    ("own_factories:fails", "building own_factories:fails failed: RuntimeError: out of cheese at"),
    ("own_factories:reads_values", "cannot be built on the meta device"),
    ("own_with_loss:keywords", "must be positional and end with the target"),
    ("own_factories:keywords --batch", "takes no batch; leave --batch out, or give the function a parameter 'batch'"),
    ("own_factories:Net", "own_factories:Net is a class of models, and its example inputs are not known; write a function that returns"),
    ("own_factories:Net --batch", "def factory(): return Net(...), (inputs, ...)"),
    ("own_factories:NET", "own_factories:NET is a model, and its example inputs are not known"),
])
def test_bad_factories(user, reference, message):
    reference, _, batch = reference.partition(" --")
    with pytest.raises(ModelError) as error:
        load_model(reference, batch=2 if batch else None)
    assert message in str(error.value)


@pytest.mark.parametrize("reference, message", [
    ("script.py:linear", "script.py is a file, and models go by module and function: write script:linear."),
    ("./script.py", "./script.py is a file, and models go by module and function: write script:factory."),
    ("sub/script.py:linear", "write sub.script:linear."),
    ("../beside.py:linear", "write beside:linear, from the folder "),
    ("./nosuch.py:linear", "there is no file ./nosuch.py here"),
    ("script.linear", "did you mean script:linear?"),
])
def test_a_script_is_not_run_to_find_a_model_in_it(user, reference, message):
    """`script.py:linear` is also the module `py` of a package `script`, and to import that package would train, and write a checkpoint."""
    (user / "sub").mkdir()
    for place in (user / "script.py", user / "sub" / "script.py", user.parent / "beside.py"):
        place.write_text("raise SystemExit('it ran')\n")
    with pytest.raises(ModelError) as error:
        load_model(reference)
    assert message in str(error.value)


def test_the_message_names_the_line_of_the_user(user):
    line = 1 + FACTORY.splitlines().index('    raise RuntimeError("out of cheese")')
    with pytest.raises(ModelError, match=f"own_factories.py:{line}"):
        load_model("own_factories:fails")


# -- Hugging Face ---------------------------------------------------------------------------------

def test_hf_config_gives_model_inputs_and_labels(config):
    spec = load_model(None, hf=config(**LLAMA), batch=4)
    assert type(spec.model).__name__ == "LlamaForCausalLM" and spec.reference == "hf:config.json"
    assert {k: v.shape for k, v in spec.example_kwargs.items()} == {"input_ids": (4, 32), "labels": (4, 32)}
    assert all(t.is_meta for t in tensors(spec)) and spec.loss_fn is None
    assert list(spec.for_inference.example_kwargs) == ["input_ids"]
    assert spec.model.config._attn_implementation == "sdpa" and not spec.model.config.use_cache


def test_hf_model_returns_its_loss(config):
    spec = load_model(None, hf=config(**LLAMA), batch=2, seq=8, fake=False)
    loss = spec.model(**spec.example_kwargs).loss
    assert loss.shape == () and 4 < loss.item() < 8


def test_hf_dtype_is_the_config_s_unless_the_user_gives_one(config):
    path = config(**LLAMA, dtype="bfloat16")
    assert next(load_model(None, hf=path).model.parameters()).dtype == torch.bfloat16
    assert next(load_model(None, hf=path, dtype="fp32").model.parameters()).dtype == torch.float32


SMALL_BERT = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
              "intermediate_size": 128, "max_position_embeddings": 16, "vocab_size": 256}


@pytest.mark.parametrize("architecture, labels", [
    (None, {"labels": (2, 16)}),
    ("BertForSequenceClassification", {"labels": (2,)}),
    ("BertForTokenClassification", {"labels": (2, 16)}),
    ("BertForQuestionAnswering", {"start_positions": (2,), "end_positions": (2,)}),
    ("BertModel", {}),
])
def test_hf_labels_follow_the_head(config, architecture, labels):
    fields = SMALL_BERT | ({"architectures": [architecture]} if architecture else {})
    spec = load_model(None, hf=config(**fields), batch=2, fake=False)
    assert {k: tuple(v.shape) for k, v in spec.example_kwargs.items() if k != "input_ids"} == labels
    output = spec.model(**spec.example_kwargs)
    assert output.loss.isfinite() if labels else not hasattr(output, "loss")


def test_hf_vision_and_encoder_decoder(config):
    vit = config(model_type="vit", hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
                 image_size=16, patch_size=4)
    spec = load_model(None, hf=vit, batch=2, fake=False)
    assert spec.example_kwargs["pixel_values"].shape == (2, 3, 16, 16)
    assert spec.model(**spec.example_kwargs).loss.isfinite()
    with pytest.raises(ModelError, match="image model and takes no seq"):
        load_model(None, hf=vit, seq=4)
    t5 = config(model_type="t5", vocab_size=256, d_model=64, num_layers=1, num_heads=4, d_kv=16, d_ff=64,
                decoder_start_token_id=0)
    spec = load_model(None, hf=t5, batch=2, seq=8, fake=False)
    assert spec.model(**spec.example_kwargs).loss.isfinite()


@pytest.mark.parametrize("fields, message", [
    ({"hidden_size": 4}, 'has no "model_type"'),
    ({"model_type": "nope"}, "does not accept"),
    ({"model_type": "bert", "architectures": ["NopeForLM"]}, "asks for NopeForLM"),
    ({"model_type": "wav2vec2", "architectures": ["Wav2Vec2Model"]}, "no example input is known"),
    ({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 0}, "does not accept"),
])
def test_bad_hf_configs(config, fields, message):
    with pytest.raises(ModelError) as error:
        load_model(None, hf=config(**fields))
    assert message in str(error.value)


def test_hf_files_that_are_no_config(tmp_path, config):
    with pytest.raises(ModelError, match="cannot read the config .*absent.json: No such file"):
        load_model(None, hf=tmp_path / "absent.json")
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(ModelError, match="is not JSON"):
        load_model(None, hf=tmp_path / "text.json")
    with pytest.raises(ModelError, match="--seq 64 is more than the 32 positions"):
        load_model(None, hf=config(**LLAMA), seq=64)


def test_without_transformers_the_message_says_what_to_install(config, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ModelError, match=r"pip install autoshard\[hf\]"):
        load_model(None, hf=config(**LLAMA))
