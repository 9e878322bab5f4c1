"""What expert capsules have learned, in numbers, and what each number must be compared with.

    measure                                              controls
    free_energy_gap, auroc      data against noise       shuffled, random_directions, another data set
    relative_error              one step of mixing       1: the mean says as much
                                decoded images           PrincipalComponents of 20 and of 320, the autoencoder itself
    linear_probe, cluster_accuracy                       random weights with the same routing, 20 principal components
    capsule_use                 who fires, and for what
    negatives_rate              drawn images             real images

All take tensors and know no model. Lower free energy is more like the data.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.squash import safe_norm
from torchcaps.types import whole

__all__ = [
    "CapsuleUse", "PrincipalComponents", "auroc", "capsule_use", "cluster_accuracy", "free_energy_gap", "linear_probe",
    "negatives_rate", "random_directions", "relative_error", "shuffled",
]  # fmt: skip


def shuffled(visible: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Every capsule of `[N, I, 1, P]` from another example: what each looks like stays, what belongs together goes."""
    order = torch.rand(visible.shape[:2], generator=generator).argsort(0).to(visible.device)
    return visible.gather(0, order[:, :, None, None].expand_as(visible))


def random_directions(visible: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Capsules of the same lengths in uniformly random directions."""
    noise = torch.randn(visible.shape, generator=generator, dtype=visible.dtype).to(visible.device)
    return noise / safe_norm(noise, keepdim=True) * safe_norm(visible, keepdim=True)


def free_energy_gap(data: Tensor, noise: Tensor) -> float:
    """Mean free energy of noise `[M]` less that of data `[N]`: above 0 where the model likes data better."""
    return (noise.double().mean() - data.double().mean()).item()


def auroc(inside: Tensor, outside: Tensor) -> float:
    """The chance that a score of `outside` `[M]` is above one of `inside` `[N]`, ties counting half; 0.5 is guessing.

    With free energies it says how well they tell another data set, or noise, from the data.
    """
    if not len(inside) or not len(outside):
        raise ValueError(f"scores of both sides are needed, but there are {len(inside)} inside, {len(outside)} outside")
    ordered = inside.double().sort().values
    scores = outside.double()
    below = torch.searchsorted(ordered, scores, right=False)
    not_above = torch.searchsorted(ordered, scores, right=True)
    return ((below + not_above).double().mean() / (2 * len(inside))).item()


def relative_error(truth: Tensor, guess: Tensor) -> float:
    """Squared error of `guess` over the variance of `truth` around its mean over the batch; 1 is what the mean gets."""
    if truth.shape != guess.shape:
        raise ValueError(f"truth {list(truth.shape)} and guess {list(guess.shape)} must have one shape")
    return ((guess - truth).square().sum() / (truth - truth.mean(0)).square().sum()).item()


class PrincipalComponents:
    """The best linear code of `components` numbers, as the control of a learned one.

    Fitted to `data` `[N, ...]`. `encode` gives `[N, components]`, `decode` takes them back.
    """

    def __init__(self, data: Tensor, components: int) -> None:
        flat = data.flatten(1)
        most = min(flat.shape)
        if not 1 <= (whole(components) or 0) <= most:
            raise ValueError(f"{list(data.shape)} has 1 to {most} principal components, not {components!r}")
        self.shape = data.shape[1:]
        self.mean = flat.mean(0)
        self.basis = leading_directions(flat - self.mean, components)

    def encode(self, data: Tensor) -> Tensor:
        """`[N, components]`, that of the largest variance first."""
        return (data.flatten(1) - self.mean) @ self.basis

    def decode(self, code: Tensor) -> Tensor:
        """`[N, ...]` of `[N, components]`."""
        return (code @ self.basis.T + self.mean).unflatten(1, self.shape)


def leading_directions(x: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """An orthonormal basis `[D, count]` of about the leading right singular vectors of `x` `[N, D]`, largest first.

    By subspace iteration with 20 vectors to spare: 4,608 numbers are too many for an eigendecomposition. The generator
    gives its start; None is the same one each time.
    """
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    basis = torch.randn(x.shape[1], min(count + 20, *x.shape), generator=generator, dtype=x.dtype).to(x.device)
    for _ in range(6):
        basis = torch.linalg.qr(x.T @ (x @ basis))[0]
    turned = torch.linalg.svd(x @ basis, full_matrices=False)[2]
    return basis @ turned[:count].T


def linear_probe(
    features: Tensor,
    labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    *,
    penalty: float = 1e-3,
    steps: int = 200,
) -> float:
    """Share of the test examples that a linear classifier of these features `[N, K]` gets right.

    Features are standardised by the training set; multinomial logistic regression with a ridge of `penalty`, by L-BFGS
    from zero: nothing is random.
    """
    classes = int(torch.cat([labels, test_labels]).max()) + 1
    mean, std = features.mean(0), features.std(0)
    std = std.masked_fill(std == 0, 1.0)
    x = ((features - mean) / std).detach().double()
    weight = torch.zeros(x.shape[1], classes, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=steps, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(x @ weight + bias, labels) + penalty * weight.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    scores = ((test_features - mean) / std).double() @ weight.detach() + bias.detach()
    return (scores.argmax(1) == test_labels).double().mean().item()


def cluster_accuracy(
    features: Tensor,
    labels: Tensor,
    *,
    restarts: int = 5,
    steps: int = 100,
    generator: torch.Generator | None = None,
) -> float:
    """Share of examples whose k-means cluster is matched with their class, the matching being the best one.

    As many clusters as classes, from k-means++ starts on standardised features `[N, K]`, the best of `restarts`.
    """
    K = int(labels.max()) + 1
    std = features.std(0)
    x = ((features - features.mean(0)) / std.masked_fill(std == 0, 1.0)).detach().double()
    best, clusters = float("inf"), torch.zeros_like(labels)
    for _ in range(restarts):
        centres = _spread_starts(x, K, generator)
        for _ in range(steps):
            nearest = torch.cdist(x, centres).argmin(1)
            chosen = F.one_hot(nearest, K).double()
            counts = chosen.sum(0)[:, None]
            moved = torch.where(counts > 0, chosen.T @ x / counts.clamp(min=1), centres)
            if torch.equal(moved, centres):
                break
            centres = moved
        distances = torch.cdist(x, centres).min(1)
        cost = distances.values.square().sum().item()
        if cost < best:
            best, clusters = cost, distances.indices
    together = torch.zeros(K, K, dtype=torch.float64)
    together.index_put_((clusters, labels), torch.ones(len(labels), dtype=torch.float64), accumulate=True)
    return best_matching(together) / len(labels)


def best_matching(value: Tensor) -> float:
    """The largest sum of `value` `[K, K]` with one entry from each row and each column (the Hungarian method)."""
    cost = (value.max() - value).tolist()
    n = len(cost)
    # potentials u, v; row[j] is the row matched with column j; column 0 and row 0 stand for "none yet"
    u, v, row = [0.0] * (n + 1), [0.0] * (n + 1), [0] * (n + 1)
    for i in range(1, n + 1):
        row[0], j = i, 0
        least, way, seen = [float("inf")] * (n + 1), [0] * (n + 1), [False] * (n + 1)
        while row[j]:
            seen[j], i0, step, following = True, row[j], float("inf"), 0
            for k in range(1, n + 1):
                if not seen[k]:
                    slack = cost[i0 - 1][k - 1] - u[i0] - v[k]
                    if slack < least[k]:
                        least[k], way[k] = slack, j
                    if least[k] < step:
                        step, following = least[k], k
            for k in range(n + 1):
                if seen[k]:
                    u[row[k]] += step
                    v[k] -= step
                else:
                    least[k] -= step
            j = following
        while j:
            row[j] = row[way[j]]
            j = way[j]
    return sum(value[row[j] - 1, j - 1].item() for j in range(1, n + 1))


class CapsuleUse(NamedTuple):
    """Who fires.

    entropy  of the capsule that fires most, over the examples, as a share of log J: 1 where all are used alike.
    purity   share of examples whose class is the commonest one of the capsule that fires most for them; None without
             labels. Its control: the share of the commonest class.
    dead     how many capsules' firing probabilities have a standard deviation below 0.01.
    """

    entropy: float
    purity: float | None
    dead: int


def capsule_use(firing: Tensor, labels: Tensor | None = None) -> CapsuleUse:
    """From firing probabilities `[N, J]`, and labels `[N]` where there are any."""
    N, J = firing.shape
    if N < 2 or J < 2:
        raise ValueError(f"firing {list(firing.shape)} must hold two examples and two capsules or more")
    strongest = firing.argmax(1)
    share = torch.bincount(strongest, minlength=J).double() / N
    entropy = -(share * share.clamp(min=1e-300).log()).sum().item() / torch.tensor(float(J)).log().item()
    purity = None
    if labels is not None:
        together = torch.zeros(J, int(labels.max()) + 1, dtype=torch.float64)
        together.index_put_((strongest, labels), torch.ones(N, dtype=torch.float64), accumulate=True)
        purity = together.max(1).values.sum().item() / N
    return CapsuleUse(entropy, purity, int((firing.std(0) < 0.01).sum()))


def negatives_rate(images: Tensor, mean_image: Tensor) -> float:
    """Share of images `[N, C, H, W]` that look like a photographic negative.

    Their correlation with the data's mean image `[C, H, W]` is below 0. The control is the rate of real images.
    """
    if images.shape[1:] != mean_image.shape:
        raise ValueError(
            f"images {list(images.shape)} must be a batch of the mean image's shape {list(mean_image.shape)}"
        )
    x, m = images.flatten(1), mean_image.flatten()
    return (((x - x.mean(1, keepdim=True)) @ (m - m.mean())) < 0).double().mean().item()


def _spread_starts(x: Tensor, K: int, generator: torch.Generator | None) -> Tensor:
    """k-means++: each next centre with a chance that grows as the square of its distance to those before."""
    starts = [int(torch.randint(len(x), (), generator=generator))]
    while len(starts) < K:
        far = torch.cdist(x, x[starts]).min(1).values.square()
        chances = far if far.sum() > 0 else torch.ones_like(far)
        starts.append(int(torch.multinomial(chances, 1, generator=generator)))
    return x[starts]
