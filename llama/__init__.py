"""The reference inference library for Llama 2."""

from llama.errors import LlamaError
from llama.generation import Dialog, Llama
from llama.model import ModelArgs, Transformer
from llama.tokenizer import Tokenizer

__all__ = ["Dialog", "Llama", "LlamaError", "ModelArgs", "Tokenizer", "Transformer"]
