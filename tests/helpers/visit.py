"""Use a report in the browser: hostile names, pointer events on every element, and the requests it made."""

from __future__ import annotations

from tests.helpers.chromium import Tab


def hostile(address: str) -> list[str]:
    """Return names that try to run a script or to load something from `address`."""
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
    """Hover over and click the interactive elements."""
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
    """Return the requested URLs, except the page itself and its data URIs."""
    urls = [event["request"]["url"] for event in tab.events_of("Network.requestWillBeSent")]
    return [url for url in urls if not url.startswith("data:") and not url.endswith("report.html")]
