"""`torchcaps fit | validate | test`: Lightning's command line, with a run's folder, and data that size the model.

    torchcaps fit --config digits_capsnet --run runs/mine --trainer.max_epochs 5
    torchcaps fit --config runs/mine/config.yaml --run runs/mine --ckpt_path last      goes on with a run
    torchcaps test runs/mine

A recipe is a YAML file of these arguments; those on the command line come after it and win.
"""

import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any, ClassVar

import yaml
from filelock import FileLock
from jsonargparse import ArgumentError, Namespace
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import LearningRateMonitor
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch import nn

import torchcaps.data  # noqa: F401  (its classes can then be named without their module)
from torchcaps.cli import folders, generating
from torchcaps.cli.loading import chosen_checkpoint
from torchcaps.cli.recipes import with_files
from torchcaps.data import ImageData
from torchcaps.losses import MarginLoss
from torchcaps.run.build import build
from torchcaps.run.files import write_whole
from torchcaps.training import Classification, MetricsFile, Optimization, read_checkpoint, trainer_settings
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


def _as_yaml(parser: LightningArgumentParser, config: Namespace) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from jsonargparse 4.49 on skip_none is called skip_unset
        text: str = parser.dump(config, skip_none=False)
    return text


class _SaveConfig(SaveConfigCallback):
    """Writes RUN/config.yaml when the first step is due: what cannot be trained leaves the file as it was."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        pass

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        config = self.config.clone()
        config.ckpt_path = None  # what a run goes on from is not what it is
        write_whole(Path(config.run) / "config.yaml", _as_yaml(self.parser, config))


class _Cli(LightningCLI):
    """Lightning's, with a run's folder in the place of its default logger and checkpoints."""

    folder: ClassVar[Path | None] = None
    """The run that this process is at."""
    lock: FileLock | None = None
    """Held while a fit is at work in its run's folder."""

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
        if not config.run.strip():
            raise ValueError("--run '' names no folder: give one, --run runs/NAME")
        folder = _Cli.folder = Path(config.run).expanduser()
        config.run = str(folder)
        last = folder / "checkpoints" / "last.ckpt"
        if config.get("ckpt_path") in ("last", "best"):
            config.ckpt_path = str(last.with_name(f"{config.ckpt_path}.ckpt"))
        if self.subcommand == "fit":
            _check_length(config)
        else:
            config.verbose = False  # we print what was measured
        if config.get("ckpt_path") and not Path(config.ckpt_path).exists():
            raise FileNotFoundError(f"there is no checkpoint {config.ckpt_path}: ls {folder / 'checkpoints'}")
        if self.subcommand == "fit" and not config.trainer.fast_dev_run:
            self._begin(folder, config)

    def _begin(self, folder: Path, config: Namespace) -> None:
        """Take the folder: it holds no run yet, or one that goes on from a checkpoint of its own."""
        checkpoints = folder / "checkpoints"
        own = bool(config.ckpt_path) and checkpoints.resolve() in Path(config.ckpt_path).resolve().parents
        if (checkpoints / "last.ckpt").exists() and not own:
            raise ValueError(
                f"{folder} holds a run already: go on with it by --ckpt_path last, or give another folder, --run NAME"
            )
        if own and (folder / "config.yaml").is_file():
            folders.check_same(folder, yaml.safe_load(_as_yaml(self._parser("fit"), config)))
        self.lock = folders.take(folder)

    def _parse_ckpt_path(self) -> None:
        """Nothing: a model's settings are in the run's configuration, and checkpoints have their own errors."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self.config[self.subcommand]
        _check_monitor(config.monitor, config.mode, self.model)
        given: Mapping[str, Any] = self.config_init[self.subcommand].trainer
        made = trainer_settings(
            config.run, monitor=config.monitor if self.datamodule.parts.val is not None else None, mode=config.mode,
            save_every_n_steps=config.save_every_n_steps, ema=config.ema,
        )  # fmt: skip
        made["callbacks"] += given["callbacks"] or []
        made["logger"] += [given["logger"]] if isinstance(given["logger"], Logger) else given["logger"] or []
        made["logger"] += _logger(config.log, config.run)
        if self.subcommand != "fit" and config.ckpt_path:
            _say_what_is_measured(made["logger"], config.ckpt_path)
        if given["fast_dev_run"]:  # nothing is kept
            made["logger"] = False
            made["callbacks"] = [c for c in made["callbacks"] if not isinstance(c, LearningRateMonitor)]
        return super().instantiate_trainer(**made, **kwargs)


def _say_what_is_measured(loggers: Sequence[Logger], path: str) -> None:
    """Rows of a test stand at the step and the epoch of the weights."""
    checkpoint = read_checkpoint(path)
    for logger in loggers:
        if isinstance(logger, MetricsFile):
            logger.measured = max(0, checkpoint["global_step"] - 1), checkpoint["epoch"]


def _check_monitor(name: str | None, mode: str, model: Classification) -> None:
    if mode not in ("min", "max"):
        raise ValueError(f"--mode {mode}: take min where the smallest is the best, max where the largest is")
    known = ["val/loss", *map(str, model.val_metrics.keys()), "train/loss", "train/accuracy"]
    if name is not None and name not in known:
        raise ValueError(f"--monitor {name} is not measured: take one of {', '.join(known)}")


def _check_length(config: Namespace) -> None:
    """A training must have an end, and a beginning."""
    given = config.trainer
    for name in ("max_epochs", "max_steps", "limit_train_batches"):
        if given.get(name) == 0:
            raise ValueError(f"--trainer.{name} 0 trains nothing: give 1 or more")
    epochs = given.max_epochs
    scheduled = config.model.optimization.schedule != "constant" or not given.max_time
    if epochs is not None and epochs < 0 and given.max_steps in (None, -1) and scheduled:
        raise ValueError(
            f"--trainer.max_epochs {epochs} has no end, which learning rates need: give a number of epochs"
        )


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
    if command != "fit" and not given:
        raise ValueError(f"torchcaps {command} measures a run: torchcaps {command} runs/NAME")
    if command != "fit" and not given[0].startswith("-"):  # test RUN: its own configuration and weights
        folder = Path(given.pop(0))
        folders.read_config(folder)
        given = ["--config", str(folder / "config.yaml"), "--run", str(folder), *given]
        if not any(a.startswith("--ckpt_path") for a in given):
            given += ["--ckpt_path", str(chosen_checkpoint(folder))]
    try:
        cli = _command(command, given)
    except ArgumentError as error:
        raise ValueError(f"{_in_short(str(error))}: torchcaps {command} --help names what there is") from error
    except MisconfigurationException as error:
        raise ValueError(str(error)) from error
    except SystemExit as stop:
        by = SIGTERM if isinstance(stop, SIGTERMException) else SIGINT
        if by == SIGINT and not isinstance(stop.__context__, KeyboardInterrupt):
            raise
        _say_how_to_go_on()
        sys.exit(128 + by)
    config = cli.config[command]
    if not cli.trainer.is_global_zero or config.trainer.fast_dev_run:
        return
    _print_metrics(cli.trainer, "test/" if command == "test" else "val/")
    if command == "fit":
        if not any(Path(config.run, "checkpoints").glob("*.ckpt")):
            raise ValueError(
                f"nothing was trained: {config.ckpt_path} has all {config.trainer.max_epochs} epochs behind it; "
                "give --ckpt_path null, or more epochs"
            )
        print(f"{config.run} holds the run. Next: torchcaps test {config.run}")


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
        save_config_callback=_SaveConfig if command == "fit" else None,
        parser_kwargs={"prog": "torchcaps", "exit_on_error": False, command: {"exit_on_error": False}},
        args=[command, *with_files(given)],
    )


def _in_short(message: str) -> str:
    """The reasons in a message of the parser, which lists every type that it tried."""
    first, *rest = message.splitlines()
    lead = ("Does not validate", "Subtypes", "Errors", "Problem with", "Given value type", "Expected a <class 'None")
    nested = re.compile(r"NestedArg\(key='(.*?)', val='(.*?)'\)")
    reasons = [nested.sub(r"\1 \2", line.strip(" -")) for line in rest]
    kept = [line for line in reasons if line and not line.startswith(lead)]
    return f"{first.removesuffix(':')}: {'; '.join(dict.fromkeys(kept))}" if kept else first


def _say_how_to_go_on() -> None:
    folder = _Cli.folder
    if folder is None or not (folder / "checkpoints" / "last.ckpt").exists():
        print("torchcaps: stopped before the first checkpoint: nothing is kept", file=sys.stderr)
        return
    again = f"torchcaps fit --config {folder / 'config.yaml'} --run {folder} --ckpt_path last"
    print(f"torchcaps: stopped; {folder}/checkpoints/last.ckpt holds what was done. To go on: {again}", file=sys.stderr)


def _print_metrics(trainer: Trainer, prefix: str) -> None:
    found = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith(prefix)}
    for name, value in sorted(found.items()):
        print(f"{name:<28}{value:.4f}")
    if not found and trainer.state.fn == "validate":
        print("these data have no validation part: nothing was measured")
