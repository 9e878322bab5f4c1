"""The benchmark measures what it says, in every form; no test asserts a time."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from torchcaps import bench
from torchcaps.bench import command, layers, report, steps
from torchcaps.bench.estimate import estimate as bench_estimate

SMALL = {
    "fc": dataclasses.replace(bench.WORKLOADS["fc"], N=2, I=6, J=3),
    "shared": dataclasses.replace(bench.WORKLOADS["shared"], N=2, I=6, J=3, P=4),
    "conv": dataclasses.replace(bench.WORKLOADS["conv"], N=1, I=2, J=3, window=(5, 3, 2)),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_form_of_a_workload_gives_the_same_parents(name):
    torch.manual_seed(0)
    workload = SMALL[name]
    route, inputs = workload.make()
    forms = ["reference", "streamed", "auto", "tutorial", *(["batched"] if name == "conv" else [])]
    found = {form: layers._call(workload, route, form, "cpu")(*inputs) for form in forms}
    for form, parents in found.items():
        if name == "conv" and form in ("tutorial", "batched"):  # [N, h, w, J, R, Q]
            parents = parents.flatten(1, 2).movedim(1, 2)
        torch.testing.assert_close(parents.flatten(1), found["reference"].flatten(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_measuring_gives_a_line_for_each_form(name):
    rows = bench.measure(SMALL[name], ["reference", "streamed", "uniform"], repeats=1)
    assert [r.form for r in rows] == ["reference", "streamed", "uniform"]
    assert all(0 < r.forward < float("inf") and 0 < r.both < float("inf") for r in rows)
    text = "\n".join(report.table(rows, {(name, SMALL[name].N): SMALL[name].floor(1e9)}))
    assert "streamed" in text
    assert "floor" in text


def test_the_command_writes_its_record_and_its_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "WORKLOADS", SMALL)
    record, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    bench.main(["--workload", "fc", "--batch", "1", "2", "--repeats", "1", "--form", "reference", "streamed",
                "--json", str(record), "--plot", str(picture)])  # fmt: skip
    assert "auto takes reference" in capsys.readouterr().out
    assert {row["batch"] for row in json.loads(record.read_text())["rows"]} == {1, 2}
    assert picture.stat().st_size > 1000


def test_a_step_is_measured_beside_the_same_step_with_routing_off(monkeypatch, capsys):
    monkeypatch.setattr(steps, "STEPS", {"capsnet": steps.STEPS["capsnet"]})
    found = bench.measure_steps(["capsnet"], batch=1, repeats=1)
    assert [s.form for s in found] == ["reference", "auto", "uniform"]
    assert all(s.seconds > 0 and s.saved > 0 for s in found)
    assert "uniform" in "\n".join(report.step_table(found))


def test_the_network_of_inverted_attention_is_measured_beside_its_primary_capsules():
    whole, below = bench.measure_steps(["attention"], batch=1, repeats=1)
    assert (whole.form, below.form) == ("auto", "primary")
    assert 0 < below.saved < whole.saved


def test_growth_is_measured_one_size_at_a_time(tmp_path, capsys):
    picture = tmp_path / "growth.png"
    bench.main(["--scaling", "--batch", "2", "4", "--repeats", "1", "--form", "streamed", "--plot", str(picture)])
    lines = [line for line in capsys.readouterr().out.splitlines() if "=" in line]
    assert [line.split(" ")[0] for line in lines] == ["N", "N", "I", "I", "J", "J"]
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--batch", "0"], "must be a whole number from 1 on"),
        (["--repeats", "1.5"], "must be a whole number from 1 on"),
        (["--threads", "-1"], "must be a whole number from 1 on"),
        (["--form", "nope"], "choose from"),
        (["--device", "nope"], "PyTorch cannot use it here"),
    ],
)
def test_bad_values_are_refused_before_anything_is_measured(arguments, error, capsys):
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert error in capsys.readouterr().err


def test_an_estimate_grows_with_the_work_and_says_that_it_is_none_measured(capsys):
    once, twice = (bench_estimate(dataclasses.replace(bench.WORKLOADS["fc"], N=n)) for n in (1024, 2048))
    for a, b in zip(once, twice, strict=True):
        assert a.form == b.form
        assert a.forward < a.both < b.both < 2 * a.both
    bench.main(["--estimate", "--workload", "conv"])
    assert "not measured" in capsys.readouterr().out


def test_memory_is_measured_from_a_program_without_a_file_too():
    program = """
import dataclasses, torch
from torchcaps.bench.layers import measure
from torchcaps.bench.workloads import WORKLOADS
print("bytes", measure(dataclasses.replace(WORKLOADS["fc"], N=1, I=20), ["reference"], repeats=1)[0].memory_both)
"""
    done = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, check=False)
    assert "bytes" in done.stdout, done.stderr
