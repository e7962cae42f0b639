import json
from dataclasses import replace

import pytest

from moejax.config.schema import Config, DataConfig, PlanConfig
from moejax.data import corpus
from moejax.data.prepare import command as prepare
from moejax.data.sidecar import sidecar_of
from moejax.data.sources import (
    describe_sources,
    describe_tokens,
    is_tokenizer_of,
    keep_tokenizer,
    open_sources,
    share_inside,
)
from moejax.data.tokenizer import ByteTokenizer, FileTokenizer, digest
from moejax.data.tokens import from_documents
from moejax.errors import InputError
from tests.data.chats import write_model
from tests.data.token_files import EOS, FORMATS, change, write_text


def files(*train, held_out=(), **more):
    paths = {"train_files": train, "eval_files": held_out}
    paths = {name: tuple(map(str, some)) for name, some in paths.items()}
    return DataConfig(**{"source": "tokens", **paths, **more})


def test_the_standard_library_is_a_source_of_bytes():
    found = open_sources(DataConfig(), model_vocab=264)
    assert isinstance(found.tokenizer, ByteTokenizer)
    for source, texts in zip(found[:2], corpus.documents(), strict=True):
        assert source.target_bytes == sum(map(len, texts))
        assert source.num_tokens == source.target_bytes + len(texts) + 1
        assert source.read(0, 9).tolist() == [EOS, *texts[0][:8]]
        assert source.read(source.num_tokens - 1, 1).tolist() == [EOS]
    content = describe_sources(found)
    train, held_out = content["train"][0], content["held_out"][0]
    assert train["digest"] != held_out["digest"]
    assert train["tokens"] > held_out["tokens"]
    same, other, again = (from_documents([text]).parts()[0] for text in (b"a", b"b", b"a"))
    assert same["digest"] == again["digest"] != other["digest"]


@pytest.mark.parametrize("format", FORMATS)
def test_the_config_names_training_and_held_out_files(tmp_path, format):
    train, held_out = (
        write_text(tmp_path, text, name=text, format=format) for text in ("train", "held")
    )
    source = "tokens" if format == "bin" else format
    found = open_sources(files(train, held_out=[held_out], source=source), model_vocab=257)
    assert found.tokenizer.decode(found.train.read(0, 7).tolist()) == "train"
    assert found.tokenizer.decode(found.held_out.read(0, 6).tolist()) == "held"
    assert open_sources(files(train, source=source), model_vocab=257).held_out is None
    with pytest.raises(InputError, match="vocabulary 257"):
        open_sources(files(train, held_out=[held_out], source=source), model_vocab=256)


def test_weights_make_a_mixture_of_the_training_files_in_their_order(tmp_path):
    names = write_text(tmp_path, "second", name="b"), write_text(tmp_path, "one")
    data = files(*names, train_weights=(3.0, 1.0))
    mixture = open_sources(data, model_vocab=264).mixture
    assert [weight for _, weight in mixture] == [3.0, 1.0]
    read = [bytes(source.read(1, source.num_tokens - 2).tolist()) for source, _ in mixture]
    assert read == [b"second", b"one"]
    assert open_sources(replace(data, train_weights=()), model_vocab=264).mixture == ()


@pytest.mark.parametrize("way", ["symbolic link", "relative path", "folder", "pattern"])
def test_held_out_files_that_are_trained_on_are_refused_by_any_path(tmp_path, monkeypatch, way):
    """The same text under another name would pass for held out."""
    path = write_text(tmp_path, "text")
    monkeypatch.chdir(tmp_path)
    ways = {"relative path": "a.bin", "folder": f"{tmp_path}/down/../a.bin", "pattern": "*.bin"}
    other = ways.get(way, "b.bin")
    (tmp_path / "down").mkdir()
    if way == "symbolic link":
        (tmp_path / "b.bin").symlink_to(path)
        sidecar_of(tmp_path / "b.bin").symlink_to(sidecar_of(path))
    for train, held_out in ((path, other), (other, path)):
        with pytest.raises(InputError, match=r"is in data\.train_files and in data\.eval_files"):
            open_sources(files(train, held_out=[held_out]), model_vocab=264)


@pytest.mark.parametrize("field", [{"vocab_size": 260}, {"tokenizer_sha256": "0" * 64}])
def test_files_of_different_tokenizers_are_refused(tmp_path, field):
    one, other = (write_text(tmp_path, "text", name=name) for name in "ab")
    change(other, **field)
    for data in (files(tmp_path / "*.bin"), files(one, held_out=[other])):
        with pytest.raises(InputError, match=f"disagree.*{one.name}.*{other.name}"):
            open_sources(data, model_vocab=264)


