"""Encoding, decoding, chat and streaming against Hugging Face's numbers, and the rules about special tokens."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from kvsparse_jax.errors import InputError
from kvsparse_jax.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
LLAMA = ROOT / "tests" / "data" / "models" / "llama_tied"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())

GOLDEN = json.loads((LLAMA / "tokenizer_golden.json").read_text(encoding="utf-8"))


def _load(directory: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(directory)
    assert tokenizer is not None
    return tokenizer


SHARED = _load(LLAMA)


@pytest.fixture
def llama() -> Tokenizer:
    return SHARED


Make = Callable[..., Tokenizer]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a byte-level tokenizer with ids 0 "<s>", 1 "</s>", then the bytes; files as given."""

    def build(*, prepend: bool = False, special: bool = True, **files: dict[str, Any] | str) -> Tokenizer:
        vocab = {token: i for i, token in enumerate(["<s>", "</s>", *BYTES])}
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        if special:
            backend.add_special_tokens(["<s>", "</s>"])
        if prepend:
            backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        backend.save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            if isinstance(content, str):
                (tmp_path / f"{name}.jinja").write_text(content)
            else:
                (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return _load(tmp_path)

    return build


@pytest.mark.parametrize("case", GOLDEN["encode"], ids=lambda case: repr(case["text"])[:20])
def test_golden_encodings(case: dict[str, Any], llama: Tokenizer) -> None:
    assert llama.encode(case["text"]) == case["ids"]
    assert llama.encode(case["text"], add_bos=False) == case["ids_no_special"]
    assert llama.decode(case["ids"], skip_special=False) == case["decode"]
    assert llama.decode(case["ids"]) == case["decode_skip_special"]


@pytest.mark.parametrize("case", GOLDEN["chat"], ids=range(len(GOLDEN["chat"])))
def test_golden_chats(case: dict[str, Any], llama: Tokenizer) -> None:
    assert llama.has_chat_template
    arguments = (case["messages"], case["add_generation_prompt"])
    assert llama.apply_chat_template(*arguments, tokenize=False) == case["text"]
    assert llama.apply_chat_template(*arguments) == case["ids"]
    assert case["ids"].count(llama.bos_token_id) == 1


def test_golden_batch(llama: Tokenizer) -> None:
    batch = GOLDEN["left_padded_batch"]
    rows = llama.encode_batch(batch["texts"])
    width, pad = max(map(len, rows)), llama.pad_token_id
    assert pad is not None
    assert [[pad] * (width - len(row)) + row for row in rows] == batch["input_ids"]
    assert [[0] * (width - len(row)) + [1] * len(row) for row in rows] == batch["attention_mask"]
    assert llama.encode_batch([]) == []


def test_ids_of_special_tokens(llama: Tokenizer) -> None:
    assert (llama.bos_token_id, llama.uses_bos, llama.pad_token_id, llama.vocab_size) == (0, True, 2, 384)
    assert llama.eos_token_ids == frozenset({1})
    assert llama.special_ids == frozenset({0, 1, 2, 3, 4})


def test_text_that_brings_its_bos_gets_no_second_one(llama: Tokenizer) -> None:
    rendered = llama.apply_chat_template([{"role": "user", "content": "Hello there"}], tokenize=False)
    assert rendered.startswith("<|bos|>")
    assert llama.encode(rendered) == llama.encode(rendered, add_bos=False)
    assert llama.encode(rendered).count(0) == 1
    assert llama.encode("") == [0]
    assert llama.encode("", add_bos=False) == []


@pytest.mark.parametrize(
    ("prepend", "config", "bos", "uses_bos"),
    [
        (False, {"bos_token": "<s>"}, 0, False),
        (True, {"bos_token": "<s>"}, 0, True),
        (True, {}, 0, True),
        (False, {}, None, False),
        (False, {"bos_token": "<s>", "add_bos_token": True}, 0, True),
        (True, {"bos_token": "<s>", "add_bos_token": False}, 0, False),
        (False, {"bos_token": None, "add_bos_token": True}, None, False),
        (False, {"bos_token": {"content": "<s>", "lstrip": False}}, 0, False),
        (False, {"bos_token": "<nowhere>", "add_bos_token": True}, None, False),
    ],
)
def test_who_decides_about_bos(
    prepend: bool, config: dict[str, Any], bos: int | None, uses_bos: bool, make: Make
) -> None:
    tokenizer = make(prepend=prepend, tokenizer_config=config)
    assert (tokenizer.bos_token_id, tokenizer.uses_bos) == (bos, uses_bos)
    assert (tokenizer.encode("a")[0] == 0) == uses_bos
    assert len(tokenizer.encode("a")) == 1 + uses_bos


def test_eos_is_the_union_of_three_files(make: Make) -> None:
    tokenizer = make(
        tokenizer_config={"eos_token": "</s>"}, generation_config={"eos_token_id": [7, 9]}, config={"eos_token_id": 8}
    )
    assert tokenizer.eos_token_ids == frozenset({1, 7, 8, 9})
    assert make(tokenizer_config={}, generation_config={}, config={"eos_token_id": None}).eos_token_ids == frozenset()


def test_padding_and_bos_ids_fall_back_to_the_models_config(make: Make) -> None:
    tokenizer = make(config={"bos_token_id": 0, "pad_token_id": 1}, generation_config={"pad_token_id": 5})
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id) == (0, 5)


