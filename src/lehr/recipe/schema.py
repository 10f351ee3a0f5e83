"""The recipe: every key, its type, its bounds and its default, as frozen data.

Nothing here reads files or decides between keys: `loading` turns text into these
classes, `resolve` fills what depends on other keys. A key that stands here is read
by something outside this folder (tests/recipe/test_witness.py holds that).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from lehr.recipe.fields import (
    AutoCount,
    AutoThreads,
    BelowOne,
    Count,
    DeviceName,
    Epochs,
    Length,
    Name,
    NotNegative,
    Number,
    PartialShare,
    Positive,
    PowerOfTwo,
    Rows,
    Section,
    Share,
    ShareOrUpdates,
    Text,
    Truth,
    Updates,
    Whole,
    as_decay,
    as_default,
    as_guard,
    as_list,
    as_nothing,
    as_recompute,
    as_scale,
    as_scaling,
)
from lehr.recipe.stability import AdaptiveClip, Guarding, Restart

StageKind = Literal["pretrain", "sft", "preference"]
Format = Literal["auto", "text", "chat", "pair", "labelled", "alpaca", "sharegpt", "completion"]
TrainOn = Literal["assistant", "last", "completion"]

# What `gates.improve` may ask of a held-out source after a stage of each kind;
# the first one is the default.
IMPROVE_MEASURES: dict[str, tuple[str, ...]] = {
    "pretrain": ("bits_per_byte", "loss"),
    "sft": ("loss",),
    "preference": ("accuracy",),
}

# Harms that `gates.protect` may limit. Their default limits live with the evaluation,
# which knows what the items at hand resolve.
PROTECT_MEASURES = (
    *("forgetting", "over_refusal", "refusal", "sycophancy", "regressive_flips"),
    *("facts", "skills", "choice"),
)

# What `suites` may measure without gating.
SUITES = (
    "forgetting",
    "skills",
    "facts",
    "choice",
    "refusal",
    "over_refusal",
    "sycophancy",
    "kl",
)


class Adapter(Section):
    """Low-rank matrices that are trained beside frozen weights, or `none`: all weights train."""

    kind: Literal["lora", "qlora", "none"] = Field(
        default="lora", description="qlora: the frozen base is held in four bits"
    )
    rank: Count = 16
    alpha: Positive | None = Field(
        default=None, description="scale is alpha / rank; 2 x rank where it is not given"
    )
    dropout: BelowOne = 0.0
    targets: Literal["all-linear"] | list[Text] = Field(
        default="all-linear", description="all-linear, or names of linear layers"
    )


class Source(Section):
    """A named set of rows: from files, or made by the microworld."""

    path: Text | list[Text] | None = Field(default=None, description="file, or list of files")
    builtin: Literal["python-docstrings"] | None = Field(
        default=None, description="text that every machine has, instead of a file"
    )
    microworld: Literal["text", "chats", "pairs", "refusals", "claims"] | None = Field(
        default=None, description="rows made by the synthetic policy world instead of a file"
    )
    rows: Annotated[Count | None, BeforeValidator(as_nothing)] = Field(
        default=None,
        description="use only this many; a microworld makes 1000 where it is not given",
    )
    seed: Whole = Field(default=0, ge=0, lt=2**63, description="of the microworld")
    options: dict[str, Any] = Field(default={}, description="dials of the microworld")
    format: Format = "auto"
    holdout: Annotated[Rows | BelowOne | None, BeforeValidator(as_nothing)] = Field(
        default=None,
        description="rows kept for evaluation: a number, or a share below 1; "
        "min(200, 10 %) where it is not given",
    )
    train_on: TrainOn = "assistant"
    on_bad_row: Literal["drop", "stop"] = "drop"


class Grown(Section):
    """A section with keys that came later: they are written only where they say something.

    So a recipe that does not use them has the hash that it had before they came.
    """

    LATER: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _without_unused(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        fields = type(self).model_fields
        for name in self.LATER:
            if getattr(self, name) == fields[name].get_default(call_default_factory=True):
                values.pop(name, None)
        return values


class Schedule(Grown):
    """The learning rate over the applied updates."""

    LATER = ("shape", "initial", "cooldown", "hold")

    kind: Literal["cosine", "linear", "wsd", "constant", "infinite"] = "cosine"
    warmup: ShareOrUpdates = Field(
        default=0.03, description="share of the run, or updates; infinite: updates, 100"
    )
    decay: ShareOrUpdates = Field(
        default=0.2, description="of wsd and infinite (0 there): share of the run, or updates"
    )
    final: Number = Field(default=0.1, ge=0, le=1, description="share of the peak")
    shape: Literal["linear", "sqrt"] = Field(default="linear", description="of that decay")
    initial: Number = Field(
        default=0.0, ge=0, le=1, description="share of the peak that the warmup begins from"
    )
    cooldown: Rows = Field(default=0, description="infinite: updates from the peak to hold")
    hold: Number = Field(default=1.0, ge=0, le=1, description="infinite: share of the peak")


class Group(Section):
    """Trained tensors with a decay or a rate of their own."""

    pattern: Text = Field(description="of tensor names, as in *lora_B*")
    weight_decay: Annotated[NotNegative | None, BeforeValidator(as_nothing)] = Field(
        default=None, description="instead of the optimizer's"
    )
    learning_rate_scale: NotNegative = Field(default=1.0, description="factor on the rate")


class Optimizer(Grown):
    """What moves the weights, and its numbers."""

    LATER = (
        "beta2_half_life_tokens",
        "momentum",
        "nesterov",
        "match_rms",
        "groups",
        "watch_every",
    )

    kind: Literal["adamw", "adam", "adam_l2", "sgd", "muon"] = "adamw"
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    beta2_half_life_tokens: Annotated[Positive | None, BeforeValidator(as_nothing)] = Field(
        default=None, description="tokens that halve the second moment; instead of betas.1"
    )
    momentum: Annotated[BelowOne | None, BeforeValidator(as_nothing)] = Field(
        default=None, description="of sgd (0 where not given) and muon (0.95)"
    )
    nesterov: Annotated[Truth | None, BeforeValidator(as_nothing)] = Field(
        default=None, description="of sgd (false where not given) and muon (true)"
    )
    match_rms: Truth = Field(
        default=True, description="of muon: updates of adamw's size, so that its rate fits"
    )
    groups: list[Group] = Field(default=[], description="tensors with a decay or rate of their own")
    watch_every: Annotated[Count | None, BeforeValidator(as_nothing)] = Field(
        default=None, description="updates between two measurements of each group's real step"
    )


class Ema(Section):
    """A moving average of the trained weights beside them."""

    decay: PartialShare = 0.999
    warmup: Truth = Field(default=True, description="the decay grows with the averaged updates")
    start_after: Rows = Field(default=0, description="updates before the average begins")
    evaluate: Truth = Field(
        default=True, description="evaluate and produce the average, not the last weights"
    )


class LossScale(Section):
    """fp16: the factor on the loss that keeps small gradients above 2^-24. Powers of two."""

    init: PowerOfTwo = Field(default=2.0**16, description="of the first update")
    growth_interval: Count = Field(
        default=2000, description="updates without overflow after which it doubles"
    )
    floor: PowerOfTwo = Field(default=1.0, description="an overflow there ends the run")
    ceiling: PowerOfTwo = Field(default=2.0**24, description="it grows no further")


class Float8(Section):
    """fp8: how tensors are scaled into 8 bits, and which linear layers are."""

    scaling: Literal["current", "delayed", "block"] = Field(
        default="current", description="by the tensor itself, by earlier updates, or by 1 x 128"
    )
    window: Count = Field(default=16, description="of delayed: updates that are remembered")
    margin: Rows = Field(default=0, description="of delayed: powers of two to spare")
    convert: Annotated[list[Text], BeforeValidator(as_list)] = Field(
        default=["*"],
        description="layers or patterns; * is all that the selective recipe allows",
    )
    keep: Annotated[list[Text], BeforeValidator(as_list)] = Field(
        default=[], description="layers or patterns that stay in high precision"
    )
    keep_first_blocks: Rows = Field(default=1, description="blocks in high precision")
    keep_last_blocks: Rows = Field(default=1, description="blocks in high precision")
    smallest_features: Count = Field(
        default=64, description="a layer with a narrower side stays in high precision"
    )
    backend: Literal["auto", "emulated", "scaled_mm"] = Field(
        default="auto", description="auto: FP8 products on a GPU, emulated ones elsewhere"
    )
    measure_every: Count = Field(default=10, description="updates between two looks at its health")


class Budget(Section):
    """A share of the bytes that training keeps for the backward pass without recomputation."""

    budget: PartialShare


class ScaleRate(Section):
    """The learning rate was found at another batch size."""

    found_at: Count = Field(description="the batch size at which learning_rate was found")
    rule: Literal["auto", "linear", "sqrt"] = Field(
        default="auto", description="auto: linear for sgd, sqrt for what divides by the gradient"
    )


class Keep(Section):
    """What protects old abilities during a stage."""

    replay: dict[str, PartialShare] = Field(
        default={}, description="source: share of the stage's tokens, on top of its own data"
    )


class Stage(Grown):
    """Keys that every training stage has."""

    LATER: ClassVar[tuple[str, ...]] = (
        *("ema", "loss_scale", "fp8", "stochastic_rounding", "gradient_flow_every"),
        *("noise_scale_every", "scale_rate", "guard", "adaptive_clip", "restart"),
    )

    kind: StageKind
    name: Annotated[Name | None, BeforeValidator(as_nothing)] = None
    data: dict[str, Share] = Field(
        description="a source, a path, a list of them, or shares of tokens that sum to 1"
    )
    max_length: Length = Field(default=1024, description="tokens of an example")
    overflow: Literal["truncate", "drop", "split"] = "truncate"
    packing: Truth = True
    pack_length: Annotated[Length | None, BeforeValidator(as_nothing)] = Field(
        default=None, description="tokens of a pack; max_length where it is not given"
    )
    batch_size: Count = Field(default=16, description="examples of an update, on all ranks")
    micro_batch: AutoCount = Field(
        default="auto", description="packs of one backward; never changes batch_size"
    )
    max_updates: Annotated[Updates | None, BeforeValidator(as_nothing)] = Field(
        default=None, description="instead of epochs"
    )
    epochs: Annotated[Epochs | None, BeforeValidator(as_nothing)] = Field(
        default=None, description="1 where neither epochs nor max_updates is given"
    )
    learning_rate: NotNegative = 1e-4
    scale_rate: ScaleRate | None = Field(
        default=None, description="learning_rate is of another batch size: scale it"
    )
    schedule: Schedule = Field(default_factory=Schedule)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    ema: Annotated[Ema | None, BeforeValidator(as_decay)] = Field(
        default=None, description="average of the weights: its decay, or a mapping"
    )
    clip: Annotated[Positive | None, BeforeValidator(as_nothing)] = Field(
        default=1.0, description="largest norm of the gradient, or none"
    )
    adaptive_clip: Annotated[AdaptiveClip | None, BeforeValidator(as_nothing)] = Field(
        default=None, description="a limit that follows the run: tensor, z_score, or a mapping"
    )
    restart: Annotated[Restart | None, BeforeValidator(as_nothing)] = Field(
        default=None, description="of the optimizer within the stage: a mapping, or none"
    )
    guard: Annotated[Guarding, BeforeValidator(as_guard)] = Field(
        default_factory=Guarding, description="of unusual updates: its policy, or a mapping"
    )
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8", "pure_bf16"] = Field(
        default="auto", description="of the products; pure_bf16: of the trained tensors too"
    )
    loss_scale: Annotated[LossScale | None, BeforeValidator(as_scale)] = Field(
        default=None, description="of fp16: where it begins, or a mapping"
    )
    fp8: Annotated[Float8 | None, BeforeValidator(as_scaling)] = Field(
        default=None, description="of precision fp8: its scaling, or a mapping"
    )
    stochastic_rounding: Annotated[Truth | None, BeforeValidator(as_nothing)] = Field(
        default=None, description="of pure_bf16 (true there): round updates with the mean kept"
    )
    recompute: Annotated[
        Literal["none", "full", "selective", "auto"] | Budget, BeforeValidator(as_recompute)
    ] = Field(default="none", description="what the backward pass computes again: less memory")
    keep: Keep = Field(default_factory=Keep)
    gradient_flow_every: Annotated[Count | None, BeforeValidator(as_nothing)] = Field(
        default=None, description="updates between two measurements of each layer's gradient"
    )
    noise_scale_every: Annotated[Count | None, BeforeValidator(as_nothing)] = Field(
        default=None, description="updates between two measurements of gradient signal and noise"
    )
    evaluate_every: Annotated[Count | None, BeforeValidator(as_nothing)] = Field(
        default=None, description="updates"
    )
    checkpoint_every: Annotated[Count | None, BeforeValidator(as_nothing)] = Field(
        default=None, description="updates; a tenth of the run where it is not given"
    )
    checkpoints_kept: Count = 2
    promote: Literal["last", "best"] = "last"
    early_stop: Annotated[Count | None, BeforeValidator(as_nothing)] = Field(
        default=None, description="stop after this many evaluations without improvement"
    )
    adapter: Adapter | None = Field(default=None, description="instead of the recipe's")
    fold_parent: Truth = Field(
        default=False, description="add the parent's adapter to the base and start a new one"
    )

    def mixture(self) -> dict[str, float]:
        """Share of tokens of every source, replay included; sums to 1.

        >>> stage = SftStage(kind="sft", data={"chats": 1.0}, keep={"replay": {"web": 0.25}})
        >>> stage.mixture()
        {'chats': 0.75, 'web': 0.25}
        """
        own = 1.0 - sum(self.keep.replay.values())
        return {name: share * own for name, share in self.data.items()} | self.keep.replay


class PretrainStage(Stage):
    """Next-token training on plain text: from scratch, or continued from a parent."""

    LATER = (*Stage.LATER, "z_loss")

    kind: Literal["pretrain"] = "pretrain"
    z_loss: NotNegative = Field(default=0.0, description="times log² Z, added to each token's loss")
    overflow: Literal["truncate", "drop", "split"] = "split"


class SftStage(Stage):
    """Supervised fine-tuning on conversations."""

    LATER = (*Stage.LATER, "z_loss")

    kind: Literal["sft"] = "sft"
    z_loss: NotNegative = Field(default=0.0, description="times log² Z, added to each token's loss")
    learning_rate: NotNegative = 2e-4


class PreferenceStage(Stage):
    """Alignment on pairs of a better and a worse answer."""

    kind: Literal["preference"] = "preference"
    learning_rate: NotNegative = 5e-6
    loss: Literal["dpo"] = "dpo"
    beta: Positive = 0.1
    label_smoothing: Number = Field(default=0.0, ge=0, lt=0.5)


STAGE_CLASSES: dict[str, type[Stage]] = {
    "pretrain": PretrainStage,
    "sft": SftStage,
    "preference": PreferenceStage,
}


class Gates(Section):
    """Limits on paired differences after every stage, against its parent and the base."""

    improve: dict[str, Text] = Field(
        default={}, description="stage kind, name or number: source.measure"
    )
    protect: Annotated[
        dict[str, Annotated[Positive | None, BeforeValidator(as_default)]] | None,
        BeforeValidator(as_default),
    ] = Field(
        default=None,
        description="harm: largest rise, or default (null here); default as a whole means "
        "every harm that this run can measure, with its default limit",
    )
    undetermined: Literal["keep", "promote"] = "keep"
    on_refusal: Literal["stop", "continue"] = "stop"
    items: Count = Field(default=400, description="budget of items of a suite")


class Recipe(Grown):
    """A validated run. Made by `load_recipe`, `loads` or `recipe_from`."""

    LATER = ("device",)
    model: Text = Field(description="name for lehr fetch, hub id, folder, .gguf file, or tiny:SIZE")
    template: Text = Field(default="auto", description="auto, chatml, or a Jinja file")
    system: Literal["keep", "merge", "drop"] = Field(
        default="keep", description="what happens to system messages that a template cannot take"
    )
    date: str = Field(
        default="auto", description="the date that templates see, YYYY-MM-DD; today when auto"
    )
    output: Annotated[Text | None, BeforeValidator(as_nothing)] = Field(
        default=None, description="folder of the run, which the command line may choose"
    )
    seed: Whole = Field(default=0, ge=0, lt=2**63)
    threads: AutoThreads = "auto"
    device: DeviceName = Field(default="auto", description="auto, cpu, cuda or cuda:N: what trains")
    memory_limit: Literal["auto"] | Positive = Field(
        default="auto", description="GiB of that device"
    )
    trust_remote_code: Truth = Field(
        default=False, description="run Python code that a model folder brings; in the ledger"
    )
    adapter: Adapter = Field(default_factory=Adapter)
    data: dict[str, Source] = Field(default={}, description="named sources")
    stages: list[Annotated[PretrainStage | SftStage | PreferenceStage, Field(discriminator="kind")]]
    gates: Gates = Field(default_factory=Gates)
    suites: Annotated[list[Text], BeforeValidator(as_list)] = Field(
        default=[], description="measured without gating"
    )
    export: Annotated[list[Literal["adapter", "merged", "fp8"]], BeforeValidator(as_list)] = Field(
        default=[], description="adapter where one is trained, else merged, where not given"
    )
    show: Annotated[list[Text], BeforeValidator(as_list)] = Field(
        default=[], description="prompts that are answered again at each evaluation"
    )

    _folder: Path = PrivateAttr(default=Path())
    _name: str = PrivateAttr(default="")
    _notices: tuple[str, ...] = PrivateAttr(default=())
    _date_was_auto: bool = PrivateAttr(default=False)

    @property
    def folder(self) -> Path:
        """Where relative paths start: the folder of the recipe file."""
        return self._folder

    @property
    def name(self) -> str:
        """What the run is called: the recipe file's name, else its output's, else run."""
        return self._name or Path(self.output or "run").name

    @property
    def date_was_auto(self) -> bool:
        """The date was found by `load_recipe`, not written in the recipe."""
        return self._date_was_auto

    def path_of(self, text: str) -> Path:
        """A path as the recipe means it: absolute, or from the recipe's folder."""
        return (self._folder / Path(text).expanduser()).absolute()

    def files_of(self, source: str) -> list[Path]:
        """The files of a named source, in order; [] for a microworld."""
        path = self.data[source].path
        texts = [] if path is None else [path] if isinstance(path, str) else path
        return [self.path_of(text) for text in texts]
