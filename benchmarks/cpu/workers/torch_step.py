"""The PyTorch side of `step.py`: transformers' Mixtral, trained the usual way."""

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from protocol import serve
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM


class TorchSide:
    """MixtralForCausalLM with random weights, AdamW and clipping; eager, float32."""

    def __init__(self, request: dict[str, Any]):
        torch.set_num_threads(request["threads"])
        torch.manual_seed(0)
        cfg = MixtralConfig(
            **request["mixtral"],
            output_router_logits=True,  # the router's loss is part of the loss
            use_cache=False,
            attn_implementation="sdpa",
            experts_implementation=request["experts"],
        )
        self.model = MixtralForCausalLM(cfg).float().train()
        self.clip_norm = request["clip_norm"]
        self.optimizer = _adamw(self.model, **request["adamw"])
        self.facts = _facts(self.model, self._grouped_products(request))

    def place(self, token_BT: np.ndarray) -> torch.Tensor:
        """Labels are the tokens: the model shifts them itself."""
        return torch.from_numpy(token_BT).long()

    def step(self, token_BT: torch.Tensor) -> torch.Tensor:
        """Takes one step."""
        loss = self.model(input_ids=token_BT, labels=token_BT).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def multiplier(self, size: int) -> Callable[[], None]:
        """An eager matrix product."""
        x, out = torch.ones(size, size), torch.empty(size, size)

        def multiply() -> None:
            torch.mm(x, x, out=out)

        return multiply

    def set_experts(self, name: str) -> None:
        """Changes the implementation of the experts in place."""
        self.model.set_experts_implementation(name)

    def _grouped_products(self, request: dict[str, Any]) -> int:
        """Grouped matrix products of one forward pass: counted, because transformers may fall back.

        Raises:
          RuntimeError: grouped_mm was asked for and some expert layer does without.
        """
        token_BT = torch.zeros(1, request["positions"], dtype=torch.long)
        loss = self.model(input_ids=token_BT, labels=token_BT).loss
        found = _count_nodes(loss.grad_fn, "GroupedMmBackward0")
        wanted = 2 * self.model.config.num_hidden_layers  # gate and up together, then down
        if request["experts"] == "grouped_mm" and found != wanted:
            raise RuntimeError(f"{found} grouped matrix products in forward instead of {wanted}.")
        return found


def _adamw(model: nn.Module, *, weight_decay: float, **settings: Any) -> torch.optim.AdamW:
    """AdamW that decays matrices and not norm scales, as moejax does; one fused kernel."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **settings, fused=True)


def _count_nodes(root: Any, name: str) -> int:
    """Operations of that name in the graph that backward would walk."""
    seen, waiting = set(), [root]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [parent for parent, _ in node.next_functions]
    return sum(node.name() == name for node in seen)


def _facts(model: MixtralForCausalLM, grouped_products: int) -> dict[str, Any]:
    return {
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "settings": {
            "experts": model.config._experts_implementation,
            "grouped_products_in_forward": grouped_products,
            "attention": model.config._attn_implementation,
            "optimizer": "AdamW, fused",
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        },
        "parameters": sum(p.numel() for p in model.parameters()),
    }


if __name__ == "__main__":
    serve(TorchSide)
