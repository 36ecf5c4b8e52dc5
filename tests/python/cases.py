from flash_dmattn.check.cases import *  # noqa: F403
