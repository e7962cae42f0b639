"""What SECURITY.md promises of the code: nothing that is read can run."""

import ast
import re
from pathlib import Path

import pytest

from moejax.checkpoint import manifest
from moejax.config.checks import check
from moejax.config.fields import change
from moejax.config.schema import Config
from moejax.errors import InputError, exit_code, without_secrets
from moejax.plan.search.file import load_plan

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for folder in ("moejax", "launch")
    for path in (ROOT / folder).rglob("*")
    if path.is_file()
    and (path.suffix == ".py" or path.read_bytes()[:40].startswith(b"#!/usr/bin/env python"))
)
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "torch"}
MODULES |= {"code", "xmlrpc"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "np.load", "jnp.load"}
CALLS |= {"subprocess.getoutput", "subprocess.getstatusoutput", "shutil.unpack_archive"}
CALLS |= {"runpy.run_path"}
CALLS |= {f"yaml.{name}load{many}" for name in ("", "full_", "unsafe_") for many in ("", "_all")}
# Wherever they are called: archives whose members choose their place, and pickles of a library.
METHODS = {"extractall", "read_pickle", "from_pretrained"}
LOADERS = {"Loader", "FullLoader", "UnsafeLoader", "CLoader", "UnsafeConstructor"}
OFF = {"shell", "allow_pickle", "trust_remote_code"}  # arguments that must be False
LOADS = "spec.loader.exec_module"
# Python config files run, as SECURITY.md says.
MAY = {("moejax/config/files.py", LOADS)}


def dotted(node):
    """The name of what is called, such as `os.system`; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def dangers(path):
    """What in a file could run what it reads."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield node.module
        elif (
            isinstance(node, ast.Attribute) and node.attr in LOADERS and dotted(node)[:5] == "yaml."
        ):
            yield dotted(node)
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in CALLS or name == LOADS or name.split(".")[-1] in METHODS:
                yield name
            # Outside its sandbox a template of Jinja can call whatever it reaches.
            if name.split(".")[-1] in ("Environment", "Template"):
                yield name
            for keyword in node.keywords:
                value = keyword.value
                off = isinstance(value, ast.Constant) and value.value is False
                if keyword.arg in OFF and not off:
                    yield f"{name} with {keyword.arg}"


def test_nothing_that_is_read_can_run():
    found = {(str(path.relative_to(ROOT)), what) for path in SOURCES for what in dangers(path)}
    assert found == MAY


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from torch import load",
        "eval(text)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "subprocess.run(text, shell=flag)",
        "x = np.load(path)",
        "x = np.load(path, allow_pickle=True)",
        "yaml.load_all(text)",
        "class Mine(yaml.FullLoader): pass",
        "tar.extractall(folder)",
        "AutoModel.from_pretrained(path)",
        "load(path, trust_remote_code=flag)",
        "jinja2.Environment().from_string(text)",
        "__import__(name)",
        "exec(compile(text, name, 'exec'))",
    ],
)
def test_the_check_sees_it(tmp_path, text):
    (tmp_path / "a.py").write_text(text)
    assert list(dangers(tmp_path / "a.py"))


def test_all_programs_are_looked_at():
    names = {path.name for path in SOURCES}
    assert {"ssh", "local", "emulate", "processes.py", "checkpoint.py"} <= names
    assert len(SOURCES) > 200


def test_the_trust_model_comes_first_in_five_lines():
    page = (ROOT / "SECURITY.md").read_text()
    first = page.split("\n## ")[1]
    rows = re.findall(r"^\d\. \*\*", first, re.MULTILINE)
    assert first.startswith("The trust model")
    assert len(rows) == 5


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:hunter2@host/a?b=1 failed", "https://***@host/a?b=1 failed"),
        ("git+https://TOKEN@host", "git+https://***@host"),
        ("az://box?sv=1&sig=abc%2B&x=2", "az://box?sv=1&sig=***&x=2"),
        ("s3://b?X-Amz-Signature=f00&X-Amz-Security-Token=bar", None),
        ("mail to a@b.c, s3://bucket/run@3 and user@host:29400", None),
        ("key is hunter2-hunter2", "key is [WANDB_API_KEY]"),
        ("a path of GOOGLE_APPLICATION_CREDENTIALS", None),
        ("short", "short"),
    ],
)
def test_logins_and_secrets_are_left_out_of_a_text(monkeypatch, text, shown):
    monkeypatch.setenv("WANDB_API_KEY", "hunter2-hunter2")
    monkeypatch.setenv("SOME_TOKEN", "short")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "a path of GOOGLE")
    found = without_secrets(text)
    if "X-Amz" in text:
        assert found == "s3://b?X-Amz-Signature=***&X-Amz-Security-Token=***"
    else:
        assert found == (text if shown is None else shown)


@pytest.mark.parametrize(
    "name", ["run_dir", "checkpoint.copy_to", "checkpoint.init_from", "track.mlflow"]
)
def test_a_setting_with_a_login_is_refused_and_not_shown(capsys, name):
    for url in ("sftp://me:hunter2@host/runs", "https://host/runs?token=hunter2"):
        cfg = change(Config(), {name: url})
        assert exit_code(lambda cfg=cfg: check(cfg), stopped="") == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"`{name}` holds a login" in error
        assert "hunter2" not in error
    check(change(Config(), {"checkpoint.copy_to": "s3://bucket/run"}))


def test_a_login_in_a_list_of_files_is_refused():
    cfg = change(Config(), {"data.train_files": ("a.bin", "http://me:x@host/b.bin")})
    with pytest.raises(InputError, match=r"data\.train_files` holds a login"):
        check(cfg)


def test_sizes_of_what_is_read_whole_are_capped(tmp_path, monkeypatch):
    with (tmp_path / "plan.json").open("wb") as file:
        file.truncate(1 << 25)
    with pytest.raises(InputError, match="no more than"):
        load_plan(tmp_path / "plan.json")
    monkeypatch.setattr(manifest, "MANIFEST_BYTES", 100)
    (tmp_path / manifest.MANIFEST).write_text("{" + " " * 100 + "}")
    with pytest.raises(InputError, match="more than 100 bytes"):
        manifest.read_manifest(tmp_path)
