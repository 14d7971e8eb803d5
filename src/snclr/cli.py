"""The command line: it finds the command and prints its errors. Each command is a file in `commands/`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

# name → (module in snclr.commands, one line of help). The modules are imported only when their command is used.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo", "see it work: pretrain, evaluate and draw on images that come with the package"),
    "pretrain": ("pretrain", "train an encoder on a folder of images, without labels"),
    "plan": ("plan", "say what a run would take on this machine: time, memory, how long a queue entry lives"),
    "knn": ("knn", "evaluate a run by weighted nearest neighbours"),
    "linear": ("linear", "evaluate a run by a linear classifier on its frozen features"),
    "neighbors": ("neighbors", "draw images with their nearest neighbours and positiveness"),
    "export": ("export", "write the encoder for torchvision, timm, detectron2, mmdet, ONNX; each file is checked"),
    "finetune": ("finetune", "evaluate a run by fine-tuning it on a few labels"),
    "detect": ("detect", "evaluate a run as the backbone of Mask R-CNN, on a COCO folder"),
    "embed": ("embed", "write the features of every image to a file"),
    "search": ("search", "find the images most similar to one"),
    "explain": ("explain", "show what the loss of one image is made of, neighbour by neighbour"),
    "report": ("report", "write one page about a run: curves, neighbours, a map, results"),
    "compare": ("compare", "train several methods under equal conditions and compare them, with spread"),
    "ablate": ("ablate", "repeat one of the paper's ablation tables on your images"),
    "pack": ("pack", "write a folder of images as WebDataset shards, with hashes"),
    "recipes": ("lists", "list the named settings"),
    "encoders": ("lists", "list the encoders"),
    "methods": ("lists", "list the methods"),
}


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the examples as written, and shows a default where there is one that the help does not state itself."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        nothing = action.default is None or action.default is False or action.default == argparse.SUPPRESS
        silent = nothing or "(default" in text  # a default of 0 is shown
        return text if silent else f"{text} (default: %(default)s)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 2 for bad input, 130 or 143 for a stop."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # Before torch is loaded: its threads may spin for microseconds while they wait, not for milliseconds. Where other
    # programs want the processor too, long spinning takes it from the very thread that is waited for.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    parser, chosen = _parser(argv)
    arguments = parser.parse_args(argv)
    if chosen is None:
        parser.print_help()
        return 0
    from snclr.errors import OtherProcessError, UserError
    from snclr.train.signals import code_of_this_process, early_warning_ends

    try:
        with early_warning_ends():
            return code_of_this_process(int(arguments.handler(arguments)))
    except OtherProcessError:  # the one that failed prints its reason
        return 2
    except UserError as error:
        print(f"snclr {chosen}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return code_of_this_process(130)
    except BrokenPipeError:  # e.g. `snclr encoders | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, str | None]:
    """The parser, with the arguments of the one command that is used."""
    parser = argparse.ArgumentParser(
        prog="snclr",
        description="Self-supervised image encoders with soft neighbours (SNCLR, ICLR 2023).",
        epilog="examples:\n  snclr demo\n  snclr pretrain --data my-photos/ --out runs/photos\n"
        "  snclr neighbors runs/photos\n\n`snclr COMMAND --help` explains each command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    # The dots make it as wide as the longest command, whose help then stands beside it.
    commands = parser.add_subparsers(title="commands", metavar="COMMAND ...")
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, (module, text) in COMMANDS.items():
        sub = commands.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", formatter_class=_Formatter
        )
        if name == chosen:
            importlib.import_module(f"snclr.commands.{module}").add_arguments(sub, name)
    return parser, chosen


def _version() -> str:
    from snclr import __version__

    return f"snclr {__version__}"


if __name__ == "__main__":
    sys.exit(main())
