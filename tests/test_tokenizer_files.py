"""Tokenizers in other files: tokenizer.json, tiktoken, added tokens, GGUF vocabularies."""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama import LlamaError
from llama.detokenizer import Detokenizer
from llama.generation import STORIES
from llama.tokenizer import (
    BaseTokenizer,
    JsonTokenizer,
    Tokenizer,
    gguf_tokenizer,
    open_tokenizer,
)
from llama.vocabulary import SPLITS, TO_BYTE, sentencepiece_model

tokenizers = pytest.importorskip("tokenizers")

CORPUS = [
    "Once upon a time, there was a little girl named Lily. She didn't like 1234 stones.",
    "El niño comió 3 manzanas; la niña, 12.\n\n\tdef f(x):\n        return x + 1\n",
    "我们一起去公园玩。我们 去",
    "<|im_start|>user <|im_end|> <s> </s> im start end user assistant system",
] * 4
TEXTS = [
    *CORPUS[:4],
    "",
    " ",
    "  two spaces, then\ttab\nand newline  ",
    "🙂 and 👩\u200d👧 e\u0301 \u200f\u202e\x00",
    "<|im_start|>user\nHi<|im_end|>",
    "<s>a</s>[INST]<unk>",
    "I'LL they'Ve 1234567 Ünïcode",
]
BROKEN = "\ufffd"


def streamed(tokenizer: BaseTokenizer, ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer)
    text = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
    assert text == "".join(detokenizer.pieces)
    return text


def byte_level() -> Any:
    """A small tokenizer of Llama 3's kind, trained."""
    oracle = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=True))
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLITS["llama-bpe"][0]), "isolated")
    to_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    oracle.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, to_bytes])
    oracle.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    oracle.train_from_iterator(CORPUS, trainer)
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    oracle.add_special_tokens(special)
    oracle.add_tokens(["<｜User｜>", "<think>"])
    oracle.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", oracle.token_to_id("<s>"))]
    )
    return oracle


def byte_fallback() -> Any:
    """A small tokenizer of the kind of Mistral's tokenizer.json, made of the shipped pieces."""
    sp = Tokenizer(STORIES / "tokenizer.model").sp_model
    vocab = {sp.id_to_piece(i): i for i in range(sp.vocab_size())}
    pairs = [
        (sp.get_score(vocab[token]), token[:i], token[i:])
        for token in vocab
        for i in range(1, len(token))
        if token[:i] in vocab and token[i:] in vocab and not sp.is_byte(vocab[token])
    ]
    merges = [(left, right) for _, left, right in sorted(pairs, key=lambda pair: -pair[0])]
    model = tokenizers.models.BPE(
        vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    oracle = tokenizers.Tokenizer(model)
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    oracle.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    oracle.decoder = decoders.Sequence(
        [
            *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
            decoders.Strip(" ", 1, 0),
        ]
    )
    oracle.add_special_tokens(["<unk>", "<s>", "</s>"])
    return oracle


def metaspace() -> Any:
    """As `byte_fallback`, in the newer form that puts a space in front of the first word alone."""
    oracle = byte_fallback()
    oracle.normalizer = None
    oracle.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    oracle.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return oracle


KINDS = {"byte level": byte_level, "byte fallback": byte_fallback, "metaspace": metaspace}


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> tuple[Any, JsonTokenizer]:
    oracle = KINDS[request.param]()
    return oracle, JsonTokenizer(json.loads(oracle.to_str()), bos="<s>", eos="</s>")


def test_ids_equal_those_of_the_library(pair: tuple[Any, JsonTokenizer]) -> None:
    oracle, ours = pair
    for text in TEXTS:
        expected = oracle.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, parse_special=True) == expected
        plain = ours.encode(text)
        assert not set(plain) & set(ours.special.values())
        if not any(special in text for special in ours.special):
            assert plain == expected
        assert ours.encode(text, bos=True, eos=True) == [ours.bos_id, *plain, ours.eos_id]


