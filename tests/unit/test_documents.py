"""What the documents tell to type works: the README's Python runs, command lines parse, links lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest

from snclr.cli import COMMANDS, _parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
# A line of its own, behind a prompt, or behind a launcher; what a command answers ("snclr pretrain: …") is none.
COMMAND = re.compile(rf"^(?:\$ )?(?:\S.* -m )?snclr ((?:{'|'.join(COMMANDS)})(?: .*)?)$")


def typed(page):
    """The words of every `snclr` command line in the page's blocks of code, up to a pipe or a comment."""
    for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            if found := COMMAND.match(line.strip()):
                words = shlex.split(found[1].replace(" …", ""), comments=True)
                yield words[: next((at for at, word in enumerate(words) if word in {"|", ">", "&", "&&"}), None)]


def test_the_loop_in_the_readme_runs_and_is_short():
    (block,) = re.findall(r"```python\n(.*?)```", PAGES[0].read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line for line in block.splitlines() if line.strip()]
    assert len(lines) < 25
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    queue = names["criterion"].queue
    assert len(queue) == 20 * 32
    assert names["loss"].isfinite()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_line_is_one(page, capsys):
    for words in typed(page):
        words = ["0" if word == "N" else word for word in words]  # N stands for any number
        try:
            _parser(words)[0].parse_args(words)
        except SystemExit as end:
            if end.code:
                pytest.fail(f"snclr {shlex.join(words)}\n{capsys.readouterr().err}")


def test_the_command_lines_are_found():
    assert sum(len(list(typed(page))) for page in PAGES) > 70
    assert ["knn", "runs/photos", "--data", "labelled-photos/"] in list(typed(PAGES[0]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []
