"""Files of recorded routing as a stream: tokens, targets, and experts that follow their tokens."""

import dataclasses

import numpy as np
import pytest

from moejax.config.schema import DataConfig
from moejax.data.batches import Batches
from moejax.data.routing import ModelExperts, open_recorded
from moejax.data.sources import describe_sources, describe_tokens, open_sources
from moejax.data.tokenizer import ByteTokenizer
from moejax.errors import InputError
from tests.data.token_files import write_text

MODEL = ModelExperts(num_experts=6, experts_per_token=2, layers=(1, 2, 4))
# Texts: numbers of tokens, and how many of them are the prompt.
TEXTS = {"a": ([5, 3, 9], [2, 1, 6]), "b": ([4], [0])}


def recorded(name="a"):
    """Arrays of a file. Each token's experts follow from its number in the file."""
    tokens_N, prompt_N = TEXTS[name]
    T = sum(tokens_N)
    first_TL = np.arange(T)[:, None] + np.arange(3)
    expert_TLK = np.stack([first_TL % 6, (first_TL + 1) % 6], axis=2)
    expert_TLK[np.cumsum(tokens_N) - 1] = -1
    return {
        "format": np.int32(1),
        "num_experts": np.int32(6),
        "layer_L": np.int32([1, 2, 4]),
        "tokens_N": np.int32(tokens_N),
        "prompt_tokens_N": np.int32(prompt_N),
        "id_T": np.arange(10, 10 + T, dtype=np.int32) + 50 * (name == "b"),
        "expert_TLK": expert_TLK.astype(np.int16),
    }


def write(folder, name="a", **changes):
    path = folder / f"{name}.npz"
    arrays = {**recorded(name), **changes}
    np.savez_compressed(path, **{n: x for n, x in arrays.items() if x is not None})
    return str(path)


def opened(*paths, **changes):
    return open_recorded(paths, **{"model_vocab": 100, "experts": MODEL, **changes})


def test_a_stream_has_texts_in_order_and_learns_what_follows_prompts(tmp_path):
    texts = opened(write(tmp_path, "a"), write(tmp_path, "b"))
    assert texts.num_tokens == 21
    found = texts.stretch(0, 21)
    assert found.token_N.tolist() == [*range(10, 27), *range(60, 64)]
    assert np.flatnonzero(found.begin_N).tolist() == [0, 5, 8, 17]
    # The first token of a text without a prompt is predicted from nothing.
    assert np.flatnonzero(found.target_N).tolist() == [2, 3, 4, 6, 7, 14, 15, 16, 18, 19, 20]
    assert found.expert_NLK.dtype == found.token_N.dtype == np.int32
    wanted = np.concatenate([recorded(name)["expert_TLK"] for name in "ab"])
    np.testing.assert_array_equal(found.expert_NLK, wanted)


@pytest.mark.parametrize("shuffle", [False, True])
def test_experts_follow_their_tokens_into_batches(tmp_path, shuffle):
    """Texts lie several in a sequence, and are cut where it ends."""
    texts = opened(write(tmp_path))
    ordered = Batches(texts, sequence_length=4, batch_sequences=3, seed=1, shuffle=shuffle)
    wanted = recorded()["expert_TLK"]
    seen = []
    for position in range(4):
        rows = ordered.rows(position, 0, 3)
        place_BT = rows.token_BT - 10
        np.testing.assert_array_equal(rows.expert_BTLK, wanted[place_BT])
        assert rows.expert_BTLK.shape == (3, 4, 3, 2)
        seen += place_BT[:, 0].tolist()
        # Any split of a batch over processes reads the same.
        for row in range(3):
            alone = ordered.rows(position, row, row + 1)
            np.testing.assert_array_equal(alone.expert_BTLK[0], rows.expert_BTLK[row])
    assert sorted(seen[:4]) == [0, 4, 8, 12]
    # Targets at the end of a text, where the next one begins, and behind its prompt.
    if not shuffle:
        first = ordered.rows(0, 0, 3)
        assert first.target_BT.tolist() == [[-1, 12, 13, 14], [-1, 16, 17, -1], [-1] * 4]
        assert first.segment_BT.tolist() == [[1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]]


