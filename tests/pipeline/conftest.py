from tests.pipeline.fixtures import (  # noqa: F401
    finished,
    finished_once,
    one_measurement,
    saved_base,
    work,
)
