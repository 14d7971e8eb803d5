from __future__ import annotations

import base64
import io
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from snclr.reports.page import environment
from snclr.reports.text import format_number, visible
from snclr.reports.thumbnails import sprite_uri, square_tile, thumbnail_uri
from tests.helpers.report_page import HOSTILE, ParsedPage

ANY_TEXT = st.text(st.characters(), max_size=60) | st.sampled_from(HOSTILE)
JSON_VALUES = st.recursive(
    ANY_TEXT | st.none() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=4,
)


def render(template: str, **values: object) -> str:
    return environment().from_string(template).render(**values)


@given(ANY_TEXT)
def test_templates_escape_text_in_elements_and_attributes(text: str) -> None:
    html = render('<p title="{{ text }}">{{ text }}</p>', text=text)
    parsed = ParsedPage(html)
    assert parsed.elements == [("p", {"title": visible(text)})]
    assert parsed.text() == visible(text)
    html.encode()  # also with lone surrogates


@given(ANY_TEXT)
def test_visible_text_has_no_invisible_characters(text: str) -> None:
    shown = visible(text)
    categories = {unicodedata.category(character) for character in shown if character not in "\u200c\u200d"}
    assert not categories & {"Cc", "Cf", "Cs", "Zl", "Zp", "Cn", "Co"}
    assert all(character in shown for character in text if character.isprintable())
    assert visible(shown) == shown


@settings(max_examples=40)
@given(JSON_VALUES)
def test_embedded_json_is_read_back_unchanged(value: object) -> None:
    block = render('<script type="application/json" id="d">{{ value|tojson }}</script>', value=value)
    assert block.count("<") == 2
    assert block.isascii()
    parsed = ParsedPage(block + "<p>after</p>")
    assert [tag for tag, _ in parsed.elements] == ["script", "p"]
    assert parsed.data("d") == value


def test_embedded_json_rejects_nan() -> None:
    with pytest.raises(ValueError, match="JSON"):
        render("{{ value|tojson }}", value=float("nan"))


def test_long_names_keep_their_end() -> None:
    assert visible("x" * 50 + "/cat.jpg", 10) == "…x/cat.jpg"
    assert render('{% from "macros.html" import name %}{{ name(text, 5) }}', text="aaaa<b") == "<bdi>…aa&lt;b</bdi>"


@given(st.floats(1e-4, 1e8))
def test_formatted_numbers_have_four_correct_digits(value: float) -> None:
    assert float(format_number(value).replace(",", "")) == pytest.approx(value, rel=6e-4)


def test_thumbnails_contain_pixels_only() -> None:
    small = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    kind, _, content = thumbnail_uri(small, 128).partition(",")
    assert kind == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(content))) as image:
        assert np.array_equal(np.asarray(image), small[:, 5:25])
    large = np.zeros((300, 200, 3), np.uint8)
    with Image.open(io.BytesIO(base64.b64decode(thumbnail_uri(large, 128).partition(",")[2]))) as image:
        assert (image.format, image.size, dict(image.getexif())) == ("JPEG", (128, 128), {})


def test_sprite_tiles_are_in_row_order() -> None:
    colors = [(250, 0, 0), (0, 250, 0), (0, 0, 250), (250, 250, 0), (0, 250, 250)]
    tiles = np.stack([square_tile(np.full((40, 50, 3), color, np.uint8), 16) for color in colors])
    with Image.open(io.BytesIO(base64.b64decode(sprite_uri(tiles, 3).partition(",")[2]))) as image:
        sprite = np.asarray(image.convert("RGB")).astype(int)
    assert sprite.shape == (32, 48, 3)
    for number, color in enumerate(colors):
        middle = sprite[number // 3 * 16 + 8, number % 3 * 16 + 8]
        assert abs(middle - np.array(color)).max() < 12
