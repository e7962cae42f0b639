"""Configs read and written: files, overrides, dictionaries, and any value in between."""

import dataclasses
import json
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moejax.config.checks.planned import pinned
from moejax.config.fields import (
    Field,
    check_value,
    fields,
    find_field,
    get_value,
    parse_text,
    sections,
)
from moejax.config.load import (
    default_config,
    diff,
    from_dict,
    load_config,
    load_with_notes,
    save_json,
    to_dict,
)
from moejax.config.schema import Config
from moejax.errors import InputError
from tests.config.files import cases, error_of, message_of, python_config


def test_an_empty_file_gives_the_defaults(config_file):
    for name, content in (("a.yaml", ""), ("a.json", "{}"), ("a.py", python_config("pass"))):
        assert load_config(config_file(name, content)) == Config()


def test_an_empty_group_of_a_wrong_name_is_refused(config_file):
    own = python_config("config.unlock(); config.models = {}")
    for name, content in (("a.yaml", "models: {}"), ("a.json", '{"models": {}}'), ("a.py", own)):
        with pytest.raises(InputError, match=r"models.*`?model`?"):
            load_config(config_file(name, content))


def test_default_config_is_locked_and_has_every_default():
    config = default_config()
    assert from_dict(config.to_dict()) == Config()
    assert config.is_locked
    with pytest.raises(AttributeError, match="n_expert"):
        config.moe.n_expert = 4
    with pytest.raises(AttributeError):
        config.model.rope.bases = 4


def test_optional_settings_of_default_config_take_none_and_values():
    values = {
        field.name: field.choices[0] if field.choices else field.kind("1" if field.at_most else "3")
        for field in fields().values()
        if field.optional
    }
    config = default_config()
    for chosen in (dict.fromkeys(values), values, dict.fromkeys(values)):
        for name, value in chosen.items():
            group, _, last = name.rpartition(".")
            (config[group] if group else config)[last] = value
        found = from_dict(config.to_dict())
        assert {name: get_value(found, name) for name in values} == chosen


def test_python_yaml_and_json_set_the_same_values(config_file):
    expected = dataclasses.replace(
        Config(),
        model=dataclasses.replace(Config().model, width=64, moe_every=None),
        optimizer=dataclasses.replace(Config().optimizer, learning_rate=1e-3, clip_norm=2.0),
        data=dataclasses.replace(Config().data, train_files=("a{.bin", "b,*")),
    )
    yaml = (
        "model: {width: 64, moe_every: none}\noptimizer:\n  learning_rate: 1e-3\n  clip_norm: 2\n"
        "data.train_files: ['a{.bin', 'b,*']\nmoe: {}\n"
    )
    as_json = (
        '{"model": {"width": 64, "moe_every": null, "rope": {}}, "data": {"train_files":\n'
        '["a{.bin", "b,*"]}, "optimizer": {"learning_rate": 1e-3, "clip_norm": 2}}'
    )
    python = python_config(
        "config.model.width = 64; config.model.moe_every = None\n"
        "    config.optimizer.learning_rate = 1e-3; config.optimizer.clip_norm = 2\n"
        "    config.data.train_files = ['a{.bin', 'b,*']"
    )
    for name, content in (("a.yaml", yaml), ("a.yml", yaml), ("a.json", as_json), ("a.py", python)):
        assert load_config(config_file(name, content)) == expected, name


def test_overrides_win_over_the_file_and_the_last_one_wins(config_file):
    path = config_file("a.yaml", "train: {num_steps: 7, seed: 5}")
    cfg = load_config(path, ["train.num_steps=8", "--config.train.num_steps=9"])
    assert (cfg.train.num_steps, cfg.train.seed) == (9, 5)


def test_a_plan_asked_for_on_the_command_line_replaces_what_the_file_holds(config_file):
    """The same as `moejax plan`: a run by `plan=auto` kept the mesh of another cluster."""
    values = {"mesh": {"expert": 4, "nodes": 8}, "model": {"remat": "full"}, "route_chunks": 2}
    file = config_file("a.json", json.dumps(values))
    kept = load_config(file)
    assert (kept.mesh.expert, kept.model.remat, kept.plan.keep) == (4, "full", ())
    cfg, notes = load_with_notes(file, ["plan=auto", "mesh.fsdp=1", "route_chunks=4"])
    assert (cfg.mesh.expert, cfg.mesh.fsdp, cfg.model.remat) == (1, 1, "none")
    assert pinned(cfg) == {"mesh.fsdp", "route_chunks"}
    assert notes == [
        "free, although the config file sets it: mesh.expert = 4, model.remat = full. "
        "--config.plan.keep=NAMES keeps what it names.",
        "pinned: route_chunks = 4, mesh.fsdp = 1 (command line)",
    ]
    cfg, notes = load_with_notes(file, ["plan=mine.json"])
    assert (cfg.mesh.expert, cfg.mesh.nodes) == (4, None)
    assert notes == ["mine.json replaces mesh.nodes = 8 of the config file"]
    assert load_config(file, ["plan=mine.json", "mesh.nodes=4"]).mesh.nodes == 4