def test_the_text_of_ids_equals_that_of_the_library(pair: tuple[Any, JsonTokenizer]) -> None:
    oracle, ours = pair
    for text in TEXTS:
        for parse_special in (False, True):
            ids = ours.encode(text, parse_special=parse_special)
            assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=False)
            assert ours.decode(ids) == streamed(ours, ids)
            assert ours.decode(ids) == text or parse_special or text[:1] == " "


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_comes_back_and_holds_no_control_token(text: str) -> None:
    for ours in (BYTE_LEVEL, SPECIAL_SP):
        ids = ours.encode(text)
        assert not set(ids) & set(ours.special.values())
        assert ours.decode(ids) == streamed(ours, ids)
        assert ours is SPECIAL_SP or ours.decode(ids) == text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 400)))
def test_any_ids_stream_to_the_text_that_decode_gives(ids: list[int]) -> None:
    assert streamed(BYTE_LEVEL, ids) == BYTE_LEVEL.decode(ids)
    assert streamed(SPECIAL_SP, ids) == SPECIAL_SP.decode(ids)


def test_added_tokens_count_and_show_in_the_text(pair: tuple[Any, JsonTokenizer]) -> None:
    oracle, ours = pair
    assert ours.n_words == oracle.get_vocab_size()
    for text, id in ours.special.items():
        assert ours.decode([id]) == text
        assert ours.token_bytes(id) == text.encode()
    for id in (-1, ours.n_words):
        with pytest.raises(IndexError):
            ours.decode([id])


def test_tokens_between_messages_are_control_tokens_also_where_they_are_not_marked() -> None:
    assert "<｜User｜>" in BYTE_LEVEL.special
    assert "<think>" not in BYTE_LEVEL.special
    think = BYTE_LEVEL.encode("<think>")
    assert len(think) == 1
    assert BYTE_LEVEL.decode(think) == "<think>"


def test_bos_is_added_where_the_file_says_so() -> None:
    spec = json.loads(byte_level().to_str())
    ours = JsonTokenizer(spec)
    assert (ours.adds_bos, ours.bos_id) == (True, ours.special["<s>"])
    ours = JsonTokenizer({**spec, "post_processor": None}, eos="</s>")
    assert (ours.adds_bos, ours.bos_id, ours.pad_id) == (False, -1, -1)
    assert ours.encode("a", bos=True) == ours.encode("a")
    assert ours.eos_ids == (ours.special["</s>"],)


def test_an_echoed_bos_has_no_text(pair: tuple[Any, JsonTokenizer]) -> None:
    _, ours = pair
    ids = ours.encode("Once", bos=True)
    detokenizer = Detokenizer(ours, (), ids)
    assert detokenizer.text == "Once"
    assert len(detokenizer.pieces) == len(ids)


def test_what_is_written_is_what_was_read(pair: tuple[Any, JsonTokenizer], tmp_path: Path) -> None:
    _, ours = pair
    name, content = ours.file
    (tmp_path / name).write_bytes(content)
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    again = open_tokenizer(tmp_path)
    assert (again.bos_id, again.eos_id, again.special) == (ours.bos_id, ours.eos_id, ours.special)
    assert [again.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]


def test_a_file_of_metas_llama_3_has_256_special_tokens(tmp_path: Path) -> None:
    oracle = byte_level()
    words = [oracle.id_to_token(id) for id in range(400)]
    lines = [
        base64.b64encode(b"".join(TO_BYTE[char] for char in word)) + b" %d\n" % rank
        for rank, word in enumerate(words)
    ]
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines))
    ours = open_tokenizer(tmp_path)
    assert (ours.n_words, len(ours.special), ours.adds_bos) == (656, 256, True)
    special = ours.special
    assert (ours.bos_id, ours.eos_id) == (400, 401)
    assert special["<|start_header_id|>"] == 406
    assert special["<|end_header_id|>"] == 407
    assert special["<|eot_id|>"] == 409
    assert special["<|reserved_special_token_4|>"] == 408
    assert special["<|reserved_special_token_5|>"] == 410
    assert special["<|reserved_special_token_250|>"] == 655
    assert ours.eos_ids == (401, 408, 409)
    for text in TEXTS:
        if not any(token in text for token in ("<s>", "<|im_start|>")):
            assert ours.encode(text) == oracle.encode(text, add_special_tokens=False).ids
        assert ours.decode(ours.encode(text)) == text
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines) + b"!!\n")
    with pytest.raises(LlamaError, match="damaged tiktoken file"):
        open_tokenizer(tmp_path)


