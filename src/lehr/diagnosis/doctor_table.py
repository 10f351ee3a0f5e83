"""What each signature means: causes in order, the test that decides, the remedy. Data only.

The order of the table is the order of findings: roots before what may follow from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entry:
    """title: the curve in words; patch: keys of a stage (`learning_rate` as a factor);
    also: names that a curve like this cannot exclude; ceiling: highest confidence."""

    title: str
    causes: tuple[str, ...]
    test: str
    fix: str
    patch: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    ceiling: float = 0.98
    probe: str = ""  # the test of `--run-tests` that decides it


TABLE: dict[str, Entry] = {
    "nan_at_first_step": Entry(
        "not finite from the first step",
        (
            "an example without one trained token: 0/0, or a softmax over nothing",
            "NaN in the loaded weights",
            "fp16 overflow in the first forward pass",
        ),
        "count the rows without a trained token; then the same batch in fp32: still not finite "
        "means data or weights, finite means precision",
        "drop the rows without supervision (`lehr audit DATA --model M` lists them); train in fp32 "
        "or bf16",
        {"precision": "fp32"},
        probe="fp32",
    ),
    "nan_at_step": Entry(
        "not finite at a later step",
        (
            "the learning rate is too high: look whether the gradient norm grows before",
            "a batch with a number that is not finite, or with no trained token",
            "overflow of fp16 or fp8",
        ),
        "the batch of that step on fresh weights: not finite again means data; else go on from the "
        "checkpoint before in fp32: finite means precision, not finite means the rate",
        "find the rows of that batch and repair them (a run of lehr: `origins` of its line in "
        "metrics.jsonl); or lower the rate and clip",
        {"learning_rate": 0.3, "clip": 1.0},
        probe="fp32",
    ),
    "scales_with_accumulation": Entry(
        "the training loss is a multiple of what it should be",
        (
            "micro-batches are summed where their mean belongs (a missing 1/N)",
            "the sum over ranks is not divided",
            "the loss is a sum over tokens, the evaluation a mean",
        ),
        "the same batch as one micro-batch and as two: loss and gradient must be equal",
        "divide by the weight of the whole update, all micro-batches and ranks (lehr does); until "
        "then one micro-batch an update",
        {"micro_batch": 1},
        probe="accumulation",
    ),
    "start_above_chance": Entry(
        "the first loss is above that of guessing",
        (
            "the scale of the initial weights, of the output layer above all (ln V + var/2)",
            "labels that do not belong to the inputs: a shift by one, another tokenizer",
            "special tokens or new vocabulary that the loaded model has never seen",
        ),
        "the spread of the untrained model's logits: above 1 is a matter of the initial weights; "
        "near 0, the loss must be ln V",
        "initialise with a spread of 0.02, check that the head is scaled; for a loaded model check "
        "template and tokenizer (`lehr audit DATA --model M`)",
        {"schedule": {"warmup": 0.05}},
        probe="chance",
    ),
    "flat_at_chance": Entry(
        "flat at the loss of guessing",
        (
            "the optimizer holds none of the model's weights, or all are frozen",
            "the learning rate is 0, or far too small",
            "the graph is cut: no gradient arrives",
            "labels that have nothing to do with the inputs and are equally frequent",
        ),
        "overfit one batch: if its loss does not fall, the norm of the change of the weights says "
        "whether they move at all (0: optimizer or gradient; not 0: labels)",
        "raise the learning rate; look at the list of trained tensors and of missing gradients",
        {"learning_rate": 10.0},
        probe="overfit",
    ),
    "flat_at_unigram": Entry(
        "falls to the entropy of the token frequencies, then flat",
        (
            "the inputs do not reach the output: attention mask, positions, zeroed inputs",
            "labels are shuffled against the inputs",
            "the learning rate is too high for more than the frequencies",
        ),
        "shuffle the inputs of a batch: a loss that does not change means that the model does not "
        "see them; a loss that changes means shuffled labels or the rate",
        "check mask and positions with one changed token; compare a row's ids with its labels",
        {"learning_rate": 0.3},
        also=("train too short: the frequencies are what is learnt first",),
        probe="shuffled_inputs",
    ),
    "flat_from_start": Entry(
        "flat from the start",
        (
            "nothing is trained: frozen, another model's weights in the optimizer, no gradient",
            "the learning rate is 0, or far too small for an adapter",
            "the model already knows this data",
        ),
        "overfit one batch: falling means that the rate was too small or the data is known; flat "
        "means that nothing is trained",
        "raise the learning rate (adapters need about ten times that of all weights)",
        {"learning_rate": 10.0},
        ceiling=0.9,
        probe="overfit",
    ),
    "too_low_too_soon": Entry(
        "too low, too soon",
        (
            "the target can be seen: no causal mask, labels not shifted, the answer in the prompt",
            "rows of the evaluation stand in the training data, or most rows are duplicates",
            "the text is far more regular than was thought",
        ),
        "change a later token: no earlier log-probability may move; a loss on random tokens must "
        "not be below ln V",
        "repair mask or shift; `lehr audit DATA` finds duplicates and rows held out and trained on",
        also=("train_down_eval_up (without an evaluation)",),
        ceiling=0.93,
        probe="future_tokens",
    ),
    "jump_at_resume": Entry(
        "a jump exactly at a resume",
        (
            "optimizer moments, scheduler or step counter were not restored",
            "older weights were loaded, or the average instead of the weights",
            "the data began again: its first rows are known by heart",
        ),
        "save, load, one update: it must equal the update without the pause, bit for bit",
        "restore weights, moments, schedule, random state and data position (`lehr run --verify` "
        "checks lehr's)",
        probe="resume",
    ),
    "epoch_sawtooth": Entry(
        "the same curve in every epoch",
        (
            "no shuffling between epochs: files in their order, sorted rows",
            "shards of different kinds one after the other",
            "memorised rows: sharp drops where an epoch begins",
        ),
        "another seed of the shuffling moves the pattern if it is the order; on rows that were "
        "never seen it vanishes if it is memory",
        "shuffle rows in every epoch; interleave the sources; fewer epochs",
        {"epochs": 1},
        also=("periodic_bumps",),
    ),
    "periodic_bumps": Entry(
        "bumps at a fixed distance in steps",
        (
            "a source or shard that comes round every so many steps",
            "the last batch of every epoch: short, or always the same rows",
            "an evaluation, a checkpoint or a swap of averaged weights that leaves a trace",
            "one data worker of several gives other rows",
            "the distance is an epoch: its rows come in the same order each time",
        ),
        "compare the distance with the steps of an epoch and the intervals of evaluation, "
        "checkpoint and shard; a single worker with another shard length moves it",
        "mix the sources within an update; restore the mode and the weights after an evaluation",
        also=("epoch_sawtooth",),
    ),
    "plateau_then_drop": Entry(
        "a plateau, then a sudden drop",
        (
            "the rate was too small until then: warm-up, a schedule that begins late",
            "an ability that appears at once (an induction head): healthy",
            "a frozen part was released",
        ),
        "move the event of the schedule: a drop that moves with it is the rate's",
        "shorten the warm-up, raise the first rates",
        {"schedule": {"warmup": 0.03}},
    ),
    "eval_apart_from_start": Entry(
        "the evaluation does not follow the training loss, from the beginning",
        (
            "evaluated are other weights than trained ones: an average without correction, a copy",
            "batch norm's running statistics, or dropout left on",
            "another template, mask or tokenizer in the evaluation",
        ),
        "evaluate in train mode and with the raw weights; evaluate on rows of the training data: "
        "still apart means the path, not the data",
        "evaluate the weights that are trained; correct the average for its beginning",
        {"ema": None},
        also=("train_down_eval_up (if the data repeats within the first evaluation)",),
        probe="eval_mode",
    ),
    "train_down_eval_up": Entry(
        "training loss down, evaluation up or still",
        (
            "overfitting: the data is seen too often for its size",
            "the evaluation is of another kind than the training data",
            "a leak in training that the evaluation does not have",
        ),
        "the gap on held-out rows of the training files: also there means overfitting, only on the "
        "other set means a shift; then change a later token (leak)",
        "fewer epochs, the best checkpoint instead of the last, more data",
        {"promote": "best", "epochs": 1},
        also=("too_low_too_soon", "a shift of the data"),
        ceiling=0.93,
        probe="eval_mode",
    ),
    "growing_oscillation": Entry(
        "swings that grow",
        (
            "the learning rate is too high (above 2 over the sharpness)",
            "gradients are not cleared between updates",
            "momentum or beta2 unfit for the noise of the gradient",
        ),
        "halve the learning rate at that step: the swings must decay within 50 updates; if not, "
        "look whether the gradient norm grows steadily (not cleared)",
        "a third of the rate, clip, warm up",
        {"learning_rate": 0.3, "clip": 1.0},
        also=("spike_that_stays",),
        ceiling=0.9,
        probe="rate_halved",
    ),
    "spike_that_stays": Entry(
        "a jump to a higher level that stays",
        (
            "lasting damage: attention logits or log Z blew up at a high rate",
            "Adam's second moment was blown up by one gradient: tiny steps ever after",
            "another kind of data from there on",
            "a resume at this step that did not bring back weights, moments, rate or position",
        ),
        "go on from the checkpoint before it without that batch; reset the moments: a recovery "
        "means the moments, none means the weights",
        "go back before the jump, pass the batch over, clip, a lower rate",
        {"clip": 1.0, "learning_rate": 0.5},
        also=("growing_oscillation", "jump_at_resume"),
        ceiling=0.95,
        probe="rate_halved",
    ),
    "falls_then_climbs": Entry(
        "falls, then climbs again",
        (
            "the learning rate is too high, or rises: a schedule the wrong way, a re-warm",
            "weight decay is too large for the rate",
            "the data changes: a later source is harder",
        ),
        "halve the rate from there on: falling within 50 updates means the rate",
        "a lower rate with decay; a re-warm after a change of data is expected to show a hump",
        {"learning_rate": 0.3, "schedule": {"kind": "cosine"}},
        also=("late_creep", "growing_oscillation"),
        ceiling=0.93,
        probe="rate_halved",
    ),
    "never_left_warmup": Entry(
        "the rate still rises at the end",
        ("the warm-up is longer than the run", "the schedule was made for a longer run"),
        "the planned rate of the last update (`lehr plan` draws it): it must be below the peak",
        "a warm-up of a few percent of the run",
        {"schedule": {"warmup": 0.03}},
        ceiling=0.99,
    ),
    "rate_ran_out": Entry(
        "the rate is 0 long before the end",
        (
            "the schedule is shorter than the run, or moves once per micro-batch or process",
            "the run was made longer and the schedule was not",
        ),
        "the planned rate of every update (`lehr plan` draws it)",
        "give the schedule the length of the run",
        {"schedule": {"kind": "cosine", "final": 0.1}},
        ceiling=0.99,
    ),
    "late_creep": Entry(
        "a slow creep upwards, late",
        (
            "weight decay is too large beside a rate that has decayed",
            "the rate is too high for what is left to learn",
            "updates are lost in the rounding of bf16 weights",
        ),
        "a branch in fp32 and one without weight decay: which of them falls",
        "less weight decay, a rate that decays to the end, fp32 master weights",
        {"optimizer": {"weight_decay": 0.0}},
        also=("falls_then_climbs", "harder data at the end"),
        ceiling=0.9,
        probe="fp32",
    ),
    "spike_that_heals": Entry(
        "a spike that heals",
        (
            "an outlier batch: broken text, another language, a very long row",
            "a stale second moment meets a large gradient",
            "a rate near what is stable",
        ),
        "the same batch from an earlier checkpoint: a high loss there too means the batch; else it "
        "is the state together with the batch",
        "look at the rows of that update; clip; lower beta2 if spikes come back",
        {"clip": 1.0},
        ceiling=0.95,
    ),
    "eval_below_train": Entry(
        "the evaluation is below the training loss",
        (
            "dropout or augmentation in training only: harmless",
            "the training loss is a mean over the past and lags",
            "the evaluation is easier, or has rows of the training data",
        ),
        "evaluate on training rows in eval mode: the gap closes if it is dropout or the lag",
        "nothing to repair if it is dropout; else look for overlap with `lehr audit`",
        ceiling=0.9,
        probe="eval_mode",
    ),
    "kl_runaway": Entry(
        "the policy leaves its reference without end",
        (
            "the learning rate is too high for this loss",
            "beta (the weight of the KL) is too small",
            "another reference than the state that the stage began from",
        ),
        "halve the rate; KL before the first update must be 0 and DPO's loss ln 2",
        "a tenth of the rate, a larger beta",
        {"learning_rate": 0.1, "beta": 0.3},
        probe="rate_halved",
    ),
    "chosen_collapses": Entry(
        "the margin grows while the chosen answers collapse",
        (
            "likelihood displacement: chosen and rejected answers are too alike",
            "the learning rate is too high",
            "the chosen answers are far from what the model would say: no sft on them before",
        ),
        "the pairs by the likeness of their answers: the most alike fall most",
        "sft on the chosen answers first, drop pairs that differ in a few tokens, a lower rate",
        {"learning_rate": 0.3},
        also=("both_fall",),
        ceiling=0.95,
    ),
    "both_fall": Entry(
        "both log-probabilities fall",
        (
            "likelihood displacement: chosen and rejected answers are alike",
            "the chosen answers are off the model's own distribution",
            "the learning rate is too high",
        ),
        "the log-probability of held-out good answers before and after: it must not fall",
        "drop pairs that differ in a few tokens; sft on the chosen answers first; a lower rate",
        {"learning_rate": 0.3},
        also=("chosen_collapses",),
        ceiling=0.95,
    ),
    "reward_up_gold_down": Entry(
        "the reward rises while what it stands for falls",
        (
            "the reward model is exploited: length, format, flattery",
            "too far from the reference for what the reward model has seen",
        ),
        "judge samples of the best and of the last checkpoint by the gold measure, at equal length",
        "stop at the best gold score, a larger weight of the KL, a better reward",
        {"promote": "best"},
    ),
    "entropy_collapse": Entry(
        "the entropy collapses",
        ("the rate is too high", "no bonus for entropy and rewards that are easily won"),
        "samples of one prompt at temperature 1: nearly all the same",
        "a lower rate, a larger weight of the KL, a wider upper clip",
        {"learning_rate": 0.3},
    ),
    "zero_variance_groups": Entry(
        "groups with equal rewards: no gradient",
        ("prompts that are always or never solved", "a reward with too few values"),
        "the share of prompts solved by all or by none",
        "drop prompts that are always or never solved; more answers a prompt",
    ),
    "length_drift": Entry(
        "the length of answers drifts",
        (
            "a loss divided by each answer's length favours long wrong answers",
            "the reward or the preferred answers are correlated with length",
        ),
        "the correlation of reward and length within a prompt's answers",
        "divide by a constant, balance lengths in the pairs, a penalty beyond the limit",
        ceiling=0.93,
    ),
    "clip_fraction_stuck": Entry(
        "the clip fraction stays high",
        ("too many updates on the same samples", "the rate is too high", "stale samples"),
        "one pass over each batch of samples: the fraction must fall to about 0",
        "fewer passes, a lower rate",
        {"learning_rate": 0.3},
    ),
    "never_stops": Entry(
        "answers never stop",
        (
            "the end token is masked, because it is also the padding token",
            "the template has no end, or truncation cut it off",
            "generation has another end token than training",
        ),
        "look whether the label of the end token is there (`lehr audit DATA --model M` shows it)",
        "a padding token of its own; longer max_length; the model's template",
        {"overflow": "drop"},
    ),
}
