"""A cache of compiled kernels in the data folder, with checksums.

Triton stores each compiled kernel in a folder of its own. The folder's name is a hash of the
source, the options, the device and Triton's version. Triton does not check the files in such a
folder. So this module keeps a manifest of checksums beside the folders. Before workers start, every
folder that is missing from the manifest or differs from it is removed, and its kernel is compiled
again. A folder is complete once it has Triton's group file, which lists the other files and is
written last.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import structlog

from tailrace.ledger.errors import CallerError, ConfigError
from tailrace.ledger.process.durable_file import locked, replace_file

FOLDER = "kernels"
"""Name of the cache's folder in the data folder; the cache has a folder for each fingerprint."""
MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
VARIABLE = "TRITON_CACHE_DIR"
GROUP = "__grp__"
"""Prefix of the names of group files, by which Triton finds the files of a kernel."""
FINGERPRINT_CHARS = 16
MAX_MEMBER_BYTES = 1 << 30

Groups = dict[str, dict[str, list[Any]]]
"""The files of each compiled kernel: folder name -> file name -> [bytes, SHA-256 in hex]."""

log = structlog.get_logger("kernels")


def fingerprint() -> str:
    """Return a hash of the software that compiled kernels depend on.

    Kernels that were compiled on another machine are valid here if the fingerprint is equal. The
    fingerprint covers the kernels' source, the versions of torch, Triton and Python, and the
    platform.
    """
    from tailrace import kernels

    digest = hashlib.sha256()
    root = Path(kernels.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    for package in ("triton", "torch"):
        try:
            digest.update(f"{package} {version(package)}\n".encode())
        except PackageNotFoundError:
            digest.update(f"no {package}\n".encode())
    digest.update(f"{sys.version_info[:2]} {sys.platform}".encode())
    return digest.hexdigest()[:FINGERPRINT_CHARS]


def offer(data: Path) -> None:
    """Let workers that start from now on use the cache of this data folder.

    The function checks the cache and sets TRITON_CACHE_DIR, which workers inherit. It does nothing
    if the environment sets the variable already.
    """
    if VARIABLE in os.environ or find_spec("triton") is None:
        return
    cache = KernelCache(data)
    try:
        cache.restore()
    except OSError as error:
        log.error("kernels.not_kept", error=str(error))
        return
    os.environ[VARIABLE] = str(cache.folder)


def keep_compiled(data: Path) -> None:
    """Add the kernels that this process has compiled to the manifest of the cache in `data`.

    Nothing happens if the process uses another cache.
    """
    folder = data.resolve() / FOLDER
    if Path(os.environ.get(VARIABLE, "")).parent == folder:
        with suppress(OSError):  # kernels that are not kept are compiled again
            KernelCache(data).keep()


class KernelCache:
    """The cache of one data folder, for the code whose fingerprint is `mark`.

    The default of `mark` is the fingerprint of the running code.
    """

    def __init__(self, data: Path, mark: str | None = None) -> None:
        self.mark = mark or fingerprint()
        self.folder = data.resolve() / FOLDER / self.mark

    def restore(self) -> int:
        """Remove damaged and unfinished kernels, and return the number of good ones.

        It must be called before any worker starts.
        """
        if not self.folder.is_dir():
            return 0
        known = self._known()
        kept: Groups = {}
        for path in sorted(one for one in self.folder.iterdir() if one.is_dir()):
            if path.name in known and _files(path) == known[path.name]:
                kept[path.name] = known[path.name]
                continue
            why = "its checksum differs" if path.name in known else "it is unfinished"
            log.warning("kernels.removed", kernel=path.name, reason=why)
            shutil.rmtree(path)
        if known != kept:
            self._write(kept)
        log.info("kernels.restored", kernels=len(kept), folder=str(self.folder))
        return len(kept)

    def keep(self) -> int:
        """Add new kernels to the manifest, and return their number."""
        if not self.folder.is_dir():
            return 0
        with locked(self.folder / MANIFEST):  # several workers may update the manifest at once
            known = self._known()
            new = {
                path.name: _files(path)
                for path in sorted(self.folder.iterdir())
                if path.is_dir() and path.name not in known and _is_whole(path)
            }
            if new:
                self._write(known | new)
        return len(new)

    def export(self, to: Path, progress: Callable[[int], None] = lambda done: None) -> int:
        """Write all complete kernels to the file `to`, and return their number.

        Raises:
            ConfigError: There are no kernels, or the file cannot be written.
        """
        import zstandard

        self.keep()
        known = self._known()
        if not known:
            raise ConfigError(
                f"no compiled kernel of this version is in {self.folder.parent}",
                hint="start an origin with a GPU on this data folder: its workers compile them",
            )
        new = to.with_name(to.name + ".new")
        try:
            with (
                new.open("wb") as file,
                zstandard.ZstdCompressor().stream_writer(file) as packed,
                tarfile.open(fileobj=packed, mode="w|") as archive,
            ):
                manifest = self._manifest(known)
                head = tarfile.TarInfo(MANIFEST)
                head.size = len(manifest)
                archive.addfile(head, io.BytesIO(manifest))
                for done, (group, name) in enumerate(_names(known), 1):
                    archive.add(self.folder / group / name, f"{group}/{name}", recursive=False)
                    progress(done)
            os.replace(new, to)
        except OSError as error:
            new.unlink(missing_ok=True)
            raise ConfigError(f"cannot be written: {error.strerror}", field=str(to)) from error
        return len(known)

    def take_in(self, path: Path, progress: Callable[[int], None] = lambda done: None) -> int:
        """Add the kernels in a file that `export` has written, and return how many were new.

        Raises:
            CallerError: The file is damaged or of another version; nothing was added.
        """
        import zstandard

        taken: dict[str, dict[str, bytes]] = {}
        try:
            with (
                path.open("rb") as file,
                zstandard.ZstdDecompressor().stream_reader(file) as packed,
                tarfile.open(fileobj=packed, mode="r|") as archive,
            ):
                groups: Groups | None = None
                for done, member in enumerate(archive):
                    data = _member(archive, member)
                    if groups is None:
                        groups = self._accepted(path, json.loads(data))
                        continue
                    group, _, name = member.name.partition("/")
                    if groups.get(group, {}).get(name) != [len(data), _sha256(data)]:
                        raise ValueError(f"{member.name} differs from the manifest")
                    taken.setdefault(group, {})[name] = data
                    progress(done)
        except OSError as error:
            raise CallerError(f"cannot be read: {error.strerror}", field=str(path)) from error
        except (ValueError, KeyError, TypeError, tarfile.TarError, zstandard.ZstdError) as error:
            raise CallerError(f"is damaged: {error}", field=str(path)) from error
        if groups is None or any(taken.get(one, {}).keys() != groups[one].keys() for one in groups):
            raise CallerError("is damaged: it is truncated", field=str(path))
        self.keep()
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / MANIFEST):
            known = self._known()
            new = {one: files for one, files in taken.items() if one not in known}
            here = {group: self._put(group, files) for group, files in new.items()}
            self._write(known | here)
        return len(new)

    def _put(self, group: str, files: dict[str, bytes]) -> dict[str, list[Any]]:
        folder = self.folder / group
        shutil.rmtree(folder, ignore_errors=True)  # leftover of an unfinished compilation
        folder.mkdir(parents=True)
        for name, data in files.items():
            moved = _moved(data, folder) if name.startswith(GROUP) else data
            (folder / name).write_bytes(moved)
        return _files(folder)

    def _accepted(self, path: Path, manifest: dict[str, Any]) -> Groups:
        if manifest["version"] != MANIFEST_VERSION or manifest["fingerprint"] != self.mark:
            raise CallerError(
                f"was exported by another version: format {manifest['version']}, fingerprint"
                f" {manifest['fingerprint']}; this one needs {MANIFEST_VERSION}, {self.mark}",
                field=str(path),
                hint="use the same Tailrace, torch, Triton and Python on both machines",
            )
        groups: Groups = manifest["groups"]
        for group, name in _names(groups):
            if {group, name} & {"", ".", ".."} or "/" in group + name or "\\" in group + name:
                raise ValueError(f"{group}/{name} is not a valid file name of a kernel")
        return groups

    def _known(self) -> Groups:
        try:
            found = json.loads((self.folder / MANIFEST).read_text("utf-8"))
            if found["version"] == MANIFEST_VERSION and found["fingerprint"] == self.mark:
                groups: Groups = found["groups"]
                return groups
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("kernels.manifest_unreadable", error=str(error))
        return {}

    def _manifest(self, groups: Groups) -> bytes:
        head = {"version": MANIFEST_VERSION, "fingerprint": self.mark}
        return json.dumps(head | {"groups": groups}).encode()

    def _write(self, groups: Groups) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / MANIFEST, self._manifest(groups))


