"""Tar headers by our own reader: the same members as the standard library finds, and an end on any input."""

import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snclr.data.packed import PackedNames, arrays_from_bytes, arrays_to_bytes
from snclr.data.tar_members import DamagedTar, Member, read_members

NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=140).filter(
    lambda name: name not in (".", "..")
)
FORMATS = st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])


def members(data):
    return list(read_members(lambda offset, length: data[offset : offset + length], len(data)))


def make(entries, kind=tarfile.GNU_FORMAT):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as tar:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(NAMES, st.binary(max_size=1100)), max_size=6), FORMATS)
def test_the_members_are_those_of_the_standard_library(entries, kind):
    entries = [(name + ".jpg", content) for name, content in entries]
    data = make(entries, kind)
    found = members(data)
    assert [(m.name, data[m.offset : m.offset + m.size]) for m in found] == entries
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert [(m.name, m.offset, m.size) for m in found] == [(t.name, t.offset_data, t.size) for t in tar]


def test_old_formats_and_long_prefixes():
    name = "/".join(["folder" * 5] * 5) + "/file.jpg"
    data = make([(name, b"abc")], tarfile.USTAR_FORMAT)
    assert members(data) == [Member(name, 512, 3)]


def test_links_devices_and_folders_are_passed_over():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo("evil.jpg")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        info = tarfile.TarInfo("good.jpg")
        info.size = 2
        tar.addfile(info, io.BytesIO(b"ok"))
    assert [m.name for m in members(buffer.getvalue())] == ["good.jpg"]


def test_a_cut_off_tar_keeps_what_was_whole_and_names_the_rest():
    data = make([("a.jpg", bytes(600)), ("b.jpg", bytes(600))])
    second = members(data)[1]
    cut = data[: second.offset + 100]
    assert [m.name for m in members(cut)] == ["a.jpg", "b.jpg"]
    assert second.offset + second.size > len(cut)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"no tar at all" * 100, "no tar header at byte 0"),
        (b"\x1f\x8b" + bytes(600), "compressed with gzip"),
        (b"\x28\xb5\x2f\xfd" + bytes(600), "compressed with zstd"),
        (make([("a.jpg", bytes(10))])[:1024] + b"x" * 512, "no tar header at byte 1024"),
    ],
)
def test_what_is_no_tar_is_explained(data, said):
    with pytest.raises(DamagedTar, match=said):
        members(data)


def test_a_size_that_no_file_has_is_refused():
    """Beyond 64 bits, and between what a disk and what an index can hold."""
    data = make([("a.jpg", b"x")])
    for size in (2**62, 2**63, 2**80):
        claimed = b"\x80" + size.to_bytes(11, "big")
        with pytest.raises(DamagedTar, match=f"claims a file of {size} bytes at byte 0"):
            members(repaired(data[:124] + claimed + data[136:]))


BASE = make([("a" * 150 + ".jpg", bytes(700)), ("b.cls", b"1"), ("ü" * 120 + ".png", b"x")], tarfile.PAX_FORMAT)


def repaired(data):
    """The checksum of the first header made right again, so that what is wrong inside it is looked at."""
    total = sum(data[:148]) + sum(data[156:512]) + 8 * 32
    return data[:148] + b"%06o\0 " % total + data[156:]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_bytes_end_in_members_or_a_damaged_tar(data):
    content = bytearray(BASE)
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    if data.draw(st.booleans()) and len(content) >= 512:
        content = repaired(bytes(content))
    try:
        found = members(bytes(content))
    except DamagedTar:
        return
    assert all(m.offset >= 512 and m.size >= 0 for m in found)
    assert [m.offset for m in found] == sorted(m.offset for m in found)


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=20)))
def test_packed_names_are_the_names(names):
    packed = PackedNames.of(names)
    assert list(packed) == names
    assert [packed[i] for i in range(len(packed))] == names
    again = arrays_from_bytes(arrays_to_bytes({"text": packed.text, "ends": packed.ends}))
    assert list(PackedNames(again["text"], again["ends"])) == names


def test_packed_names_keep_bytes_that_are_no_text():
    name = b"\xff\xfe.jpg".decode("utf-8", "surrogateescape")
    assert PackedNames.of(["a", name, "b"])[1] == name
    with pytest.raises(IndexError):
        PackedNames.of(["a"])[1]


@given(st.binary(max_size=200))
def test_other_bytes_are_no_arrays(data):
    with pytest.raises(ValueError, match="no safetensors"):
        arrays_from_bytes(b"\xff" + data)
