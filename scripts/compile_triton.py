"""Compile every Triton kernel for compute capability 8.0 and 9.0 without a GPU; print what each takes.

    python scripts/compile_triton.py            the table
    python scripts/compile_triton.py --check    only what is marked quick, in float32; exit status 1 where a kernel
                                                spills that is not named in SPILLS, or asks for more shared memory
                                                than there is

Registers and spilled bytes are the assembler's own count (`cuobjdump -res-usage`, which comes with Triton); shared
memory is the compiler's. The shapes are those of the workloads named below, with the tiles the passes choose.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torchcaps.kernels import triton_passes as passes

TARGETS = (80, 90)
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory one program may have."""

SPILLS: dict[tuple[str, str, str, int], int] = {
    ("rows_sum state", "digits 1152 x 10, 8 -> 16", "bf16 ieee", 90): 16,
    ("rows_full full", "1152 x 100, 8 -> 16", "fp32 ieee", 80): 24,
    ("rows_sum state", "1152 x 100, 8 -> 16", "bf16 ieee", 90): 8,
    ("rows_full full", "1152 x 100, 8 -> 16", "bf16 ieee", 80): 8,
    ("rows_full full", "4 x 4 poses, 512 x 10", "fp32 ieee", 80): 32,
    ("rows_full full", "4 x 4 poses, 512 x 10", "bf16 ieee", 80): 24,
    ("rows_full full", "4 x 4 poses, 512 x 10", "bf16 ieee", 90): 24,
    ("rows_full full", "convolution 32 x 32, 4 x 4", "fp32 ieee", 80): 32,
    ("rows_full full", "convolution 32 x 32, 4 x 4", "bf16 ieee", 80): 32,
    ("rows_full full", "wide 64 -> 64, J 10", "fp32 tf32x3", 80): 80,
    ("rows_full full", "wide 64 -> 64, J 10", "bf16 tf32x3", 80): 128,
    ("rows_full full", "wide 64 -> 64, J 10", "bf16 tf32x3", 90): 88,
    ("rows_sum forward", "shared cosine d 128, J 10", "fp32 tf32x3", 90): 8,
    ("rows_full full", "shared cosine d 128, J 10", "fp32 tf32x3", 80): 104,
    ("rows_full full", "shared cosine d 128, J 10", "fp32 tf32x3", 90): 40,
    ("rows_full full", "shared cosine d 128, J 10", "bf16 tf32x3", 80): 176,
    ("rows_full full", "shared cosine d 128, J 10", "bf16 tf32x3", 90): 88,
    ("fold_poses poses", "shared d 128, J 10", "bf16 tf32x3", 80): 8,
    ("fold_poses poses", "the same, every option", "fp32 tf32x3", 80): 8,
    ("fold_poses poses", "the same, every option", "fp32 tf32x3", 90): 8,
    ("fold_sum both sums", "shared d 128, J 1000", "fp32 tf32x3", 90): 8,
}
"""(kernel, workload, dtype and precision, capability) -> bytes of local memory that are known and accepted."""


class Workload(NamedTuple):
    name: str
    sizes: tuple[int, int, int, int, int, int]
    window: passes.Window | None = None
    shared: bool = False
    cosine: bool = False
    leaky: bool = False
    mask: bool = False
    prior: bool = False
    quick: bool = False


ROWS = (
    Workload("digits 1152 x 10, 8 -> 16", (128, 1152, 10, 1, 8, 16), quick=True),
    Workload("the same, every option", (128, 1152, 10, 1, 8, 16), cosine=True, leaky=True, mask=True, prior=True),
    Workload("1152 x 100, 8 -> 16", (128, 1152, 100, 1, 8, 16)),
    Workload("4 x 4 poses, 512 x 10", (128, 512, 10, 4, 4, 4)),
    Workload(
        "convolution 32 x 32, 4 x 4", (128 * 49, 288, 32, 4, 4, 4), passes.Window((3, 3), (2, 2)), mask=True, quick=True
    ),
    Workload("wide 64 -> 64, J 10", (128, 64, 10, 1, 64, 64)),
    Workload("shared cosine d 128, J 10", (128, 576, 10, 1, 128, 16), shared=True, cosine=True, mask=True),
)
FOLDS = (
    Workload("shared d 128, J 10", (128, 576, 10, 1, 128, 16), shared=True, quick=True),
    Workload("the same, every option", (128, 576, 10, 1, 128, 16), shared=True, leaky=True, mask=True, prior=True),
    Workload("shared d 128, J 1000", (128, 3136, 1000, 1, 128, 16), shared=True),
    Workload("shared d 512, J 10", (128, 576, 10, 1, 512, 16), shared=True),
)
KINDS = ("fp32", "bf16", "fp16")


class Taken(NamedTuple):
    registers: int
    local: int
    shared: int
    products: int
    """matrix instructions in the code"""


def compile_for(kernel, given: dict[str, object], kind: str, capability: int) -> Taken:
    """`given`: every argument by name: "input", "float" or "flags" for a pointer, "size" for a number, or its value."""
    pointers = {"input": f"*{kind}", "float": "*fp32", "flags": "*u8"}
    warps = given.pop("num_warps")
    signature, constants, aligned = {}, {}, {}
    for at, name in enumerate(kernel.arg_names):
        value = given[name]
        parameter = kernel.params[at]
        if isinstance(value, str) and value in pointers:
            signature[name] = pointers[value]
            aligned[(at,)] = [["tt.divisibility", 16]]
        elif value == "size" and not parameter.is_constexpr:
            signature[name] = "i32"
        else:
            signature[name] = "constexpr"
            constants[(at,)] = value
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": passes.STAGES}
    )
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        report = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{what}:(\d+)", report)[1]) for what in ("REG", "STACK", "LOCAL"))
    products = len(re.findall(r"mma\.sync|wgmma\.mma", compiled.asm["ptx"]))
    return Taken(registers, stack + local, compiled.metadata.shared, products)


