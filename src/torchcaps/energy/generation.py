"""Images from single capsules, and the whole chain that makes them.

Hauser 2019 (arXiv 1907.11643), with letters as in `experts`:

    images -> ConvAutoencoder -> 576 capsules of 8 numbers -> squash -> ExpertCapsules -> 20 capsules of 16 numbers
    images <- ConvAutoencoder <------------------------------------------ CapsuleDecoder <-

    generation from capsule k:   g ~ Normal(0, 1) of 16 numbers,  x_k = squash(g),  the other capsules are 0

Of a capsule whose energy is even, half of these x_k point where no image does, and become photographic negatives. The
source keeps to "half of the sphere"; here that is the half around m_k, the sum of x_k over the training images.

`PoseLaw` keeps what drawing needs to know of the training poses, and draws in three ways:

    "sphere"   g as above
    "half"     g turned to -g where <g, m_k> < 0
    "fitted"   added here: x_k ~ Normal(mean, covariance) of capsule k's poses, weighted by how much it fires; a pose
               that comes out longer than 1 is drawn back to length 1

Numbers on a line have no sphere: for "sphere" and "half" they are drawn from a normal law of their own mean and
standard deviation.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from torchcaps.energy.autoencoder import ConvAutoencoder, caps_from_code, code_from_caps
from torchcaps.energy.decoder import CapsuleDecoder
from torchcaps.energy.experts import ExpertCapsules
from torchcaps.squash import safe_norm, squash
from torchcaps.types import Capsules, whole

__all__ = ["ExpertPipeline", "Law", "PoseLaw"]

Law = Literal["sphere", "half", "fitted"]


class PoseLaw(nn.Module):
    """What the poses of J capsules of Q numbers, the last `line` of them on a line, are like (laws: top of this file).

    Buffers, set by `fit`: `direction` `[J, Q]`, m_k; `mean` `[J, Q]` and `factor` `[J, Q, Q]`, the Cholesky factor of
    the covariance.
    """

    def __init__(self, caps: int = 20, pose: int = 16, line: int = 0) -> None:
        super().__init__()
        self.line = line
        self.direction: Tensor
        self.mean: Tensor
        self.factor: Tensor
        self.register_buffer("direction", torch.zeros(caps, pose))
        self.register_buffer("mean", torch.zeros(caps, pose))
        self.register_buffer("factor", torch.eye(pose).repeat(caps, 1, 1))

    @torch.no_grad()
    def fit(self, poses: Tensor, weights: Tensor | None = None) -> None:
        """From training poses `[N, J, 1, Q]`, and how much each counts, `[N, J]`; None is the length of the pose."""
        J, Q = self.mean.shape
        if poses.dim() != 4 or list(poses.shape[1:]) != [J, 1, Q]:
            raise ValueError(f"poses of this law are {['N', J, 1, Q]}, not {list(poses.shape)}")
        x = poses.squeeze(-2)
        w = safe_norm(poses[..., : Q - self.line]) if weights is None else weights
        w = w / w.sum(0).clamp(min=torch.finfo(x.dtype).tiny)
        self.direction.copy_(x.sum(0))
        self.mean.copy_(torch.einsum("nj,njq->jq", w, x))
        centred = x - self.mean
        covariance = torch.einsum("nj,njq,njr->jqr", w, centred, centred)
        # a capsule that moves in fewer than Q directions has no factor without this
        floor = 1e-6 * covariance.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-6)
        eye = torch.eye(Q, dtype=x.dtype, device=x.device)
        self.factor.copy_(torch.linalg.cholesky(covariance + floor[:, None, None] * eye))

    @torch.no_grad()
    def sample(
        self,
        capsule: int,
        count: int,
        *,
        law: Law = "half",
        raw: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """`count` draws of one capsule, all others 0: poses `[count, J, 1, Q]`.

        raw  g itself, of length about 4 for 16 numbers, in the place of squash(g).

        Raises ValueError for a capsule that is not there and for an unknown law.
        """
        J, Q = self.mean.shape
        number = whole(capsule)
        if number is None or not 0 <= number < J:
            raise ValueError(f"capsule {capsule!r} is not there: the {J} capsules are numbered 0 to {J - 1}")
        if law not in ("sphere", "half", "fitted") or (raw and law == "fitted"):
            raise ValueError(f"law={law!r} with raw={raw}: take 'sphere', 'half' or 'fitted', raw with the first two")
        g = torch.randn(count, Q, generator=generator, dtype=self.mean.dtype).to(self.mean.device)
        ball = Q - self.line
        mean, factor = self.mean[number], self.factor[number]
        if law == "fitted":
            x = mean + g @ factor.T
            x = torch.cat([x[:, :ball] / safe_norm(x[:, :ball], -1, keepdim=True).clamp(min=1), x[:, ball:]], -1)
        else:
            u = g[:, :ball]
            if law == "half":
                against = u @ self.direction[number, :ball] < 0
                u = torch.where(against[:, None], -u, u)
            x = torch.cat([u if raw else squash(u, dim=-1), mean[ball:] + factor.norm(dim=1)[ball:] * g[:, ball:]], -1)
        poses = x.new_zeros(count, J, 1, Q)
        poses[:, number, 0] = x
        return poses


class ExpertPipeline(nn.Module):
    """The chain on top of this file, as one module: a frozen autoencoder, experts, a decoder and the law of the poses.

    Two decoders may be given: `decoder` rebuilds images from all capsules, `alone` draws from one of them
    (`CapsuleDecoder`, "sum" and "alone"); without the second the first does both.

    Attribute `mean_image` `[C, H, W]`: of the training images, for `measures.negatives_rate`; a buffer, 0 until set.
    """

    def __init__(
        self,
        autoencoder: ConvAutoencoder,
        experts: ExpertCapsules,
        decoder: CapsuleDecoder,
        alone: CapsuleDecoder | None = None,
    ) -> None:
        super().__init__()
        self.autoencoder, self.experts = autoencoder, experts
        self.decoder, self.alone = decoder, alone
        self.law = PoseLaw(experts.out_caps, experts.out_pose[1], experts.line)
        self.mean_image: Tensor
        self.register_buffer("mean_image", torch.zeros(autoencoder.in_chans, *autoencoder.image_size))

    def visible(self, images: Tensor) -> Tensor:
        """Visible capsules `[N, I, 1, P]` of images `[N, C, H, W]`, squashed."""
        return squash(self.unsquashed(images))

    def unsquashed(self, images: Tensor) -> Tensor:
        """The same before their squash: what the decoder aims at."""
        return caps_from_code(self.autoencoder.encode(images), self.experts.in_pose[1]).poses

    def forward(self, images: Tensor) -> Capsules:
        """Hidden capsules of images: poses `[N, J, 1, Q]`, firing probabilities `[N, J]`."""
        hidden: Capsules = self.experts(Capsules(self.visible(images)))
        return hidden

    def decode(self, poses: Tensor, alone: bool = False) -> Tensor:
        """Images `[N, C, H, W]` of hidden poses `[N, J, 1, Q]`, by the decoder for single capsules if `alone`."""
        decoder = self.alone if alone and self.alone is not None else self.decoder
        return self.autoencoder.decode(code_from_caps(decoder(poses), self.autoencoder.code_shape))

    def reconstruct(self, images: Tensor) -> Tensor:
        """Images through the hidden capsules and back."""
        return self.decode(self(images).poses)

    def generate(
        self,
        capsule: int,
        count: int = 4,
        *,
        law: Law = "half",
        raw: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Images `[count, C, H, W]` drawn from one capsule; see `PoseLaw.sample`."""
        with torch.no_grad():
            return self.decode(self.law.sample(capsule, count, law=law, raw=raw, generator=generator), alone=True)
