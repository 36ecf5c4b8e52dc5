#include "cuda/sm90/key_info.h"

namespace flash_dmattn::cuda::sm90 {

KeyInfo allocate_key_info(const Shape& shape, const ScoreParams& score,
                          WorkspaceAllocator& workspace, bool has_recent_biases,
                          bool has_caller_biases) {
  KeyInfo info;
  const auto key_broadcast = [](const Broadcast& b) { return b.dense ? Broadcast{} : b; };
  const Broadcast mask = key_broadcast(score.mask);
  const Broadcast bias = key_broadcast(score.bias);
  const bool per_batch = mask.batch != 0 || bias.batch != 0 || score.intervals.stride_batch != 0;
  info.batch = per_batch ? shape.batch : 1;
  const bool per_head = score.intervals.stride_head != 0;
  info.range_heads = per_head ? shape.heads_kv : 1;
  if (mask.head_q != 0 || bias.head_q != 0) {
    info.bias_heads = shape.heads_q;
  } else if (mask.head_kv != 0 || bias.head_kv != 0) {
    info.bias_heads = shape.heads_kv;
  }
  info.padded_keys = KeyInfo::padded(shape.seqlen_k);
  const std::int64_t keys = info.padded_keys;
  info.ranges = workspace.take<KeyInterval>(keys * info.batch * info.range_heads);
  const std::int64_t biases = keys * info.batch * info.bias_heads;
  if (has_recent_biases && score.bias_delay != 0) info.recent = biases;
  if (has_caller_biases && score.bias_delay == 0) info.caller_biases = biases;
  info.biases = workspace.take<float>(biases + info.recent + info.caller_biases);
  if (info.batch > 1) {
    info.range_batch = keys * info.range_heads;
    info.bias_batch = keys * info.bias_heads;
  }
  if (info.range_heads > 1) info.range_head = keys;
  if (info.bias_heads > 1)
    (info.bias_heads == shape.heads_kv ? info.bias_head_kv : info.bias_head_q) = keys;
  return info;
}

}  // namespace flash_dmattn::cuda::sm90
