"""The whole chain of expert capsules: phases that are kept, whole files, pictures, measures, and the commands."""

import json
from pathlib import Path
from typing import Any

import made_up_sets
import pytest
import torch
from PIL import Image

from torchcaps.cli import main
from torchcaps.energy import ContrastiveDivergence, ExpertCapsules, compete, train_experts
from torchcaps.energy.generation import Law
from torchcaps.reproduce import experts as reproduction
from torchcaps.reproduce.page import write_page
from torchcaps.run import experts
from torchcaps.run.experts import (
    ExpertSettings,
    Part,
    draw,
    encode,
    fit_autoencoder,
    fit_experts,
    load_experts,
    measure_experts,
)
from torchcaps.training import AtomicCheckpointIO

SMALL = ExpertSettings(
    objective="competition", iterations=1, centre=True, alone=True, out_caps=4, out_pose=3, channels=8, bfloat16=False
)
ARGUMENTS = ["--model.settings.out_caps", "4", "--model.settings.out_pose", "3", "--model.settings.channels", "8"]


def changed(**changes: Any) -> ExpertSettings:
    return ExpertSettings(**{**vars(SMALL), **changes})


def some_images(count: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    """A bright block in one of four corners, and which."""
    labels = torch.arange(count) % 4
    images = 0.1 * torch.rand(count, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    for image, label in zip(images, labels, strict=True):
        image[0, 4 + 12 * (label // 2) :, 4 + 12 * (label % 2) :][:8, :8] += 0.8
    return images, labels


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Part, Path]:
    """A trained one, images with their codes, and its file."""
    file = tmp_path_factory.mktemp("chain") / "autoencoder.pt"
    images, labels = some_images()
    made = fit_autoencoder(changed(autoencoder_epochs=10), images, file, say=lambda _: None)
    return made, Part(images, labels, encode(SMALL, made, images)), file


def a_chain(autoencoder: Any, folder: Path, **changes: Any) -> Any:
    made, part, _ = autoencoder
    return fit_experts(changed(**changes), made, part.images, part.codes, folder, say=lambda _: None)


def test_a_phase_whose_file_is_there_is_not_repeated(autoencoder: Any, tmp_path: Path, monkeypatch: Any) -> None:
    made, part, file = autoencoder
    chain = a_chain(autoencoder, tmp_path)
    for name in ("train_autoencoder", "_train"):
        monkeypatch.setattr(experts, name, None)
    again = fit_autoencoder(SMALL, part.images, file)
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), again.parameters(), strict=True))
    same = a_chain(autoencoder, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(chain.state_dict().values(), same.state_dict().values(), strict=True))
    with pytest.raises(ValueError, match="give another folder"):
        a_chain(autoencoder, tmp_path, centre=False)
    with pytest.raises(ValueError, match=r"'image_size': \[20, 28\].*give another file"):
        fit_autoencoder(SMALL, part.images[:, :, :20], file)