def test_json_text_keeps_escapes_and_pairs_of_surrogates(config_file):
    content = '{"train":\n{"sample_prompt": "\\ud83d\\ude00 \\n {\\"x\\": 1}"}}'
    assert (
        load_config(config_file("a.json", content)).train.sample_prompt == '\U0001f600 \n {"x": 1}'
    )


def test_yaml_words_that_older_yaml_reads_as_booleans_and_dates_stay_text(config_file):
    path = config_file("a.yaml", "run_dir: 2020-01-01\ntrain: {sample_prompt: yes}")
    cfg = load_config(path)
    assert (cfg.run_dir, cfg.train.sample_prompt) == ("2020-01-01", "yes")


WRONG = """
checkpoint.every=20 -> Did you mean `checkpoint.save_every`? `moejax train --settings` lists all.
model.n_expert=4 -> unknown field `model.n_expert` ... Did you mean `moe.num_experts`?
--config.num_steps=5 -> unknown field `num_steps` ... `train.num_steps`
mesh.experts=2 -> unknown field `mesh.experts` ... `mesh.expert`
x.y.z=2 -> unknown field `x.y.z` ... --settings
=2 -> unknown field ``
model=3 -> `model` is a group of settings ... `model.vocab_size`
train.num_steps -> `train.num_steps` has no `=` ... --config.
train.num_steps=abc -> `train.num_steps` must be an integer ... Got 'abc'
train.num_steps=1.5 -> must be an integer ... Got '1.5'
train.num_steps=1e3 -> must be an integer ... Got '1e3'
train.num_steps= -> must be an integer ... Got ''
train.num_steps=none -> must be an integer ... Got 'none'
train.num_steps=true -> must be an integer ... Got 'true'
train.num_steps=9223372036854775808 -> must fit in 64 bits
train.eval_every=x -> must be an integer or none ... Got 'x'
moe.num_experts=-3 -> `moe.num_experts` must be at least 1 ... Got -3
moe.capacity_factor=0 -> `moe.capacity_factor` must be above 0
moe.router.jitter=0.6 -> must be at least 0 and at most 0.5 ... Got 0.6
optimizer.learning_rate=-1 -> must be at least 0 ... Got -1.0
optimizer.learning_rate=nan -> must be a finite number ... Got nan
optimizer.learning_rate=1e999 -> must be a finite number
optimizer.learning_rate=fast -> must be a number ... Got 'fast'
model.scan_layers=yes -> must be true or false ... Got 'yes'
model.dtype=bf16 -> one of float32, bfloat16 ... Got 'bf16' ... Did you mean bfloat16?
"""


@pytest.mark.parametrize(
    ("override", "said"),
    [
        *cases(WRONG),
        ("a\nb=2", "unknown field `a\\nb`"),
        pytest.param("train.num_steps=" + "9" * 5000, "must be an integer", id="long"),
    ],
)
def test_a_wrong_override_is_refused(config_file, override, said):
    message = error_of(config_file("a.yaml", ""), override)
    for part in said.split(" ... "):
        assert part in message


@pytest.mark.parametrize(
    ("mapping", "fragment"),
    [
        ({"modl": {}}, "unknown field `modl`"),
        ({"model": {"rope": {"thetta": 1}}}, "Did you mean `model.rope.theta`?"),
        ({"model": None}, "`model` is a group"),
        ({"train": {"seed": "5"}}, "`train.seed` must be an integer. Got '5'."),
        ({"train": {"seed": 5}, "train.seed": 6}, "set twice"),
        ({"model": {"moe_every": "none"}}, "must be an integer or none. Got 'none'."),
        ({"data": {"train_files": 1}}, "must be a list of strings"),
    ],
)
def test_from_dict_is_strict(mapping, fragment):
    assert fragment in message_of(from_dict, mapping)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("mesh.schedule", "gpipe", "use '1f1b', same bubble, less memory."),
        ("route", "spread", "use 'split', fewer bytes between experts' devices."),
        ("route", "gather_home", "use 'split', as fast with the best number of chunks."),
        ("moe.implementation", "reference", "use 'auto', the same products of each row"),
    ],
)
def test_a_removed_value_says_what_to_write_and_checkpoints_with_it_are_read(
    config_file, name, value, said
):
    message = error_of(config_file("a.yaml", f"{name}: {value}\n"))
    assert f"`{name}` '{value}' was removed: {said}" in message
    assert from_dict({name: value}) == from_dict({})


