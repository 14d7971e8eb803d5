"""Every screen of the explorer in Chromium: click, drop, paste, box, lasso, slider, export, keys, static folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import snclr
from snclr.data.datasets.base import open_dataset
from tests.helpers import tiny_run
from tests.helpers.chromium import find_chromium

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed (apt-get install chromium)")

FLAGS = ["--no-sandbox", "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
HOSTILE = [
    "<img src=x onerror=window.canary=1>.png", "'\"><script>window.canary=2<\u2215script>.png", "a\nb\t\u202egnp.png",
    "javascript:window.canary=3.png", "{{7*7}}${7*7}%00..%2f..%2f.png", "-x' onload='window.canary=4.png",
]  # fmt: skip
HOSTILE_CLASS = "<b onmouseover='window.canary=(5)!*'>"
SCREENS = ["neighbors", "neighbors?img=images:3", "map?img=images:3", "run", "time?img=images:3", "compare",
           "views?img=images:3", "curate", "curate?find=labels", "curate?find=diverse"]  # fmt: skip


@pytest.fixture(scope="module")
def explored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs on images with hostile names and one pair of copies, below one folder."""
    folder = tmp_path_factory.mktemp("explored")
    images = tiny_run.write_images(folder / "images")
    for number, name in enumerate(HOSTILE):
        Image.new("RGB", (20, 20), (200, 10 * number, 30)).save(images / "red" / "tmp.png")
        (images / "red" / "tmp.png").rename(images / "red" / name)
    (images / "blue" / "copy.png").write_bytes((images / "blue" / "blue_0.png").read_bytes())
    (images / HOSTILE_CLASS).mkdir()
    Image.new("RGB", (20, 20), (250, 250, 250)).save(images / HOSTILE_CLASS / "white.png")
    (folder / "test").mkdir()
    (folder / "test" / "leak.png").write_bytes((images / "red" / "red_3.png").read_bytes())
    tiny_run.train(images, folder / "one", checkpoint_every=1, keep_encoders=3)
    tiny_run.train(images, folder / "two", seed=1)
    return folder


@pytest.fixture(scope="module")
def address(explored: Path) -> Iterator[str]:
    command = [sys.executable, "-u", "-m", "snclr", "explore", str(explored / "one"), str(explored / "two")]
    options = ["--port", "0", "--device", "cpu", "--test", str(explored / "test")]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    yield process.stdout.readline().strip()  # nothing but the address
    opened = process.stderr.readline()
    assert opened.startswith("snclr explore: starting"), opened
    while opened.startswith("snclr explore: "):  # its state, repeated on a busy machine
        opened = process.stderr.readline()
    assert opened.startswith(f"exploring {explored / 'one'} at step "), opened
    assert f"compared with {explored / 'two'}" in opened
    process.stderr.close()
    process.send_signal(2)
    assert process.wait(30) == 0, "Ctrl-C ends the server with exit code 0"
    process.stdout.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that fails the test if a script fails, something is blocked or another host is asked."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, accept_downloads=True)
    opened = context.new_page()
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda entry: entry.type == "error" and problems.append(entry.text))
    opened.on(
        "request", lambda r: r.url.startswith(("http://127.0.0.1", "data:", "blob:", "file:")) or problems.append(r.url)
    )
    opened.set_default_timeout(30_000)
    yield opened
    canary = opened.evaluate("typeof window.canary")
    context.close()
    # A thumbnail of the broken image is answered with 422.
    assert [text for text in problems if "422" not in text] == []
    assert canary == "undefined"


def ready(page: Any, selector: str) -> None:
    page.wait_for_selector(selector)
    page.wait_for_selector(".pending", state="detached")


def texts(page: Any, selector: str) -> list[str]:
    return page.locator(selector).all_inner_texts()


