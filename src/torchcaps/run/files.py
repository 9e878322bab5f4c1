"""Files that are whole or not there, and a look beforehand at whether they can be written at all."""

import os
import tempfile
from pathlib import Path

__all__ = ["check_place", "write_whole"]


def check_place(path: Path, *, folder: bool = False) -> None:
    """ValueError where no file, or no folder, can be written under this name. Nothing is left behind."""
    if path.exists() and path.is_dir() != folder:
        held, wanted = ("a file", "a folder") if folder else ("a folder", "a file")
        raise ValueError(f"{path} is {held}: give the name of {wanted}")
    if _is_device(path):
        return
    place = path if folder else path.parent
    while not place.exists():
        place = place.parent
    try:
        if path.is_file() and not os.access(path, os.W_OK):
            raise PermissionError(0, "it may not be changed")
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}): give another place") from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, text as UTF-8, that is whole or not there, or as it was before. OSError names it."""
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    try:
        if _is_device(path):  # such as /dev/stdout: nothing may be put in its place
            path.write_bytes(data)
            return
        path = path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        try:
            with open(part, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror}): make room, or give another place") from error


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()
