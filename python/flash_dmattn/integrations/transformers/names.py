"""The names of attention implementations, and the keywords and attributes by which models pass state to their layers."""

NAME = "flash_dmattn"
# Names accepted for exact attention. A config stores the second: transformers 5 branches on "flash" in a name.
NAMES = (NAME, "dynamic_mask_attention")
# Implementations that a config stores; transformers has "doge_flex_attention".
DOGE_NAME = "doge_dynamic_mask_attention"
SCORED_NAME = "learned_scores_attention"
STORED_NAMES = (NAMES[-1], DOGE_NAME)
ALL_STORED_NAMES = (*STORED_NAMES, SCORED_NAME)

CONTEXT = "flash_dmattn_context"  # a DogeModel passes its layers a `doge.Context`
SCORES = "flash_dmattn_scores"  # a layer passes the attention function a `ScoreCall`
# The attribute of a decoder whose sequences are on several ranks; it passes its layers `context_parallel.PieceForward`.
PIECES = "flash_dmattn_pieces"
