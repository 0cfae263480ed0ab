"""MaxCompute (ODPS) tables are not read or written here; the modules that would do so if it were set up still load."""

from typing import NoReturn

from elasticdl.common.errors import UserError


def is_odps_configured() -> bool:
    return False


class ODPSWriter:
    """Can't be made."""

    def __init__(self, *args: object, **kwargs: object) -> NoReturn:
        raise UserError("MaxCompute tables are not supported; write the outputs to files, as with pyarrow")
