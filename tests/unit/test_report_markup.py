from __future__ import annotations

import base64
import io
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from report_page import HOSTILE, Taken

from snclr.json_values import is_number
from snclr.report.markup import data_block, escape, figure, name, picture_uri, sheet_uri, tile, visible

ANY_TEXT = st.text(st.characters(), max_size=60) | st.sampled_from(HOSTILE)


@given(ANY_TEXT)
def test_escaped_text_is_text_and_nothing_else(text: str) -> None:
    taken = Taken(f'<p title="{escape(text)}">{escape(text)}</p>')
    assert taken.elements == [("p", {"title": visible(text)})]
    assert taken.text() == visible(text)
    escape(text).encode()  # lone surrogates too can be written


@given(ANY_TEXT)
def test_visible_text_hides_nothing(text: str) -> None:
    shown = visible(text)
    kinds = {unicodedata.category(character) for character in shown if character not in "\u200c\u200d"}
    assert not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp", "Cn", "Co"}
    assert all(character in shown for character in text if character.isprintable())


@settings(max_examples=40)
@given(
    st.recursive(
        ANY_TEXT | st.none() | st.integers(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
        max_leaves=4,
    )
)
def test_data_comes_back_from_the_page_as_it_was(value: object) -> None:
    block = data_block("d", value)
    assert block.count("<") == 2
    assert block.isascii()
    taken = Taken(block + "<p>after</p>")
    assert [tag for tag, _ in taken.elements] == ["script", "p"]
    assert taken.data("d") == value


def test_data_refuses_what_json_has_no_word_for() -> None:
    with pytest.raises(ValueError, match="JSON"):
        data_block("d", float("nan"))


def test_long_names_keep_their_end() -> None:
    assert visible("x" * 50 + "/cat.jpg", 10) == "…x/cat.jpg"
    assert len(visible("x" * 10_000)) == 200
    assert name("a<b") == "<bdi>a&lt;b</bdi>"


@pytest.mark.parametrize("value", [None, True, "1", float("nan"), float("inf"), 10**400, [1]])
def test_what_is_no_number(value: object) -> None:
    assert not is_number(value)


@given(st.floats(1e-4, 1e8))
def test_printed_numbers_are_right_to_four_digits(value: float) -> None:
    assert float(figure(value).replace(",", "")) == pytest.approx(value, rel=6e-4)


def test_pictures_are_embedded_without_anything_but_their_pixels() -> None:
    small = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    kind, _, content = picture_uri(small, 128).partition(",")
    assert kind == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(content))) as image:
        assert np.array_equal(np.asarray(image), small[:, 5:25])
    large = np.zeros((300, 200, 3), np.uint8)
    with Image.open(io.BytesIO(base64.b64decode(picture_uri(large, 128).partition(",")[2]))) as image:
        assert (image.format, image.size, dict(image.getexif())) == ("JPEG", (128, 128), {})


def test_a_sheet_has_each_tile_in_its_place() -> None:
    colours = [(250, 0, 0), (0, 250, 0), (0, 0, 250), (250, 250, 0), (0, 250, 250)]
    tiles = np.stack([tile(np.full((40, 50, 3), colour, np.uint8), 16) for colour in colours])
    with Image.open(io.BytesIO(base64.b64decode(sheet_uri(tiles, 3).partition(",")[2]))) as image:
        sheet = np.asarray(image.convert("RGB")).astype(int)
    assert sheet.shape == (32, 48, 3)
    for number, colour in enumerate(colours):
        middle = sheet[number // 3 * 16 + 8, number % 3 * 16 + 8]
        assert abs(middle - np.array(colour)).max() < 12