def test_a_tokenizer_that_came_is_that_of_the_texts_unless_another_is_known(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    tokens = DataConfig(source="tokens", train_files=(str(write_text(tmp_path, "text")),))
    described = describe_tokens(tokens)
    of_bytes = {"step": 9, "data": tokens, "described": described}
    of_it = replace(described.sidecar, tokenizer_sha256=digest(tmp_path / "tokenizer.json"))
    for wanted, facts in (
        (False, of_bytes),
        (True, of_bytes | {"step": 0}),
        (True, of_bytes | {"described": described._replace(sidecar=of_it)}),
        (True, {"step": 9, "data": tokens, "described": None}),
        (False, {"step": 9, "data": DataConfig(), "described": None}),
    ):
        assert is_tokenizer_of(tmp_path / "tokenizer.json", **facts) == wanted


def test_the_content_identifies_tokens_and_their_meaning(tmp_path):
    path = write_text(tmp_path, "text")

    def content(**changes):
        change(path, **changes)
        return describe_sources(open_sources(files(path), model_vocab=300))

    before = content()
    assert [part["tokens"] for part in before["train"]] == [6]
    assert content(num_bytes=None, num_documents=7) == before, "these only describe the text"
    assert content(tokenizer_sha256="1" * 64) != before
    assert content(tokenizer_sha256=None) == before
    assert content(sha256="1" * 64) != before


def test_the_content_has_every_file_of_both_streams(tmp_path):
    one, two, three = (write_text(tmp_path, name, name=name) for name in "abc")
    found = describe_sources(open_sources(files(one, two, held_out=[three]), model_vocab=300))
    assert [part["name"] for part in found["train"]] == [str(one), str(two)]
    assert [part["name"] for part in found["held_out"]] == [str(three)]
    digests = [part["digest"] for parts in found.values() for part in parts]
    assert len(set(digests)) == 3
    assert json.loads(json.dumps(found)) == found


def test_a_run_keeps_what_says_how_its_text_became_tokens(tmp_path):
    model, run = write_model(tmp_path / "model"), tmp_path / "run"
    (tmp_path / "a.txt").write_text("all")
    command = [str(tmp_path / "a.txt"), "--out", str(tmp_path / "t"), "--eval-fraction", "0"]
    assert prepare.main([*command, "--tokenizer", str(model)]) == 0
    data = DataConfig("tokens", (str(tmp_path / "t.train.bin"),))
    assert describe_tokens(data).path == tmp_path / "t.train.bin"
    keep_tokenizer(data, run)
    for file in tmp_path.glob("t.*"):
        file.unlink()
    assert describe_tokens(data) is None
    described = describe_tokens(data, [tmp_path, run])
    assert described.tokenizer_file.read_bytes() == model.read_bytes()
    wanted = FileTokenizer(model)
    found = described.open_tokenizer()
    assert (found.eos_id, found.bos_id) == (wanted.eos_id, wanted.bos_id)
    described.tokenizer_file.write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer was changed\. .*tokenizer\.json has sha256"):
        described.open_tokenizer()
    # A later start on other data keeps those; bytes have no file.
    assert prepare.main(command) == 0
    keep_tokenizer(data, run)
    described = describe_tokens(data, [run])
    assert described.tokenizer_file is None
    assert described.open_tokenizer().vocab_size == 257
    keep_tokenizer(DataConfig(), run)
    assert describe_tokens(data, [run]).path == tmp_path / "t.train.bin"


def test_the_share_of_pairs_inside_documents_is_counted_in_the_files(tmp_path):
    """Of 8 positions: two documents of 4, each with its end, have 2 x 10 of 36 pairs.

    Sequences that begin inside a document have 1 and 3, or 2 and 2, positions of those at the ends.
    """
    path = write_text(tmp_path, *["abc"] * 40)
    data = files(path, sequence_length=8)
    cfg = Config(data=data)
    cut = [sum(n * (n + 1) / 2 for n in sizes) for sizes in ((1, 4, 3), (2, 4, 2), (3, 4, 1))]
    assert share_inside(cfg) == pytest.approx((20 + sum(cut)) / 4 / 36, rel=0.02)
    together = replace(cfg, data=replace(data, isolate_documents=False))
    assert share_inside(together) == share_inside(Config()) == 1
    assert share_inside(replace(cfg, plan=PlanConfig(documents=0.25))) == 0.25
