#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "flash_dmattn/execution.h"
#include "flash_dmattn/problem.h"
#include "flash_dmattn/visibility.h"

// The caller states *what* is visible (visibility.h), the backend *how* its kernels visit it. A backend makes a
// schedule of a visibility before it computes: the keys that each tile of queries visits, or the queries that
// each block of keys visits. It is opaque, made by the backend that is going to use it, for one direction.
namespace flash_dmattn {

enum class Direction : std::uint8_t { forward, backward };

// A schedule, in memory of the caller. It may be empty: where every key is visible, where the backend needs
// none, or where it is quicker without.
class Schedule {
 public:
  bool empty() const;
  std::size_t bytes() const;  // of the memory that it is in
  // Whether calls of this direction take it. Some schedules serve both.
  bool serves(Direction direction) const;

 private:
  friend struct ScheduleContents;  // of the library
  alignas(8) std::array<std::byte, 384> contents_{};
};

// Bytes of the schedule. On a GPU a closed form of shapes and the bound of the intervals, which has to be known
// unless it is `consecutive`; the CPU reads the intervals. 0: the schedule is empty.
std::size_t schedule_size(const Problem& problem, const Visibility& visibility, Direction direction,
                          const Execution& execution, std::string_view backend = {});

std::size_t schedule_workspace_size(const Problem& problem, const Visibility& visibility,
                                    Direction direction, const Execution& execution,
                                    std::string_view backend = {});

// Builds the schedule into `memory`, of schedule_size bytes or more, aligned to workspace_alignment, which must
// stay valid as long as the schedule is used. The result does not depend on the number of workers. Throws
// InvalidArgument. On a GPU the call only enqueues work on execution.stream; intervals that break their bound
// make a schedule that lacks keys, but nothing is written outside `memory`.
Schedule build_schedule(const Problem& problem, const Visibility& visibility, Direction direction,
                        std::span<std::byte> memory, const Execution& execution,
                        std::string_view backend = {});

}  // namespace flash_dmattn
