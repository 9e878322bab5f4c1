"""What routing costs: time and memory of every backend beside the reference, in one run.

    torchcaps bench                                  all layers, every backend that runs here
    torchcaps bench --workload fc --batch 1 8 128    one layer at several batch sizes
    torchcaps bench --step                           whole training steps beside the same step with routing off
    torchcaps bench --estimate                       what a GPU should take, from counted work
    torchcaps bench --scaling --plot OUT.png         how cost grows with N, I and J

Machines are noisy, so what counts are ratios within one run. On a CPU the figure is the process's CPU time on one
thread, the smallest of interleaved repeats (a neighbour makes a run slower, never faster); on CUDA it is the time
between events. Memory is what the process's peak grows by over a call, after all that was free was given back (Linux),
or CUDA's peak.

Beside the backends stand:

    tutorial    the einsum style of tutorials: all votes, an einsum for every line, the last agreement computed in vain
    batched     a convolution as a careful hand writes it: all votes from one batched product, no more loops over them
    compiled    torch.compile of the reference
    uniform     the same layer with one uniform round: what a layer costs with routing off
    floor       counted multiply-adds of a walk that recomputes votes, over the speed of a large matrix product here
"""

from torchcaps.bench.command import main
from torchcaps.bench.layers import Measured, measure
from torchcaps.bench.scaling import Point, measure_scaling
from torchcaps.bench.steps import STEPS, Step, measure_steps
from torchcaps.bench.workloads import WORKLOADS, Workload

__all__ = [
    "STEPS", "WORKLOADS", "Measured", "Point", "Step", "Workload",
    "main", "measure", "measure_scaling", "measure_steps",
]  # fmt: skip
