#pragma once

#include "cuda/hopper/wgmma.cuh"

namespace flash_dmattn::cuda {

// A 16-bit tile in panels of 64 columns (wgmma.cuh). The last panel has room for 64 columns even if the tile has fewer:
// the TMA unit fills them with zeros, and nothing reads them.
template <int Rows, int Columns>
struct PanelTile {
  static constexpr int rows = Rows;
  static constexpr int columns = Columns;
  static constexpr int chunks = Columns / 8;  // 16-byte chunks of a row
  static constexpr int panels = (Columns + panel_columns - 1) / panel_columns;
  static constexpr int panel_bytes = Rows * panel_row_bytes;
  static constexpr int bytes = panels * panel_bytes;

  // The offset in the tile of a 16-byte chunk of a row.
  static __device__ std::uint32_t offset(int row, int chunk) {
    constexpr int panel_chunks = panel_row_bytes / 16;
    return static_cast<std::uint32_t>(chunk / panel_chunks * panel_bytes + row * panel_row_bytes +
                                      ((chunk ^ row) % panel_chunks) * 16);
  }
};

}  // namespace flash_dmattn::cuda
