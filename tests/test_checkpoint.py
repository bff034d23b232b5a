"""Loading: formats, shards and ranks, memory, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from checkpoints import HIDDEN, VOCAB, hf_logits, hf_model, split, weights, write_meta
from conftest import ATOL, GOLDEN
from fairscale.nn.model_parallel import initialize as groups
from safetensors.torch import load_file, save_file

from llama import Llama, LlamaError, sizes
from llama.checkpoints.config import read_config, read_params
from llama.checkpoints.convert import convert
from llama.checkpoints.files import looks_like
from llama.checkpoints.load import (
    find_tokenizer,
    load,
    load_tokenizer,
    open_checkpoint,
    validation_errors,
)
from llama.checkpoints.reader import Checkpoint
from llama.checkpoints.text import TextFacts
from llama.generation import STORIES
from llama.model import ModelArgs, Transformer
from llama.parameters import padded, require_split
from llama.sizes import require_room

TOKENIZER = GOLDEN / "rand_gqa" / "tokenizer.model"
CPU = torch.device("cpu")
TOKENS = torch.randint(VOCAB, (1, 200), generator=torch.Generator().manual_seed(1))
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def built(folder: Path, **options: Any) -> Llama:
    sizes = {"max_seq_len": 256, "max_batch_size": 2, "dtype": "float32", "verbose": False}
    return Llama.build(folder, TOKENIZER, **{**sizes, **options})


def logits_of(folder: Path, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with built(folder) as llama:
        return llama.model(tokens, 0)


def rewrite(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


# Formats


@pytest.mark.parametrize(
    ("config", "how"),
    [
        ({"rope_theta": 1e6}, {}),
        ({"tie_word_embeddings": True}, {}),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, {}),
        ({"rope_scaling": LLAMA3, "rope_theta": 5e5}, {}),
        ({"rms_norm_eps": 1e-2}, {"max_shard_size": "100KB"}),
        ({"model_type": "mistral", "sliding_window": 50}, {}),
    ],
    ids=["theta", "tied", "linear", "llama3", "several_files", "window"],
)
def test_a_hugging_face_folder_gives_the_logits_of_transformers(
    config: dict, how: dict, tmp_path: Path
) -> None:
    model = hf_model(**config)
    model.save_pretrained(tmp_path, **how)
    assert len(list(tmp_path.glob("*.safetensors"))) == (6 if how else 1)
    torch.testing.assert_close(logits_of(tmp_path), hf_logits(model, TOKENS), atol=ATOL, rtol=0)


def test_pickled_hugging_face_weights_load_as_well(tmp_path: Path) -> None:
    model = hf_model()
    model.config.save_pretrained(tmp_path)
    state = model.state_dict()
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # as older versions wrote
    torch.save(state, tmp_path / "pytorch_model.bin")
    torch.testing.assert_close(logits_of(tmp_path), hf_logits(model, TOKENS), atol=ATOL, rtol=0)


@pytest.mark.parametrize("dialect", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("scaling", [{}, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
def test_both_dialects_of_rope_scaling_are_understood(
    dialect: str, scaling: dict, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    hf_model().config.save_pretrained(tmp_path)
    if dialect == "rope_parameters":
        rewrite(file, rope_parameters={"rope_type": "default", "rope_theta": 5e5, **scaling})
    else:
        old = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
        rewrite(file, rope_parameters=None, rope_theta=5e5, rope_scaling=old)
    params = read_config(file).params
    assert (params["rope_theta"], params.get("rope_scaling", {})) == (5e5, scaling)


def test_what_a_config_leaves_out_is_what_transformers_takes_for_it(tmp_path: Path) -> None:
    from transformers import AutoConfig

    for model_type in ("llama", "mistral"):
        hf_model().config.save_pretrained(tmp_path)
        gone = dict.fromkeys(["rms_norm_eps", "rope_parameters", "num_key_value_heads"])
        rewrite(tmp_path / "config.json", model_type=model_type, architectures=None, **gone)
        theirs = AutoConfig.from_pretrained(tmp_path)
        params = ModelArgs(**read_config(tmp_path / "config.json").params)
        assert params.norm_eps == theirs.rms_norm_eps
        assert params.kv_heads == theirs.num_key_value_heads
        assert params.rope_theta == theirs.rope_parameters["rope_theta"]
        assert params.sliding_window == getattr(theirs, "sliding_window", None)


def test_of_two_rope_scalings_the_one_counts_that_transformers_takes(tmp_path: Path) -> None:
    from transformers import AutoConfig

    hf_model().config.save_pretrained(tmp_path)
    both = {"rope_type": "default", "rope_theta": 5e5}, {"rope_type": "linear", "factor": 4.0}
    rewrite(tmp_path / "config.json", rope_parameters=both[0], rope_scaling=both[1])
    theirs = AutoConfig.from_pretrained(tmp_path).rope_parameters
    params = ModelArgs(**read_config(tmp_path / "config.json").params, vocab_size=1)
    assert theirs == {**params.rope_scaling, "rope_theta": params.rope_theta}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, None),
        ({"use_scaled_rope": False}, None),
        ({"use_scaled_rope": True}, {**LLAMA3, "original_max_position_embeddings": 8192}),
        ({"rope_scaling": LLAMA3}, LLAMA3),
    ],
)
def test_params_json_names_its_rope_scaling(params: dict, expected: Any, tmp_path: Path) -> None:
    folder = write_meta(tmp_path / "m", max_seq_len=2048, rope_theta=5e5, **params)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.args.rope_scaling == expected
    assert (checkpoint.args.rope_theta, checkpoint.context) == (5e5, 2048)


@pytest.mark.parametrize(
    ("dim", "n_layers", "factor"), [(4096, 32, 8.0), (2048, 16, 32.0), (3072, 28, 32.0)]
)
def test_the_small_models_of_llama_3_2_have_a_rope_factor_of_their_own(
    dim: int, n_layers: int, factor: float, tmp_path: Path
) -> None:
    written = {"dim": dim, "n_layers": n_layers, "n_heads": 32, "use_scaled_rope": True}
    (tmp_path / "params.json").write_text(json.dumps(written))
    assert read_params(tmp_path / "params.json").params["rope_scaling"]["factor"] == factor


def test_meta_folders_of_every_kind_hold_the_same_model(tmp_path: Path) -> None:
    state = weights()
    expected = logits_of(write_meta(tmp_path / "one", state))
    stray = {**state, "rope.freqs": torch.ones(4)}
    for name, folder in {
        "safetensors": write_meta(tmp_path / "a", state, shards=2, suffix="safetensors"),
        "vocabulary split, as in Llama 3": write_meta(
            tmp_path / "b", state, shards=4, embedding_axis=0
        ),
        "rotary frequencies in the file": write_meta(tmp_path / "c", stray),
    }.items():
        assert torch.equal(logits_of(folder), expected), name
    torch.save(state, tmp_path / "one/consolidated.00.pth", _use_new_zipfile_serialization=False)
    assert torch.equal(logits_of(tmp_path / "one"), expected), "a pickle of PyTorch before 1.6"


def test_rows_beyond_the_tokenizer_load_and_are_never_sampled(tmp_path: Path) -> None:
    state = weights(vocab=VOCAB + 16)
    state["output.weight"][VOCAB:] = 0
    state["output.weight"][VOCAB] = state["output.weight"][:VOCAB].abs().sum(0)
    state["output.weight"][VOCAB + 1] = -state["output.weight"][VOCAB]
    with built(write_meta(tmp_path / "m", state)) as llama:
        logits = llama.model(TOKENS[:, :5], 0)[0, -1]
        assert logits.argmax() >= VOCAB
        tokens, _ = llama.generate([TOKENS[0, :5].tolist()] * 2, max_gen_len=20, temperature=1.0)
        assert max(max(row) for row in tokens) < VOCAB


# Shards and ranks


def _compare_on_ranks(
    rank: int, ranks: int, store: str, cases: list[tuple[str, Path, torch.Tensor]]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    groups.initialize_model_parallel(ranks)
    for name, folder, expected in cases:
        checkpoint = open_checkpoint(folder)
        args = ModelArgs(**checkpoint.params, max_batch_size=1, max_seq_len=256)
        args.vocab_size = padded(args.vocab_size, ranks)
        require_room(args, device=CPU, dtype=torch.float32, ranks=ranks)
        with torch.device("meta"):
            model = Transformer(args)
        load(model, checkpoint, device=CPU, dtype=torch.float32)
        model.allocate_state("cpu", torch.float32)
        # Sums of 4 parts instead of one differ by about 1e-6.
        logits = model(TOKENS, 0)
        assert not logits[..., checkpoint.vocab_size :].any()
        logits = logits[..., : checkpoint.vocab_size]
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0, msg=name)
    with pytest.raises(
        LlamaError, match=r"4 key/value heads do not divide by 8 ranks: use 1, 2, 4"
    ):
        require_split(args, 8)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def pairings(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Path, torch.Tensor]]:
    root, state = tmp_path_factory.mktemp("pairings"), weights()
    expected = logits_of(write_meta(root / "meta1", state))
    cases = [("meta1", root / "meta1", expected)]
    cases += [
        (f"meta{n}", write_meta(root / f"meta{n}", state, shards=n), expected) for n in (2, 4)
    ]
    rows = write_meta(root / "rows", state, shards=4, embedding_axis=0)
    cases.append(("Llama 3's embedding", rows, expected))
    for name, config, size in (
        ("hf", {}, "1GB"),
        ("hf4", {"tie_word_embeddings": True}, "150KB"),
        ("a vocabulary to pad", {"vocab_size": VOCAB + 1}, "1GB"),
    ):
        model = hf_model(num_key_value_heads=4, **config)
        model.save_pretrained(root / name, max_shard_size=size)
        cases.append((name, root / name, logits_of(root / name)))
    return cases


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_shard_count_is_not_the_process_count_and_every_pairing_gives_equal_logits(
    ranks: int, pairings: list, tmp_path: Path
) -> None:
    context = mp.start_processes(
        _compare_on_ranks, (ranks, str(tmp_path / "store"), pairings), ranks, join=False
    )
    deadline = time.monotonic() + 180
    while not context.join(timeout=1):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail("the ranks did not finish in 180 s")


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_rank_takes_its_interval_of_each_tensor_and_looks_at_nothing_else(
    shards: int, ranks: int, tmp_path: Path
) -> None:
    state = weights(n_kv_heads=8)
    checkpoint = open_checkpoint(write_meta(tmp_path / "m", state, shards=shards, n_kv_heads=8))
    for rank, part in enumerate(split(state, ranks)):
        for name, expected in part.items():
            assert torch.equal(checkpoint.read(name, rank, ranks), expected)
            need = [range(n) for n in expected.shape]
            for axis, (n, whole) in enumerate(zip(expected.shape, state[name].shape, strict=True)):
                need[axis] = range(rank * n, (rank + 1) * n) if n < whole else range(n)
            taken = [view for _, view in checkpoint._overlaps(name, need)]
            assert sum(view.numel() for view in taken) == expected.numel()


# Memory


def meta_model(checkpoint: Checkpoint) -> Transformer:
    with torch.device("meta"):
        return Transformer(ModelArgs(**checkpoint.params, max_batch_size=1, max_seq_len=8))


def test_weights_that_need_no_change_are_the_mapped_file_itself(
    llama: Llama, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(write_meta(tmp_path / "m"))
    model = meta_model(checkpoint)
    load(model, checkpoint, device=CPU, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == checkpoint.parts[name][0].tensor.data_ptr()
        assert not parameter.requires_grad
    load(model, checkpoint, device=CPU, dtype=torch.float16)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, checkpoint.parts[name][0].tensor.half())


def test_a_tied_output_layer_takes_no_memory_of_its_own(llama: Llama, tmp_path: Path) -> None:
    hf_model(tie_word_embeddings=True).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    model = meta_model(checkpoint)
    load(model, checkpoint, device=CPU, dtype=torch.bfloat16)
    assert model.output.weight.data_ptr() == model.tok_embeddings.weight.data_ptr()


def test_what_cannot_fit_is_refused_with_the_numbers_and_the_knobs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = write_meta(tmp_path / "m")
    args = ModelArgs(**open_checkpoint(folder).params, max_seq_len=100, max_batch_size=3)
    needed = sizes.weights_bytes(args, dtype=torch.float16) + sizes.cache_bytes(args, torch.float16)
    needed += sizes.activation_bytes(args, torch.float16)
    monkeypatch.setattr(sizes, "available_bytes", lambda device: needed)
    require_room(args, device=CPU, dtype=torch.float16)
    monkeypatch.setattr(sizes, "available_bytes", lambda device: needed - 1)
    knobs = r"max_seq_len \(100\), max_batch_size \(3\) .*dtype than float16, or quantize"
    with pytest.raises(LlamaError, match=rf"weights need 447.10 kB .*cache 76.80 kB.*{knobs}"):
        require_room(args, device=CPU, dtype=torch.float16)
    with pytest.raises(LlamaError, match="max_seq_len"):
        built(folder)


# Bad input


def put(file: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(content) and None


def edit(shard: int, change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / f"consolidated.{shard:02d}.pth"
        state = torch.load(file)
        change(state)
        torch.save(state, file)

    return damage


W1 = "layers.1.feed_forward.w1.weight"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n"
HTML = b"<!DOCTYPE html>\n<html><body>Access denied</body></html>"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (put("consolidated.00.pth", LFS), r"consolidated.00.pth is a git-lfs pointer"),
        (put("consolidated.00.pth", HTML), r"consolidated.00.pth is an HTML page"),
        (put("params.json", HTML), r"params.json is an HTML page"),
        (put("params.json", b'{"dim": 64,'), r"params.json is damaged JSON"),
        (put("params.json", b"[1]"), r"params.json holds a list"),
        (lambda f: (f / "params.json").unlink(), r"params.json is missing"),
        (lambda f: (f / "consolidated.02.pth").unlink(), r"consolidated.02.pth is missing"),
        (
            lambda f: (f / "consolidated.03.pth").unlink(),
            r"consolidated.00.pth: tok_embeddings.weight has the shape \[1024, 16\], "
            r"and the model needs \[1024, 21\]: it is one of 4 shards, and 1 may be missing",
        ),
        (
            edit(1, lambda s: s.update(split(weights(seed=1), 4)[1])),
            r"consolidated.01.pth: .*norm.weight differs from consolidated.00.pth: "
            r"the files of two checkpoints are mixed",
        ),
        (
            edit(1, lambda s: s.update({k: t.half() for k, t in s.items()})),
            r"consolidated.01.pth: .* differs from consolidated.00.pth: .* are mixed",
        ),
        (
            edit(3, lambda s: s.pop(W1)),
            rf"{W1} is in 3 files of .* \(consolidated.00.pth, .*02.pth\), and must be in 4",
        ),
        (
            edit(0, lambda s: s.update({"layers.2.ffn_norm.weight": torch.ones(64)})),
            r"consolidated.00.pth has 'layers.2.ffn_norm.weight', which is not part of this model",
        ),
        (
            edit(0, lambda s: s.update({W1: torch.ones(43, 64)})),
            rf"consolidated.00.pth: {W1} has the shape \[43, 64\], and the model needs \[44, 64\]",
        ),
        (
            edit(2, lambda s: s.update({W1: torch.ones(44, 64, dtype=torch.int8)})),
            rf"consolidated.02.pth: {W1} is torch.int8, and must be float32 or float16",
        ),
        (
            lambda f: rewrite(f / "params.json", n_experts=8),
            r"unknown key n_experts: known are dim",
        ),
        (
            lambda f: rewrite(f / "params.json", dim="64"),
            r"dim is '64', and must be a whole number",
        ),
        (
            lambda f: rewrite(f / "params.json", n_heads=7),
            r"dim is 64, and must be a multiple of 7",
        ),
        (
            lambda f: rewrite(f / "params.json", head_dim=3),
            r"head_dim is 3, and must be a multiple",
        ),
    ],
)
def test_a_damaged_meta_folder_is_refused_in_a_sentence(
    damage: Callable[[Path], Any], said: str, tmp_path: Path
) -> None:
    folder = write_meta(tmp_path / "m", shards=4)
    open_checkpoint(folder)
    damage(folder)
    with pytest.raises(LlamaError, match=said) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In 6 files."""
    folder = tmp_path_factory.mktemp("hf")
    hf_model().save_pretrained(folder, max_shard_size="100KB")
    return folder


