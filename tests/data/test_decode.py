"""Decoding: unusual files give the right pixels, bad ones give BadImage with a reason."""

import io
import os
import struct
import threading
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from snclr.data import decode as module
from snclr.data.decode import SUFFIXES, BadImage, decode, decode_stream
from tests.reliability import unusual_images


def color_image(height=24, width=40):
    """Return a smooth color image without symmetries, so that a wrong rotation or channel order is detected."""
    y, x = np.mgrid[0:height, 0:width]
    r, g, b = 40 + 180 * x / width, 30 + 200 * y / height, 200 - 150 * x * y / (height * width)
    return np.stack([r, g, b], axis=2).astype(np.uint8)


def gray(height=24, width=40):
    return color_image(height, width)[..., 0]


def saved(tmp_path, image, name, **options):
    path = tmp_path / name
    image.save(path, **options)
    return path


def close(a, b, tolerance):
    assert a.dtype == np.uint8
    assert a.shape == b.shape
    assert np.abs(a.astype(int) - b.astype(int)).max() <= tolerance


@pytest.mark.parametrize(
    ("suffix", "tolerance", "options"),
    [
        ("png", 0, {}),
        ("bmp", 0, {}),
        ("tiff", 0, {}),
        ("tif", 0, {"compression": "tiff_lzw"}),
        ("ppm", 0, {}),
        ("webp", 0, {"lossless": True}),
        ("jpg", 6, {"quality": 98, "subsampling": 0}),
        ("jpeg", 6, {"quality": 98, "subsampling": 0, "progressive": True}),
    ],
)
def test_every_format_gives_rgb(tmp_path, suffix, tolerance, options):
    path = saved(tmp_path, Image.fromarray(color_image()), f"image.{suffix}", **options)
    assert f".{suffix}" in SUFFIXES
    close(decode(path), color_image(), tolerance)


def test_the_content_counts_not_the_suffix(tmp_path):
    saved(tmp_path, Image.fromarray(color_image()), "image.png").rename(tmp_path / "image.jpg")
    close(decode(tmp_path / "image.jpg"), color_image(), 0)


def test_gray_and_bilevel(tmp_path):
    close(decode(saved(tmp_path, Image.fromarray(gray()), "gray.png")), np.repeat(gray()[..., None], 3, 2), 0)
    bits = gray() > 128
    close(
        decode(saved(tmp_path, Image.fromarray(bits), "bits.png")),
        np.repeat(255 * bits[..., None].astype(np.uint8), 3, 2),
        0,
    )


def test_palette(tmp_path):
    quantized = Image.fromarray(color_image()).quantize(32)
    close(decode(saved(tmp_path, quantized, "palette.png")), np.asarray(quantized.convert("RGB")), 0)


def test_cmyk_jpeg(tmp_path):
    image = Image.fromarray(color_image()).convert("CMYK")
    close(decode(saved(tmp_path, image, "cmyk.jpg", quality=98, subsampling=0)), np.asarray(image.convert("RGB")), 12)


@pytest.mark.parametrize("name", ["deep.png", "deep.tiff", "deep.pgm"])
def test_sixteen_bits_keep_their_range(tmp_path, name):
    deep = gray().astype(np.uint16) * 257 + 100
    path = tmp_path / name
    if name.endswith("pgm"):
        path.write_bytes(b"P5 40 24 65535\n" + deep.astype(">u2").tobytes())
    else:
        Image.fromarray(deep).save(path)
    close(decode(path), np.repeat(gray()[..., None], 3, 2), 1)


def test_sixteen_bit_color(tmp_path):
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in color_image().astype(np.uint16) * 257)
    header = struct.pack(">IIBBBBB", 40, 24, 16, 2, 0, 0, 0)
    path = tmp_path / "deep-color.png"
    path.write_bytes(png(chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")))
    close(decode(path), color_image(), 1)


def test_float_and_32_bit_values_are_stretched(tmp_path):
    ramp = np.linspace(-3.0, 5.0, 24 * 40, dtype=np.float32).reshape(24, 40)
    for name, values in (("float.tiff", ramp), ("int.tiff", (ramp * 1e6).astype(np.int32))):
        out = decode(saved(tmp_path, Image.fromarray(values), name))
        assert out[0, 0].tolist() == [0, 0, 0]
        assert out[-1, -1].tolist() == [255, 255, 255]
        assert abs(int(out[12, 0, 0]) - 128) <= 1
    flat = decode(saved(tmp_path, Image.fromarray(np.full((4, 4), 2.5, np.float32)), "flat.tiff"))
    assert flat.shape == (4, 4, 3)
    assert not flat.any()
    ramp[3, 3] = np.nan
    with pytest.raises(BadImage, match="not finite"):
        decode(saved(tmp_path, Image.fromarray(ramp), "nan.tiff"))


def test_transparency_lies_on_white(tmp_path):
    rgba = np.dstack([color_image(), np.full((24, 40), 255, np.uint8)])
    rgba[:12, :, 3] = 0
    expected = color_image().copy()
    expected[:12] = 255
    close(decode(saved(tmp_path, Image.fromarray(rgba), "alpha.png")), expected, 0)
    close(decode(saved(tmp_path, Image.fromarray(rgba), "alpha.webp", lossless=True)), expected, 0)
    half = np.dstack([gray(), np.full((24, 40), 128, np.uint8)])
    blended = np.rint(gray() * (128 / 255) + 255 * (127 / 255))[..., None].repeat(3, 2).astype(np.uint8)
    close(decode(saved(tmp_path, Image.fromarray(half), "la.png")), blended, 1)


@pytest.mark.parametrize("transparency", [5, bytes([255] * 5 + [0] + [255] * 10)], ids=["index", "bytes"])
def test_transparent_palette(tmp_path, transparency):
    quantized = Image.fromarray(color_image()).quantize(16)
    path = saved(tmp_path, quantized, "palette.png", transparency=transparency)
    expected = np.asarray(quantized.convert("RGB")).copy()
    hidden = np.asarray(quantized) == 5
    assert hidden.any()
    expected[hidden] = 255
    close(decode(path), expected, 0)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "tiff", "webp"])
