"""Config files in Python, YAML and JSON that are refused, and how."""

import pytest

from moejax.config.files import named_configs
from moejax.config.load import load_config
from moejax.errors import InputError
from tests.config.files import error_of, python_config


@pytest.mark.parametrize(
    ("name", "content", "fragments"),
    [
        ("a.yaml", "model:\n  width: x", ["a.yaml, line 2: `model.width` must be an integer"]),
        ("a.yaml", "model:\n\n  n_expert: 3", ["line 3: unknown field `model.n_expert`"]),
        ("a.yaml", "modl: {}", ["line 1: unknown field `modl`. Did you mean `model`?"]),
        ("a.yaml", "model:", ["line 1: `model` is a group"]),
        ("a.yaml", "train: {seed: {a: 1}}", ["unknown field `train.seed.a`"]),
        ("a.yaml", "train: {seed: {}}", ["`train.seed` must be an integer. Got {}"]),
        ("a.yaml", "train:\n  seed: 1\n  seed: 2", ["line 3: `train.seed` is set twice"]),
        ("a.yaml", "train: {seed: 1}\ntrain.seed: 2", ["line 2: `train.seed` is set twice"]),
        ("a.yaml", "data: {train_files: {a: b}}", ["unknown field `data.train_files.a`"]),
        ("a.yaml", "data: {train_files: [1]}", ["must be a list of strings. Got [1]"]),
        ("a.yaml", "data: {train_weights: true}", ["must be a list of numbers. Got True"]),
        ("a.yaml", "optimizer: {epsilon: .nan}", ["must be a finite number. Got nan"]),
        ("a.yaml", "optimizer: {epsilon: 1%s}" % ("0" * 400), ["must be a finite number"]),
        ("a.yaml", "train: {seed: %s}" % ("9" * 5000), ["line 1: an integer has thousands"]),
        ("a.yaml", "train: {seed: 010}", ["must be an integer. Got '010'"]),
        ("a.yaml", "a:\n  b: !!python/object/apply:os.system [x]", ["line 2: tag !!python/object"]),
        ("a.yaml", "!!python/name:os.system", ["line 1: tag !!python", "refused"]),
        ("a.yaml", "a: &x [1]\nb: *x", ["line 2: alias *x is refused"]),
        ("a.yaml", "? [a]\n: b", ["line 1: the name of a setting is plain text"]),
        ("a.yaml", "- a", ["line 1: a config is a mapping"]),
        ("a.yaml", "a: [\n", ["a.yaml, line 2: while parsing", "expected"]),
        ("a.yaml", "model:\n\twidth: 3", ["line 2: while scanning", "found character '\\t'"]),
        ("a.yaml", "a: 1\n---\nb: 1", ["line 2: expected a single document", "another document"]),
        ("a.yaml", "\na: \x00", ["line 2: character 0x0"]),
        ("a.yaml", "[" * 5000, ["nested too deeply"]),
        ("a.yaml", b"\na: \xff", ["line 2: not UTF-8"]),
        ("a.yaml", "#" * 1_000_001, ["larger than 1000000 bytes"]),
        ("a.yaml", "a" * 1000 + ": 1", ["unknown field `aaa"]),
        ("a.json", '{"model":\n {"width": "x"}}', ["a.json, line 2: `model.width` must be an int"]),
        (
            "a.json",
            '{"data": {"train_files": ["a\\nb",\n1]}}',
            ["line 1", "must be a list of strings"],
        ),
        ("a.json", '{"modl":{ \n}}', ["line 1: unknown field `modl`"]),
        ("a.json", '{"train": {"seed": 1},\n"train": {"seed":\n2}}', ["line 3", "set twice"]),
        ("a.json", '{"data": {"train_files": ["a",\n"b"]},\n"modl": 1}', ["line 3: unknown field"]),
        ("a.json", '{"train": {"seed": 1, }}', ["a.json, line 1"]),
        ("a.json", '{"a":\n', ["a.json, line 2: Expecting value"]),
        ("a.json", "", ["line 1: Expecting value"]),
        ("a.json", "[]", ["line 1: a config is an object"]),
        ("a.json", '{"a":' * 100_000, ["nested too deeply"]),
        ("a.json", '{"train": {"seed": %s}}' % ("9" * 5000), ["a.json: an integer has thousands"]),
        ("a.json", '{"optimizer": {"epsilon": NaN}}', ["must be a finite number"]),
        ("a.json", "\ufeff{}", ["line 1", "BOM"]),
        ("a.py", "", ["a.py has no function get_config()"]),
        ("a.py", "def get_config():\n    return {}", ["a.py: get_config() returned dict"]),
        ("a.py", "x = 1\ndef get_config(:\n", ["a.py, line 2: SyntaxError"]),
        ("a.py", "import sys\nsys.exit(0)", ["a.py: the file ended the program: sys.exit(0)"]),
        ("a.py", "\nimport no_such_module_x", ["a.py, line 2: ModuleNotFoundError"]),
        ("a.py", "def get_config():\n    1 / 0", ["a.py, line 2: ZeroDivisionError"]),
        ("a.py", "raise ValueError('a\\nb')", ["a.py, line 1: ValueError: a b."]),
        (
            "a.py",
            python_config("config.model.depth = 3"),
            ["a.py, line 4", '"depth" does not exist'],
        ),
        ("a.py", python_config("config.model.width = 'x'"), ["a.py, line 4: TypeError", "'width'"]),
        (
            "a.py",
            python_config("config.model.width = 0"),
            ["a.py: `model.width` must be at least 1"],
        ),
        ("a.py", python_config("config.model.width = None"), ["must be an integer. Got None"]),
        ("a.txt", "", ["a.txt ends in '.txt'", "Use .py, .yaml, .yml or .json"]),
        ("a", "", ["Use .py, .yaml, .yml or .json"]),
    ],
)
def test_a_wrong_config_file_is_refused_with_its_place(config_file, name, content, fragments):
    message = error_of(config_file(name, content))
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize("suffix", ["py", "yaml", "json"])
@pytest.mark.parametrize(
    ("stem", "fragment"),
    [
        ("missing.", "does not exist"),
        ("null\0byte.", "null\\x00byte"),
        ("two\nlines.", "two\\nlines"),
        ("https://example.org/a.", "is a URL"),
        ("folder.", "is not a file"),
    ],
)
def test_a_path_that_is_no_file_is_refused(tmp_path, monkeypatch, stem, suffix, fragment):
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"folder.{suffix}").mkdir()
    assert fragment in error_of(stem + suffix)


def test_a_refused_tag_runs_nothing(config_file, tmp_path):
    error_of(config_file("a.yaml", "!!python/object/apply:os.mkdir [made]"))
    assert not (tmp_path / "made").exists()


def test_an_error_inside_a_helper_names_the_line_of_the_config_file(config_file):
    content = "import json\n\ndef get_config():\n    return json.loads('{')\n"
    assert "a.py, line 4: JSONDecodeError" in error_of(config_file("a.py", content))


def test_a_name_is_the_file_of_that_name():
    known = named_configs()
    assert {"tiny", "olmoe_1b_7b", "deepseek_v3"} <= set(known)
    assert load_config("tiny") == load_config(known["tiny"])


def test_a_file_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").write_text("")
    with pytest.raises(InputError, match="no suffix"):
        load_config("tiny")


def test_a_name_that_is_not_there_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="Did you mean olmoe_1b_7b"):
        load_config("olmoe_1b")