def _files(folder: Path) -> dict[str, list[Any]]:
    """Return size and SHA-256 of each file of a kernel, except unfinished ones (`tmp.…`)."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith("tmp."):
            data = path.read_bytes()
            found[path.name] = [len(data), _sha256(data)]
    return found


def _is_whole(folder: Path) -> bool:
    """Return True if a kernel is complete: it has its group files and all files that they list.

    Triton's launcher modules have no group file; such a module is complete if it has a `.so` file.
    """
    groups = [path for path in folder.iterdir() if path.name.startswith(GROUP)]
    for path in groups:
        try:
            names = json.loads(path.read_text("utf-8"))["child_paths"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        if not all((folder / name).is_file() for name in names):
            return False
    return bool(groups) or any(path.suffix == ".so" for path in folder.iterdir())


def _moved(group: bytes, folder: Path) -> bytes:
    """Return the contents of a group file with its absolute paths moved into `folder`."""
    document = json.loads(group)
    document["child_paths"] = {
        name: str(folder / Path(name).name) for name in document["child_paths"]
    }
    return json.dumps(document).encode()


def _names(groups: Groups) -> Iterator[tuple[str, str]]:
    return ((group, name) for group, files in groups.items() for name in files)


def _member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member) if member.isreg() else None
    if file is None or member.size > MAX_MEMBER_BYTES:
        raise ValueError(f"{member.name} is not a regular file, or is larger than 1 GiB")
    return file.read()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
