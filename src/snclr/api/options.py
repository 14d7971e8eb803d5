"""Keyword arguments that the evaluation functions share, declared once."""

import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypedDict, TypeVar

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class RankOptions(TypedDict, total=False):
    """Where an evaluation runs. Each annotation has the type, the default and the description."""

    workers: Annotated[int, 0, "Dataloader worker processes per rank."]
    device: Annotated[str, "auto", "Device: cpu, cuda, mps, cuda:1 for the second GPU, or auto: a GPU if there is one."]
    devices: Annotated[str | int, "1", "Ranks per node, each on its own device: a number, or auto for all GPUs."]
    nodes: Annotated[int, 1, "Number of nodes."]
    quiet: Annotated[bool, False, "Print no progress."]


class SessionOptions(RankOptions, total=False):
    """Where an evaluation runs, and whether it caches features."""

    cache: Annotated[bool, True, "Read and write features in RUN/evaluation/features."]


class EncodingOptions(SessionOptions, total=False):
    """Where an evaluation of frozen features runs, and in which precision."""

    precision: Annotated[
        Literal["32", "bf16", "bf16-mixed"],
        "32",
        "Precision of the encoder: 32, or bf16 on GPUs; features have 32 bits.",
    ]


def with_options(options: type[RankOptions]) -> Callable[[FunctionT], FunctionT]:
    """Show the `**options` of a function as single parameters in its signature and its docstring."""

    def expand(function: FunctionT) -> FunctionT:
        parameters = list(inspect.signature(function).parameters.values())[:-1]
        text = inspect.cleandoc(function.__doc__ or "").partition("\n    options:")[0]
        for name, hint in typing.get_type_hints(options, include_extras=True).items():
            default, description = hint.__metadata__
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(name, kind, default=default, annotation=hint.__origin__))
            text += f"\n    {name}: {description}"
        return describe(function, parameters, text)

    return expand


def describe(function: FunctionT, parameters: Sequence[inspect.Parameter], text: str) -> FunctionT:
    """Replace the shown parameters and the docstring of a function."""
    signature = inspect.signature(function).replace(parameters=parameters)
    function.__doc__, function.__signature__ = text, signature  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": signature.return_annotation}
    return function
