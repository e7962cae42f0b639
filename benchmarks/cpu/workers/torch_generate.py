"""The side of transformers in `generate.py`: its `generate`, and its continuous batching."""

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from protocol import Answers, serve_generation
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.streamers import BaseStreamer

PAGE, BATCH_TOKENS = 32, 512  # of continuous batching, on a CPU


class EachToken(BaseStreamer):
    """Calls a function with the next token of each prompt of a batch."""

    def __init__(self, add: Callable[[list[int]], None]):
        self.add, self.calls = add, 0

    def put(self, value: torch.Tensor) -> None:
        """Is called by `generate` with the prompts, then with the next token of each."""
        self.calls += 1
        if self.calls > 1:
            self.add(value.tolist())

    def end(self) -> None:
        """Is called at the end."""


class TorchSide:
    """An exported folder in float32, eager, with the attention that is the default."""

    def __init__(self, request: dict[str, Any]):
        torch.set_num_threads(request["threads"])
        self.request = request
        self.model = AutoModelForCausalLM.from_pretrained(request["folder"], dtype=torch.float32)
        self.model.eval()
        self.facts = _facts(self.model)

    def run(self, requests: list[dict[str, Any]], variant: str, answers: Answers) -> None:
        """Continues prompts.

        Args:
          variant: an implementation of experts, for one batch of all; "batches of N" for batches
            in turn; "continuous".
        """
        experts = variant if variant in ("grouped_mm", "eager") else "grouped_mm"
        self.model.set_experts_implementation(experts)
        # Continuous batching changes tensors that inference mode would freeze.
        with torch.no_grad():
            if variant == "continuous":
                self._continuous(requests, answers)
                return
            size = len(requests) if variant == experts else int(variant.rsplit(" ", 1)[1])
            for first in range(0, len(requests), size):
                self._static(requests, range(first, min(first + size, len(requests))), answers)

    def _static(self, requests: Any, numbers: range, answers: Answers) -> None:
        """Continues a batch by as many tokens as its longest continuation has."""
        longest = max(len(requests[n]["ids"]) for n in numbers)
        padding = [longest - len(requests[n]["ids"]) for n in numbers]
        ids = [
            [0] * missing + requests[n]["ids"] for n, missing in zip(numbers, padding, strict=True)
        ]
        mask = [[0] * missing + [1] * (longest - missing) for missing in padding]
        wanted = [requests[n]["tokens"] for n in numbers]
        grown = 0

        def add(tokens: list[int]) -> None:
            nonlocal grown
            for number, token, most in zip(numbers, tokens, wanted, strict=True):
                if grown < most:
                    answers.add(number, [token])
            grown += 1

        self.model.generate(
            torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            do_sample=False,
            max_new_tokens=max(wanted),
            eos_token_id=None,
            pad_token_id=0,
            streamer=EachToken(add),
        )

    def _continuous(self, requests: Any, answers: Answers) -> None:
        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        tokens = sum(len(r["ids"]) + r["tokens"] + PAGE for r in requests)
        batching = ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=-(-tokens // PAGE), max_batch_tokens=BATCH_TOKENS
        )
        with self.model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=batching, persistent_manager=True
        ) as manager:
            answers.begin()  # the cache is made
            for number, r in enumerate(requests):
                manager.add_request(
                    r["ids"], request_id=str(number), max_new_tokens=r["tokens"], streaming=True
                )
            known = [0] * len(requests)
            going = len(requests)
            while going:
                found = manager.get_result(timeout=60)
                if found is None:
                    raise RuntimeError("continuous batching gave nothing for a minute.")
                number, ids = int(found.request_id), found.generated_tokens
                answers.add(number, ids[known[number] :])
                known[number] = len(ids)
                going -= found.is_finished()


def _facts(model: torch.nn.Module) -> dict[str, Any]:
    return {
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "settings": {
            "attention": model.config._attn_implementation,
            "dtype": str(model.dtype),
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        },
        "parameters": sum(p.numel() for p in model.parameters()),
    }


if __name__ == "__main__":
    serve_generation(TorchSide)
