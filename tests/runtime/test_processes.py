import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax._src.lib import _jax

import moejax.runtime.processes as processes_module
from moejax.config.schema import MeshConfig
from moejax.errors import DivergedError, InputError, StorageFullError
from moejax.runtime.processes import ALONE, Processes, Rank, Stop, find_rank
from moejax.runtime.start import simulated_here
from tests.threads import Service, everywhere


def test_values_are_gathered_in_order_as_often_as_asked():
    def run(processes):
        return [processes.gather({"from": processes.index, "round": n}) for n in range(3)]

    wanted = [[{"from": i, "round": n} for i in range(3)] for n in range(3)]
    assert everywhere(3, run) == [wanted] * 3


def test_hosts_of_one_name_are_told_apart_by_their_boots(monkeypatch):
    names, boots, own = ["a", "b", "a", "a"], ["x", "y", "z", "x"], threading.local()
    monkeypatch.setattr(socket, "gethostname", lambda: names[own.index])
    monkeypatch.setattr(processes_module, "boot_id", lambda: boots[own.index])

    def run(processes):
        own.index = processes.index
        return processes.hosts()

    assert everywhere(4, run) == [["a (1)", "b", "a (2)", "a (1)"]] * 4
    own.index = 0
    assert ALONE.hosts() == ["a"]


def test_what_process_0_makes_reaches_all_and_only_it_makes_it():
    made = []

    def run(processes):
        return processes.from_first(lambda: made.append(processes.index) or {"step": 7})

    assert everywhere(3, run) == [{"step": 7}] * 3
    assert made == [0]