# SentencePiece with added tokens.


def folder_with(tmp_path: Path, model: bytes, **files: dict[str, Any]) -> Path:
    (tmp_path / "tokenizer.model").write_bytes(model)
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


STORIES_MODEL = (STORIES / "tokenizer.model").read_bytes()


def test_added_tokens_of_a_sentencepiece_model_are_control_tokens(tmp_path: Path) -> None:
    decoder = {
        "0": {"content": "<unk>", "special": True},
        "1024": {"content": "<|im_end|>", "special": True},
        "1025": {"content": "<|im_start|>", "special": False},
        "1027": {"content": "<think>", "special": False},
    }
    config = {"added_tokens_decoder": decoder, "eos_token": "<|im_end|>", "bos_token": "<s>"}
    ours = open_tokenizer(folder_with(tmp_path, STORIES_MODEL, tokenizer_config=config))
    base = Tokenizer(STORIES / "tokenizer.model")
    assert (ours.n_words, ours.bos_id, ours.eos_id, ours.eos_ids) == (1028, 1, 1024, (2, 1024))
    for text in TEXTS:
        assert ours.encode(text) == base.encode(text)
    parsed = ours.encode("<|im_start|>user\nHi<|im_end|>", parse_special=True)
    assert parsed[0] == 1025
    assert parsed[-1] == 1024
    # Behind a control token no space is put in front.
    assert base.decode(base.encode("x") + parsed[1:-1]) == "xuser\nHi"
    assert ours.decode(parsed) == "user\nHi"
    assert ours.encode("a<think>b").count(1027) == 1
    assert ours.decode([1025, 1027]) == "<think>"
    assert streamed(ours, [*parsed, 1027, 1026]) == ours.decode([*parsed, 1027, 1026])


def test_added_tokens_may_lie_in_a_file_of_their_own(tmp_path: Path) -> None:
    files = {
        "added_tokens": {"[PAD]": 1024, "<|im_end|>": 1025},
        "tokenizer_config": {"pad_token": "[PAD]", "legacy": True},
    }
    ours = open_tokenizer(folder_with(tmp_path, STORIES_MODEL, **files), eos_ids=[2, 1025])
    assert (ours.n_words, ours.eos_ids) == (1026, (2, 1025))
    assert ours.special["[PAD]"] == 1024
    # In the older form, text behind a control token begins with a space.
    text = ours.encode("Hi", parse_special=True)
    assert ours.encode("<s>Hi", parse_special=True) == [1, *text]


def types_of(sp: Any) -> list[int]:
    """The type of each piece, as GGUF has it."""
    tests = {2: sp.is_unknown, 3: sp.is_control, 6: sp.is_byte}
    return [
        next((type for type, test in tests.items() if test(id)), 1) for id in range(sp.vocab_size())
    ]


def test_a_control_token_that_the_model_itself_matches_in_text_is_spelled(tmp_path: Path) -> None:
    sp = Tokenizer(STORIES / "tokenizer.model").sp_model
    ids = range(sp.vocab_size())
    pieces = [sp.id_to_piece(id) for id in ids]
    types = types_of(sp)
    pieces[700], types[700] = "<|im_end|>", 4
    model = sentencepiece_model(pieces, [sp.get_score(id) for id in ids], types, 1, 2, True)
    assert 700 in Tokenizer(model).encode("Hi<|im_end|>")
    config = {"added_tokens_decoder": {"700": {"content": "<|im_end|>", "special": True}}}
    ours = open_tokenizer(folder_with(tmp_path, model, tokenizer_config=config))
    ids = ours.encode("Hi<|im_end|>")
    assert 700 not in ids
    assert ours.decode(ids) == "Hi<|im_end|>"
    assert ours.encode("Hi<|im_end|>", parse_special=True)[-1] == 700


