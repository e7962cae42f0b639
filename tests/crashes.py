"""A pytest plugin: a test that ends its worker, as one that hangs does, fails once and by name.

pytest-xdist (3.8) would begin it again in the next worker, which it ends too, and give up in the
end without the tests that stand behind it.
"""

import pytest

try:
    from xdist.scheduler import LoadFileScheduling
except ImportError:  # in an environment without it, where nothing is spread
    LoadFileScheduling = object


class Scheduling(LoadFileScheduling):
    """A file stays with one worker."""

    def remove_node(self, node):
        """Returns the test during which a worker ended, and has the others do the rest."""
        units = self.assigned_work.pop(node)
        left = [(unit, name) for unit in units.values() for name, done in unit.items() if not done]
        if not left:
            return None
        unit, ended_by = left[0]
        unit[ended_by] = True
        self.workqueue.update({file: u for file, u in units.items() if not all(u.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return ended_by


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Takes the place of `--dist loadfile`."""
    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None
