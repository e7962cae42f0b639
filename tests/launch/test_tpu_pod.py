"""launch/tpu_pod with stand-ins for gcloud, which reaches the workers, and for their metadata."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.modules import module

ROOT = Path(__file__).parents[2]
launcher = module("tpu_pod")
NEEDED = ["--tpu", "slice", "--zone", "us-central1-a"]

# As gcloud does: all workers at once, with its own standard input, and the code of the first that
# failed. A worker's shell gets the words of the command, which were cut at single spaces.
GCLOUD = """#!/bin/bash
printf '%s\\n' "${@:1:$#-1}" > words
exec 3<&0
command=${@: -1}
for worker in 0 1; do
    WORKER=$worker sh -c "${command#--command=}" <&3 &
    ids+=($!)
done
code=0
for id in ${ids[@]}; do
    wait $id || { now=$?; [ $code -ne 0 ] || code=$now; }
done
exit $code
"""
CURL = """#!/bin/sh
for url; do :; done
case $*$url in *Metadata-Flavor:Google*) ;; *) exit 22 ;; esac
case $url in
http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number)
    printf %s $WORKER ;;
http://metadata.google.internal/computeMetadata/v1/instance/attributes/worker-network-endpoints)
    printf %s "$ENDPOINTS" ;;
*) exit 22 ;;
esac
"""


def begin(folder, *words, **variables):
    """Starts the launcher where gcloud and curl are the stand-ins."""
    for name, text in (("gcloud", GCLOUD), ("curl", CURL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    command = [sys.executable, ROOT / "launch" / "tpu_pod", *NEEDED, "--logs", folder / "logs"]
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.Popen(
        [str(word) for word in (*command, *words)],
        cwd=folder,
        env={**os.environ, "ENDPOINTS": "10.0.0.5,10.0.0.6", **variables, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def launch(folder, *words, **variables):
    process = begin(folder, *words, **variables)
    out = process.communicate(timeout=60)[0]
    return process.returncode, out


SHOW = 'echo "$MOEJAX_PROCESS of $MOEJAX_PROCESSES at $MOEJAX_COORDINATOR: $1"'


@pytest.mark.parametrize(
    "variables",
    [
        {"ENDPOINTS": "10.0.0.5,10.0.0.6"},
        pytest.param(
            {"ENDPOINTS": "one:77:10.0.0.5,two:78:10.0.0.6"},  # older TPU VMs
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            {"ENDPOINTS": "wrong", "TPU_WORKER_HOSTNAMES": "10.0.0.5,10.0.0.6"},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_each_worker_learns_its_place(tmp_path, variables):
    words = "two  words; * $HOME ' \" \\"
    code, out = launch(tmp_path, "--", "sh", "-c", SHOW, "sh", words, **variables)
    assert code == 0, out
    said = [f"[slice] {n} of 2 at 10.0.0.5:8476: {words}" for n in range(2)]
    assert sorted(out.splitlines()) == said
    ssh = ["compute", "tpus", "tpu-vm", "ssh", "slice", "--zone=us-central1-a"]
    assert (tmp_path / "words").read_text().split() == [*ssh, "--worker=all", "--quiet"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--", "sh", "-c", "exit 4"], 4, ""),
        (["--directory", "/nowhere", "--", "true"], 2, "no directory. --directory is /nowhere."),
    ],
)
def test_how_a_worker_ended_is_passed_on(tmp_path, words, code, message):
    got, out = launch(tmp_path, *words)
    assert got == code, out
    assert message in out


def test_workers_without_metadata_are_told(tmp_path):
    code, out = launch(tmp_path, "--", "true", GCE_METADATA_IP="elsewhere")
    assert code == 2
    assert "no place in the slice" in out


UP = """trap 'touch asked; exit 3' INT TERM
touch up$MOEJAX_PROCESS
while ! [ -e asked ]; do sleep 0.05; done
exit 3"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_stop_with_the_launcher(tmp_path, number):
    """One of them is asked, and tells the others, as moejax does; all are when it is killed."""
    process = begin(tmp_path, "--", "sh", "-c", UP)
    deadline = time.monotonic() + 30
    while not all((tmp_path / f"up{n}").exists() for n in range(2)):
        assert time.monotonic() < deadline, "no worker has started"
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (3 if number == signal.SIGINT else -9)
    while not (tmp_path / "asked").exists():
        assert time.monotonic() < deadline, "the workers run on"
        time.sleep(0.05)


def test_a_dry_run_shows_the_command_and_runs_nothing(tmp_path):
    code, out = launch(tmp_path, "--project", "p", "--internal_ip", "--dry_run", "--", "run", "a b")
    assert code == 0
    assert not (tmp_path / "words").exists()
    words = shlex.split(out.splitlines()[0])
    assert words[:2] == ["gcloud", "compute"]
    assert {"--project=p", "--internal-ip", "--worker=all"} <= set(words)
    assert words[-1] == "--command=cd . && run 'a b'"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--", "true"], "no program `gcloud`"),
        (["--tpu=-x", "--", "true"], "--tpu is `-x`"),
        (["--tpu=--project", "--", "true"], "--tpu is `--project`"),
        (["--zone", "here", "--", "true"], "--zone is `here`"),
        ([], "no command"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(monkeypatch, capsys, flags, message):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "argv", ["tpu_pod", *NEEDED, *flags])
    assert launcher.main() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"tpu_pod: error: {message}")
    assert len(err.splitlines()) == 1
