#include "selection/schedule_contents.h"

#include <cstring>
#include <type_traits>

namespace flash_dmattn {

ScheduleContents ScheduleContents::of(const Schedule& schedule) {
  static_assert(std::is_trivially_copyable_v<ScheduleContents>);
  static_assert(sizeof(ScheduleContents) <= sizeof(schedule.contents_) &&
                alignof(ScheduleContents) <= alignof(Schedule));
  ScheduleContents contents;
  std::memcpy(&contents, schedule.contents_.data(), sizeof(contents));
  return contents.empty() ? ScheduleContents{} : contents;
}

Schedule ScheduleContents::schedule() const {
  Schedule schedule;
  if (!empty()) std::memcpy(schedule.contents_.data(), this, sizeof(*this));
  return schedule;
}

bool Schedule::empty() const { return ScheduleContents::of(*this).empty(); }
std::size_t Schedule::bytes() const { return ScheduleContents::of(*this).bytes; }
bool Schedule::serves(Direction direction) const {
  return ScheduleContents::of(*this).serves(direction);
}

}  // namespace flash_dmattn
