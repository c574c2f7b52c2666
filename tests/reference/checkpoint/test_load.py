"""Is every parameter set exactly once, every tensor used, and every contradiction refused? (OPEN-18, OPEN-19)"""

import json
import logging

import gguf
import pytest
import torch
from safetensors.torch import save_file

from tests.support.oracle import Oracle
from tests.support.steps import ModelDriver, a_build
from tests.support.tiny import (
    llama_config,
    qwen3_config,
    tiny_weights,
    write_checkpoint,
    write_json,
)
from tests.support.tiny_gguf import write_gguf
from tokamak.checkpoint.load import load_model, load_random
from tokamak.checkpoint.source import open_checkpoint
from tokamak.errors import CheckpointError, UnsupportedModelError
from tokamak.models.registry import find

PROMPT = [5, 17, 99, 3, 250, 41, 7]

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def a_model(checkpoint):
    return find(checkpoint.architecture).from_config(checkpoint.config, a_build())


def loaded(path):
    """The model at `path`, and the report of its loading."""
    checkpoint = open_checkpoint(path)
    model = a_model(checkpoint)
    return model, load_model(model, checkpoint)


def scores(model):
    return ModelDriver(model).step({"a": PROMPT})["a"]


def refusal_of(path, error=CheckpointError):
    checkpoint = open_checkpoint(path)
    model = a_model(checkpoint)
    with pytest.raises(error) as refusal:
        load_model(model, checkpoint)
    return str(refusal.value)


def with_weights(folder, config, change):
    """A checkpoint whose weights went through `change`."""
    weights = tiny_weights(config)
    change(weights)
    return write_checkpoint(folder, config, weights=weights, shards=2)


def test_every_tensor_is_used_and_counted(tmp_path):
    config = llama_config()
    weights = tiny_weights(config)

    _, report = loaded(write_checkpoint(tmp_path, config, shards=3))

    assert report.tensors == len(weights)
    assert report.parameters == sum(w.numel() for w in weights.values())
    assert report.stored_bytes == 4 * report.parameters
    assert report.unused == ()


