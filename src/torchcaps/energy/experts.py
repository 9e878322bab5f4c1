"""Expert capsules: a layer whose parents are the factors of a density of its children, learned without labels.

Hauser 2019, "Training products of expert capsules with mixing by dynamic routing" (arXiv 1907.11643), in the letters
of this library; the numbers are the source's. Children are visible capsules in the open unit ball, as a squash leaves
them:

    u_ij = x_i W_ij                                           votes
    c_ij                                                      coupling by routing: cosine agreement, sum_i c_ij = 1
    z_j = sum_i c_ij u_ij
    E(x, h) = - sum_j h_j log |z_j|^2                         h_j is 1 where capsule j fires, else 0          (7)
    P(x, h) = exp(-E) / Z,    P(x) = prod_j (1 + |z_j|^2) / Z                                                 (8-10)
    P(h_j = 1 | x) = |z_j|^2 / (1 + |z_j|^2) = |squash(z_j)|                                                  (12)
    F(x) = - sum_j log(1 + |z_j|^2)                           the free energy: P(x) = exp(-F(x)) / Z
    - dF/dW_ij = c_ij x_i^T (2 z_j / (1 + |z_j|^2))           with c a constant                               (17, 18)

Everything is calculated from z, never from the squashed pose, from which it can hardly be had again near length 1.

What the source leaves open or gets wrong, and what is done here:

    Axis            Its sentence says that a child shares 1, its formulas say that a parent does. The formulas are the
                    default; `Dynamic.hauser(normalize="parents")` is the sentence.
    Gradient        (18) treats c as a constant, although routing makes it of x and W. So does the default rule;
                    `detach="none"` in the rule gives the whole gradient.
    Domain          The density grows with |x|, so that Z is finite on a bounded domain alone: the product of the balls.
                    Along a ray from the origin it never falls: a true sample of P lies near the balls' edges.
    Evenness        F(-x) = F(x), bit by bit: no such model tells an image from its negative. That, and not the shape of
                    a sphere, is where the negatives among the source's samples come from.

Added to the source, off by default:

    bias            b_j beside log |z_j|^2.
    centre          u_ij = (x_i - m_i) W_ij, an affine vote: m_i is the mean of child i over the data (`centre_on`).
                    F is even about m and no longer about 0, and what all capsules share is no longer theirs to say.
    line            The product manifold that the source suggests. The last n numbers of z_j, t_j, are a point of R^n,
                    and the others, a_j, of length and direction, one of (0, 1) x S^m. With t_j ~ Normal(t_j(x), 1)
                    given x where j fires, and t_j integrated out,

                        E(x, h) = - sum_j h_j (b_j + log |a_j|^2 + |t_j|^2 / 2)
                        P(h_j = 1 | x) = sigmoid(b_j + log |a_j|^2 + |t_j|^2 / 2) = p_j
                        pose of capsule j = p_j (a_j / |a_j|, t_j)

                    which is all of the above for n = 0, where the pose is squash(z_j).
"""

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchcaps.layers._layer import positive
from torchcaps.routing import Backend, Dynamic, combine, combine_transposed
from torchcaps.squash import safe_norm, squash, unsquash
from torchcaps.types import Capsules, Routed, readable, whole

__all__ = ["ExpertCapsules"]

PAPER_ROUTING = Dynamic.hauser()

VOTES_AT_ONCE = 1 << 21
"""Numbers in the votes of as many examples as are routed in one go: 8 MB in float32."""