def test_tokens_named_in_the_config_only_become_special(make: Make) -> None:
    tokenizer = make(special=False, tokenizer_config={"bos_token": "<s>", "additional_special_tokens": ["</s>"]})
    assert tokenizer.encode("a</s>", add_bos=False)[1:] == [1]
    assert tokenizer.decode([0, *tokenizer.encode("a"), 1]) == "a"
    assert tokenizer.special_ids == frozenset({0, 1})


def test_added_tokens_of_the_config(make: Make) -> None:
    size = 2 + len(BYTES)
    spec = {"content": "<think>", "special": False, "normalized": False}
    tokenizer = make(tokenizer_config={"added_tokens_decoder": {str(size): spec}})
    assert tokenizer.encode("<think>") == [size]
    assert tokenizer.decode([size]) == "<think>"
    assert tokenizer.vocab_size == size + 1
    with pytest.raises(InputError, match=rf"gives '<think>' id {size + 5}, got {size}"):
        make(tokenizer_config={"added_tokens_decoder": {str(size + 5): spec}})
    with pytest.raises(InputError, match="has no content"):
        make(tokenizer_config={"added_tokens_decoder": {str(size): {}}})


def test_stored_truncation_and_padding_are_off(make: Make, tmp_path: Path) -> None:
    make()
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert [len(ids) for ids in _load(tmp_path).encode_batch(["a", "abcd"])] == [1, 4]


def test_a_directory_without_a_tokenizer_gives_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Tokenizer.load(tmp_path) is None
    assert Tokenizer.load(tmp_path / "nowhere") is None
    assert caplog.records == []
    (tmp_path / "tokenizer.model").touch()
    assert Tokenizer.load(tmp_path) is None
    assert "no tokenizer.json" in caplog.text


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_files_are_one_line(name: str, content: str, tmp_path: Path) -> None:
    shutil.copyfile(LLAMA / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=name) as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_bad_text_and_ids(llama: Tokenizer) -> None:
    with pytest.raises(InputError, match="not int"):
        llama.encode(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="surrogate"):
        llama.encode("a\ud800")
    with pytest.raises(InputError, match="a list of texts"):
        llama.encode_batch("text")
    with pytest.raises(InputError, match="-1 is negative"):
        llama.decode([5, -1])
    assert llama.decode(np.array([48, 311], np.int32)) == llama.decode([48, 311])
    assert llama.decode([48, 100_000]) == llama.decode([48])  # a row of the embedding that no token uses