# GGUF vocabularies.


def test_a_sentencepiece_vocabulary_of_a_gguf_file_gives_the_same_ids() -> None:
    base = Tokenizer(STORIES / "tokenizer.model")
    sp, ids = base.sp_model, range(base.n_words)
    types = [
        2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1 for i in ids
    ]
    ours = gguf_tokenizer(
        "llama",
        [sp.id_to_piece(id) for id in ids],
        types,
        scores=[sp.get_score(id) for id in ids],
        bos_id=1,
        eos_ids=[2],
    )
    assert (ours.n_words, ours.bos_id, ours.eos_id) == (1024, 1, 2)
    for text in TEXTS:
        assert ours.encode(text) == base.encode(text)
        assert ours.decode(base.encode(text)) == base.decode(base.encode(text))
    assert Tokenizer(ours.file[1]).encode(TEXTS[0]) == base.encode(TEXTS[0])


def gpt2_arrays() -> tuple[list[str], list[str], list[int]]:
    oracle = byte_level()
    spec = json.loads(oracle.to_str())
    tokens = [oracle.id_to_token(id) for id in range(oracle.get_vocab_size())]
    merges = [" ".join(pair) for pair in spec["model"]["merges"]]
    added = {token["id"]: 3 if token["special"] else 4 for token in spec["added_tokens"]}
    return tokens, merges, [added.get(id, 1) for id in range(len(tokens))]


def test_a_byte_level_vocabulary_of_a_gguf_file_gives_the_same_ids() -> None:
    tokens, merges, types = gpt2_arrays()
    oracle = byte_level()
    for adds_bos in (True, False):
        ours = gguf_tokenizer(
            "gpt2",
            tokens,
            types,
            merges=merges,
            pre="llama-bpe",
            bos_id=tokens.index("<s>"),
            eos_ids=[tokens.index("</s>"), tokens.index("<|im_end|>")],
            adds_bos=adds_bos,
        )
        assert ours.adds_bos == adds_bos
        assert [tokens[id] for id in ours.eos_ids] == ["</s>", "<|im_end|>"]
        for text in TEXTS:
            expected = oracle.encode(text, add_special_tokens=False).ids
            assert ours.encode(text, parse_special=True) == expected
    # What is written for the library adds BOS there too.
    again = tokenizers.Tokenizer.from_str(JsonTokenizer(json.loads(ours.file[1])).file[1].decode())
    assert again.encode("a").ids == ours.encode("a")


@pytest.mark.parametrize("split", SPLITS)
def test_every_rule_that_splits_words_is_read_by_the_library(split: str) -> None:
    tokens, merges, types = gpt2_arrays()
    ours = gguf_tokenizer("gpt2", tokens, types, merges=merges, pre=split, eos_ids=[401])
    for text in TEXTS:
        assert ours.decode(ours.encode(text)) == text


# What is refused.


def bad_arrays(**changes: Any) -> BaseTokenizer:
    tokens, merges, types = gpt2_arrays()
    options = {"merges": merges, "pre": "llama-bpe", "eos_ids": [401], **changes}
    arguments = {"model": "gpt2", "tokens": tokens, "types": types, **options}
    return gguf_tokenizer(**arguments)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("splits text as 'other'", {"pre": "other"}),
        ("of the kind 'bert'", {"model": "bert"}),
        ("do not fit together", {"types": [1]}),
        ("do not fit together", {"types": [-1] * 406}),
        ("do not fit together", {"eos_ids": [10**9]}),
        ("do not fit together", {"eos_ids": []}),
        ("do not fit together", {"bos_id": 10**9}),
        ("do not fit together", {"model": "llama"}),
        ("cannot be read", {"merges": ["q"]}),
        ("cannot be read", {"merges": ["q zzz"]}),
    ],
)
def test_a_gguf_vocabulary_that_does_not_fit_is_refused(message: str, changes: Any) -> None:
    with pytest.raises(LlamaError, match=message):
        bad_arrays(**changes)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LlamaError, match=r"holds none of tokenizer.model, .*tokenizer.json"):
        open_tokenizer(tmp_path)
    with pytest.raises(LlamaError, match=r"nothing.json' is not a file"):
        open_tokenizer(tmp_path / "nothing.json")


