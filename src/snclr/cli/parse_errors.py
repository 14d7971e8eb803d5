"""Word the errors of the command line's parser: what was given, what is allowed, what to do."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from cyclopts import MissingArgumentError, UnknownOptionError, UnusedCliTokensError

from snclr.errors import did_you_mean
from snclr.exporters.format import NAMES

if TYPE_CHECKING:
    from cyclopts import CycloptsError

_OTHER_WORDS = {
    ("pretrain", "--model"): "The model is --encoder",
    ("plan", "--model"): "The model is --encoder",
    ("explore", "--no-open"): "It opens no browser, only prints the address",
    ("explore", "--no-browser"): "It opens no browser, only prints the address",
    ("pack", "--data"): "Give the folder without a flag: snclr pack FOLDER --shards OUT",
    ("pack", "--out"): "The output folder is --shards",
    ("export", "--format"): "The formats are --to",
    ("knn", "--neighbors"): "The number of neighbors is --k",
    ("fewshot", "--shots"): "The number is --labels-per-class",
    ("search", "--image"): "Give the image without a flag: snclr search RUN IMAGE",
    ("explain", "--image"): "Give the image without a flag: snclr explain RUN IMAGE",
}
"""What to write instead of a flag that other commands or tools have."""
_CHOICE = re.compile(r'(Invalid value "(.*)" for \S+)\. Choose from: (.*?)\.(?: Did you mean .*)?$', re.DOTALL)
"""The parser's message about a value that is not among the choices, with its suggestion."""


def reason(error: CycloptsError, name: str | None, argv: Sequence[str], flags: Collection[str]) -> str:
    """Return what is wrong with `argv`, the arguments of the command `name`, which has these `flags`."""
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        if name == "export" and "--to" in argv:
            return f"unexpected argument {shlex.join(error.unused_tokens)}. Separate formats by commas: --to timm,onnx"
        return f"unexpected argument {shlex.join(error.unused_tokens)}{_as_flags(error.unused_tokens, argv, flags)}"
    if isinstance(error, UnknownOptionError):
        return _unknown_option(error, name, flags)
    for flag in argv:
        if advice := _OTHER_WORDS.get((name or "", flag)):
            return f"unknown option {flag}. {advice}."
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
    """Return a question that has the arguments as flags, if the first is a path and they are not given as flags."""
    free = [flag for flag in ("--data", "--out") if flag in flags and flag not in argv]
    if not free or not os.path.exists(tokens[0]) or len(tokens) > len(free):
        return ""
    words = [word for pair in zip(free, tokens, strict=False) for word in pair]
    return f". Did you mean {shlex.join(words)}?"


def _unknown_option(error: UnknownOptionError, name: str | None, flags: Collection[str]) -> str:
    """Return the unknown flag with a known one: a longer one with the same beginning, or a similar one."""
    given = (error.token.keyword or error.token.value).partition("=")[0]
    if advice := _OTHER_WORDS.get((name or "", given)):
        return f"unknown option {given}. {advice}."
    longer = sorted(flag for flag in flags if flag.startswith(given)) if len(given) > 3 else []
    if longer:
        return f"unknown option {given}. Did you mean {' or '.join(longer[:3])}?"
    close = difflib.get_close_matches(given, flags, n=1, cutoff=0.7)
    return f"unknown option {given}." + (f" Did you mean {close[0]}?" if close else "")
