"""Files that are damaged at random places: refused, or what they say is used and is well-formed.

The places come from a seed. No format has a checksum of the weights that is read: where weights are
hit, the answer may be another one, and nothing else. FUZZ_PLACES and FUZZ_SEED ask for more places
than a test run has time for.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import weights, write_meta
from conftest import GOLDEN
from safetensors.torch import save_file
from spawn import python

from llama import Llama, LlamaError, Tokenizer
from llama.checkpoints.convert import convert
from llama.generation import STORIES

PLACES = int(os.environ.get("FUZZ_PLACES", "40"))  # of each kind of file
SEED = int(os.environ.get("FUZZ_SEED", "0"))
TOKENIZER = GOLDEN / "rand_gqa" / "tokenizer.model"
VOCAB = 1024
TOO_LONG_S = 20  # for one file; a hundredth of it is usual
PROMPTS = ["Once upon a time", "a"]


def flip(data: bytearray, at: int, rng: random.Random) -> None:
    data[at] ^= 1 << rng.randrange(8)


def cut(data: bytearray, at: int, rng: random.Random) -> None:
    del data[at:]


def insert(data: bytearray, at: int, rng: random.Random) -> None:
    data[at:at] = rng.randbytes(rng.randint(1, 16))


def lose(data: bytearray, at: int, rng: random.Random) -> None:
    del data[at : at + rng.randint(1, 16)]


def zero(data: bytearray, at: int, rng: random.Random) -> None:
    stretch = data[at : at + rng.choice([1, 8, 64, 4096])]
    data[at : at + len(stretch)] = bytes(len(stretch))


def scramble(data: bytearray, at: int, rng: random.Random) -> None:
    stretch = data[at : at + rng.choice([1, 2, 8])]
    data[at : at + len(stretch)] = rng.randbytes(len(stretch))


DAMAGES = [flip, flip, cut, insert, lose, zero, scramble]


def damaged(whole: bytes, rng: random.Random) -> bytes:
    """Hit once, in the first or last kilobytes as often as elsewhere: there lie the headers."""
    n = len(whole)
    at = rng.choice(
        [rng.randrange(n), rng.randrange(min(n, 3000)), n - rng.randint(1, min(n, 3000))]
    )
    data = bytearray(whole)
    rng.choice(DAMAGES)(data, at, rng)
    return bytes(data)


def checkpoint(folder: Path, kind: str) -> Path:
    """A small checkpoint of a kind, with its tokenizer."""
    plain = write_meta(folder / "plain", weights(), shards=2 if kind == "shards" else 1)
    shutil.copy(TOKENIZER, plain / "tokenizer.model")
    if kind in ("plain", "shards"):
        return plain
    options: dict[str, dict[str, Any]] = {
        "hf": {"to": "hf"},
        "hf shards": {"to": "hf", "shards": 3},
        "int8": {"to": "meta", "quantize": "int8"},
        "int4": {"to": "meta", "quantize": "int4"},
    }
    if kind == "int4":  # whose groups want longer rows
        convert(str(STORIES), str(folder / "made"), **options[kind])
        return folder / "made"
    if kind == "old pickle":
        state = torch.load(plain / "consolidated.00.pth")
        torch.save(state, plain / "consolidated.00.pth", _use_new_zipfile_serialization=False)
        return plain
    if kind == "meta safetensors":
        save_file(torch.load(plain / "consolidated.00.pth"), plain / "consolidated.00.safetensors")
        (plain / "consolidated.00.pth").unlink()
        return plain
    convert(str(plain), str(folder / "made"), **options[kind])
    return folder / "made"


# Each file that a checkpoint can have: the kind of checkpoint, and its name.
FILES = [
    *[("plain", "params.json"), ("plain", "consolidated.00.pth"), ("plain", "tokenizer.model")],
    *[("shards", "consolidated.01.pth"), ("old pickle", "consolidated.00.pth")],
    *[("hf", "config.json"), ("hf", "model.safetensors")],
    *[("hf shards", "model.safetensors.index.json")],
    *[("hf shards", "model-00002-of-00003.safetensors")],
    *[("meta safetensors", "consolidated.00.safetensors")],
    *[("int8", "quantized.int8.00-of-01.safetensors"), ("int8", "params.json")],
    *[("int4", "quantized.int4.00-of-01.safetensors")],
]


def is_silent(file: Path, whole: bytes, now: bytes) -> bool:
    """Should another answer have been an error? In a safetensors file, unless only values are hit.

    Pickles, JSON and SentencePiece's models say nothing twice: another fact in them is a fact.
    """
    header = 8 + int.from_bytes(whole[:8], "little")
    same_header = len(whole) == len(now) and whole[:header] == now[:header]
    return file.suffix == ".safetensors" and not same_header


def use(folder: Path) -> list[Any]:
    """Build from a folder, and ask; the answers are well-formed."""
    with Llama.build(folder, max_seq_len=32, max_batch_size=2, verbose=False) as llama:
        answers: list[Any] = llama.text_completion(PROMPTS, 0, max_gen_len=3, logprobs=True)
        for answer in answers:
            assert isinstance(answer["generation"], str)
            assert all(-math.inf < value <= 0 for value in answer["logprobs"])
        tokens, _ = llama.generate([[1, 5], [1]], 3, temperature=0)
        assert all(0 <= token < VOCAB for row in tokens for token in row)
        return [answers, tokens]


def try_places(kind: str, name: str, folder: Path, seed: int) -> dict[str, int]:
    """Damage a file at many places, one at a time, and count how each went."""
    checkpoint_folder = checkpoint(folder, kind)
    expected, file = use(checkpoint_folder), checkpoint_folder / name
    whole, rng = file.read_bytes(), random.Random(f"{seed} {kind} {name}")
    counts = {"refused": 0, "equal": 0, "other": 0, "silent": 0}
    for place in range(PLACES):
        # A new file each time: torch keeps the old one mapped.
        file.unlink()
        now = damaged(whole, rng)
        file.write_bytes(now)
        faulthandler.dump_traceback_later(TOO_LONG_S, exit=True)
        try:
            answers = use(checkpoint_folder)
        except LlamaError:
            counts["refused"] += 1
        except BaseException:
            shutil.copy(file, f"{checkpoint_folder}.{place}")
            print(f"{kind} {name}: place {place}, kept as {checkpoint_folder}.{place}")
            raise
        else:
            if answers == expected:
                counts["equal"] += 1
            else:
                counts["silent" if is_silent(file, whole, now) else "other"] += 1
        faulthandler.cancel_dump_traceback_later()
    file.unlink()
    file.write_bytes(whole)
    assert use(checkpoint_folder) == expected
    return counts


def main(folder: str, seed: str, *numbers: str) -> None:
    """In a process of its own, which may end in any way."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for number in map(int, numbers):
        counts = try_places(*FILES[number], Path(folder) / str(number), int(seed))
        print(json.dumps([*FILES[number], counts]), flush=True)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, int]]:
    """Of every file, how its damages went, from a process that a crash may end."""
    folder = tmp_path_factory.mktemp("damaged")
    numbers = " ".join(map(str, range(len(FILES))))
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r});"
        f"import test_damaged_files; test_damaged_files.main({str(folder)!r}, '{SEED}', "
        f"*{numbers!r}.split())"
    )
    run = python(code, timeout_s=60 + PLACES * 5, FUZZ_PLACES=str(PLACES))
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    found = map(json.loads, run.stdout.splitlines())
    return {(kind, name): counts for kind, name, counts in found}


