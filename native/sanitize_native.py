"""Odd sizes of every pass through one library, for sanitizers: python sanitize_native.py LIBRARY [threads]"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import test_native as t

import native

library = native.load(Path(sys.argv[1]))
native._found = lambda: (library, "sanitized")
threads = int(sys.argv[2]) if len(sys.argv) > 2 else 1
torch.set_num_threads(1)
for shape, N, options in itertools.product(
    [(1, 8, 16), (4, 4, 4), (1, 16, 16), (2, 3, 5)],
    [1, 5, 17, 35],
    [{}, {"cosine": True, "leaky": True}, {"shared": True}],
):
    case = t.make_case(N, 21, 5, *shape, 2, mask=True, prior=True, uniform=True, **options)
    t.native_results(case.to(torch.float32), threads)
    print("connected", shape, N, options, flush=True)
for shape, J, options in itertools.product(
    [(4, 4, 4), (1, 8, 16), (2, 3, 5)], [3, 8, 17, 33], [{}, {"cosine": True, "leaky": True, "prior": True}]
):
    window = t.Window((3, 2), (2, 1), (1, 1))
    case, keep = t.make_map((2, 3, 5, 4), J, shape, window, 3, mask=True, uniform=True, **options)
    t.native_map_results(case.to(torch.float32), window, keep, threads)
    print("map", shape, J, options, flush=True)
print("done")
