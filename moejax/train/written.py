"""Makes a checkpoint of arrays that an import has written already: Orbax only moves them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import future

from moejax.runtime.processes import Processes
from moejax.train.commit import check_written
from moejax.train.manifest import write_manifest
from moejax.train.stored import NewArray, store_of


def save_written(
    step: Path,
    items: Mapping[str, Sequence[NewArray]],
    stores: Path,
    facts: dict[str, Any],
    processes: Processes,
) -> None:
    """Makes a checkpoint of arrays that are written already. All processes call it.

    Args:
      step: its directory, named by the step's number; made here.
      items: arrays by item.
      stores: what `PieceWriter` wrote of them, in a directory for each item and in it one for each
        process (`store_of`). It moves into the checkpoint.
      facts: entries of the manifest.
    Raises:
      RunError: in process 0, if not all of them are there then.
    """
    handlers, args = {}, {}
    for name, arrays in items.items():
        moved = _Written(store_of(stores / name, processes.index))
        # Orbax asks the registry for JAX's arrays too, though there are none.
        registry = ocp.type_handlers.create_type_handler_registry(
            (jax.Array, ocp.type_handlers.ArrayHandler()), (NewArray, moved)
        )
        handlers[name] = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
        args[name] = ocp.args.PyTreeSave({array.key: array for array in arrays})
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers)) as writer:
        writer.save(step.absolute(), args=ocp.args.Composite(**args))
    if processes.first:
        every = ((name, array) for name, arrays in items.items() for array in arrays)
        check_written(step, {f"{name}/{array.key}": array.shape for name, array in every})
        write_manifest(step, {"step": int(step.name), **facts})


class _Written(ocp.type_handlers.TypeHandler):
    """Lets Orbax take arrays that are written already for its own."""

    def __init__(self, store: Path):
        self._store = store

    def typestr(self) -> str:
        """The type as which a restore reads them."""
        return "jax.Array"

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        """Moves what this process wrote of an item to where Orbax merges it."""

        async def move() -> None:
            for info in infos:
                await info.await_path_creation()
            if self._store.is_dir():
                self._store.rename(infos[0].parent_dir / self._store.name)

        return [future.CommitFutureAwaitingContractedSignals(move())]

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        """Is never asked for: a restore uses Orbax's own handlers."""
        raise NotImplementedError

    async def metadata(self, infos: Any) -> Any:
        """Is never asked for, as `deserialize`."""
        raise NotImplementedError