def test_neighbors_by_click_walk_box_drop_file_and_paste(page, address, explored):
    page.goto(address)
    ready(page, ".browse-grid .tile")
    page.get_by_role("searchbox").fill("blue_3")
    page.get_by_role("searchbox").press("Enter")
    page.wait_for_selector(".browse-grid .tile[aria-label^='blue/blue_3']")
    page.locator(".browse-grid .tile").first.click()
    ready(page, ".neighbor-grid .tile")
    assert texts(page, ".query h1") == ["blue/blue_3.png"]
    assert page.locator(".neighbor-grid .tile").count() == 24
    assert page.locator(".neighbor-grid .tile.same").count() > 12
    assert "Exact search over 56 images" in texts(page, ".search-note")[0]
    assert page.locator(".neighbor-grid .terms:not(.none)").count() == 5  # K of the run
    second = page.locator(".neighbor-grid .tile").nth(1).get_attribute("data-ref")
    page.locator(".neighbor-grid .tile").nth(1).click()
    page.wait_for_selector(f".trail .tile.selected[data-ref='{second}']")
    ready(page, ".neighbor-grid:not(.stale)")
    assert page.locator(".trail .tile").count() == 2
    page.keyboard.press("Backspace")
    page.wait_for_selector(".query h1:text-is('blue/blue_3.png')")
    page.get_by_role("radio", name="Encoder").click()
    page.wait_for_url("**space=encoder**")
    page.get_by_role("radio", name="Projection").click()
    page.get_by_label("Search in").select_option("queue")
    page.wait_for_selector(".search-note:has-text('over 40 images')")
    page.get_by_role("slider", name="Neighbors").fill("6")
    page.wait_for_url("**k=6**")
    page.wait_for_function("() => document.querySelectorAll('.neighbor-grid .tile').length === 6")
    page.get_by_role("radio", name="two").click()
    page.wait_for_url("**run=b**")
    # A box of the image.
    page.wait_for_selector(".neighbor-grid:not(.stale)")
    area = page.locator(".big img").bounding_box()
    page.mouse.move(area["x"] + 20, area["y"] + 20)
    page.mouse.down()
    page.mouse.move(area["x"] + 150, area["y"] + 120, steps=4)
    page.mouse.up()
    page.wait_for_selector(".query h1:has-text('box of blue/blue_3.png')")
    # A dropped, a chosen and a pasted file.
    data = list((explored / "images" / "green" / "green_1.png").read_bytes())
    for kind, name in (("drop", "dropped <b>.png"), ("paste", "pasted image")):
        page.evaluate(
            """([kind, name, data]) => {
              const transfer = new DataTransfer(), any = {bubbles: true, cancelable: true};
              transfer.items.add(new File([new Uint8Array(data)], name, {type: 'image/png'}));
              const event = kind === 'drop' ? new DragEvent('drop', {...any, dataTransfer: transfer})
                : new ClipboardEvent('paste', {...any, clipboardData: transfer});
              document.body.dispatchEvent(event); }""",
            [kind, name, data],
        )
        page.wait_for_selector(f".query h1:text-is('{name}')")
        ready(page, ".neighbor-grid:not(.stale) .tile")
    page.keyboard.press("b")
    ready(page, ".browse-grid .tile")
    page.set_input_files("#file", explored / "images" / "green" / "green_1.png")
    page.wait_for_selector(".query h1:text-is('green_1.png')")
    page.get_by_role("radio", name="one").click()
    page.get_by_role("radio", name="Encoder").click()
    page.wait_for_selector(".neighbor-grid:not(.stale) .tile[aria-label^='green/green_1.png']")
    # A file that is no image is explained and changes nothing.
    page.evaluate(
        """() => { const transfer = new DataTransfer(); transfer.items.add(new File(['no'], 'x.png'));
        const any = {bubbles: true, cancelable: true};
        document.body.dispatchEvent(new DragEvent('drop', {...any, dataTransfer: transfer})); }"""
    )
    page.wait_for_selector(".toast:has-text('cannot be read')")
    assert texts(page, ".query h1") == ["green_1.png"]


