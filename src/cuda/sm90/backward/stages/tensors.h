#pragma once

#include "cuda/attention/problem.h"
#include "cuda/hopper/tensor_map.h"
#include "cuda/primitives/launch.h"
#include "cuda/sm90/backward/stages/copies.cuh"

// Copies of a call's tensors for its main loop.
namespace flash_dmattn::cuda::sm90 {

// Allocates [B, S, H, dim] without gaps in the workspace.
inline OutputRows dense_rows(const Shape& shape, int seqlen, int heads, int dim,
                             WorkspaceAllocator& workspace) {
  OutputRows rows;
  rows.row_step = heads * dim * 2;
  rows.row = rows.row_step;
  rows.head = dim * 2;
  rows.batch = rows.row * seqlen;
  rows.aligned = true;
  rows.data = workspace.take<std::byte>(rows.batch * shape.batch);
  return rows;
}

// The way in which the main loop's copy of a tensor differs from the tensor.
struct SourceForm {
  ListedKeys list = {};                  // the copy has only their rows
  std::uint32_t kept_bits = 0xffffffff;  // as in CopyRows
  std::uint32_t flipped_bits = 0;

  bool changes() const {
    return list.keys != nullptr || kept_bits != 0xffffffff || flipped_bits != 0;
  }
};

// A tensor, or memory for a dense copy if the TMA unit cannot read the tensor or the copy differs from it.
struct Source {
  CopyRows copy;
  bool copied;

  Source(const Shape& shape, const ConstTensor4& tensor, int seqlen, int heads, int dim,
         const SourceForm& form)
      : copy{.from = rows_of(tensor),
             .to = {},
             .seqlen = seqlen,
             .heads = heads,
             .batch = shape.batch,
             .head_dim = dim,
             .list = form.list,
             .kept_bits = form.kept_bits,
             .flipped_bits = form.flipped_bits},
        copied(form.changes() || !has_tensor_map(copy.from, seqlen, heads, shape.batch)) {}

  void place(const Shape& shape, WorkspaceAllocator& workspace) {
    if (copied) copy.to = dense_rows(shape, copy.seqlen, copy.heads, copy.head_dim, workspace);
  }

  // The rows that the kernels read.
  InputRows rows() const {
    if (!copied) return copy.from;
    const OutputRows& to = copy.to;
    return {to.data, to.batch, to.row, to.head, to.aligned, to.row_step};
  }

  void make(cudaStream_t stream) const {
    if (copied) for_each(copy.items(), copy, stream);
  }
};

// A gradient of keys, or memory for a dense copy if its rows are unaligned (rows of slots must be aligned) or if it
// belongs to the keys of a list. When the workspace is sized without outputs, the alignment is unknown.
struct Sink {
  OutputRows original;
  OutputRows rows;  // written by the kernels
  int columns;      // the head dim of k, or of v
  bool copied;

  Sink(const OutputRows& to, int dim, bool needs_alignment, bool listed)
      : original(to), rows(to), columns(dim) {
    const bool fits = to.data != nullptr && (to.aligned || !needs_alignment);
    copied = listed || (needs_alignment && !fits);
  }

  void place(const Shape& main_loop, WorkspaceAllocator& workspace) {
    if (!copied) return;
    rows = dense_rows(main_loop, main_loop.seqlen_k, main_loop.heads_kv, columns, workspace);
    if (original.data == nullptr) rows.data = nullptr;
  }

  // `shape` is the shape of the call, with all keys.
  void store(const Shape& shape, const ListedKeys& list, cudaStream_t stream) const {
    if (original.data == nullptr || rows.data == original.data) return;
    const ScatterRows body{rows, original, shape, columns, list};
    for_each(body.items(), body, stream);
  }
};

}  // namespace flash_dmattn::cuda::sm90
