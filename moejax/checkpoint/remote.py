"""Copies of finished checkpoints at a second place, such as a bucket of an object store.

A run saves to its own directory; process 0 copies finished steps in a separate thread. An object
store cannot rename: the manifest is written last, and a copy without one was never finished. A
start fetches a copy that is newer than the run's own intact checkpoints, and verifies it as it
verifies those. fsspec opens the places: s3://, gs:// and others.

Orbax 0.12.8 cannot write to s3:// itself: its key-value stores know gs:// and files, and it takes
s3:// for a relative path (`tensorstore_utils._build_ocdbt_kvstore_tspec`).
"""

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moejax.checkpoint.manifest import (
    MANIFEST,
    DamagedError,
    find_damage,
    finished_steps,
    is_step,
    read_manifest,
)
from moejax.errors import InputError, without_secrets

THREADS = 8  # files that travel at once
STORES = {"s3", "gs", "az", "abfs"}
MARK = ".orbax-checkpoint-tmp-copy"  # swept as any half-written step
PASSED_OVER = "the run went back to before it"


class Copies:
    """The copies of one run."""

    def __init__(self, place: str, *, keep: int):
        """Opens a place for copies, where the newest `keep` copies stay.

        Raises:
          InputError: if the place is invalid, or cannot be reached.
        """
        self.place, self._keep = place, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copies")
        self._pending: Future[list[int]] | None = None
        try:
            from fsspec.core import url_to_fs

            self._files, root = url_to_fs(place)
            self._root = root.rstrip("/")
            if not self._root:
                raise ValueError("it names no bucket or directory")
            self._make_directory(self._root)
            self._files.pipe_file(f"{self._root}/.writable", b"moejax")
            self._files.rm_file(f"{self._root}/.writable")
        except Exception as error:  # each kind of store has its own
            raise InputError(
                f"`checkpoint.copy_to` cannot be reached. {place}: {type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}. It must be a place that "
                f"fsspec opens (s3:// and gs:// need pip install 'moejax[object-store]'), with "
                f"credentials in the environment. Correct it, or leave it out."
            ) from error

    def _make_directory(self, path: str) -> None:
        """Makes a directory, but not in an object store, where it would make a bucket."""
        protocol = self._files.protocol  # one name or several
        if not STORES & ({protocol} if isinstance(protocol, str) else set(protocol)):
            self._files.makedirs(path, exist_ok=True)

    def steps(self) -> list[int]:
        """Returns the steps that have a finished copy, newest first."""
        self._files.invalidate_cache()
        found = (Path(name).parent.name for name in self._files.glob(f"{self._root}/*/{MANIFEST}"))
        return sorted((int(name) for name in found if is_step(name)), reverse=True)

    def start(self, directory: Path) -> None:
        """Starts to copy the finished steps that have no copy, unless copying is under way."""
        if self._pending is None:
            self._pending = self._thread.submit(self.copy_missing, directory)

    def finished(
        self, on_event: Callable[[list[int], str | None], None], *, wait: bool = False
    ) -> None:
        """Reports ended copying: the steps, or the error. Failed copies are tried again later."""
        if self._pending is None or not (wait or self._pending.done()):
            return
        done, self._pending = self._pending, None
        try:
            on_event(done.result(), None)
        except Exception as error:  # each kind of store has its own
            on_event([], without_secrets(f"{type(error).__name__}: {error}").splitlines()[0])

    def close(self, directory: Path, on_event: Callable[[list[int], str | None], None]) -> None:
        """Copies the steps that have no copy, and waits for them."""
        self.finished(on_event, wait=True)
        self.start(directory)
        self.finished(on_event, wait=True)
        self._thread.shutdown()

    def copy_missing(self, directory: Path) -> list[int]:
        """Copies finished steps, newest first, and removes old copies. Returns the copied steps.

        A step that a run repeated is copied again.
        """
        there, copied = set(self.steps()), []
        for step in sorted(finished_steps(directory), reverse=True):
            own = (directory / str(step) / MANIFEST).read_bytes()
            if step in there:
                if self._files.cat_file(f"{self._root}/{step}/{MANIFEST}") == own:
                    continue
                self._remove(step)
            self._copy(directory / str(step), own)
            copied.append(step)
        for step in self.steps()[self._keep :]:
            self._remove(step)
        return copied

    def _copy(self, step: Path, own: bytes) -> None:
        manifest = read_manifest(step)

        def send(name: str) -> None:
            there = f"{self._root}/{step.name}/{name}"
            self._files.put_file(str(step / name), there)
            size, expected = self._files.info(there)["size"], manifest["files"][name]["bytes"]
            if size != expected:
                raise OSError(f"{self.place}/{step.name}/{name} has {size} bytes, not {expected}")

        for parent in sorted({Path(name).parent.as_posix() for name in manifest["files"]}):
            self._make_directory(f"{self._root}/{step.name}/{parent}")
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(send, manifest["files"]))
        self._files.pipe_file(f"{self._root}/{step.name}/{MANIFEST}", own)

    def _remove(self, step: int) -> None:
        # The manifest first: a half-removed copy must not count as finished.
        self._files.rm_file(f"{self._root}/{step}/{MANIFEST}")
        self._files.rm(f"{self._root}/{step}", recursive=True)

    def fetch_newer(
        self,
        directory: Path,
        than: int | None,
        passed_over: Callable[[dict[str, Any]], bool] = lambda _: False,
    ) -> list[str]:
        """Fetches the newest whole copy of a step after `than`. Returns notes.

        It is verified in full before it gets its name. A damaged copy stays where it is.

        Args:
          passed_over: tells from a manifest whether the run has gone back to before its step.
        Raises:
          InputError: if a copy cannot be read; or if `than` is None and all copies are damaged: a
            run never begins anew silently.
        """
        notes: list[str] = []
        for step in self.steps():
            if than is not None and step <= than:
                return notes
            try:
                damage = self._fetch(step, directory, passed_over)
            except OSError as error:
                raise InputError(
                    f"checkpoint {step} cannot be fetched. {self.place}: {error}. A run goes on "
                    f"from the newest one. Try again, or leave out `checkpoint.copy_to`."
                ) from error
            if damage is None:
                return [*notes, f"checkpoint {step} fetched from {self.place}"]
            if damage == PASSED_OVER:
                continue
            notes.append(f"copy {self.place}/{step} is damaged: {damage}")
        if notes and than is None:
            raise InputError(
                f"no whole copy in {self.place}. Found {'; '.join(notes)}. A run never restarts "
                f"silently from nothing. Remove them there, or leave out `checkpoint.copy_to`."
            )
        return notes

    def _fetch(
        self, step: int, directory: Path, passed_over: Callable[[dict[str, Any]], bool]
    ) -> str | None:
        """Fetches a copy. Returns its damage, if any, or that it is passed over."""
        beside, final = directory / f"{step}{MARK}", directory / str(step)
        shutil.rmtree(beside, ignore_errors=True)
        held = beside / str(step)  # a manifest is of the step that its directory is named for
        held.mkdir(parents=True)
        there = f"{self._root}/{step}"

        def get(name: str) -> None:
            (held / name).parent.mkdir(parents=True, exist_ok=True)
            self._files.get_file(f"{there}/{name}", str(held / name))

        try:
            get(MANIFEST)
            manifest = read_manifest(held)
            if passed_over(manifest):
                return PASSED_OVER
            names = [name for name in manifest["files"] if self._files.exists(f"{there}/{name}")]
            if any(not (held / name).resolve().is_relative_to(held.resolve()) for name in names):
                return "manifest lists files outside the step"
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(get, names))
            damage = find_damage(held, manifest, "full")
            if damage is None:
                shutil.rmtree(final, ignore_errors=True)
                held.rename(final)
            return damage
        except DamagedError as error:
            return str(error)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
