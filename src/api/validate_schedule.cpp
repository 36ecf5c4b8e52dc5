#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "api/validate.h"
#include "flash_dmattn/error.h"

namespace flash_dmattn {
namespace {

void check_built_for(std::string_view field, const std::string& got, const std::string& expected) {
  if (got == expected) return;
  throw InvalidArgument("schedule", "one built for " + std::string(field) + " " + got,
                        "one built for " + std::string(field) + " " + expected);
}

}  // namespace

Schedule stamped(ScheduleContents schedule, const Problem& p, const Backend& backend) {
  schedule.backend = backend.name;
  schedule.problem = p;
  return schedule.schedule();
}

void check_schedule(const Problem& p, const Schedule& given, Direction direction,
                    const Backend& backend) {
  const ScheduleContents schedule = ScheduleContents::of(given);
  const std::array shape = p.intervals_shape;
  if (!is_given(shape)) {
    if (schedule.empty()) return;
    throw InvalidArgument("schedule", "a schedule", "none without intervals");
  }
  if (schedule.empty()) {
    const bool has_tiles = has_elements(shape) && p.seqlen_q > 0;
    if (!has_tiles || !backend.needs_schedule) return;
    throw InvalidArgument("schedule", "none",
                          "the schedule of the intervals, as backend \"" +
                              std::string(backend.name) + "\" needs it (build_schedule)");
  }
  check_built_for("backend", std::string(schedule.backend), std::string(backend.name));
  if (!schedule.serves(direction)) {
    const bool forward = direction == Direction::forward;
    check_built_for("direction", name_of(forward ? Direction::backward : Direction::forward),
                    name_of(direction));
  }
  const Problem& built_for = schedule.problem;
  const auto check = [](std::string_view field, std::int64_t got, std::int64_t expected) {
    check_built_for(field, std::to_string(got), std::to_string(expected));
  };
  check("problem.causal", built_for.causal, p.causal);
  check("problem.batch", built_for.batch, p.batch);
  check("problem.heads_q", built_for.heads_q, p.heads_q);
  check("problem.heads_kv", built_for.heads_kv, p.heads_kv);
  check("problem.seqlen_q", built_for.seqlen_q, p.seqlen_q);
  check("problem.seqlen_k", built_for.seqlen_k, p.seqlen_k);
  check("problem.head_dim", built_for.head_dim, p.head_dim);
  check("problem.value_dim", value_dim_of(built_for), value_dim_of(p));
  check_built_for("problem.dtype", std::string(name_of(built_for.dtype)),
                  std::string(name_of(p.dtype)));
  check_built_for("problem.intervals_shape", shape_text(built_for.intervals_shape),
                  shape_text(p.intervals_shape));
}

}  // namespace flash_dmattn
