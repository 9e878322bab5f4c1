"""Plants faults into the library, one at a time, and sees whether the tests find them.

    python scripts/mutate.py                  all faults; exit code 1 if one is missed
    python scripts/mutate.py --only em        those whose name holds "em"
    python scripts/mutate.py --check          only look whether every fault still has its place in the source
    python scripts/mutate.py --jobs 4         so many at a time

A fault is a piece of source text and what replaces it. It is planted in a copy of the repository in a temporary folder,
never in the working tree. First the tests named beside it run, those that should find it; if they do not, all tests do.
A fault is caught when a test fails. A copy without a fault runs all the named tests too, and must pass them.

A change to the library that moves a fault's text makes this script fail: then move the fault, or find a better one.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import numpy  # noqa: F401  # heavy, and so imported once for the tests of all faults; torchcaps never is
import pytest
import torch  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info", "runs")


@dataclass(frozen=True)
class Fault:
    """`old`, which stands exactly once in `file` of src/torchcaps, becomes `new`; `tests` are likely to find it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, source: str) -> str:
        found = source.count(self.old)
        if found != 1:
            raise SystemExit(f"{self.name}: its text stands {found} times in src/torchcaps/{self.file}:\n{self.old}")
        return source.replace(self.old, self.new)


# @ file: the tests to run first. Then faults: a name, what is there (-), what takes its place (+); empty lines between.
TABLE = r"""
@ squash.py: test_squash.py

squash: a square dropped above length 1
- (1 + a * t.square()).reciprocal()
+ (1 + a * t).reciprocal()

squash: rows squashed apart
- kind: Squash = "sabour", dim: int | Sequence[int] = (-2, -1), a:
+ kind: Squash = "sabour", dim: int | Sequence[int] = -1, a:

squash option: eps left out
- torch.full_like(r, eps**0.5)
+ torch.zeros_like(r)

squash option: a ignored below length 1
- (a + r.masked_fill(large, 1.0).square()).reciprocal()
+ (1 + r.masked_fill(large, 1.0).square()).reciprocal()

squash: series of tanh with a wrong term
- q * (2 / 15 -
+ q * (2 / 5 -

squash gradient: the gain is a constant
- (across * dv + (along - across) * (e * dv).sum(dim, keepdim=True) * e).to(s.dtype)
+ (across * dv).to(s.dtype)

squash: float16 inside
- return s.to(torch.promote_types(s.dtype, torch.float32))
+ return s

squash: NaN at zero
- y / n.masked_fill(n == 0, 1.0)
+ y / n

unsquash: a wrong sign
- (n / (1 - n)).sqrt()
+ (n / (1 + n)).sqrt()

safe norm: squares overflow
- m = x.detach().abs().amax(dim, keepdim=True)
+ m = torch.ones_like(x.detach().abs().amax(dim, keepdim=True))

@ routing/_round.py: test_golden_dynamic.py test_oracles.py

softmax over children
- coupling = softmax(logits, 2)
+ coupling = softmax(logits, 1)

shared weight: one column of the pose alone
- ("nirp,jpq->nijrq", poses, weight[0])
+ ("nirp,jpq->nijrq", poses[..., :1].expand_as(poses), weight[0])

option leaky: the leak takes no share
- softmax(torch.cat([logits, torch.zeros_like(logits[:, :, :1])], dim=2), 2)[:, :, :-1]
+ softmax(logits, 2)

option leaky: the leak is kept, a parent dropped
- dim=2), 2)[:, :, :-1]
+ dim=2), 2)[:, :, 1:]

coupling of the first round
- coupling = rounds[-1].to(self.dtype)
+ coupling = rounds[0].to(self.dtype)

coupling of all rounds backwards
- torch.stack(list(rounds))
+ torch.stack(list(rounds)[::-1])

@ routing/_round.py: test_routing_properties.py::test_combining_adds_up_poses_times_weights

transposed weight
- ("nirp,ijpq->nijrq", poses, weight)
+ ("nirp,ijpq->nijrq", poses, weight.mT if weight.shape[2] == weight.shape[3] else weight)

vote offset dropped
- votes = votes + self.vote_offset
+ votes = votes + 0 * self.vote_offset

@ routing/_round.py: test_routing_properties.py::test_what_masked_children_hold_changes_neither_values_nor_gradients

mask by multiplication
- poses = poses.masked_fill(~mask[..., None, None], 0.0)
+ poses = poses * mask[..., None, None]

mask by multiplication, activations
- activations = activations.masked_fill(~mask, 0.0)
+ activations = activations * mask

mask not on the offset
- votes = votes.masked_fill(~self.mask[:, :, None, None, None], 0.0)
+ votes = votes

@ routing/_round.py: test_routing_properties.py::test_shares_sum_as_the_rule_says

masked children keep their share
- return coupling if mask is None else coupling.masked_fill(~mask[:, :, None], -torch.inf if log else 0.0)
+ return coupling

@ routing/_round.py: test_routing_properties.py::test_masked_children_leave_their_share_of_a_parent_to_the_others

masked children compete for parents
- torch.finfo(logits.dtype).min)
-         coupling
+ 0.0)
+         coupling

@ routing/_round.py: test_routing_properties.py::test_a_child_shares_one_among_the_parents_of_all_windows_that_see_it

child_ids ignored
- elif child_ids is not None:
+ elif child_ids is not None and len(child_ids) == 0:

child_ids: examples and windows mixed up
- b = logits.unflatten(0, (-1, windows)).flatten(1, 2)
+ b = logits.unflatten(0, (windows, -1)).transpose(0, 1).flatten(1, 2)

@ routing/_round.py: test_routing_properties.py::test_ids_of_padding_change_nothing

child_ids: padding competes
- b = logits.unflatten(0, (-1, windows))
+ b = (logits if mask is None else logits.clamp(min=-5)).unflatten(0, (-1, windows))

@ routing/_round.py: test_routing_properties.py::test_gradients_of_windows_are_those_of_finite_differences

child_ids gradient: the others of the same child are constants
- total = total.scatter_add(1, ids, e.sum(2))
+ total = total.scatter_add(1, ids, e.sum(2).detach())

@ routing/_round.py: test_precision.py

half precision inside
- compute = torch.promote_types(dtype, torch.float32)
+ compute = dtype

autocast inside
- torch.autocast(device, enabled=False) if torch.amp
+ contextlib.nullcontext() if torch.amp

@ routing/_round.py: test_routing_errors.py

zero rounds are let in
- not isinstance(iterations, int) or iterations < 1:
+ not isinstance(iterations, int) or iterations < 0:

a weight for other children is let in
- if children not in (1, I) or columns != poses.shape[-1]:
+ if columns != poses.shape[-1]:

@ routing/dynamic.py: test_golden_dynamic.py test_oracles.py

dynamic: logits of the whole batch
- else torch.einsum("nijrq,njrq->nij", direction, V)
+ else torch.einsum("nijrq,njrq->nij", direction, V).mean(0, keepdim=True).expand(N, I, J)

dynamic gradient: earlier rounds are constants
- return heard if V is None or not self.accumulate else V + heard, v
+ return heard if V is None or not self.accumulate else V.detach() + heard, v

dynamic option: accumulate ignored
- V is None or not self.accumulate else
+ V is None else

dynamic option: inner squash used last
- v = apply_squash(s, self.squash) if last and self.squash != self._heard else heard
+ v = heard

dynamic option: cosine of votes as they are
- direction = apply_squash(seen, "normalize") if step.cosine else seen
+ direction = seen

dynamic option: cosine of parents as they are
- return "normalize" if self.cosine else self.inner_squash
+ return self.inner_squash

dynamic option: bias in the last round alone
- s = s + bias[0] if bias else s
-         heard
+ s = s + bias[0] if bias and last else s
+         heard

dynamic option: votes of earlier rounds not detached
- seen = u.detach() if detach == "all_but_last" else u
+ seen = u

dynamic preset: Su's squash is Sabour's
- SU_SQUASH = Sabour(a=0.5)
+ SU_SQUASH = Sabour(a=1.0)

@ routing/dynamic.py: test_routing_properties.py::test_a_preset_is_its_papers_settings_by_name

dynamic preset: Hauser's coupling has a gradient
- normalize=normalize, detach="coupling")
+ normalize=normalize, detach="none")

@ routing/dynamic.py: test_oracles.py::test_prior_and_bias_stand_in_every_round_of_dynamic

dynamic option: prior in the first round alone
- b = b + prior
+ b = b + prior if V is None else b

@ routing/dynamic.py: test_routing_properties.py::test_stopped_gradients_are_those_of_a_sum_with_given_shares

dynamic option: coupling not detached
- c = c.detach()
+ c = c.clone()

@ routing/dynamic.py: test_routing_properties.py::test_all_but_last_leaves_a_gradient_to_the_last_sum_and_the_prior

dynamic option: state of earlier rounds not detached
- V = V.detach()
+ V = V.clone()

@ routing/dynamic.py: test_routing_properties.py::test_rounds_run_one_at_a_time_give_what_they_give_at_once

dynamic: start ignored
- call.tensor("start", start, N, J, R, Q)
+ None

@ routing/dynamic.py: test_routing_properties.py::test_shares_sum_as_the_rule_says

dynamic option: normalize ignored
- c = couple(b, over=normalize,
+ c = couple(b, over="parents",

@ routing/dynamic.py: test_stacking.py

dynamic: initial weights forget how many parents share
- share = 1 / I if self.normalize == "children" else 1 / J
+ share = 1 / J if self.normalize == "children" else 1 / I

@ routing/attention.py: test_golden_attention.py test_oracles.py

attention: LayerNorm over columns alone
- functional.layer_norm(s, s.shape[2:], gain, bias, self.eps)
+ functional.layer_norm(s, s.shape[3:], *(None if x is None else x[0] for x in (gain, bias)), self.eps)

attention: scale of one row
- (R * Q) ** -0.5 if
+ Q**-0.5 if

attention gradient: parents are constants
- "nijrq,njrq->nij", V, p)
+ "nijrq,njrq->nij", V, p.detach())

attention gradient: coupling is a constant
- torch.einsum("nij,nijrq->njrq", r, V)
+ torch.einsum("nij,nijrq->njrq", r.detach(), V)

@ routing/attention.py: test_oracles.py::test_attention_is_the_papers

attention option: scale ignored
- (R * Q) ** -0.5 if scale is None else scale
+ (R * Q) ** -0.5

attention option: norm ignored
- norm and R * Q > 1
+ R * Q > 1

@ routing/attention.py: test_oracles.py::test_attention_normalises_with_its_gain_and_bias

attention option: eps ignored
- s = torch.nn.functional.layer_norm(s, s.shape[2:], gain, bias, self.eps)
+ s = torch.nn.functional.layer_norm(s, s.shape[2:], gain, bias, 1e-5)

@ routing/em.py: test_golden_em.py test_oracles.py

em: activation left out
- q = a[:, :, None] *
+ q = (a[:, :, None] > 0) *

em: lambda off by one
- 0.95 ** (t + 1)
+ 0.95**t

em: lambda starts anew
- first = 0 if state is None else state.round
+ first = 0

em: variance not centred
- w, (V - mu[:, None]).square())
+ w, V.square())

em option: min_variance is a least, not added
- s2 = s2 + min_variance
+ s2 = s2.clamp(min=min_variance)

em: variance for the deviation
- - (s2.log().sum((2, 3)) / 2)[:, None]
+ - s2.log().sum((2, 3))[:, None]

em: cost of one entry of a pose
- R * Q * beta_u
+ beta_u

em: parents' activations not in the E-step
- torch.nn.functional.logsigmoid(logit)[:, None] + log_p
+ log_p

em gradient: parents' activations are constants
- logsigmoid(logit)
+ logsigmoid(logit.detach())

em gradient: variances are constants
- mu, s2, logit, _ = state
+ mu, s2, logit, _ = state
+             s2 = s2.detach()

@ routing/em.py: test_routing_properties.py::test_em_does_not_lose_small_variances_beside_large_means

em: variance as a difference of large numbers
- w, (V - mu[:, None]).square())
+ w, V.square()) - mu.square()

@ routing/em.py: test_routing_properties.py::test_no_child_at_all_has_a_finite_answer

em: a parent of nobody is NaN
- w = q / m.masked_fill(m == 0, 1.0)[:, None]
+ w = q / m[:, None]

@ routing/combine.py: test_routing_properties.py::test_combining_adds_up_poses_times_weights

combine: offset ignored
- vote_offset=vote_offset, mask=None
+ vote_offset=None, mask=None

@ routing/combine.py: test_routing_properties.py::test_combining_down_is_the_adjoint_of_combining_up

combine: down with the weight of the way up
- .permute(1, 0, 3, 2)
+ .permute(1, 0, 2, 3)

@ types.py: test_layers.py::test_a_fully_connected_layer_is_one_call_of_its_rule_on_the_flattened_map

capsules: a map is flattened position by position
- poses.flatten(1, -3)
+ poses.movedim(1, -3).flatten(1, -3)

@ layers/primary.py: test_layers.py::test_a_primary_capsule_is_consecutive_channels_at_one_place

primary: a capsule is spread over the channels
- .unflatten(1, (self.types, R, P)).movedim((2, 3), (-2, -1))
+ .unflatten(1, (R, P, self.types)).movedim((1, 2), (-2, -1))

@ layers/primary.py: test_layers.py::test_primary_poses_pass_a_layer_norm_of_their_own_then_the_squash

primary option: norm ignored
- if self.norm is not None:
+ if self.norm is not None and not self.pose:

@ layers/fully_connected.py: test_layers.py::test_masked_children_change_nothing_in_any_layer

fully connected: mask dropped
- mask=None if mask is None else mask.flatten(1)
+ mask=None

@ layers/shared.py: test_layers.py::test_a_layer_shared_by_type_has_the_weight_of_the_type_at_every_place

shared: weights of types in turn
- weight = self.weight if self.in_types is None else _repeat(self.weight, positions)
+ weight = self.weight if self.in_types is None else self.weight.repeat(positions, 1, 1, 1)

@ routing/_windows.py: test_conv_layers.py::test_each_window_is_a_fully_connected_layer_on_the_children_that_are_there

conv: a window's entries by place, then type
- x = x.permute(0, *out, 1, *range(2 + axes + rest, x.dim()), *tail)
+ x = x.permute(0, *out, *range(2 + axes + rest, x.dim()), 1, *tail)

conv: padding is a child of zeros
- if mask is None and self.padded:
+ if mask is None and not self.padding:

conv option: the stride of the first axis on all
- x = x.unfold(axis, k, s)
+ x = x.unfold(axis, k, self.stride[0])

@ layers/conv.py: test_conv_layers.py::test_a_child_shares_one_among_the_parents_of_all_windows_that_see_it

conv option: competition ignored
- view = {"child_ids": self._child_ids(spatial, poses.device)} if self.competition == "all" else {}
+ view = {}

@ routing/_windows.py: test_backends.py

windows: what several windows say of a child is not added up
- total[seen] += entries
+ total[seen] = entries

windows: the border is not cut off
- slice(p, p + size) for p, size
+ slice(0, size) for p, size

@ routing/_passes.py: test_backends.py

passes: rows and columns of a convolution change places
- movedim((1, 2, 3), (-2, -3, -1)).reshape
+ movedim((1, 2, 3), (-2, -1, -3)).reshape

passes: a height of one takes the padding of the row
- (0, *windows.padding))
+ (windows.padding[0], *windows.padding))

@ routing/_rounds.py: test_backends.py

rounds: a backward pass under autocast is cast
- with own_precision(dv):
+ with torch.no_grad():

@ routing/_ops.py: test_backends.py

ops: strides are not as promised
- g.weight.contiguous(),
+ g.weight,

@ routing/_native.py: test_backends.py

native: the gradient of the uniform round is left out
- map_backward_full(laid.poses, laid.weight, V, ds, uniform=uniform
+ map_backward_full(laid.poses, laid.weight, V, ds, uniform=None

@ layers/coordinates.py:
test_layers.py::test_coordinates_stand_in_the_right_hand_column_of_a_matrix_each_axis_by_its_own_size

coordinates: one size for both axes
- dtype=offset.dtype) + 0.5) / size
+ dtype=offset.dtype) + 0.5) / max(spatial)

coordinates: in the left-hand column
- else (axis, Q - 1)
+ else (axis, 0)

@ layers/decoders.py: test_layers.py::test_a_decoder_sees_the_kept_capsule_alone

decoder: sees all capsules
- return self.layers((poses * keep[:, :, None, None]).flatten(1))
+ return self.layers(poses.flatten(1))

@ layers/_layer.py: test_layers.py::test_initial_weights_are_normal_with_the_standard_deviation_of_the_rule

layers: initial weights of one size for all
- self.weight.normal_(0.0, std)
+ self.weight.normal_(0.0, 0.01)

@ losses.py: test_losses.py test_golden_losses.py

margin loss: no square on present classes
- (positive - p).relu().pow(power), (p
+ (positive - p).relu(), (p

margin loss: present classes pushed down too
- negative_weight * (1 - present) * too_high
+ negative_weight * too_high

margin loss option: over_classes ignored
- loss.sum(1) if over_classes == "sum" else loss.mean(1)
+ loss.sum(1)

spread loss: the right class takes part
- too_close.scatter(1, t, own).sum(1)
+ too_close.sum(1)

reconstruction loss: depends on the size
- PAPER_PIXELS * squares.flatten(1).mean(1)
+ squares.flatten(1).sum(1)

@ models/capsnet.py: test_capsnet.py::test_the_decoder_sees_the_longest_capsule_in_evaluation_whatever_the_label

model: the label is decoded in evaluation
- keep if self.training else _highest(scores)
+ keep

model: the shortest capsule is decoded
- scores.argmax(1, keepdim=True)
+ scores.argmin(1, keepdim=True)

@ models/capsnet.py: test_capsnet_gradients.py

model gradient: the decoder does not train the capsules
- self.decoder(capsules.poses, keep
+ self.decoder(capsules.poses.detach(), keep

@ routing/em.py: test_streamed.py

em: shares divided out after they have underflowed
- q = a[:, :, None] * (log_r - top).clamp(max=MOST).exp()
+ q = a[:, :, None] * log_r.exp()

@ routing/_passes.py: test_streamed.py

uniform first round: the leak takes no share
- 1 / (ch.weight.shape[1] + ch.leaky)
+ 1 / ch.weight.shape[1]

@ routing/_rounds.py: test_streamed.py

streamed gradient: the state of the round before has none
- alpha=plan.step.scale)
+ alpha=0.0)

streamed gradient: the agreement's scale forgotten
- alpha=plan.step.scale)
+ alpha=1.0)

streamed gradient: detached rounds go on
- if plan.detach == "all_but_last":
+ if plan.detach == "no such":

@ routing/_streamed.py: test_streamed.py

streamed gradient: the softmax's own sum left out
- return c, c * (g - (c * g).sum(self.slab.parent, keepdim=True))
+ return c, c * g

streamed: a tile changes the uniform round's gradient
- base.expand_as(self.u).clone(memory_format=torch.contiguous_format)
+ base.expand_as(self.u).contiguous()

streamed: the online softmax is not rescaled
- slab.scale(so_far[2], keep)
+ so_far[2]

streamed gradient: votes of unit length are not
- du += (through - self.seen * (self.seen * through).sum((2, 3), keepdim=True)) / self.length
+ du += through / self.length

@ routing/_streamed_em.py: test_streamed.py

streamed em: tiles merged without what lies between their means
- scatter + so_far[3] * keep[:, None, None] + apart.square() * share * before[:, None, None]
+ scatter + so_far[3] * keep[:, None, None]

streamed em gradient: activations have none through the mass
- (e * g + share * down).sum(1).T
+ (e * g).sum(1).T

"""


