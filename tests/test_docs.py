"""The documentation works as written: Python examples run, command lines parse, links and generated tables resolve."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cyclopts import CycloptsError

import snclr
from snclr.cli.flags import parameter_names
from snclr.cli.main import COMMANDS, load_command, parse
from snclr.methods.config import METHODS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A command line starts a line, or follows a prompt, environment variables or a launcher (`torchrun ... -m snclr`).
COMMAND = re.compile(rf"^(?:\$ )?(?:\S.* (?:-m )?)?snclr ((?:{'|'.join(COMMANDS)})(?: .*)?)$")


def name(page):
    return page.relative_to(ROOT).as_posix()


def code_blocks(page, language):
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def command_lines(page):
    """Yield the arguments of every `snclr` command in a page's code blocks, up to a pipe or a comment."""
    for block in code_blocks(page, r"(?!python)\w*"):
        for line in block.replace("\\\n", " ").splitlines():
            if found := COMMAND.match(line.strip()):
                arguments = shlex.split(found[1].replace(" ...", ""), comments=True)
                end = next((i for i, argument in enumerate(arguments) if argument in {"|", ">", "&", "&&"}), None)
                yield arguments[:end]


def test_the_readme_loop_runs_and_is_short():
    (block,) = code_blocks(README, "python")
    assert len([line for line in block.splitlines() if line.strip()]) < 25
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    assert len(names["criterion"].queue) == 20 * 32
    assert names["loss"].isfinite()


@pytest.mark.parametrize("number", [0, 1])
def test_the_examples_of_the_method_page_run(number, capsys):
    block = code_blocks(ROOT / "docs" / "method" / "snclr.md", "python")[number]
    names: dict[str, object] = {}
    exec(compile(block, "snclr.md", "exec"), names)
    assert names["loss"].isfinite()
    assert "torch.Size" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_line_parses(page):
    for arguments in command_lines(page):
        arguments = [re.sub(r"\bN\b", "0", argument) for argument in arguments]  # N stands for a number
        try:
            parse(arguments)
        except CycloptsError as error:
            pytest.fail(f"snclr {shlex.join(arguments)}\n{error}")


def test_the_reference_has_every_public_name():
    text = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    assert [one for one in snclr.__all__ if not re.search(rf"^::: snclr\S*\.{one}$", text, re.MULTILINE)] == []


def test_the_readme_names_every_command():
    cells = re.findall(r"^\| (`snclr .*?) \|", README.read_text(encoding="utf-8"), re.MULTILINE)
    named = {word for cell in cells for word in re.findall(r"[a-z]+", cell)}
    assert sorted(COMMANDS.keys() - named) == []


def test_command_lines_are_found():
    assert sum(len(list(command_lines(page))) for page in PAGES) > 70
    assert ["knn", "runs/photos", "--data", "labeled-photos/"] in list(command_lines(README))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_relative_link_exists(page):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_flag_of_a_sentence_exists(page):
    """Flags in inline code are flags of snclr; those of other programs are listed here."""
    known = {flag for command in map(load_command, COMMANDS) for flag in flags_of(command)}
    known |= {"--help", "--logdir", "--strict", "--write", "--x", "--y"}  # snclr, tensorboard, mypy, benchmarks, atlas
    known |= {"--max-restarts", "--rdzv-conf", "--local-addr", "--signal", "--requeue"}  # torchrun, SLURM
    known |= {"--gpus-per-node", "--gpus-per-task", "--only", "--share"}
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text)) - known) == []


def flags_of(command):
    names = [name.replace("_", "-") for name in parameter_names(command)]
    return [f"--{prefix}{name}" for name in names for prefix in ("", "no-")]


@pytest.mark.parametrize("page", [ROOT / "ARCHITECTURE.md", ROOT / "docs" / "method" / "paper-to-code.md"], ids=name)
def test_every_function_of_a_page_exists(page):
    """`file.py: name, Class.name` names a file below src/snclr, and definitions in it."""
    references = re.findall(r"`([\w/]+\.py): ([^`]+)`", page.read_text(encoding="utf-8"))
    assert len(references) > 10
    for file, names in references:
        source = (ROOT / "src" / "snclr" / file).read_text(encoding="utf-8")
        for part in re.findall(r"\w+", names):
            assert re.search(rf"^\s*(?:def|class) {part}\b|^\s*{part}\b.*[:=]", source, re.MULTILINE), f"{file}: {part}"


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("snclr", "supervised")])
def test_every_rival_has_its_equation_its_official_code_and_the_differences(method):
    """A paragraph that starts with the name, or for MAE and CAE a section."""
    text = (ROOT / "docs" / "method" / "methods.md").read_text(encoding="utf-8")
    parts = re.findall(
        rf"^\*\*`{method}`\*\*.*?(?=\n\n)|^## {method.upper()}\n.*?(?=^## )", text, re.DOTALL | re.MULTILINE
    )
    (part,) = parts
    assert re.search(r"Eq\. \d|Section \d|^loss = ", part, re.MULTILINE)
    assert "https://github.com/" in part or "no official code" in part
    assert re.search(r"[Dd]ifference", part) or "no official code" in part


def test_the_site_builds_without_warnings(tmp_path):
    arguments = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = re.sub(r"<[^>]+>", "", (tmp_path / "site" / "reference" / "settings" / "index.html").read_text())
    assert "--queue-length" in text
    commands = (tmp_path / "site" / "reference" / "cli" / "index.html").read_text()
    assert all(f"snclr {command}" in commands for command in COMMANDS)
