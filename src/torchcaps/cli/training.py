"""`torchcaps fit | validate | test`: Lightning's command line, with a run's folder, and data that size the model.

    torchcaps fit --config digits_capsnet --run runs/mine --trainer.max_epochs 5
    torchcaps fit --config runs/mine/config.yaml --run runs/mine --ckpt_path last      goes on with a run
    torchcaps test runs/mine

A recipe is a YAML file of these arguments; those on the command line come after it and win.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import LearningRateMonitor
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from pytorch_lightning.loggers import Logger
from torch import nn

import torchcaps.data  # noqa: F401  (its classes can then be named without their module)
from torchcaps.cli import generating
from torchcaps.cli.recipes import with_files
from torchcaps.data import ImageData
from torchcaps.losses import MarginLoss
from torchcaps.run.build import build
from torchcaps.training import Classification, Optimization, trainer_settings
from torchcaps.training.scores import Link

__all__ = ["classifier", "fit", "run"]


def classifier(
    name: str,
    settings: dict[str, Any] = {},  # noqa: B006  (read, never changed)
    loss: nn.Module | None = None,
    reconstruction_weight: float = 0.0,
    optimization: Optimization = Optimization(),  # noqa: B008  (frozen)
    threshold: float = 0.5,
    link: Link | None = None,
    compile: bool = False,
    channels_last: bool = False,
    num_classes: int = 10,
    in_chans: int = 1,
    image_size: Sequence[int] = (28, 28),
    multi_label: bool = False,
    class_names: list[str] | None = None,
    preprocessing: dict[str, Any] | None = None,
) -> Classification:
    """A model and how it is trained. What follows from the data is not written here but taken from them.

    Args:
        name: Of the model: one of torchcaps.list_models().
        settings: Further arguments of its constructor; routing as {rule: Dynamic.sabour, iterations: 3}.
        loss: What is minimised. By default the margin loss for lengths and activations; for logits cross-entropy, or
            binary cross-entropy where there are several labels.
        reconstruction_weight: Of the decoder's squared error; 0.0005 in Sabour et al. 2017, 0 for none.
        optimization: Optimiser and learning rate.
        threshold: The probability from which on a label counts as present, where there are several.
        link: How the scores of a model become probabilities where it does not say so itself.
        compile: Compile the model.
        channels_last: Keep weights and images with their channels last in memory: faster in bfloat16 and on GPUs.
        num_classes: Taken from the data.
        in_chans: Taken from the data.
        image_size: Taken from the data.
        multi_label: Taken from the data.
        class_names: Taken from the data.
        preprocessing: Taken from the data.
    """
    config = {
        "name": name,
        "num_classes": num_classes,
        "in_chans": in_chans,
        "image_size": list(image_size),
        **settings,
    }
    model = build(config)
    return Classification(
        model,
        loss=_usual_loss(model, multi_label) if loss is None else loss,
        num_classes=num_classes,
        multi_label=multi_label,
        link=link,
        reconstruction_weight=reconstruction_weight,
        optimization=optimization,
        threshold=threshold,
        compile=compile,
        channels_last=channels_last,
        config=config,
        class_names=class_names,
        preprocessing=preprocessing,
    )


def _usual_loss(model: nn.Module, multi_label: bool) -> nn.Module:
    if getattr(model, "scores", "logits") != "logits":
        return MarginLoss()
    return nn.BCEWithLogitsLoss() if multi_label else nn.CrossEntropyLoss()


FROM_DATA = ("num_classes", "in_chans", "image_size", "multi_label", "class_names", "preprocessing")


class _Cli(LightningCLI):
    """Lightning's, with a run's folder in the place of its default logger and checkpoints."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        add = parser.add_argument
        add("--run", type=str, default="runs/unnamed", help="The folder that keeps the run.")
        add(
            "--monitor",
            type=str | None,
            default="val/loss",
            help="What chooses best.ckpt; null where nothing validates.",
        )
        add("--mode", type=str, default="min", help="Whether the smallest (min) or the largest (max) is the best.")
        add("--save_every_n_steps", type=int, default=500, help="Steps from one last.ckpt to the next.")
        add("--ema", type=float | None, default=None, help="Decay of a running average of the weights, such as 0.999.")
        add("--log", type=str | None, default=None, help="Log to wandb or mlflow too (mlflow: RUN/mlflow.db).")
        for field in FROM_DATA:
            parser.link_arguments(f"data.{field}", f"model.{field}", apply_on="instantiate")

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        folder = Path(config.run)
        last = folder / "checkpoints" / "last.ckpt"
        if config.get("ckpt_path") in ("last", "best"):
            config.ckpt_path = str(last.with_name(f"{config.ckpt_path}.ckpt"))
        if self.subcommand == "fit" and not config.ckpt_path and last.exists() and not config.trainer.fast_dev_run:
            raise ValueError(
                f"{folder} holds a run already: go on with it by --ckpt_path last, or give another folder, --run NAME"
            )
        if config.get("ckpt_path") and not Path(config.ckpt_path).exists():
            raise FileNotFoundError(f"there is no checkpoint {config.ckpt_path}: ls {folder / 'checkpoints'}")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self.config[self.subcommand]
        given: Mapping[str, Any] = self.config_init[self.subcommand].trainer
        made = trainer_settings(
            config.run, monitor=config.monitor if self.datamodule.parts.val is not None else None, mode=config.mode,
            save_every_n_steps=config.save_every_n_steps, ema=config.ema,
        )  # fmt: skip
        made["callbacks"] += given["callbacks"] or []
        made["logger"] += [given["logger"]] if isinstance(given["logger"], Logger) else given["logger"] or []
        made["logger"] += _logger(config.log, config.run)
        if given["fast_dev_run"]:  # nothing is kept
            made["logger"] = False
            made["callbacks"] = [c for c in made["callbacks"] if not isinstance(c, LearningRateMonitor)]
        return super().instantiate_trainer(**made, **kwargs)


