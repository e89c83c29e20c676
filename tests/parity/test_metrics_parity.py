"""The metrics against the original evaluator's numbers, and against torch-fidelity and torchmetrics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from image_diffusion.core.files.atomic import sha256_file
from image_diffusion.metrics.distances.class_metrics import inception_score, inception_score_estimate
from image_diffusion.metrics.distances.moments import Moments
from image_diffusion.metrics.distances.precision_recall import manifold_estimates, neighbour_radii
from image_diffusion.metrics.distances.set_distances import frechet_distance, kernel_distance
from image_diffusion.metrics.features.pretrained import Inception


@pytest.mark.parametrize("case", ["a", "b"])
def test_adm_evaluator(golden: Callable[[str], Any], case: str):
    numbers = golden("p04_evaluation.npz")
    reference, samples = numbers[f"{case}/ref_features"], numbers[f"{case}/sample_features"]
    moments = Moments.from_features(reference).gaussian
    torch.testing.assert_close(moments.mean.float(), numbers[f"{case}/mu_ref"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(moments.covariance, numbers[f"{case}/sigma_ref"], rtol=1e-5, atol=1e-6)
    distance = frechet_distance(Moments.from_features(samples).gaussian, moments)
    assert distance == pytest.approx(float(numbers[f"{case}/fid"]), rel=1e-6)
    probabilities = numbers[f"{case}/class_probabilities"]
    assert inception_score(probabilities) == pytest.approx(float(numbers[f"{case}/inception_score"]), rel=1e-9)
    assert inception_score(probabilities, 50) == pytest.approx(
        float(numbers[f"{case}/inception_score_split50"]), rel=1e-9
    )
    radii = neighbour_radii(reference, 3).unsqueeze(1).float()
    torch.testing.assert_close(radii, numbers[f"{case}/radii_ref"], rtol=1e-5, atol=1e-6)
    estimates = manifold_estimates(samples, reference, 3)
    assert estimates["precision"].value == pytest.approx(float(numbers[f"{case}/precision"]), abs=1e-6)
    assert estimates["recall"].value == pytest.approx(float(numbers[f"{case}/recall"]), abs=1e-6)


@pytest.fixture
def features() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    real = torch.randn(400, 24, generator=generator)
    return torch.randn(300, 24, generator=generator) * 1.1 + 0.1, real


def test_frechet_distance_is_torch_fidelitys(features: tuple[Tensor, Tensor]):
    oracle = pytest.importorskip("torch_fidelity.metric_fid")
    made, real = (Moments.from_features(each).gaussian for each in features)
    statistics = [{"mu": each.mean.numpy(), "sigma": each.covariance.numpy()} for each in (made, real)]
    expected = oracle.fid_statistics_to_metric(*statistics, verbose=False)["frechet_inception_distance"]
    assert frechet_distance(made, real) == pytest.approx(expected, rel=1e-9)


def test_kernel_distance_is_torch_fidelitys_on_the_full_set(features: tuple[Tensor, Tensor]):
    oracle = pytest.importorskip("torch_fidelity.metric_kid")
    made, real = (each.double().numpy() for each in features)
    gamma = 1 / made.shape[1]
    kernels = [(a @ b.T * gamma + 1) ** 3 for a, b in ((made, made), (made, real), (real, real))]
    m, n = len(made), len(real)
    expected = (kernels[0].sum() - np.trace(kernels[0])) / (m * (m - 1)) - 2 * kernels[1].mean()
    expected += (kernels[2].sum() - np.trace(kernels[2])) / (n * (n - 1))
    assert kernel_distance(*features).value == pytest.approx(expected, rel=1e-10)
    # torch-fidelity takes subsets: with one subset of everything, of two sets of one size, it is the same number.
    half = torch.from_numpy(real[:300]).float()
    options = {"kid_subsets": 1, "kid_subset_size": 300, "rng_seed": 1, "verbose": False}
    metric = oracle.kid_features_to_metric(features[0].double(), half.double(), **options)
    assert kernel_distance(features[0], half).value == pytest.approx(
        metric["kernel_inception_distance_mean"], rel=1e-6, abs=1e-9
    )


def test_precision_and_recall_are_torch_fidelitys(features: tuple[Tensor, Tensor]):
    oracle = pytest.importorskip("torch_fidelity.metric_prc")
    metric = oracle.prc_features_to_metric(*features, prc_neighborhood=3, prc_batch_size=100, verbose=False)
    estimates = manifold_estimates(*features, 3)
    assert estimates["precision"].value == pytest.approx(metric["precision"], abs=1e-6)
    assert estimates["recall"].value == pytest.approx(metric["recall"], abs=1e-6)


def test_inception_score_is_torch_fidelitys():
    oracle = pytest.importorskip("torch_fidelity.metric_isc")
    logits = torch.randn(500, 11, generator=torch.Generator().manual_seed(1)) * 2
    metric = oracle.isc_features_to_metric(logits, splits=5, shuffle=False)["inception_score_mean"]
    assert inception_score_estimate(logits, 100).value == pytest.approx(metric, rel=1e-6)


def test_metrics_are_torchmetrics_on_the_same_features(features: tuple[Tensor, Tensor]):
    pytest.importorskip("torch_fidelity")
    fid = pytest.importorskip("torchmetrics.image.fid")

    class Identity(torch.nn.Module):
        num_features = 24

        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)

    metric = fid.FrechetInceptionDistance(feature=Identity(), normalize=False, antialias=False)
    metric.inception = Identity()
    metric.update(features[1], real=True)
    metric.update(features[0], real=False)
    made, real = (Moments.from_features(each).gaussian for each in features)
    assert frechet_distance(made, real) == pytest.approx(float(metric.compute()), rel=1e-6)


def test_inception_graph_with_random_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Tests do not have the published weights; the graph, its taps and its resize are checked.
    module = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    network = module.FeatureExtractorInceptionV3
    with monkeypatch.context() as patch:
        patch.setattr(module, "load_state_dict_from_url", lambda *_, **__: {})
        patch.setattr(network, "load_state_dict", lambda *_: None)
        torch.manual_seed(0)
        original = network("inception-v3-compat", ["2048", "logits_unbiased"])
    torch.save(original.state_dict(), tmp_path / "weights.pth")
    detector = Inception(weights=tmp_path / "weights.pth").build()
    images = torch.randint(0, 256, (3, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    seen = detector(images)
    features, logits = original(images)
    torch.testing.assert_close(seen.features, features)
    torch.testing.assert_close(seen.logits, logits)
    assert seen.spatial.shape == (3, 7 * 17 * 17)
    taps: list[Tensor] = []
    original.Mixed_6d.branch1x1.register_forward_hook(lambda *event: taps.append(event[2]))
    original(images[1:2])
    expected = taps[0][0, :7].permute(1, 2, 0).flatten()  # channels last, as ADM's mu_s and sigma_s
    torch.testing.assert_close(seen.spatial[1], expected, rtol=1e-4, atol=1e-5)
    assert detector.identity["sha256"] == sha256_file(tmp_path / "weights.pth")
    assert detector.metric_name("fd") == "fid" and detector.metric_name("kd") == "kid"
