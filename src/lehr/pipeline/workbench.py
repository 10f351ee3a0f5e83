"""The one live model of a run: it becomes whatever state is wanted, and trains from there.

Weights are loaded once; adapters come and go by pointer. A new set of weights (a stage
that trains all of them, a folded adapter) is the only reason to load again.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lehr.data.encoding import Encoder
from lehr.data.templates import Template
from lehr.device import CPU
from lehr.errors import Problem, RecipeError
from lehr.generation.admission import decode_in_place
from lehr.models.language_model import LanguageModel
from lehr.models.loading import load_model
from lehr.models.tokenizer import stop_ids_of
from lehr.pipeline.events import Events
from lehr.pipeline.folding import folded_base
from lehr.pipeline.keys import in_four_bits
from lehr.pipeline.states import State


class Workbench:
    """Holds the model in memory and knows which state it is in."""

    def __init__(
        self,
        recipe: Any,
        run_folder: Path,
        precision: str,
        corpus: Callable[[], Iterable[str]],
        events: Events,
        device: torch.device = CPU,
    ) -> None:
        self.device = device
        self.recipe = recipe
        self.run_folder = run_folder
        self.precision = precision
        self.corpus = corpus
        self.events = events
        self.base = State("base", "")
        self._model: LanguageModel | None = None
        self._encoder: Encoder | None = None
        self._weights: State | None = None  # whose full weights are loaded
        self._mode = ""  # "all" or "frozen"
        self.packs_exactly = True  # by the admission probe, for every model of this run
        self.decodes_in_place = False  # settled by the plan, for a base in four bits
        self.is_tiny = recipe.model.startswith("tiny:")
        self.four_bits = in_four_bits(recipe)
        self.stored_dtype: torch.dtype | None = None  # of the base's files
        self._folded: tuple[Path, torch.dtype, str] | None = None
        self._looked_for_adapter = False

    @property
    def model(self) -> LanguageModel:
        assert self._model is not None, "no model is loaded yet"
        return self._model

    @property
    def encoder(self) -> Encoder:
        assert self._encoder is not None, "no model is loaded yet"
        return self._encoder

    def load_base(self) -> LanguageModel:
        """Load the recipe's model; its key is given later by `name_base`."""
        self._load_weights(self.base)
        if self._folded is not None:
            self.stored_dtype = self._folded[1]
            self.model.notices.insert(0, self._folded[2])
        return self.model

    def name_base(self, key: str) -> None:
        """Give the base its key, once data, template and model are known."""
        self.base = self._weights = State("base", key)

    # -- becoming a state -----------------------------------------------------

    def become(self, state: State) -> LanguageModel:
        """Let the model be `state`, whatever it was before."""
        if self._mode == "all" and self._weights is not None and self._weights.key != state.key:
            self._drop()
        self._load_weights(state.weights)
        if state.kind == "adapter":
            self._attach(state)
        else:
            self.model.drop_adapter()
        self.model.eval()
        return self.model

    def train_adapter(self, parent: State, adapter: Any) -> Mapping[str, Tensor]:
        """Make the model ready to train an adapter from `parent`; the reference's tensors."""
        if self._mode == "all":
            self._drop()
        self.become(parent)
        if parent.kind != "adapter":
            self.model.add_adapter(
                rank=adapter.rank,
                alpha=adapter.alpha,
                targets=adapter.targets,
                dropout=adapter.dropout,
            )
        self.model.set_adapter_dropout(adapter.dropout)
        self.model.train()
        return self.model.state()

    def train_all(self, parent: State, folder: Path) -> Mapping[str, Tensor]:
        """Make the model ready to train every weight from `parent`; the parent's tensors.

        The parent's weights stay on disk (memory-mapped), not in a second model.
        """
        if parent.kind == "adapter":
            raise RecipeError(
                Problem(
                    "stages",
                    "fold_parent: true before a stage that trains all weights: its parent "
                    "trained an adapter",
                )
            )
        self._drop()
        self._load_weights(parent, trained=True)
        self.model.train_all()
        self._mode, self._weights = "all", None  # from here on the model is no saved state
        path = folder / "parent.safetensors"
        save_file(self.model.state(), path)
        self.model.train()
        return load_file(path)

    def fold(self, parent: State, folder: Path) -> State:
        """Add the parent's adapter to its base (in fp32), as new weights in `folder`."""
        if self.precision != "fp32":  # the live base has lost bits
            self._drop()
            model = self.in_fp32(parent)
        else:
            model = self.become(parent)
        shutil.rmtree(folder, ignore_errors=True)  # of a start that was killed
        model.save_merged(folder / "weights", torch.float32)
        return State(
            "weights", parent.key + ":folded", folder, untrained_rows=parent.untrained_rows
        )

    def keep(self, state: State) -> None:
        """Write the model, just trained, as `state`'s files."""
        if state.kind == "adapter":
            self.model.save_adapter(state.files)
        else:
            self.model.save_full(state.files)
            self._weights, self._mode = state, "all"
        state.save(self.run_folder)

    def whereabouts(self, state: State) -> tuple[str, Path, str]:
        """(spec, folder, template) that `load_model` takes for a state with weights of its own."""
        if state.kind != "base":
            return str(state.files), self.run_folder, "auto"
        template = self.recipe.template
        if template not in ("auto", "chatml"):
            template = str(self.recipe.path_of(template))
        if not self._looked_for_adapter:
            self._folded, self._looked_for_adapter = folded_base(self.recipe, self.run_folder), True
        if self._folded is not None:
            return str(self._folded[0]), self.run_folder, template
        return self.recipe.model, self.recipe.folder, template

    def in_fp32(self, state: State) -> LanguageModel:
        """A model of its own, on the CPU in fp32, that is `state`: what an export must equal."""
        spec, folder, template = self.whereabouts(state.weights)
        model = load_model(
            spec,
            corpus=self.corpus,
            template=template,
            folder=folder,
            precision="fp32",
            trust_remote_code=self.recipe.trust_remote_code,
            seed=self.recipe.seed,
            four_bits=self.four_bits,
        )
        decode_in_place(model.network, self.decodes_in_place)
        if state.kind == "adapter":
            model.load_adapter(state.files)
        return model

    # -- loading --------------------------------------------------------------

    def _drop(self) -> None:
        if self._model is None:
            return
        self._model = None
        self._weights = None
        self._mode = ""
        gc.collect()

    def _load_weights(self, state: State, trained: bool = False) -> None:
        if self._weights is not None and self._weights.key == state.key:
            return
        self._drop()
        spec, folder, template = self.whereabouts(state)
        self._model = load_model(
            spec,
            corpus=self.corpus,
            template=template,
            folder=folder,
            precision=self.precision,
            trust_remote_code=self.recipe.trust_remote_code,
            seed=self.recipe.seed,
            all_weights=trained,
            four_bits=self.four_bits,
            progress=lambda line: self.events.emit("notice", line),
            device=self.device,
        )
        self._model.packs_exactly = self.packs_exactly
        decode_in_place(self._model.network, self.decodes_in_place)
        self._weights, self._mode = state, "frozen"
        if state.kind != "base":
            self._model.new_rows = state.untrained_rows
        self._encoder = self._make_encoder(self._model)
        if self.stored_dtype is None:
            self.stored_dtype = self._model.stored_dtype

    def _make_encoder(self, model: LanguageModel) -> Encoder:
        template = None
        if model.tokenizer.chat_template:
            template = Template.from_tokenizer(model.tokenizer)
        return Encoder(
            model.tokenizer,
            template,
            date=self.recipe.date,
            system=self.recipe.system,
            stop_ids=stop_ids_of(model.network),
        )

    def _attach(self, state: State) -> None:
        if self.model.adapter is None:
            self.model.load_adapter(state.files)
        else:
            self.model.load_state(state.tensors())
