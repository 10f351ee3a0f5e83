"""What a recipe calls a model: hub id, folder, GGUF file, tiny, known name, adapter folder."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lehr.errors import Problem, RecipeError
from lehr.models import fetch as fetching
from lehr.models.gguf_files import check_gguf
from lehr.models.peft_format import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from lehr.models.tiny import QK_NORM, parameters_of
from lehr.recipe.adapters import is_adapter, named_base
from lehr.streams import content_hash, file_hash

SourceKind = Literal["hub", "folder", "gguf", "tiny", "known", "adapter"]
# Files of a model's folder that can change what it computes; .py: a model's own code.
READ_SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model", ".py", ".tiktoken", ".spm")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")
_TINY = "tiny:"


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from.

    path         folder or file on this machine; None for tiny and for a hub id not yet here
    fingerprint  hash of config and weights, of a tiny model's size, or of a hub id's name
    """

    kind: SourceKind
    spec: str
    path: Path | None
    fingerprint: str


def resolve_spec(spec: str, folder: Path | None = None) -> ModelSource:
    """What `spec` names, without loading or fetching anything.

    folder  where relative paths start (default: the working folder)

    Raises RecipeError for what is no model: a missing path, a pickle, a bad size.
    """
    if spec.startswith(_TINY):
        size = spec.removeprefix(_TINY)
        parts = ["tiny", parameters_of(size), *([QK_NORM] if size.endswith(QK_NORM) else [])]
        return ModelSource("tiny", spec, None, content_hash(parts))
    if spec in fetching.KNOWN:
        known = fetching.models_folder() / spec
        here = known if fetching.is_whole(known) else None
        mark = model_fingerprint(here) if here else content_hash(["known", spec])
        return ModelSource("known", spec, here, mark)
    path = (folder or Path()) / Path(spec).expanduser()
    if path.is_file():
        return _file_source(spec, path)
    if path.is_dir():
        kind = _check_folder(path)
        mark = model_fingerprint(path)
        if kind == "adapter":  # it is a model only together with what lies under it
            mark = content_hash([mark, base_of_adapter(path, folder).fingerprint])
        return ModelSource(kind, spec, path, mark)
    if _HUB_ID.fullmatch(spec) and not spec.endswith((".gguf", *PICKLES)):
        return ModelSource("hub", spec, None, content_hash(["hub", spec]))
    names = ", ".join(sorted(fetching.KNOWN))
    raise RecipeError(
        Problem(
            "model",
            "a local folder, a .gguf file, a hub id (owner/name), tiny:<size> or a known name "
            f"({names})",
            spec,
        )
    )


def base_of_adapter(adapter: Path, folder: Path | None = None) -> ModelSource:
    """The base that an adapter's folder names. Raises RecipeError where it names none."""
    try:
        base = named_base(adapter, folder or Path())
    except (OSError, ValueError, KeyError, TypeError) as error:
        expected = f"an adapter config that names its base ({error})"
        raise RecipeError(Problem(str(adapter / ADAPTER_CONFIG), expected)) from error
    if base.startswith(_TINY) or is_adapter(Path(base)):
        expected = "an adapter whose base is a whole model"
        raise RecipeError(Problem(str(adapter), expected, base))
    return resolve_spec(base, folder)


def _file_source(spec: str, path: Path) -> ModelSource:
    if path.suffix in PICKLES:
        raise RecipeError(_pickle_problem(path))
    if path.suffix != ".gguf":
        raise RecipeError(Problem("model", "a folder or a .gguf file, not another file", str(path)))
    check_gguf(path)
    return ModelSource("gguf", spec, path, model_fingerprint(path))


def _pickle_problem(path: Path) -> Problem:
    return Problem(
        str(path),
        "weights as .safetensors: a pickle can run code when it is read, so lehr never reads one; "
        "convert it where you trust it (model.save_pretrained writes safetensors)",
    )


def _check_folder(folder: Path) -> SourceKind:
    """`folder` or `adapter`; raises RecipeError, all problems at once."""
    adapter = (folder / ADAPTER_CONFIG).is_file()
    config = folder / "config.json"
    weights = [p for p in folder.glob("*.safetensors") if p.name != ADAPTER_WEIGHTS]
    if adapter and not weights:
        if not (folder / ADAPTER_WEIGHTS).is_file():
            pickles = [p for p in sorted(folder.iterdir()) if p.suffix in PICKLES]
            problem = Problem(str(folder / ADAPTER_WEIGHTS), "the weights of the adapter")
            raise RecipeError([_pickle_problem(p) for p in pickles] or [problem])
        return "adapter"
    problems = []
    if not config.is_file():
        problems.append(Problem(str(config), "the model's config.json"))
    else:
        try:
            json.loads(config.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            problems.append(Problem(str(config), f"readable JSON ({error})"))
    generation = folder / "generation_config.json"
    if generation.is_file():
        try:
            if not isinstance(json.loads(generation.read_text(encoding="utf-8")), dict):
                raise ValueError("it is no mapping")
        except (ValueError, OSError) as error:
            expected = f"readable JSON, or no such file ({error})"
            problems.append(Problem(str(generation), expected))
    if not weights:
        pickles = [p for p in sorted(folder.iterdir()) if p.suffix in PICKLES]
        if pickles:
            problems += [_pickle_problem(p) for p in pickles]
        else:
            problems.append(Problem(str(folder), "weights in .safetensors files"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, OSError) as error:
            problems.append(Problem(str(index), f"a readable index of weights ({error})"))
        else:
            missing = sorted(name for name in named if not (folder / name).is_file())
            problems += [
                Problem(str(folder / name), "a weight file of the index") for name in missing
            ]
    if problems:
        raise RecipeError(problems)
    return "folder"


def model_fingerprint(source: ModelSource | Path | str) -> str:
    """Hash of a model's content: config, weights, tokenizer and template of a folder, or one file.

    File hashes are remembered by path, size and times of change (the time that a program can
    set, and the one that it cannot).
    """
    if isinstance(source, ModelSource):
        return source.fingerprint
    path = Path(source)
    if path.is_file():
        return content_hash([path.suffix, _remembered_hash(path)])
    names = sorted(p for p in path.iterdir() if p.is_file() and p.suffix in READ_SUFFIXES)
    return content_hash([[p.name, _remembered_hash(p)] for p in names])


def _remembered_hash(path: Path) -> str:
    stat = path.stat()
    if stat.st_size < 1 << 20:
        return file_hash(path)
    memory = fetching.lehr_home() / "file-hashes.json"
    key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ctime_ns}|{stat.st_ino}"
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    found = known.get(key) if isinstance(known, dict) else None
    if isinstance(found, str):
        return found
    digest = file_hash(path)
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        aside = memory.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps({**dict(list(known.items())[-500:]), key: digest}))
        aside.replace(memory)
    except OSError:
        pass  # only a memory: the next start hashes again
    return digest
