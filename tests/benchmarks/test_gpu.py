"""The GPU benchmark from end to end where there is no GPU, and with workers that hang or die."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import targets

ROOT = Path(__file__).parents[2]
SMALL = "Nothing here was measured on a GPU"


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 has no Mosaic GPU")
def test_everything_runs_small_on_any_machine(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "gpu.json").read_text())
    page = (tmp_path / "gpu.md").read_text()
    assert not [row for row in result["rows"] if "error" in row], page
    checks = [row for row in result["rows"] if "ok" in row]
    assert len(checks) == 15
    assert all(row["ok"] and 0 <= row["worst"] <= 1 for row in checks), page
    timed = {row["operation"] for row in result["rows"] if row.get("seconds")}
    wanted = {"copy", "forward", "data gradient", "weight gradient", "gate, up and SwiGLU"}
    wanted |= {"permute", "MoE layer, forward + backward", "train step"}
    wanted |= {"layer in chunks, forward + backward", "layer in chunks, forward"}
    wanted |= {"attention, forward + backward", "step, arrays on the host or not"}
    assert wanted <= timed
    memory = {row["implementation"]: row for row in result["rows"] if "compiler_bytes" in row}
    assert memory.keys() == {"device", "optimizer", "residuals"}
    assert memory["optimizer"]["predicted_host_bytes"] > 0
    (saved,) = [
        row for row in result["rows"] if row["operation"] == "save while the next step runs"
    ]
    assert saved["arrays"] > 0
    assert SMALL in page
    assert "Targets" not in page


@pytest.mark.exhaustive
def test_steps_are_probed_priced_and_run_small_on_any_machine(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu.predicted", "--small", "--out", str(tmp_path)]
    one_device = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=one_device)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "predicted.json").read_text())
    assert len(result["rows"]) == 2
    for row in result["rows"]:
        assert len(row["seconds"]) == 8
        assert all(seconds > 0 for seconds in row["predicted"].values())
    command += ["--first", "1", "--topology", str(tmp_path / "topology.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=one_device)
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "predicted.json").read_text())["rows"]) == 1


# Says what it is about to do, and then hangs, dies, or does it; what it skips it does not try.
WORKER = """
import json, os, sys, time
first = int(sys.argv[sys.argv.index("--first") + 1])
skip = sys.argv[sys.argv.index("--skip") + 1:] if "--skip" in sys.argv else []
def say(**words): print(json.dumps(words), flush=True)
say(versions={"device": "none"})
cases = [("dies", "a"), ("dies", "b"), ("dies", "c"), ("hangs", "a"), ("runs", "a")]
for number in range(first, len(cases)):
    kind, case = cases[number]
    say(case=number)
    key = f"{kind} | mosaic | {case}"
    if key in skip or f"{kind} | mosaic" in skip:
        continue
    say(begin=key)
    if kind == "dies":
        print("a reason", file=sys.stderr)
        os._exit(7)
    if kind == "hangs":
        time.sleep(600)
    say(end=key)
    say(row=dict(section="x", operation=kind, implementation="mosaic", case=case, seconds=[1.0]))
