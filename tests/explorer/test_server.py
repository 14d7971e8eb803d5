"""The server of the explorer: who may ask, what it serves, and what hostile uploads do."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

import snclr
from snclr.data.datasets.base import open_dataset
from snclr.errors import UserError
from snclr.evaluation.retrieval.gallery import Gallery
from snclr.evaluation.session import open_session
from snclr.explorer.explorer import MAX_UPLOAD_BYTES, Explorer
from snclr.explorer.listen import open_socket
from snclr.explorer.screens.training import summary
from snclr.explorer.server import build_app
from tests.helpers import tiny_run

TOKEN, PORT = "secret-token", 8811


@pytest.fixture(scope="module")
def trained(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that keeps the encoders of all its steps."""
    out = tmp_path_factory.mktemp("explored") / "run"
    return tiny_run.train(images, out, checkpoint_every=1, keep_checkpoints=6)


@pytest.fixture(scope="module")
def client(trained: Path, run: Path) -> Iterator[TestClient]:
    with open_session(trained, device="cpu", quiet=True) as session:
        explorer = Explorer(session, run)
        yield TestClient(build_app(explorer, TOKEN, PORT), base_url=f"http://127.0.0.1:{PORT}")
        explorer.jobs.close()


def ask(client: TestClient, path: str, **options: Any) -> Any:
    """Ask until the value is computed."""
    for _ in range(600):
        response = client.get(f"/{TOKEN}/{path}", **options)
        if response.status_code != 202:
            return response
        assert response.json()["pending"]["title"]
        time.sleep(0.05)
    raise AssertionError(f"{path} is still computed")


def png(width: int = 8, height: int = 8) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (220, 40, 30)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("port", [-1, 65_536, 99_999])
def test_a_port_out_of_range_is_refused_in_words(port):
    with pytest.raises(UserError, match=rf"^--port must be from 0 to 65535, not {port}; 0 chooses a free one$"):
        open_socket(port)


def test_the_opened_run_and_images_are_described(trained, run, images, tmp_path):
    test = tiny_run.write_images(tmp_path / "gallery", each=2)
    with open_session(trained, device="cpu", quiet=True) as session:
        explorer = Explorer(session, run, gallery=str(test))
        assert explorer.opening() == (
            f"{trained} at step 6, 49 images of {images}, compared with {run}, gallery {test}"
        )
        explorer.jobs.close()


# Who may ask


