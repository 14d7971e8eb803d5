"""Generate the flags of a command from the signature and the docstring of its API function.

Names, types, choices and defaults come from the signature, the help from the `Args:` section of the docstring. A
function with `**settings` also gets one flag for each of `Command.settings`. cyclopts parses and prints the help.
"""

import inspect
import math
import re
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import docstring_parser
from cyclopts import App, CoercionError, Group, Parameter, Token, convert
from cyclopts.help import DefaultFormatter

from snclr.api.options import describe
from snclr.errors import american, known_spelling, snclr_command
from snclr.runtime.settings import Setting, current_name

if TYPE_CHECKING:
    from cyclopts.help import ColumnSpec, HelpEntry
    from rich.console import Console, ConsoleOptions

_PRECISIONS = {"fp16": "16", "float16": "16", "fp32": "32", "float32": "32", "bfloat16": "bf16", "float64": "64"}
_JSON = Parameter(help="print the result as one JSON object", negative=(), show_default=False)

SettingGroups: TypeAlias = Mapping[str, Mapping[str, Setting]]
"""Settings by group title and name."""


def pretrain_settings() -> SettingGroups:
    """Return the settings of a pre-training. The shown defaults are those of the default recipe."""
    from snclr.recipes import get_recipe
    from snclr.train.config import setting_groups

    defaults = get_recipe("photos").settings
    return {
        title: {name: replace(setting, default=defaults.get(name, setting.default)) for name, setting in group.items()}
        for title, group in setting_groups().items()
    }


@dataclass(frozen=True)
class Command:
    """A command: the function it calls, how its result is printed, and what a signature cannot express."""

    function: Callable[..., Any]
    show: Callable[[Any], None]
    """Print the result."""
    examples: str
    _: KW_ONLY
    flags: Mapping[str, Parameter] = field(default_factory=dict)
    """Aliases and value names of single flags."""
    settings: Callable[[], SettingGroups] = pretrain_settings
    """The settings that the function takes as `**settings`."""
    types: Mapping[str, Any] = field(default_factory=dict)
    """Types on the command line that differ from those in Python."""
    hidden: Collection[str] = ()
    """Settings that the help does not list; the function accepts them, or rejects them with a reason."""
    without: Collection[str] = ()
    """Parameters and settings that are not flags."""
    saved: str = "everything is saved"
    """What is saved after a stop, as printed."""
    keywords: Collection[str] = ()
    """Positional parameters that are flags on the command line."""
    optional: Collection[str] = ()
    """Required parameters that may be omitted on the command line."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Types of flags that the function does not have; their default is None."""
    run: Callable[..., Any] | None = None
    """Called instead of the function, with its arguments and those of `extra`."""
    exit_code: Callable[[Any], int] = lambda result: int(getattr(result, "exit_code", 0))
    """The exit code for a result."""
    to_json: Callable[[Any], Any] = lambda result: result.to_dict() if hasattr(result, "to_dict") else result
    """Convert the result to plain values for `--json`."""
    intro: str = ""
    """Printed before the command starts."""
    needs: Collection[str] = ()
    """Settings that the usage line shows: the command needs them, but a settings file may have them."""
    resume: Callable[[Mapping[str, Any]], Sequence[str]] | None = None
    """The arguments that continue a stopped command, if not those it was started with."""

    def call(self, arguments: inspect.BoundArguments) -> Any:
        """Call the function with the arguments that were given; `--json` sets `quiet`."""
        keywords = dict(arguments.kwargs)
        as_json = keywords.pop("json", False)
        if "quiet" in inspect.signature(self.function).parameters:
            keywords["quiet"] = as_json
        return (self.run or self.function)(*arguments.args, **keywords)

    def continue_with(self, arguments: inspect.BoundArguments, argv: Sequence[str]) -> str:
        """Return the text printed after a stop: what is saved, and the command that continues."""
        given = arguments.arguments
        saved = self.saved if given.get("cache", True) else "features were not cached (--no-cache)"
        command_line = snclr_command(*(argv if self.resume is None else self.resume(given)))
        return f"{saved}. Continue with:\n  {command_line}"


def add_command(app: App, name: str, command: Command, summary: str, position: int) -> None:
    """Add a command with its flags to the application."""

    def target(*args: Any, **kwargs: Any) -> None:
        """Carry the signature for parsing, also by name in `cli.main.parse`; `Command.call` calls the function."""

    describe(target, list(_parameters(command)), "")
    app.command(
        target, name=name, help=summary, help_epilogue=_reflow(command.examples), sort_key=position,
        help_formatter=DefaultFormatter(column_specs=_help_columns),
    )  # fmt: skip


