"""What every test runs under: eight simulated CPU devices, checked annotations, fixed examples."""

import hashlib
import os
import platform
from pathlib import Path

# JAX reads these when it is first imported, so they stand before every other import. Setting
# JAX_PLATFORMS outside is how the `accelerator` tests reach real hardware.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# What tests compile is run once, so they ask LLVM for little: four times faster to compile. Workers
# already fill the cores, so a program is not cut for several threads.
_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    "--xla_backend_optimization_level": "0",
    "--xla_cpu_parallel_codegen_split_count": "1",
}
os.environ.setdefault("PJRT_NPROC", "32")  # threads for eight devices: `runtime.start._simulate`
_given = os.environ.get("XLA_FLAGS", "")
_added = [f"{flag}={value}" for flag, value in _FLAGS.items() if flag not in _given]
os.environ["XLA_FLAGS"] = " ".join([_given, *_added]).strip()


def _kind_of_processor() -> str:
    """What compiled programs depend on: a processor with other instructions cannot run them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.machine(), platform.processor()]
    kept = {line for line in lines if line.startswith(("model name", "flags", "CPU", "Features"))}
    return hashlib.sha256("\n".join(sorted(kept or lines)).encode()).hexdigest()[:16]


# Programs that any worker, child or earlier run has compiled are read, not compiled again: the key
# of each holds the program, the flags and the versions. Without place names of the source, though:
# who reads the compiler's text asks for `compiled_anew`.
CACHES = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moejax-tests"
CACHE = CACHES / _kind_of_processor()
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
# Under `make test ARGS=...` these would reach every `make` that a test runs.
for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "ARGS"):
    os.environ.pop(name, None)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# More is cut to half of it, least recently used first, when a run begins. JAX's own bound would
# look at every entry whenever one is added.
CACHE_BYTES = 2 * 1024**3

import beartype
import hypothesis
import jaxtyping
import pytest

from tests.annotations import without_annotations

pytest_plugins = ["tests.crashes"]

# Every annotated function of the package checks its arguments and results, shapes included. As in
# Python's own typing rules, an int may stand where a float is asked for.
check_types = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
jaxtyping.install_import_hook("moejax", f"{__name__}.check_types")

# No deadline, because a first call compiles; the same examples on every machine.
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True)
hypothesis.settings.load_profile("fixed")

# Of 65,530 mappings of memory that Linux allows a process, each compiled program takes some; a
# compiler that gets no more ends the process.
MANY_MAPPINGS = 25_000


# JAX writes entries in place: one that another process has not finished, or that a killed one never
# did, is compiled again. Neither is an error of a test.
UNREADABLE = "Error (reading|writing) persistent compilation cache entry"
# Orbax forgets the rest of a save that fails, in tests whose disk is full: Python says so whenever
# it next looks for garbage, which can be in any test.
FORGOTTEN = "coroutine 'async_serialize_from_host"


def pytest_configure(config):
    for message in (UNREADABLE, FORGOTTEN):
        config.addinivalue_line("filterwarnings", f"ignore:{message}")
    if not hasattr(config, "workerinput"):  # not in workers, which begin while others run
        make_room(CACHE, CACHE_BYTES)


# One worker runs a file from end to end, so the longest begin first; else the other workers would
# wait for the last one.
LONGEST = (
    "step/test_step_together",
    "step/pipeline/test_stages",
    "hf/test_parity",
    "train/test_compressed",
    "integration/test_several_processes",
    "moe/test_dispatch",
    "plan/probe/test_probe",
    "step/test_step",
    "step/test_context",
    "model/test_context",
    "train/test_rollback",
    "plan/trace/test_reader",
    "plan/search/test_search",
    "integration/test_train_command",
    "integration/test_planned_run",
    "integration/test_compressed_run",
    "faults/test_faults",
    "faults/test_hosts",
    "step/test_micro_batches",
    "kernels/mosaic/test_grouped_matmul_e4m3",
    "hlo/test_routes",
    "kernels/mosaic/test_grouped_matmul",
)


# Folders, files and tests that `make test` leaves out, beside tests that bear the mark themselves:
# they catch little for their seconds, or what they catch is at the border of the house. Measured
# with an empty compile cache, and with mistakes put into the code (docs/log.md).
SLOW: tuple[str, ...] = (
    # Files of other libraries, adapters, evaluation and generation.
    "convert/",
    "evaluate/",
    "hf/",
    "serve/",
    # Pages in a browser, whose start takes longer than its tests.
    "report/test_page.py",
    "step/test_adapters.py",
    "train/test_adapters.py",
    # Tests that start whole programs: checks of a machine, steps run again, hosts that come.
    "benchmarks/",
    "doctor/test_mesh.py",
    "doctor/test_smoke.py",
    "launch/test_elastic.py",
    "runtime/test_program_cache.py",
    "train/test_replay.py",
)
# Of these, what takes little time and what no other test sees.
QUICK = (
    "benchmarks/test_sent.py",
    "serve/endpoint/test_app.py",
    "serve/endpoint/test_fields.py",
    "serve/endpoint/test_worker.py",
    "serve/test_texts.py",
    "serve/test_engine.py::test_no_row_loses_tokens_to_a_training_capacity",
    "serve/test_sampling.py",
    "step/test_adapters.py::test_no_two_adapters_start_alike",
)

# Of slow tests the dearest whose parts others hold: they run nightly, and by `make test-all
# CASES=every`. Most others bear the mark `exhaustive` themselves.
NIGHTLY = (
    "comm/cpu/test_gloo.py::test_a_train_step_stays_right_and_its_collectives_are_replaced",
    "compose/test_compose.py::test_a_combination_trains_as_the_oracle_does",
    "convert/test_adapters.py::test_adapters_on_an_import_and_of_multi_token_prediction",
    "integration/test_adapter_run.py",
    "integration/test_compressed_run.py",
    "integration/test_routing_run.py",
    "integration/test_several_processes.py::test_a_stopped_run_goes_on_to_the_same_bits",
    "kernels/mosaic/test_grouped_matmul.py::test_experts_equal_the_reference_in_one_kernel",
    "kernels/mosaic/test_grouped_matmul_e4m3.py::test_experts_in_e4m3_equal_their_reference",
    "kernels/test_delta.py::test_chunks_of_any_size_give_values_and_gradients_of_a_loop",
    "model/test_context.py::test_attention_to_shared_sequences_is_that_of_one_device",
    "plan/test_command.py::test_a_published_model_is_planned_for_another_trainer",
    "plan/test_command.py::test_the_command_plans_for_a_file",
    "serve/experts/test_places.py::test_an_engine_moves_experts_in_the_middle_of_a_call",
    "serve/experts/test_places.py::test_any_table_gives_the_same_logits_and_texts",
    "serve/experts/test_places.py::test_texts_do_not_depend_on_when_and_where_experts_move",
    "serve/test_live.py::test_weights_in_memory_move_to_a_mesh_that_is_named[overrides0]",
    "serve/test_programs.py::test_cached_decoding_is_the_forward_pass[window",
    "serve/test_routing.py::test_experts_are_those_that_a_plain_router_chooses[context]",
    "serve/test_several_processes.py::test_two_processes_sample_what_one_does",
    "step/pipeline/test_stages.py::test_a_checkpoint_of_two_stages_restores_on_any_number_of_them",
    "step/pipeline/test_stages.py::test_steps_are_those_of_one_device",
    "step/test_adapters.py::test_a_step_in_bfloat16_has_the_gradients_of_float32_but_for_rounding[latent]",
    "step/test_adapters.py::test_first_adapters_change_nothing_and_do_not_depend_on_the_mesh",
    "step/test_adapters.py::test_gradients_of_adapters_follow_from_those_of_the_whole_weights[latent",
    "step/test_balance.py::test_biases_of_blocks_that_take_turns_move_by_their_own_loads",
    "step/test_balance.py::test_devices_that_share_sequences_take_the_quantiles_of_one_device",
    "step/test_balance.py::test_stages_take_the_quantiles_of_one_device",
    "step/test_context.py::test_loss_gradients_and_metrics_do_not_depend_on_which_device",
    "step/test_context.py::test_nats_by_target_and_the_next_logits_are_those_of_one_device",
    "step/test_gathers.py::test_when_weights_cross_and_what_is_kept_change_no_gradient[mesh1-",
    "step/test_gathers.py::test_when_weights_cross_and_what_is_kept_change_no_gradient[mesh2-",
    "step/test_gathers.py::test_when_weights_cross_and_what_is_kept_change_no_gradient[mesh8-",
    "step/test_step_together.py::test_a_table_of_layers_and_a_dense_model_give_the_oracles_loss",
    "step/test_step_together.py::test_the_step_gives_the_oracles_loss_and_gradients[two_level-(2",
    "train/test_compressed.py::test_gradients_are_off_by_what_the_codec_leaves_out[mesh7",
    "train/test_compressed.py::test_tokens_cross_nodes_as_their_codecs_say[two_level-codecs11]",
    "train/test_rollback.py::test_a_run_without_a_checkpoint_from_before_goes_back_to_its_first",
)


def pytest_ignore_collect(collection_path, config):
    """Does not import files whose tests are all slow, where slow tests are left out."""
    path = Path(os.path.relpath(collection_path, TESTS)).as_posix()
    left_out = "not slow" in config.option.markexpr and path.endswith(".py")
    if left_out and path.startswith(SLOW) and not any(path in name for name in QUICK):
        return True
    return None  # as others say


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what its marks say
def pytest_collection_modifyitems(items):
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name.startswith(SLOW) and not name.startswith(QUICK):
            item.add_marker("slow")
        if name.startswith(NIGHTLY):
            item.add_marker("exhaustive")
    turn = {TESTS / f"{name}.py": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: turn.get(item.path, len(turn)))


def pytest_terminal_summary(terminalreporter, config):
    if "not slow" in config.option.markexpr:
        terminalreporter.write_line(
            "left out: slow tests (make test-all), and what needs a GPU (make test-hardware) or "
            "another environment (CONTRIBUTING.md)"
        )


def make_room(folder: Path, limit: int) -> None:
    """Cuts a cache of compiled programs that is above its limit to half of that."""
    entries = [(path, path.stat()) for path in folder.glob("*-cache")]
    total = sum(stat.st_size for _, stat in entries)
    if total <= limit:
        return
    for path, stat in sorted(entries, key=lambda entry: max(entry[1].st_atime, entry[1].st_mtime)):
        path.unlink(missing_ok=True)  # another run may be at it too
        total -= stat.st_size
        if total <= limit // 2:
            return


TESTS = Path(__file__).parent
# Folders whose tests trace whole steps for another purpose: layers have tests of their own.
UNCHECKED = {"aot", "checkpoint", "convert", "doctor", "hlo", "parity", "plan", "train"}


@pytest.fixture(scope="module")
def unchecked_annotations():
    """Leaves a module's annotations unchecked."""
    with without_annotations():
        yield


@pytest.fixture(autouse=True, scope="module")
def annotations_by_folder(request):
    """Leaves annotations unchecked in the folders of `UNCHECKED`."""
    if request.path.relative_to(TESTS).parts[0] in UNCHECKED:
        request.getfixturevalue("unchecked_annotations")


@pytest.fixture(scope="module")
def compiled_anew():
    """Compiles all that the module compiles, as tests need that read what the compiler says.

    A program from the cache has the place names and scopes of the source that it was compiled from.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    def use_cache(used: bool) -> None:
        jax.config.update("jax_enable_compilation_cache", used)
        compilation_cache.reset_cache()  # else only the first program decides whether it is used

    use_cache(False)
    yield
    use_cache(True)


@pytest.fixture(autouse=True, scope="module")
def programs_are_let_go():
    """Forgets compiled programs between files when there are very many."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and len(mappings.read_bytes().splitlines()) > MANY_MAPPINGS:
        import jax

        jax.clear_caches()