def test_a_missing_tensor_is_named(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"

    message = refusal_of(with_weights(tmp_path, llama_config(), lambda w: w.pop(name)))

    assert name in message
    assert str(tmp_path) in message


def test_a_transposed_tensor_is_refused_with_both_shapes(tmp_path):
    name = "model.layers.0.mlp.down_proj.weight"

    def transpose(weights):
        weights[name] = weights[name].T.contiguous()

    message = refusal_of(with_weights(tmp_path, llama_config(), transpose))

    assert f"{name} in " in message
    assert "[96, 64]; the config makes it [64, 96]" in message


def test_fewer_layers_than_the_config_says_are_refused(tmp_path):
    path = write_checkpoint(tmp_path, llama_config())
    write_json(path / "config.json", llama_config(num_hidden_layers=3))

    assert "model.layers.2." in refusal_of(path)


def test_more_layers_than_the_config_says_are_refused(tmp_path):
    path = write_checkpoint(tmp_path, llama_config(num_hidden_layers=3))
    write_json(path / "config.json", llama_config())

    message = refusal_of(path)

    assert "model.layers.2." in message
    assert "model.safetensors" in message


def test_nothing_is_loaded_before_everything_is_checked(tmp_path):
    path = with_weights(tmp_path, llama_config(), lambda w: w.pop("model.norm.weight"))
    checkpoint = open_checkpoint(path)
    model = a_model(checkpoint)
    taken = []
    for name, (parameter, _) in model.weights().items():
        parameter.load = lambda parts, name=name: taken.append(name)

    with pytest.raises(CheckpointError):
        load_model(model, checkpoint)

    assert taken == []


def test_a_number_format_we_do_not_read_is_named(tmp_path):
    config = llama_config()
    weights = tiny_weights(config)
    weights["model.norm.weight"] = weights["model.norm.weight"].double()
    write_checkpoint(tmp_path, config)
    save_file({n: w.contiguous() for n, w in weights.items()}, tmp_path / "model.safetensors")

    message = refusal_of(tmp_path, UnsupportedModelError)

    assert "model.norm.weight" in message
    assert "F64" in message


def test_rotary_frequencies_of_old_checkpoints_are_passed_over(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"

    def add(weights):
        weights[name] = torch.ones(8)

    _, report = loaded(with_weights(tmp_path, llama_config(), add))

    assert report.unused == (name,)


def test_a_tied_head_needs_no_tensor(tmp_path):
    path = write_checkpoint(tmp_path, llama_config(tie_word_embeddings=True))

    model, _ = loaded(path)

    expected = Oracle(path).scores(PROMPT)
    assert torch.allclose(scores(model).float(), expected, atol=1e-3)
    assert expected.std() > 1


def test_a_tied_head_that_is_stored_too_changes_nothing_and_warns_nobody(tmp_path, caplog):
    config = llama_config(tie_word_embeddings=True)
    plain, _ = loaded(write_checkpoint(tmp_path / "plain", config))

    def copy_head(weights):
        weights[HEAD] = weights[EMBEDDING].clone()

    with caplog.at_level(logging.WARNING):
        model, report = loaded(with_weights(tmp_path / "copy", config, copy_head))

    assert report.unused == (HEAD,)
    assert torch.equal(scores(model), scores(plain))
    assert caplog.records == []


def test_a_tied_head_with_another_tensor_stays_tied_with_one_warning(tmp_path, caplog):
    config = llama_config(tie_word_embeddings=True)
    plain, _ = loaded(write_checkpoint(tmp_path / "plain", config))

    def another_head(weights):
        weights[HEAD] = weights[EMBEDDING] + 1

    with caplog.at_level(logging.WARNING):
        model, _ = loaded(with_weights(tmp_path / "other", config, another_head))

    assert torch.equal(scores(model), scores(plain))
    assert len(caplog.records) == 1
    assert HEAD in caplog.text


def test_an_untied_head_that_is_missing_is_refused_by_name(tmp_path):
    message = refusal_of(with_weights(tmp_path, llama_config(), lambda w: w.pop(HEAD)))

    assert HEAD in message
    assert "tie_word_embeddings is False" in message


@pytest.mark.parametrize("made", [llama_config, qwen3_config])
def test_without_a_word_on_ties_the_families_have_a_head_of_their_own(tmp_path, made):
    config = made(tie_word_embeddings=False)
    path = write_checkpoint(tmp_path, config)
    stored = json.loads((path / "config.json").read_text())
    del stored["tie_word_embeddings"]

    expected, _ = loaded(path)
    write_json(path / "config.json", stored)
    model, _ = loaded(path)

    assert torch.equal(scores(model), scores(expected))


@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_0", "Q4_1", "Q8_0"])
def test_a_gguf_file_without_output_weight_has_a_tied_head(tmp_path, kind):
    config = llama_config(tie_word_embeddings=True)
    form = gguf.GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "tiny.gguf", config, format=form)

    model, _ = loaded(path)

    expected = Oracle(path).scores(PROMPT)
    assert torch.allclose(scores(model).float(), expected, atol=1e-3)
    assert expected.std() > 1


def test_random_weights_depend_on_the_seed_alone(tmp_path):
    write_json(tmp_path / "config.json", llama_config())
    checkpoint = open_checkpoint(tmp_path)
    models = [a_model(checkpoint) for _ in range(3)]

    reports = [load_random(m, seed) for m, seed in zip(models, (7, 7, 8), strict=True)]

    first, again, other = (scores(model) for model in models)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert reports[0].parameters == sum(w.numel() for w in tiny_weights(llama_config()).values())


def test_a_config_alone_cannot_be_loaded(tmp_path):
    write_json(tmp_path / "config.json", llama_config())

    assert 'load_format="random"' in refusal_of(tmp_path)
