"""Products and decode attention on a CPU in C, and how that is compiled.

`kernels.c` is compiled once per machine, by the system's C compiler, into a folder of the user's.
Without a compiler, or if anything about that fails, torch's own operators do the work.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from llama.errors import LlamaError, require

CHOICES = ("auto", "torch")
FEW_ROWS = 8  # up to which a product reads its weights once, at the speed of memory
TIMEOUT_S = 60.0  # of the compiler
SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-fopenmp", "-shared", "-fPIC", "-lm")
ISA_FLAGS = {"native": ("-march=native",), "avx2": ("-mavx2", "-mfma", "-mf16c", "-mbmi2")}
# The numbers that kernels.c has for these.
KINDS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.uint8: 4,  # two int4 codes in a byte
}
_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
_ARGUMENTS = {
    "llama_linear": [_POINTER, _INT, *[_POINTER] * 3, *[_LONG] * 4, _INT],
    "llama_attention": [_POINTER, _INT, *[_POINTER] * 6, *[_LONG] * 8, _INT],
}
_SELF_TEST = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).llama_self_test())"
_choice = "auto"


def select(choice: str) -> None:
    """Use the kernels where they are available ("auto"), or never ("torch"), in this process."""
    global _choice
    require(
        choice in CHOICES,
        f"kernels {choice!r:.80}: it must be one of {', '.join(CHOICES)}",
    )
    _choice = choice


@torch.compiler.assume_constant_result  # a compiler cannot trace how they are compiled
def available() -> bool:
    """Are the kernels selected, and compiled for this machine? Compiles them at the first call."""
    return _choice == "auto" and _library() is not None


def can_attend(x: torch.Tensor) -> bool:
    """Is `decode_attention` for queries with the device, dtype and gradient of x?"""
    on_cpu = x.device.type == "cpu" and x.dtype in KINDS
    return on_cpu and not x.requires_grad and available()


@functools.cache
def _library() -> ctypes.CDLL | None:
    if os.name != "posix":
        return None
    isa = os.environ.get("LLAMA_KERNELS_ISA") or "native"
    require(isa in ISA_FLAGS, f"LLAMA_KERNELS_ISA={isa!r:.80}: unset it, or set avx2")
    command = [*shlex.split(os.environ.get("CC") or "cc"), *ISA_FLAGS[isa], *FLAGS]
    try:
        source = SOURCE.read_bytes()
        key = hashlib.sha256(source + f"{command}{_cpu()}".encode()).hexdigest()[:24]
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llama-kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = folder / f"{key}.so"
        _require_own(folder)
        if not file.exists():
            _compile(command, file)
        _require_own(file)
        library = ctypes.CDLL(str(file))
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None
    for name, types in _ARGUMENTS.items():
        getattr(library, name).argtypes = types
    return library


def _cpu() -> str:
    """What a native build depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    names = ("model name", "flags", "Features", "CPU part")
    return "".join(sorted({line for line in lines if line.startswith(names)}))


def _require_own(path: Path) -> None:
    """Whoever may write a library runs code as whoever loads it."""
    stat = path.stat()
    if stat.st_uid != os.getuid() or stat.st_mode & 0o022:
        raise OSError(f"{path} can be written by others")


def _compile(command: list[str], file: Path) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent) as made:
        partial = str(Path(made) / file.name)
        # A library for another CPU ends a process of its own.
        for run in (
            [*command[:1], str(SOURCE), "-o", partial, *command[1:]],
            [sys.executable, "-c", _SELF_TEST, partial],
        ):
            subprocess.run(
                run,
                check=True,
                timeout=TIMEOUT_S,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        os.chmod(partial, 0o700)
        os.replace(partial, file)


def _call(name: str, *arguments: object) -> None:
    library = _library()
    if library is None:
        raise LlamaError("there are no kernels: use kernels='torch'")
    if getattr(library, name)(*arguments, torch.get_num_threads()):
        raise MemoryError(f"no memory for {name}")


def linear(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """x (..., k) times a weight (n, k) of any of the KINDS; in x's dtype.

    int8 and int4 have the scales of `llama.quantize`. x is rounded to 15 bits for them, each row
    with its own scale.
    """
    rows = x.reshape(-1, x.shape[-1]).float().contiguous()
    (m, k), n = rows.shape, weight.shape[0]
    y = torch.empty(m, n, dtype=torch.float32, device="cpu")
    pointers = rows.data_ptr(), KINDS[weight.dtype], weight.data_ptr()
    scale, group = 0, 0
    if scales is not None:
        scale, group = scales.data_ptr(), k // scales.shape[-1] if scales.ndim == 3 else 0
    if m:
        _call("llama_linear", *pointers, scale, y.data_ptr(), m, n, k, group)
    return y.to(x.dtype).view(*x.shape[:-1], n)


def _decode_attention(
    q: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    scale_k: torch.Tensor | None,
    scale_v: torch.Tensor | None,
    rows: torch.Tensor,
    positions: torch.Tensor,
    kv_len: int,
    window: int | None,
) -> torch.Tensor:
    bsz, n_heads, head_dim = q.shape
    n_slots, n_kv_heads = cache_k.shape[1:3]
    floats = q.float().contiguous()
    y = torch.empty_like(floats)
    scales = (0 if scale is None else scale.data_ptr() for scale in (scale_k, scale_v))
    pointers = floats.data_ptr(), KINDS[cache_k.dtype], cache_k.data_ptr(), cache_v.data_ptr()
    last = positions.to(torch.int64).contiguous()
    if bsz:
        first_row = int(rows[0])
        sizes = bsz, n_heads, n_slots, n_kv_heads, head_dim, first_row, kv_len, window or 0
        _call("llama_attention", *pointers, *scales, y.data_ptr(), last.data_ptr(), *sizes)
    return y.to(q.dtype)


_traced_attention = torch.library.custom_op(
    "llama::decode_attention", _decode_attention, mutates_args=()
)


@_traced_attention.register_fake
def _(q: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def decode_attention(
    q: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    scale_k: torch.Tensor | None,
    scale_v: torch.Tensor | None,
    rows: torch.Tensor,
    positions: torch.Tensor,
    kv_len: int,
    window: int | None,
) -> torch.Tensor:
    """Attention of one new token in each row over its row of the cache.

    Args:
        q: (bsz, n_heads, head_dim).
        cache_k, cache_v: contiguous (rows, n_slots, n_kv_heads, head_dim).
        scale_k, scale_v: float16 without the last axis, of an int8 cache; else None.
        rows: (bsz,), consecutive cache rows.
        positions: (bsz,), of the new tokens, whose keys and values are in the cache.
        kv_len: how many slots may be read, at least all that are filled.
        window: attention window in tokens.

    Returns (bsz, n_heads, head_dim) in q's dtype: what `kv_cache.visible` lets each query see.
    """
    attend = _traced_attention if torch.compiler.is_compiling() else _decode_attention
    return attend(q, cache_k, cache_v, scale_k, scale_v, rows, positions, kv_len, window)