def test_configs_of_runs_with_removed_codecs_are_read():
    saved = {
        "dense_gradient": "none,adaptive:0.9:int8|int4@5",
        "expert_gradient": "topk:0.01+feedback,int8+stochastic@9",
        "adapt_every": 7,
    }
    found = from_dict({"compression": saved}).compression
    assert found.dense_gradient == "none,int4+feedback@5"
    assert found.expert_gradient == "int4+feedback,int8@9"


@pytest.mark.parametrize(
    ("written", "files"),
    [
        ("a.bin", ("a.bin",)),
        ("a.bin, b.bin", ("a.bin", "b.bin")),
        ("[a.bin]", ("a.bin",)),
        ('["a,b.bin"]', ("a,b.bin",)),
        ('""', ()),
    ],
)
def test_one_string_stands_for_a_list_as_on_the_command_line(config_file, written, files):
    config = config_file("a.yaml", f"data:\n  train_files: {written}\n  train_weights: 2\n")
    cfg = load_config(str(config))
    assert (cfg.data.train_files, cfg.data.train_weights) == (files, (2.0,))
    if not written.startswith(("[", '"')):
        shown = load_config(str(config), [f"data.train_files={written}"])
        assert shown.data.train_files == files


def values_of(field: Field) -> st.SearchStrategy:
    """Draws values that the field accepts, in the field's own type."""
    if field.choices:
        drawn = st.sampled_from(field.choices)
        drawn = st.lists(drawn).map(tuple) if field.kind is tuple else drawn
    elif field.kind is int:
        drawn = st.integers(int(field.at_least or 0), int(field.at_most or 2**63 - 1))
    elif field.kind is float:
        low = field.above if field.above is not None else field.at_least
        bounds = {"exclude_min": field.above is not None, "allow_nan": False}
        drawn = st.floats(low, field.at_most, allow_infinity=False, **bounds)
    elif field.kind is bool:
        drawn = st.booleans()
    elif field.kind is str:
        # `none` spells None where None is allowed; JSON cannot hold lone surrogates in UTF-8.
        text = st.text(st.characters(exclude_categories=["Cs"]))
        drawn = text.filter(lambda t: not field.optional or t.lower() not in ("none", "null"))
    elif field.item is float:
        drawn = st.lists(st.floats(allow_infinity=False, allow_nan=False)).map(tuple)
    else:
        drawn = st.lists(st.text(st.characters(exclude_categories=["Cs"]))).map(tuple)
    return st.none() | drawn if field.optional else drawn


@st.composite
def configs(draw):
    names = draw(st.sets(st.sampled_from(sorted(fields())), max_size=8))
    return from_dict({name: draw(values_of(fields()[name])) for name in sorted(names)})


@settings(max_examples=25)
@given(configs())
def test_what_is_written_is_read_and_its_changes_are_named(tmp_path_factory, cfg):
    assert from_dict(to_dict(cfg)) == cfg
    path = tmp_path_factory.mktemp("saved") / "config.json"
    save_json(cfg, path)
    assert load_config(path) == cfg
    assert [p.name for p in path.parent.iterdir()] == ["config.json"]
    changed = diff(Config(), cfg)
    assert from_dict({name: new for name, _, new in changed}) == cfg
    assert all(old == fields()[name].default and old != new for name, old, new in changed)
    assert diff(cfg, cfg) == []


@given(st.data(), st.sampled_from(sorted(fields())))
def test_an_override_spells_every_value(data, name):
    field = fields()[name]
    value = data.draw(values_of(field))
    if isinstance(value, tuple) and field.item is str:
        value = tuple(part.strip() for part in value if part.strip() and "," not in part)
    texts = {tuple: lambda: ", ".join(map(str, value)), bool: lambda: str(value).lower()}
    text = "none" if value is None else texts.get(field.kind, lambda: str(value))()
    assert parse_text(field, text) == value


def value_or_none(make, *args):
    """Returns what `make` returns, or None when it refuses in a single printable line."""
    try:
        return make(*args)
    except InputError as error:
        message = str(error)
    assert message.isprintable()
    return None


@given(st.sampled_from(sorted(fields())), st.text())
@example("train.seed", "1_0")
def test_any_override_text_gives_a_value_of_the_type_or_one_line(name, text):
    field = find_field(name)
    value = value_or_none(parse_text, field, text)
    if value is not None:
        assert check_value(field, value) == value
        assert type(value) is field.kind
        assert field.kind is not float or math.isfinite(value)


@given(st.text())
def test_any_field_name_is_known_or_refused_in_one_line(name):
    if name not in fields():
        message_of(find_field, name)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(sorted(sections())), inner)
    ),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(sorted({*sections(), *fields()})), _JSON, max_size=3))
def test_any_json_object_gives_a_config_or_one_line(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / "a.json"
    path.write_text(json.dumps(content))
    cfg = value_or_none(load_config, path)
    if cfg is not None:
        assert from_dict(to_dict(cfg)) == cfg
