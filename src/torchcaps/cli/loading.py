"""The model of a run: what `predict` and `export` begin with."""

from pathlib import Path

from torchcaps.run.build import build
from torchcaps.training import LoadedModel, load_checkpoint

__all__ = ["load"]


def load(run: str) -> LoadedModel:
    """The model of a run's folder (its best checkpoint, or its last where none was chosen), or of a checkpoint file."""
    path = Path(run)
    if path.is_dir():
        folder = path / "checkpoints"
        found = [folder / name for name in ("best.ckpt", "last.ckpt") if (folder / name).exists()]
        if not found:
            raise FileNotFoundError(
                f"{path} holds no checkpoints/best.ckpt or last.ckpt: give a run's folder, or a file"
            )
        path = found[0]
    return load_checkpoint(path, build)
