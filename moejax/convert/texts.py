"""The small files of an export: tokenizer, chat template, ids of the tokens around texts.

A tokenizer that came with the weights is copied as it is. Otherwise the export takes the tokenizer
of the run's token files, and makes it begin texts as the run's documents begin. Both get the chat
template that wrote the run's conversations, and the token that ends its answers.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moejax.checkpoint.find import Saved
from moejax.config.schema import DataConfig
from moejax.data.named_tokens import CONFIG, SPECIAL, ids_in, read_settings
from moejax.data.prepare.chat_template import TEMPLATE
from moejax.data.prepare.control_tokens import bytes_tokenizer
from moejax.data.sidecar import ChatForm
from moejax.data.sources import describe_tokens, is_tokenizer_of
from moejax.data.tokenizer import BYTES, ByteTokenizer, Ends, begin_of_document
from moejax.errors import InputError, write_whole
from moejax.hf.origin import GENERATION, copy_small_files

TOKENIZER, PROCESSOR_TEMPLATE = "tokenizer.json", "chat_template.json"
EOS, BOS = "eos_token_id", "bos_token_id"
SPECIAL_IDS = (BOS, EOS, "pad_token_id")
OF_CODE = ("auto_map", "custom_pipelines")  # name Python files, and code is never copied


class Texts(NamedTuple):
    """The facts about a run's texts that an export needs.

    Attributes:
      origin: directory of the small files that came with the first weights.
      came: whether the tokenizer among them is the one of the run's texts.
      ends: the tokens around documents; None if they are unknown.
      tokenizer: the tokenizer.json of the run's token files; None for bytes, or if it is lost.
      is_bytes: whether ids are bytes.
      chat: the form of the run's conversations.
    """

    origin: Path | None
    came: bool
    ends: Ends | None
    tokenizer: Path | None = None
    is_bytes: bool = False
    chat: ChatForm | None = None


def texts_of(saved: Saved, data: DataConfig, origin: Path | None) -> Texts:
    """Returns the known facts about the texts of a checkpoint's run."""
    file = None if origin is None else origin / TOKENIZER
    file = file if file is not None and file.is_file() else None
    described = describe_tokens(data, saved.path.parents[:2])
    came = file is not None and is_tokenizer_of(file, saved.step, data, described)
    if came and saved.step == 0:
        return Texts(origin, came, None)
    if described is not None:
        own, is_bytes = described.sidecar, described.sidecar.tokenizer == BYTES
        return Texts(origin, came, own.ends, described.tokenizer_file, is_bytes, own.chat)
    if data.source == "stdlib":
        return Texts(origin, came, Ends(ByteTokenizer.eos_id, None), is_bytes=True)
    return Texts(origin, came, None)


