"""Is an export what was trained? Both sides computed in fp32, the other by plain tools.

Compared: the ids of rendered prompts, log-probabilities of held-out answers, greedy
text. A file in fp32 must agree to 1e-4; a file that was cast loses something, which is
measured as KL and as changed first choices where the choice was clear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lehr.data.shapes import Encoded, Message
from lehr.models.bitsandbytes import before_peft
from lehr.models.gguf_files import quiet_transformers
from lehr.models.nf4 import BLOCK, Nf4Weight

SAME_LOG_PROBABILITY = 1e-4
CAST_KL_NATS = 1e-3
CLEAR_MARGIN_NATS = 0.05
GREEDY_TOKENS = 24


@dataclass(frozen=True)
class Parity:
    """How far an export is from what was trained.

    gap            largest difference of a token's log-probability, nats
    kl             mean KL(trained || export) per position, nats
    flips          positions whose likeliest token changed although the choice was clear
    same_ids       rendered prompts have the same ids
    same_text      greedy answers are the same (asked of fp32 files only)
    cast           the file holds fewer bits than fp32
    """

    gap: float
    kl: float
    flips: int
    positions: int
    same_ids: bool
    same_text: bool
    cast: bool

    @property
    def problem(self) -> str:
        """Why the export is refused, or ""."""
        if not self.same_ids:
            return "its rendered prompts have other ids"
        if self.cast:
            if self.kl > CAST_KL_NATS:
                return f"KL {self.kl:.2e} nats a token, limit {CAST_KL_NATS:g}"
            if self.flips:
                return f"{self.flips} of {self.positions} clear first choices changed"
            return ""
        if self.gap > SAME_LOG_PROBABILITY:
            return f"log-probabilities differ by {self.gap:.2e}, limit {SAME_LOG_PROBABILITY:g}"
        if not self.same_text:
            return "its greedy answers differ"
        return ""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "problem": self.problem}


@dataclass(frozen=True)
class Trained:
    """The trained model's side: logits in fp32 and greedy answers."""

    sequences: Sequence[Encoded]
    logits: Sequence[Tensor]
    prompts: Sequence[tuple[Message, ...]]
    prompt_ids: Sequence[list[int]]
    answers: Sequence[list[int]]


def trained_side(
    model: Any, encoder: Any, sequences: Sequence[Encoded], prompts: Sequence[tuple[Message, ...]]
) -> Trained:
    """What the trained model (in fp32) says; `sequences` have no branches."""
    from lehr.data.packing import single
    from lehr.generation.decode import generate

    model.eval()
    logits = []
    with torch.no_grad():
        for one in sequences:
            hidden = model.hidden(single(0, one))
            logits.append(model.head().detached().logits(hidden).float())
    ids = [list(encoder.prompt_ids(messages)) for messages in prompts]
    written = generate(
        model, ids, max_new_tokens=GREEDY_TOKENS, stop_ids=encoder.stop_ids, batch_size=1
    )
    return Trained(sequences, logits, prompts, ids, [list(one.ids) for one in written])


def compare(
    trained: Trained, network: Any, tokenizer: Any, stops: Sequence[int], cast: bool
) -> Parity:
    """The export's side by plain transformers (or PEFT), against the trained side."""
    gap = kl = 0.0
    flips = positions = 0
    with torch.no_grad():
        for one, ours in zip(trained.sequences, trained.logits, strict=True):
            theirs = network(input_ids=one.ids[None]).logits[0].float()
            width = min(ours.shape[-1], theirs.shape[-1])
            p = torch.log_softmax(ours[:-1, :width].double(), -1)
            q = torch.log_softmax(theirs[:-1, :width].double(), -1)
            targets = one.ids[1:, None]
            gap = max(gap, float((p - q).gather(1, targets).abs().max()))
            kl += float((p.exp() * (p - q)).sum(-1).sum())
            top = p.topk(2, dim=-1).values
            clear = (top[:, 0] - top[:, 1]) > CLEAR_MARGIN_NATS
            flips += int((clear & (p.argmax(-1) != q.argmax(-1))).sum())
            positions += p.shape[0]
        same_ids = all(
            _rendered(tokenizer, messages) == ids
            for messages, ids in zip(trained.prompts, trained.prompt_ids, strict=True)
        )
        same_text = all(
            _greedy(network, ids, stops) == answer
            for ids, answer in zip(trained.prompt_ids, trained.answers, strict=True)
        )
    return Parity(gap, kl / max(1, positions), flips, positions, same_ids, same_text, cast)


def _rendered(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _greedy(network: Any, ids: Sequence[int], stops: Sequence[int]) -> list[int]:
    prompt = torch.tensor([list(ids)])
    written = network.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=GREEDY_TOKENS,
        do_sample=False,
        eos_token_id=list(stops),
        pad_token_id=min(stops),
    )
    return [int(token) for token in written[0, len(ids) :]]


def read_plain(path: Path, kind: str, four_bits: bool = False) -> tuple[Any, Any]:
    """An export as anybody would load it, in fp32.

    four_bits  an adapter over NF4: bitsandbytes puts its base into four bits, in fp32 arithmetic
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loader: Any = AutoModelForCausalLM
    settings: dict[str, Any] = {"dtype": torch.float32}
    if kind == "adapter":
        before_peft()
        from peft import AutoPeftModelForCausalLM

        loader = AutoPeftModelForCausalLM
        if four_bits:
            settings |= four_bit_settings()
    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(str(path))
        network = loader.from_pretrained(str(path), **settings)
    network.eval()
    if kind == "adapter" and four_bits:
        _in_plain_products(network)
    return network, tokenizer


def four_bit_settings() -> dict[str, Any]:
    """What transformers has to be told for the base of an adapter that lehr trained over NF4."""
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    return {"quantization_config": config, "device_map": {"": "cpu"}}


def _in_plain_products(network: Any) -> None:
    """Keep bitsandbytes' layers from two things that their CPU code does to numbers.

    On processors that multiply bf16 it computes in bf16 with scales in bf16, whatever type is
    asked; and rows that are not whole blocks it misreads (models/nf4).
    """
    from bitsandbytes.nn import Linear4bit

    for layer in network.modules():
        if isinstance(layer, Linear4bit):
            layer.support_avx512bf16_for_cpu = False
            if layer.in_features % BLOCK:
                layer.forward = partial(_as_rows_of_blocks, layer)


def _as_rows_of_blocks(layer: Any, x: Tensor) -> Tensor:
    own = Nf4Weight.from_state(layer.weight.data, layer.weight.quant_state)
    return torch.nn.functional.linear(x, own.dense(x.dtype), layer.bias)
