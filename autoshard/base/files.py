"""Files that commands write: whole, or not at all."""
from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from autoshard.errors import UsageError


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises UsageError when `path` could not be written later; leaves nothing behind."""
    path = Path(path)
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder; give the name of a file")
    if _is_device(path):
        return
    handle, tmp = _beside(path)
    os.close(handle)
    os.unlink(tmp)


def check_outputs(outputs: Mapping[str, str | os.PathLike[str] | None], inputs: Iterable[str | os.PathLike[str] | None] = ()) -> None:
    """`check_writable` for the files that the options of a command name. Raises UsageError also where one would be written over another, or over
    one of the `inputs`, which are read."""
    taken = {Path(path).resolve(): "a file that this command reads" for path in inputs if path and Path(path).is_file()}
    for option, given in outputs.items():
        if given is None:
            continue
        check_writable(given)
        path = Path(given).resolve()
        if path in taken and not _is_device(path):
            raise UsageError(f"{option} {given} would be written over {taken[path]}; give another file")
        taken[path] = f"the file of {option}"


def check_folder(path: str | os.PathLike[str]) -> None:
    """Make the folder where it is missing. Raises UsageError when files could not be written into it."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"cannot make folder {path}: {e.strerror or e}; choose another") from None
    check_writable(Path(path) / "plan.json")


def _is_device(path: Path) -> bool:
    """Whether it is a pipe or a device (/dev/stdout, /dev/null), which a file must not be put in place of."""
    return path.exists() and not (path.is_file() or path.is_dir())


def _beside(path: Path) -> tuple[int, str]:
    """A new file in the folder of what `path` leads to. Raises UsageError naming `path`."""
    target = path.resolve()  # a link stays a link
    try:
        return tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as e:
        raise UsageError(f"cannot write {path}: {e.strerror or e}; choose another folder") from None


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write a whole file or nothing; into a pipe or a device as it comes. Raises UsageError naming the path."""
    path = Path(path)
    if _is_device(path):
        try:
            path.write_text(text)
        except OSError as e:
            raise UsageError(f"cannot write {path}: {e.strerror or e}; choose another file") from None
        return
    handle, tmp = _beside(path)
    try:
        with os.fdopen(handle, "w") as f:
            f.write(text)
        os.chmod(tmp, 0o644)
        os.replace(tmp, path.resolve())
    except OSError as e:
        os.unlink(tmp)
        raise UsageError(f"cannot write {path}: {e.strerror or e}; choose another file") from None