SECOND = "model-00002-of-00006.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"


def edit_hf(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        file = folder / index["weight_map"][UP]
        state = load_file(file)
        change(state)
        save_file(state, file)

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (put(SECOND, LFS), rf"{SECOND} is a git-lfs pointer"),
        (put(SECOND, pickle.dumps([1])), rf"{SECOND} is a pickle and not a safetensors file"),
        (
            lambda f: (f / SECOND).unlink(),
            rf"'{SECOND}', which .*index.json names, is not a file in .*hf",
        ),
        (lambda f: (f / "model.safetensors.index.json").unlink(), r"index.json is missing"),
        (
            lambda f: rewrite(f / "model.safetensors.index.json", weight_map={}),
            r"model.safetensors.index.json has no weight_map: download it again",
        ),
        (
            lambda f: [file.unlink() for file in f.glob("model*")],
            r"hf has a config.json and no weights: download model.safetensors as well",
        ),
        (
            lambda f: shutil.copyfile(f / SECOND, f / "model-00003-of-00006.safetensors"),
            rf" is in 2 files of .* \({SECOND}, model-00003-of-.*\), and must be in 1:",
        ),
        (edit_hf(lambda s: s.pop(UP)), rf"{UP} is missing from .*hf"),
        (
            edit_hf(lambda s: s.update({UP: torch.ones(64, HIDDEN)})),
            rf"{UP} has the shape \[64, 176\], and the model needs \[176, 64\]",
        ),
        (
            edit_hf(lambda s: s.update({UP.replace("weight", "bias"): torch.ones(HIDDEN)})),
            r"has 'model.layers.1.mlp.up_proj.bias', which is not part of this model",
        ),
    ],
)
def test_a_damaged_hugging_face_folder_is_refused_in_a_sentence(
    damage: Callable[[Path], Any], said: str, hf_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(hf_folder, tmp_path / "hf")
    open_checkpoint(folder)
    damage(folder)
    with pytest.raises(LlamaError, match=said) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "keep", "said"),
    [
        ("consolidated.01.pth", 0.7, r"is truncated or damaged at [\d,]+ bytes: download it again"),
        ("consolidated.01.pth", 0.0, r"is an empty file"),
        (SECOND, 0.7, r"is truncated or damaged at [\d,]+ bytes: download it again"),
        (SECOND, 0.0, r"is an empty file"),
    ],
)
def test_a_partial_download_is_named_and_said_to_be_truncated(
    file: str, keep: float, said: str, hf_folder: Path, tmp_path: Path
) -> None:
    folder = write_meta(tmp_path / "meta", shards=2)
    if file == SECOND:
        folder = shutil.copytree(hf_folder, tmp_path / "hf")
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(LlamaError, match=rf"{file} {said}"):
        Llama.build(folder, TOKENIZER)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt_neox"}, "model_type 'gpt_neox'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            r"weights are quantized \(.*gptq.*\) in a form that is not supported",
        ),
        ({"head_dim": 33}, "head_dim is 33, and must be a multiple of 2"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor of the rope scaling is"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "of several kinds"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"num_key_value_heads": 3}, "n_heads is 8, and must be a multiple of 3"),
        ({"hidden_size": None}, "has no hidden_size"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(
    changes: dict, said: str, hf_folder: Path, tmp_path: Path
) -> None:
    shutil.copyfile(hf_folder / "config.json", tmp_path / "config.json")
    rewrite(tmp_path / "config.json", **changes)
    with pytest.raises(LlamaError, match=said):
        read_config(tmp_path / "config.json")


class RunsCode:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(
    zipped: bool, tmp_path: Path
) -> None:
    folder, trace = write_meta(tmp_path / "m"), tmp_path / "it ran"
    file = folder / "consolidated.00.pth"
    torch.save({"a": RunsCode(trace)}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(LlamaError, match=r"consolidated.00.pth holds posix.mkdir, .* not read"):
        open_checkpoint(folder)
    assert not trace.exists()
    torch.load(file, weights_only=False)  # so that the test could have failed
    assert trace.exists()


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        (0, torch.ones(1), r"0 is not the name of a parameter"),
        (W1, torch.ones(2, 2).to_sparse(), rf"{W1}' is a sparse or nested tensor"),
        (W1, torch.empty(2, 2, device="meta"), rf"{W1}' has a shape but no values"),
        (
            W1,
            torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
            rf"{W1}' is a sparse or nested ",
        ),
        ("tok_embeddings.weight", torch.ones(0, 64), r"tok_embeddings.weight is empty"),
        ("output.weight", torch.ones(0, 64), r"output.weight has the shape \[0, 64\]"),
    ],
)
def test_what_is_no_plain_tensor_is_refused_by_name(
    name: Any, tensor: torch.Tensor, said: str, tmp_path: Path
) -> None:
    folder = write_meta(tmp_path / "m")
    edit(0, lambda s: s.update({name: tensor}))(folder)
    with pytest.raises(LlamaError, match=said):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("content", "held"),
    [({"model": {}, "optimizer": {}}, "model, optimizer"), ([torch.ones(1)], "list")],
)
def test_a_file_that_holds_more_than_tensors_is_told_what_to_save(
    content: Any, held: str, tmp_path: Path
) -> None:
    folder = write_meta(tmp_path / "m")
    torch.save(content, folder / "consolidated.00.pth")
    with pytest.raises(
        LlamaError, match=rf"holds {held} and not only tensors: save only the state"
    ):
        open_checkpoint(folder)