def _help_columns(
    console: "Console", options: "ConsoleOptions", entries: "list[HelpEntry]"
) -> "tuple[ColumnSpec, ...]":
    """Return the columns of a panel of the help. cyclopts would split a flag that is longer than 35 % of the width."""
    from cyclopts.help.specs import get_default_parameter_columns
    from rich.console import Console

    longest = max((len(flag) for entry in entries for flag in entry.all_options), default=0)
    width = max(console.width, math.ceil((longest + 2) / 0.35))  # continued lines are indented by 2
    return get_default_parameter_columns(Console(width=width), options, entries)


def normalize_spelling(argv: Sequence[str], commands: Iterable[str]) -> list[str]:
    """Return the arguments with the command, the flags and some values in their known spelling; other values stay.

    >>> normalize_spelling(["Neighbours", "neighbours", "--neighbours=3", "--method", "MoCo-v3"], ["neighbors"])
    ['neighbors', 'neighbours', '--neighbors=3', '--method', 'mocov3']
    >>> normalize_spelling(["plan", "--precision", "fp16"], ["plan"])
    ['plan', '--precision', '16']
    """
    spellings: dict[str, Callable[[str], str]] = {
        "--method": _known_method,
        "--table": american,
        "--precision": lambda value: _PRECISIONS.get(value.lower(), value),
    }
    result = [known_spelling(name, commands) for name in argv[:1]]
    for token in argv[1:]:
        flag, equals, value = token.partition("=")
        if flag.startswith("--"):
            flag = current_name(flag)
        if flag in spellings:
            value = spellings[flag](value)
        elif result[-1] in spellings:
            flag = spellings[result[-1]](flag)
        result.append(flag + equals + value)
    return result


def _known_method(value: str) -> str:
    from snclr.methods.config import METHODS

    return known_spelling(value, METHODS)


def with_flags(message: str, flags: Mapping[str, str]) -> str:
    """Write the parameters in an error message as flags.

    A name counts as a parameter if it has an underscore, is followed by "=", or starts the message as its subject.

    >>> flags = {"image_size": "--image-size", "epochs": "--epochs", "compile": "--compile"}
    >>> with_flags("image_size must be below epochs=5, not compile=False", flags)
    '--image-size must be below --epochs 5, not --no-compile'
    """
    for name, flag in flags.items():
        off = f"--no-{flag[2:]}"
        word = rf"(?<![\w./:?&'-])(?<!e\.g\. ){name}(?![\w/-]|\.\w)"  # not in a path, URL or example
        message = re.sub(rf"{word}=False\b", off, message)
        message = re.sub(rf"{word}=True\b", flag, message)
        message = re.sub(rf"{word}=", f"{flag} ", message)
        message = re.sub(word if "_" in name else rf"^{word}(?= (must|is) )", flag, message)
    return message


def parameter_names(command: Command) -> list[str]:
    """Return the names of the parameters that are flags."""
    return [parameter.name for parameter in _parameters(command) if parameter.kind is parameter.KEYWORD_ONLY]


def flag_names(command: Command) -> list[str]:
    """Return the flags that the help of a command lists, and --help."""
    every = _spellings(command).items()
    return [flag for name, flags in every if name not in command.hidden for flag in flags] + ["--help"]


def given_flags(command: Command, argv: Sequence[str]) -> dict[str, str]:
    """Return the flag of each parameter, the one in `argv` if it has several."""
    given, every = {word.partition("=")[0] for word in argv}, _spellings(command).items()
    return {name: next((flag for flag in flags if flag in given), flags[0]) for name, flags in every}


def _spellings(command: Command) -> dict[str, list[str]]:
    other = {name: parameter.alias or () for name, parameter in command.flags.items()}
    return {name: [f"--{name.replace('_', '-')}", *other.get(name, ())] for name in parameter_names(command)}


def usage(name: str | None, command: Command | None) -> str:
    """Return the usage line of a command, and the command that prints its help."""
    line = usage_line(name, command) if name and command else "Usage: snclr COMMAND"
    shown = "the options" if name else "the commands"
    return f"{line}\n`{snclr_command(*([name] if name else []), '--help')}` lists {shown}."