def read(table: str) -> list[Fault]:
    """The faults of a table."""
    faults: list[Fault] = []
    file, tests = "", [""]
    for block in table.strip().split("\n\n"):
        lines = block.splitlines()
        if lines[0].startswith("@ "):
            file, *tests = " ".join(lines).replace(":", "", 1).split()[1:]
            continue
        old, new = ("\n".join(line[2:] for line in lines[1:] if line.startswith(sign)) for sign in "-+")
        faults.append(Fault(lines[0], file, old, new, tuple(tests)))
    return faults


def check(faults: list[Fault]) -> None:
    """Every fault has its place, exactly once, and a name of its own."""
    assert len({fault.name for fault in faults}) == len(faults)
    for fault in faults:
        fault.planted((ROOT / "src/torchcaps" / fault.file).read_text("utf-8"))
        for test in fault.tests:
            if not (ROOT / "tests" / test.split("::")[0]).exists():
                raise SystemExit(f"{fault.name}: there is no tests/{test}")


class NoShrinking:
    """A pytest plugin: the first example that fails will do, nobody reads it."""

    def pytest_collection(self) -> None:  # after tests/conftest.py, before the tests
        from hypothesis import Phase, settings

        settings.register_profile("no shrinking", settings.default, phases=[Phase.explicit, Phase.generate])
        settings.load_profile("no shrinking")