def test_held_out_token_files_bring_the_tokenizer(tmp_path):
    held_out, path = write_text(tmp_path, "text"), write(tmp_path, "b")
    data = DataConfig(source="routing", train_files=(path,))
    how = {"model_vocab": 264, "experts": MODEL}
    alone = open_sources(data, **how)
    assert alone.tokenizer is None
    assert describe_tokens(data) is None
    both = dataclasses.replace(data, eval_files=(str(held_out),), train_weights=(2.0,))
    found = open_sources(both, **how)
    assert isinstance(found.tokenizer, ByteTokenizer)
    assert found.held_out.read(1, 4).tolist() == list(b"text")
    assert describe_tokens(both).path == held_out
    ((stream, weight),) = found.mixture
    assert (weight, stream.stretch(0, 1).expert_NLK.tolist()) == (2.0, [[[0, 1], [1, 2], [2, 3]]])
    (part,) = describe_sources(found)["train"]
    assert (part["name"], part["tokens"]) == (path, 4)
    changed = write(tmp_path, "b", prompt_tokens_N=np.int32([1]))
    assert describe_sources(open_sources(both, **how))["train"][0]["digest"] != part["digest"]
    assert changed == path


def changed(change):
    """The recorded experts with a change."""
    expert_TLK = recorded()["expert_TLK"].copy()
    change(expert_TLK)
    return expert_TLK


def put(token, layer, experts):
    return changed(lambda expert_TLK: expert_TLK.__setitem__((token, layer), experts))


REFUSED = {
    "a missing array": ({"id_T": None}, ["damaged", "id_T"]),
    "objects": ({"id_T": np.array([{}] * 17, object)}, ["damaged"]),
    "real numbers": ({"id_T": np.ones(17)}, ["signed integers"]),
    "another format": ({"format": np.int32(2)}, ["format 2", "reads 1"]),
    "a table of ids": ({"id_T": np.ones((17, 1), np.int32)}, ["dimensions"]),
    "fewer ids": ({"id_T": np.ones(16, np.int32)}, ["do not fit"]),
    "an empty text": ({"tokens_N": np.int32([5, 12, 0])}, ["do not fit"]),
    "a text more": ({"prompt_tokens_N": np.int32([1, 1])}, ["do not fit"]),
    "a prompt behind its text": ({"prompt_tokens_N": np.int32([6, 1, 6])}, ["do not fit"]),
    "sizes that add up past their type": (
        {"tokens_N": np.array([2**63 - 1, 2**63 - 1, 19])},
        ["do not fit"],
    ),
    "a layer less": ({"expert_TLK": changed(lambda x: None)[:, :2]}, ["shape (17, 2, 2)"]),
    "other layers": ({"layer_L": np.int32([0, 1, 2])}, ["[0, 1, 2]", "[1, 2, 4]"]),
    "more experts": ({"num_experts": np.int32(8)}, ["experts of a layer: 8", "the model 6"]),
    "one a token": ({"expert_TLK": changed(lambda x: None)[..., :1]}, ["of a token: 1"]),
    "an expert too many": ({"expert_TLK": put(3, 1, [0, 6])}, ["token 3, layer 1", "[0, 6]"]),
    "half of a choice": ({"expert_TLK": put(16, 2, [-1, 3])}, ["token 16, layer 2"]),
    "an expert twice": ({"expert_TLK": put(0, 0, [4, 4])}, ["token 0, layer 0", "[4, 4]"]),
    "no answer": ({"prompt_tokens_N": np.int32([5, 3, 9])}, ["nothing to learn"]),
    "an id too large": ({"id_T": np.full(17, 100, np.int32)}, ["token 0: id 100", "is 100"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_do_not_fit_are_refused(tmp_path, name):
    changes, told = REFUSED[name]
    if name == "objects":
        np.savez(tmp_path / "a.npz", **{**recorded(), **changes})
        path = str(tmp_path / "a.npz")
    else:
        path = write(tmp_path, **changes)
    with pytest.raises(InputError) as error:
        opened(path)
    for text in (path, *told):
        assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_no_such_file_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(b"text")
    with pytest.raises(InputError, match="recorded routing is damaged"):
        opened(str(path))
    with pytest.raises(InputError, match="must name files of moejax generate --routing"):
        opened(str(tmp_path / "none*.npz"))
