from tests.pipeline.fixtures import (  # noqa: F401
    finished,
    finished_once,
    lean,
    one_measurement,
    saved_base,
    work,
)