class TestChat:
    MESSAGES = ({"role": "user", "content": "hi"},)

    def test_no_template(self, make: Make) -> None:
        tokenizer = make()
        assert not tokenizer.has_chat_template
        with pytest.raises(InputError, match="no chat template"):
            tokenizer.apply_chat_template(self.MESSAGES)

    @pytest.mark.parametrize(
        ("messages", "reason"),
        [
            ([], "at least one message"),
            ("hi", "a list"),
            (["hi"], "not 'hi'"),
            ([{"content": "hi"}], "a chat message is"),
            ([{"role": "user"}], "has no content"),
            ([{"role": "user", "content": object()}], "plain data"),
        ],
    )
    def test_bad_messages(self, messages: Any, reason: str, llama: Tokenizer) -> None:
        with pytest.raises(InputError, match=reason) as caught:
            llama.apply_chat_template(messages)
        assert "\n" not in str(caught.value)

    def test_unknown_arguments_are_not_dropped(self, llama: Tokenizer) -> None:
        with pytest.raises(InputError, match="does not take continue_final_message"):
            llama.apply_chat_template(self.MESSAGES, continue_final_message=True)

    def test_the_template_decides_about_bos(self, make: Make) -> None:
        # A model that uses a BOS, with a template that leaves it out: as the model was trained.
        tokenizer = make(prepend=True, chat_template="{{ messages[0].content }}")
        assert tokenizer.decode(tokenizer.apply_chat_template(self.MESSAGES), skip_special=False) == "hi"

    def test_variables_and_helpers(self, make: Make) -> None:
        template = (
            "{%- if enable_thinking is defined and not enable_thinking %}off {% endif %}\n"
            "{%- for m in messages %}{% if m.role == 'x' %}{% continue %}{% endif %}\n"
            "{% generation %}{{ m.content | tojson }}{% endgeneration %}{% endfor %}{{ eos_token }}{{ pad_token }}"
            "{{ strftime_now('%Y') | length }}"
        )
        tokenizer = make(chat_template=template, tokenizer_config={"eos_token": "</s>"})
        chat: list[dict[str, Any]] = [
            {"role": "x", "content": ""},
            {"role": "user", "content": "<é>", "tool_calls": None},
        ]
        assert tokenizer.apply_chat_template(chat, tokenize=False, enable_thinking=False) == 'off "<é>"</s>4'
        assert tokenizer.apply_chat_template(chat, tokenize=False) == '"<é>"</s>4'

    def test_a_template_that_refuses(self, make: Make) -> None:
        tokenizer = make(chat_template="{{ raise_exception('roles must alternate') }}")
        with pytest.raises(InputError, match="refuses these messages: roles must alternate"):
            tokenizer.apply_chat_template(self.MESSAGES)

    def test_a_template_that_is_not_jinja(self, make: Make) -> None:
        with pytest.raises(InputError, match="not valid jinja"):
            make(chat_template="{% for %}").apply_chat_template(self.MESSAGES)

    @pytest.mark.parametrize(
        "code", ["''.__class__.__mro__", "messages.append(1)", "raise_exception.__globals__['os']"]
    )
    def test_a_template_cannot_leave_its_sandbox(self, code: str, make: Make) -> None:
        with pytest.raises(InputError, match="refuses these messages"):
            make(chat_template="{{ " + code + " }}").apply_chat_template(self.MESSAGES)

    def test_where_the_template_comes_from(self, make: Make, tmp_path: Path) -> None:
        both = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
        tokenizer = make(tokenizer_config={"chat_template": both})
        assert tokenizer.apply_chat_template(self.MESSAGES, tokenize=False) == "plain"
        assert tokenizer.apply_chat_template(self.MESSAGES, tokenize=False, tools=[{"name": "f"}]) == "tools"
        (tmp_path / "chat_template.jinja").write_text("file")
        assert _load(tmp_path).apply_chat_template(self.MESSAGES, tokenize=False) == "file"
        only_tools = make(tokenizer_config={"chat_template": both[1:]})
        (tmp_path / "chat_template.jinja").unlink()
        only_tools = _load(tmp_path)
        with pytest.raises(InputError, match="no default chat template"):
            only_tools.apply_chat_template(self.MESSAGES)