def test_the_map_pans_zooms_colors_and_selects(page, address):
    page.goto(address + "#/map")
    ready(page, ".legend .names button")
    ready(page, ".fidelity b")
    scatter = "document.getElementById('screen').scatter"
    assert page.evaluate(f"{scatter}.count") == 56
    pixels = f"""(() => {{ const s = {scatter}; s.render(); const gl = s.gl, w = s.canvas.width, h = s.canvas.height;
        const b = new Uint8Array(4 * w * h); gl.readPixels(0, 0, w, h, gl.RGBA, gl.UNSIGNED_BYTE, b);
        return b.filter((v, i) => i % 4 === 3 && v > 0).length; }})()"""
    assert page.evaluate(pixels) > 500
    area = page.locator("canvas.overlay").bounding_box()
    before = page.evaluate(f"JSON.stringify({scatter}.view)")
    page.mouse.move(area["x"] + 700, area["y"] + 60)
    page.mouse.down()
    page.mouse.move(area["x"] + 760, area["y"] + 90, steps=3)
    page.mouse.up()
    page.mouse.wheel(0, -200)
    page.wait_for_timeout(100)
    after = page.evaluate(f"JSON.stringify({scatter}.view)")
    assert json.loads(after)["zoom"] > json.loads(before)["zoom"]
    assert json.loads(after)["x"] != json.loads(before)["x"]
    page.keyboard.press("0")
    for mode in ("cluster", "purity", "reciprocity", "hubness", "loss", "change", "kept", "class"):
        colors = page.evaluate(f"Array.from({scatter}.colors).join()")
        page.get_by_label("Color").select_option(mode)
        page.wait_for_url(f"**color={mode}**")
        page.wait_for_function(f"before => Array.from({scatter}.colors).join() !== before", arg=colors)
    # Choose a point: its true neighbors are drawn and listed.
    x, y = page.evaluate(f"{scatter}.toScreen(10)")
    page.mouse.click(area["x"] + x, area["y"] + y)
    ready(page, ".inspector .grid .tile")
    assert page.evaluate(f"{scatter}.lines.length") == 15
    page.keyboard.press("Escape")
    # A lasso around everything, and its list.
    corners = [(280, 5), (area["width"] - 5, 5), (area["width"] - 5, area["height"] - 5), (280, area["height"] - 5)]
    page.keyboard.press("l")
    page.mouse.move(area["x"] + 280, area["y"] + 5)
    page.mouse.down()
    for x, y in [*corners[1:], corners[0]]:
        page.mouse.move(area["x"] + x, area["y"] + y, steps=4)
    page.mouse.up()
    page.wait_for_selector(".inspector h2:text-is('56 images selected')")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export as a list").click()
    listed = Path(download.value.path()).read_text().splitlines()
    assert len([line for line in listed if not line.startswith("#")]) == 55  # one name has a line break


def test_the_run_screen_updates_while_training_goes_on(page, address, explored):
    page.goto(address + "#/run")
    ready(page, ".chart")
    titles = texts(page, ".chart .title")
    assert {"Loss", "Spread", "Effective rank", "Neighbor purity", "Queue kNN"} <= set(titles)
    page.wait_for_selector(".chart .title:text-is('Singular values')")
    assert "red/broken.png" in texts(page, "tbody td")
    assert "queue_length" in texts(page, ".settings code")
    with (explored / "one" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, "epoch": 3.0, "loss": 123.5, "collapsed": True}) + "\n")
    page.wait_for_selector(".alerts li:has-text('collapsed')")
    assert page.locator(".chart", has_text="Loss").locator("output").first.inner_text() == "124"


def test_time_slides_over_the_kept_encoders(page, address):
    page.goto(address + "#/time?img=images:3")
    ready(page, ".history li")
    assert page.locator(".history li").count() == 4  # 3 snapshots and the last two checkpoints
    scatter = "document.getElementById('screen').scatter"
    points = page.evaluate(f"Array.from({scatter}.points).join()")
    page.locator(".time-bar input").fill("0")
    page.wait_for_selector(".now b:has-text('step 2')")
    assert page.evaluate(f"Array.from({scatter}.points).join()") != points
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Play").click()
    page.wait_for_selector(".now b:has-text('step 5')")


