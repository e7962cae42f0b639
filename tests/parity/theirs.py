"""What transformers computes with an exported folder: eager, in float32 on the CPU."""

import json
import warnings
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import MtpModel

from tests.golden.make_models import gradient_tensors, load
from tests.hf.random_models import draw_all, write_folder

# Which is no model of texts alone there.
WITH_IMAGES = transformers.Mistral3Config, transformers.Mistral3ForConditionalGeneration
AutoModelForCausalLM.register(*WITH_IMAGES, exist_ok=True)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def with_images(folder: Path, text: dict) -> torch.nn.Module:
    """A model of images and texts around a text model, with drawn weights; writes its folder."""
    inside = {key: value for key, value in text.items() if key != "architectures"}
    images = {"hidden_size": 16, "intermediate_size": 8}
    if text["model_type"] == "gemma4_text":
        made, kind = transformers.Gemma4Config, transformers.Gemma4ForConditionalGeneration
        inside["pad_token_id"] = 0  # which stands for images in the text model's input
        images |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
        images |= {"head_dim": 8, "patch_size": 4, "position_embedding_size": 16}
    elif text["model_type"] == "mistral4":
        made, kind = transformers.Mistral3Config, transformers.Mistral3ForConditionalGeneration
        images |= {"model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2}
        images |= {"head_dim": 8, "patch_size": 4, "image_size": 16}
    else:
        made, kind = transformers.Qwen3_5MoeConfig, transformers.Qwen3_5MoeForConditionalGeneration
        images |= {"depth": 1, "num_heads": 2, "num_position_embeddings": 4}
        images |= {"out_hidden_size": text["hidden_size"]}
    config = made(
        text_config=inside,
        vision_config=images,
        tie_word_embeddings=text["tie_word_embeddings"],
    )
    kind(config).float().save_pretrained(folder)
    shapes = {name: x.shape for name, x in load_file(folder / "model.safetensors").items()}
    write_folder(folder, json.loads((folder / "config.json").read_text()), draw_all(shapes))
    model, info = kind.from_pretrained(
        folder,
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
        output_loading_info=True,
    )
    assert not any(info.values()), info
    return model.eval()


def with_adapter(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    """The model with an adapter of peft; every tensor of the adapter has a place."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of keys that are not found
        warnings.simplefilter("ignore", FutureWarning)  # of what peft calls in transformers
        return peft.PeftModel.from_pretrained(model, folder).eval()


def logits(model: torch.nn.Module, token_BT: np.ndarray) -> np.ndarray:
    """The logits of all positions, [B, T, V]."""
    with torch.no_grad():
        return model(input_ids=torch.tensor(token_BT).long(), use_cache=False).logits.numpy()


def continued(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """The greedy continuation, with the library's own generation and cache."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=count,
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )
    return found[0, len(prompt) :].tolist()


def written(folder: Path, prompt: str, count: int, *, chat: bool) -> tuple[list[int], str]:
    """A prompt's ids and its greedy continuation, all by the settings in the folder."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), load(folder)
    if chat:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    else:
        ids = tokenizer(prompt, return_tensors="pt")
    found = model.generate(**ids, do_sample=False, max_new_tokens=count)[0].tolist()
    before = ids["input_ids"][0].tolist()
    return before, tokenizer.decode(found[len(before) :], skip_special_tokens=True)


def loss_and_gradients(
    model: torch.nn.Module, token_BT: np.ndarray
) -> tuple[float, dict[str, np.ndarray]]:
    """The mean loss of the next tokens, and its gradients by the names of tensors in files.

    The model's parameters are gradients afterwards.
    """
    ids = torch.tensor(token_BT).long()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), gradient_tensors(model)


def expect_layer(monkeypatch: pytest.MonkeyPatch, folder: Path, layer: int) -> None:
    """Makes the model's class leave out that layer of files, as it does the published one's."""
    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    layers = [rf"model\.layers\.{layer}\..*"]
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", layers)


def losses_ahead(model: torch.nn.Module, token_BT: np.ndarray) -> list[float]:
    """The mean loss of the tokens after the next, of each sequence, by the module for drafts."""
    module = MtpModel.from_pretrained(model).eval()
    ids = torch.tensor(token_BT).long()
    with torch.no_grad():
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        places = torch.arange(1, ids.shape[1])[None]
        hidden = module.forward_layer(0, hidden[:, :-1], places, None, input_ids=ids[:, 1:])
        logits = module._project_to_logits(hidden)[:, :-1]
    nll = torch.nn.functional.cross_entropy(logits.mT, ids[:, 2:], reduction="none")
    return nll.mean(dim=1).tolist()
