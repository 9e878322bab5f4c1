"""Capsules learned without labels: products of experts, and the chain around them that draws images from one capsule.

    experts       the model: energy, free energy, firing, up and down
    learning      objectives and their loop: contrastive divergence and what betters it
    competition   experts that compete for the data, without negatives
    sampling      true samples: Hamiltonian Monte Carlo and Langevin on a product of balls
    likelihood    log Z: by enumeration, in closed form, by annealed importance sampling
    autoencoder   images to a code and back
    decoder       hidden capsules back to visible ones
    generation    the chain, and images from single capsules
    measures      what was learned, each with its control

Hauser 2019, "Training products of expert capsules with mixing by dynamic routing" (arXiv 1907.11643).
"""

from torchcaps.energy.autoencoder import ConvAutoencoder, caps_from_code, code_from_caps, train_autoencoder
from torchcaps.energy.competition import compete
from torchcaps.energy.decoder import CapsuleDecoder
from torchcaps.energy.experts import ExpertCapsules
from torchcaps.energy.generation import ExpertPipeline, PoseLaw
from torchcaps.energy.learning import (
    ContrastiveDivergence,
    Mixed,
    PersistentDivergence,
    SampledDivergence,
    contrastive_loss,
    contrastive_update,
    mix,
    train_experts,
)
from torchcaps.energy.likelihood import (
    LogPartition,
    annealed_log_partition,
    exact_log_partition,
    firing_patterns,
    log_joint,
    log_probability_of_states,
    log_volume,
)
from torchcaps.energy.sampling import Chain, flight, hmc, langevin, uniform_in_balls

__all__ = [
    "CapsuleDecoder", "Chain", "ContrastiveDivergence", "ConvAutoencoder", "ExpertCapsules", "ExpertPipeline",
    "LogPartition", "Mixed", "PersistentDivergence", "PoseLaw", "SampledDivergence", "annealed_log_partition",
    "caps_from_code", "code_from_caps", "compete", "contrastive_loss", "contrastive_update", "exact_log_partition",
    "firing_patterns", "flight", "hmc", "langevin", "log_joint", "log_probability_of_states", "log_volume", "mix",
    "train_autoencoder", "train_experts", "uniform_in_balls",
]  # fmt: skip
