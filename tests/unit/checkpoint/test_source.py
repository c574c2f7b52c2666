"""Does a checkpoint say what it is, in Hugging Face's words, whatever it is stored as?"""

import json

import gguf
import numpy as np
import pytest

from tests.support.tiny import llama_config, qwen3_config, write_checkpoint, write_json
from tests.support.tiny_gguf import write_gguf
from tokamak.checkpoint.gguf import GgufFile
from tokamak.checkpoint.gguf_config import read_config
from tokamak.checkpoint.source import open_checkpoint
from tokamak.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError


@pytest.mark.parametrize(
    "config", [llama_config(), llama_config(tie_word_embeddings=True), qwen3_config()]
)
def test_a_gguf_file_gives_the_config_it_was_made_from(config, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", config)

    found = open_checkpoint(path).config

    assert {name: found[name] for name in config if name != "torch_dtype"} == {
        name: value for name, value in config.items() if name != "torch_dtype"
    }


@pytest.mark.parametrize("config", [llama_config(), qwen3_config()])
def test_a_gguf_file_has_the_tensors_of_the_folder_it_was_made_from(config, tmp_path):
    folder = open_checkpoint(write_checkpoint(tmp_path / "folder", config, shards=2))
    file = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", config))

    shapes = [{n: c.entry(n).shape for n in c.names()} for c in (folder, file)]

    assert shapes[0] == shapes[1]
    assert folder.facts() == file.facts()


def test_only_llama_files_have_interleaved_queries_and_keys(tmp_path):
    llama = open_checkpoint(write_gguf(tmp_path / "llama.gguf", llama_config()))
    qwen3 = open_checkpoint(write_gguf(tmp_path / "qwen3.gguf", qwen3_config()))

    def heads(checkpoint, part):
        return checkpoint.entry(f"model.layers.1.self_attn.{part}.weight").interleaved_heads

    assert [heads(llama, part) for part in ("q_proj", "k_proj", "v_proj")] == [4, 2, 0]
    assert [heads(qwen3, part) for part in ("q_proj", "k_proj")] == [0, 0]


def test_facts_count_what_is_stored(tmp_path):
    config = llama_config()
    kind = gguf.GGMLQuantizationType.Q4_1
    stored = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", config, format=kind)).facts()
    plain = open_checkpoint(write_checkpoint(tmp_path / "folder", config)).facts()

    assert stored.stored_dtype == "Q4_1"
    assert plain.stored_dtype == "float32"
    assert stored.parameters == plain.parameters == plain.weight_bytes // 4
    assert stored.weight_bytes < plain.weight_bytes / 5
    assert stored.cache_token_numbers == 2 * 2 * 2 * 16
    assert stored.max_position_tokens == 512


def test_facts_of_a_config_alone_count_every_expert(tmp_path):
    sizes = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
    }
    write_json(tmp_path / "config.json", llama_config(**sizes))

    facts = open_checkpoint(tmp_path).facts()

    attention, dense = 64 * 16 * (4 + 4 + 2 + 2), 3 * 64 * 96
    experts = 8 * 3 * 64 * 32 + 8 * 64
    embeddings = 2 * 320 * 64
    assert facts.parameters == 3 * attention + dense + 2 * experts + embeddings


def test_facts_tell_what_a_tokens_row_takes_in_the_widest_part_of_a_layer(tmp_path):
    wide = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
    write_json(tmp_path / "config.json", llama_config())
    dense = open_checkpoint(tmp_path).facts()
    write_json(tmp_path / "config.json", llama_config(**wide))
    sparse = open_checkpoint(tmp_path).facts()

    assert dense.step_token_numbers == 4 * 64 + 3 * 96
    assert sparse.step_token_numbers == 4 * 64 + 4 * (3 * 64 + 2 * 64)


