"""Does a model get its own tokenizer and template, made once and never out of date?"""

import json
import logging
import os
import tempfile

import gguf
import pytest
from gguf.constants import TokenType

from tests.support.tiny import (
    CHAT_TEMPLATE,
    llama_config,
    tiny_tokenizer,
    write_checkpoint,
    write_json,
)
from tests.support.tiny_gguf import write_gguf
from tokamak.checkpoint.byte_tokenizer import byte_tokenizer
from tokamak.checkpoint.tokenizer import load_chat_template, load_tokenizer
from tokamak.checkpoint.tokenizer_cache import SUFFIX
from tokamak.errors import (
    CheckpointError,
    ModelNotFoundError,
    OptionError,
    UnsupportedModelError,
)
from tokamak.text.deepseek_chat import DeepseekChat
from tokamak.text.tokenizer import byte_alphabet


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TOKAMAK_CACHE", str(folder))
    return folder


@pytest.fixture
def file(tmp_path):
    return write_gguf(tmp_path / "model" / "tiny.gguf", llama_config())


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(tmp_path / "folder")


def vocabulary_file(path, kind, tokens, *, types=None, pre=None, merges=None, scores=None, **more):
    """A GGUF file with nothing but a vocabulary."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types or [TokenType.NORMAL] * len(tokens))
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    for name, value in more.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def pieces(path, text):
    return load_tokenizer(path).backend.encode(text, add_special_tokens=False).tokens


def test_a_gguf_vocabulary_is_the_tokenizer_it_was_made_from(file):
    theirs = tiny_tokenizer()
    text = "What is the capital of<|im_end|> Wales? ďábel 12  345"

    tokenizer = load_tokenizer(file)

    assert tokenizer.encode(text, add_special_tokens=True) == theirs.encode(text).ids
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {0, 2})
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.vocab_tokens == theirs.get_vocab_size()


def test_the_second_start_reads_what_the_first_one_kept(file, monkeypatch):
    first = load_tokenizer(file)
    monkeypatch.setattr("tokamak.checkpoint.tokenizer.read_vocabulary", None)

    again = load_tokenizer(file)

    assert file.with_name(file.name + SUFFIX).is_file()
    assert again.to_json() == first.to_json()
    assert (again.bos_id, again.eos_ids, again.vocab_tokens) == (1, {0, 2}, 320)


def test_a_changed_file_is_never_served_with_the_old_tokenizer(file):
    load_tokenizer(file)
    os.utime(file, ns=(1, 1))
    kept = file.with_name(file.name + SUFFIX)
    before = kept.read_bytes()

    load_tokenizer(file)

    assert kept.read_bytes() != before
    assert json.loads(kept.read_text().partition("\n")[0])["source"]["modified_ns"] == 1


@pytest.mark.parametrize("damage", [b"", b"{}\n", b"not json", None])
def test_a_damaged_copy_is_made_again(file, damage, caplog):
    load_tokenizer(file)
    kept = file.with_name(file.name + SUFFIX)
    whole = kept.read_bytes()
    kept.write_bytes(whole[: len(whole) // 2] if damage is None else damage)

    with caplog.at_level(logging.WARNING):
        tokenizer = load_tokenizer(file)

    assert tokenizer.vocab_tokens == 320
    assert kept.read_bytes() == whole
    assert "made again" in caplog.text


def test_where_the_model_lies_read_only_the_cache_folder_is_used(file, cache, monkeypatch):
    def refuse(*args, dir=None, **kwargs):
        if dir == file.parent:
            raise PermissionError(13, "read-only", str(dir))
        return make(*args, dir=dir, **kwargs)

    make = tempfile.mkstemp
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    load_tokenizer(file)
    monkeypatch.setattr("tokamak.checkpoint.tokenizer.read_vocabulary", None)

    assert load_tokenizer(file).vocab_tokens == 320
    assert [p.suffixes[-1] for p in (cache / "tokenizers").iterdir()] == [".json"]
    assert not file.with_name(file.name + SUFFIX).exists()


def test_nothing_half_written_is_left_behind(file):
    load_tokenizer(file)

    assert sorted(p.name for p in file.parent.iterdir()) == [file.name, file.name + SUFFIX]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["x", "Ġ", "Ġ12", "34"]),
        ("smollm", ["x", "ĠĠ", "1", "2", "3", "4"]),
        ("qwen2", ["x", "Ġ", "Ġ", "1", "2", "3", "4"]),
        ("llama-bpe", ["x", "Ġ", "Ġ", "12", "3", "4"]),
    ],
)
def test_words_are_cut_as_the_file_says(tmp_path, pre, expected):
    words = ["ĠĠ", "12", "34", "Ġ12"]
    merges = ["Ġ Ġ", "1 2", "3 4", "Ġ 12"]
    tokens = [*byte_alphabet(), *words]
    path = vocabulary_file(tmp_path / "v.gguf", "gpt2", tokens, pre=pre, merges=merges)

    assert pieces(path, "x  1234") == expected


def test_a_pre_tokenizer_nobody_knows_is_named(tmp_path):
    path = vocabulary_file(tmp_path / "v.gguf", "gpt2", ["a"], pre="sparkle", merges=["a a"])

    with pytest.raises(UnsupportedModelError, match=r"'sparkle'.*smollm"):
        load_tokenizer(path)


def test_a_kind_of_vocabulary_nobody_knows_is_named(tmp_path):
    path = vocabulary_file(tmp_path / "v.gguf", "rwkv", ["a"])

    with pytest.raises(UnsupportedModelError, match="'rwkv'"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("tokens", "merges", "more", "says"),
    [
        (["a", "b"], ["a b"], {}, "names no tokens"),
        (["a", "a"], ["a a"], {}, "twice"),
        (["a", "aa"], ["a a"], {"eos_token_id": 9}, "eos_token_id"),
    ],
)
def test_lists_that_contradict_each_other_are_refused(tmp_path, tokens, merges, more, says):
    path = vocabulary_file(tmp_path / "v.gguf", "gpt2", tokens, pre="gpt-2", merges=merges, **more)

    with pytest.raises(CheckpointError, match=says):
        load_tokenizer(path)


def sentencepiece_file(path, **more):
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", "t", "h", "e", "▁t", "he", "▁the"]
    kinds = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, TokenType.BYTE]
    types = [*kinds, *[TokenType.NORMAL] * 7]
    scores = [0.0, 0.0, 0.0, 0.0, -7.0, -6.0, -5.0, -4.0, -1.0, -2.0, -3.0]
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    return vocabulary_file(path, "llama", tokens, types=types, scores=scores, **ids, **more)


def test_sentencepiece_merges_the_best_pieces_first(tmp_path):
    tokenizer = load_tokenizer(sentencepiece_file(tmp_path / "v.gguf"))

    ids = tokenizer.encode("the\nthe", add_special_tokens=True)

    assert [tokenizer.backend.id_to_token(i) for i in ids] == ["<s>", "▁the", "<0x0A>", "t", "he"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the\nthe"
    assert tokenizer.eos_ids == {2}


def test_bos_and_the_first_blank_are_left_out_where_the_file_says_so(tmp_path):
    path = sentencepiece_file(tmp_path / "v.gguf", add_bos_token=False, add_space_prefix=False)

    assert load_tokenizer(path).backend.encode("the").tokens == ["t", "he"]


def test_eos_is_added_where_the_file_says_so(tmp_path):
    path = sentencepiece_file(tmp_path / "v.gguf", add_eos_token=True)

    assert load_tokenizer(path).backend.encode("the").tokens == ["<s>", "▁the", "</s>"]


def test_a_folder_has_its_tokenizer_and_every_id_that_ends_a_text(folder):
    write_json(folder / "generation_config.json", {"eos_token_id": [2, 7]})

    tokenizer = load_tokenizer(folder)

    assert tokenizer.to_json() == tiny_tokenizer().to_str()
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {0, 2, 7})


def test_prompts_are_never_cut_or_filled_as_training_batches_were(folder):
    saved = tiny_tokenizer()
    saved.enable_truncation(4)
    saved.enable_padding(length=64)
    saved.save(str(folder / "tokenizer.json"))

    ids = load_tokenizer(folder).encode("Hello world, hello!", add_special_tokens=True)

    assert ids == tiny_tokenizer().encode("Hello world, hello!").ids


@pytest.mark.parametrize("wanted", [True, False])
def test_llama_classes_put_bos_first_as_their_settings_say(folder, wanted):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    changed = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": wanted}
    write_json(folder / "tokenizer_config.json", settings | changed)
    tokenizer = load_tokenizer(folder)
    alone = tokenizer.encode("a", add_special_tokens=False)

    ids = tokenizer.encode("a", add_special_tokens=True)

    assert ids == ([1, *alone] if wanted else alone)


def test_a_damaged_tokenizer_is_the_checkpoints_error(folder):
    (folder / "tokenizer.json").write_text("{}")

    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(folder)


def test_another_kind_of_vocabulary_is_named_with_a_way_out(folder):
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")

    with pytest.raises(UnsupportedModelError, match=r"only tokenizer\.model.*save_pretrained"):
        load_tokenizer(folder)


def test_a_folder_without_a_tokenizer_is_told_so(tmp_path):
    write_json(tmp_path / "config.json", llama_config())

    with pytest.raises(ModelNotFoundError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_random_weights_without_a_tokenizer_speak_bytes(tmp_path):
    write_json(tmp_path / "config.json", llama_config())

    tokenizer = load_tokenizer(tmp_path, load_format="random")

    assert tokenizer.encode("hé", add_special_tokens=True) == list("hé".encode())
    assert tokenizer.decode([*"hé".encode(), 256, 300], skip_special_tokens=True) == "hé[300]"
    assert (tokenizer.vocab_tokens, tokenizer.eos_ids) == (320, {256})


def test_a_vocabulary_too_small_for_bytes_is_refused():
    with pytest.raises(ModelNotFoundError, match="vocabulary of 200"):
        byte_tokenizer(200)


def test_a_gguf_file_brings_its_template(file):
    template = load_chat_template(file, None)

    prompt = template.render([{"role": "user", "content": "hi"}])

    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("place", ["text", "list", "file"])
def test_a_folder_brings_its_template_in_any_of_three_ways(folder, place):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    source = "{{ bos_token }}{{ eos_token }}!"
    if place == "text":
        settings["chat_template"] = source
    elif place == "list":
        named = [{"name": "tool_use", "template": "?"}, {"name": "default", "template": source}]
        settings["chat_template"] = named
    else:
        (folder / "chat_template.jinja").write_text(source)
    write_json(folder / "tokenizer_config.json", settings | {"eos_token": {"content": "<|e|>"}})

    assert load_chat_template(folder, None).render([]) == "<|im_start|><|e|>!"


def test_several_templates_without_a_default_are_refused(folder):
    named = {"chat_template": [{"name": "rag", "template": "?"}]}
    write_json(folder / "tokenizer_config.json", named)

    with pytest.raises(CheckpointError, match="'rag'"):
        load_chat_template(folder, None)


def test_a_model_without_a_template_has_none(tmp_path):
    folder = write_checkpoint(tmp_path / "base", chat_template=None)

    assert load_chat_template(folder, None) is None


@pytest.mark.parametrize("model", ["folder", "file"])
def test_a_given_template_replaces_the_models_own(model, tmp_path, request):
    own = tmp_path / "own.jinja"
    own.write_text("{{ bos_token }}|" + CHAT_TEMPLATE)

    template = load_chat_template(request.getfixturevalue(model), str(own))

    assert template.render([], add_generation_prompt=False) == "<|im_start|>|"


@pytest.mark.parametrize("text", [None, "{% if %}"])
def test_a_given_template_that_cannot_be_used_is_an_options_error(folder, tmp_path, text):
    own = tmp_path / "own.jinja"
    if text is not None:
        own.write_text(text)

    with pytest.raises(OptionError, match=r"chat_template '.*own\.jinja'"):
        load_chat_template(folder, str(own))


@pytest.mark.parametrize(
    ("architecture", "tool_format"),
    [("DeepseekV4ForCausalLM", "deepseek_v4"), ("DeepseekV41ForCausalLM", "deepseek_v41")],
)
def test_architectures_without_a_template_have_the_format_known_for_them(
    tmp_path, architecture, tool_format
):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    own = tmp_path / "own.jinja"
    own.write_text("hello")

    found = load_chat_template(tmp_path, None)

    assert isinstance(found, DeepseekChat)
    assert found.tool_format == tool_format
    assert load_chat_template(tmp_path, str(own)).render([]) == "hello"
