"""What a pass allocates: bounded, and within what is counted before a model is loaded."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llama import Llama, engine, sizes
from llama.kv_cache import Segment
from llama.model import ModelArgs, Transformer
from llama.parallel import groups
from llama.sampling import SamplingParams


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made inside had at one time."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        place, size = storage.data_ptr(), storage.nbytes()
        if place and place not in self.seen:
            self.seen.add(place)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, place, size)

    def _forget(self, place: int, size: int) -> None:
        self.seen.discard(place)
        self.live -= size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden_dim", [512, 128])
def test_a_prefill_allocates_at_most_what_is_counted_and_at_least_a_third(
    dtype: torch.dtype, hidden_dim: int
) -> None:
    args = ModelArgs(dim=128, n_layers=2, n_heads=4, vocab_size=512, hidden_dim=hidden_dim)
    args.max_seq_len, args.max_batch_size = 2048, 2
    runtime = groups.setup(device="cpu")
    try:
        model = Transformer(args).eval().to(dtype)
        for parameter in model.parameters():
            parameter.fill_(0.01)
        tokens = torch.ones(2048, dtype=torch.int64)
        segments = [Segment(0, 0, 1000), Segment(1, 0, 1048)]
        known = [*model.parameters(), *model.buffers()]
        with torch.inference_mode(), PeakBytes(known) as peak:
            model.prefill(tokens, segments, only_last=True)
    finally:
        groups.teardown(runtime)
    counted = sizes.activation_bytes(args, dtype)
    # A third: which tensors live at one time depends on the operators that torch chooses.
    assert counted / 3 <= peak.peak <= counted


def test_logprobs_of_whole_prompts_hold_the_logits_of_one_part_at_a_time(
    llama: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four prompts of 100 tokens over 1024 words are 1.6 MB of logits; a part has 33 kB."""
    prompts = [[1, *range(3 + i, 102 + i)] for i in range(4)]
    llama.reset()
    whole = llama.generate(prompts, 0, logprobs=True, echo=True)[1]
    monkeypatch.setattr(engine, "LOGITS_PER_PASS", 8 * 1024)
    llama.reset()
    llama.engine.passes.clear()
    params = SamplingParams(max_gen_len=0, logprobs=True, prompt_logprobs=True)
    parts = llama.generate(prompts, echo=True, params=params)[1]
    assert {n for _, n in llama.engine.passes} == {8}
    for ours, theirs in zip(parts, whole, strict=True):
        # float32 products of other shapes: the last bits of logits below 20
        assert ours == pytest.approx(theirs, abs=2e-4)
