"""The member list of a tar: links, truncated files, hostile headers; and the serialized index."""

import io
import tarfile
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snclr.data.shards.index import DamagedTar, Member, PackedNames, ShardIndex, read_members

NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=140).filter(
    lambda name: name not in (".", "..")
)
FORMATS = st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])


def members(data):
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return list(read_members(file.name))


def make(entries, kind=tarfile.GNU_FORMAT):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as tar:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@settings(max_examples=60)
@given(st.lists(st.tuples(NAMES, st.binary(max_size=1100)), max_size=6), FORMATS)
def test_members_have_the_name_and_position_of_their_content(entries, kind):
    entries = [(name + ".jpg", content) for name, content in entries]
    data = make(entries, kind)
    assert [(m.name, data[m.offset : m.offset + m.size]) for m in members(data)] == entries


def test_ustar_names_with_a_prefix_are_read():
    name = "/".join(["folder" * 5] * 5) + "/file.jpg"
    data = make([(name, b"abc")], tarfile.USTAR_FORMAT)
    assert members(data) == [Member(name, 512, 3)]


def test_links_devices_and_directories_are_skipped():
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


def test_a_truncated_tar_lists_its_incomplete_last_member():
    data = make([("a.jpg", bytes(600)), ("b.jpg", bytes(600))])
    second = members(data)[1]
    cut = data[: second.offset + 100]
    assert [m.name for m in members(cut)] == ["a.jpg", "b.jpg"]
    assert second.offset + second.size > len(cut)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no tar at all" * 100, "no valid tar header at byte 0"),
        (b"\x1f\x8b" + bytes(600), "compressed with gzip"),
        (b"\x28\xb5\x2f\xfd" + bytes(600), "compressed with zstd"),
        (make([("a.jpg", bytes(10))])[:1024] + b"x" * 512, "no valid tar header at byte 1024"),
    ],
)
def test_files_that_are_not_tars_are_rejected(data, message):
    with pytest.raises(DamagedTar, match=message):
        members(data)


def test_sizes_above_the_limit_are_rejected():
    data = make([("a.jpg", b"x")])
    for size in (2**62, 2**63, 2**80):
        claimed = b"\x80" + size.to_bytes(11, "big")
        with pytest.raises(DamagedTar, match=f"claims a file of {size} bytes at byte 0"):
            members(repaired(data[:124] + claimed + data[136:]))


@pytest.mark.parametrize("size", [-512, -1, 2**21])
def test_headers_with_a_negative_or_large_size_are_rejected(size):
    """`tarfile` would loop on a negative size and read a large header into memory."""
    field = (size % 2**96).to_bytes(12, "big") if size < 0 else b"%011o\0" % size
    for kind in (b"0", b"L", b"x") if size < 0 else (b"L", b"x", b"g"):
        data = make([("a.jpg", b"x" * 600), ("b.jpg", b"x")])
        with pytest.raises(DamagedTar, match=r"bytes at byte|no valid tar header"):
            members(repaired(data[:124] + field + data[136:156] + kind + data[157:]))


def test_a_long_chain_of_extension_headers_is_rejected():
    header = make([("a", b"x" * 10)])[:1024]
    chain = repaired(header[:156] + b"L" + header[157:])
    with pytest.raises(DamagedTar, match="no valid tar header"):
        members(chain * 3000)


def test_sparse_members_are_skipped():
    data = make([("a.jpg", bytes(512)), ("b.jpg", b"x")])
    data = repaired(data[:156] + b"S" + data[157:])
    assert [m.name for m in members(data)] == ["b.jpg"]


BASE = make([("a" * 150 + ".jpg", bytes(700)), ("b.cls", b"1"), ("ü" * 120 + ".png", b"x")], tarfile.PAX_FORMAT)


def repaired(data):
    """Correct the checksum of the first header, so that its other fields are used."""
    total = sum(data[:148]) + sum(data[156:512]) + 8 * 32
    return data[:148] + b"%06o\0 " % total + data[156:]


@settings(max_examples=300)
@given(st.data())
def test_corrupted_bytes_give_members_or_damaged_tar(data):
    content = bytearray(BASE)
    for _ in range(data.draw(st.integers(1, 6))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
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
def test_indexes_round_trip(names):
    labels = np.full(len(names), -1, dtype=np.int64)
    index = ShardIndex.of_rows([(0, n, n + 1) for n in range(len(names))], labels, names, ["cat"])
    again = ShardIndex.from_bytes(index.to_bytes())
    assert [again.names[n] for n in range(len(again))] == names
    assert again.size.tolist() == [n + 1 for n in range(len(names))]
    assert again.classes == ["cat"]


def test_packed_names_keep_bytes_that_are_not_utf8():
    name = b"\xff\xfe.jpg".decode("utf-8", "surrogateescape")
    assert PackedNames.of(["a", name, "b"])[1] == name
    with pytest.raises(IndexError):
        PackedNames.of(["a"])[1]


@given(st.binary(max_size=200))
def test_bytes_that_are_not_an_index_are_rejected(data):
    with pytest.raises(ValueError, match="not an index"):
        ShardIndex.from_bytes(b"\xff" + data)