def start(copy: Path, tests: list[str]) -> int:
    """Runs tests in a copy, in a process of its own, and gives its number. What it says goes to the file `output`."""
    process = os.fork()
    if process:
        return process
    code = 3
    try:
        with (copy / "output").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.chdir(copy)
        os.environ |= {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(copy / "src"))
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--tb=no", *tests], plugins=[NoShrinking()])
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # and never back into what the parent was doing


@dataclass
class Trial:
    """A fault that is planted, or none, and the tests that are still to be tried on it."""

    fault: Fault | None
    copy: Path
    left: list[list[str]]
    began: float

    sound: str = ""

    def plant(self) -> None:
        if self.fault is not None:
            file = self.copy / "src/torchcaps" / self.fault.file
            self.sound = file.read_text("utf-8")
            file.write_text(self.fault.planted(self.sound), "utf-8")

    def heal(self) -> None:
        if self.fault is not None:
            (self.copy / "src/torchcaps" / self.fault.file).write_text(self.sound, "utf-8")

    def tell(self, code: int) -> bool:
        """Prints what came of it; whether that is good."""
        output = (self.copy / "output").read_text("utf-8", "replace")
        failed = [line.split(" - ")[0] for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        name = "nothing planted" if self.fault is None else self.fault.name
        if self.fault is None:
            verdict = "sound" if code == 0 else "NOT SOUND"
        else:
            verdict = {0: "MISSED", 1: "caught"}.get(code, "NO RUN")
        told = failed[0] if failed else "" if code == 0 else output[-300:]
        print(f"{verdict:9} {time.monotonic() - self.began:4.0f} s  {name:65} {told}", flush=True)
        return verdict in ("caught", "sound")


def run(faults: list[Fault], jobs: int, folder: Path) -> dict[str, bool]:
    """Whether each fault was caught, by its name; under "" whether the tests pass without any."""
    named = list(dict.fromkeys(f"tests/{test}" for fault in faults for test in fault.tests))
    waiting: list[tuple[Fault | None, list[list[str]]]] = [(None, [named])]
    waiting += [(fault, [[f"tests/{test}" for test in fault.tests], ["tests"]]) for fault in faults]
    copies = [folder / str(job) for job in range(jobs)]
    for copy in copies:
        shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
    running: dict[int, Trial] = {}
    good: dict[str, bool] = {}
    while waiting or running:
        while waiting and copies:
            fault, left = waiting.pop(0)
            trial = Trial(fault, copies.pop(), left, time.monotonic())
            trial.plant()
            running[start(trial.copy, trial.left.pop(0))] = trial
        process, status = os.wait()
        trial, code = running.pop(process), os.waitstatus_to_exitcode(status)
        if code == 0 and trial.left:
            running[start(trial.copy, trial.left.pop(0))] = trial
            continue
        good[trial.fault.name if trial.fault else ""] = trial.tell(code)
        trial.heal()
        copies.append(trial.copy)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose name holds this")
    parser.add_argument("--jobs", type=int, default=2, help="faults tried at a time")
    parser.add_argument("--check", action="store_true", help="look at the faults' places alone")
    arguments = parser.parse_args()
    faults = [fault for fault in read(TABLE) if arguments.only in fault.name]
    if not faults:
        raise SystemExit(f"no fault's name holds {arguments.only!r}")
    check(faults)
    if arguments.check:
        print(f"{len(faults)} faults have their place")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        good = run(faults, arguments.jobs, Path(folder))
    missed = [fault.name for fault in faults if not good[fault.name]]
    print(f"{len(faults) - len(missed)} of {len(faults)} faults caught", *missed, sep="\n    missed: ")
    if not good[""]:
        print("tests fail with nothing planted: their word about faults means nothing")
    return 0 if all(good.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
