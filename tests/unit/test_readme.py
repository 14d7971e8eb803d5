"""The README's Python is run as it is printed, and stays as short as promised."""

import re
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_loop_in_the_readme_runs_and_is_short():
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    lines = [line for line in block.splitlines() if line.strip()]
    assert len(lines) < 25
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    queue = names["criterion"].queue
    assert len(queue) == 20 * 32
    assert names["loss"].isfinite()


def test_every_document_it_links_to_exists():
    root = Path(__file__).parents[2]
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert len(links) > 10
    assert [link for link in links if not (root / link).exists()] == []
