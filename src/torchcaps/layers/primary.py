"""The first capsules: one convolution whose channels, taken together at each position, are poses.

    channel of entry (r, p) of type c        (c R + r) P + p
    channel of the activation of type c      C R P + c             with activations=True

Sabour, Frosst, Hinton 2017: 32 types of 8 numbers, kernel 9, stride 2, squashed.
Hinton, Sabour, Frosst 2018: 4x4 poses as they are, kernel 1, sigmoid activations.
Tsai et al. 2020: poses through a LayerNorm that all share, no squash, no bias.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from torchcaps.layers._layer import per_axis, positive
from torchcaps.routing._windows import check_window
from torchcaps.squash import Squash, check_squash
from torchcaps.squash import squash as apply_squash
from torchcaps.types import Capsules, Pose, pose_shape, whole

__all__ = ["PrimaryCapsules"]

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d

_CONVOLUTIONS: dict[int, tuple[Callable[..., Convolution], Callable[..., Convolution]]] = {
    1: (nn.Conv1d, nn.LazyConv1d),
    2: (nn.Conv2d, nn.LazyConv2d),
    3: (nn.Conv3d, nn.LazyConv3d),
}


class PrimaryCapsules(nn.Module):
    """Feature maps `[N, in_channels, *spatial]` to a map of capsules `[N, C, *out, R, P]`.

    in_channels   or None to take it from the first input (then run that before an optimiser sees the layer).
    types         C, capsules at each position.
    pose          `(R, P)`, or P for vectors.
    kernel_size, stride, padding  of the convolution: one number, or one per axis.
    spatial_dims  1, 2 or 3.
    squash        a kind of `torchcaps.squash` or a callable, for the poses; "identity" for none.
    norm          LayerNorm over each pose, before the squash, with one gain and bias `[R, P]` for all; a pose of a
                  single number is left as it is.
    activations   give each capsule an activation of its own, the sigmoid of one more channel.
    bias          of the convolution.

    Raises ValueError where the input does not fit.

    >>> import torch
    >>> PrimaryCapsules(256, 32, 8, kernel_size=9, stride=2)(torch.randn(2, 256, 20, 20)).poses.shape
    torch.Size([2, 32, 6, 6, 1, 8])
    """

    def __init__(
        self,
        in_channels: int | None,
        types: int,
        pose: Pose,
        kernel_size: int | Sequence[int] = 1,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        *,
        spatial_dims: int = 2,
        squash: Squash = "sabour",
        norm: bool = False,
        activations: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if whole(spatial_dims) not in _CONVOLUTIONS:
            raise ValueError(f"{name}: spatial_dims={spatial_dims!r} must be 1, 2 or 3")
        self.types, self.pose = positive(name, "types", types), pose_shape(pose)
        if squash is None:
            raise ValueError(f'{name}: squash must be a kind or a callable, not None: squash="identity" is no squash')
        check_squash("squash", squash)
        self.squash, self.activations = squash, activations
        R, P = self.pose
        channels = types * (R * P + activations)
        kernel = per_axis(name, "kernel_size", kernel_size, spatial_dims, 1)
        steps = per_axis(name, "stride", stride, spatial_dims, 1)
        margin = per_axis(name, "padding", padding, spatial_dims, 0)
        eager, lazy = _CONVOLUTIONS[spatial_dims]
        self.padding = margin
        self.conv: Convolution
        if in_channels is None:
            self.conv = lazy(channels, kernel, steps, margin, bias=bias)
        else:
            self.conv = eager(positive(name, "in_channels", in_channels), channels, kernel, steps, margin, bias=bias)
        self.norm = nn.LayerNorm(self.pose) if norm and R * P > 1 else None

    def forward(self, x: Tensor) -> Capsules:
        """`x` `[N, in_channels, *spatial]` to a map of capsules, with activations `[N, C, *out]` where asked for."""
        self._check(x)
        R, P = self.pose
        self._materialize(x.shape[1])
        channels = self.conv(x)
        poses = channels[:, : self.types * R * P].unflatten(1, (self.types, R, P)).movedim((2, 3), (-2, -1))
        if self.norm is not None:
            poses = self.norm(poses)
        poses = apply_squash(poses, self.squash)
        return Capsules(poses, channels[:, self.types * R * P :].sigmoid() if self.activations else None)

    def extra_repr(self) -> str:
        return f"types={self.types}, pose={self.pose}, squash={self.squash!r}, activations={self.activations}"

    def _materialize(self, channels: int) -> None:
        """Give a convolution without a size this one, as torch would at its first input."""
        if isinstance(self.conv, LazyModuleMixin) and self.conv.has_uninitialized_params():
            with torch.inference_mode(False):  # parameters made in inference mode could never be trained
                self.conv.initialize_parameters(torch.empty(1, channels, *self.conv.kernel_size, device="meta"))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        # a stored layer gives a new one its size if it fits: torch's convolution would take any
        name = f"{prefix}conv.weight"
        stored, sizes = state_dict.get(name), (self.conv.out_channels, *self.conv.kernel_size)
        if is_lazy(self.conv.weight) and isinstance(stored, Tensor) and not is_lazy(stored):
            if stored.dim() == len(sizes) + 1 and stored.shape[1] and (stored.shape[0], *stored.shape[2:]) == sizes:
                self._materialize(stored.shape[1])
            else:
                errors.append(
                    f"size mismatch for {name}: the stored one is {list(stored.shape)}, but this layer's is "
                    f"[{sizes[0]}, in_channels, {', '.join(map(str, sizes[1:]))}]: build it as the stored one was"
                )
                for key in (name, f"{prefix}conv.bias"):
                    state_dict.pop(key, None)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

    def _check(self, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise ValueError(f"PrimaryCapsules takes a tensor, not {type(x).__name__}: give torch.as_tensor(x)")
        kernel = self.conv.kernel_size
        channels = self.conv.in_channels  # 0 before the first input where it was not given
        if x.dim() != len(kernel) + 2 or x.shape[1] != (channels or x.shape[1]) or x.shape[1] == 0:
            raise ValueError(
                f"PrimaryCapsules takes maps [N, {channels or 'channels'}, *spatial] with {len(kernel)} spatial sizes, "
                f"not {list(x.shape)}: build it with the in_channels and spatial_dims of its input"
            )
        check_window("PrimaryCapsules", x.shape[2:], kernel, self.padding)
