"""Parse a report page, and hostile names to put into one."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

HOSTILE = [
    "<script>window.canary=1</script>",
    "</script><script>window.canary=2</script>",
    "\"><img src=x onerror='window.canary=3'>",
    "' onmouseover='window.canary=4' x='",
    "</title></style></svg><svg onload=window.canary=5>",
    "]]><!--<script>window.canary=6//--></script>",
    "&lt;b&gt; &amp; &#x3c;script&#x3e;",
    "javascript:window.canary=7",
    "line one\nline two\r\tend\x00\x1b[31m",
    "cat\u202egpj.exe \u2066x\u2069 \u200f\u061c",
    "\u2028window.canary=8\u2029",
    "a\udc80b \ud800",
    "{{7*7}} ${7*7} `x` \\u003cscript\\u003e \\",
    "قطة.jpg 猫.png 👨‍👩‍👧",
]


class ParsedPage(HTMLParser):
    """The elements of a page with their attributes and text, as a browser parses them."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.append((self._open[-1], data))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def all(self, tag: str, css_class: str | None = None) -> list[dict[str, str | None]]:
        """Return the attributes of all elements of a tag and, if given, a CSS class."""
        matches = [attributes for name, attributes in self.elements if name == tag]
        return [m for m in matches if css_class is None or css_class in (m.get("class") or "").split()]

    def text(self) -> str:
        """Return the text of the page, without scripts and styles."""
        return "".join(data for tag, data in self.texts if tag not in ("script", "style"))

    def data(self, id_: str) -> Any:
        """Return the JSON embedded for the page's script."""
        contents = [data for tag, data in self.texts if tag == "script"]
        ids = [script.get("id") for script in self.all("script")]
        return json.loads(contents[ids.index(id_)])