def row_kernels(load: Workload, precision: str):
    """(name, kernel, arguments) of the first family, forward and backward."""
    _B, _I, J, R, P, Q = load.sizes
    power = triton.next_power_of_2
    for full in (False, True):
        tiles = passes.walk_tiles(load.sizes, full, groups=0 if load.shared else load.sizes[1])
        several = tiles.parents < J
        steps = dict(zip(("KH", "KW", "SH", "SW", "PH", "PW"), (0,) * 6, strict=True))
        if load.window is not None:
            kernel, stride, padding = load.window
            steps = dict(zip(steps, (*kernel, *stride, *padding), strict=True))
        common = dict(
            X="input", WEIGHT="input", MASK="flags" if load.mask else None, PRIOR="float" if load.prior else None,
            B="size", I="size", K="size", weight_step=0 if load.shared else "size", per_part="size", per_group="size",
            poses_size="size", **dict.fromkeys(("C", "H", "W", "HO", "WO"), "size"), **steps, J=J, R=R, P=P, Q=Q,
            LEAKY=load.leaky, COSINE=load.cosine, PRECISION=precision, BB=tiles.rows, RP=power(R),
            PC=passes.columns_below(P), JT=tiles.parents, QP=power(Q), num_warps=tiles.warps,
        )  # fmt: skip
        found = {"LSE": "float" if several else None, "DELTA": "float" if several else None}
        sums = common | found | {"STATE": "float", "OUT": "float"}
        if full:
            gradients = {"D_X": "float", "D_WEIGHT": "float", "D_PRIOR": "float" if load.prior else None}
            rounds = {"STATES": "float", "GRADS": "float"}
            yield ("full", passes.rows_full, common | found | rounds | gradients | {"SHARED": load.shared})
        else:
            yield "forward", passes.rows_sum, sums | {"GRAD": None, "DELTA": None}
            yield "state", passes.rows_sum, sums | {"GRAD": "float"}
        if several:
            both = {"STATES": "float", "GRADS": "float", "LSE": "float", "DELTA": "float"}
            yield (("statistics, full" if full else "statistics"), passes.rows_statistics, common | both)


def fold_kernels(load: Workload, precision: str):
    """(name, kernel, arguments) of the second family."""
    N, I, J, R, P, _ = load.sizes
    E = R * P
    tiles = passes.fold_tiles(N, I, J, E)
    several = tiles.parents < J
    found = {"LSE": "float" if several else None, "DELTA": "float" if several else None}
    common = dict(
        X="input", A="float", G="float", MASK="flags" if load.mask else None, PRIOR="float" if load.prior else None,
        N="size", I="size", K="size", rounds="size", per_part="size", J=J, E=E, LEAKY=load.leaky, PRECISION=precision,
        BI=tiles.rows, JT=tiles.parents, EL=passes.entries(E, tiles.parents)[0],
        EC=passes.entries(E, tiles.parents)[1], num_warps=tiles.warps, **found,
    )  # fmt: skip
    yield ("forward", passes.fold_sum, common | {"G": None, "DELTA": None, "OUT_C": "float", "OUT_D": None})
    yield "state", passes.fold_sum, common | {"OUT_C": None, "OUT_D": "float"}
    yield "both sums", passes.fold_sum, common | {"OUT_C": "float", "OUT_D": "float"}
    yield "poses", passes.fold_poses, common | {"D_X": "float"}
    if load.prior:
        yield "prior", passes.fold_prior, common | {"D_PRIOR": "float"}
    if several:
        yield ("statistics", passes.fold_statistics, common | {"LSE": "float", "DELTA": "float"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="what is marked quick, in float32; fail on an unnamed spill"
    )
    parser.add_argument("--only", default="", help="workloads with this in their name")
    parser.add_argument("--kind", nargs="*", default=("fp32", "bf16"), choices=KINDS)
    parser.add_argument("--precision", choices=("ieee", "tf32x3", "tf32"), help="other than the passes choose")
    arguments = parser.parse_args()
    loads = [load for load in (*ROWS, *FOLDS) if arguments.only in load.name and load.quick >= arguments.check]
    bad = []
    columns = (
        ("kernel", 27),
        ("workload", 29),
        ("inputs", 12),
        ("sm", 2),
        ("warps", 6),
        ("registers", 10),
        ("spilled", 8),
    )
    print(*(f"{name:{wide}}" for name, wide in columns), "shared  mma")
    for load in loads:
        for kind in ("fp32",) if arguments.check else arguments.kind:
            length = load.sizes[3] * load.sizes[4] if load in FOLDS else load.sizes[4]
            precision = arguments.precision or passes.exactness(length)
            kernels = row_kernels(load, precision) if load in ROWS else fold_kernels(load, precision)
            for name, kernel, given in kernels:
                for capability in TARGETS:
                    what = (f"{kernel.fn.__name__} {name}", load.name, f"{kind} {precision}", capability)
                    taken = compile_for(kernel, dict(given), kind, capability)
                    if taken.local > SPILLS.get(what, 0) or taken.shared > SHARED_LIMIT[capability]:
                        bad.append(what)
                    print(
                        f"{what[0]:27} {load.name:29} {what[2]:12} {capability} {given['num_warps']:6}"
                        f" {taken.registers:10} {taken.local:8} {taken.shared:6}  {taken.products}",
                        flush=True,
                    )
    for what in bad:
        print("spills, or wants too much shared memory:", what)
    return 1 if bad and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
