"""Looking inside a trained model: what each capsule found. Functions that look and never train.

    watching      what went into each capsule layer, and what came out
    coupling      coupling maps, parse trees, entropy and agreement per round, scores per round, occlusion
    poses         poses moved through the decoder, reconstructions, maps of poses, whether to believe the decoder
    attribution   saliency, and the function that methods of attribution take
    pictures      a figure of each
    report        all of it about one model, as a page
    page          a page to draw on and to move poses on (Gradio)

Each function returns plain data; a `draw_...` of the same subject makes a matplotlib figure of it.
"""

from torchcaps.explain.attribution import attribution_forward, saliency
from torchcaps.explain.coupling import (
    CouplingMaps,
    Occlusion,
    Part,
    RoutingTrace,
    coupling_maps,
    maps_of,
    occlude,
    occlusion,
    over_image,
    parse_tree,
    receptive_fields,
    routing_trace,
    scores_per_round,
)
from torchcaps.explain.poses import (
    DecoderCheck,
    PoseMap,
    PoseSweep,
    Reconstructions,
    class_poses,
    decoder_check,
    draws,
    pose_map,
    pose_sweep,
    principal_directions,
    reconstructions,
    redraw,
)
from torchcaps.explain.watching import Look, Seen, look, watching

__all__ = [
    "CouplingMaps", "DecoderCheck", "Look", "Occlusion", "Part", "PoseMap", "PoseSweep", "Reconstructions",
    "RoutingTrace", "Seen", "attribution_forward", "class_poses", "coupling_maps", "decoder_check", "draws", "look",
    "maps_of", "occlude", "occlusion", "over_image", "parse_tree", "pose_map", "pose_sweep", "principal_directions",
    "receptive_fields", "reconstructions", "redraw", "routing_trace", "saliency", "scores_per_round", "watching",
]  # fmt: skip