@pytest.fixture
def clients():
    """Three clients of JAX's own service, in this process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    service = _jax.get_distributed_runtime_service(address, 3)
    found = [_jax.get_distributed_runtime_client(address, index) for index in range(3)]
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda client: client.connect(), found))
        yield found
        list(threads.map(lambda client: client.shutdown(), found))
    service.shutdown()


def test_what_was_gathered_is_removed_from_jaxs_service_once_all_have_read_it(clients):
    def kept():
        return len(clients[0].key_value_dir_get("moejax"))

    def run(index):
        processes, most = Processes(index, 3, clients[index]), 0
        for number in range(100):
            assert processes.gather([index, number]) == [[n, number] for n in range(3)]
            most = max(most, kept())
        return most

    with ThreadPoolExecutor(3) as threads:
        most = max(threads.map(run, range(3)))
    assert most <= 3 * 3, "two rounds, and one that has begun"
    assert kept() == 3, "the last one: nobody knows yet that all have read it"


@pytest.mark.parametrize("culprit", [0, 2])
def test_bad_input_of_one_is_refused_by_all(culprit):
    def make(index):
        if index == culprit:
            raise InputError(f"no file in process {index}")
        return index

    found = everywhere(3, lambda processes: processes.together(lambda: make(processes.index)))
    assert [str(error) for error in found] == [f"no file in process {culprit}"] * 3


class Slow:
    """A jitted function that takes this process long to compile."""

    def __init__(self, index, done):
        self.index, self.done = index, done

    def lower(self, *arguments):
        assert arguments == ("x", "y")
        return self

    def compile(self):
        time.sleep(0.2 * self.index)
        self.done.append(self.index)


def test_nobody_goes_on_before_all_have_compiled():
    done = []

    def run(processes):
        processes.compile(Slow(processes.index, done), "x", "y")
        return len(done)

    assert everywhere(3, run) == [3] * 3


def test_one_process_asks_nobody():
    assert ALONE.gather(4) == [4]
    assert ALONE.from_first(lambda: 5) == 5
    assert Stop(ALONE).after(3, True)
    assert not Stop(ALONE).after(3, False)


@given(st.data())
def test_all_stop_after_the_same_step_whoever_is_asked_and_whenever(data):
    count, last = data.draw(st.integers(2, 4)), 30
    service = Service()
    stops = [Stop(Processes(index, count, service)) for index in range(count)]
    asked = data.draw(st.dictionaries(st.integers(0, count - 1), st.integers(1, 20), min_size=1))
    started, seen = [0] * count, [0] * count  # newest step under way, and asked about
    stopped = {}

    def movable():
        """Whoever has no step to start may look only when the step before is finished by all."""
        for i in range(count):
            ready = started[i] == seen[i] or min(started) >= started[i] - 1
            if i not in stopped and seen[i] < last and ready:
                yield i

    while moves := list(movable()):
        i = data.draw(st.sampled_from(moves))
        if started[i] == seen[i]:
            started[i] += 1
            continue
        seen[i] = started[i]
        if stops[i].after(seen[i], i in asked and seen[i] >= asked[i]):
            stopped[i] = seen[i]
    assert len(stopped) == count
    assert len(set(stopped.values())) == 1


GLOO = jax.errors.JaxRuntimeError(
    "UNKNOWN: Gloo all-reduce failed: [external/gloo/transport/tcp/pair.cc:538] Read error "
    "[127.0.0.1]:4304: Connection reset by peer"
)


@pytest.mark.parametrize(
    ("error", "codes"),
    [
        (StorageFullError("full"), [5]),  # of one: the others wait for it
        (KeyboardInterrupt(), [130]),
        (DivergedError("NaN"), []),  # of all, as bad input is
        (InputError("bad"), []),
        (GLOO, [1]),  # it lost another one, whatever it waited for
    ],
)
def test_who_ends_alone_ends_at_once_with_its_code_and_one_line(monkeypatch, capsys, error, codes):
    left = []
    monkeypatch.setattr("os._exit", left.append)
    with pytest.raises(type(error)), Processes(0, 2):
        raise error
    said = capsys.readouterr().err
    assert left == codes
    assert len(said.splitlines()) == len(codes)
    assert str(error) in said or not codes or isinstance(error, KeyboardInterrupt)


def test_another_error_shows_where_it_came_from(monkeypatch, capsys):
    monkeypatch.setattr("os._exit", lambda code: None)
    with pytest.raises(ValueError, match="wrong"), Processes(0, 2):
        raise ValueError("wrong")
    assert "Traceback" in capsys.readouterr().err


def test_a_loop_does_not_find_the_notes_of_the_one_before():
    service = Service()
    both = [Processes(index, 2, service) for index in range(2)]
    first = [Stop(processes) for processes in both]
    assert not first[1].after(4, True)
    assert not first[0].after(5, False)  # names step 7, but the loop ends at step 5
    second = [Stop(processes) for processes in both]
    assert not any(stop.after(step, False) for step in (6, 7, 8) for stop in reversed(second))


def test_a_place_is_read_from_the_environment(monkeypatch):
    monkeypatch.delenv("MOEJAX_COORDINATOR", raising=False)
    assert find_rank() == Rank(None, 1, 0)
    monkeypatch.setenv("MOEJAX_COORDINATOR", "10.0.0.1:29400")
    monkeypatch.setenv("MOEJAX_PROCESSES", "4")
    monkeypatch.setenv("MOEJAX_PROCESS", "3")
    assert find_rank() == Rank("10.0.0.1:29400", 4, 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MOEJAX_PROCESS", "2"),
        ("MOEJAX_PROCESS", "one"),
        ("MOEJAX_PROCESSES", None),
        ("MOEJAX_COORDINATOR", None),
        ("MOEJAX_COORDINATOR", "host"),
    ],
)
def test_half_a_place_is_refused_with_what_was_seen(monkeypatch, name, value):
    in_program(monkeypatch, processes=2)
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=f"{name} is {value or 'not set'}"):
        find_rank()


# What launchers set in each process: srun, Open MPI, MPICH's and Intel's mpiexec (Hydra), MVAPICH,
# Flux, jsrun and torchrun.
LAUNCHERS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    ("WORLD_SIZE", "RANK"),
)


@pytest.mark.parametrize(
    ("beside", "number", "said"),
    [("4", "1", "4 or more"), ("1", "1", "2 or more"), ("2", "0", "2 or more")],
)
def test_tasks_of_pals_that_do_not_know_each_other_are_refused(monkeypatch, beside, number, said):
    """It says how many are on one host, and a number in the whole program."""
    monkeypatch.setenv("PALS_LOCAL_SIZE", beside)
    monkeypatch.setenv("PALS_RANKID", number)
    with pytest.raises(InputError, match=f"each of {said} processes would run alone"):
        find_rank()
    monkeypatch.setenv("PALS_RANKID", "0")
    monkeypatch.setenv("PALS_LOCAL_SIZE", "1")
    assert find_rank() == Rank(None, 1, 0)
    in_program(monkeypatch, processes=2)
    monkeypatch.setenv("PALS_LOCAL_SIZE", beside)
    assert find_rank() == Rank("127.0.0.1:1", 2, 0)


@pytest.mark.parametrize(("count", "number"), LAUNCHERS)
def test_tasks_that_do_not_know_each_other_or_have_other_places_are_refused(
    monkeypatch, count, number
):
    def given(tasks, task):
        monkeypatch.setenv(count, tasks)
        monkeypatch.setenv(number, task)

    given("4", "1")
    with pytest.raises(InputError, match="each of 4 processes would run alone"):
        find_rank()
    given("1", "1")  # a task of its own
    assert find_rank() == Rank(None, 1, 0)
    in_program(monkeypatch, processes=2)
    given("1", "0")  # launch/local within one task
    assert find_rank().count == 2
    for tasks, task in (("4", "0"), ("2", "1")):
        given(tasks, task)
        places = f"{count} is {tasks}, {number} is {task}"
        with pytest.raises(InputError, match=f"PROCESSES is 2, MOEJAX_PROCESS is 0, {places}"):
            find_rank()
    given("2", "0")
    assert find_rank() == Rank("127.0.0.1:1", 2, 0)


def test_another_coordinator_for_jax_is_a_clash(monkeypatch):
    in_program(monkeypatch, processes=2)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1")
    assert find_rank().count == 2
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.0.0.9:1")
    with pytest.raises(InputError, match=r"two coordinators.*is 10\.0\.0\.9:1"):
        find_rank()


def in_program(monkeypatch, processes):
    monkeypatch.setenv("MOEJAX_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setenv("MOEJAX_PROCESSES", str(processes))
    monkeypatch.setenv("MOEJAX_PROCESS", "0")


def test_processes_share_the_simulated_devices(monkeypatch):
    assert simulated_here(MeshConfig(simulated_devices=8)) == 8
    in_program(monkeypatch, processes=2)
    assert simulated_here(MeshConfig(simulated_devices=8)) == 4
    assert simulated_here(MeshConfig()) is None
    with pytest.raises(InputError, match=r"2 processes cannot share 7 .*simulated_devices=8"):
        simulated_here(MeshConfig(simulated_devices=7))
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")
    assert simulated_here(MeshConfig(simulated_devices=8)) == 4
    with pytest.raises(InputError, match=r"2 processes of 4 devices.*simulated_devices is 4"):
        simulated_here(MeshConfig(simulated_devices=4))


def test_who_is_asked_to_stop_says_so_once():
    service, said = Service(), []
    stop = Stop(Processes(1, 2, service))
    publish = stop._processes.publish

    def told(name, text):
        said.append(name)
        publish(name, text)

    stop._processes.publish = told
    assert [stop.after(step, step > 4) for step in range(1, 9)] == [False] * 8
    assert said == [f"{stop._folder}/asked"]
