from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn

from snclr.data.datasets.base import ArrayDataset, FileDataset, open_dataset
from snclr.data.transforms.views import MEAN, STD
from snclr.errors import UserError
from snclr.evaluation.features import BatchPlan, Chunks, extract_features
from snclr.evaluation.session import open_session
from snclr.evaluation.state import FeatureStore


def tiny_encoder(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net(torch.randn(8, 3, 8, 8))  # running statistics that differ from those of the images below
    return net


def tiny_dataset(n: int = 13, side: int = 8, seed: int = 0) -> ArrayDataset:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (n, side, side, 3), dtype=np.uint8)
    return ArrayDataset("tiny", images, np.arange(n, dtype=np.int64) % 3, ["a", "b", "c"])


def by_hand(encoder: nn.Module, images: np.ndarray) -> Tensor:
    x = (images.transpose(0, 3, 1, 2) / 255 - np.reshape(MEAN, (3, 1, 1))) / np.reshape(STD, (3, 1, 1))
    with torch.no_grad():
        return encoder.eval()(torch.from_numpy(x).float())


def save_images(dataset: ArrayDataset, folder: Path) -> None:
    for index, image in enumerate(dataset.images):
        class_folder = folder / "abc"[index % 3]
        class_folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(class_folder / f"{index:02}.png")


def test_features_are_computed_in_evaluation_mode() -> None:
    dataset, encoder = tiny_dataset(), tiny_encoder()
    extracted = extract_features(encoder, dataset, image_size=8, batch_size=5, quiet=True)
    assert extracted.features.dtype == torch.float32
    torch.testing.assert_close(extracted.features, by_hand(encoder, dataset.images))
    assert extracted.ids.tolist() == list(range(13))
    assert extracted.labels is not None
    assert extracted.labels.tolist() == [i % 3 for i in range(13)]
    assert extracted.skipped == []


def test_the_weights_are_not_modified() -> None:
    encoder = tiny_encoder().train()
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    extract_features(encoder, tiny_dataset(), image_size=8, quiet=True)
    assert not any(module.training for module in encoder.modules())
    assert all(torch.equal(before[name], value) for name, value in encoder.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in encoder.parameters())


def test_an_encoder_without_feature_vectors_is_refused() -> None:
    with pytest.raises(UserError, match="without its classifier"):
        extract_features(nn.Sequential(nn.Conv2d(3, 2, 3)), tiny_dataset(), image_size=8, quiet=True)


def test_features_can_be_trained_on() -> None:
    features = extract_features(tiny_encoder(), tiny_dataset(), image_size=8, quiet=True).features
    layer = nn.Linear(4, 2)
    layer(features).sum().backward()  # fails on tensors of inference mode
    assert layer.weight.grad is not None


def test_files_and_arrays_agree_and_unreadable_files_are_skipped(tmp_path: Path) -> None:
    dataset, encoder = tiny_dataset(), tiny_encoder()
    save_images(dataset, tmp_path)
    (tmp_path / "b" / "01.png").write_bytes(b"not an image")
    files = open_dataset(tmp_path)
    extracted = extract_features(encoder, files, image_size=8, batch_size=4, quiet=True)
    numbers = [int(Path(files.key(i)).stem) for i in extracted.ids.tolist()]
    assert sorted(numbers) == [0, *range(2, 13)]
    torch.testing.assert_close(extracted.features, by_hand(encoder, dataset.images[numbers]))
    assert extracted.labels is not None
    assert extracted.labels.tolist() == [number % 3 for number in numbers]
    (skip,) = extracted.skipped
    assert skip.key == "b/01.png"
    assert files.key(skip.index) == skip.key
    assert "image" in skip.reason


@pytest.mark.slow
def test_workers_do_not_change_the_features(tmp_path: Path) -> None:
    save_images(tiny_dataset(), tmp_path)
    (tmp_path / "b" / "01.png").write_bytes(b"")
    files, encoder = open_dataset(tmp_path), tiny_encoder()
    without = extract_features(encoder, files, image_size=8, batch_size=4, quiet=True)
    with_workers = extract_features(encoder, files, image_size=8, batch_size=4, workers=2, quiet=True)
    assert torch.equal(without.features, with_workers.features)
    assert torch.equal(without.ids, with_workers.ids)
    assert without.skipped == with_workers.skipped


