import json
import sys
from datetime import datetime

import pytest

from moejax.data.prepare import chat_template
from moejax.data.prepare.chat_template import ChatTemplate, load_template
from moejax.data.prepare.rows import BadRowError
from moejax.errors import InputError
from tests.data.chats import CHATML, FEATURES, ONE, write_model


def render(source, messages=ONE, **options):
    return ChatTemplate(source, "here.jinja").render(messages, None, "row 1", **options)


def test_the_template_is_found_beside_the_tokenizer(tmp_path):
    path = write_model(tmp_path, template="of the config")
    assert load_template(path, None).render(ONE, None, "").text == "of the config"
    (tmp_path / "chat_template.jinja").write_text("of the file {{ eos_token }}")
    assert load_template(path, None).render(ONE, None, "").text == "of the file </s>"
    (tmp_path / "other.jinja").write_text("named {{ bos_token }}{{ add_bos }}{{ unk_token }}")
    found = load_template(path, tmp_path / "other.jinja")
    assert found.render(ONE, None, "").text == "named <s>"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"chat_template": [{"name": "default", "template": "a"}, {"name": "b"}]}, "a"),
        ({"chat_template": [{"name": "tools", "template": "a"}]}, None),
        ([], None),
    ],
)
def test_of_several_templates_the_default_is_read(tmp_path, monkeypatch, config, said):
    path = write_model(tmp_path / "model")
    path.with_name("tokenizer_config.json").write_text(json.dumps(config))
    if said is not None:
        assert load_template(path, None).render(ONE, None, "").text == said
        return
    monkeypatch.chdir(tmp_path)
    wanted = r"no chat template\. model has no.*--chat-template FILE"
    with pytest.raises(InputError, match=wanted):
        load_template(path.relative_to(tmp_path), None)


def test_bytes_have_no_template_of_their_own(tmp_path):
    with pytest.raises(InputError, match=r"tokenizer of bytes has none.*--chat-template FILE"):
        load_template(None, None)
    with pytest.raises(InputError, match=r"a\.jinja"):
        load_template(None, tmp_path / "a.jinja")
    (tmp_path / "a.jinja").write_text("{{ eos_token }}")
    found = load_template(None, tmp_path / "a.jinja")
    assert found.render(ONE, None, "").text == "<|endoftext|>"


def test_older_folders_name_control_tokens_in_a_file_of_their_own(tmp_path):
    path = write_model(tmp_path, template="{{ bos_token }}{{ sep_token }}")
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "other", "sep_token": {"content": "|"}})
    )
    assert load_template(path, None).render(ONE, None, "").text == "<s>|"


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("tokenizer_config.json", "{", "settings are damaged"),
        ("chat_template.jinja", "\n{% if %}", r"template is damaged.*\.jinja, line 2"),
        (
            "chat_template.jinja",
            "{% generation %}\n{% endgeneration %}{% if %}",
            r"template is damaged.*\.jinja, line 2",
        ),
        ("chat_template.jinja", b"\xff", r"no chat template\. .*\.jinja"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, file, content, said):
    path = write_model(tmp_path)
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=said):
        load_template(path, None).render(ONE, None, "")


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_file_that_would_fill_the_memory_is_named(tmp_path, file):
    path = write_model(tmp_path)
    with (tmp_path / file).open("wb") as large:
        large.truncate(10**12)  # a file without content, which takes no room
    with pytest.raises(InputError, match=rf"file is too large.*{file}.*1,000,000,000,000 bytes"):
        load_template(path, None)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",  # nothing may be changed
    ],
)
def test_a_row_that_the_template_does_not_take_is_broken(source):
    with pytest.raises(BadRowError, match=r"does not take a row. row 1: .*here\.jinja"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ dict.__base__.__subclasses__() }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{% set ns = namespace(_x=1) %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_does_not_leave_the_sandbox(source):
    with pytest.raises(BadRowError):
        render(source)


def test_tags_are_marked_wherever_their_text_goes():
    source = (
        "{% macro say(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% set answer %}{{ say(messages[1]) }}{% endset %}"
        "<{{ answer }}|{{ say(messages[1]) }}>{% generation %}{% endgeneration %}"
    )
    template = ChatTemplate(source, "here.jinja")
    found = template.render(ONE, None, "")
    said = ONE[1]["content"]
    assert template.is_tagged
    assert found.text == f"<{said}|{said}>"
    assert [found.text[first:stop] for first, stop in found.spans] == [said, said]
    assert not ChatTemplate(CHATML, "here.jinja").is_tagged


def test_the_day_is_given_or_today():
    source, day = "{{ strftime_now('%d %b %Y') }}", datetime(2024, 7, 26)
    assert ChatTemplate(source, "", today=day).render(ONE, None, "").text == "26 Jul 2024"
    assert ChatTemplate(source, "").is_dated
    assert not ChatTemplate(CHATML, "").is_dated
    assert render("{{ strftime_now('%Y') }}").text >= "2026"
    with pytest.raises(InputError, match=r"`--date` cannot be written\. here\.jinja computes"):
        ChatTemplate("{{ strftime_now(format) }}", "here.jinja", today=day)


def test_tools_and_the_prompt_reach_the_template():
    template = ChatTemplate("{{ tools | tojson }}{{ add_generation_prompt }}", "")
    assert template.render(ONE, [{"name": "<f>"}], "").text == '[{"name": "<f>"}]False'
    assert template.render(ONE, None, "", prompt=True).text == "nullTrue"


def test_older_libraries_are_refused(monkeypatch):
    monkeypatch.setattr(chat_template, "version", lambda _: "5.22.1")
    with pytest.raises(InputError, match=r"version 5\.22\.2 or newer.*it is 5\.22\.1"):
        ChatTemplate(FEATURES, "")
    monkeypatch.setattr(chat_template, "version", lambda _: "5.30.0.dev1")
    template = ChatTemplate("no other test has this", "")
    monkeypatch.setattr("jinja2.__version__", "3.1.5")
    with pytest.raises(InputError, match=r"3\.1\.6.*3\.1\.5"):
        template.render(ONE, None, "")


@pytest.mark.parametrize("library", ["jinja2", "transformers"])
def test_without_a_library_the_extra_is_named(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InputError, match=rf"No module named '{library}'|{library}.*moejax\[hf\]"):
        ChatTemplate(FEATURES, "")