def usage_line(name: str, command: Command) -> str:
    """Return the usage line: positional arguments, then required flags; cyclopts has the flags first."""
    arguments, required = [], list(command.needs)
    for parameter in _parameters(command):
        is_required = parameter.default is parameter.empty
        if parameter.kind is parameter.POSITIONAL_ONLY:
            options = command.flags.get(parameter.name, Parameter())
            label = "".join(options.name or ()) or parameter.name.upper().replace("_", "-")
            label += "..." if parameter.name in command.types else ""
            arguments.append(label if is_required else f"[{label}]")
        elif is_required and parameter.name not in required:
            required.append(parameter.name)
    flags = [f"--{setting} {setting.upper()}" for setting in required]
    return " ".join(["Usage: snclr", name, *arguments, *flags, "[OPTIONS]"])


def _reflow(text: str) -> str:
    """Join the lines of each paragraph of prose, to be wrapped to the width of the terminal."""
    blocks = text.strip().split("\n\n")
    return "\n\n".join(block if "\n " in block else block.replace("\n", " ") for block in blocks)


def _parameters(command: Command) -> Iterator[inspect.Parameter]:
    """Yield the function's own parameters, the settings if it takes them, and `json`."""
    declared = inspect.signature(command.function).parameters
    annotations = {name: hint for name, hint in command.function.__annotations__.items() if name != "return"}
    holder: Any = SimpleNamespace(__annotations__=annotations)
    hints = typing.get_type_hints(holder, command.function.__globals__)
    docs = {param.arg_name: param.description for param in docstring_parser.parse_from_object(command.function).params}
    # Settings first: in a group that both share, --data comes before --config.
    for name, parameter in sorted(declared.items(), key=lambda item: item[1].kind is item[1].KEYWORD_ONLY):
        if parameter.kind is parameter.VAR_KEYWORD:
            yield from _settings(command, {*declared, *command.without})
        elif name != "quiet" and name not in command.without:
            is_flag = parameter.kind is parameter.KEYWORD_ONLY or name in command.keywords
            kind = parameter.KEYWORD_ONLY if is_flag else parameter.POSITIONAL_ONLY
            default = None if name in command.optional else parameter.default
            text = Parameter(help=_as_phrase(docs.get(name) or ""))
            annotation = _annotated(command, name, hints[name], default, text)
            yield inspect.Parameter(name, kind, default=default, annotation=annotation)
    for name, annotation in command.extra.items():
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
    as_json = _annotated(command, "json", bool, False, _JSON)
    yield inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=as_json)


def _as_phrase(sentence: str) -> str:
    """Turn a sentence of a docstring into a phrase of the help.

    >>> _as_phrase("Number of neighbors\\n that vote.")
    'number of neighbors that vote'
    """
    text = " ".join(sentence.split()).removesuffix(".")
    return text[:1].lower() + text[1:] if text[1:2].islower() or text.startswith("A ") else text


def _settings(command: Command, without: Collection[str]) -> Iterator[inspect.Parameter]:
    """Yield one parameter for each setting."""
    for title, settings in command.settings().items():
        group = Group.create_ordered(title)
        for name, setting in settings.items():
            if name not in without:
                options = Parameter(help=_as_phrase(setting.help), group=group, show=name not in command.hidden)
                annotation = _annotated(command, name, setting.hint, setting.default, options)
                yield inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=setting.default, annotation=annotation
                )


def _annotated(command: Command, name: str, kind: Any, default: Any, *options: Parameter) -> Any:
    """Attach to a type what cyclopts needs for the flag; defaults that mean "nothing" are not shown."""
    kind = command.types.get(name, kind)
    members = typing.get_args(kind)
    shown = Parameter(show_default=not (default is None or default is False or default in ("", ())))
    if isinstance(kind, UnionType) and members[0] is str:  # such as `str | Path`: the function converts text itself
        kind, options = str | None, (*options, *([Parameter(metavar="PATH")] if Path in members else []))
    if int in (kind, *members) and float not in members and typing.get_origin(kind) is not list:
        options = (*options, Parameter(converter=_whole_number))
    if name in command.flags:
        options = (*options, command.flags[name])
    parts = (kind, shown, *options)
    return Annotated[parts]


def _whole_number(kind: Any, tokens: Sequence[Token]) -> Any:
    """Convert a value; cyclopts would round 1.5 to 2."""
    if "." in tokens[0].value:
        raise CoercionError(token=tokens[0], target_type=kind)
    return convert(kind, tokens)
