"""The command line: text to a function's arguments, a mistake to one line."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import sys
import time
import typing
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeAlias

import fire

from llama.errors import LlamaError
from llama.generation import STORIES, Llama
from llama.memory import fitting_context
from llama.sampling import SamplingParams

Command: TypeAlias = Callable[..., None]

# What an option of each type is made of, and what to call that type. Other types are text.
NUMBERS: dict[type, tuple[Callable[[str], Any], str]] = {
    bool: ({"True": True, "False": False}.__getitem__, "True or False"),
    int: (int, "a whole number"),
    float: (float, "a number"),
}


def run(command: Command | dict[str, Command], name: str | None = None) -> None:
    """Call `command`, or the one that the command line names, with the arguments given there.

    A LlamaError ends the process with one line on standard error and status 1, on rank 0 for all
    ranks. Ctrl-C, and a reader that has gone away, end it without a word.
    """
    for stream, errors in ((sys.stdout, "backslashreplace"), (sys.stdin, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)  # the terminal may lack a character
    try:
        for call in parse(command, name, sys.argv[1:]):
            call()
        sys.stdout.flush()
    except LlamaError as error:
        if int(os.environ.get("RANK", 0)):
            time.sleep(10)  # if rank 0 made the same mistake, the launcher ends this rank meanwhile
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)  # as after SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        sys.exit(141)  # as after SIGPIPE


def parse(
    command: Command | dict[str, Command], name: str | None, words: list[str]
) -> list[Command]:
    """The call that `words` ask for; none if they ask for help, which is printed.

    Fire calls a function before it looks at the options that are left over, so it gets a function
    that only notes the call.

    Raises:
        LlamaError: an unknown command or option, or a value of the wrong type.
    """
    name = name or Path(sys.argv[0]).name
    if {"-h", "--help"} & {*words} or (isinstance(command, dict) and not words):
        print(help_text(command, name, words))
        return []
    calls: list[Command] = []

    def deferred(function: Command) -> Command:
        @wraps(function)
        def note(*args: object, **options: object) -> None:
            calls.append(partial(function, *args, **options))

        return fire.decorators.SetParseFns(
            **{n: partial(convert, n, hint) for n, hint in hints(function).items()}
        )(note)

    component: Any = (
        {word: deferred(function) for word, function in command.items()}
        if isinstance(command, dict)
        else deferred(command)
    )
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            # Fire's own flags end the line: a lone "-" is a value, "--" is not ours.
            fire.Fire(component, [*words, "--", "--separator", "\n"], name)
    except fire.core.FireExit as end:
        why = end.trace.elements[-1].ErrorAsStr()
        raise LlamaError(f"{why} (--help lists what there is)") from end
    return calls


def help_text(command: Command | dict[str, Command], name: str, words: list[str]) -> str:
    """What `--help` prints: a line for each command, or for each option, from the docstrings."""
    if isinstance(command, dict):
        word = next((word for word in words if word in command), None)
        if word is not None:
            return help_text(command[word], f"{name} {word}", [])
        lines = [f"{word:9} {_doc(function)[0]}" for word, function in command.items()]
        return "\n  ".join([f"usage: {name} COMMAND [--help]", *lines])
    first, texts = _doc(command)
    lines, required = [], []
    for parameter in inspect.signature(command).parameters.values():
        option = f"--{parameter.name}"
        if parameter.default is parameter.empty:
            required.append(option if parameter.kind == parameter.KEYWORD_ONLY else parameter.name)
        elif parameter.default is not None:
            option += f"={parameter.default}"
        lines.append(f"{option:24} {texts.get(parameter.name, '')}".rstrip())
    return "\n  ".join([f"usage: {' '.join([name, *required])} [options]\n\n{first}\n", *lines])


def _doc(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The first line of a docstring, and what it says of each parameter."""
    text = inspect.getdoc(function) or ""
    found = re.findall(r"^( *)(\w+(?:, \w+)*): (.*(?:\n\1 +.*)*)", text, re.MULTILINE)
    texts = {n: re.sub(r"\s+", " ", said) for _, names, said in found for n in names.split(", ")}
    return text.partition("\n")[0], texts


def hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The type of each parameter."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    return {parameter.name: parameter.annotation for parameter in parameters}


def convert(name: str, hint: Any, text: str) -> Any:
    """`text` as the type of a parameter: unchanged if that may be a str or a path.

    Raises:
        LlamaError: not a number, where one is expected.
    """
    kinds = typing.get_args(hint) or (hint,)
    kind = next((kind for kind in (str, *NUMBERS) if kind in kinds), str)
    if kind is str:
        return text
    if text == "None" and type(None) in kinds:
        return None
    convert, expected = NUMBERS[kind]
    try:
        return convert(text)
    except (KeyError, ValueError) as error:
        raise LlamaError(f"--{name} {text!r:.80}: it must be {expected}") from error


def with_model(command: Command, *, max_batch_size: int = 1) -> Command:
    """`command`, with the options of `Llama.build` and `SamplingParams` among its own.

    They replace its parameters `build`, a call that builds the model, and `params`. Without
    --max_seq_len the context is the model's own, as far as memory allows.
    """
    own = dict(inspect.signature(command, eval_str=True).parameters)
    facts = hints(Llama.build)
    sampling = sampling_options() if own.pop("params", None) is not None else {}
    del own["build"]

    @wraps(command)
    def built(*args: Any, **options: Any) -> None:
        arguments = {name: options[name] for name in facts if name in options}
        options = {name: v for name, v in options.items() if name in own or name not in facts}
        arguments["max_batch_size"] = arguments.get("max_batch_size") or max_batch_size
        if sampling:
            given = {name: options.pop(name) for name in sampling if name in options}
            options["params"] = with_options(SamplingParams(), given)

        def build() -> Llama:
            if arguments.get("max_seq_len") is None:
                known = {n: v for n, v in arguments.items() if n in hints(fitting_context)}
                folder = arguments.get("ckpt_dir") or STORIES
                arguments["max_seq_len"] = fitting_context(folder, **known)
            return Llama.build(**arguments)

        command(build, *args, **options)

    defaults = vars(SamplingParams()) | {"stop": None}
    defaults |= {p.name: p.default for p in inspect.signature(Llama.build).parameters.values()}
    added = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hint
        )
        for name, hint in (sampling | facts).items()
        if name not in own
    ]
    built.__signature__ = inspect.Signature([*own.values(), *added])  # type: ignore[attr-defined]
    documents = [command, SamplingParams, Llama.build] if sampling else [command, Llama.build]
    built.__doc__ = "\n".join(inspect.getdoc(document) or "" for document in documents)
    return built


def sampling_options() -> dict[str, Any]:
    """The fields of `SamplingParams` that have a place on a command line, and their types."""
    fields = {name: hint for name, hint in hints(SamplingParams).items() if name != "seed"}
    numbers = {float, int, int | None}
    options = {n: hint for n, hint in fields.items() if hint in numbers and "logprobs" not in n}
    return {**options, "stop": str | None}


def with_options(params: SamplingParams, options: dict[str, Any]) -> SamplingParams:
    """`params` with some of the `sampling_options`."""
    if "stop" in options:
        options = options | {"stop": [options["stop"]] if options["stop"] else []}
    return replace(params, **options)
