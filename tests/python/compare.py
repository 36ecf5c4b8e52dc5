from flash_dmattn.check.compare import *  # noqa: F403
