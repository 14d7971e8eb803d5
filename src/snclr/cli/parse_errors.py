"""Word the errors of the command line's parser: what was given, what is allowed, what to do."""

import difflib
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence

from cyclopts import CycloptsError, MissingArgumentError, UnknownOptionError, UnusedCliTokensError

from snclr.errors import did_you_mean
from snclr.exporters.format import NAMES

_CHOICE = re.compile(r'(Invalid value "(.*)" for \S+)\. Choose from: (.*?)\.(?: Did you mean .*)?$', re.DOTALL)
"""The parser's message about a value that is not among the choices, with its suggestion."""


def reason(
    error: CycloptsError, name: str | None, argv: Sequence[str], flags: Collection[str], instead: Mapping[str, str]
) -> str:
    """Return what is wrong with `argv`, the arguments of the command `name`, which has these `flags`.

    `instead` has advice for flags that the command does not have.
    """
    for flag in (argument.partition("=")[0] for argument in argv):
        if flag in instead:
            return f"unknown option {flag}. {instead[flag]}."
    if isinstance(error, UnusedCliTokensError) and (tokens := error.unused_tokens):
        to_formats = name == "export" and "--to" in argv
        hint = ". Separate formats by commas: --to timm,onnx" if to_formats else _as_flags(tokens, argv, flags)
        return f"unexpected argument {shlex.join(tokens)}{hint}"
    if isinstance(error, UnknownOptionError):
        return _unknown_option((error.token.keyword or error.token.value).partition("=")[0], flags)
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        given = [flag for flag in error.argument.names if flag in argv]
        typo = re.search(r"\. Did you mean .*", str(error))
        text = f"{given[0]} needs a value" if given else f"{error.argument.name} is missing"
        if name == "export" and error.argument.name == "--to":
            return f"{text}; choose one or more of {', '.join(NAMES)}"
        return text if given or not typo else text + typo.group()
    text = str(error).removeprefix(f'Command "{name}" ').replace("Unknown command", "unknown command")
    if choice := _CHOICE.match(text):  # our suggestion also ignores case, hyphens and underscores
        start, value, known = choice.groups()
        hint = did_you_mean(value, re.findall(r"[\w-]+", known))
        text = f"{start}{hint}. Choose from: {known}."
    text = re.sub(r"\|Literal\[([^]]*)\]", r" or \1", text)
    text = re.sub(r"unable to convert (\S+) into int\b", r"\1 is not a whole number", text)
    return re.sub(r"unable to convert (\S+) into float\b", r"\1 is not a number", text)


def _as_flags(tokens: Sequence[str], argv: Sequence[str], flags: Collection[str]) -> str:
    """Return a question that has the arguments as flags, if the first is a path and they are not given as flags.

    Shards whose braces the shell has expanded get other advice.
    """
    if tokens[0].startswith(("–", "—")):  # of a text editor
        return f". Did you mean --{tokens[0].lstrip('–—')}, with two hyphens?"
    if all(token.endswith(".tar") for token in tokens) and "--data" in argv:
        return ". Put quotes around the shards, so that the shell keeps the braces: --data 'shards/{000..146}.tar'"
    tokens = [" ".join(tokens)] if os.path.exists(" ".join(tokens)) else tokens  # a path without quotes
    resumed = "--resume" in argv and os.path.exists(os.path.join(tokens[0], "config.yaml"))
    free = [flag for flag in (["--out"] if resumed else ["--data", "--out"]) if flag in flags and flag not in argv]
    if not free or not os.path.exists(tokens[0]) or len(tokens) > len(free):
        return ""
    words = [word for pair in zip(free, tokens, strict=False) for word in pair]
    return f". Did you mean {shlex.join(words)}?"


def _unknown_option(given: str, flags: Collection[str]) -> str:
    """Return the unknown flag with a known one: a longer one with the same beginning, or a similar one."""
    known = sorted(flag for flag in flags if flag.startswith(given))[:3] if len(given) > 3 else []
    known = known or difflib.get_close_matches(given, flags, n=1, cutoff=0.7)
    return f"unknown option {given}." + (f" Did you mean {' or '.join(known)}?" if known else "")
