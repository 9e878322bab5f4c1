"""Every parent hears every child, and each pair has a weight of its own (Sabour, Frosst, Hinton 2017: DigitCaps)."""

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter, is_lazy

from torchcaps.layers._layer import Init, RoutedLayer, positive
from torchcaps.layers.coordinates import coordinate_offset
from torchcaps.routing import Backend, Rule
from torchcaps.types import Capsules, Pose, Routed

__all__ = ["FullyConnectedCapsules"]


class FullyConnectedCapsules(RoutedLayer):
    """Capsules `[N, I, R, P]`, or a map, which is flattened to I = C * positions, to `[N, J, R, Q]`.

    in_caps      I, or None to take it from the first input: run that before an optimiser or `torch.compile` sees the
                 layer. A map must keep its size, for each place has weights of its own.
    out_caps     J.
    in_pose      `(R, P)`, or P for vectors.
    out_pose     `(R, Q)` with the same R, or Q.
    routing      a rule, e.g. `Dynamic.sabour()`.
    init         standard deviation of the initial weights, or a callable that fills them; None asks the rule.
    coordinates  add each child's place to its votes (`coordinate_offset`): maps only.

    `weight` is `[I, J, P, Q]`; `learned` holds what the rule learns. Raises ValueError where sizes do not fit.

    >>> import torch
    >>> from torchcaps.routing import Dynamic
    >>> layer = FullyConnectedCapsules(1152, 10, 8, 16, routing=Dynamic.sabour())
    >>> layer(Capsules(torch.randn(2, 32, 6, 6, 1, 8))).poses.shape
    torch.Size([2, 10, 1, 16])
    """

    def __init__(
        self,
        in_caps: int | None,
        out_caps: int,
        in_pose: Pose,
        out_pose: Pose,
        *,
        routing: Rule,
        init: Init = None,
        coordinates: bool = False,
    ) -> None:
        if in_caps is not None:
            in_caps = positive(type(self).__name__, "in_caps", in_caps)
        super().__init__(in_caps, out_caps, in_pose, out_pose, routing=routing, init=init)
        self.in_caps = in_caps
        self.coordinates = coordinates

    def route(
        self,
        capsules: Capsules,
        mask: Tensor | None = None,
        *,
        start: Any = None,
        backend: Backend = "auto",
        return_coupling: bool | Literal["all"] = False,
    ) -> Routed:
        """All that the rule gives. `mask` has the leading shape of the poses; the keywords are the rule's."""
        self._check(capsules, mask)
        types, spatial = capsules.poses.shape[1], capsules.spatial
        children = types * math.prod(spatial)
        if children == 0:
            raise ValueError(f"{self.name} routes one child or more, but poses {list(capsules.poses.shape)} hold none")
        poses, activations = capsules.flatten()
        offset = None
        if self.coordinates:
            offset = coordinate_offset(types, spatial, self.out_pose, device=poses.device, dtype=poses.dtype)
        if self.in_caps is None:
            self._materialize(children)
        if children != self.in_caps:
            raise ValueError(
                f"{self.name} has weights for {self.in_caps} children, but poses {list(capsules.poses.shape)} hold "
                f"{' x '.join(map(str, (types, *spatial)))} = {children}: build it with in_caps={children} (or None, "
                "to take it from the first input), or take SharedCapsules, which hears any number"
            )
        return self.routing(
            poses,
            self.weight,
            activations,
            vote_offset=offset,
            mask=None if mask is None else mask.flatten(1),
            start=start,
            backend=backend,
            return_coupling=return_coupling,
            **self.learned,
        )

    def extra_repr(self) -> str:
        return f"in_caps={self.in_caps}, {super().extra_repr()}"

    @torch.inference_mode(False)  # parameters made in inference mode could never be trained
    def _materialize(self, children: int) -> None:
        dtype = self.weight.dtype
        if not isinstance(self.weight, UninitializedParameter):  # after .to("meta") it is a parameter of no numbers
            with self.weight.device:
                self.weight = UninitializedParameter()
        self.weight.materialize((children, self.out_caps, self.in_pose[1], self.out_pose[1]), dtype=dtype)
        self.in_caps = children
        self._start()

    # What torch's own lazy modules do: a stored layer gives a new one its size, and one without numbers can be stored.

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        stored = state_dict.get(f"{prefix}weight")
        if self.in_caps is None and isinstance(stored, Tensor) and not is_lazy(stored):
            sizes = [self.out_caps, self.in_pose[1], self.out_pose[1]]
            if stored.dim() != 4 or stored.shape[0] == 0 or list(stored.shape[1:]) != sizes:
                errors.append(
                    f"size mismatch for {prefix}weight: the stored one is {list(stored.shape)}, but this layer's is "
                    f"[in_caps, {', '.join(map(str, sizes))}]: build it with the out_caps and poses of the stored one"
                )
                return
            self._materialize(stored.shape[0])
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self.in_caps is None:
            destination[f"{prefix}weight"] = self.weight
        else:
            super()._save_to_state_dict(destination, prefix, keep_vars)
