"""An export in FP8 for serving: E4M3 weights, measured like a stage and refused like one.

Layout: that of compressed-tensors ("float-quantized", weights only), which transformers reads
where that package is installed (0.20.1: the same logits as `read`). A layer `x` in E4M3 has

    x.weight        float8_e4m3fn [out, in]
    x.weight_scale  bf16 [out, 1]: weight = codes x scale, one scale an output channel

and everything else, the head and the first and last block among it, has the dtype of the base's
files. `config.json` says which layers. The loss that this costs is never silent: held-out loss,
KL and changed first choices are measured against the promoted model, with intervals and limits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lehr.data.packing import single
from lehr.data.shapes import Encoded
from lehr.errors import Problem, RecipeError
from lehr.evaluation.statistics import paired_difference, single_interval
from lehr.models.adapters import merged_weights
from lehr.models.gguf_files import quiet_transformers
from lehr.models.saving import base_weights, write_model, write_weights
from lehr.pipeline.parity import CLEAR_MARGIN_NATS
from lehr.training.float8_formats import E4M3, decode, encode
from lehr.training.float8_recipe import Float8Settings, select

# Upper ends of the intervals; a stage's default gates allow changes of this order.
LOSS_LIMIT_NATS = 0.02  # rise of the held-out loss, a supervised token
KL_LIMIT_NATS = 0.02  # mean KL(promoted || export), a position
FLIP_LIMIT = 0.02  # share of positions whose clear first choice changed
SMALLEST_SCALE = 2.0**-60  # of a row of zeros; exact in bf16
METHOD = "compressed-tensors"


@dataclass(frozen=True)
class Quantization:
    """What an FP8 export does to held-out sequences; intervals are of 95 %, by sequence.

    loss, kl in nats; flips a share of the positions; layers: how many are E4M3
    """

    layers: int
    sequences: int
    positions: int
    loss_before: float
    loss_after: float
    loss: tuple[float, float, float]  # rise: value, low, high
    kl: tuple[float, float, float]
    flips: tuple[float, float, float]

    @property
    def problem(self) -> str:
        """Why the export is refused, or "": the whole interval must lie below its limit."""
        found = []
        for name, (value, low, high), limit, unit in self._measures():
            if not high <= limit:
                word = "above" if low > limit else "undetermined at"
                found.append(
                    f"{name} {value:+.4f} {unit} [{low:+.4f}, {high:+.4f}], {word} limit {limit:g}"
                )
        return "; ".join(found)

    def _measures(self) -> list[tuple[str, tuple[float, float, float], float, str]]:
        return [
            ("loss", self.loss, LOSS_LIMIT_NATS, "nats/token"),
            ("KL", self.kl, KL_LIMIT_NATS, "nats/token"),
            ("changed first choices", self.flips, FLIP_LIMIT, "of the positions"),
        ]

    def as_json(self) -> dict[str, Any]:
        """With the names that every export's check has: kl, flips, positions, cast, problem."""
        whole = asdict(self)
        whole |= {"cast": True, "gap": None, "problem": self.problem}
        return whole | {
            "kl": self.kl[0],
            "kl_interval": list(self.kl[1:]),
            "flips": round(self.flips[0] * self.positions),
            "flips_interval": list(self.flips[1:]),
            "loss": self.loss[0],
            "loss_interval": list(self.loss[1:]),
            "limits": {"loss": LOSS_LIMIT_NATS, "kl": KL_LIMIT_NATS, "flips": FLIP_LIMIT},
        }


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes E4M3 [out, in], scale bf16 [out, 1]) with weight close to codes x scale.

    The scale is rounded up to bf16 first, so that the largest value of a row never saturates.
    Raises ValueError for values that are not finite: no scale could hold them.

    >>> codes, scale = quantize_rows(torch.tensor([[448.0, 1.0], [0.0, 0.0]]))
    >>> (codes.float() * scale.float()).tolist()
    [[448.0, 1.0], [0.0, 0.0]]
    """
    wide = weight.detach().float()
    if not bool(wide.isfinite().all()):
        raise ValueError("a weight that is not finite has no FP8 code")
    exact = (wide.abs().amax(dim=1, keepdim=True) / E4M3.largest).clamp(min=SMALLEST_SCALE)
    scale = exact.to(torch.bfloat16)
    below = scale.float() < exact
    scale = torch.where(below, (scale.float() * (1 + 2**-7)).to(torch.bfloat16), scale)
    return encode(wide / scale.float(), E4M3), scale


def chosen_layers(network: nn.Module) -> list[str]:
    """Linear layers that become E4M3: those of the selective FP8 recipe.

    Raises RecipeError where it leaves none (a model of one or two blocks).
    """
    linear = {name: one for name, one in network.named_modules() if isinstance(one, nn.Linear)}
    try:
        choices = select(network, Float8Settings(), linear)
    except RecipeError as error:  # its words are those of a stage that trains in FP8
        expected = "a model of three blocks or more whose layers have 64 features or more"
        found = f"no layer for E4M3 in {type(network).__name__}"
        raise RecipeError(Problem("export fp8", expected, found)) from error
    return [choice.name for choice in choices if choice.converted]


def write(folder: Path, model: Any, dtype: torch.dtype) -> None:
    """Write the model (its adapter added in fp32) with E4M3 layers; the rest in `dtype`."""
    layers = chosen_layers(model.network)
    weights = merged_weights(model.network, base_weights(model.network), torch.float32)
    codes: dict[str, Tensor] = {}
    for name in layers:
        code, scale = quantize_rows(weights.pop(f"{name}.weight"))
        codes |= {f"{name}.weight": code, f"{name}.weight_scale": scale}
    write_model(model.network, model.tokenizer, weights, folder, dtype)
    rest = _tensors(folder)
    if set(rest) != set(weights):  # then other tools would look for the codes elsewhere, too
        expected = "an architecture whose files name weights as the network does"
        raise RecipeError(Problem("export fp8", expected, type(model.network).__name__))
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    write_weights(rest | codes, folder)
    _write_config(folder / "config.json", model.network, layers)


def _tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def _write_config(path: Path, network: nn.Module, layers: Sequence[str]) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    linear = [name for name, one in network.named_modules() if isinstance(one, nn.Linear)]
    config["quantization_config"] = {
        "quant_method": METHOD,
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": sorted(set(linear) - set(layers)),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "channel",
                    "symmetric": True,
                    "dynamic": False,
                },
                "input_activations": None,
                "output_activations": None,
            }
        },
    }
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read(folder: Path) -> tuple[Any, int]:
    """(the export as a plain network in fp32, number of E4M3 layers), without any extra package.

    Raises RecipeError for a folder that is no such export.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with quiet_transformers():
        config = AutoConfig.from_pretrained(str(folder))
        found = getattr(config, "quantization_config", None)
        method = found.get("quant_method") if isinstance(found, Mapping) else None
        if method != METHOD:
            raise RecipeError(Problem(str(folder), "an FP8 export of lehr", method))
        del config.quantization_config
        network = AutoModelForCausalLM.from_config(config).float()
    tensors = _tensors(folder)
    scales = [name for name in tensors if name.endswith(".weight_scale")]
    for name in scales:
        weight = name.removesuffix("_scale")
        tensors[weight] = decode(tensors[weight]) * tensors.pop(name).float()
    missing, unexpected = network.load_state_dict(tensors, strict=False)
    tied = getattr(network, "all_tied_weights_keys", None) or {}
    wrong = [name for name in [*missing, *unexpected] if name not in tied]
    if wrong:
        raise RecipeError(Problem(str(folder), "the weights of its config", wrong[0]))
    network.tie_weights()
    return network.eval(), len(scales)