def test_compare_links_the_lists_of_two_encoders(page, address):
    page.goto(address + "#/compare")
    ready(page, ".compare-list .tile")
    ready(page, ".pair-grid .tile")
    assert page.locator(".pair-row").count() == 2
    page.locator(".compare-list .tile").nth(5).click()
    page.wait_for_url("**img=images**")
    page.get_by_label("Other encoder").select_option("pixels")
    page.wait_for_selector(".pair-row h3:text-is('raw pixels')")


def test_a_slow_answer_does_not_replace_that_of_a_later_choice(page, address):
    slow = """name => { const ask = window.fetch; window.slow = 0; window.fetch = async (url, options) => {
        if (!String(url).includes(name)) return ask(url, options);
        window.slow += 1; await new Promise(resolve => setTimeout(resolve, 700));
        return ask(url, options); }; }"""
    page.goto(address + "#/compare")
    ready(page, ".pair-grid .tile")
    encoder = page.get_by_label("Other encoder")
    for name in ("pixels", "b"):  # computed before the slow request
        encoder.select_option(name)
        ready(page, ".compare-head .stats")
    page.evaluate(slow, "other=pixels")
    encoder.select_option("pixels")
    page.wait_for_function("() => window.slow > 0")
    encoder.select_option("b")
    ready(page, ".compare-head .stats")
    page.wait_for_timeout(1_000)
    assert "raw pixels" not in " ".join(texts(page, ".pair-row h3"))
    assert encoder.input_value() == "b"
    page.goto(address + "#/map?color=purity")
    ready(page, ".legend .ramp")
    page.get_by_label("Color").select_option("class")
    ready(page, ".legend .names button")
    page.evaluate(slow, "mode=purity")
    page.get_by_label("Color").select_option("purity")
    page.wait_for_function("() => window.slow > 0")
    page.get_by_label("Color").select_option("class")
    ready(page, ".legend .names button")
    page.wait_for_timeout(1_000)
    assert page.locator(".legend .names button").count() > 0


def test_views_change_with_the_sliders(page, address):
    page.goto(address + "#/views?img=images:3")
    ready(page, ".epoch img")
    assert "Exactly the views of training" in texts(page, ".views-head p")[-1]
    before = page.locator(".epoch img").first.get_attribute("src")
    page.get_by_role("slider", name="brightness").fill("1")
    page.wait_for_selector(".views-head p:has-text('A preview: the image, the settings or the seed are not those of')")
    assert page.locator(".epoch img").first.get_attribute("src") != before
    page.get_by_role("button", name="Reset").click()
    page.wait_for_selector(".views-head p:has-text('Exactly the views of training')")
    assert page.locator(".epoch img").first.get_attribute("src") == before


def test_curate_exports_a_list_that_data_accepts(page, address, explored, tmp_path):
    page.goto(address + "#/curate")
    ready(page, ".group .tile")
    threshold = page.get_by_role("slider", name="Smallest cosine")
    threshold.fill(threshold.get_attribute("min"))
    page.wait_for_selector(".group p:has-text('more, all in the list')")  # a group of more images than are shown
    (note,) = [text for text in texts(page, ".curate-controls p") if "beyond the first of each" in text]
    assert page.locator(".export-bar b").inner_text() == note.split(", ")[1].split()[0]
    threshold.fill("1")
    page.wait_for_selector(".group .tile[aria-label^='blue/copy.png']")
    page.wait_for_function("() => document.querySelectorAll('.group').length === 1")
    page.locator(".tile.choice.selected").first.click()
    page.wait_for_selector(".export-bar b:text-is('0')")
    page.locator(".tile.choice").nth(1).click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export the list").click()
    path = tmp_path / "list.txt"
    download.value.save_as(path)
    assert (
        "near-duplicate of blue/blue_0.png" in path.read_text() or "near-duplicate of blue/copy.png" in path.read_text()
    )
    assert len(open_dataset(str(path))) == 1
    for find, title in (("leaks", "Leaks"), ("outliers", "Outliers"), ("labels", "Suspect"), ("diverse", "Diverse")):
        page.get_by_role("radio", name=title).click()
        page.wait_for_url(f"**find={find}**")
        ready(page, ".curate-body .tile")
        if find == "leaks":
            assert page.locator(".leak .tile").first.get_attribute("aria-label") == "leak.png"


