"""`moejax serve` as a process: texts of `moejax generate`, signals, bad input, two processes."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import httpx
import openai
import pytest

from moejax.checkpoint.compatible import describe_run
from moejax.checkpoint.writer import Checkpoints
from moejax.config.schema import PlanConfig
from moejax.serve.command import main as generate
from moejax.serve.endpoint import command
from tests.cases import CERTAIN, small_config, step_for
from tests.integration.runs import REPOSITORY, environment, find_member

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}>"
WORDS = ("--slots", "2", "--positions", "128", "--port", "0")
LOCAL = (REPOSITORY / "launch" / "local", "--processes", 2)
pytestmark = pytest.mark.usefixtures("unchecked_annotations")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's directory with one checkpoint; its tokens are bytes."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    cfg = small_config(model={"vocab_size": 264, "mlp_hidden": 384}, moe=CERTAIN)
    train_step = step_for(dataclasses.replace(cfg, plan=PlanConfig(mode="hand")))
    writer = Checkpoints(folder / "checkpoints", keep=2)
    writer.save(3, train_step.init(), describe_run(train_step, {"train": [], "held_out": []}))
    writer.close()
    (folder / "chat.jinja").write_text(TEMPLATE)
    return folder


@contextlib.contextmanager
def started(run, *words, launcher=(), **variables):
    """The command as a process, once it takes requests."""
    flags = ("serve", "--run", run, *WORDS, "--chat-template", run / "chat.jinja", *words)
    line = [sys.executable, "-m", "moejax", *flags]
    line = [sys.executable, *launcher, "--logs", run / "logs", "--", *line] if launcher else line
    env = environment(**{"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"} | variables)
    process = subprocess.Popen(
        [str(word) for word in line],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        cwd=REPOSITORY,
    )
    try:
        said = ""
        while not (found := re.search(r"tiny is served at (\S+)\. For example: curl", said)):
            line = process.stdout.readline()
            assert line, said
            said += line
        with openai.OpenAI(base_url=found[1], api_key="none", max_retries=0) as client:
            yield SimpleNamespace(process=process, url=found[1], openai=client, said=said)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def generated(run, capsys, *words):
    """What `moejax generate` says of the same checkpoint, in this process."""
    assert generate(["--run", str(run), "--tokens", "10", "--json", *map(str, words)]) == 0
    return [text["text"] for text in json.loads(capsys.readouterr().out)["texts"]]


def test_texts_are_those_of_generate_and_sigterm_waits_for_a_stream(run, capsys, tmp_path):
    (tmp_path / "prompts").write_text("def \nx\n")
    drawn = ["--temperature", "0.8", "--top-p", "0.9", "--seed", "7"]
    wanted = generated(run, capsys, "--prompts", tmp_path / "prompts")
    wanted += generated(run, capsys, "--prompts", tmp_path / "prompts", *drawn)
    chat = ["--chat", "--chat-template", run / "chat.jinja", "--prompt", "def "]
    wanted += generated(run, capsys, *chat)
    with started(run) as served:
        ask = served.openai.completions.create
        common = {"model": "tiny", "prompt": ["def ", "x"], "max_tokens": 10}
        found = ask(**common, temperature=0).choices
        found += ask(**common, temperature=0.8, top_p=0.9, seed=7).choices
        said = served.openai.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "def "}],
            max_tokens=10,
            temperature=0,
        )
        texts = [choice.text for choice in found] + [said.choices[0].message.content]
        assert texts == wanted
        stream = ask(model="tiny", prompt="x", max_tokens=120, stream=True, logprobs=0, seed=1)
        tokens = len(next(stream).choices[0].logprobs.tokens)
        served.process.send_signal(signal.SIGTERM)
        chunks = list(stream)
        tokens += sum(len(chunk.choices[0].logprobs.tokens) for chunk in chunks)
        assert (tokens, chunks[-1].choices[0].finish_reason) == (120, "length")
        out, _ = served.process.communicate(timeout=20)
        assert (served.process.returncode, out) == (0, "")
        with pytest.raises(openai.APIConnectionError):
            ask(**common)


@pytest.mark.slow
def test_ctrl_c_ends_it_after_its_grace_and_a_second_one_at_once(run):
    for more, signals in ((("--grace", "0.3"), 1), ((), 2)):
        with started(run, *more) as served:
            prompt = {"model": "tiny", "prompt": ["x"] * 60, "max_tokens": 120}
            stream = served.openai.completions.create(**prompt, stream=True)
            next(stream)
            begin = time.monotonic()
            for _ in range(signals):
                served.process.send_signal(signal.SIGINT)
                time.sleep(0.2)
            with pytest.raises(openai.APIError, match="text is not finished"):
                list(stream)
            out, _ = served.process.communicate(timeout=20)
            assert served.process.returncode == 130
            assert out == "moejax: stopped; nothing was changed\n"
            assert time.monotonic() - begin < 8


@pytest.mark.slow
def test_a_signal_while_programs_are_compiled_ends_it(run, tmp_path):
    flags = ["serve", "--run", run, *WORDS, "--slots", "8"]
    env = environment(JAX_PLATFORMS="cpu", JAX_ENABLE_COMPILATION_CACHE="false")
    line = [sys.executable, "-m", "moejax", *map(str, flags)]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=env, cwd=REPOSITORY) as made:
        said = ""
        while "compiling: case 1 " not in said:
            line = made.stderr.readline()
            assert line, said
            said += line
        made.send_signal(signal.SIGTERM)
        assert made.wait(30) == 0


@pytest.mark.exhaustive
def test_two_processes_serve_one_mesh(run, capsys):
    """Experts are spread over both. Idle, they wait; a signal to all ends both in order."""
    wanted = generated(run, capsys, "--prompt", "def ")
    drawn = ["--temperature", "0.8", "--seed", "7", "--top-k", "50"]
    wanted += generated(run, capsys, "--prompt", "def ", *drawn)
    launcher = (*LOCAL, "--devices", 1)
    slots = ("--expert-slots", "1", "--follow-load", "--config.mesh.expert=2")
    with started(run, *slots, launcher=launcher, JAX_NUM_CPU_DEVICES="1") as served:
        ask = served.openai.completions.create
        common = {"model": "tiny", "prompt": "def ", "max_tokens": 10}
        found = [ask(**common, temperature=0).choices[0].text]
        drawn = {"temperature": 0.8, "seed": 7, "extra_body": {"top_k": 50}}
        found += [ask(**common, **drawn).choices[0].text]
        assert found == wanted
        assert "experts: slots on each device: 1; hot ones move there" in served.said
        assert "\nmoejax_experts_moved_total" in httpx.get(f"{served.url[:-3]}/metrics").text
        stopped = ask(**common, temperature=0, stop=wanted[0][3]).choices[0]
        assert stopped.text == wanted[0][: wanted[0].index(wanted[0][3])]
        # Idle, neither process is busy.
        members = [find_member(served.process.pid, index) for index in range(2)]
        time.sleep(1)
        before = [cpu_seconds(pid) for pid in members]
        time.sleep(4)
        for pid, seconds in zip(members, before, strict=True):
            assert cpu_seconds(pid) - seconds < 0.8
        assert ask(**common, temperature=0).choices[0].text == wanted[0]
        # A client that goes away frees its slots in both.
        stream = ask(model="tiny", prompt=["x"] * 4, max_tokens=120, stream=True)
        next(stream)
        stream.close()
        assert ask(**common, temperature=0).choices[0].text == wanted[0]
        stream = ask(model="tiny", prompt="x", max_tokens=100, stream=True, logprobs=0, seed=1)
        next(stream)
        served.process.send_signal(signal.SIGTERM)
        assert list(stream)[-1].choices[0].finish_reason == "length"
        out, _ = served.process.communicate(timeout=60)
        assert served.process.returncode == 0, out
        assert "Traceback" not in out


def cpu_seconds(pid):
    """Processor time of a process until now."""
    with open(f"/proc/{pid}/stat") as opened:
        user, system = opened.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "70000"], "`--port` is out of range. Got 70000"),
        (["--slots", "0"], "`--slots` is out of range. Got 0"),
        (["--positions", "1"], "`--positions` is out of range. Got 1"),
        (["--queue", "-1"], "`--queue` is out of range. Got -1"),
        (["--grace", "-1"], "`--grace` is out of range. Got -1.0"),
        (["--host", "0.0.0.0"], "no API key. Others reach 0.0.0.0"),
        (["--host", "example.com"], "no API key. Others reach example.com"),
        (["--api-key-file", "missing"], "no access to a file. missing"),
        (["--run", "nowhere"], "no finished checkpoint"),
        (["--step", "9"], "no checkpoint of step 9"),
        (["--chat-template", "missing"], "no chat template. missing"),
        (["--eos", "</s>"], "`--eos` has no effect"),
        (["--config.train.seed=3"], "`train.seed` has no effect"),
        (["--expert-slots", "-1"], "`--expert-slots` is out of range. Got -1"),
        (["--expert-slots", "1"], "`--expert-slots` has no effect without `--follow-load`"),
        (["--host", "203.0.113.7", "--api-key-file", "KEY"], "cannot listen. 203.0.113.7:8000"),
        (["--host", "x" * 64, "--api-key-file", "KEY"], "cannot listen. xxx"),
    ],
)
def test_bad_input_is_one_line_before_a_device_is_touched(run, capsys, monkeypatch, words, said):
    monkeypatch.setattr(command, "load_model", lambda *_, **__: pytest.fail("a device was touched"))
    (run / "key").write_text("s3cret\n")
    words = [str(run / "key") if word == "KEY" else word for word in words]
    assert command.main(["--run", str(run), *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"moejax: error: {said}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("key", ["", "two\nlines", "\u20ac", "a\x01"])
def test_an_api_key_is_one_visible_line(run, capsys, monkeypatch, key):
    monkeypatch.setenv("MOEJAX_API_KEY", key)
    assert command.main(["--run", str(run), "--host", "0.0.0.0"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("moejax: error: API key cannot be sent")
    assert key == "" or key not in err


def test_a_missing_extra_is_told(run, capsys, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "uvicorn" else 1)
    assert command.main(["--run", str(run)]) == 2
    said = "a library is missing: uvicorn. moejax serve needs it. It comes with an extra. Run pip"
    assert capsys.readouterr().err == f'moejax: error: {said} install "moejax[serve]".\n'