def measure(model: Any, folder: Path, sequences: Sequence[Encoded]) -> Quantization:
    """The export in `folder` against the promoted `model` (in fp32) on held-out sequences.

    Raises RecipeError with fewer than two sequences: nothing could be told.
    """
    if len(sequences) < 2:
        raise RecipeError(Problem("export fp8", "at least two held-out sequences", len(sequences)))
    network, layers = read(folder)
    model.eval()
    rows = [_one(model, network, one) for one in sequences]
    columns = torch.tensor(rows, dtype=torch.float64).T.tolist()
    before, after, tokens, kl, flips, positions = columns
    loss = paired_difference(before, after, tokens, tokens)
    apart, changed = single_interval(kl, positions), single_interval(flips, positions)
    return Quantization(
        layers=layers,
        sequences=len(rows),
        positions=int(sum(positions)),
        loss_before=sum(before) / sum(tokens),
        loss_after=sum(after) / sum(tokens),
        loss=(loss.value, loss.low, loss.high),
        kl=(apart.value, apart.low, apart.high),
        flips=(changed.value, changed.low, changed.high),
    )


@torch.no_grad()
def _one(model: Any, network: Any, one: Encoded) -> tuple[float, ...]:
    """Sums over one sequence: loss before, loss after, tokens, KL, flips, positions."""
    ours = model.head().detached().logits(model.hidden(single(0, one))).float()
    theirs = network(input_ids=one.ids[None]).logits[0].float()
    width = min(ours.shape[-1], theirs.shape[-1])
    p = torch.log_softmax(ours[:-1, :width].double(), -1)
    q = torch.log_softmax(theirs[:-1, :width].double(), -1)
    taught = one.supervised[1:]
    targets = one.ids[1:, None]
    before = -p.gather(1, targets)[taught].sum()
    after = -q.gather(1, targets)[taught].sum()
    kl = (p.exp() * (p - q)).sum()
    top = p.topk(2, dim=-1).values
    clear = (top[:, 0] - top[:, 1]) > CLEAR_MARGIN_NATS
    flips = (clear & (p.argmax(-1) != q.argmax(-1))).sum()
    sums = (before, after, taught.sum(), kl, flips)
    return (*(float(value) for value in sums), float(p.shape[0]))
