"""`python -m llama convert` and `inspect`."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import VOCAB, hf_logits, hf_model, split, tensors_of, weights, write_meta
from conftest import ATOL
from safetensors.torch import load_file, save_file

from llama import Llama, LlamaError
from llama.chat import choose_chat_format
from llama.checkpoints import convert as converting
from llama.checkpoints.config import to_params
from llama.checkpoints.convert import convert
from llama.checkpoints.load import load_tokenizer, open_checkpoint
from llama.generation import STORIES

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
TOKENS = torch.randint(VOCAB, (1, 200), generator=torch.Generator().manual_seed(1))


def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def same(a: dict[str, dict[str, torch.Tensor]], b: dict[str, dict[str, torch.Tensor]]) -> bool:
    """Whether two folders have the same tensors in the same files, bit for bit."""
    return {f: t.keys() for f, t in a.items()} == {f: t.keys() for f, t in b.items()} and all(
        a[f][name].dtype == b[f][name].dtype and torch.equal(a[f][name], b[f][name])
        for f in a
        for name in a[f]
    )


@pytest.mark.parametrize("shards", [1, 2])
def test_meta_to_hugging_face_and_back_is_bit_equal(shards: int, tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    src = write_meta(tmp_path / "a", shards=shards, rope_theta=5e5, rope_scaling=scaling)
    convert(src, tmp_path / "hf", to="hf", shards=3)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    written = tensors_of(tmp_path / "hf")
    assert index["weight_map"] == {name: file for file in written for name in written[file]}
    sizes = [tensor.nbytes for tensors in written.values() for tensor in tensors.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    convert(tmp_path / "hf", tmp_path / "b", to="meta", shards=shards)
    assert same(tensors_of(src), tensors_of(tmp_path / "b"))
    assert open_checkpoint(src).args == open_checkpoint(tmp_path / "b").args


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 1e6, "max_position_embeddings": 512},
        {"tie_word_embeddings": True},
        {"model_type": "mistral", "sliding_window": 50},
        {"rope_scaling": LLAMA3, "rms_norm_eps": 1e-6},
    ],
    ids=["plain", "tied", "window", "llama3"],
)
def test_hugging_face_to_meta_and_back_is_bit_equal_and_the_same_to_transformers(
    config: dict, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = hf_model(**config)
    model.save_pretrained(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "meta", to="meta", shards=2)
    convert(tmp_path / "meta", tmp_path / "b", to="hf")
    assert same(tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b"))
    a, b = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    assert (a.args, a.config) == (b.args, b.config)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype="auto")
    assert again.dtype == torch.float32
    assert torch.equal(hf_logits(again, TOKENS), hf_logits(model, TOKENS))


@pytest.mark.parametrize("said", [False, True])
def test_what_is_stored_and_said_of_a_tied_output_layer_survives(
    said: bool, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    hf_model().save_pretrained(tmp_path / "a")
    (file,) = (tmp_path / "a").glob("*.safetensors")
    state = load_file(file)
    if not said:  # equal by chance, and both stored
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        save_file(state, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "a/config.json").read_text())
    (tmp_path / "a/config.json").write_text(json.dumps({**config, "tie_word_embeddings": said}))
    convert(tmp_path / "a", tmp_path / "b", to="hf")
    assert load_file(next((tmp_path / "b").glob("*.safetensors"))).keys() == state.keys()
    checkpoint = open_checkpoint(tmp_path / "b")
    assert not checkpoint.config.tied
    assert torch.equal(checkpoint.read("output.weight"), state["lm_head.weight"])
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert torch.equal(again.lm_head.weight, state["lm_head.weight"])


def test_a_converted_meta_folder_gives_its_logits_in_transformers(
    llama: Llama, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    convert(STORIES, tmp_path / "hf", to="hf", shards=2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    torch.testing.assert_close(hf_logits(model, TOKENS), llama.model(TOKENS, 0), atol=ATOL, rtol=0)


def test_a_converted_llama_2_has_the_keys_that_the_original_code_knows() -> None:
    params = {"dim": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 32000, "norm_eps": 1e-5}
    converted = to_params({**params, "hidden_dim": 11008, "rope_theta": 10000.0}, 4096)
    assert converted == {**params, "multiple_of": 256}


def test_a_llama_3_folder_is_inspected_and_converted(tmp_path: Path) -> None:
    llama3 = {"use_scaled_rope": True, "rope_theta": 5e5}
    src = write_meta(tmp_path / "src", shards=4, embedding_axis=0, **llama3)
    (src / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    convert(src, tmp_path / "hf", to="hf")
    assert open_checkpoint(tmp_path / "hf").args == open_checkpoint(src).args
    assert (tmp_path / "hf/tokenizer.json").exists()
    convert(tmp_path / "hf", tmp_path / "meta", to="meta")
    for name, tensor in weights().items():
        assert torch.equal(open_checkpoint(tmp_path / "meta").read(name), tensor)


def test_shards_are_those_that_training_on_as_many_ranks_would_have_written(tmp_path: Path) -> None:
    state = weights()
    folder = write_meta(tmp_path / "from1", state)
    for n in (4, 2, 1):
        convert(folder, tmp_path / str(n), to="meta", shards=n, dtype="bfloat16")
        folder = tmp_path / str(n)
        written = list(tensors_of(folder).values())
        for part, expected in zip(written, split(state, n), strict=True):
            assert part.keys() == expected.keys()
            assert all(torch.equal(part[name], expected[name].bfloat16()) for name in part)
        assert (folder / "params.json").read_text() == (tmp_path / "from1/params.json").read_text()


def test_a_file_holds_its_own_tensors_and_everybody_may_read_it(tmp_path: Path) -> None:
    src = write_meta(tmp_path / "src")
    whole = (src / "consolidated.00.pth").stat().st_size
    for to in ("meta", "hf"):
        convert(src, tmp_path / to, to=to, shards=4)
        files = [f for f in (tmp_path / to).iterdir() if f.suffix in (".pth", ".safetensors")]
        assert len(files) == 4
        assert sum(f.stat().st_size for f in files) < 1.2 * whole  # headers of tiny tensors
        assert {f.stat().st_mode for f in (tmp_path / to).iterdir()} == {
            (src / "params.json").stat().st_mode
        }


def test_the_tokenizer_goes_along_from_the_folder_or_the_one_above(tmp_path: Path) -> None:
    src = write_meta(tmp_path / "llama" / "7b")
    (tmp_path / "llama" / "tokenizer.model").write_bytes(b"above")
    (src / "tokenizer_config.json").write_text("{}")
    convert(src, tmp_path / "a", to="hf")
    assert (tmp_path / "a/tokenizer.model").read_bytes() == b"above"
    assert (tmp_path / "a/tokenizer_config.json").exists()
    (src / "tokenizer.model").write_bytes(b"beside")
    convert(src, tmp_path / "b", to="hf")
    assert (tmp_path / "b/tokenizer.model").read_bytes() == b"beside"


# What may be overwritten, and what is left when it goes wrong


def test_a_folder_is_replaced_only_by_force_and_by_rename(tmp_path: Path) -> None:
    src = write_meta(tmp_path / "src")
    dst = write_meta(tmp_path / "dst", weights(seed=1))
    before = tensors_of(dst)
    mapped = open_checkpoint(dst)
    with pytest.raises(LlamaError, match=r"dst exists: choose another folder, or .* --force"):
        convert(src, dst, to="meta")
    assert same(tensors_of(dst), before)
    convert(src, dst, to="meta", force=True)
    assert same(tensors_of(dst), tensors_of(src))
    assert torch.equal(mapped.read("output.weight"), before["consolidated.00.pth"]["output.weight"])
    assert sorted(f.name for f in tmp_path.iterdir()) == ["dst", "src"]


def test_force_removes_no_folder_that_is_more_than_a_checkpoint(tmp_path: Path) -> None:
    src = write_meta(tmp_path / "src")
    with pytest.raises(LlamaError, match="does not hold a checkpoint, and --force would remove it"):
        convert(src, tmp_path, to="hf", force=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.json").write_text("{}")
    with pytest.raises(LlamaError, match="does not hold a checkpoint, and --force would remove it"):
        convert(src, tmp_path / "home", to="hf", force=True)
    for name in ("letter.txt", "notes/today.txt"):
        dst = write_meta(tmp_path / name.replace("/", "."))
        (dst / name).parent.mkdir(exist_ok=True)
        (dst / name).write_text("dear")
        with pytest.raises(LlamaError, match=rf"also holds '{name.split('/')[0]}', and --force"):
            convert(src, dst, to="hf", force=True)
        assert (dst / name).exists()


def test_a_folder_that_could_not_be_replaced_is_back_in_its_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    src, dst = write_meta(tmp_path / "src"), write_meta(tmp_path / "dst", weights(seed=1))
    before, rename = tensors_of(dst), Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.suffix == ".partial":
            raise OSError("busy")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    monkeypatch.setattr(converting, "_exchanged", lambda *_: False)
    with pytest.raises(LlamaError, match="nothing was changed"):
        convert(src, dst, to="meta", force=True)
    assert same(tensors_of(dst), before)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["dst", "src"]


@pytest.mark.parametrize("renames", [1, 2])
def test_an_interrupt_while_a_folder_is_replaced_leaves_the_old_or_the_new_one(
    renames: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    src, dst = write_meta(tmp_path / "src"), write_meta(tmp_path / "dst", weights(seed=1))
    before, rename = tensors_of(dst), Path.rename
    left = iter(range(renames - 1))

    def interrupted(path: Path, target: Path) -> Path:
        renamed = rename(path, target)
        if next(left, None) is None:
            monkeypatch.undo()
            raise KeyboardInterrupt
        return renamed

    monkeypatch.setattr(Path, "rename", interrupted)
    monkeypatch.setattr(converting, "_exchanged", lambda *_: False)
    with pytest.raises(KeyboardInterrupt):
        convert(src, dst, to="meta", force=True)
    assert same(tensors_of(dst), before if renames == 1 else tensors_of(src))
    assert sorted(f.name for f in tmp_path.iterdir()) == ["dst", "src"]


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="no exchange of two folders")
def test_a_kill_while_a_folder_is_replaced_leaves_a_target_and_the_next_run_cleans_up(
    tmp_path: Path,
) -> None:
    src, dst = write_meta(tmp_path / "src"), write_meta(tmp_path / "dst", weights(seed=1))
    killed = (
        "import os, sys, shutil; from llama.checkpoints import convert as converting;"
        "shutil.rmtree = lambda *_, **__: os._exit(9);"
        f"converting.convert({str(src)!r}, {str(dst)!r}, to='meta', force=True)"
    )
    assert python("-c", killed).returncode == 9
    assert same(tensors_of(dst), tensors_of(src))
    assert len(list(tmp_path.iterdir())) == 3
    convert(src, dst, to="hf", force=True)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["dst", "src"]


def test_where_folders_cannot_be_exchanged_the_next_run_puts_a_target_back(tmp_path: Path) -> None:
    src, dst = write_meta(tmp_path / "src"), write_meta(tmp_path / "dst", weights(seed=1))
    before = tensors_of(dst)
    killed = (
        "import os; from pathlib import Path; from llama.checkpoints import convert as converting;"
        "converting._exchanged = lambda *_: False; rename = Path.rename;"
        "Path.rename = lambda a, b: (rename(a, b), os._exit(9));"
        f"converting.convert({str(src)!r}, {str(dst)!r}, to='meta', force=True)"
    )
    assert python("-c", killed).returncode == 9
    assert not dst.exists()
    with pytest.raises(LlamaError, match="dst exists: choose another folder"):
        convert(src, dst, to="hf")
    assert same(tensors_of(dst), before)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["dst", "src"]


@pytest.mark.parametrize("to", ["meta", "hf"])
def test_a_value_beyond_the_range_of_the_dtype_is_refused_by_name(to: str, tmp_path: Path) -> None:
    state = weights()
    state["norm.weight"][0] = torch.inf  # as it is stored, and stays
    src = write_meta(tmp_path / "a", state)
    convert(src, tmp_path / "infinite", to=to, dtype="float16")
    state["layers.1.attention.wq.weight"][0, 0] = 1e5
    src = write_meta(tmp_path / "b", state)
    with pytest.raises(LlamaError, match=r"layers.1.attention.wq.weight of .* above 65504, .*bfl"):
        convert(src, tmp_path / "dst", to=to, dtype="float16")
    convert(src, tmp_path / "dst", to=to, dtype="bfloat16")


@pytest.mark.parametrize("to", ["meta", "hf"])
def test_an_interrupted_run_leaves_nothing(
    to: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    src = write_meta(tmp_path / "src")
    before = tensors_of(src)

    def interrupt(state: dict, file: Path, **_: object) -> None:
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupt)
    monkeypatch.setattr(converting, "save_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(src, tmp_path / "dst", to=to)
    assert [f.name for f in tmp_path.iterdir()] == ["src"]
    assert same(tensors_of(src), before)


def test_a_disk_that_is_known_to_be_too_small_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    src = write_meta(tmp_path / "src")
    usage = SimpleNamespace(free=500_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(LlamaError, match=r"has 500.00 kB .* of room, and 894.21 kB .* are needed"):
        convert(src, tmp_path / "dst", to="hf")
    assert [f.name for f in tmp_path.iterdir()] == ["src"]
    convert(src, tmp_path / "dst", to="hf", dtype="float16")


@pytest.mark.skipif(
    sys.platform != "linux", reason="a limit on the size of files stands for a disk"
)
@pytest.mark.parametrize("to", ["meta", "hf"])
def test_a_disk_that_fills_up_while_writing_leaves_no_half_checkpoint(
    to: str, tmp_path: Path
) -> None:
    src = write_meta(tmp_path / "src")
    before = tensors_of(src)
    limited = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000,) * 2);"
        "sys.argv[0] = 'llama'; runpy.run_module('llama', run_name='__main__')"
    )
    arguments = ["convert", str(src), str(tmp_path / "dst"), "--to", to]
    done = python("-c", limited, *arguments)
    assert done.returncode == 1
    assert re.fullmatch(
        r"error: .*dst could not be written, and nothing was changed.*\n", done.stderr
    )
    assert [f.name for f in tmp_path.iterdir()] == ["src"]
    assert same(tensors_of(src), before)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"to": "gguf"}, "--to 'gguf': it must be one of meta, hf"),
        ({"to": "meta", "shards": 3}, "8 heads do not divide by 3 shards: use 1, 2"),
        ({"to": "meta", "shards": 0}, "--shards 0: it must be a whole number from 1 on"),
        ({"to": "hf", "shards": 50}, "--shards 50: there are 21 tensors"),
        ({"to": "hf", "dtype": "int8"}, "--dtype 'int8': it must be one of float32"),
        ({"to": ["hf"]}, "--to ['hf']: it must be one of meta, hf"),
        ({"to": "hf", "dtype": ["x"]}, "--dtype ['x']: it must be one of float32"),
        ({"to": "hf", "dst": "a\0b"}, r"dst 'a\x00b' cannot be a path ("),  # why, Python says
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict, said: str, tmp_path: Path) -> None:
    src = write_meta(tmp_path / "src")
    with pytest.raises(LlamaError, match=re.escape(said)):
        convert(src, **{"dst": tmp_path / "dst", **options})
    assert [f.name for f in tmp_path.iterdir()] == ["src"]


# The command line


def test_the_command_line_inspects_and_converts(tmp_path: Path) -> None:
    src = write_meta(tmp_path / "src", shards=2, max_seq_len=2048)
    inspected = python("-m", "llama", "inspect", src)
    assert inspected.returncode == 1  # no tokenizer
    shutil.copy(STORIES / "tokenizer.model", src)
    inspected = python("-m", "llama", "inspect", src)
    assert (inspected.returncode, inspected.stderr) == (0, "")
    facts = dict(re.split(r"  +", line) for line in inspected.stdout.splitlines())
    expected = {
        "format": "Meta",
        "shards": "2, .pth",
        "parameters": "223,552 in 21 tensors",
        "dtype": "float32",
        "heads": "8, 4 key/value heads, 8 wide",
        "context": "2048",
        "as float16": "447.10 kB (436.62 KiB)",
        "problems": "none",
    }
    assert expected.items() <= facts.items()

    options = ["--to", "hf", "--shards", "2", "--dtype", "float16"]
    converted = python("-m", "llama", "convert", src, tmp_path / "dst", *options)
    assert (converted.returncode, converted.stdout, converted.stderr) == (0, "", "")
    assert open_checkpoint(tmp_path / "dst").read("output.weight").dtype == torch.float16


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_to_end_removes_what_is_half_written(
    name: str, status: int, tmp_path: Path
) -> None:
    src = write_meta(tmp_path / "src")
    ended = (
        # As at a terminal, also where the tests run in the background.
        "import signal, sys, torch;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        f"torch.save = lambda *_: signal.raise_signal(signal.{name});"
        "sys.argv[0] = 'llama'; import llama.__main__ as command; command.main()"
    )
    done = python("-c", ended, "convert", src, tmp_path / "dst", "--to", "meta")
    assert done.returncode == status
    assert [f.name for f in tmp_path.iterdir()] == ["src"]


def test_inspect_lists_every_problem_and_exits_with_1(tmp_path: Path) -> None:
    folder, state = tmp_path / "m", weights()
    del state["norm.weight"]
    state["extra.weight"] = torch.ones(1)
    write_meta(folder, state)
    shutil.copy(STORIES / "tokenizer.model", folder)
    inspected = python("-m", "llama", "inspect", folder)
    assert inspected.returncode == 1
    assert "problems     2" in inspected.stdout
    assert inspected.stderr.splitlines() == [
        f"error: {folder / 'consolidated.00.pth'} has 'extra.weight', which is not part of this "
        "model",
        f"norm.weight is missing from {folder}: download it again",
    ]
    (folder / "consolidated.00.pth").write_bytes(b"")
    inspected = python("-m", "llama", "inspect", folder)
    assert inspected.returncode == 1
    assert re.fullmatch(r"error: .*consolidated.00.pth is an empty file.*\n", inspected.stderr)


# What transformers does with what was written


def test_transformers_finds_text_in_an_exported_folder_and_stops_where_we_stop(
    llama: Llama, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    folder = tmp_path / "hf"
    convert(STORIES, folder, to="hf")
    assert "max_position_embeddings" not in json.loads((folder / "config.json").read_text())
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
    )
    ours = llama.tokenizer
    text = "Once upon a time, there was a dog."
    assert tokenizer(text).input_ids == ours.encode(text, bos=True)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (ours.bos_id, ours.eos_id)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == ours.eos_id
    end = torch.zeros(VOCAB)
    end[ours.eos_id] = 100
    model.lm_head.bias = torch.nn.Parameter(end)
    answer = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=9)[0]
    assert answer.tolist() == [*ours.encode(text, bos=True), ours.eos_id]


def test_facts_of_the_text_survive_a_way_through_metas_layout(tmp_path: Path) -> None:
    src = tmp_path / "a"
    hf_model(eos_token_id=[2, 5]).save_pretrained(src)
    shutil.copy(STORIES / "tokenizer.model", src)
    (src / "chat_template.jinja").write_text("{{ messages }}")
    (src / "generation_config.json").unlink()
    convert(src, tmp_path / "meta", to="meta")
    convert(tmp_path / "meta", tmp_path / "b", to="hf")
    for name in ("meta", "b"):
        text = open_checkpoint(tmp_path / name).text
        assert replace(text, bos=None) == open_checkpoint(src).text


DIALOG = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Who are you? "},
    {"role": "assistant", "content": "A dog."},
    {"role": "user", "content": "And now?"},
]


def tiktoken_file(folder: Path) -> None:
    """A small one of Llama 3's kind."""
    words = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" t", b" d", b" do"]
    lines = (f"{base64.b64encode(word).decode()} {i}" for i, word in enumerate(words))
    (folder / "tokenizer.model").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("kind", ["llama2", "llama3"])
def test_transformers_writes_a_dialog_as_we_do_in_an_exported_folder(
    kind: str, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    src = write_meta(tmp_path / "src")
    if kind == "llama2":
        shutil.copy(STORIES / "tokenizer.model", src)
    else:
        tiktoken_file(src)
    convert(src, tmp_path / "hf", to="hf")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for folder in (src, tmp_path / "hf"):
        checkpoint = open_checkpoint(folder)
        ours = load_tokenizer(checkpoint)
        chat = choose_chat_format(ours, checkpoint.text)
        for dialog in (DIALOG, DIALOG[1:], DIALOG[1:2]):
            expected = theirs.apply_chat_template(dialog, add_generation_prompt=True)["input_ids"]
            assert chat.encode(dialog) == expected
    text = "Once upon a time the dog and 🐶"
    assert theirs(text).input_ids == ours.encode(text, bos=True)
    assert theirs.decode(ours.encode(text)) == text