def test_keys_switch_screens_and_show_help(page, address):
    page.goto(address)
    ready(page, ".browse-grid .tile")
    page.keyboard.press("?")
    page.wait_for_selector("dialog.help[open]")
    page.keyboard.press("Escape")
    page.keyboard.press("3")
    ready(page, ".chart")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("1")
    page.keyboard.press("r")
    ready(page, ".neighbor-grid .tile")
    page.keyboard.press("/")
    assert page.url.endswith("#/neighbors")


@pytest.mark.parametrize("width", [390, 1280])
def test_every_screen_fits_the_window_with_readable_contrast(browser, address, width):
    for scheme in ("light", "dark"):
        context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
        page = context.new_page()
        for screen in SCREENS:
            page.goto(f"{address}#/{screen}")
            page.wait_for_selector("main .tile, main .chart, main .message, main .epoch")
            page.wait_for_selector(".pending", state="detached")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, screen
            low = page.evaluate(
                """() => {
                  const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(v => v / 255)
                    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
                    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
                  const ground = e => { for (; e; e = e.parentElement) {
                    const c = getComputedStyle(e).backgroundColor; if (!/rgba|transparent/.test(c)) return c; } };
                  return [...document.querySelectorAll('h1,h2,h3,p,td,th,dt,dd,small,a,b,output,summary,button')]
                    .filter(e => e.textContent.trim() && e.offsetWidth && !e.disabled && !e.classList.contains('tile'))
                    .map(e => { const a = light(getComputedStyle(e).color), b = light(ground(e));
                      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.outerHTML.slice(0, 90)]; })
                    .filter(([ratio]) => ratio < 4.5); }"""
            )
            assert low == [], (screen, scheme)
        context.close()


def test_a_static_folder_opens_without_a_server(page, explored, tmp_path, monkeypatch):
    monkeypatch.setattr("snclr.explorer.screens.map.umap_installed", lambda: False)  # its compilation takes long
    result = snclr.explore(
        explored / "one", explored / "two", static=tmp_path / "out", images=30, device="cpu", quiet=True
    )
    assert result.images == 30
    with pytest.raises(snclr.UserError, match="--overwrite"):
        snclr.explore(explored / "one", static=tmp_path / "out")
    index = (tmp_path / "out" / "index.html").as_uri()
    for screen in SCREENS:
        page.goto(f"{index}#/{screen}")
        page.wait_for_selector("main .tile, main .chart, main .epoch, main .curate-body p")
        page.wait_for_timeout(150)
        assert texts(page, ".message.error") == [], screen
    page.goto(f"{index}#/neighbors")
    for name in (HOSTILE_CLASS, ""):  # the requests of all classes are in the folder
        page.get_by_label("Class").select_option(name)
        page.wait_for_selector(".browse-grid .tile, .message")
        assert texts(page, ".message.error") == [], name
    page.locator(".browse-grid .tile").nth(4).click()
    page.wait_for_selector(".neighbor-grid .tile")
    page.locator(".neighbor-grid .tile").nth(2).click()
    page.wait_for_function("() => document.querySelectorAll('.trail .tile').length === 2")
    assert page.evaluate("[...document.images].filter(i => i.complete).every(i => i.naturalWidth > 0)")


def test_bad_arguments_are_explained(explored, tmp_path):
    for arguments, message in (
        ({"run": tmp_path / "none"}, "there is no run directory"),
        ({"run": explored / "one", "port": 70_000}, "--port must be from 0 to 65535"),
        ({"run": explored / "one", "static": explored / "images"}, "choose a new or empty folder"),
    ):
        with pytest.raises(snclr.UserError, match=message):
            snclr.explore(**arguments, quiet=True)
