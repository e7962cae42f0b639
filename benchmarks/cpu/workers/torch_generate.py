"""The side of transformers in `generate.py`: its own `generate`, with its default cache."""

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from protocol import serve_generation
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer


class FirstToken(BaseStreamer):
    """Calls a function when the first token of each prompt is known."""

    def __init__(self, known: Callable[[], None]):
        self.known, self.calls = known, 0

    def put(self, value: torch.Tensor) -> None:
        """Is called by `generate` with the prompts, then with the next token of each."""
        self.calls += 1
        if self.calls == 2:
            self.known()

    def end(self) -> None:
        """Is called at the end."""


class TorchSide:
    """An exported folder in float32, eager, with the attention and experts that are the default."""

    def __init__(self, request: dict[str, Any]):
        torch.set_num_threads(request["threads"])
        self.model = AutoModelForCausalLM.from_pretrained(request["folder"], dtype=torch.float32)
        self.model.eval()
        self.facts = _facts(self.model)

    def generate(
        self, prompts: list[list[int]], tokens: int, first: Callable[[], None]
    ) -> list[list[int]]:
        """Continues prompts of the same length."""
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            found = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=tokens,
                eos_token_id=None,
                pad_token_id=0,
                streamer=FirstToken(first),
            )
        return found[:, ids.shape[1] :].tolist()

    def set_experts(self, name: str) -> None:
        """Changes the implementation of the experts in place."""
        self.model.set_experts_implementation(name)


def _facts(model: torch.nn.Module) -> dict[str, Any]:
    return {
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "settings": {
            "experts": model.config._experts_implementation,
            "attention": model.config._attn_implementation,
            "dtype": str(model.dtype),
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        },
        "parameters": sum(p.numel() for p in model.parameters()),
    }


if __name__ == "__main__":
    serve_generation(TorchSide)
