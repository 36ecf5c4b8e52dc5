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

// Rows that were written, for the kernel that reads them.
inline InputRows rows_read(const OutputRows& rows) {
  return {rows.data, rows.batch, rows.row, rows.head, rows.aligned, rows.row_step};
}

// The way in which the main loop's copy of a tensor differs from the tensor.
struct SourceForm {
  std::uint32_t kept_bits = 0xffffffff;  // as in CopyRows
  std::uint32_t flipped_bits = 0;

  bool changes() const { return kept_bits != 0xffffffff || flipped_bits != 0; }
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
             .kept_bits = form.kept_bits,
             .flipped_bits = form.flipped_bits},
        copied(form.changes() || !has_tensor_map(copy.from, seqlen, heads, shape.batch)) {}

  void place(const Shape& shape, WorkspaceAllocator& workspace) {
    if (copied) copy.to = dense_rows(shape, copy.seqlen, copy.heads, copy.head_dim, workspace);
  }

  // The rows that the kernels read.
  InputRows rows() const {
    if (!copied) return copy.from;
    return rows_read(copy.to);
  }

  void make(cudaStream_t stream) const {
    if (copied) for_each(copy.items(), copy, stream);
  }
};

// A gradient of keys, or memory for a dense copy if its rows are unaligned (rows of slots must be aligned). When the
// workspace is sized without outputs, the alignment is unknown.
struct Sink {
  OutputRows original;
  OutputRows rows;  // written by the kernels
  int columns;      // the head dim of k, or of v
  bool copied;

  Sink(const OutputRows& to, int dim, bool needs_alignment) : original(to), rows(to), columns(dim) {
    const bool fits = to.data != nullptr && (to.aligned || !needs_alignment);
    copied = needs_alignment && !fits;
  }

  void place(const Shape& shape, WorkspaceAllocator& workspace) {
    if (!copied) return;
    rows = dense_rows(shape, shape.seqlen_k, shape.heads_kv, columns, workspace);
    if (original.data == nullptr) rows.data = nullptr;
  }

  void store(const Shape& shape, cudaStream_t stream) const {
    if (original.data == nullptr || rows.data == original.data) return;
    const CopyRows body{.from = rows_read(rows),
                        .to = original,
                        .seqlen = shape.seqlen_k,
                        .heads = shape.heads_kv,
                        .batch = shape.batch,
                        .head_dim = columns};
    for_each(body.items(), body, stream);
  }
};

}  // namespace flash_dmattn::cuda::sm90
