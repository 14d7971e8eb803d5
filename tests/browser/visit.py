"""A visit to the report: names that try to do harm, a hand on everything there is, what was asked of the network."""

from __future__ import annotations

from tests.browser.chromium import Tab


def hostile(address: str) -> list[str]:
    """Names that try to run a script, or to fetch something from the address."""
    return [
        "<script>window.canary=1;document.title='canary'</script>",
        f"</script><script src={address}/a.js></script>",
        f'"><img src="{address}/b.png" onerror="window.canary=2">',
        f"' onpointermove='window.canary=3' style='background:url({address}/c.png)' x='",
        "</title></style></svg></bdi><svg onload=window.canary=4><animate onbegin=window.canary=5>",
        f"<link rel=stylesheet href={address}/d.css><style>@import '{address}/e.css';</style>",
        f"<iframe src={address}/f.html srcdoc='<script>parent.canary=6</script>'></iframe>",
        f"<meta http-equiv=refresh content='0;url={address}/g'><base href={address}/>",
        f"{address}/h.png", f"url({address}/i.png)", f"//{address[7:]}/j.png",
        "]]><!--<script>window.canary=7//--></script>", "javascript:window.canary=8",
        f"<object data={address}/k><embed src={address}/l><video src={address}/m poster={address}/n>",
    ]  # fmt: skip


def use(tab: Tab) -> None:
    """Point at and click everything there is."""
    tab.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    boxes = tab.run(
        "Array.from(document.querySelectorAll('.chart svg,.map circle,.legend button,.card')).map(e => "
        "{ e.scrollIntoView({block: 'center', behavior: 'instant'}); const r = e.getBoundingClientRect(); "
        "return [r.x + r.width / 2, r.y + r.height / 2, e.tagName === 'BUTTON', window.scrollY] }).slice(0, 90)"
    )
    for x, y, click, scroll in boxes:
        tab.run(f"window.scrollTo({{top: {scroll}, behavior: 'instant'}})")
        tab.point_at(x, y, click=click)


def requests(tab: Tab) -> list[str]:
    """What the page asked for, itself and what it carries within itself apart."""
    asked = [event["request"]["url"] for event in tab.told("Network.requestWillBeSent")]
    return [url for url in asked if not url.startswith("data:") and not url.endswith("report.html")]
