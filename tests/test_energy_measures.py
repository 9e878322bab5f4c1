"""What the measures of expert capsules say: against scikit-learn and SciPy, and on data whose answer is known."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from torch import Tensor

from torchcaps import squash
from torchcaps.energy.measures import (
    PrincipalComponents,
    auroc,
    best_matching,
    capsule_use,
    cluster_accuracy,
    free_energy_gap,
    linear_probe,
    negatives_rate,
    random_directions,
    relative_error,
    shuffled,
)


def blobs(count: int = 300, apart: float = 6.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three round clouds of 4 numbers and their labels."""
    random = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (count,), generator=random)
    return apart * torch.eye(3, 4)[y] + torch.randn(count, 4, generator=random), y


def test_shuffling_keeps_every_capsule_and_breaks_what_belongs_together() -> None:
    visible = torch.arange(50.0).view(50, 1, 1, 1).expand(50, 6, 1, 3)
    mixed = shuffled(visible, torch.Generator().manual_seed(0))
    assert torch.equal(mixed.sort(0).values, visible)
    assert (mixed[..., 0] == mixed[..., 1]).all()  # a capsule moves as a whole
    assert (mixed[:, 0] != mixed[:, 1]).any(1).sum() > 40


def test_random_directions_keep_lengths_and_nothing_else() -> None:
    visible = squash(torch.randn(500, 6, 1, 3) + 3)
    noise = random_directions(visible, torch.Generator().manual_seed(0))
    torch.testing.assert_close(noise.norm(dim=-1), visible.norm(dim=-1))
    assert (visible.mean((0, 1, 2)) > 0.4).all()
    assert (noise.mean((0, 1, 2)).abs() < 0.05).all()


def test_a_gap_is_above_zero_where_noise_has_the_higher_free_energy() -> None:
    assert free_energy_gap(torch.tensor([1.0, 2.0]), torch.tensor([4.0, 5.0, 6.0])) == 3.5


def test_auroc_is_scikit_learns_with_ties() -> None:
    a, b = torch.randint(0, 20, (50,)).float(), torch.randint(5, 25, (70,)).float()
    assert auroc(a, b) == pytest.approx(roc_auc_score([0] * 50 + [1] * 70, torch.cat([a, b]).numpy()), abs=1e-12)
    assert auroc(torch.zeros(3), torch.ones(2)) == 1
    with pytest.raises(ValueError, match="3 inside, 0 outside"):
        auroc(torch.zeros(3), torch.zeros(0))


def test_the_mean_has_a_relative_error_of_one() -> None:
    truth = torch.randn(40, 3, 2)
    assert relative_error(truth, truth.mean(0).expand_as(truth)) == pytest.approx(1)
    assert relative_error(truth, truth) == 0
    with pytest.raises(ValueError, match=r"truth \[40, 3, 2\] and guess \[40, 3\]"):
        relative_error(truth, truth[..., 0])


@pytest.mark.parametrize("shape", [(200, 5, 4), (30, 5, 20)])
def test_principal_components_are_scikit_learns(shape: tuple[int, ...]) -> None:
    data = torch.randn(shape, dtype=torch.float64) * torch.linspace(0.1, 3, shape[-1], dtype=torch.float64)
    ours, theirs = PrincipalComponents(data, 6), PCA(6, svd_solver="full").fit(data.flatten(1).numpy())
    flat = data.flatten(1).numpy()
    again = torch.from_numpy(theirs.inverse_transform(theirs.transform(flat))).view(shape)
    torch.testing.assert_close(ours.decode(ours.encode(data)), again, rtol=1e-3, atol=1e-3)
    variances = ours.encode(data).var(0)
    torch.testing.assert_close(variances, torch.from_numpy(theirs.explained_variance_), rtol=1e-4, atol=0)
    with pytest.raises(ValueError, match="has 1 to 20 principal components, not 21" if shape[0] > 30 else "not 99"):
        PrincipalComponents(data, 21 if shape[0] > 30 else 99)


def test_a_probe_is_a_logistic_regression() -> None:
    (x, y), (v, w) = blobs(400, 2.0), blobs(1000, 2.0, seed=1)
    m, s = x.mean(0), x.std(0)
    theirs = LogisticRegression(C=1 / (2 * 1e-3 * 400), tol=1e-8, max_iter=1000).fit(((x - m) / s).numpy(), y.numpy())
    ours = linear_probe(x, y, v, w, penalty=1e-3)
    assert ours == pytest.approx(theirs.score(((v - m) / s).numpy(), w.numpy()), abs=0.003)
    assert 0.6 < ours < 0.95
    constant = torch.cat([x, torch.ones(400, 1)], 1), torch.cat([v, torch.ones(1000, 1)], 1)
    assert linear_probe(constant[0], y, constant[1], w) == pytest.approx(ours, abs=0.003)


def test_clusters_are_matched_with_classes_however_they_are_numbered() -> None:
    x, y = blobs()
    assert cluster_accuracy(x, y, generator=torch.Generator().manual_seed(0)) > 0.98
    noise = torch.randn(300, 4)
    assert cluster_accuracy(noise, y, generator=torch.Generator().manual_seed(0)) < 0.5


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_the_best_matching_is_scipys(n: int) -> None:
    for seed in range(10):
        value = np.random.default_rng(seed).integers(0, 50, (n, n)).astype(float)
        rows, columns = linear_sum_assignment(-value)
        assert best_matching(torch.from_numpy(value)) == value[rows, columns].sum()


def test_capsule_use_counts_who_fires_most() -> None:
    firing = torch.tensor([[0.9, 0.1, 0.5], [0.8, 0.1, 0.5], [0.2, 0.7, 0.5], [0.1, 0.6, 0.5]])
    use = capsule_use(firing, torch.tensor([0, 1, 2, 2]))
    assert use.entropy == pytest.approx(math.log(2) / math.log(3))
    assert use.purity == 0.75
    assert use.dead == 1
    assert capsule_use(firing).purity is None
    with pytest.raises(ValueError, match=r"firing \[1, 3\]"):
        capsule_use(firing[:1])


def test_a_negative_is_what_runs_against_the_mean_image() -> None:
    mean = torch.rand(1, 5, 5)
    images = mean + 0.1 * torch.randn(40, 1, 5, 5)
    assert negatives_rate(images, mean) == 0
    assert negatives_rate(torch.cat([images, 1 - images[:10]]), mean) == 0.2
    with pytest.raises(ValueError, match="must be a batch of the mean image's shape"):
        negatives_rate(images[..., 0], mean)