def test_what_is_interrupted_leaves_no_half_a_file(autoencoder: Any, tmp_path: Path, monkeypatch: Any) -> None:
    images, _ = some_images(8)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torchcaps.training.checkpoint.os.replace", stop)
    with pytest.raises(KeyboardInterrupt):
        fit_autoencoder(SMALL, images, tmp_path / "autoencoder.pt", say=lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        a_chain(autoencoder, tmp_path)
    assert not list(tmp_path.glob("*.pt"))
    monkeypatch.undo()
    fit_autoencoder(SMALL, images, tmp_path / "autoencoder.pt", say=lambda _: None)
    a_chain(autoencoder, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["autoencoder.pt", "experts.pt"]


def test_the_same_seed_makes_the_same_chain_and_another_another(autoencoder: Any, tmp_path: Path) -> None:
    made, part, _ = autoencoder
    weights = []
    for place, seed in (("a", 0), ("b", 0), ("c", 1)):
        chain = fit_experts(SMALL, made, part.images, part.codes, tmp_path / place, seed=seed, say=lambda _: None)
        weights.append(chain.experts.weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("objective", ["none", "divergence", "persistent", "sampled", "competition"])
def test_every_objective_makes_a_chain(objective: Any, autoencoder: Any, tmp_path: Path) -> None:
    start = a_chain(autoencoder, tmp_path / "start", objective="none").experts.weight
    chain = a_chain(autoencoder, tmp_path / objective, objective=objective, iterations=2)
    assert torch.equal(chain.experts.weight, start) == (objective == "none")
    assert chain.reconstruct(some_images()[0]).isfinite().all()


def test_gradients_and_the_decoder_see_the_first_images_alone(autoencoder: Any, tmp_path: Path) -> None:
    made, part, _ = autoencoder
    few = changed(objective="divergence", centre=False, images=20)
    spoilt = torch.cat([part.codes[:20], torch.rand_like(part.codes[20:])])
    one, other = (
        fit_experts(few, made, part.images, codes, tmp_path / name, say=lambda _: None)
        for name, codes in (("whole", part.codes), ("spoilt", spoilt))
    )
    assert torch.equal(one.experts.weight, other.experts.weight)
    assert torch.equal(one.decoder.weight, other.decoder.weight)


def test_the_papers_rule_can_be_taken_for_the_decoder(autoencoder: Any, tmp_path: Path) -> None:
    ridge, rule = (a_chain(autoencoder, tmp_path / name, decoder=name) for name in ("ridge", "rule"))
    images = some_images()[0]

    def error(chain: Any) -> float:
        return (chain.reconstruct(images) - images).square().mean().item()

    assert rule.decoder.scale > 1
    assert error(ridge) < error(rule)


def test_a_chain_comes_back_from_its_folder_or_its_file(autoencoder: Any, tmp_path: Path) -> None:
    chain = a_chain(autoencoder, tmp_path, line=0)
    for place in (tmp_path, tmp_path / "experts.pt"):
        again = load_experts(place)
        assert torch.equal(draw(again, law="fitted", seed=3), draw(chain, law="fitted", seed=3))


def test_what_is_no_chain_is_named(autoencoder: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no .*experts\.pt: train a chain first, torchcaps fit"):
        load_experts(tmp_path)
    with pytest.raises(ValueError, match="holds no chain of expert capsules"):
        load_experts(autoencoder[2])
    a_chain(autoencoder, tmp_path)
    whole = (tmp_path / "experts.pt").read_bytes()
    (tmp_path / "experts.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="is cut off"):
        load_experts(tmp_path)
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}}, tmp_path / "experts.pt")
    with pytest.raises(ValueError, match="holds no chain of expert capsules"):
        load_experts(tmp_path)


def test_a_picture_has_a_column_for_each_capsule_and_a_row_for_each_draw(autoencoder: Any, tmp_path: Path) -> None:
    chain = a_chain(autoencoder, tmp_path)
    random = torch.Generator().manual_seed(5)
    picture = draw(chain, [2, 0], law="sphere", rows=3, seed=5)
    assert picture.shape == (1, 84, 56)
    first = chain.generate(2, 3, law="sphere", generator=random)
    assert torch.equal(picture[:, 28:56, :28], first[1])
    assert torch.equal(experts._cut(picture, chain)[2], first[1])  # row after row
    laws: tuple[Law, ...] = ("sphere", "half", "fitted")
    assert len({draw(chain, law=law).sum().item() for law in laws}) == 3


def test_measures_stand_beside_their_controls(autoencoder: Any, tmp_path: Path) -> None:
    _, part, _ = autoencoder
    chain = a_chain(autoencoder, tmp_path)
    found = measure_experts(chain, part, part, other=torch.randn_like(part.codes), rows=5)
    assert found == measure_experts(chain, part, part, other=torch.randn_like(part.codes), rows=5) | {
        name: found[name] for name in found if name.endswith("other_set")
    }
    assert all(isinstance(value, (int, float)) and value == value for value in found.values())
    assert {measure for _, measure, _, _ in reproduction.ROWS} == set(found)
    assert found["probe.lengths"] > 0.9  # corners are told from who wins
    assert found["free_energy_gap.random_directions"] > 0
    assert found["auroc.other_set"] > 0.6
    assert found["image_error.pca_320"] < found["image_error.pca_20"] < part.images.var()
    assert found["negatives.fitted"] <= found["negatives.sphere"]
    assert found["negatives.real_images"] == 0


# ---------------------------------------------------------------------------------------------------------------------
# The commands


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `torchcaps fit` makes of a recipe on made-up digits."""
    place = tmp_path_factory.mktemp("run")
    made_up_sets.mnist(place / "root")
    main(["fit", "--config=mnist_expert_capsules", "--data.init_args.root", str(place / "root"),
          "--run", str(place / "run"), *ARGUMENTS])  # fmt: skip
    return place / "run"


def test_a_recipe_makes_a_run_that_holds_all_that_was_learned(a_run: Path, capsys: Any) -> None:
    files = {path.name for path in a_run.iterdir()}
    assert {"config.yaml", "autoencoder.pt", "experts.pt", "measures.json", "fitted.png", "half.png"} <= files
    assert "probe.lengths" in json.loads((a_run / "measures.json").read_text())
    main(["fit", "--config", str(a_run / "config.yaml")])  # all is there: nothing is trained
    assert "autoencoder, epoch" not in capsys.readouterr().out


@pytest.mark.parametrize("other", [["--model.settings.out_caps", "5"], ["--autoencoder", "other.pt"]])
def test_a_run_of_other_settings_is_not_overwritten(a_run: Path, other: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["fit", "--config", str(a_run / "config.yaml"), *other])
    assert "begin another run, --run NAME" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"images": 0}, "images=0: give 1 or more"),
        ({"autoencoder_epochs": 0}, "autoencoder_epochs=0: give 1 or more"),
        ({"out_caps": 1}, "out_caps=1: give 2 or more"),
        ({"in_pose": 3}, "in_pose=3 does not divide channels=128"),
        ({"line": 2, "objective": "competition"}, "takes no numbers on a line"),
    ],
)
def test_settings_that_cannot_be_trained_are_refused_before_anything_is(settings: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ExpertSettings(**settings)


def test_no_examples_are_said_to_be_none() -> None:
    model, nothing = ExpertCapsules(3, 2, 3, 5), torch.zeros(0, 3, 1, 3)
    with pytest.raises(ValueError, match="0 examples, 1 epochs"):
        train_experts(model, nothing, ContrastiveDivergence())
    with pytest.raises(ValueError, match="no visible capsules to take the mean of"):
        model.centre_on(nothing)
    with pytest.raises(
        ValueError, match="a capsule of 10 numbers needs as many directions, but 3 capsules of 3 have 9"
    ):
        compete(ExpertCapsules(3, 2, 3, 10), torch.zeros(20, 3, 1, 3))
    model.centre_on(torch.full((2, 3, 1, 3), 0.1, requires_grad=True))
    assert not model.centre.requires_grad


@pytest.mark.parametrize(
    ("out", "words"), [("noending", "says no kind of picture"), ("/proc/x.png", "cannot be written")]
)
def test_a_place_for_no_picture_is_told_at_once(a_run: Path, out: str, words: str, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["generate", str(a_run), "--out", out])
    assert words in capsys.readouterr().err


def test_images_are_drawn_from_a_run(a_run: Path, tmp_path: Path, capsys: Any) -> None:
    main(["generate", str(a_run), "--law", "half", "--rows", "2", "--out", str(tmp_path / "all.png")])
    with Image.open(tmp_path / "all.png") as picture:
        assert picture.size == (4 * 28, 2 * 28)
    main(["generate", str(a_run / "experts.pt"), "--capsule", "3", "--out", str(tmp_path / "one.png")])
    with Image.open(tmp_path / "one.png") as picture:
        assert picture.size == (28, 4 * 28)
    assert "4 draw(s) of capsule 3" in capsys.readouterr().out
    main(["generate", str(a_run), "--law", "sphere"])
    assert (a_run / "sphere.png").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--capsule", "4"], "capsule 4 is not there: the 4 capsules are numbered 0 to 3"),
        (["--capsule", "-1"], "capsule -1 is not there"),
        (["--rows", "0"], "--rows 0: give 1 or more"),
        (["--law", "whole"], "invalid choice: 'whole'"),
    ],
)
def test_a_mistake_in_generate_is_one_line(arguments: list[str], words: str, a_run: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["generate", str(a_run), *arguments])
    assert words in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_run_of_another_kind_is_no_chain(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["generate", str(tmp_path)])
    assert "train a chain first" in capsys.readouterr().err


def test_the_reproduction_records_each_chain_once_and_has_a_section_on_the_page(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    for name in ("MNIST", "FashionMNIST"):
        made_up_sets.mnist(tmp_path / "root", name=name)
    arms = {name: reproduction.ARMS[name]._replace(settings=changed(objective=objective))
            for name, objective in (("paper", "divergence"), ("competition", "competition"))}  # fmt: skip
    monkeypatch.setattr(reproduction, "ARMS", arms)
    monkeypatch.setattr(reproduction, "ExpertSettings", lambda: SMALL)  # of the autoencoder, which all arms share
    arguments = ["reproduce", "experts", "--sets", "mnist", "--seeds", "0", "1", "--root", str(tmp_path / "root"),
                 "--out", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]  # fmt: skip
    main(arguments)
    assert "mnist, paper: 2 seed(s)" in capsys.readouterr().out
    path = tmp_path / "results" / "experts.json"
    records = json.loads(path.read_text())["runs"]
    assert [(r["arm"], r["seed"]) for r in records] == [
        ("paper", 0), ("competition", 0), ("paper", 1), ("competition", 1),
    ]  # fmt: skip
    assert str(tmp_path) not in path.read_text()
    monkeypatch.setattr(reproduction, "fit_autoencoder", None)  # nothing is done again
    main(arguments)
    assert json.loads(path.read_text())["runs"] == records

    write_page(tmp_path / "docs" / "results.md", tmp_path / "results")
    page = (tmp_path / "docs" / "results.md").read_text()
    assert "|  | the paper's | competition |" in page
    assert "| seeds | 2 | 2 |" in page
    lengths = [100 * r["results"]["probe.lengths"] for r in records if r["arm"] == "paper"]
    assert f"| linear probe on the 20 lengths, % | {sum(lengths) / 2:.1f} ± " in page
    assert "### FashionMNIST" not in page
    assert (tmp_path / "docs" / "pictures" / "experts_mnist_competition_fitted.png").stat().st_size < 100_000


def test_a_limited_reproduction_is_a_trial_and_stays_off_the_page(tmp_path: Path) -> None:
    for limit in (None, 10):
        record = {"arm": "paper", "set": "mnist", "seed": 0, **({} if limit is None else {"limit": limit})}
        reproduction.append(tmp_path / f"{limit}" / "experts.json", record)
    with pytest.raises(ValueError, match="holds no records"):
        write_page(tmp_path / "page.md", tmp_path / "10")