def test_save_copies_the_files_unchanged(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "new" / "target"
    shutil.copytree(LLAMA, source)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = _load(source)
    tokenizer.save(target)
    names = [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    ]
    for name in names:
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert not (target / "tokenizer_golden.json").exists()
    assert not (target / "config.json").exists()
    tokenizer.save(target)  # again, over what is there
    tokenizer.save(source)  # onto itself
    assert _load(target).encode("Licensed") == tokenizer.encode("Licensed")


def _stream(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    decoder = tokenizer.stream_decoder(skip_special)
    return [*(decoder.push(token_id) for token_id in ids), decoder.finish()]


@pytest.mark.parametrize("case", GOLDEN["encode"], ids=lambda case: repr(case["text"])[:20])
def test_streamed_text_is_the_decoded_text(case: dict[str, Any], llama: Tokenizer) -> None:
    assert "".join(_stream(llama, case["ids"])) == case["decode_skip_special"]
    assert "".join(_stream(llama, case["ids"], skip_special=False)) == case["decode"]


def test_incomplete_characters_are_held_back(make: Make) -> None:
    tokenizer = make()
    ids = tokenizer.encode("é🙂a")
    assert _stream(tokenizer, ids) == ["", "é", "", "", "", "🙂", "a", ""]
    assert _stream(tokenizer, ids[:4]) == ["", "é", "", "", "�"]
    decoder = tokenizer.stream_decoder()
    decoder.push(ids[0])
    decoder.finish()
    assert decoder.push(ids[6]) == "a"  # finish() starts afresh


def test_bytes_that_never_become_a_character_are_not_held_for_ever(make: Make) -> None:
    tokenizer = make()
    continuation = tokenizer.encode("é")[1]
    pieces = _stream(tokenizer, [continuation] * 50)
    assert "".join(pieces) == "�" * 50
    assert "".join(pieces[:10]) != ""


@given(ids=st.lists(st.integers(0, 383), max_size=60))
def test_streaming_any_ids_adds_up(ids: list[int]) -> None:
    assert "".join(_stream(SHARED, ids)) == SHARED.decode(ids)
    assert "".join(_stream(SHARED, ids, skip_special=False)) == SHARED.decode(ids, skip_special=False)


def test_streaming_with_a_decoder_that_strips_spaces(tmp_path: Path) -> None:
    """Llama 2's kind of tokenizer: spaces as a letter, bytes as tokens, the first space of a text stripped."""
    words = ["▁Hello", "▁the", "re", "▁", "▁▁", ".", "日"]
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256)), *words])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = _load(tmp_path)
    rng = random.Random(0)
    pieces = [[vocab[word]] for word in words] + [[1]]
    pieces += [[vocab[f"<0x{b:02X}>"] for b in character.encode()] for character in "aé本🙂"]
    for _ in range(200):
        ids = [token_id for _ in range(rng.randrange(12)) for token_id in rng.choice(pieces)]
        assert "".join(_stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_torch_is_never_imported(tmp_path: Path) -> None:
    """A torch that cannot be imported stands where torch would be."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('torch was imported')")
    code = (
        "import sys\n"
        "from kvsparse_jax import hub\n"
        "from kvsparse_jax.tokenizer import Tokenizer\n"
        f"tokenizer = Tokenizer.load(hub.resolve({str(LLAMA)!r}))\n"
        "ids = tokenizer.apply_chat_template([{'role': 'user', 'content': 'hi'}])\n"
        "tokenizer.stream_decoder().push(ids[0])\n"
        "tokenizer.decode(ids)\n"
        "print('torch' in sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