@pytest.mark.parametrize(("kind", "name"), FILES)
def test_a_damaged_file_is_refused_or_gives_answers_that_are_well_formed(
    kind: str, name: str, outcomes: dict[tuple[str, str], dict[str, int]]
) -> None:
    counts = outcomes[kind, name]
    assert sum(counts.values()) == PLACES
    assert counts["refused"] > 0
    assert counts["silent"] == 0


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "int8"])
def test_a_damaged_cache_file_changes_no_answer(kv_cache_dtype: str, tmp_path: Path) -> None:
    """Its contents have a checksum, so that none is believed that was hit."""
    file, rng = tmp_path / "cache.safetensors", random.Random(f"{SEED} {kv_cache_dtype}")
    folder = checkpoint(tmp_path, "plain")
    options = {"max_seq_len": 32, "max_batch_size": 2, "kv_cache_dtype": kv_cache_dtype}
    refused = 0
    with Llama.build(folder, verbose=False, **options) as llama:
        llama.text_completion(PROMPTS, 0, max_gen_len=3)
        llama.save_cache(file)
        held = [(row.tokens, row.keys, row.values) for row in map(llama.cache, (0, 1))]
        held = [
            (t, [k.clone() for k in keys], [v.clone() for v in values]) for t, keys, values in held
        ]
        whole = file.read_bytes()
        for _ in range(PLACES * 5):
            file.write_bytes(damaged(whole, rng))
            try:
                llama.load_cache(file)
            except LlamaError:
                refused += 1
            for row, (tokens, keys, values) in enumerate(held):
                now = llama.cache(row)
                assert now.tokens == tokens
                assert all(map(torch.equal, now.keys + now.values, keys + values))
        file.write_bytes(whole)
        llama.load_cache(file)
    assert refused > PLACES * 4  # the others hit zeros with zeros, or the padding of the header


def test_a_damaged_tokenizer_is_refused_or_reads_and_writes(tmp_path: Path) -> None:
    whole, rng = TOKENIZER.read_bytes(), random.Random(SEED)
    file, refused = tmp_path / "tokenizer.model", 0
    for _ in range(PLACES * 5):
        file.write_bytes(damaged(whole, rng))
        try:
            tokenizer = Tokenizer(file)
        except LlamaError:
            refused += 1
            continue
        ids = tokenizer.encode("Once upon a time, \0 🐶", bos=True, eos=True)
        assert all(0 <= id < tokenizer.n_words for id in ids)
        assert isinstance(tokenizer.decode(ids), str)
    assert refused > 0