def test_a_dataset_without_readable_images_raises_user_error(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.png").write_bytes(b"")
    dataset = FileDataset("mine", tmp_path, ["a.png", "b.png"])
    with pytest.raises(UserError, match=r"no image of mine could be read .* a.png: empty file"):
        extract_features(tiny_encoder(), dataset, image_size=8, quiet=True)


def test_an_empty_dataset_raises_user_error() -> None:
    with pytest.raises(UserError, match="no images"):
        extract_features(tiny_encoder(), tiny_dataset(0), image_size=8, quiet=True)


def test_images_are_resized_to_the_image_size() -> None:
    dataset = ArrayDataset("flat", np.full((2, 8, 8, 3), 200, np.uint8))
    extracted = extract_features(nn.Flatten(), dataset, image_size=6, quiet=True)
    assert extracted.features.shape == (2, 3 * 6 * 6)
    assert extracted.labels is None
    expected = torch.tensor([(200 / 255 - m) / s for m, s in zip(MEAN, STD, strict=True)])
    torch.testing.assert_close(extracted.features.view(2, 3, 36).mean(dim=2), expected.expand(2, 3))


def test_flattened_images_are_the_normalized_pixels() -> None:
    dataset = tiny_dataset()
    torch.testing.assert_close(
        extract_features(nn.Flatten(), dataset, image_size=8, quiet=True).features,
        by_hand(nn.Flatten(), dataset.images),
    )


def test_given_labels_replace_those_of_the_dataset() -> None:
    labels = np.arange(13, dtype=np.int64)
    extracted = extract_features(tiny_encoder(), tiny_dataset(), image_size=8, labels=labels, quiet=True)
    assert extracted.labels is not None
    assert extracted.labels.tolist() == list(range(13))


def test_take_selects_features_labels_and_ids() -> None:
    extracted = extract_features(tiny_encoder(), tiny_dataset(), image_size=8, quiet=True)
    part = extracted.take(torch.tensor([5, 1]))
    assert part.ids.tolist() == [5, 1]
    assert torch.equal(part.features, extracted.features[[5, 1]])
    assert part.labels is not None
    assert part.labels.tolist() == [2, 1]


def test_progress_is_shown_unless_quiet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snclr.runtime.progress._BRIEF_SECONDS", 0.0)  # print the progress of a short job
    extract_features(tiny_encoder(), tiny_dataset(), image_size=8, description="test set", quiet=True)
    assert capsys.readouterr().err == ""
    extract_features(tiny_encoder(), tiny_dataset(), image_size=8, description="test set")
    assert "test set: 100%" in capsys.readouterr().err


@given(st.integers(1, 40), st.integers(1, 15), st.integers(1, 15), st.integers(1, 5), st.integers(0, 9))
def test_chunks_do_not_depend_on_the_world_size(n: int, batch: int, chunk: int, size: int, start: int) -> None:
    """The ranks together have the same chunks in the same order, from any batch on."""
    whole = BatchPlan(np.arange(n), batch=batch, chunk=chunk, epochs=2, seed=1)
    plans = [replace(whole, rank=rank, world_size=size) for rank in range(size)]
    assert len({len(plan) for plan in plans}) == 1
    assert {plan.steps for plan in plans} == {whole.steps}
    start = min(start, whole.steps)

    def chunks_of(plan: BatchPlan) -> list[list[list[int]]]:
        batches: list[list[list[int]]] = [[]]
        for number in range(plan.first_request(start), len(plan)):
            request = plan.request(number)
            if len(request.ids):
                batches[-1].append(request.ids.tolist())
            if request.ends_batch:
                batches.append([])
        return batches[:-1]

    shared = [chunks_of(plan) for plan in plans]
    joined = [[chunk for part in parts for chunk in part] for parts in zip(*shared, strict=True)]
    assert joined == chunks_of(whole)
    assert len(joined) == whole.steps - start


@given(st.integers(1, 40), st.integers(1, 15), st.integers(1, 15), st.integers(1, 3))
def test_a_plan_yields_every_image_once_per_epoch(n: int, batch: int, chunk: int, epochs: int) -> None:
    plan = BatchPlan(np.arange(100, 100 + n), batch=batch, chunk=chunk, epochs=epochs, seed=3)
    requests = [plan.request(number) for number in range(len(plan))]
    assert all(1 <= len(request.ids) <= chunk for request in requests)
    for epoch in range(epochs):
        ids = [index for request in requests if request.epoch == epoch for index in request.ids.tolist()]
        assert sorted(ids) == list(range(100, 100 + n))
    sizes, size = [], 0
    for request in requests:
        size += len(request.ids)
        if request.ends_batch:
            sizes.append(size)
            size = 0
    assert len(sizes) == plan.steps
    assert size == 0
    rest = [n % batch] if n % batch else []
    assert sizes == ([batch] * (n // batch) + rest) * epochs


def test_epochs_differ_in_crops_and_order(tmp_path: Path) -> None:
    array = tiny_dataset(6, side=16)
    save_images(array, tmp_path)
    for dataset in (array, open_dataset(tmp_path)):
        plan = BatchPlan(np.arange(6), batch=6, chunk=6, epochs=2, seed=1)
        chunks = Chunks(dataset, plan, 8)
        first, second = chunks[0], chunks[1]
        again = chunks[0]
        assert first.ids.tolist() != second.ids.tolist()
        by_id = [chunk.images[np.argsort(chunk.ids)] for chunk in (first, second)]
        assert not torch.equal(*by_id)
        assert torch.equal(first.images, again.images)


def test_half_precision_is_that_of_the_encoder_alone(tmp_path: Path) -> None:
    """Linear layers only: some CPUs cannot run convolutions in bfloat16."""
    seen: list[torch.dtype] = []
    encoder, dataset = nn.Sequential(nn.Flatten(), nn.Linear(192, 6)), tiny_dataset()
    encoder.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    single = extract_features(encoder, dataset, image_size=8, quiet=True).features
    half = extract_features(encoder, dataset, image_size=8, quiet=True, precision="bf16").features
    assert seen == [torch.float32, torch.bfloat16]
    assert half.dtype == torch.float32
    assert not torch.equal(half, single)
    torch.testing.assert_close(half, single, rtol=0.02, atol=0.02)
    stores = [FeatureStore(tmp_path, "encoder", "", dataset, 8, precision=precision) for precision in ("32", "bf16")]
    assert stores[0].folder != stores[1].folder
    refused = pytest.raises(UserError, match="bf16 is not supported on CPUs")
    with refused, open_session(tmp_path, precision="bf16-mixed", device="cpu"):
        pass
