"""Errors that are shown to the user without a traceback, and parts of messages."""

import difflib
import itertools
import shlex
from collections.abc import Iterable
from pathlib import Path

_MAX_ENTRIES = 10_000
"""Entries of a folder that are compared with a misspelled name."""


class UserError(ValueError):
    """Invalid input. The message states what was given, what is allowed and what to do."""


class OtherRankError(UserError):
    """Another rank of the job failed and reported the reason; this rank stops as well."""


def snclr_command(*arguments: object) -> str:
    """Return a command line to paste into a shell.

    >>> snclr_command("knn", "my run")
    "snclr knn 'my run'"
    """
    return shlex.join(["snclr", *map(str, arguments)])


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def first_names(names: Iterable[str]) -> str:
    """Return the first three names.

    >>> first_names("abcd")
    'a, b, c …'
    """
    every = list(names)
    return ", ".join(every[:3]) + (" …" if len(every) > 3 else "")


def american(name: str) -> str:
    """Return the name in the spelling of the flags and settings.

    >>> american("--neighbours")
    '--neighbors'
    """
    for british, spelling in (("neighbour", "neighbor"), ("normalise", "normalize"), ("centre", "center")):
        name = name.replace(british, spelling)
    return name


def known_spelling(name: str, known: Iterable[str]) -> str:
    """Return the known name that differs from `name` only in case, hyphens and underscores, or else `name`.

    >>> known_spelling("MoCo-v3", ["mocov2", "mocov3"])
    'mocov3'
    """
    return next((one for one in known if _plain(one) == _plain(name)), name)


def _plain(name: str) -> str:
    return american(name.lower()).replace("-", "").replace("_", "")


def count(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> count(1, "image"), count(1200, "image"), count(2, "class")
    ('1 image', '1,200 images', '2 classes')
    """
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number:,} {noun if number == 1 else plural}"


def similar_path(path: Path) -> str:
    """Return " (did you mean 'x'?)" for an existing path that differs from `path` in one misspelled part, or "".

    >>> similar_path(Path(__file__).with_name("eror.py")).endswith("errors.py'?)")
    True
    """
    parents = [*reversed(path.parents), path]
    missing = next((part for part in parents if not part.exists()), None)
    if missing is None:
        return ""
    try:
        names = [entry.name for entry in itertools.islice(missing.parent.iterdir(), _MAX_ENTRIES)]
    except OSError:
        return ""
    for name in difflib.get_close_matches(missing.name, names, n=3):
        found = missing.with_name(name) / path.relative_to(missing)
        if found.exists():
            return f" (did you mean {str(found)!r}?)"
    return ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the known name closest to `name`, or "" if none is close.

    Case, hyphens and underscores are ignored.

    >>> did_you_mean("resnet5O", ["resnet50", "vit_small"])
    " (did you mean 'resnet50'?)"
    >>> did_you_mean("Sim-CLRR", ["snclr", "simclr"])
    " (did you mean 'simclr'?)"
    """
    names = {_plain(one): one for one in known}
    close = difflib.get_close_matches(_plain(name), names, n=1)
    return f" (did you mean {names[close[0]]!r}?)" if close else ""
