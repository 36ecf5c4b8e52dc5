from flash_dmattn.check.oracle import *  # noqa: F403