def test_eos_ids_that_the_tokenizer_does_not_have_are_refused() -> None:
    with pytest.raises(LlamaError, match=r"EOS id \[1024\] is not among the 1024 ids"):
        open_tokenizer(STORIES, eos_ids=[2, 1024])


@pytest.mark.parametrize("spec", [{}, {"added_tokens": 5}, {"added_tokens": [], "model": {}}])
def test_a_json_that_is_no_tokenizer_is_refused(tmp_path: Path, spec: dict) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", **spec}))
    with pytest.raises(LlamaError, match=r"tokenizer.json cannot be read"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"x": {"content": "a", "special": True}}},
        {"added_tokens_decoder": {"5": {"content": "a"}}},
        {"added_tokens_decoder": {"9999999999": {"content": "a", "special": True}}},
        {"added_tokens_decoder": [1]},
        {"eos_token": {"text": "a"}},
    ],
)
def test_damaged_added_tokens_are_refused(tmp_path: Path, config: dict) -> None:
    folder = folder_with(tmp_path, STORIES_MODEL, tokenizer_config=config)
    with pytest.raises(LlamaError, match=r"added tokens in .* cannot be read"):
        open_tokenizer(folder)


def test_added_tokens_whose_ids_lie_are_refused() -> None:
    spec = json.loads(byte_level().to_str())
    for change in ({"id": 3}, {"id": 10**9}, {"content": "<|other|>", "id": -1}):
        added = [{**spec["added_tokens"][0], **change}, *spec["added_tokens"][1:]]
        with pytest.raises(LlamaError, match=r"ids of its added tokens do not fit|invalid value"):
            JsonTokenizer({**spec, "added_tokens": added})


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = json.loads(byte_level().to_str())
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(LlamaError, match=r"needs the package tokenizers: pip install tokenizers$"):
        JsonTokenizer(spec)


# Real tokenizers, which may not be redistributed.

REAL = {
    "llama2": "llama2",
    "mistral": "mistral",
    "llama3/tokenizer.json": "llama3",
    "llama3/tokenizer.model": "llama3",
}


@pytest.fixture(scope="module", params=REAL)
def real(request: pytest.FixtureRequest) -> tuple[BaseTokenizer, list[dict[str, Any]]]:
    folder = Path(os.environ.get("LLAMA_TOKENIZERS_DIR", "/nonexistent"))
    if not folder.is_dir():
        pytest.skip("LLAMA_TOKENIZERS_DIR does not lead to the real tokenizers")
    expected = json.loads((folder / REAL[request.param] / "expected.json").read_text())
    return open_tokenizer(folder / request.param), expected


def test_a_real_tokenizer_gives_the_recorded_ids_and_text(
    real: tuple[BaseTokenizer, list[dict[str, Any]]],
) -> None:
    ours, expected = real
    for case in expected:
        text, ids = case["text"], case["ids"]
        has_special = any(token in text for token in ours.special)
        # SentencePiece itself finds no special tokens in text; the others do.
        assert ours.encode(text, parse_special=not isinstance(ours, Tokenizer)) == ids
        assert ours.decode(ids) == streamed(ours, ids) == case["decoded"]
        plain = ours.encode(text)
        assert has_special or plain == ids
        assert not set(plain) & set(ours.special.values())
        assert ours.decode(plain) == streamed(ours, plain) == text


BYTE_LEVEL = JsonTokenizer(json.loads(byte_level().to_str()), bos="<s>", eos="</s>")
SPECIAL_SP = Tokenizer(STORIES_MODEL, added={1024: ("<|im_end|>", True)})
