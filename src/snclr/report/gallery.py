"""Images with their nearest neighbours, as rows of a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from snclr.report.markup import escape, name

SIDE = 128
"""Pixels of a picture on the page; smaller ones are embedded as they are."""
_EDGES = '<p class="key-edges"><span>same class as the image</span><span class="other">another class</span></p>'


@dataclass(frozen=True)
class Shown:
    """One picture: its name, class, data address (None: it cannot be read), and for a neighbour w and cosine."""

    key: str
    label: str | None
    uri: str | None
    w: float | None = None
    cosine: float | None = None
    same_class: bool | None = None


@dataclass(frozen=True)
class Gallery:
    """Rows of an image and its neighbours, the one with the largest w first."""

    rows: list[tuple[Shown, list[Shown]]]
    protocol: str
    shares: list[float | None]
    """By rank, how often the neighbour there has the image's class; None where no class is known."""


def draw_gallery(gallery: Gallery) -> str:
    """The gallery as HTML, with the shares by rank above it and how it was made below."""
    rows = []
    for query, near in gallery.rows:
        cards = "".join(f"<li>{_card(found, _edge(found))}</li>" for found in near)
        rows.append(f"<li>{_card(query, 'query')}<ol>{cards}</ol></li>")
    protocol = escape(gallery.protocol, 1000)
    known = any(found.same_class is not None for _, near in gallery.rows for found in near)
    above = _shares(gallery.shares) + (_EDGES if known else "")
    return f'{above}<ul class="gallery">{"".join(rows)}</ul><p class="protocol">{protocol}</p>'


def _card(one: Shown, kind: str) -> str:
    alt = escape(one.key, 120) + (f", {escape(one.label)}" if one.label is not None else "")
    picture = (
        f'<img src="{escape(one.uri, len(one.uri))}" alt="{alt}" width="{SIDE}" height="{SIDE}">'
        if one.uri is not None
        else f'<div class="gone" role="img" aria-label="{alt}">cannot be read</div>'
    )
    lines = []
    if one.w is not None:
        cosine = "" if one.cosine is None else f"<small>cosine {one.cosine:.2f}</small>"
        lines.append(f'<span class="w">w&#8239;=&#8239;{one.w:.3f}</span>{cosine}')
    if one.label is not None and one.same_class is not True:
        lines.append(f'<span class="label">{name(one.label, 40)}</span>')
    elif one.label is None and kind == "query":
        lines.append(f'<span class="label">{name(one.key, 40)}</span>')
    return f'<figure class="card {kind}" title="{alt}">{picture}<figcaption>{"".join(lines)}</figcaption></figure>'


def _edge(found: Shown) -> str:
    return {True: "same", False: "other", None: "unknown"}[found.same_class]


def _shares(shares: Sequence[float | None]) -> str:
    known = [(rank, share) for rank, share in enumerate(shares, start=1) if share is not None]
    if not known:
        return ""
    bars = "".join(
        f'<tr><th scope="row">{rank}</th><td><svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" '
        f'aria-hidden="true"><rect class="track" width="100" height="8"/><rect class="fill" width="{share * 100:.2f}" '
        f'height="8"/></svg></td><td class="number">{share:.1%}</td></tr>'
        for rank, share in known
    )
    return (
        '<table class="shares"><caption>Neighbours of the same class as the image, by rank</caption>'
        "<thead><tr>"
        '<th scope="col">rank</th><th scope="col"><span class="unseen">bar</span></th><th scope="col">share</th></tr>'
        f"</thead><tbody>{bars}</tbody></table>"
    )