@pytest.mark.parametrize(
    "path", ["/", "/api/state", "/wrong/api/state", f"/{TOKEN}x/", f"//{TOKEN}/", "/image/images/0"]
)
def test_a_request_without_the_token_is_refused(client, path):
    response = client.get(path)
    assert response.status_code == 403
    assert "secret" not in response.text


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": f"evil.example:{PORT}"},
        {"host": "127.0.0.1"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": f"https://127.0.0.1:{PORT}"},
        {"origin": "http://127.0.0.1:9999"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_a_foreign_host_or_origin_is_refused(client, headers):
    for method in ("GET", "POST"):
        assert client.request(method, f"/{TOKEN}/api/state", headers=headers).status_code == 403


def test_our_own_page_may_ask(client):
    headers = {"origin": f"http://127.0.0.1:{PORT}", "sec-fetch-site": "same-origin"}
    assert client.get(f"/{TOKEN}/api/state", headers=headers).status_code == 200
    assert client.get(f"/{TOKEN}/", headers={"host": f"localhost:{PORT}"}).status_code == 200


def test_every_response_forbids_inline_scripts_and_other_sites(client):
    for path in (f"/{TOKEN}/", f"/{TOKEN}/assets/app.js", f"/{TOKEN}/api/state", "/"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "script-src 'self';" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
    page = client.get(f"/{TOKEN}/").text
    assert "onclick" not in page
    assert page.count("<script") == page.count('<script type="module" src="assets/app.js">')


def test_the_server_listens_on_this_machine_only():
    with open_socket(0) as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(UserError, match=rf"port {port} cannot be used \(.*in use\)\. Choose another --port\."):
            open_socket(port)


# What is served


@pytest.mark.parametrize(
    "path",
    [
        "assets/../security.py", "assets/..%2fsecurity.py", "assets/%2e%2e/security.py", "assets//etc/passwd",
        "image/images/..%2f..%2fetc%2fpasswd", "image/images/-1", "image/images/999999", "image/other/0",
        "image/images/0.png", "image/..%2fimages/0", "image/images/1e0", "image/queries/0", "image/images/%00",
        "api/images?set=../..", "config.yaml", "assets/app.js/..", "api/neighbors?set=images&id=../1",
    ],
)  # fmt: skip
def test_only_images_by_id_and_the_files_of_the_page_are_served(client, path):
    response = client.get(f"/{TOKEN}/{path}")
    assert response.status_code in (400, 404)
    assert "root:" not in response.text
    assert "compare_digest" not in response.text


def test_images_are_encoded_again_without_metadata(images, trained, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    exif = Image.Exif()
    exif[0x010E] = "private"
    for number in range(3):
        Image.new("RGB", (300, 200), (number * 50, 9, 9)).save(folder / f"{number}.jpg", exif=exif)
    with open_session(trained, device="cpu", quiet=True) as session:
        explorer = Explorer(session, data=str(folder))
        client = TestClient(build_app(explorer, TOKEN, PORT), base_url=f"http://127.0.0.1:{PORT}")
        response = client.get(f"/{TOKEN}/image/images/1?side=96")
        explorer.jobs.close()
    assert b"private" not in response.content
    assert Image.open(io.BytesIO(response.content)).size == (96, 64)


def test_only_the_feature_cache_of_the_run_is_written(client, trained):
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*") if "evaluation" not in path.parts}
    for path in ("api/map", "api/time", "api/run", "api/curate/duplicates", "api/neighbors?set=images&id=0"):
        assert ask(client, path).status_code == 200
    after = {path: path.stat().st_mtime_ns for path in trained.rglob("*") if "evaluation" not in path.parts}
    assert {path for path in after if path.is_file()} == {path for path in before if path.is_file()}
    assert all(before[path] == after[path] for path in before if path.is_file())


# Uploads


def test_an_upload_becomes_a_query(client, images):
    data = (images / "green" / "green_2.png").read_bytes()
    name = "%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E"
    made = client.post(f"/{TOKEN}/api/query", content=data, headers={"x-file-name": name}).json()
    assert made["key"] == "<img src=x onerror=alert(1)>"
    found = ask(client, f"api/neighbors?set=queries&id={made['id']}&space=encoder").json()
    assert found["neighbors"][0]["key"] == "green/green_2.png"
    assert found["neighbors"][0]["cosine"] == pytest.approx(1, abs=1e-5)


@functools.cache
def hostile_files() -> dict[str, bytes]:
    gif = b"GIF89a" + b"\xff\xff\xff\xff" + b"\x00" * 40  # 65535 × 65535 pixels
    bomb = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(bomb, "PNG", optimize=True)
    return {
        "empty": b"",
        "text": b"no image at all",
        "html": b"<html><script>alert(1)</script></html>",
        "svg": b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>",
        "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) run\n",
        "truncated": png(64, 64)[:80],
        "huge header": gif,
        "bomb": bomb.getvalue(),
        "zip": b"PK\x03\x04" + bytes(100),
    }


@pytest.mark.parametrize("name", hostile_files())
def test_hostile_uploads_are_refused_and_the_server_lives(client, name):
    response = client.post(f"/{TOKEN}/api/query", content=hostile_files()[name])
    assert response.status_code == 422
    assert "cannot be read" in response.json()["error"]
    assert client.get(f"/{TOKEN}/api/state").status_code == 200


def test_an_upload_that_is_too_large_is_refused(client):
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while sent < 3 * MAX_UPLOAD_BYTES:
            sent += 2**20
            yield bytes(2**20)

    response = client.post(f"/{TOKEN}/api/query", content=endless())
    assert response.status_code == 400
    assert "larger than 20 MB" in response.json()["error"]


@pytest.mark.parametrize(
    "body",
    [
        "", "[]", "{", "[" * 5000, '{"set": "images"}', '{"set": "images", "id": 0, "box": [0, 0, 2, 1]}',
        '{"set": "x", "id": 0, "box": [0, 0, 1, 1]}', '{"set": "images", "id": 0, "box": [0.5, 0.5, 0.1, 0.1]}',
        '{"set": "images", "id": "../0", "box": [0, 0, 1, 1]}', '[["set", "images"], ["id", 0], ["box", [0, 0, 1, 1]]]',
    ],
)  # fmt: skip
def test_bad_boxes_are_refused(client, body):
    assert client.post(f"/{TOKEN}/api/box", content=body).status_code == 400


def test_a_box_of_an_image_is_a_query(client):
    body = json.dumps({"set": "images", "id": 0, "box": [0.1, 0.1, 0.9, 0.6]})
    made = client.post(f"/{TOKEN}/api/box", content=body).json()
    image = Image.open(io.BytesIO(client.get(f"/{TOKEN}/image/queries/{made['id']}?side=384").content))
    assert image.size == (16, 10)


# Screens


def test_neighbors_have_the_numbers_of_explain(client, trained, images):
    dataset = open_dataset(str(images))
    found = ask(client, "api/neighbors?set=images&id=7&space=projection&gallery=images&k=8").json()
    explained = snclr.explain(trained, images / dataset.key(7), candidates=str(images), quiet=True)
    assert found["loss"] == pytest.approx(explained.loss, rel=1e-4)
    for ours, term in zip(found["neighbors"][:5], explained.terms[1:], strict=True):
        assert ours["key"] == term.key
        assert [ours["cosine"], ours["w"], ours["p"], ours["share"]] == pytest.approx(
            [term.cosine, term.w, term.p, term.share], abs=1e-4
        )
    assert [each["share"] for each in found["neighbors"][5:]] == [None] * 3
    assert found["own"]["share"] == pytest.approx(explained.terms[0].share, abs=1e-4)
    assert 7 not in [each["id"] for each in found["neighbors"]]


def test_the_queue_is_a_gallery(client):
    found = ask(client, "api/neighbors?set=images&id=7&space=projection&gallery=queue").json()
    assert "over 40 images" in found["search"]
    assert found["neighbors"][0]["set"] == "images"
    assert ask(client, "api/neighbors?set=images&id=7&space=encoder&gallery=queue").status_code == 400


def test_map_arrays_have_one_entry_per_readable_image(client):
    described = ask(client, "api/map").json()
    assert described["count"] == 48
    assert "umap" in described["layouts"]
    points = np.frombuffer(ask(client, "api/map/points").content, np.float32)
    assert points.shape == (96,)
    assert np.isfinite(points).all()
    for mode in described["modes"]:
        values = np.frombuffer(ask(client, f"api/map/values?mode={mode['name']}").content, np.float32)
        assert len(values) == 48
        assert np.isfinite(values).all(), mode
    fidelity = ask(client, "api/map/fidelity").json()
    assert 0 < fidelity["kept"] <= 1
    assert ask(client, "api/map/values?mode=other").status_code == 400


def test_the_loss_of_the_map_is_that_of_explain(client):
    losses = np.frombuffer(ask(client, "api/map/values?mode=loss").content, np.float32)
    ids = np.frombuffer(ask(client, "api/map/ids").content, np.float32)
    row = int(np.flatnonzero(ids == 7)[0])
    found = ask(client, "api/neighbors?set=images&id=7&space=projection&gallery=images").json()
    assert losses[row] == pytest.approx(found["loss"], rel=1e-4)


def test_the_loss_of_the_map_has_the_raised_weights_of_gamma_pull(trained):
    from snclr.explorer.opened_run import OpenedRun

    def report(done: int, total: int) -> None: ...

    with open_session(trained, device="cpu", quiet=True) as session:
        run = OpenedRun("a", trained, session)
        images = open_dataset(str(run.config.data))
        y1, y2 = (run.features(network, images, report) for network in ("y1", "y2"))
    plain = run.losses(y1, y2, y2, report)
    assert run.criterion is not None
    run.criterion.config = replace(run.criterion.config, gamma="pull")
    losses = run.losses(y1, y2, y2, report)
    gallery = Gallery(y2.features, y2.ids, images, "images")
    rows = ([n] for n in range(len(losses)))
    explained = [run.explain(y1.raw[n], y2.features[n], y2.features[n], gallery, int(y2.ids[n]))[0] for n in rows]
    assert losses.tolist() == pytest.approx(explained, rel=1e-4)
    assert (losses - plain).abs().max() > 0.01


def test_neighbors_of_a_run_that_searches_encoder_features_are_those_of_explain(images, tmp_path):
    run = tiny_run.train(images, tmp_path / "run", epochs=1, warmup_epochs=0, search_space="encoder")
    key = open_dataset(str(images)).key(7)
    with open_session(run, device="cpu", quiet=True) as session:
        explorer = Explorer(session, None)
        client = TestClient(build_app(explorer, TOKEN, PORT), base_url=f"http://127.0.0.1:{PORT}")
        for gallery, candidates in (("images", str(images)), ("queue", "queue")):
            found = ask(client, f"api/neighbors?set=images&id=7&space=projection&gallery={gallery}").json()
            explained = snclr.explain(run, images / key, candidates=candidates, quiet=True)
            assert found["loss"] == pytest.approx(explained.loss, rel=1e-4)
            assert "features of the target encoder" in found["note"]
            if gallery == "images":
                losses = np.frombuffer(ask(client, "api/map/values?mode=loss").content, np.float32)
                ids = np.frombuffer(ask(client, "api/map/ids").content, np.float32)
                assert losses[np.flatnonzero(ids == 7)[0]] == pytest.approx(explained.loss, rel=1e-4)
        explorer.jobs.close()


def test_a_kept_checkpoint_has_the_encoder_that_the_run_exports(images, tmp_path):
    from snclr.explorer.opened_run import OpenedRun

    settings = {"method": "dino", "prototypes": 8, "neighbors": None, "queue_length": None}
    out = tiny_run.train(images, tmp_path / "dino", **settings)
    with open_session(out, device="cpu", quiet=True) as session:
        run = OpenedRun("a", out, session)
        dataset = open_dataset(str(images))
        step, path = run.kept_encoders()[-1]
        kept = run.kept_features(step, path, dataset, lambda done, total: None)
        exported = run.features("encoder", dataset, lambda done, total: None)
    torch.testing.assert_close(kept.features, exported.features)


def test_the_run_screen_has_curves_bad_images_and_changed_settings(client):
    found = ask(client, "api/run").json()
    assert [each["key"] for each in found["bad"]] == ["red/broken.png"]
    assert found["state"] == "complete"
    assert set(found["chance"]) == {"neighbor_purity", "queue_knn"}
    assert found["chance"]["neighbor_purity"] == ask(client, "api/time").json()["chance"]
    assert any("loss" in point for point in found["points"])
    changed = {each["name"]: each for each in found["settings"] if each["recipe"] is not None}
    assert changed["queue_length"]["value"] == "40"
    assert ask(client, "api/run/spectrum").json()["effective_rank"] > 1


def test_a_run_without_an_encoder_is_in_progress_only_while_it_is_locked(trained, tmp_path):
    copy = shutil.copytree(trained, tmp_path / "copy")
    (copy / "encoder.safetensors").unlink()
    (copy / "sessions.jsonl").unlink()  # as after a kill, no session has ended
    with open_session(copy, device="cpu", quiet=True) as session:
        explorer = Explorer(session)
        assert summary(explorer, explorer.run)["state"] == "stopped"
        assert explorer.run.dir.lock.acquire()
        assert summary(explorer, explorer.run)["state"] == "in progress"
        explorer.run.dir.lock.release()
        explorer.jobs.close()


def test_events_send_the_state_of_a_growing_run(trained, run, images, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    with open_session(copy, device="cpu", quiet=True) as session:
        explorer = Explorer(session)
        app = build_app(explorer, TOKEN, PORT)
        assert events(app, copy, explorer) == [6, 7]


def events(app: Any, folder: Path, explorer: Explorer) -> list[int]:
    """Read two events; a line is added to the metrics after the first."""
    steps: list[int] = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(30)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        for line in message.get("body", b"").decode().splitlines():
            if line.startswith("data: "):
                steps.append(json.loads(line.removeprefix("data: "))["step"])
                with (folder / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps({"step": steps[-1] + 1, "epoch": 2.1, "loss": 1.0}) + "\n")
                if len(steps) == 2:
                    explorer.jobs.close()

    scope = {
        "type": "http", "method": "GET", "path": f"/{TOKEN}/api/events", "query_string": b"run=a", "scheme": "http",
        "headers": [(b"host", f"127.0.0.1:{PORT}".encode())], "http_version": "1.1", "server": ("127.0.0.1", PORT),
    }  # fmt: skip
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 60))
    return steps


def test_time_lists_which_neighbors_entered_and_left(client):
    found = ask(client, "api/time").json()
    assert [each["step"] for each in found["steps"]] == [1, 2, 3, 4, 5, 6]
    maps = np.frombuffer(ask(client, "api/time/maps").content, np.float32)
    assert maps.shape == (6 * 48 * 2,)
    history = ask(client, "api/time/history?id=7").json()
    before: set[int] = set()
    for number, step in enumerate(history["steps"]):
        now = {each["id"] for each in step["neighbors"]}
        if number:
            assert {each["id"] for each in step["neighbors"] if each["entered"]} == now - before
            assert {each["id"] for each in step["left"]} == before - now
        before = now


def test_the_maps_of_a_growing_run_have_the_encoders_that_are_kept_now(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    with open_session(folder, device="cpu", quiet=True) as session:
        explorer = Explorer(session)
        client = TestClient(build_app(explorer, TOKEN, PORT), base_url=f"http://127.0.0.1:{PORT}")
        first = np.frombuffer(ask(client, "api/time/maps").content, np.float32)
        shutil.rmtree(next(iter(dict(explorer.run.kept_encoders()).values())))  # as the training does
        now = np.frombuffer(ask(client, "api/time/maps").content, np.float32)
        steps = ask(client, "api/time").json()["steps"]
        explorer.jobs.close()
    assert (len(first), len(now), len(steps)) == (6 * 48 * 2, 5 * 48 * 2, 5)


def test_compare_sorts_images_by_the_overlap_of_their_neighbors(client):
    names = [each["name"] for each in ask(client, "api/compare/encoders").json()]
    assert names[:2] == ["a", "b"]
    assert names[-1] == "pixels"
    for other in ("b", "pixels", "step-1"):
        found = ask(client, f"api/compare?one=a&other={other}&limit=100").json()
        overlaps = [each["overlap"] for each in found["images"]]
        assert overlaps == sorted(overlaps)
        assert len(overlaps) == 48
        image = found["images"][0]
        pair = ask(client, f"api/compare/pair?one=a&other={other}&id={image['id']}").json()
        common = {each["id"] for each in pair["one"]} & {each["id"] for each in pair["other"]}
        assert len(common) / found["k"] == pytest.approx(image["overlap"])
    same = ask(client, "api/compare?one=a&other=a").json()
    assert same["overlap"] == 1.0


def test_a_stop_signal_ends_the_writing_of_a_static_folder(trained, tmp_path):
    from snclr.explorer.static import write_static
    from snclr.runtime.stop import StopRequested

    with open_session(trained, device="cpu", quiet=True) as session:
        explorer = Explorer(session)
        session.stop.request(signal.SIGTERM)
        with pytest.raises(StopRequested):
            write_static(explorer, tmp_path / "out", images=10, quiet=True)
        session.stop.requested = None
        explorer.jobs.close()


def test_a_static_folder_of_other_images_has_no_chance_levels_of_the_training_set(trained, tmp_path, monkeypatch):
    monkeypatch.setattr("snclr.explorer.screens.map.umap_installed", lambda: False)  # its compilation takes long
    other = tiny_run.write_images(tmp_path / "other", each=2)
    result = snclr.explore(trained, data=str(other), static=tmp_path / "out", images=4, device="cpu", quiet=True)
    assert result.images == 4
    run = (tmp_path / "out" / "data" / "run-a.js").read_text()
    assert '"chance": {}' in run


def test_two_runs_are_compared_on_all_images_and_pixels_on_a_sample(client, monkeypatch):
    monkeypatch.setattr("snclr.explorer.screens.compare.SAMPLE", 20)
    counts = {other: ask(client, f"api/compare?one=a&other={other}").json()["count"] for other in ("b", "pixels")}
    assert counts == {"b": 48, "pixels": 19}  # one of the 20 sampled images is damaged


def test_views_are_those_of_training(client, trained, images):
    from snclr.data.loader import ViewLoader
    from snclr.explorer.opened_run import OpenedRun
    from snclr.train.build import view_settings

    dataset = open_dataset(str(images))
    with open_session(trained, device="cpu", quiet=True) as session:
        run = OpenedRun("a", trained, session)
    loader = ViewLoader(dataset, views=view_settings(run.config), image_size=16, batch_size=16, seed=run.seed)
    batch = next(loader.batches(start=4, stop=5))  # of epoch 1
    row = 3
    for view in (0, 1):
        settings = run.view_settings()[view]
        ours = run.augment(dataset, int(batch.ids[row]), settings, seed=run.seed, epoch=batch.epoch, view=view)
        assert torch.equal(ours[0], batch.views[view][row])
    found = ask(client, f"api/views?set=images&id={int(batch.ids[row])}&epoch=1&count=2").json()
    assert found["exact"]
    assert [each["epoch"] for each in found["epochs"]] == [1, 2]
    changed = ask(client, "api/views?set=images&id=3&0.hue=0.5&1.hue=0.5").json()
    assert not changed["exact"]
    assert ask(client, "api/views?set=images&id=3&0.hue=0.9").status_code == 400


def test_a_method_with_one_view_shows_it_twice(trained):
    from snclr.explorer.opened_run import OpenedRun
    from snclr.train.config import resolve

    with open_session(trained, device="cpu", quiet=True) as session:
        run = OpenedRun("a", trained, session)
    run.config = resolve({"recipe": "demo", "method": "mae", "encoder": "vit_tiny"})
    first, second = run.view_settings()
    assert first == second
    assert (first.crop_min, first.jitter) == (0.2, 0.0)


def test_an_exported_list_has_reasons_and_names_no_image_outside(client, images, tmp_path):
    body = {"kind": "near-duplicates", "entries": [{"id": 3, "reason": "because\nof"}, {"id": 5, "reason": "so"}]}
    text = client.post(f"/{TOKEN}/api/export", content=json.dumps(body)).text
    (tmp_path / "list.txt").write_text(text)
    assert len(open_dataset(str(tmp_path / "list.txt"))) == 2
    assert "# because\\nof\n" in text
    rest = client.post(f"/{TOKEN}/api/export", content=json.dumps({**body, "rest": True})).text
    assert len([line for line in rest.splitlines() if not line.startswith("#")]) == 47
    for wrong in ({"id": 999, "reason": ""}, {"id": "../x", "reason": ""}, {"reason": ""}):
        response = client.post(f"/{TOKEN}/api/export", content=json.dumps({**body, "entries": [wrong]}))
        assert response.status_code == 400


@pytest.mark.parametrize("find", ["duplicates", "outliers", "labels", "diverse"])
def test_curation_answers_for_each_kind(client, find):
    found = ask(client, f"api/curate/{find}").json()
    if find == "labels":  # the colors are easy to tell apart
        assert (found["labeled"], found["total"]) == (48, 0)
    else:
        assert found["pairs" if find == "duplicates" else "images"]


def test_leaks_need_test_images(client):
    assert "give --test" in ask(client, "api/curate/leaks").json()["error"]


def test_a_folder_with_an_encoder_only_can_be_explored(run, images, tmp_path):
    for name in ("encoder.safetensors", "config.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    with open_session(tmp_path, device="cpu", quiet=True) as session:
        explorer = Explorer(session, data=str(images))
        client = TestClient(build_app(explorer, TOKEN, PORT), base_url=f"http://127.0.0.1:{PORT}")
        found = ask(client, "api/neighbors?set=images&id=2").json()
        assert found["neighbors"][0]["w"] == pytest.approx(1)
        assert found["loss"] is None
        assert "has no time axis" in ask(client, "api/time").json()["error"]
        explorer.jobs.close()


def test_an_interrupt_before_the_server_runs_ends_it(run: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a script ignores it
    try:
        snclr.explore(run, port=0, quiet=True, on_ready=lambda _: signal.raise_signal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