def test_a_file_that_the_disk_does_not_give_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_meta(tmp_path / "m")

    def broken(path: Path, *_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("llama.checkpoints.files.open", broken, raising=False)
    with pytest.raises(LlamaError, match=r"consolidated.00.pth cannot be read: Input/output error"):
        open_checkpoint(folder)
    monkeypatch.setattr(Path, "read_text", broken)
    with pytest.raises(LlamaError, match=r"params.json cannot be read: Input/output error"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dim", 10**400),
        ("n_layers", True),
        ("ffn_dim_multiplier", float("inf")),
        ("ffn_dim_multiplier", 1e308),
        ("rope_theta", float("inf")),
        ("norm_eps", float("nan")),
        ("rope_scaling", {"rope_type": "linear", "factor": float("inf")}),
    ],
)
def test_a_number_that_no_model_has_is_refused_by_name(
    key: str, value: Any, tmp_path: Path
) -> None:
    folder = write_meta(tmp_path / "m", **{key: value})
    name = "factor of the rope scaling" if key == "rope_scaling" else key
    with pytest.raises(LlamaError, match=rf"{name} is .*, and must be a .*above 0 and below 2"):
        open_checkpoint(folder)


def test_equal_norms_that_are_no_numbers_are_not_taken_for_two_checkpoints(tmp_path: Path) -> None:
    state = weights()
    state["norm.weight"][:] = torch.nan
    for shards in (1, 2):
        open_checkpoint(write_meta(tmp_path / str(shards), state, shards=shards))


