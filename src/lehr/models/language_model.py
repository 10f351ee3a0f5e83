"""A causal language model as lehr trains it: packs in, per-pair statistics out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lehr.data.shapes import Pack
from lehr.device import moved
from lehr.errors import Problem, RecipeError
from lehr.models import adapters, saving
from lehr.models.adapter_layers import AdapterSpec, LoraMixin
from lehr.models.attention import attention, use_segments
from lehr.models.attention_watch import AttentionWatch
from lehr.models.gates import use_gated_silu
from lehr.models.head import Head, TokenStats, divergence, head_of, token_stats
from lehr.models.nf4 import BLOCK, MARK, quantised_layers
from lehr.models.norms import use_fused_norms
from lehr.models.peft_format import read_adapter, write_adapter
from lehr.models.precision import autocast_dtype, compute_dtype, trained_dtype
from lehr.models.recompute import Keeps, Kind, Recomputation
from lehr.models.segments import plan_segments


class LanguageModel(nn.Module):
    """A transformers network, its tokenizer, and at most one adapter in training.

    network          the transformers causal language model, attending over segments
    tokenizer        its tokenizer, with the chat template in use
    name             what the recipe called it
    source           path or hub id that plain transformers can load the base from, or None
    new_rows         vocabulary ids that no training has seen yet (a template's new tokens)
    stored_dtype     of the weights in the base's files, whatever precision computes here
    notices          what was changed or found while loading, for the user
    adapter          what add_adapter made, or None
    precision        see lehr.models.precision; with fp8 this class computes in bf16, and the
                     training puts FP8 layers in while it lasts

    The network's own dropout is off: it would make the gradient depend on how a batch
    is cut. An adapter's dropout acts in training mode.
    """

    def __init__(
        self,
        network: Any,
        tokenizer: Any,
        name: str,
        *,
        precision: str = "fp32",
        source: str | None = None,
        new_rows: Sequence[int] = (),
        seed: int = 0,
        notices: Sequence[str] = (),
        stored_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.compute_dtype = compute_dtype(precision)
        self.network = network
        self.tokenizer = tokenizer
        self.config = network.config
        self.name, self.source, self.seed = name, source, seed
        self.new_rows = tuple(int(row) for row in new_rows)
        self.notices = [*notices, *_disable_dropout(network)]
        self.adapter: AdapterSpec | None = None
        self.stored_dtype = stored_dtype
        self.precision = precision
        self.trains_all = False
        self.head_chunk: int | None = None  # predicted positions whose logits exist at once
        self._recomputation: Recomputation | None = None
        self._attention_watch: AttentionWatch | None = None
        self.packs_exactly = True  # False: sequences are computed one by one (admission)
        # transformers drops the embedding's gradient at its padding id; where pad = eos that
        # would leave the end token half trained. Packs hold no padding.
        for module in network.modules():
            if isinstance(module, nn.Embedding):
                module.padding_idx = None
        network.requires_grad_(False)
        use_segments(network)
        use_fused_norms(network)
        use_gated_silu(network)

    @property
    def vocabulary_size(self) -> int:
        """Rows of the embedding: columns of the logits."""
        return int(self.network.get_input_embeddings().weight.shape[0])

    @property
    def device(self) -> torch.device:
        weight: Tensor = self.network.get_input_embeddings().weight
        return weight.device

    def hidden(self, pack: Pack) -> Tensor:
        """Final hidden states [T, d] of a pack, through the attention over segments."""
        plan = plan_segments(pack.segments, pack.tokens)
        if torch.is_grad_enabled():  # what is trained on: no reference, no evaluation
            plan.watch = self._attention_watch
        with self._autocast():
            states: Tensor = self.network.base_model(
                input_ids=moved(pack.ids, self.device)[None],
                position_ids=moved(pack.positions, self.device)[None],
                segments=plan,
                use_cache=False,
            )[0][0]
        if plan.calls == 0:
            raise RecipeError(
                Problem(
                    f"model {self.name}",
                    "an architecture whose attention can be exchanged "
                    "(this one ignores transformers' attention interface)",
                    self.config.model_type,
                )
            )
        return states.to(self.compute_dtype) if self._mixed else states

    def token_stats(
        self,
        hidden: Tensor,
        predict_from: Tensor,
        targets: Tensor,
        entropy: bool = False,
        argmax: bool = False,
    ) -> TokenStats:
        """Per-pair statistics [R] of hidden states [T, d] through the fused head."""
        return token_stats(
            hidden,
            predict_from,
            targets,
            self.head(),
            entropy=entropy,
            argmax=argmax,
            chunk=self.head_chunk,
        )

    def divergence(
        self,
        hidden_p: Tensor,
        hidden_q: Tensor,
        positions: Tensor,
        chunk: int | None = None,
        *,
        head_p: Head | None = None,
        head_q: Head | None = None,
    ) -> Tensor:
        """Exact KL(p || q) [R] in nats, without a graph.

        Where the head itself differs between the two sides (all weights or vocabulary
        rows train), pass `head().detached()` taken under each side's `as_of`.
        """
        own = self.head()
        return divergence(hidden_p, hidden_q, positions, head_p or own, head_q or own, chunk)

    def head(self) -> Head:
        """The head as it is now; `.detached()` survives a later `as_of`."""
        return head_of(self.network)

    def watch_attention(self, queries: int) -> None:
        """Sample the attention logits of so many queries of a segment from now on; 0: no more."""
        self._attention_watch = AttentionWatch(queries) if queries else None

    def largest_attention_logit(self) -> float | None:
        """Of the passes with gradients since it was asked last; None where none was sampled."""
        return None if self._attention_watch is None else self._attention_watch.take()

    # What trains

    def add_adapter(
        self,
        rank: int = 16,
        alpha: float | None = None,
        targets: str | Sequence[str] = "all-linear",
        dropout: float = 0.0,
        rows: Sequence[int] | None = None,
    ) -> None:
        """LoRA on `targets`, beside trained vocabulary `rows` (default: the model's new rows).

        Raises RecipeError for targets that match no layer; ValueError where an adapter
        is there already.
        """
        if self.adapter is not None:
            raise ValueError("this model has an adapter; fold_adapter() first")
        if rank < 1:
            raise RecipeError(Problem("adapter.rank", "a whole number of at least 1", rank))
        spec = AdapterSpec(
            rank=rank,
            alpha=float(alpha if alpha is not None else 2 * rank),
            dropout=dropout,
            targets=adapters.choose_targets(self.network, targets),
            rows=tuple(sorted(set(self.new_rows if rows is None else rows))),
        )
        self.network.requires_grad_(False)
        self.trains_all = False
        adapters.attach_adapter(self.network, spec, self.seed)
        for parameter in adapters.trained_tensors(self.network).values():
            parameter.data = parameter.data.to(trained_dtype(self.precision))
        self.adapter = spec
        untrained = sorted(set(self.new_rows) - set(spec.rows))
        if untrained:
            self.notices.append(
                f"the vocabulary rows {untrained} are new but will not train: "
                "the model cannot learn to write these tokens"
            )

    def set_adapter_dropout(self, dropout: float) -> None:
        """Dropout of the adapter in training: a stage may ask for another than its parent's."""
        if self.adapter is None:
            raise ValueError("this model has no adapter")
        for _, module in adapters.adapter_modules(self.network):
            if isinstance(module, LoraMixin):
                module.dropout = dropout
        self.adapter = replace(self.adapter, dropout=dropout)

    def train_all(self) -> None:
        """All weights train, in fp32 but for pure_bf16; products run in the model's precision."""
        if self.adapter is not None:
            raise ValueError("fold_adapter() before all weights train")
        if quantised_layers(self.network):
            raise ValueError("weights in four bits cannot train; load them without four_bits")
        self.network.to(trained_dtype(self.precision))
        self.network.requires_grad_(True)
        self.trains_all = True

    def trained(self) -> dict[str, nn.Parameter]:
        """Trainable tensors by stable name: peft's names for an adapter, else transformers'."""
        if self.trains_all:
            return dict(self.network.named_parameters())
        return adapters.trained_tensors(self.network)

    def state(self) -> dict[str, Tensor]:
        """Copies of the trained tensors on the CPU."""
        return {name: p.detach().cpu().clone() for name, p in self.trained().items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Set the trained tensors to a state() of this model; ValueError if it is another's."""
        trained = self.trained()
        _check_state(trained, state)
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(state[name])

    @contextmanager
    def as_of(self, state: Mapping[str, Tensor] | None) -> Iterator[None]:
        """The model as it was at `state` (None: the bare base, adapter off), for a while.

        Only pointers are swapped: afterwards every weight is bit for bit what it was.
        A backward pass belongs inside or outside, as its forward does.
        """
        if state is None:
            if self.trains_all:
                raise ValueError("all weights train: there is no bare base; keep a state() of it")
            modules = [module for _, module in adapters.adapter_modules(self.network)]
            before = [module.adapter_active for module in modules]
            adapters.set_active(self.network, False)
            try:
                yield
            finally:
                for module, active in zip(modules, before, strict=True):
                    module.adapter_active = active
            return
        trained = self.trained()
        _check_state(trained, state)
        kept = {name: parameter.data for name, parameter in trained.items()}
        try:
            for name, parameter in trained.items():
                parameter.data = state[name].detach().to(parameter.device, parameter.dtype)
            yield
        finally:
            for name, parameter in trained.items():
                parameter.data = kept[name]

    def fold_adapter(self) -> None:
        """Add the adapter to the base in fp32 (cast back to its stored dtype) and drop it."""
        if self.adapter is None:
            return
        if quantised_layers(self.network):
            raise ValueError("a base in four bits cannot hold the sum; save_merged dequantises")
        live = saving.base_weights(self.network)
        with torch.no_grad():
            for name, module in list(adapters.adapter_modules(self.network)):
                if f"{name}.weight" in live:
                    weight = module.weight
                    one = {f"{name}.weight": weight}
                    weight.copy_(self._merged(one, weight.dtype)[f"{name}.weight"])
        adapters.detach_adapter(self.network)
        self.adapter = None
        self.new_rows = ()
        self.network.requires_grad_(False)

    def drop_adapter(self) -> None:
        """Forget the adapter: the model is its bare base again (nothing happens without one)."""
        if self.adapter is not None:
            adapters.detach_adapter(self.network)
            self.adapter = None
            self.network.requires_grad_(False)

    def _merged(self, weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        return adapters.merged_weights(self.network, weights, dtype)

    # Files

    def save_adapter(self, folder: Path) -> None:
        """Adapter, tokenizer and chat template, as plain `peft` loads them."""
        if self.adapter is None:
            raise ValueError("this model has no adapter")
        base = self.source or self.name
        with saving.whole_folder(Path(folder)) as aside:
            write_adapter(self.network, self.adapter, self.state(), base, aside)
            saving.write_tokenizer(self.tokenizer, aside)
            if quantised_layers(self.network):
                described = {"base": base, "four_bits": "nf4", "block": BLOCK, "double": True}
                (aside / MARK).write_text(json.dumps(described) + "\n", encoding="utf-8")
            generation = getattr(self.network, "generation_config", None)
            if generation is not None:
                saving.normalise_generation_config(generation)
                generation.save_pretrained(str(aside))

    def load_adapter(self, folder: Path) -> None:
        """Make the adapter that save_adapter wrote the one in training.

        Raises RecipeError where files are missing or damaged, or do not fit this model
        (vocabulary rows beyond its embedding: both sizes are named).
        """
        folder = Path(folder)
        spec, tensors = read_adapter(folder, self.network)
        rows = self.vocabulary_size
        if spec.rows and max(spec.rows) >= rows:
            raise RecipeError(
                Problem(
                    str(folder),
                    f"a base with at least {max(spec.rows) + 1} vocabulary rows "
                    f"(this one has {rows}): the adapter trained rows that the base lacks",
                    max(spec.rows),
                )
            )
        self.add_adapter(spec.rank, spec.alpha, spec.targets, spec.dropout, spec.rows)
        try:
            self.load_state(tensors)
        except (ValueError, RuntimeError) as error:
            raise RecipeError(
                Problem(str(folder), f"an adapter of this model ({error})")
            ) from error

    def save_full(self, folder: Path) -> None:
        """All weights as they are stored, in transformers' format, with the tokenizer.

        Layers in four bits are dequantised into the type of the others.
        """
        if self.adapter is not None:
            raise ValueError("save_full has no place for an adapter; use save_merged")
        weights = saving.base_weights(self.network)
        dtype = next(t.dtype for t in weights.values() if t.is_floating_point())
        if quantised_layers(self.network):
            weights = self._merged(weights, dtype)
        saving.write_model(self.network, self.tokenizer, weights, Path(folder), dtype)

    def save_merged(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        """Base plus adapter: added in fp32, cast to `dtype`. The live weights stay as they are."""
        merged = self._merged(saving.base_weights(self.network), dtype)
        saving.write_model(self.network, self.tokenizer, merged, Path(folder), dtype)

    # How it computes

    def attention(self, name: str | None = None) -> AbstractContextManager[None]:
        """Another attention for a while (decoding with a cache): sdpa, or eager where needed."""
        return attention(self.network, name)

    def recompute(self, choice: Kind | Keeps) -> None:
        """What is computed again in the backward pass: less memory, the same gradient.

        none, full, selective, or for each block the names of the products that it keeps
        (models/recompute). Choose after the adapter is there. Raises ValueError for another
        word, and for a network without blocks.
        """
        if self._recomputation is not None:
            self._recomputation.stop()
            self._recomputation = None
        if choice != "none":
            self._recomputation = Recomputation(self.network, choice)

    @property
    def _mixed(self) -> bool:
        """Weights in fp32, products in something narrower."""
        return self.trains_all and autocast_dtype(self.precision) is not None

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.device.type == "meta":  # models/sizes casts there
            return nullcontext()
        dtype = autocast_dtype(self.precision) or torch.bfloat16
        return torch.autocast(self.device.type, dtype, enabled=self._mixed)


def _check_state(trained: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    missing = sorted(trained.keys() - state.keys())
    extra = sorted(state.keys() - trained.keys())
    if missing or extra:
        first = (missing or extra)[0]
        raise ValueError(
            f"the state is not of this model: {len(missing)} tensors missing, {len(extra)} unknown "
            f"(first: {first})"
        )
    for name, tensor in trained.items():
        if tensor.shape != state[name].shape:
            raise ValueError(
                f"{name} has shape {tuple(state[name].shape)}, expected {tuple(tensor.shape)}"
            )


def _disable_dropout(network: nn.Module) -> list[str]:
    found: set[float] = set()
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            found.add(module.p)
            module.p = 0.0
        for attribute in ("attention_dropout", "dropout", "hidden_dropout", "attn_dropout"):
            rate = getattr(module, attribute, None)
            if isinstance(rate, float):
                found.add(rate)
                setattr(module, attribute, 0.0)
    rates = sorted(found - {0.0})
    if not rates:
        return []
    listed = ", ".join(str(rate) for rate in rates)
    return [
        f"the model's own dropout ({listed}) is off: gradients must not depend on the batch's cut"
    ]
