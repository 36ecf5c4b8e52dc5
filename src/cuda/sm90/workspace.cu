#include "cuda/sm90/launch.h"

namespace flash_dmattn::cuda::sm90 {

ForwardWorkspace::ForwardWorkspace(const ForwardParams& p, WorkspaceAllocator& workspace) {
  const Shape& shape = p.shape;
  const ScoreParams& score = p.score;
  const bool per_batch =
      score.mask.batch != 0 || score.bias.batch != 0 || score.intervals.stride_batch != 0;
  batch = per_batch ? shape.batch : 1;
  range_heads = score.intervals.stride_head != 0 ? shape.heads_kv : 1;
  if (score.mask.head_q != 0 || score.bias.head_q != 0) {
    bias_heads = shape.heads_q;
  } else if (score.mask.head_kv != 0 || score.bias.head_kv != 0) {
    bias_heads = shape.heads_kv;
  }
  info.padded_keys = KeyInfo::padded(shape.seqlen_k);
  const std::int64_t keys = info.padded_keys;
  info.ranges = workspace.take<KeyInterval>(keys * batch * range_heads);
  info.biases = workspace.take<float>(keys * batch * bias_heads);
  if (batch > 1) {
    info.range_batch = keys * range_heads;
    info.bias_batch = keys * bias_heads;
  }
  if (range_heads > 1) info.range_head = keys;
  if (bias_heads > 1) (bias_heads == shape.heads_q ? info.bias_head_q : info.bias_head_kv) = keys;
  next_work = workspace.take<int>(1);
  needs_fix = workspace.take<std::uint32_t>(1);
}

}  // namespace flash_dmattn::cuda::sm90
