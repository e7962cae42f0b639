"""Writes chat_from_transformers.json: what Hugging Face's code makes of conversations.

Needs `pip install transformers==5.23.0 jinja2`, in an environment of its own.
Command:  PYTHONPATH=. python tests/golden/chat_from_transformers.py
"""

import json
import tempfile
from pathlib import Path

import transformers

from tests.data.chats import CONVERSATIONS, TEMPLATES, TOKENIZERS, write_model


def case(tokenizer: str, template: str, conversation: str) -> dict:
    """Ids of a conversation, and of a tagged template the mask of the assistant's tokens."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder), tokenizer)
        library = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(path), bos_token="<s>", eos_token="</s>"
        )
    found = library.apply_chat_template(
        CONVERSATIONS[conversation],
        chat_template=TEMPLATES[template],
        return_dict=True,
        return_assistant_tokens_mask=template == "tagged",
    )
    mask = found.get("assistant_masks")
    return {
        "case": [tokenizer, template, conversation],
        "ids": found["input_ids"],
        **({} if mask is None else {"mask": mask}),
    }


def main() -> None:
    """Writes the file beside this one."""
    found = {
        "versions": {"transformers": transformers.__version__},
        "cases": [
            case(tokenizer, template, conversation)
            for tokenizer in TOKENIZERS
            for template in TEMPLATES
            for conversation in CONVERSATIONS
        ],
    }
    path = Path(__file__).with_suffix(".json")
    path.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