def test_exif_rotation_is_applied(tmp_path, orientation, suffix):
    undo = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, -1),
        7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        8: lambda a: np.rot90(a),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"jpg": {"quality": 98, "subsampling": 0}, "webp": {"lossless": True}}.get(suffix, {})
    path = saved(tmp_path, Image.fromarray(color_image()), f"turned.{suffix}", exif=exif, **options)
    close(decode(path), undo[orientation](color_image()), 6 if suffix == "jpg" else 0)


def test_damaged_exif_is_ignored(tmp_path):
    path = saved(
        tmp_path, Image.fromarray(color_image()), "exif.jpg", exif=b"Exif\0\0II*\0\xff\xff\xff\xff", quality=98
    )
    assert decode(path).shape == (24, 40, 3)


@pytest.mark.parametrize("name", ["moving.gif", "moving.webp", "moving.png", "pages.tiff"])
def test_the_first_frame_counts(tmp_path, name):
    frames = [Image.new("RGB", (20, 10), color) for color in ("red", "lime", "blue")]
    options = {"lossless": True} if name.endswith("webp") else {}
    path = saved(tmp_path, frames[0], name, save_all=True, append_images=frames[1:], **options)
    close(decode(path), np.full((10, 20, 3), (255, 0, 0), np.uint8), 0)


def test_one_pixel(tmp_path):
    path = saved(tmp_path, Image.new("RGB", (1, 1), (1, 2, 3)), "dot.png")
    assert decode(path).tolist() == [[[1, 2, 3]]]


@pytest.mark.parametrize(
    ("min_side", "side"), [(None, 800), (801, 800), (800, 800), (400, 400), (300, 400), (90, 100), (3, 100)]
)
def test_a_large_jpeg_is_decoded_small_but_not_too_small(tmp_path, min_side, side):
    path = saved(tmp_path, Image.fromarray(color_image(800, 1600)), "large.jpg", quality=95)
    small = decode(path, min_side)
    assert small.shape == (side, 2 * side, 3)
    step = 800 // side
    close(small, color_image(800, 1600)[step // 2 :: step, step // 2 :: step], 8)


def test_other_formats_are_decoded_at_full_size(tmp_path):
    path = saved(tmp_path, Image.fromarray(color_image(80, 160)), "large.png")
    assert decode(path, min_side=10).shape == (80, 160, 3)


# What is refused.


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(*chunks):
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def encoded(kind, **options):
    buffer = io.BytesIO()
    Image.fromarray(color_image()).save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("name", unusual_images.bad())
def test_bad_files_are_refused_with_a_reason(tmp_path, name):
    content, message = unusual_images.bad()[name]
    path = tmp_path / "bad.jpg"
    path.write_bytes(content)
    with pytest.raises(BadImage, match=message) as caught:
        decode(path)
    reason = str(caught.value)
    assert reason == str(caught.value)
    assert "\n" not in reason
    assert "0x" not in reason  # no memory address: the same file gives the same reason
    assert str(tmp_path) not in reason
    with pytest.raises(BadImage):
        decode_stream(io.BytesIO(content))


def test_paths_that_are_not_files_are_rejected(tmp_path):
    with pytest.raises(BadImage, match="No such file"):
        decode(tmp_path / "missing.jpg")
    with pytest.raises(BadImage, match="not a regular file"):
        decode(tmp_path)
    os.mkfifo(tmp_path / "pipe.jpg")  # opening it would wait for ever
    with pytest.raises(BadImage, match="not a regular file"):
        decode(tmp_path / "pipe.jpg")


def test_the_size_is_checked_before_decoding(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_PIXELS", 24 * 40)
    path = saved(tmp_path, Image.fromarray(color_image()), "image.png")
    assert decode(path).shape == (24, 40, 3)
    monkeypatch.setattr(module, "MAX_PIXELS", 24 * 40 - 1)
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(BadImage, match="40×24 is more than 959 pixels"):
        decode(path)


def test_damaged_files_give_bad_image_or_an_image():
    # Flipped bytes, seeded: nothing but a BadImage may come out of a decoder.
    generator = np.random.default_rng(0)
    outcomes = set()
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "PPM"):
        clean = np.frombuffer(encoded(kind), np.uint8)
        for _ in range(60):
            damaged = clean.copy()
            places = generator.integers(0, min(len(clean), 400), size=4)
            damaged[places] = generator.integers(0, 256, size=4)
            try:
                out = decode_stream(io.BytesIO(damaged.tobytes()))
                assert out.dtype == np.uint8
                assert out.ndim == 3
                outcomes.add("image")
            except BadImage:
                outcomes.add("refused")
    assert outcomes == {"image", "refused"}


def test_warnings_are_ignored_and_filters_restored(tmp_path):
    # An odd file that Pillow warns about, decoded by several threads at once, under "warnings are errors".
    exif = b"Exif\0\0II*\0\x08\0\0\0\x02\0\x12\x01\x03\0\x01\0\0\0\x01\0\0\0"
    path = saved(tmp_path, Image.fromarray(color_image()), "odd.jpg", exif=exif)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = list(warnings.filters)
        threads = [threading.Thread(target=lambda: [decode(path) for _ in range(20)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert decode(path).shape == (24, 40, 3)
        assert list(warnings.filters) == before
