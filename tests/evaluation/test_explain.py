from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import snclr
from snclr.cli.main import main
from snclr.data.decode import decode
from snclr.data.transforms.crop import center_crop
from snclr.data.transforms.views import normalize
from snclr.errors import UserError
from snclr.evaluation.retrieval.explain import QueryFeatures, explain_loss
from snclr.evaluation.retrieval.gallery import Gallery
from snclr.evaluation.retrieval.space import weigh_as_trained
from snclr.methods.snclr.loss import FORMS, SIDES, SoftNeighborLoss
from snclr.train.load_run import load_trained_method
from tests.helpers import tiny_run
from tests.methods import naive


def unit(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return F.normalize(torch.randn(*shape, generator=generator), dim=-1)


@given(
    seed=st.integers(0, 2**32 - 1),
    queued=st.integers(1, 20),
    k=st.integers(1, 6),
    tau=st.sampled_from([0.05, 0.2, 1.0]),
    form=st.sampled_from(FORMS),
    sides=st.sampled_from(SIDES),
    gamma=st.sampled_from([1.0, 0.3, "max", "pull"]),
    temperature=st.sampled_from([0.1, 1.0]),
    hard=st.booleans(),
    times_2tau=st.booleans(),
    by_encoder=st.booleans(),
)
@settings(max_examples=150)
def test_terms_match_a_naive_implementation(
    seed, queued, k, tau, form, sides, gamma, temperature, hard, times_2tau, by_encoder
):
    gamma = 1.0 if gamma == "pull" and form == "outside" else gamma
    generator = torch.Generator().manual_seed(seed)
    y1, z1, y2, c = (unit(generator, size, 8) for size in (1, 1, 1, queued))
    ids = torch.randint(6, (queued,), generator=generator)
    ids[-1] = 6  # at least one other image
    criterion = SoftNeighborLoss(
        dim=8, queue_length=4, neighbors=k, temperature=tau, loss_form=form, sides=sides, gamma=gamma,
        attention_temperature=temperature, neighbor_weights="hard" if hard else "soft", times_2tau=times_2tau,
    )  # fmt: skip
    query, searched = (unit(generator, 1, 5), unit(generator, queued, 5)) if by_encoder else (y2, c)
    gallery = Gallery(searched, ids, None, "queue", projections=c if by_encoder else None)
    actual_loss, terms = explain_loss(criterion, QueryFeatures(y1, z1, y2, query), gallery, own_id=0)

    (picks,) = naive.search(query, searched, k, [0], ids.tolist())  # Eq. 3
    assert [term.index for term in terms] == [None, *ids[picks].tolist()]
    y1, z1, y2, c = (t.double() for t in (y1, z1, y2, c))
    w = naive.positiveness(y1[0], c, picks, 1.0 if gamma == "pull" else gamma, temperature)  # Eq. 4
    w = [torch.ones(()) for _ in w] if hard else w
    if gamma == "pull" and not hard and sides in ("both", "positives"):
        w = naive.pulling_weights(z1, y2, c, [picks], w, 0, tau, sides)
    assert [term.w for term in terms] == pytest.approx([1.0, *map(float, w)], abs=1e-5)
    keys = [y2[0], *(c[pick] for pick in picks)]
    cosines = [1.0, *(float(query[0] @ searched[pick]) for pick in picks)]
    assert [term.cosine for term in terms] == pytest.approx(cosines, abs=1e-5)
    exps = [float(torch.exp(z1[0] @ key / tau)) for key in keys]
    alone = sides in ("neither", "other-negatives")
    total = exps[0] if alone else sum(exps)
    p = [exps[0] / total] + [0.0 if alone else e / total for e in exps[1:]]
    assert [term.p for term in terms] == pytest.approx(p, abs=1e-5)

    w_double = [weight.double() for weight in w]
    loss = float(naive.soft_neighbor_row(z1, y2, c, [picks], w_double, 0, tau, form, sides))  # Eq. 2, one row
    assert actual_loss == pytest.approx(loss * (2 * tau if times_2tau else 1), rel=1e-4, abs=1e-4)
    total_of_terms = sum(term.term for term in terms)
    if form == "inside" or sides not in ("both", "positives"):
        assert float(-torch.log(torch.tensor(total_of_terms).double())) == pytest.approx(loss, rel=1e-4, abs=1e-4)
    else:
        assert total_of_terms == pytest.approx(loss, rel=1e-4, abs=1e-4)
    assert sum(term.share for term in terms) == pytest.approx(1.0)
    for term in terms:
        assert term.share == pytest.approx(term.term / total_of_terms, abs=1e-6)
    if sides not in ("both", "positives"):
        assert [term.share for term in terms[1:]] == [0.0] * len(picks)


def test_a_gallery_of_only_the_image_itself_raises_user_error():
    views = QueryFeatures(*(F.normalize(torch.ones(1, 4), dim=1) for _ in range(4)))
    criterion = SoftNeighborLoss(dim=4, queue_length=4, neighbors=2)
    for gallery, ids in ((torch.empty(0, 4), torch.empty(0, dtype=torch.int64)), (torch.eye(4), torch.full((4,), 3))):
        with pytest.raises(UserError, match="no candidate other than"):
            explain_loss(criterion, views, Gallery(gallery, ids, None, "queue"), own_id=3)


# ---- with a run


@pytest.mark.parametrize(("form", "space"), [*((form, "projection") for form in FORMS), ("inside", "encoder")])
def test_the_loss_is_half_of_the_loss_in_training(images, form, space, tmp_path):
    run = tiny_run.train(
        images, tmp_path / "run", loss_form=form, gamma="max", attention="linear", attention_gradient=True, epochs=1,
        warmup_epochs=0, times_2tau=True, search_space=space,
    )  # fmt: skip
    done = snclr.explain(run, images / "blue/blue_4.png", quiet=True)
    method, config = load_trained_method(run)
    x = normalize(center_crop(decode(images / "blue/blue_4.png"), config.image_size)[None])
    with torch.no_grad():
        own = sorted(path.name for path in (images / "blue").iterdir()).index("blue_4.png")  # blue comes first
        output = method((x, x), torch.tensor([own]), epoch=0)
    assert output.loss.item() == pytest.approx(2 * done.loss, rel=1e-5)
    assert [term.index for term in done.terms[1:]] == output.neighbor_ids[0].tolist()
    assert [term.w for term in done.terms[1:]] == pytest.approx(output.positiveness[0].tolist(), rel=1e-5)
    assert [term.cosine for term in done.terms[1:]] == pytest.approx(output.similarity[0].tolist(), abs=1e-6)
    shown = snclr.neighbors(run, [images / "blue/blue_4.png"], candidates="queue", k=config.neighbors, quiet=True)
    found = {(n.index, round(n.cosine, 5), round(n.w, 5)) for n in shown.rows[0].neighbors}
    assert found == {(t.index, round(t.cosine, 5), round(t.w, 5)) for t in done.terms[1:]}


def test_queue_entries_are_named_by_training_images(run, images):
    done = snclr.explain(run, images / "red/red_7.png", quiet=True)
    dataset = snclr.open_dataset(images)
    assert done.neighbors == 5
    for term in done.terms[1:]:
        assert term.key == dataset.key(term.index)
        assert term.label == term.key.split("/")[0]
        assert term.key != "red/red_7.png"
    assert done.terms[0].label == "red"
    by_key = snclr.explain(run, "red/red_7.png", quiet=True)
    assert by_key.loss == done.loss
    assert "the sum over the rows above" in done.denominator
    assert "center crop" in done.view
    with Image.open(run / "figures" / "explain-red_7.png") as figure:
        assert figure.width > 6 * 132


def test_a_folder_of_candidates_excludes_the_image_itself(run, images, tmp_path):
    done = snclr.explain(run, images / "red/red_7.png", candidates=str(images), out=tmp_path / "new/e.png", quiet=True)
    assert (tmp_path / "new/e.png").is_file()
    assert "48 images" in done.candidates
    keys = [term.key for term in done.terms[1:]]
    assert len(keys) == 5
    assert "red/red_7.png" not in keys
    other = tiny_run.write_images(tmp_path / "other", each=2, seed=4)
    elsewhere = snclr.explain(run, images / "red/red_7.png", candidates=str(other), out=tmp_path / "o.png", quiet=True)
    assert {term.key for term in elsewhere.terms[1:]} <= {f"{c}/{c}_{i}.png" for c in tiny_run.COLORS for i in (0, 1)}


def test_neighbors_are_numbered_if_training_images_are_missing_or_changed(images, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(images, moved)
    run = tiny_run.train(moved, tmp_path / "run", epochs=1, warmup_epochs=0)
    before = snclr.explain(run, images / "red/red_1.png", quiet=True)
    (moved / "red/red_3.png").unlink()
    changed = snclr.explain(run, images / "red/red_1.png", quiet=True)
    assert "have changed" in changed.note
    shutil.rmtree(moved)
    gone = snclr.explain(run, images / "red/red_1.png", quiet=True)
    assert "not available" in gone.note
    for done in (changed, gone):
        assert [term.p for term in done.terms] == [term.p for term in before.terms]
        assert [term.key for term in done.terms[1:]] == [f"image {t.index}" for t in before.terms[1:]]


def test_a_run_that_ended_without_neighbors_in_the_loss_is_named(images, tmp_path, capsys):
    run = tiny_run.train(images, tmp_path / "run", epochs=1, warmup_epochs=0, min_agreement=1.0)
    assert main(["explain", str(run), str(images / "green/green_0.png")]) == 0
    assert "training's last epoch had no neighbors in the loss (--min-agreement 1)" in capsys.readouterr().out


def test_a_run_whose_settings_have_no_neighbors_does_not_name_the_gate(images, tmp_path):
    run = tiny_run.train(images, tmp_path / "run", epochs=1, warmup_epochs=0, min_agreement=1.0, sides="neither")
    assert snclr.explain(run, images / "green/green_0.png", quiet=True).gate is None


def test_the_command_prints_a_table_or_json(run, images, capsys):
    assert main(["explain", str(run), str(images / "green/green_0.png")]) == 0
    captured = capsys.readouterr()
    lines = [line for line in captured.out.splitlines() if line.strip()[:1].isdigit()]
    assert len(lines) == 6
    assert "(y2)" in lines[0]
    assert "the loss is −log Σ w p" in captured.out
    assert main(["explain", str(run), str(images / "green/green_0.png"), "--json"]) == 0
    captured = capsys.readouterr()
    done = json.loads(captured.out)
    assert captured.err == ""
    assert f"{done['terms'][1]['w']:.4f}" in lines[1]
    assert sum(term["p"] for term in done["terms"]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("image", "flags", "message"),
    [
        ("{images}/red/broken.png", [], "cannot be read"),
        ("{images}/red", [], "one image"),
        ("nothing.png", [], "no file or folder"),
        ("{images}/red/red_1.png", ["--candidates", "no-such-folder"], "no-such-folder"),
        ("{images}/red/red_1.png", ["--out", "e.pdf"], ".png"),
    ],
)
def test_bad_input_exits_with_code_2(run, images, image, flags, message, capsys):
    assert main(["explain", str(run), image.format(images=images), *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "choices",
    [
        {"gamma": 0.5, "attention_temperature": 0.3},
        {"gamma": "max", "attention": "linear", "attention_gradient": True},
        {"neighbor_weights": "hard"},
    ],
)
def test_weights_equal_those_in_training(choices):
    generator = torch.Generator().manual_seed(3)
    criterion = SoftNeighborLoss(dim=6, queue_length=20, neighbors=4, **choices)
    with torch.no_grad():
        for part in (*criterion.f1.parameters(), *criterion.f2.parameters()):
            part.add_(torch.randn(part.shape, generator=generator))
    criterion.queue.push(unit(generator, 9, 6), torch.arange(9))
    y1, z1, y2 = (unit(generator, 5, 6) for _ in range(3))
    trained = criterion(y1, z1, y2, torch.arange(5))
    near = criterion.queue.candidates[trained.neighbors.index.clamp(min=0)]
    w = weigh_as_trained(criterion, y1, near, trained.neighbors.mask)
    torch.testing.assert_close(w.detach(), trained.w)
