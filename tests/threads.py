"""Processes that are threads, and JAX's coordination service as a dictionary."""

import threading
from concurrent.futures import ThreadPoolExecutor

from moejax.errors import InputError
from moejax.runtime.processes import Processes


class Service:
    """The calls of JAX's client that are used, with its error for what does not come in time."""

    def __init__(self):
        self.kept, self.changed = {}, threading.Condition()

    def key_value_set(self, name, value, allow_overwrite=False):
        with self.changed:
            assert allow_overwrite or name not in self.kept, f"{name} was written twice"
            self.kept[name] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, name, milliseconds):
        with self.changed:
            if self.changed.wait_for(lambda: name in self.kept, milliseconds / 1000):
                return self.kept[name]
        raise RuntimeError("DEADLINE_EXCEEDED: not there")

    def key_value_delete(self, name):
        with self.changed:
            del self.kept[name]

    def key_value_dir_get(self, folder):
        return [(name, kept) for name, kept in self.kept.items() if name.startswith(f"{folder}/")]


def everywhere(count, run):
    """Calls run(processes) in `count` threads. Returns their results or errors."""
    service = Service()

    def process(index):
        try:
            return run(Processes(index, count, service))
        except InputError as error:
            return error

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(process, range(count)))