"""


def test_a_worker_that_dies_or_hangs_does_not_stop_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "USUAL_SILENCE", 2)
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    results = gpu.Results(tmp_path, True, {"date": "", "machine": {}, "nvidia_smi": None})
    skip = gpu.run_section("x", 60, results, set(), [sys.executable, str(script)])
    results.write()
    rows = {(row["operation"], row["case"]): row for row in results.rows.values()}
    assert "ended with code 7" in rows["dies", "a"]["error"]
    assert "a reason" in rows["dies", "b"]["error"]
    assert ("dies", "c") not in rows, "given up after two"
    assert results.given_up == ["dies | mosaic"]
    assert "said nothing for 2 s" in rows["hangs", "a"]["error"]
    assert rows["runs", "a"]["seconds"] == [1.0]
    assert "dies | mosaic" in skip
    assert "ended with code 7" in (tmp_path / "gpu.md").read_text()


def test_time_that_runs_out_is_nobodys_fault(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER.replace('cases = [("dies", "a")', 'cases = [("hangs", "a")'))
    results = gpu.Results(tmp_path, True, {"date": "", "machine": {}, "nvidia_smi": None})
    skip = gpu.run_section("x", 1.5, results, set(), [sys.executable, str(script)])
    assert not skip
    (row,) = results.rows.values()
    assert "no time left" in row["error"]


def rows(operation, implementation, case, seconds, **work):
    names = {"section": "products", "operation": operation, "implementation": implementation}
    return names | {"case": case, "seconds": [seconds] * 3} | work


def test_targets_are_judged_by_the_worst_case():
    tera, case = 1e12, "Mixtral 8x7B, {} rows an expert, uniform"
    found = [
        rows("copy", "XLA", "copy", 1.0, bytes=4 * tera),
        rows("matmul bfloat16", "XLA", "matmul", 1.0, flops=800 * tera),
        rows("forward", "mosaic", case.format(512), 1.0, flops=610 * tera),
        rows("forward", "mosaic", case.format(2048), 1.0, flops=590 * tera),
        rows("forward", "mosaic", case.format(64), 1.0, flops=100 * tera),
        rows("forward", "torch", case.format(512), 0.9, flops=610 * tera),
        rows("permute + quantise e4m3", "mosaic", "a", 1.2, bytes=4 * tera),
        rows("train step", "mosaic", "a", 1.0, flops=400 * tera),
        rows("attention, forward + backward", "ranges, tokamax", "a", 1.0, flops=400 * tera),
        rows("attention, forward + backward", "cuDNN", "a", 0.85, flops=400 * tera),
        rows("attention, forward + backward", "ranges, tokamax", "b", 1.0, flops=400 * tera),
        rows("attention, forward + backward", "cuDNN", "b", 0.75, flops=400 * tera),
        rows("layer in chunks, forward", "1 chunk", "a", 1.0),
        rows("layer in chunks, forward", "4 chunks", "a", 1.04),
        rows("layer in chunks, forward", "1 chunk", "b", 1.0),
        rows("layer in chunks, forward", "4 chunks", "b", 1.06),
        rows("step, arrays on the host or not", "host", "optimizer", 1.06, predicted=1.04),
        rows("step, arrays on the host or not", "device", "optimizer", 1.0, predicted=1.0),
        rows("step, arrays on the host or not", "host", "residuals", 1.5, predicted=1.2),
        rows("step, arrays on the host or not", "device", "residuals", 1.0, predicted=1.0),
    ]
    verdicts = {one.what: one for one in targets.judge(targets.Rates(found))}
    forward = verdicts["grouped matmul, forward, 512 rows or more"]
    assert forward.met is False
    assert "590" in forward.found
    assert "2048 rows" in forward.found
    beside = verdicts["grouped matmul beside torch._grouped_mm, 512 rows or more"]
    assert beside.met is False
    assert beside.found.startswith("0.90 x")
    assert verdicts["permute + quantise"].met
    assert verdicts["train step"].met
    assert verdicts["train step"].found.startswith("50%")
    assert verdicts["permute"].met is None
    attention = verdicts["attention to ranges, causal"]
    assert attention.met is False
    assert attention.found == "0.75 x (b)"
    chunks = verdicts["4 chunks, layer in chunks, forward"]
    assert chunks.met is False
    assert chunks.found == "1.060 x (b)"
    assert verdicts["4 chunks, layer in chunks, forward + backward"].met is None
    moments = verdicts["step with optimizer on the host"]
    assert (moments.met, moments.found) == (False, "1.060 x, predicted 1.040 x")
    assert verdicts["step with residuals on the host"].met is None, "the planner says it is slow"
