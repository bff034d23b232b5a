"""The decoding step as one compiled graph: `build(compile=True)`.

A graph is made for each bucket of cache lengths, once for one row and once for any number of them,
and all of them before the first call: lengths and batches that vary recompile nothing.
"""

from __future__ import annotations

import time

import torch

from llama.errors import LlamaError, require
from llama.model import Transformer

MIN_BUCKET = 512  # slots in the first bucket; each one has twice as many as the one before


class CompiledStep:
    """`model(tokens, positions, ...)` for one new token in each row, as captured graphs.

    One row may be any row of the cache; several are the rows from 0 on.
    """

    def __init__(self, model: Transformer) -> None:
        self.max_batch_size = model.params.max_batch_size
        self.buckets = bucket_lengths(model.params.n_slots)
        mode = "reduce-overhead" if model.rope_freqs.device.type == "cuda" else None

        # A function of its own: torch counts the graphs of a function against a limit, and those
        # of the model are left to a caller who compiles it as well.
        def step(
            tokens: torch.Tensor,
            positions: torch.Tensor,
            first_row: int | torch.Tensor,
            active: torch.Tensor,
            kv_len: int,
        ) -> torch.Tensor:
            rows = {"first_row": first_row, "active": active}
            return model(tokens, positions, **rows, kv_len=kv_len, only_last=True)

        self._compiled = torch.compile(step, fullgraph=True, mode=mode)

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        *,
        first_row: int | torch.Tensor,
        active: torch.Tensor,
        kv_len: int,
        only_last: bool = True,
    ) -> torch.Tensor:
        # A graph holds for the settings of torch that it was made under, such as the number of
        # threads. Under others the model runs uncompiled, and nothing is compiled in a call.
        with torch.compiler.set_stance("eager_on_recompile"):
            return self.run(tokens, positions, first_row, active, kv_len)

    def run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        first_row: int | torch.Tensor,
        active: torch.Tensor,
        kv_len: int,
    ) -> torch.Tensor:
        """The step, compiled if it has not been."""
        kv_len = next(length for length in self.buckets if length >= kv_len)
        if len(tokens) > 1:
            for tensor in (tokens, positions, active):
                torch._dynamo.mark_dynamic(tensor, 0, min=2, max=self.max_batch_size)
        return self._compiled(tokens, positions, first_row, active, kv_len)


def bucket_lengths(n_slots: int) -> list[int]:
    """How many slots attention reads in each graph.

    >>> bucket_lengths(1300)
    [512, 1024, 1300]
    """
    lengths = [MIN_BUCKET << i for i in range(n_slots.bit_length())]
    return [length for length in lengths if length < n_slots] + [n_slots]


def compile_step(model: Transformer, *, verbose: bool) -> CompiledStep:
    """Compile all graphs. The cache is empty afterwards."""
    require_compiler(model.rope_freqs.device)
    start, step, device = time.monotonic(), CompiledStep(model), model.rope_freqs.device
    sizes = sorted({1, min(2, model.params.max_batch_size), model.params.max_batch_size})
    settings = torch._dynamo.config.patch(
        # The loops below are the bound; torch's would count the graphs of other instances too.
        recompile_limit=2**16,
        accumulated_recompile_limit=2**16,
        # An integer that changes would become a symbol, and the lengths of a bucket are constants.
        automatic_dynamic_shapes=False,
    )
    try:
        with settings, torch.inference_mode():
            for kv_len in step.buckets:
                for bsz in sizes:
                    zeros = torch.zeros(bsz, dtype=torch.int64, device=device)
                    first_row = torch.zeros((), dtype=torch.int64, device=device)
                    where = first_row if bsz == 1 else 0, zeros == 0
                    step.run(zeros[:, None], zeros.clone(), *where, kv_len)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        raise LlamaError(
            f"compile=True, and the compiler for {device} failed ({error.inner_exception}): "
            "repair it, or leave compile out"
        ) from error
    for attention in model.attentions:
        for buffer in attention.buffers(recurse=False):
            buffer.zero_()
    if verbose:
        print(f"Compiled the decoding step in {time.monotonic() - start:.2f} seconds")
    return step


def require_compiler(device: torch.device) -> None:
    """Refuse a device for which nothing that Inductor needs is installed."""
    require(
        not torch._dynamo.config.disable,
        "compile=True, and torch's compiler is switched off: unset TORCH_COMPILE_DISABLE, or leave "
        "compile out",
    )
    found, needed = device.type == "cpu", "a C++ compiler, such as g++"
    if device.type == "cpu":
        from torch._inductor import cpp_builder, exc

        try:
            cpp_builder.get_cpp_compiler()
        except (exc.InvalidCxxCompiler, OSError):
            found = False
    elif device.type == "cuda":
        from torch.utils._triton import has_triton

        found, needed = has_triton(), "triton"
    else:
        needed = "a CPU or a CUDA device"
    if not found:
        raise LlamaError(f"compile=True on {device} needs {needed}: install it, or leave it out")
