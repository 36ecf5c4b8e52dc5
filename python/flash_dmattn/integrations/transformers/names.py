"""The names of attention implementations, and the keywords and attributes by which models pass state to their layers."""

NAME = "flash_dmattn"
# Names accepted for exact attention. A config stores the second: transformers 5 branches on "flash" in a name.
NAMES = (NAME, "dynamic_mask_attention")
# Implementations that a config stores; transformers has "doge_flex_attention". During continuous batching it is the second of
# each pair: with "flash" in a name transformers makes no mask of all pairs.
DOGE_NAMES = ("doge_dynamic_mask_attention", "doge_flash_dynamic_mask_attention")
SCORED_NAMES = ("learned_scores_attention", "learned_scores_flash_attention")
DOGE_NAME, BATCHED_DOGE = DOGE_NAMES
SCORED_NAME, BATCHED_SCORES = SCORED_NAMES
STORED_NAMES = (NAMES[-1], *DOGE_NAMES)

CONTEXT = "flash_dmattn_context"  # a DogeModel passes its layers a `doge.Context`
SCORED_CALL = "flash_dmattn_scores"  # a layer passes the attention function a `ScoredCall`
BATCH = "flash_dmattn_batch"  # a decoder passes its scored layers the `RaggedBatch` of a step
# The attribute of a decoder whose sequences are on several ranks; it passes its layers `context_parallel.PieceForward`.
PIECES = "flash_dmattn_pieces"
