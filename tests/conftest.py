"""Every test has a cache folder of its own; a real model that was fetched is still found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lehr.models.fetch import models_folder


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """$LEHR_HOME is a folder of this session, whose models are the user's."""
    fetched = models_folder()
    home = tmp_path_factory.mktemp("home")
    fetched.mkdir(parents=True, exist_ok=True)
    (home / "models").symlink_to(fetched)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEHR_HOME", str(home))
        yield home
