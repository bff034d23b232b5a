"""The bodies of the HTTP API, in OpenAI's words."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from llama.chat import Message
from llama.sampling import SamplingParams

# What would change the answer and is not here, and the one value that may be passed all the same.
UNSUPPORTED: dict[str, Any] = {
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "none",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "audio": None,
    "suffix": "",
    "prediction": None,
    "web_search_options": None,
}

Number = Annotated[float, Field(allow_inf_nan=False)]
Ids = list[Annotated[int, Field(ge=0)]]
Text = Annotated[str, Field(max_length=4_000_000)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None


class StreamOptions(BaseModel):
    include_usage: bool = False


class Generation(Body):
    """What both kinds of completion take."""

    max_tokens: Annotated[int | None, Field(ge=0, le=2**31)] = None
    temperature: Annotated[Number | None, Field(ge=0, le=2)] = None
    top_p: Annotated[Number | None, Field(ge=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0, le=2**31)] = None
    min_p: Annotated[Number | None, Field(ge=0, le=1)] = None
    repetition_penalty: Annotated[Number | None, Field(gt=0, le=100)] = None
    presence_penalty: Annotated[Number | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[Number | None, Field(ge=-2, le=2)] = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    n: Annotated[int | None, Field(ge=1, le=128)] = None
    seed: Annotated[int | None, Field(ge=-(2**62), le=2**62)] = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse_unsupported(cls, body: Any) -> Any:
        """A field that would change the answer, and that this server lacks, is an error."""
        for name, harmless in UNSUPPORTED.items() if isinstance(body, dict) else ():
            if body.get(name) not in (None, harmless):
                raise ValueError(f"{name} is not supported: leave it out")
        return body

    def params(self, choice: int, seed: int, **more: Any) -> SamplingParams:
        """Those of one choice. Raises LlamaError."""
        names = ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            logit_bias={int(id): bias for id, bias in (self.logit_bias or {}).items()},
            seed=seed + choice,
            stop=stop,
            **given,
            **more,
        )

    def first_seed(self) -> int:
        return secrets.randbits(62) if self.seed is None else self.seed

    @model_validator(mode="after")
    def require_ids(self) -> Any:
        """The keys of logit_bias are token ids."""
        for key in self.logit_bias or {}:
            if not (key.isdecimal() and len(key) < 10):
                raise ValueError(f"logit_bias has the key {key!r:.80}: its keys are token ids")
        return self


class Completion(Generation):
    prompt: Text | Ids | list[Text] | list[Ids] = "<s>"
    echo: bool | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    best_of: Annotated[int | None, Field(ge=1, le=128)] = None


class Part(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: Text


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[Part]

    def message(self) -> Message:
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class Chat(Generation):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=0, le=2**31)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None


class Embeddings(Body):
    input: Text | Ids | list[Text] | list[Ids]
    encoding_format: Literal["float", "base64"] = "float"
    pooling: Literal["mean", "last"] = "mean"


class Tokenize(Body):
    prompt: Text
    add_special_tokens: bool = True


class Detokenize(Body):
    tokens: Ids