def test_a_vocab_size_that_the_embedding_has_not_is_refused(
    hf_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(hf_folder, tmp_path / "hf")
    rewrite(folder / "config.json", vocab_size=VOCAB - 1)
    with pytest.raises(LlamaError, match=r"vocab_size is 1023, but the embedding has 1024 rows"):
        open_checkpoint(folder)


def test_a_place_without_a_checkpoint_is_said_to_have_none(tmp_path: Path) -> None:
    with pytest.raises(LlamaError, match=r"nowhere' does not exist: pass the folder"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(LlamaError, match=r"holds neither .*Hugging Face\), but nothing$"):
        open_checkpoint(tmp_path)
    write_meta(tmp_path / "llama-2-7b")
    with pytest.raises(LlamaError, match=r"did you mean .*llama-2-7b\?"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LlamaError, match=r"config.json: model_type None"):
        open_checkpoint(tmp_path)


def test_ranks_that_cannot_share_the_model_are_refused() -> None:
    args = ModelArgs(dim=64, n_heads=8, n_kv_heads=4, hidden_dim=HIDDEN, vocab_size=1026)
    require_split(args, 2)
    require_split(args, 4)  # ranks pad the vocabulary
    with pytest.raises(LlamaError, match="1026 rows of the vocabulary do not divide by 4 shards"):
        require_split(args, 4, "shards")
    with pytest.raises(
        LlamaError, match=r"4 key/value heads do not divide by 8 ranks: use 1, 2, 4$"
    ):
        require_split(args, 8)


def test_a_right_file_in_the_tokenizers_place_looks_like_nothing_else() -> None:
    assert looks_like(TOKENIZER) is None
    assert looks_like(STORIES / "consolidated.00.pth") == "a zip archive"


# What a file says is checked before anything is allocated or read


def test_a_small_pickle_that_claims_terabytes_is_refused_before_anything_is_allocated(
    tmp_path: Path,
) -> None:
    folder = write_meta(tmp_path / "m", dim=2**40, n_heads=2**20, n_kv_heads=None)
    huge = {"norm.weight": torch.ones(1).expand(2**40), "tok_embeddings.weight": torch.ones(4, 4)}
    torch.save(huge, folder / "consolidated.00.pth")
    assert (folder / "consolidated.00.pth").stat().st_size < 3000
    with pytest.raises(LlamaError, match=r"norm.weight' is larger than what the file holds of it"):
        open_checkpoint(folder)


def test_a_compressed_archive_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    folder = write_meta(tmp_path / "m")
    file = folder / "consolidated.00.pth"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(100_000_000))
        archive.writestr("archive/version", "3\n")
    with pytest.raises(LlamaError, match=r"is a compressed archive: write it again with torch.sav"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["../outside/x.safetensors", "/etc/passwd", "x" * 5000, ".."])
def test_an_index_leads_to_files_of_its_own_folder_only(
    name: str, hf_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(hf_folder, tmp_path / "hf")
    (tmp_path / "outside").mkdir()
    shutil.copy(folder / SECOND, tmp_path / "outside" / "x.safetensors")
    rewrite(folder / "model.safetensors.index.json", weight_map={UP: name})
    with pytest.raises(LlamaError, match=r"is not a file in|is missing") as caught:
        open_checkpoint(folder)
    assert len(str(caught.value)) < 500


def test_links_that_lie_in_the_folder_are_followed_as_in_the_cache_of_the_hub(
    hf_folder: Path, tmp_path: Path
) -> None:
    blobs, snapshot = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/c0"
    shutil.copytree(hf_folder, blobs)
    snapshot.mkdir(parents=True)
    for file in list(blobs.iterdir()):
        (snapshot / file.name).symlink_to(file.rename(blobs / f"blob of {file.name}"))
    assert open_checkpoint(snapshot).args == open_checkpoint(hf_folder).args
    with pytest.raises(LlamaError, match=r"did you mean .*models--a--b/snapshots/c0\?"):
        open_checkpoint(tmp_path / "models--a--b")
    (blobs / f"blob of {SECOND}").unlink()
    with pytest.raises(
        LlamaError, match=rf"{SECOND} is a link to a file that is missing: download it"
    ):
        open_checkpoint(snapshot)


def test_a_value_of_any_length_is_not_echoed_whole(hf_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(hf_folder, tmp_path / "hf")
    for key in ("model_type", "hidden_act", "head_dim", "rope_scaling", "quantization_config"):
        shutil.copy(hf_folder / "config.json", folder)
        rewrite(folder / "config.json", **{key: "x" * 100_000})
        with pytest.raises(LlamaError) as caught:
            open_checkpoint(folder)
        assert len(str(caught.value)) < 500


# What a folder says, and what it does not


def test_a_window_counts_only_for_a_model_type_that_has_one(
    hf_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(hf_folder, tmp_path / "hf")
    rewrite(folder / "config.json", sliding_window=8, use_sliding_window=False)
    with pytest.warns(UserWarning, match="sliding_window is ignored: models of type llama have no"):
        checkpoint = open_checkpoint(folder)
    assert checkpoint.args.sliding_window is None


def test_an_extra_tensor_with_a_name_of_another_format_replaces_nothing(
    hf_folder: Path, tmp_path: Path
) -> None:
    for name in ("norm.weight", "layers.0.attention.wq.weight"):
        folder = shutil.copytree(hf_folder, tmp_path / name)
        edit_hf(lambda s, name=name: s.update({name: torch.ones(64)}))(folder)
        with pytest.raises(LlamaError, match=rf"has '{name}', which is not part of this model"):
            open_checkpoint(folder)


def test_nothing_depends_on_the_default_dtype_and_device_of_the_caller(
    hf_folder: Path, tmp_path: Path
) -> None:
    meta = write_meta(tmp_path / "m", shards=2)
    for folder in (meta, hf_folder):
        before = open_checkpoint(folder)
        expected = {
            name: before.read(name, 1, 2, dtype=torch.bfloat16) for name in before.parameters
        }
        torch.set_default_dtype(torch.float16)
        try:
            with torch.device("meta"):
                checkpoint = open_checkpoint(folder)
                for name, tensor in expected.items():
                    assert torch.equal(checkpoint.read(name, 1, 2, dtype=torch.bfloat16), tensor)
                convert(folder, tmp_path / "out", to="hf", force=True)
        finally:
            torch.set_default_dtype(torch.float32)
        again = open_checkpoint(tmp_path / "out")
        for name in again.parameters:
            assert torch.equal(again.read(name), before.read(name))


def test_the_tokenizer_of_the_folder_above_serves_metas_layout_only(
    hf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(TOKENIZER, tmp_path / "tokenizer.model")
    meta = write_meta(tmp_path / "7b")
    hf = shutil.copytree(hf_folder, tmp_path / "hf")
    above = tmp_path / "tokenizer.model"
    assert find_tokenizer(meta) == above
    monkeypatch.chdir(meta)
    assert find_tokenizer(Path(".")) == above
    convert(".", "../converted", to="meta")
    assert (tmp_path / "converted/tokenizer.model").read_bytes() == TOKENIZER.read_bytes()
    with pytest.raises(
        LlamaError, match=r"there is none of tokenizer.model, .*tokenizer.json in .*hf'"
    ):
        find_tokenizer(hf)
    (meta / "tokenizer.json").write_text("{}")
    assert find_tokenizer(meta) == meta / "tokenizer.json"
    (hf / "tokenizer.json").write_text("{}")
    assert find_tokenizer(hf) == hf / "tokenizer.json"


@pytest.mark.parametrize(
    ("vocab", "fits"),
    [(VOCAB, True), (VOCAB + 1023, True), (VOCAB - 1, False), (VOCAB + 1024, False)],
)
def test_a_tokenizer_that_is_larger_or_far_smaller_than_the_embedding_is_refused(
    vocab: int, fits: bool, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(write_meta(tmp_path / "m", weights(vocab=vocab)))
    if fits:
        assert load_tokenizer(checkpoint, TOKENIZER).n_words == VOCAB
    else:
        with pytest.raises(LlamaError, match=f"has 1024 tokens, the checkpoint {vocab}: pass the"):
            load_tokenizer(checkpoint, TOKENIZER)


def test_the_two_names_of_a_single_file_may_lie_in_one_folder(tmp_path: Path) -> None:
    folder = write_meta(tmp_path / "m", suffix="safetensors")
    shutil.copy(folder / "consolidated.00.safetensors", folder / "consolidated.safetensors")
    assert [file.name for file in open_checkpoint(folder).files] == ["consolidated.00.safetensors"]


def test_validation_finds_a_tokenizer_that_build_would_refuse(tmp_path: Path) -> None:
    folder = write_meta(tmp_path / "m")
    checkpoint = open_checkpoint(folder)
    (error,) = validation_errors(checkpoint)
    assert error.startswith("there is none of tokenizer.model")
    shutil.copy(TOKENIZER, folder)
    assert validation_errors(checkpoint) == []
    (folder / "tokenizer.model").write_bytes(b"damaged")
    assert len(validation_errors(checkpoint)) == 1


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"adapter_config.json": {}},
            "holds an adapter only: pass the base model, and this folder as adapter=",
        ),
        (
            {"config.json": {"model_type": "llama", "quantization": {"bits": 4}}},
            r"weights are quantized \(\{'bits': 4\}\)",
        ),
    ],
)
def test_a_folder_of_another_kind_is_said_to_be_that(
    files: dict, said: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(LlamaError, match=said):
        open_checkpoint(tmp_path)


def test_the_facts_of_the_text_come_from_the_folders_own_files(
    hf_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(hf_folder, tmp_path / "hf")
    assert open_checkpoint(folder).text == TextFacts("hf", (2,))  # of config.json
    named = [{"name": "tool", "template": "a"}, {"name": "default", "template": "b"}]
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"add_bos_token": False, "chat_template": named})
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert open_checkpoint(folder).text == TextFacts("hf", (5, 7), False, "b")
    (folder / "chat_template.jinja").write_text("c")
    assert open_checkpoint(folder).text.chat_template == "c"
    for wrong in ("two", [1, -1], True, {}, VOCAB):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(LlamaError, match=r"eos_token_id is .*, and must be a token id"):
            open_checkpoint(folder)
    assert open_checkpoint(write_meta(tmp_path / "m")).text == TextFacts("meta")


def test_no_binary_file_carries_a_path_of_the_machine_that_made_it() -> None:
    folders = (STORIES, GOLDEN, Path(__file__).parents[1] / "benchmarks")
    files = [f for folder in folders for f in folder.rglob("*.*")]
    binary = [f for f in files if f.suffix in (".model", ".pth", ".png")]
    assert len(binary) > 7
    for file in binary:
        assert not re.search(rb"/(home|root|tmp|work|mnt|Users)/[\x21-\x7e]+", file.read_bytes())
