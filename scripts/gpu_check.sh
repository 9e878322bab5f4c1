#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: do the Triton kernels agree with the equations, and what do they save?
#
#     scripts/gpu_check.sh [python]        writes gpu_check/bench.json and prints the table
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${1:-python}
OUT=${OUT:-gpu_check}
mkdir -p "$OUT"
export PYTHONPATH=src

"$PYTHON" - <<'PY'
import torch
from torchcaps.routing import Attention, Dynamic
from torchcaps.testing import assert_backends_agree

print(torch.cuda.get_device_name(), "torch", torch.__version__)
for rule in (Dynamic.sabour(), Dynamic.su(), Dynamic(agreement="cosine"), Dynamic(leaky=True, learn_bias=True), Attention.tsai()):
    assert_backends_agree(rule, ["triton", "streamed", "auto"], device="cuda", dtypes=(torch.float32,))
    print("agree:", rule)
poses, weight = torch.randn(128, 1152, 1, 8, device="cuda"), torch.randn(1152, 10, 8, 16, device="cuda")
first, again = (Dynamic.sabour()(poses, weight, backend="triton").poses for _ in range(2))
assert torch.equal(first, again), "two runs differ"
print("two runs are bitwise the same")
PY
"$PYTHON" scripts/compile_triton.py --check
"$PYTHON" -m torchcaps.bench --device cuda --form reference tutorial streamed triton auto uniform --json "$OUT/bench.json"