def _logger(name: str | None, run: str) -> list[Logger]:
    if name is None:
        return []
    if name not in ("wandb", "mlflow"):
        raise ValueError(f"--log {name}: take wandb or mlflow; TensorBoard's events and metrics.csv are always there")
    from pytorch_lightning import loggers

    try:
        if name == "wandb":
            return [loggers.WandbLogger(name=Path(run).name, save_dir=run, project="torchcaps")]
        Path(run).mkdir(parents=True, exist_ok=True)
        place = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{run}/mlflow.db")  # folders are given up by MLflow 3
        return [loggers.MLFlowLogger(experiment_name="torchcaps", run_name=Path(run).name, tracking_uri=place)]
    except ModuleNotFoundError as error:
        raise ValueError(f"--log {name} needs a package that is not installed: pip install {name}") from error


def run(command: str, arguments: list[str]) -> None:
    """The commands."""
    if command == "fit" and generating.is_ours(arguments):
        generating.fit(arguments)
        return
    given = list(arguments)
    if command != "fit" and given and not given[0].startswith("-"):  # test RUN: its own configuration and weights
        folder = Path(given.pop(0))
        if not (folder / "config.yaml").is_file():
            raise ValueError(f"{folder} is no run: a run's folder holds a config.yaml and checkpoints")
        given = ["--config", str(folder / "config.yaml"), "--run", str(folder), *given]
        given += [] if any(a.startswith("--ckpt_path") for a in given) else ["--ckpt_path", "last"]
    cli = _command(command, given)
    if command == "fit" and cli.trainer.is_global_zero and not cli.config.fit.trainer.fast_dev_run:
        _say_what_came_out(cli.trainer, Path(cli.config.fit.run))


def fit(arguments: list[str]) -> LightningCLI:
    """`torchcaps fit` for other code: afterwards it has the `model`, `datamodule` and `trainer` of the run."""
    return _command("fit", list(arguments))


def _command(command: str, given: list[str]) -> LightningCLI:
    # these are the command's own arguments, with names of recipes turned into files
    warnings.filterwarnings("ignore", "LightningCLI's args parameter is intended to run from within Python")
    return _Cli(
        classifier,
        ImageData,
        subclass_mode_data=True,
        seed_everything_default=0,
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
        save_config_callback=SaveConfigCallback if command == "fit" else None,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"prog": "torchcaps"},
        args=[command, *with_files(given)],
    )


def _say_what_came_out(trainer: Trainer, folder: Path) -> None:
    """The last epoch's figures on validation data, and what to do next."""
    for name, value in sorted(trainer.callback_metrics.items()):
        if name.startswith("val/"):
            print(f"{name:<28}{float(value):.4f}")
    print(f"{folder} holds the run. Next: torchcaps test {folder}")