def special_ids(texts: Texts, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `config.json` entries of the tokens that begin and end texts.

    Args:
      config: the other keys of the file.
    """
    ends = texts.ends
    answers = [] if texts.chat is None else texts.chat.end_ids
    if texts.came or (texts.origin is not None and ends is None):
        generation = {} if texts.origin is None else read_settings(texts.origin / GENERATION)
        given = [*ids_in(config.get(EOS)), *ids_in(generation.get(EOS))]
        found = [*answers, *given, *(() if ends is None else (ends.eos_id,))]
        return {EOS: _one_or_all(found)} if set(found) != set(given) else {}
    # Libraries default to a family's ids, which are other tokens in this vocabulary.
    if ends is None:
        return dict.fromkeys(SPECIAL_IDS)
    end = _one_or_all([*answers, ends.eos_id])
    return {"pad_token_id": None, BOS: begin_of_document(ends), EOS: end}


def write_texts(folder: Path, texts: Texts) -> None:
    """Writes the tokenizer and the chat template into an existing folder."""
    if texts.origin is not None and (texts.came or texts.ends is None):
        copy_small_files(texts.origin, folder, config=False)
        _leave_code_out(folder)
    elif texts.tokenizer is not None or texts.is_bytes:
        _write_own_tokenizer(folder, texts)
    if texts.chat is not None:
        _write_template(folder, texts.chat)


def write_generation(folder: Path, config: Mapping[str, Any], changed: bool) -> None:
    """Writes `generation_config.json`, or the ids that changed into the one that was copied.

    Args:
      config: the export's `config.json`.
      changed: whether its ids differ from the ids that came with the weights.
    """
    known = {name: config[name] for name in SPECIAL_IDS if config.get(name) is not None}
    path = folder / GENERATION
    if not path.is_file():
        _write_json(path, {"_from_model_config": True, **known})
    elif changed:
        _write_json(path, {**read_settings(path), **known})


def without_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration without keys that name files of code."""
    return {name: value for name, value in config.items() if name not in OF_CODE}


def _one_or_all(ids: Iterable[int]) -> int | list[int]:
    """Returns the only id, or all of them once, in their order."""
    unique = list(dict.fromkeys(ids))
    return unique[0] if len(unique) == 1 else unique


def _leave_code_out(folder: Path) -> None:
    """Takes the names of a tokenizer's code out of its settings."""
    settings = read_settings(folder / CONFIG)
    if "auto_map" in settings:
        kept = without_code(settings)
        if (folder / TOKENIZER).is_file():
            kept["tokenizer_class"] = "PreTrainedTokenizerFast"
        _write_json(folder / CONFIG, kept)


def _write_own_tokenizer(folder: Path, texts: Texts) -> None:
    """Writes the tokenizer of the run's token files, which begins texts as documents begin."""
    assert texts.ends is not None, "token files say the tokens around documents"
    content = bytes_tokenizer() if texts.tokenizer is None else _read_tokenizer(texts.tokenizer)
    eos = _text_of(content, texts.ends.eos_id)
    begin_id = begin_of_document(texts.ends)
    begin = _text_of(content, begin_id)
    content["post_processor"] = _beginning_with(begin, begin_id)
    _write_json(folder / TOKENIZER, content)
    settings = {"bos_token": begin, "eos_token": eos, "clean_up_tokenization_spaces": False}
    if texts.chat is not None:
        # Its template writes these by name.
        for name in ("bos_token", "eos_token"):
            if name in texts.chat.template and name not in texts.chat.tokens:
                del settings[name]
        settings |= texts.chat.tokens
    _write_json(folder / CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", **settings})


def _write_template(folder: Path, chat: ChatForm) -> None:
    """Writes a chat template, and names the token that ends its answers."""
    write_whole(folder / TEMPLATE, chat.template)
    (folder / PROCESSOR_TEMPLATE).unlink(missing_ok=True)
    content = _read_tokenizer(folder / TOKENIZER) if (folder / TOKENIZER).is_file() else None
    for name in (CONFIG, SPECIAL):
        if not (settings := read_settings(folder / name)):
            continue
        settings.pop("chat_template", None)
        # A template that writes eos_token means the one that it was prepared with.
        if content and chat.end_ids and "eos_token" not in chat.template:
            settings["eos_token"] = _text_of(content, chat.end_ids[0])
        _write_json(folder / name, settings)


def _read_tokenizer(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"tokenizer is damaged. {path}: {' '.join(str(error).split())[:160]}. It must be a "
            f"tokenizer.json. Copy it again."
        ) from error


def _text_of(content: Mapping[str, Any], token_id: int) -> str:
    """Returns the text of a token of a tokenizer.json."""
    for token in content.get("added_tokens") or ():
        if token["id"] == token_id:
            return token["content"]
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):  # of texts and scores
        return vocabulary[token_id][0]
    return next(text for text, id in vocabulary.items() if id == token_id)


def _beginning_with(token: str, token_id: int) -> dict[str, Any]:
    """Returns the part of a tokenizer.json that puts a token in front of texts."""

    def begun(name: str, place: int) -> list[dict[str, Any]]:
        special = {"SpecialToken": {"id": token, "type_id": place}}
        return [special, {"Sequence": {"id": name, "type_id": place}}]

    return {
        "type": "TemplateProcessing",
        "single": begun("A", 0),
        "pair": [*begun("A", 0), *begun("B", 1)],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def _write_json(path: Path, content: Any) -> None:
    write_whole(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
