"""Print the results of `snclr recipes`, `encoders`, `methods` and `studies`."""

from typing import Any

from snclr.api.lists import list_encoders, list_methods, list_recipes, list_studies
from snclr.cli.flags import Command
from snclr.cli.output import print_table


def _show(entries: dict[str, Any] | list[str]) -> None:
    if isinstance(entries, list):
        print("\n".join(entries))
    else:
        print_table(["", ""], ((name, str(value)) for name, value in entries.items()), left=2)


COMMANDS = {
    "recipes": Command(list_recipes, _show, "Example:\n  snclr recipes cifar\n"),
    "encoders": Command(list_encoders, _show, "Example:\n  snclr encoders vit_small\n"),
    "methods": Command(list_methods, _show, "Example:\n  snclr methods byol\n"),
    "studies": Command(list_studies, _show, "Example:\n  snclr studies table-1-resnet50\n"),
}
