"""The benchmark measures what it says, in every form; no test asserts a time."""

import dataclasses
import json

import pytest
import torch

from torchcaps import bench

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
    found = {f: bench._call(workload, route, f, "cpu")(*inputs) for f in ("reference", "streamed", "auto", "tutorial")}
    for form, parents in found.items():
        parents = (
            parents.reshape(workload.N, -1, workload.J, workload.R, workload.Q).movedim(1, 2)
            if (form == "tutorial" and name == "conv")
            else parents
        )
        torch.testing.assert_close(parents.flatten(1), found["reference"].flatten(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_measuring_gives_a_line_for_each_form(name):
    rows = bench.measure(SMALL[name], ["reference", "streamed", "uniform"], repeats=1)
    assert [r.form for r in rows] == ["reference", "streamed", "uniform"]
    assert all(0 < r.forward < float("inf") and 0 < r.both < float("inf") for r in rows)
    text = "\n".join(bench.table(rows, {(name, SMALL[name].N): SMALL[name].floor(1e9)}))
    assert "streamed" in text
    assert "floor" in text


def test_the_command_writes_its_record_and_its_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "WORKLOADS", SMALL)
    record, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    bench.main(["--workload", "fc", "--batch", "1", "2", "--repeats", "1", "--form", "reference", "streamed",
                "--json", str(record), "--plot", str(picture)])  # fmt: skip
    assert "auto takes reference" in capsys.readouterr().out
    assert {row["batch"] for row in json.loads(record.read_text())["rows"]} == {1, 2}
    assert picture.stat().st_size > 1000