def test_a_config_alone_is_a_checkpoint_without_tensors(tmp_path):
    write_json(tmp_path / "config.json", llama_config())

    checkpoint = open_checkpoint(tmp_path)

    assert checkpoint.names() == ()
    assert checkpoint.facts().parameters == pytest.approx(2 * 320 * 64 + 2 * 30720, rel=0.01)
    assert checkpoint.facts().weight_bytes == 0


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ModelNotFoundError, match="no model at"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(ModelNotFoundError, match=r"no config.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "weights.bin").touch()
    with pytest.raises(UnsupportedModelError, match=r"not a .gguf file"):
        open_checkpoint(tmp_path / "weights.bin")


def test_a_quantisation_nobody_reads_is_named(tmp_path):
    config = llama_config(quantization_config={"quant_method": "sparkle", "bits": 3})
    write_json(tmp_path / "config.json", config)

    with pytest.raises(UnsupportedModelError, match="'sparkle'"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("text", "says"), [("{", "no valid JSON"), ("[]", "no JSON object")])
def test_a_config_that_is_no_json_object_is_refused(tmp_path, text, says):
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("missing", ["architectures", "vocab_size", "max_position_embeddings"])
def test_facts_name_the_field_a_config_lacks(tmp_path, missing):
    config = llama_config()
    del config[missing]
    write_json(tmp_path / "config.json", config)

    with pytest.raises(CheckpointError, match=missing):
        open_checkpoint(tmp_path).facts()


def metadata_file(path, architecture="llama", *, tensors=(), **values):
    """A file with the metadata of a small llama, changed by `values`, and an embedding."""
    writer = gguf.GGUFWriter(path, architecture)
    counts = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
    }
    for name, value in (counts | values).items():
        key = f"{architecture}.{name}" if not name.startswith("split") else name
        match value:
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    for name, array in (("token_embd.weight", np.zeros((320, 64), np.float32)), *tensors):
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


def llama3_factors(factor, rotary_dim=16, theta=500_000.0, low=1.0, high=4.0, trained=8192):
    """The divisors of Llama 3's scaling, from its published description."""
    found = []
    for pair in range(rotary_dim // 2):
        wave_tokens = 2 * np.pi * theta ** (2 * pair / rotary_dim)
        smooth = (trained / wave_tokens - low) / (high - low)
        smooth = min(max(smooth, 0.0), 1.0)
        found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def test_a_table_of_factors_is_llama_3_scaling(tmp_path):
    tensors = [("rope_freqs.weight", llama3_factors(32.0))]
    values = {"rope.freq_base": 500_000.0}

    config = read_config(metadata_file(tmp_path / "m.gguf", tensors=tensors, **values))

    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_another_table_of_factors_is_refused(tmp_path):
    tensors = [("rope_freqs.weight", np.linspace(1, 8, 8, dtype=np.float32))]

    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        read_config(metadata_file(tmp_path / "m.gguf", tensors=tensors))


def test_scaled_positions_and_windows_are_in_the_config(tmp_path):
    values = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
        "attention.sliding_window": 16,
        "attention.key_length": 32,
    }

    config = read_config(metadata_file(tmp_path / "m.gguf", **values))

    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    assert (config["sliding_window"], config["head_dim"]) == (16, 32)


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        ({"rope.scaling.type": "longrope"}, UnsupportedModelError, "'longrope'"),
        ({"expert_count": 8}, UnsupportedModelError, "experts"),
        ({"attention.head_count": [4, 8]}, UnsupportedModelError, "differs by layer"),
        ({"block_count": 0}, CheckpointError, "block_count"),
        ({"split.count": 3}, UnsupportedModelError, "parts"),
    ],
)
def test_what_a_file_asks_for_and_we_lack_is_named(tmp_path, values, error, says):
    file = metadata_file(tmp_path / "m.gguf", **values)

    with pytest.raises(error, match=says):
        read_config(file)


def test_an_architecture_nobody_knows_is_named_with_those_we_know(tmp_path):
    file = metadata_file(tmp_path / "m.gguf", architecture="mamba")

    with pytest.raises(UnsupportedModelError, match=r"'mamba'.*llama, qwen3"):
        read_config(file)


def test_an_index_without_a_file_fails_before_anything_is_loaded(tmp_path):
    folder = write_checkpoint(tmp_path, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()

    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        open_checkpoint(folder)


def test_names_follow_the_files(tmp_path):
    folder = write_checkpoint(tmp_path, llama_config(), shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())

    checkpoint = open_checkpoint(folder)

    assert {n: checkpoint.entry(n).file.name for n in checkpoint.names()} == index["weight_map"]
    with pytest.raises(CheckpointError, match="no tensor nothing"):
        checkpoint.entry("nothing")