class ExpertCapsules(nn.Module):
    """Visible capsules `[N, I, 1, P]` of length below 1 to hidden ones `[N, J, 1, Q]` (equations on top of this file).

    in_caps, in_pose    I and P.
    out_caps, out_pose  J and Q.
    routing             a `Dynamic` rule; its squash is not used, for the energy defines it.
    std                 standard deviation of the initial votes' numbers for a child of length 1: weights start as
                        Normal(0, std^2 / P). With shares over children 1 starts capsules at firing probabilities of
                        about 0.05 and 4 at about 0.5 (576 children of 8 numbers).
    bias                learn a bias b_j per capsule.
    line                n, how many of the out_pose numbers lie on a line.

    Parameters: `weight` `[I, J, P, Q]`; `bias` `[J]` or None. Buffer: `centre` `[I, 1, P]`, 0 until `centre_on`.

    `model(Capsules)` gives the hidden capsules with their firing probabilities as activations; it is a layer like
    others. What learns takes and gives plain tensors: `visible` is always `[N, I, 1, P]`, a `coupling` `[N, I, J]`, and
    z `[N, J, 1, Q]`.

    Every method that takes `visible` raises ValueError for a wrong shape, and on the CPU for NaN and for capsules
    longer than 1 (but for rounding).

    >>> import torch
    >>> model = ExpertCapsules(6, 4, 3, 5)
    >>> visible = squash(torch.randn(2, 6, 1, 3))
    >>> model(Capsules(visible)).poses.shape, model.free_energy(visible).shape
    (torch.Size([2, 4, 1, 5]), torch.Size([2]))
    """

    def __init__(
        self,
        in_caps: int = 576,
        out_caps: int = 20,
        in_pose: int = 8,
        out_pose: int = 16,
        *,
        routing: Dynamic = PAPER_ROUTING,
        std: float = 1.0,
        bias: bool = False,
        line: int = 0,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.in_caps, self.out_caps = positive(name, "in_caps", in_caps), positive(name, "out_caps", out_caps)
        self.in_pose = (1, positive(name, "in_pose", in_pose))
        self.out_pose = (1, positive(name, "out_pose", out_pose))
        self.routing = without_squash(name, routing)
        if whole(line) is None or not 0 <= line < out_pose:
            raise ValueError(
                f"{name}: line={line!r} of {out_pose} numbers lie on a line: at least one must be left for the ball, "
                f"so give 0 to {out_pose - 1}"
            )
        if not 0 <= std < float("inf"):
            raise ValueError(f"{name}: std={std!r} is a standard deviation: it must be 0 or more")
        self.line, self.std = line, std
        self.weight = nn.Parameter(torch.empty(in_caps, out_caps, in_pose, out_pose))
        self.bias = nn.Parameter(torch.zeros(out_caps)) if bias else None
        self.register_buffer("centre", torch.zeros(in_caps, 1, in_pose))
        self.centre: Tensor
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight anew and put the bias to 0; the centre stays."""
        with torch.no_grad():
            self.weight.normal_(0.0, self.std / self.in_pose[1] ** 0.5)
            if self.bias is not None:
                self.bias.zero_()

    def centre_on(self, visible: Tensor) -> None:
        """Take the mean of these visible capsules `[N, I, 1, P]` as the centre that votes are taken from."""
        self.check(visible)
        if not len(visible):
            raise ValueError("there are no visible capsules to take the mean of")
        self.centre.copy_(visible.detach().mean(0))

    # -----------------------------------------------------------------------------------------------------------------
    # Up and down

    def forward(self, capsules: Capsules, mask: Tensor | None = None) -> Capsules:
        """Hidden capsules: poses `[N, J, 1, Q]` and firing probabilities `[N, J]`."""
        return self.route(capsules, mask).capsules

    def route(
        self,
        capsules: Capsules,
        mask: Tensor | None = None,
        *,
        start: Any = None,
        backend: Backend = "auto",
        return_coupling: bool | Literal["all"] = False,
    ) -> Routed:
        """The same with coupling and state, as the layers of the library give them."""
        visible = capsules.flatten().poses
        self.check(visible)
        routed = self.routing(
            visible - self.centre, self.weight, mask=None if mask is None else mask.flatten(1), start=start,
            backend=backend, return_coupling=return_coupling,
        )  # fmt: skip
        return Routed(self.pose(routed.poses), self.firing(routed.poses), routed.coupling, routed.state)

    def up(self, visible: Tensor, coupling: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """z `[N, J, 1, Q]` and the coupling `[N, I, J]` that it was summed with: the given one, or by routing."""
        self.check(visible)
        return self._up(visible, coupling)

    def down(self, poses: Tensor, coupling: Tensor) -> Tensor:
        """Visible capsules `[N, I, 1, P]` from hidden poses `[N, J, 1, Q]` through the transposed weights.

        squash(sum_j c_ij x_j W_ij^T), and about the centre where there is one: that of silent capsules is the centre.
        """
        sums = combine_transposed(poses, self.weight, coupling)
        return squash(sums + unsquash(self.centre))

    def _up(self, visible: Tensor, coupling: Tensor | None) -> tuple[Tensor, Tensor]:
        x = visible - self.centre
        if coupling is not None:
            return combine(x, self.weight, coupling), coupling
        if self.routing.iterations == 1:  # uniform shares: one matrix product, without votes
            over_children = self.routing.normalize == "children"
            share = 1 / self.in_caps if over_children else 1 / self.out_caps
            z = torch.einsum("nirp,ijpq->njrq", x, self.weight) * share
            return z, x.new_full((1, 1, 1), share).expand(len(x), self.in_caps, self.out_caps)
        sums, shares = [], []
        theirs = Dynamic.hauser(self.routing.iterations, self.routing.normalize)
        lean = not torch.is_grad_enabled() and self.routing == without_squash("ExpertCapsules", theirs)
        # the votes of a whole batch are many times the cache: a few examples at a time are routed faster
        for part in x.split(max(1, VOTES_AT_ONCE // (self.weight.numel() // self.in_pose[1]))):
            if lean:
                z, coupling = hausers_rounds(part, self.weight, self.routing)
            else:
                routed = self.routing(part, self.weight, return_coupling=True)
                assert routed.coupling is not None
                z, coupling = routed.poses, routed.coupling
            sums.append(z)
            shares.append(coupling)
        return torch.cat(sums), torch.cat(shares)

    # -----------------------------------------------------------------------------------------------------------------
    # What z says

    def firing(self, z: Tensor) -> Tensor:
        """P(h_j = 1 | x) of every capsule, `[N, J]`."""
        return safe_norm(squash(self._ball(z)))

    def pose(self, z: Tensor) -> Tensor:
        """Poses `[N, J, 1, Q]` that z stands for: squash(z), or p (direction, t) where numbers are on a line."""
        ball = squash(self._ball(z))
        if not self.line:
            return ball
        return torch.cat([ball, safe_norm(ball, keepdim=True) * z[..., -self.line :]], -1)

    def lengths(self, poses: Tensor) -> Tensor:
        """The firing probabilities `[N, J]` that poses `[N, J, 1, Q]` stand for: their lengths, without the line."""
        return safe_norm(poses[..., : poses.shape[-1] - self.line])

    def free_energy_of(self, z: Tensor) -> Tensor:
        """F `[N]` = - sum_j log(1 + exp(b_j + |t_j|^2 / 2) |a_j|^2)."""
        s, q = self._tilt(z), self._square(z)
        if s is None:
            return -q.log1p().sum(-1)
        # the larger of 1 and e^s is taken out, so that nothing overflows and nothing is lost near 0
        m = s.clamp(min=0)
        return -(m + (torch.expm1(-m) + (s - m).exp() * q).log1p()).sum(-1)

    def pull(self, z: Tensor) -> Tensor:
        """- dF/dz `[N, J, 1, Q]`: 2 z_j / (1 + |z_j|^2), and p_j t_j of the numbers on a line."""
        s, q = self._tilt(z), self._square(z)
        s = torch.zeros_like(q) if s is None else s
        m = s.clamp(min=0)
        gain = (s - m).exp() / ((-m).exp() + (s - m).exp() * q)  # p / |a|^2 without a singularity
        ball = 2 * gain[..., None, None] * z[..., : z.shape[-1] - self.line]
        if not self.line:
            return ball
        return torch.cat([ball, (gain * q)[..., None, None] * z[..., -self.line :]], -1)

    # -----------------------------------------------------------------------------------------------------------------
    # What the visible capsules say

    def free_energy(self, visible: Tensor, coupling: Tensor | None = None) -> Tensor:
        """F(x) `[N]`, by routing, or with a given coupling `[N, I, J]`; -F is log P(x) but for a constant."""
        return self.free_energy_of(self.up(visible, coupling)[0])

    def energy(self, visible: Tensor, fires: Tensor, coupling: Tensor | None = None) -> Tensor:
        """E(x, h) `[N]` for `fires` `[N, J]` of 0 and 1; infinite where a capsule fires whose z is 0."""
        self.check(visible)
        if tuple(fires.shape) != (len(visible), self.out_caps):
            raise ValueError(
                f"fires {list(fires.shape)} must say of each of {self.out_caps} capsules whether it fires: "
                f"[{len(visible)}, {self.out_caps}]"
            )
        log_odds = self.log_odds(self._up(visible, coupling)[0])
        return -log_odds.masked_fill(fires == 0, 0.0).sum(-1)

    def log_odds(self, z: Tensor) -> Tensor:
        """b_j + log |a_j|^2 + |t_j|^2 / 2 `[N, J]`, whose sigmoid is the firing probability."""
        s = self._tilt(z)
        log_q = self._square(z).log()
        return log_q if s is None else s + log_q

    def ascent(self, visible: Tensor, z: Tensor, coupling: Tensor) -> Tensor:
        """The mean over the batch of - dF/dW `[I, J, P, Q]` with the coupling a constant, eq. 18."""
        x = (visible - self.centre).squeeze(-2)
        return torch.einsum("nij,nip,njq->ijpq", coupling, x, self.pull(z).squeeze(-2)) / len(x)

    # -----------------------------------------------------------------------------------------------------------------

    def check(self, visible: Tensor) -> None:
        """The door: a ValueError for what is not a batch of visible capsules of this model inside their balls."""
        wanted = (self.in_caps, *self.in_pose)
        if not isinstance(visible, Tensor) or visible.dim() != 4 or tuple(visible.shape[1:]) != wanted:
            what = list(visible.shape) if isinstance(visible, Tensor) else type(visible).__name__
            raise ValueError(
                f"ExpertCapsules of {self.in_caps} children of {self.in_pose[1]} numbers takes visible capsules "
                f"{['N', *wanted]}, not {what}: a vector capsule is a pose of one row, poses.unsqueeze(-2)"
            )
        if not visible.is_floating_point():
            raise ValueError(f"visible capsules must be floating point, not {visible.dtype}: call .float() first")
        if readable(visible) and visible.numel():
            longest = safe_norm(visible.detach()).max().item()
            if not longest <= 1 + 8 * torch.finfo(visible.dtype).eps:
                fault = "hold NaN" if longest != longest else f"are up to {longest:.6g} long"
                raise ValueError(
                    f"visible capsules {fault}, but the density lives on balls of radius 1: torchcaps.squash takes "
                    "poses of any length into them"
                )

    def extra_repr(self) -> str:
        n = f", line={self.line}" if self.line else ""
        return (
            f"in_caps={self.in_caps}, out_caps={self.out_caps}, in_pose={self.in_pose[1]}, "
            f"out_pose={self.out_pose[1]}{n}, bias={self.bias is not None}, routing={self.routing}"
        )

    def _square(self, z: Tensor) -> Tensor:
        """|a_j|^2 `[N, J]`."""
        return z[..., : z.shape[-1] - self.line].square().sum((-2, -1))

    def _tilt(self, z: Tensor) -> Tensor | None:
        """b_j + |t_j|^2 / 2 `[N, J]`, or None where there is neither."""
        s = None if self.bias is None else self.bias.expand(z.shape[:-2])
        if self.line:
            half = z[..., -self.line :].square().sum((-2, -1)) / 2
            s = half if s is None else s + half
        return s

    def _ball(self, z: Tensor) -> Tensor:
        """a_j stretched until its squash is as long as the capsule's firing probability: a_j exp(s_j / 2)."""
        a, s = z[..., : z.shape[-1] - self.line], self._tilt(z)
        # beyond 80 the squash is 1 to the last digit, and exp would overflow
        return a if s is None else a * (s / 2).clamp(max=80).exp()[..., None, None]


def hausers_rounds(x: Tensor, weight: Tensor, routing: Dynamic) -> tuple[Tensor, Tensor]:
    """z `[N, J, 1, Q]` and c `[N, I, J]` by the rounds of `Dynamic.hauser`, without gradients and 3 times as fast.

    Nothing can overflow in a ball, so that the votes' lengths need no care, and no direction of a vote is written out:

        b_ij = <u_ij, sum over the rounds of z_j / |z_j|> / |u_ij|
    """
    I, J, P, Q = weight.shape
    u = x.squeeze(-2).transpose(0, 1) @ weight.transpose(1, 2).reshape(I, P, J * Q)
    u = u.view(I, len(x), J, Q)
    length = torch.linalg.vector_norm(u, dim=-1)
    length = length.masked_fill(length == 0, 1.0)
    over = 0 if routing.normalize == "children" else 2
    coupling = length.new_full((), 1 / length.shape[over]).expand_as(length)
    z = torch.einsum("inj,injq->njq", coupling, u)
    heard = torch.zeros_like(z)
    for _ in range(routing.iterations - 1):
        heard = heard + squash(z, "normalize", dim=-1)
        coupling = (torch.einsum("injq,njq->inj", u, heard) / length).softmax(over)
        z = torch.einsum("inj,injq->njq", coupling, u)
    return z.unsqueeze(-2), coupling.transpose(0, 1)


def without_squash(name: str, routing: Dynamic) -> Dynamic:
    """The rule whose parents are z itself, while its rounds hear them squashed as before."""
    if not isinstance(routing, Dynamic) or routing.leaky or routing.learn_prior or routing.learn_bias:
        raise ValueError(
            f"{name}: routing must be a Dynamic rule without leak, prior and bias, such as Dynamic.hauser(), not "
            f"{routing!r}"
        )
    inner = routing.squash if routing.inner_squash is None else routing.inner_squash
    return dataclasses.replace(routing, squash="identity", inner_squash=inner)
